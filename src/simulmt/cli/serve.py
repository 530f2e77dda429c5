"""The command `simulmt serve`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simulmt.errors import ConfigError, needs_extra

if TYPE_CHECKING:
    from simulmt.serve.access import Limits


def serve(
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME_OR_DIR",
            help="Name of a shipped model, or path of a bundle; repeatable.",
            show_default="all shipped models",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to bind; 0.0.0.0 for all interfaces.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port to bind; 0 for a free one.")] = 8000,
    api_keys_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File of API keys, one per line. Default: no key needed."),
    ] = None,
    origin: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="Allowed origin of web pages, such as https://example.org; repeatable."),
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=NUMBER", help="Change a limit, such as streams=500; docs/protocol.md lists them."),
    ] = None,
    open_metrics: Annotated[bool, typer.Option("--open-metrics", help="Serve /metrics without an API key.")] = False,
    room_keys: Annotated[bool, typer.Option("--room-keys", help="Require an API key from viewers of rooms.")] = False,
    recogniser: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[LANGUAGE=]NAME[:DIR]",
            help="Recognise speech: moonshine, moonshine:DIR, de=vosk:DIR, de=sherpa:DIR, or none; repeatable.",
            show_default="moonshine, if it is installed",
        ),
    ] = None,
    workers: Annotated[
        int, typer.Option(min=0, help="Worker processes.", show_default="one per core on Linux, else 1")
    ] = 0,
    threads: Annotated[
        int, typer.Option(min=0, help="CPU threads of each worker.", show_default="the cores, divided by the workers")
    ] = 0,
) -> None:
    """Serve live translation: a web page, a WebSocket for programs, an HTTP API.

    Ctrl-C or SIGTERM lets open streams finish first; a second one ends them at once.

    \b
    Examples:
      simulmt serve
      simulmt serve --model en-zh --model ./my-bundle --port 9000
      simulmt serve --host 0.0.0.0 --api-keys-file keys.txt --limit streams=500
    """
    import sys

    from simulmt.files import cores

    with needs_extra("simulmt serve", "serve"):
        from simulmt.runtime.bundle import default_names
        from simulmt.serve.access import ApiKeys
        from simulmt.serve.app import Settings
        from simulmt.serve.audio import find_recognisers
        from simulmt.serve.server import run, set_up_logging

    set_up_logging()
    workers = workers or (cores() if sys.platform == "linux" else 1)  # others do not balance SO_REUSEPORT
    settings = Settings(
        models=tuple(model or default_names()),
        host=host,
        limits=_limits(limit or []),
        keys=ApiKeys.read(api_keys_file) if api_keys_file else ApiKeys(),
        origins=tuple(origin or ()),
        threads=threads or max(1, cores() // workers),
        open_metrics=open_metrics,
        room_keys=room_keys,
        recognisers=find_recognisers(recogniser or []),
    )
    run(settings, port, workers)


def _limits(assignments: list[str]) -> Limits:
    from simulmt.config import build, override
    from simulmt.serve.access import Limits

    for assignment in assignments:
        if "=" not in assignment:
            raise ConfigError(f"--limit {assignment}: expected NAME=NUMBER, for example streams=500")
    return build(Limits, override({}, assignments), "--limit")
