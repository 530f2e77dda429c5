"""The command `simulmt serve`: live translation for many clients over the network."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simulmt.cli import panels
from simulmt.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from simulmt.serve.limits import Limits


def register(app: typer.Typer) -> None:
    """Add this module's command to the application."""
    app.command(rich_help_panel=panels.TRANSLATE)(serve)


def serve(
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME_OR_DIR",
            help="A shipped model, or the directory of any; may be repeated.",
            show_default="all shipped ones, toy only where it is alone",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 is open to the network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="0 takes a free one.")] = 8000,
    api_keys_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keys that open the server, one a line; else it is open.")
    ] = None,
    origin: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="A site whose pages may use the server, such as https://example.org."),
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=NUMBER", help="Change a limit, such as streams=500; docs/protocol.md has them all."),
    ] = None,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0 takes all cores but one.")] = 0,
) -> None:
    """Serve live translation: a page to try, a WebSocket for programs, an HTTP API.

    Ctrl-C or SIGTERM lets open streams end well; a second one ends them at once.

    \b
    Examples:
      simulmt serve
      simulmt serve --model en-zh --model ./my-bundle --port 9000
      simulmt serve --host 0.0.0.0 --api-keys-file keys.txt --limit streams=500
    """
    import logging

    try:
        from simulmt.serve.access import ApiKeys
        from simulmt.serve.app import create_app
        from simulmt.serve.models import default_models
        from simulmt.serve.server import run
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("simulmt"):
            raise
        raise MissingExtraError("simulmt serve", "serve") from None

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    limits = _limits(limit or [])
    keys = ApiKeys.read(api_keys_file) if api_keys_file else ApiKeys()
    app = create_app(model or default_models(), limits, keys, origin or (), threads, host)
    run(app, host, port)


def _limits(assignments: list[str]) -> Limits:
    from simulmt.config import build, override
    from simulmt.serve.limits import Limits

    for assignment in assignments:
        if "=" not in assignment:
            raise ConfigError(f"--limit {assignment}: expected NAME=NUMBER, for example streams=500")
    return build(Limits, override({}, assignments), "--limit")
