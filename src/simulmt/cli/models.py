"""The commands `simulmt models ...`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from simulmt.errors import BundleError

if TYPE_CHECKING:
    from simulmt.runtime.bundle import Bundle

Name = Annotated[str, typer.Argument(help="Name of a shipped model, or path of a bundle.", show_default=False)]

LISTED = ("model", "languages", "kind", "size", "delays", "default")

app = typer.Typer(name="models", invoke_without_command=True)


@app.callback()
def models(context: typer.Context) -> None:
    """List the installed models; show or verify one.

    \b
    Examples:
      simulmt models
      simulmt models show en-zh
      simulmt models verify ./my-bundle
    """
    from rich.console import Console
    from rich.table import Table

    from simulmt.runtime.bundle import SHIPPED, Bundle, shipped_names

    if context.invoked_subcommand:
        return
    names = shipped_names()
    if not names:
        typer.echo("no models installed; create one with simulmt export", err=True)
        return
    table = Table(*LISTED, box=None)
    for name in names:
        try:
            properties = _properties(Bundle(SHIPPED / name))
        except BundleError as error:  # still list the others
            typer.echo(f"simulmt: {error}", err=True)
        else:
            table.add_row(*(properties[label] for label in LISTED))
    Console().print(table)


@app.command()
def show(name: Name) -> None:
    """Show a model's properties and its card."""
    from simulmt.runtime.bundle import CARD, Bundle, find

    bundle = Bundle(find(name))
    for label, value in _properties(bundle).items():
        typer.echo(f"{label:<16}{value}")
    card = bundle.directory / CARD
    if card.exists():
        typer.echo(f"\n{card.read_text(encoding='utf-8').rstrip()}")


@app.command()
def verify(name: Name) -> None:
    """Verify the checksums of a model's files."""
    from simulmt.runtime.bundle import Bundle, find

    bundle = Bundle(find(name))
    bundle.verify()
    typer.echo(f"{bundle.name}: all checksums match")


@app.command()
def path(name: Name) -> None:
    """Print the directory of a model."""
    from simulmt.runtime.bundle import find

    typer.echo(str(find(name)))


def _properties(bundle: Bundle) -> dict[str, str]:
    config = bundle.config
    size = sum(path.stat().st_size for path in bundle.directory.iterdir() if path.is_file())
    return {
        "model": bundle.name,
        "languages": f"{config.source_language} to {config.target_language}",
        "kind": f"{config.kind} {config.precision}",
        "size": f"{size / 1e6:.1f} MB",
        "delays": ", ".join(map(str, config.delays)) or "full sentences",
        "default": str(config.default_delay or "-"),
        "look-ahead": "whole words" if config.whole_words else "pieces",
        "vocabularies": f"{bundle.source.size} and {bundle.target.size} pieces",
        "directory": str(bundle.directory),
    }
