"""The command line interface.

Handlers import what they need when they run, so `simulmt --help` is fast and `simulmt translate` never loads PyTorch.

Exit codes: 0 success; 1 failure, including missing or unusable files; 2 invalid options or settings; 130 and 143
stopped by Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import inspect
import os
import sys
from typing import Annotated, Any

import typer

from simulmt import __version__
from simulmt.cli import evaluation, live, recipes, rewriting, training
from simulmt.cli.usage import Command, Group
from simulmt.errors import ConfigError, SimulmtError

# Typer has moved this class between versions; find it by a subclass that has not moved.
UsageError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

app = typer.Typer(
    name="simulmt",
    cls=Group,
    help="Simultaneous machine translation: live, append-only, on a CPU.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
COMMANDS = {
    "Translate": (live.translate, live.demo, live.bench, live.listen, live.serve, live.models_app),
    "Train": (
        training.synthetic,
        training.prepare,
        training.train,
        training.sweep,
        training.average,
        training.grow,
        training.export,
        recipes.run,
        rewriting.app,
    ),
    "Evaluate": (
        evaluation.evaluate,
        evaluation.compare,
        evaluation.plot,
        evaluation.report,
        evaluation.anticipation,
        evaluation.analyse,
    ),
}


def _reflow(docstring: str | None) -> str:
    """Join the lines of each paragraph of a docstring, except those marked with \\b, so that help can be rewrapped."""
    paragraphs = inspect.cleandoc(docstring or "").split("\n\n")
    return "\n\n".join(each if each.startswith("\b") else each.replace("\n", " ") for each in paragraphs)


for panel, commands in COMMANDS.items():
    for command in commands:
        if isinstance(command, typer.Typer):
            app.add_typer(command, cls=Group, rich_help_panel=panel)
            for inner in command.registered_commands:
                inner.cls = Command
                inner.help = _reflow(inner.callback and inner.callback.__doc__)
        else:
            app.command(cls=Command, rich_help_panel=panel, help=_reflow(command.__doc__))(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"simulmt {__version__}")
        raise typer.Exit


@app.callback()
def options(
    _debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Accept options before the command; `main` handles --debug."""


def main() -> None:
    """Run a command; print errors as one line, and ignore closed pipes and Ctrl-C."""
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except UsageError as error:
        message = error.format_message()
        if message:  # empty after showing the help
            command = error.ctx.command_path if error.ctx else "simulmt"
            advice = "" if message.endswith("?") else f"; see {command} --help"
            print(f"simulmt: {message.rstrip('.')}{advice}", file=sys.stderr)
        sys.exit(2)
    except (typer.Abort, KeyboardInterrupt):  # KeyboardInterrupt if Ctrl-C is pressed twice
        sys.exit(130)
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):
            _discard_output()  # the reader is gone
            sys.exit(0)
        raise
    except (SimulmtError, OSError) as error:
        if "--debug" in sys.argv[1:2]:
            raise
        message = _describe(error) if isinstance(error, OSError) else error
        print(f"simulmt: {message}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)


def _describe(error: OSError) -> str:
    place = "standard output" if _is_output_closed() else error.filename
    reason = error.strerror or str(error)
    return f"{place}: {reason}" if place else reason


def _is_output_closed() -> bool:
    """Return whether standard output is closed; if so, discard further output."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        _discard_output()
        return True
    return False


def _discard_output() -> None:
    """Redirect standard output to /dev/null, so that closing it does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
