"""The ASGI application: its settings, its parts, and its routes to WebSockets, HTTP API and pages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

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

from simulmt.config import build, require
from simulmt.runtime.bundle import default_names, find
from simulmt.serve.access import ALONE, ApiKeys, Authenticator, Counters, Limits, Origins, Peers
from simulmt.serve.audio import RecogniserPool
from simulmt.serve.http import HttpApi, error_response
from simulmt.serve.models import Metrics, load_models
from simulmt.serve.rooms import Rooms
from simulmt.serve.sessions import Sessions
from simulmt.serve.websocket import StreamConnection, ViewerConnection, publish

STATIC = Path(__file__).parent / "static"
PAGES = {"/": "index.html", "/captions": "captions.html", "/captions/{name}": "captions.html"}

# The pages are self-contained: nothing is loaded from, or sent to, another host.
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
        "connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True)
class Settings:
    """The settings of a server."""

    models: tuple[str, ...]  # names or paths
    host: str = "0.0.0.0"  # address to listen on; on loopback, pages loaded under other names are refused
    limits: Limits = field(default_factory=Limits)
    keys: ApiKeys = field(default_factory=ApiKeys)
    origins: tuple[str, ...] = ()
    threads: int = 0  # per worker; 0 uses OMP_NUM_THREADS, or all cores
    open_metrics: bool = False  # whether /metrics needs no key
    room_keys: bool = False  # whether viewers of rooms need a key
    recognisers: Mapping[str, str] = field(default_factory=dict)  # names by language

    def __post_init__(self) -> None:
        """Validate settings before any worker is started."""
        Origins(self.origins)
        for model in self.models:
            find(model)


class Service:
    """The parts of a server that its endpoints share."""

    def __init__(self, settings: Settings, peers: Peers) -> None:
        self.settings = settings
        self.limits = settings.limits
        self.peers = peers
        self.metrics = Metrics()
        self.counters = Counters(peers)
        self.recognisers = RecogniserPool(settings.recognisers, self.limits, self.metrics, self.counters)
        if peers.worker == 0:  # report at the start what cannot be loaded; the other workers may never need it
            self.recognisers.load()
        inline = peers.workers > 1
        self.models = load_models(settings.models, self.metrics, settings.threads, inline, settings.recognisers)
        self.sessions = Sessions(self.limits, self.metrics, self.counters, peers)
        self.rooms = Rooms(self.limits, peers, self.counters)
        self.authenticator = Authenticator(settings.keys, self.counters)
        host = settings.host if settings.keys.are_optional else None  # keys already protect against DNS rebinding
        self.origins = Origins(settings.origins, host)


def create_app(settings: Settings, peers: Peers = ALONE) -> Starlette:
    """Create the application; `app.state.service` holds its parts."""
    service = Service(settings, peers)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        service.sessions.close()
        service.recognisers.close()

    app = Starlette(
        routes=[
            WebSocketRoute("/v1/stream", lambda websocket: StreamConnection(websocket, service).run()),
            WebSocketRoute("/v1/rooms/{name}", lambda websocket: ViewerConnection(websocket, service).run()),
            WebSocketRoute("/internal/publish", lambda websocket: publish(websocket, service)),
            *HttpApi(service).routes(),
            *(Route(path, partial(_page, name)) for path, name in PAGES.items()),
            Mount("/static", StaticFiles(directory=STATIC, check_dir=False)),
        ],
        middleware=[
            Middleware(HeadersMiddleware),
            Middleware(
                CORSMiddleware,
                allow_origins=list(service.origins.allowed),
                allow_methods=["GET", "POST"],
                allow_headers=["Authorization", "Content-Type"],
            ),
        ],
        exception_handlers={HTTPException: _error_handler},
        lifespan=lifespan,
    )
    app.state.service = service
    return app


class HeadersMiddleware:
    """Adds the same headers to every HTTP response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self._app(scope, receive, send_with_headers if scope["type"] == "http" else send)


async def _page(name: str, _: Request) -> Response:
    return FileResponse(STATIC / name)


async def _error_handler(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return error_response(error.detail, error.status_code)


@dataclass(frozen=True)
class ClusterConfig:
    """The arguments of `ray_app`."""

    models: tuple[str, ...] = ()  # names or paths, separated by commas; empty for all shipped models
    streams_per_replica: int = 100  # target; above it Ray starts another replica
    min_replicas: int = 1
    max_replicas: int = 4
    cpus: int = 1  # of a replica

    def __post_init__(self) -> None:
        require(self.streams_per_replica >= 1, f"streams_per_replica must be 1 or more, got {self.streams_per_replica}")
        low, high = self.min_replicas, self.max_replicas
        require(1 <= low <= high, f"min_replicas must be in 1..max_replicas, got {low} and {high}")
        require(self.cpus >= 1, f"cpus must be 1 or more, got {self.cpus}")


def ray_app(arguments: dict[str, str]) -> Any:
    """Build the application for a Ray cluster, scaled by the number of streams (extra `ray`).

        serve run simulmt.serve.app:ray_app models=en-zh streams_per_replica=100 max_replicas=8

    Every replica is a whole server. A client that loses its connection may reach another replica, which does not know
    its session; it then starts again and sends its messages again, as after a restart.
    """
    from ray import serve

    names = [name for name in arguments.get("models", "").split(",") if name]
    numbers = {key: int(value) for key, value in arguments.items() if key != "models"}
    config = build(ClusterConfig, {"models": names, **numbers}, "serve run")
    deployment = serve.deployment(
        name="simulmt",
        # An open WebSocket is an ongoing request, so this scales by live streams.
        autoscaling_config={
            "min_replicas": config.min_replicas,
            "max_replicas": config.max_replicas,
            "target_ongoing_requests": config.streams_per_replica,
        },
        max_ongoing_requests=2 * config.streams_per_replica,
        ray_actor_options={"num_cpus": config.cpus},
        graceful_shutdown_timeout_s=Limits().drain_seconds,
        health_check_period_s=5,
    )
    return deployment(serve.ingress(lambda: _replica(config))()).bind()


def _replica(config: ClusterConfig) -> Starlette:
    limits = Limits(streams=2 * config.streams_per_replica, streams_per_address=2 * config.streams_per_replica)
    return create_app(Settings(config.models or tuple(default_names()), limits=limits, threads=config.cpus))
