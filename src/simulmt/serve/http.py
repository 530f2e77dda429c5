"""The HTTP part: translation as users of LibreTranslate know it, and what a server says of itself."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import parse_qsl

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from simulmt.config import build
from simulmt.errors import ConfigError
from simulmt.serve import openapi, protocol
from simulmt.serve.connection import Service
from simulmt.serve.models import Description, Model, log_failure

AUTO = "auto"  # the source language that the target leaves as the only one
LANGUAGE_NAMES = {"de": "German", "en": "English", "zh": "Chinese"}
FORM = "application/x-www-form-urlencoded"
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class TranslateRequest:
    """The body of POST /translate."""

    q: str | tuple[str, ...]
    source: str
    target: str
    format: Literal["text"] = "text"
    delay: int | None = None
    api_key: str | None = None
    alternatives: int = 0  # which clients of LibreTranslate send; there are none


class HttpApi:
    """The endpoints, as routes."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._requests = asyncio.Semaphore(service.limits.requests)

    def routes(self) -> list[Route]:
        return [
            Route("/translate", self.translate, methods=["POST"]),
            Route("/languages", self.languages),
            Route("/v1/models", self.models),
            Route("/v1/schema", self.schema),
            Route("/openapi.json", self.openapi),
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/metrics", self.metrics),
        ]

    async def translate(self, request: Request) -> Response:
        try:
            response: Response = JSONResponse({"translatedText": await self._translate(request)})
        except HTTPException as error:
            response = error_response(error.detail, error.status_code)
        self._service.metrics.requests.labels(str(response.status_code)).inc()
        return response

    async def _translate(self, request: Request) -> str | list[str]:
        if self._service.sessions.is_draining:
            raise HTTPException(503, "this server is shutting down")
        if not self._service.pages.admit(request.headers):
            raise HTTPException(403, "pages of another origin may not use this server; --origin lets them in")
        wanted = await self._wanted(request)
        if not self._service.keys.admit(wanted.api_key, request.headers):
            raise HTTPException(403, "this server asks for an API key, and this is none of its keys")
        model = self._model_for(wanted)
        try:
            model.check_delay(wanted.delay)
        except protocol.RefusedError as refusal:
            raise HTTPException(400, str(refusal)) from None
        if self._requests.locked():
            raise HTTPException(429, f"{self._service.limits.requests} translations are under way; try again later")
        async with self._requests:
            try:
                if isinstance(wanted.q, str):
                    return await model.translate(wanted.q, wanted.delay)
                return [await model.translate(text, wanted.delay) for text in wanted.q]
            except Exception as error:
                log_failure(model, error)
                raise HTTPException(500, "a fault of the server") from None

    async def _wanted(self, request: Request) -> TranslateRequest:
        body = await self._body(request)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        try:
            table = _form(body) if kind == FORM else json.loads(body)
        except (ValueError, RecursionError):
            raise HTTPException(400, "the body is neither JSON nor a form in UTF-8") from None
        if not isinstance(table, dict):
            raise HTTPException(400, "the body must be a JSON object")
        try:
            return build(TranslateRequest, table, "body")
        except ConfigError as error:
            raise HTTPException(400, protocol.quotable(str(error))) from None

    async def _body(self, request: Request) -> bytes:
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > self._service.limits.message_bytes:
                raise HTTPException(413, f"a request may have {self._service.limits.message_bytes} bytes")
        return body

    def _model_for(self, wanted: TranslateRequest) -> Model:
        fitting = [
            model
            for model in self._service.models.values()
            if model.description.target == wanted.target and wanted.source in (model.description.source, AUTO)
        ]
        if not fitting:
            pairs = ", ".join(f"{each.source} to {each.target}" for each in self._descriptions())
            found = f"{wanted.source!r} to {wanted.target!r}"
            raise HTTPException(400, protocol.quotable(f"no model translates {found}; there are {pairs}"))
        if wanted.source == AUTO and len({model.description.source for model in fitting}) > 1:
            raise HTTPException(400, f"several languages can be translated to {wanted.target}: say which is the source")
        return fitting[0]

    async def languages(self, _: Request) -> Response:
        targets: dict[str, list[str]] = {}
        for each in self._descriptions():
            targets.setdefault(each.source, []).append(each.target)
        return JSONResponse(
            [
                {"code": code, "name": LANGUAGE_NAMES.get(code, code.title()), "targets": sorted(set(reachable))}
                for code, reachable in targets.items()
            ]
        )

    async def models(self, _: Request) -> Response:
        return JSONResponse({"models": [dataclasses.asdict(each) for each in self._descriptions()]})

    async def schema(self, _: Request) -> Response:
        return JSONResponse(protocol.schema())

    async def openapi(self, _: Request) -> Response:
        return JSONResponse(openapi.document(self._descriptions()))

    async def health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        if self._service.sessions.is_draining:
            return JSONResponse({"status": "draining"}, status_code=503)
        return JSONResponse({"status": "ready"})

    async def metrics(self, _: Request) -> Response:
        return Response(self._service.metrics.text(), media_type=PROMETHEUS)

    def _descriptions(self) -> list[Description]:
        return [model.description for model in self._service.models.values()]


def error_response(message: str, status: int) -> Response:
    """An error as LibreTranslate tells it."""
    return JSONResponse({"error": message}, status_code=status)


def _form(body: bytes) -> dict[str, Any]:
    pairs = parse_qsl(body.decode("utf-8"), keep_blank_values=True, strict_parsing=True, errors="strict")
    table: dict[str, Any] = dict(pairs)
    texts = [value for name, value in pairs if name == "q"]
    if len(texts) > 1:
        table["q"] = texts
    for name in ("delay", "alternatives"):
        if name in table:
            table[name] = int(table[name])
    return table
