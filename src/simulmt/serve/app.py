"""The application: the WebSocket, the HTTP part and the pages, put together."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from simulmt.serve.access import ApiKeys, Pages
from simulmt.serve.connection import Connection, Service
from simulmt.serve.http import HttpApi, error_response
from simulmt.serve.limits import Limits
from simulmt.serve.metrics import Metrics
from simulmt.serve.models import load_models
from simulmt.serve.sessions import Sessions

STATIC = Path(__file__).parent / "static"
PAGES = {"/": "index.html", "/captions": "captions.html"}

# The pages bring all that they need: nothing is loaded from, or sent to, another host.
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
        "connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def create_app(
    models: Sequence[str | Path],
    limits: Limits | None = None,
    keys: ApiKeys | None = None,
    origins: Collection[str] = (),
    threads: int = 0,
    host: str | None = None,
) -> Starlette:
    """An ASGI application that serves models given by name or path; `app.state.service` is what it consists of.

    `host`, where it will listen, lets it tell its own pages from those that lead to it under another name.
    """
    metrics, limits, keys = Metrics(), limits or Limits(), keys or ApiKeys()
    sessions = Sessions(limits, metrics)
    loaded = load_models(models, metrics, threads)
    # Who has a key is let in under any name.
    pages = Pages(origins, host if keys.are_optional else None)
    service = Service(loaded, limits, metrics, sessions, keys, pages)

    async def stream(websocket: WebSocket) -> None:
        if not pages.admit(websocket.headers):
            await websocket.close()  # before it was accepted: the browser is told 403
            return
        await Connection(websocket, service).run()

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        sessions.close()

    app = Starlette(
        routes=[
            WebSocketRoute("/v1/stream", stream),
            *HttpApi(service).routes(),
            *(Route(path, _page(name)) for path, name in PAGES.items()),
            Mount("/static", StaticFiles(directory=STATIC, check_dir=False)),
        ],
        middleware=_middleware(pages.origins),
        exception_handlers={HTTPException: _answer_error},
        lifespan=lifespan,
    )
    app.state.service = service
    return app


def _middleware(origins: Collection[str]) -> list[Middleware]:
    chain = [Middleware(WithHeaders)]
    if origins:
        methods, headers = ["GET", "POST"], ["Authorization", "Content-Type"]
        chain.append(
            Middleware(CORSMiddleware, allow_origins=list(origins), allow_methods=methods, allow_headers=headers)
        )
    return chain


class WithHeaders:
    """Adds the same headers to every HTTP answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self._app(scope, receive, send_with_headers if scope["type"] == "http" else send)


def _page(name: str) -> Callable[[Request], Awaitable[Response]]:
    async def page(_: Request) -> Response:
        return FileResponse(STATIC / name)

    return page


async def _answer_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return error_response(error.detail, error.status_code)
