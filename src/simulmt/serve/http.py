"""The HTTP API, compatible with LibreTranslate: translate text and HTML, detect languages, describe the server.

Requests and responses are structs, which the OpenAPI document is generated from.
"""

from __future__ import annotations

import asyncio
import html
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterable
from contextlib import asynccontextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar
from urllib.parse import parse_qsl

import msgspec
from msgspec import Meta
from py3langid.langid import MODEL_FILE, LanguageIdentifier  # type: ignore[import-untyped]
from python_multipart.exceptions import FormParserError
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from simulmt import __version__
from simulmt.runtime.aio import running
from simulmt.serve import protocol
from simulmt.serve.access import Counted
from simulmt.serve.models import Model, ModelInfo, log_failure

if TYPE_CHECKING:
    from simulmt.serve.app import Service

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
NUMBERS = ("delay", "alternatives")  # form fields
CLIENT_CLOSED_REQUEST = 499  # never sent; counted in the metrics only
LANGUAGES = {"de": "German", "en": "English", "zh": "Chinese"}
TRADITIONAL_CHINESE = {"zt", "zh-hant", "zh-tw", "zh-hk", "zh-mo"}
MAX_SAMPLE_LENGTH = 2_000  # characters that language detection looks at
UNTRANSLATED = {"script", "style", "code"}  # HTML elements
PREFORMATTED = {"pre", "textarea"}  # their lines are translated one by one
RAW = {"script", "style"}  # hold text without markup, up to their end tag
VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}

AUTO = "auto"  # detect the source language
JSON, _URL_ENCODED, _MULTIPART = "application/json", "application/x-www-form-urlencoded", "multipart/form-data"

T = TypeVar("T")
ApiKey = Annotated[str | None, Meta(description="or send the header Authorization: Bearer KEY")]


class TranslateRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /translate."""

    q: Annotated[str | list[str], Meta(description="a text or several; each line is translated separately")]
    source: Annotated[str, Meta(description="a language, or auto to detect it")]
    target: str
    format: Literal["text", "html"] = "text"
    delay: Annotated[int | None, Meta(description="one of the model's delays; by default the largest")] = None
    api_key: ApiKey = None
    alternatives: Annotated[int, Meta(description="accepted for compatibility and ignored")] = 0


class DetectRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /detect."""

    q: Annotated[str, Meta(description="a text")]
    api_key: ApiKey = None


class Detection(msgspec.Struct, frozen=True):
    """A possible language of a text."""

    language: str
    confidence: Annotated[float, Meta(description="in percent", ge=0, le=100)]


class TranslateResponse(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """A translation for a text, a list of translations for a list of texts."""

    translated_text: str | list[str]
    detected_language: Annotated[Detection | None, Meta(description="only if the source was auto")] = None


class Language(msgspec.Struct, frozen=True):
    """A source language and what it can be translated to."""

    code: str
    name: str
    targets: list[str]


class Models(msgspec.Struct, frozen=True):
    """The models of this server."""

    models: list[ModelInfo]


class Status(msgspec.Struct, frozen=True):
    """The state of the server."""

    status: str


class ErrorResponse(msgspec.Struct, frozen=True):
    """A human-readable error message."""

    error: str


class HttpApi:
    """The HTTP endpoints."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._infos = [model.info for model in service.models.values()]
        self._detector = Detector(info.source for info in self._infos)

    def routes(self) -> list[Route]:
        documents = {
            "/languages": _languages(self._infos),
            "/v1/models": Models(self._infos),
            "/v1/schema": protocol.schema(),
            "/openapi.json": openapi_document(self._infos),
            "/health": Status("ok"),
        }
        return [
            Route("/translate", self.translate, methods=["POST"]),
            Route("/detect", self.detect, methods=["POST"]),
            Route("/ready", self.ready),
            Route("/metrics", self.metrics),
            *(Route(path, partial(_document, content)) for path, content in documents.items()),
        ]

    async def translate(self, request: Request) -> Response:
        try:
            response = _json_response(await self._translate(request))
        except HTTPException as error:
            response = error_response(error.detail, error.status_code)
        self._service.metrics.requests.labels(str(response.status_code)).inc()
        return response

    async def _translate(self, request: Request) -> TranslateResponse:
        if self._service.sessions.is_draining:
            raise HTTPException(503, "the server is shutting down")
        body = await self._parse(request, TranslateRequest)
        await self._authenticate(request, body.api_key)
        texts = [body.q] if isinstance(body.q, str) else body.q
        model, detection = await self._model_for(body, texts)
        try:
            model.check_delay(body.delay)
        except protocol.RefusedError as refusal:
            raise HTTPException(400, str(refusal)) from None
        async with self._slot(_address(request)):
            translations = await _unless_disconnected(request, self._translate_all(model, texts, body))
        return TranslateResponse(translations[0] if isinstance(body.q, str) else translations, detection)

    async def _translate_all(self, model: Model, texts: list[str], body: TranslateRequest) -> list[str]:
        async def translate(text: str) -> str:
            return await model.translate(text, body.delay)

        try:
            if body.format == "html":
                return [await translate_html(text, translate) for text in texts]
            return [await translate(text) for text in texts]
        except Exception as error:
            log_failure(model, error)
            raise HTTPException(500, "internal server error") from None

    @asynccontextmanager
    async def _slot(self, address: str) -> AsyncIterator[None]:
        """Count a translation while it runs; refuse it above the limits."""
        limits, counters = self._service.limits, self._service.counters
        if counters.of(Counted.REQUESTS, address) >= limits.requests_per_address:
            limit = limits.requests_per_address
            raise HTTPException(429, f"too many translations from this address (limit {limit}); wait for one to end")
        if counters.total(Counted.REQUESTS) >= limits.requests:
            raise HTTPException(429, f"too many translations (limit {limits.requests}); try again later")
        counters.add(Counted.REQUESTS, address)
        try:
            yield
        finally:
            counters.add(Counted.REQUESTS, address, -1)

    async def _model_for(self, body: TranslateRequest, texts: list[str]) -> tuple[Model, Detection | None]:
        """Choose a model by the languages of a request, detecting the source language if it is not given."""
        source, target = base_code(body.source), base_code(body.target)
        candidates = {
            model.info.source: model for model in self._service.models.values() if model.info.target == target
        }
        detection = None
        if source == AUTO and candidates:
            detection = await self._detect_source(" ".join(texts), candidates)
            source = detection.language
        if source not in candidates:
            pairs = ", ".join(f"{info.source} to {info.target}" for info in self._infos)
            requested = f"{body.source!r} to {body.target!r}"
            raise HTTPException(400, protocol.sanitise_message(f"no model translates {requested}; available: {pairs}"))
        return candidates[source], detection

    async def _detect_source(self, text: str, candidates: dict[str, Model]) -> Detection:
        """Return the most likely of the candidates, with its confidence among all languages."""
        ranked = await asyncio.to_thread(self._detector.detect, text)
        found = next((found for found in ranked if found.language in candidates), None)
        if found is None and len(candidates) == 1:  # the detector does not know this language
            found = Detection(next(iter(candidates)), 0.0)
        if found is None:
            raise HTTPException(
                400, f"cannot detect the source language; set source to one of: {', '.join(candidates)}"
            )
        return found

    async def detect(self, request: Request) -> Response:
        body = await self._parse(request, DetectRequest)
        await self._authenticate(request, body.api_key)
        return _json_response(await asyncio.to_thread(self._detector.detect, body.q))

    async def _authenticate(self, request: Request, key: str | None) -> None:
        if not self._service.origins.admit(request.headers):
            raise HTTPException(403, "origin not allowed; to allow it, start the server with --origin")
        if not await self._service.authenticator.admit(key, request.headers, _address(request)):
            raise HTTPException(403, "missing or invalid API key; send it as api_key or as Authorization: Bearer KEY")

    async def _parse(self, request: Request, kind: type[T]) -> T:
        """Parse a JSON or form body."""
        body = await self._body(request)
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        try:
            if media_type == _URL_ENCODED:
                pairs = parse_qsl(body.decode(), keep_blank_values=True, strict_parsing=True, errors="strict")
                fields = _fields(pairs)
            elif media_type == _MULTIPART:
                fields = _fields(await _multipart(request, body))
            else:
                fields = msgspec.json.decode(body)
            return msgspec.convert(_with_whole_numbers(fields), kind)
        except (msgspec.DecodeError, ValueError, RecursionError, FormParserError, MultiPartException) as error:
            # curl sends data as URL-encoded unless told otherwise
            is_json = media_type == _URL_ENCODED and body.lstrip().startswith(b"{")
            hint = "; send JSON with Content-Type: application/json" if is_json else ""
            raise HTTPException(400, protocol.sanitise_message(f"invalid body: {error}{hint}")) from None

    async def _body(self, request: Request) -> bytes:
        body, max_bytes = b"", self._service.limits.message_bytes
        async for chunk in request.stream():
            body += chunk
            if len(body) > max_bytes:
                raise HTTPException(413, f"requests are limited to {max_bytes} bytes; send the text in parts")
        return body

    async def ready(self, _: Request) -> Response:
        if self._service.sessions.is_draining:
            return _json_response(Status("draining"), 503)
        return _json_response(Status("ready"))

    async def metrics(self, request: Request) -> Response:
        admit = self._service.authenticator.admit
        if not self._service.settings.open_metrics and not await admit(None, request.headers, _address(request)):
            return error_response(
                "missing or invalid API key; send Authorization: Bearer KEY, or start the server with --open-metrics",
                403,
            )
        return Response(self._service.metrics.text(), media_type=PROMETHEUS)


def _json_response(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type=JSON)


def error_response(message: str, status: int) -> Response:
    """Return an error in the format of LibreTranslate."""
    return _json_response(ErrorResponse(message), status)


async def _document(content: Any, _: Request) -> Response:
    return _json_response(content)


def _languages(models: Iterable[ModelInfo]) -> list[Language]:
    targets: dict[str, set[str]] = {}
    for model in models:
        targets.setdefault(model.source, set()).add(model.target)
    return [Language(code, LANGUAGES.get(code, code.title()), sorted(targets[code])) for code in targets]


def _address(request: Request) -> str:
    return request.client.host if request.client else ""


async def _unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine; cancel it if the client disconnects."""
    async with running(work, _wait_for_disconnect(request)) as tasks:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise HTTPException(CLIENT_CLOSED_REQUEST, "the client has disconnected")
        return tasks[0].result()


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _with_whole_numbers(body: Any) -> Any:
    """Convert 5.0 to 5: JSON Schema accepts both as integers."""
    if isinstance(body, dict):
        return {name: _with_whole_numbers(value) for name, value in body.items()}
    return int(body) if isinstance(body, float) and body.is_integer() else body


async def _multipart(request: Request, body: bytes) -> list[tuple[str, str]]:
    async def stream() -> AsyncIterator[bytes]:
        yield body

    form = await MultiPartParser(request.headers, stream(), max_files=0).parse()  # type: ignore[arg-type]
    return [(name, str(value)) for name, value in form.multi_items()]


def _fields(pairs: list[tuple[str, str]]) -> dict[str, Any]:
    """Collect the fields of a form; several texts become a list."""
    fields: dict[str, Any] = {name: float(value) if name in NUMBERS else value for name, value in pairs}
    texts = [value for name, value in pairs if name == "q"]
    if len(texts) > 1:
        fields["q"] = texts
    if len(fields) < len(pairs) - max(0, len(texts) - 1):
        raise ValueError("only q may be repeated")
    return fields


def base_code(code: str) -> str:
    """Reduce a language tag such as zh-Hans or de_AT to the code of the models, zh or de.

    Tags of traditional Chinese are kept, so that they match no model.
    """
    tag = code.lower().replace("_", "-")
    return tag if tag in TRADITIONAL_CHINESE else tag.partition("-")[0]


class Detector:
    """Offline language detection among a few languages."""

    def __init__(self, languages: Iterable[str]) -> None:
        self._languages = list(dict.fromkeys(languages))

    def detect(self, text: str) -> list[Detection]:
        """Return the languages with their confidence in percent, the most likely first."""
        if len(self._languages) == 1 or self._identifier is None:
            return [Detection(language, 100.0 / len(self._languages)) for language in self._languages]
        ranked = self._identifier.rank(text[:MAX_SAMPLE_LENGTH])
        return [Detection(language, round(100 * float(probability), 1)) for language, probability in ranked]

    @cached_property
    def _identifier(self) -> LanguageIdentifier | None:
        """The language identifier, restricted to the languages that it knows; None if it knows none of them."""
        identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
        known = [language for language in self._languages if language in identifier.labels]
        if not known:
            return None
        identifier.set_languages(known)
        return identifier


async def translate_html(text: str, translate: Callable[[str], Awaitable[str]]) -> str:
    """Translate each run of text between two tags separately, and in preformatted text each line.

    Text without letters, and in `translate="no"`, scripts, styles and code, is left alone.
    """
    parts = _Splitter(text).parts
    return "".join([await _translate_run(part, translate) if is_text else part for part, is_text in parts])


async def _translate_run(text: str, translate: Callable[[str], Awaitable[str]]) -> str:
    words = text.strip()
    start = text.index(words)
    translation = await translate(" ".join(words.split()))
    if words[-1].isalnum():  # a heading, or part of a sentence; models end everything with a full stop
        translation = translation.rstrip(".。")
    return f"{text[:start]}{html.escape(translation, quote=False)}{text[start + len(words) :]}"


_MARKUP = re.compile(  # a comment, the beginning of a tag, or a declaration; each may lack its end
    r"<!--(?:-?>|.*?(?:--!?>|\Z))|<(/?)([a-z][^\s/>]*)|<[!?/][^>]*>?", re.ASCII | re.IGNORECASE | re.DOTALL
)
_ATTRIBUTE = re.compile(  # or what separates attributes
    r"""[\s/]+|([^\s/>][^\s/>=]*)(?:\s*=\s*("[^"]*"|'[^']*'|(?!["'])[^\s>]*))?""", re.ASCII
)
_LONG_REFERENCE = re.compile(r"&#[0-9]{20,};?")  # no character; html.unescape fails on thousands of digits
_RAW_END = {name: re.compile(rf"</{name}[\s/>]", re.ASCII | re.IGNORECASE) for name in RAW}


class _Splitter:
    """Splits HTML into markup and text to translate, as browsers do.

    Markup without an end extends to the end of the text, so no markup is read more than a few times; html.parser reads
    all of the rest again for each of its beginnings.
    """

    def __init__(self, text: str) -> None:
        self.parts: list[tuple[str, bool]] = []  # and whether it is text
        self._untranslated, self._preformatted = _Nesting(), _Nesting()
        position = 0
        while markup := _MARKUP.search(text, position):
            self._add_text(text[position : markup.start()])
            position = self._read_tag(text, markup) if markup[2] else markup.end()
            self.parts.append((text[markup.start() : position], False))
        self._add_text(text[position:])

    def _read_tag(self, text: str, markup: re.Match[str]) -> int:
        """Return the end of a tag; that of a raw element includes its content."""
        position = markup.end()
        attributes: dict[str, str] = {}
        while item := _ATTRIBUTE.match(text, position):
            position = item.end()
            if item[1] is not None:
                attributes.setdefault(item[1].lower(), (item[2] or "").strip("\"'"))
        name, is_empty = markup[2].lower(), text[position - 1] == "/"
        if markup[1]:
            self._untranslated.close(name)
            self._preformatted.close(name)
        elif name not in VOID and not is_empty:
            is_marked = attributes.get("translate", "").lower() == "no"
            self._untranslated.open(name, is_marked or name in UNTRANSLATED)
            self._preformatted.open(name, name in PREFORMATTED)
            if name in RAW:
                end = _RAW_END[name].search(text, position)
                return end.start() if end else len(text)
        return min(position + 1, len(text))

    def _add_text(self, text: str) -> None:
        for line in text.splitlines(keepends=True) if self._preformatted.depth else [text]:
            words = html.unescape(_LONG_REFERENCE.sub("\ufffd", line))
            is_text = not self._untranslated.depth and any(map(str.isalnum, words))
            self.parts.append((words if is_text else line, is_text))


class _Nesting:
    """The depth of elements of some kind; inside the outermost one, only elements with its name count.

    So elements in it whose end tag was left out do no harm.
    """

    def __init__(self) -> None:
        self.depth = 0
        self._name = ""

    def open(self, name: str, is_of_kind: bool) -> None:
        if self.depth == 0 and is_of_kind:
            self._name = name
        if self._name == name:
            self.depth += 1

    def close(self, name: str) -> None:
        if self._name == name:
            self.depth -= 1
            self._name = name if self.depth else ""


_STRUCTS = (TranslateRequest, TranslateResponse, DetectRequest, Detection, Language, Models, Status, ErrorResponse)
_TRANSLATE_ERRORS = {
    400: "The request is invalid, or no model translates these languages.",
    403: "The API key is missing or invalid, or the origin is not allowed.",
    413: "The request is too long.",
    429: "Too many translations at once.",
    500: "Internal server error.",
    503: "The server is shutting down, or has too many connections.",
}
_DETECT_ERRORS = {status: _TRANSLATE_ERRORS[status] for status in (400, 403, 413, 503)}


def openapi_document(models: Collection[ModelInfo]) -> dict[str, Any]:
    """Return the OpenAPI document of a server with these models."""
    _, schemas = msgspec.json.schema_components(_STRUCTS, ref_template="#/components/schemas/{name}")
    _restrict(schemas["TranslateRequest"], models)
    forms = {name: _as_form(schemas[name]) for name in ("TranslateRequest", "DetectRequest")}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "simulmt",
            "version": __version__,
            "description": "Simultaneous translation. Live streams use the WebSocket /v1/stream, see /v1/schema.",
        },
        "components": {"schemas": {**schemas, **{f"{name}Form": form for name, form in forms.items()}}},
        "paths": {
            "/translate": _post(
                "Translate whole texts.", "TranslateRequest", _ref("TranslateResponse"), _TRANSLATE_ERRORS
            ),
            "/detect": _post("Detect the language of a text.", "DetectRequest", _list("Detection"), _DETECT_ERRORS),
            "/languages": _get("The source languages and their targets.", _list("Language")),
            "/v1/models": _get("The models.", _ref("Models")),
            "/v1/schema": _get("The JSON Schema of the WebSocket messages.", {"type": "object"}),
            "/health": _get("Whether the process is alive.", _ref("Status")),
            "/ready": _get("Whether new streams are accepted.", _ref("Status"), {503: "The server is shutting down."}),
            "/metrics": {
                "get": {
                    "summary": "Metrics for Prometheus.",
                    "responses": {
                        "200": {"description": "Metrics.", "content": {"text/plain": {"schema": {"type": "string"}}}},
                        "403": _response("The API key is missing or invalid.", _ref("ErrorResponse")),
                    },
                }
            },
        },
    }


def _restrict(request: dict[str, Any], models: Collection[ModelInfo]) -> None:
    """Restrict the schema of a request to the languages and delays of this server."""
    fields = request["properties"]
    fields["source"]["enum"] = [AUTO, *sorted({model.source for model in models})]
    fields["target"]["enum"] = sorted({model.target for model in models})
    fields["delay"]["enum"] = [*sorted({delay for model in models for delay in model.delays}), None]


def _as_form(request: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of the same request as a form, which has neither null nor empty lists."""
    fields = {name: _without_null(field) for name, field in request["properties"].items()}
    return {**request, "title": f"{request['title']}Form", "properties": fields}


def _without_null(field: dict[str, Any]) -> dict[str, Any]:
    field = {name: value for name, value in field.items() if name != "default"}
    if "enum" in field:
        field["enum"] = [value for value in field["enum"] if value is not None]
    if "anyOf" in field:
        kinds = [kind for kind in field["anyOf"] if kind != {"type": "null"}]
        field["anyOf"] = [{**kind, "minItems": 1} if kind["type"] == "array" else kind for kind in kinds]
    return field


def _post(summary: str, request: str, response: dict[str, Any], errors: dict[int, str]) -> dict[str, Any]:
    form = {"schema": _ref(f"{request}Form")}
    content = {JSON: {"schema": _ref(request)}, _URL_ENCODED: form, _MULTIPART: form}
    responses = {
        "200": _response(summary, response),
        **{str(status): _response(meaning, _ref("ErrorResponse")) for status, meaning in errors.items()},
    }
    return {"post": {"summary": summary, "requestBody": {"required": True, "content": content}, "responses": responses}}


def _get(summary: str, schema: dict[str, Any], others: dict[int, str] | None = None) -> dict[str, Any]:
    meanings = {200: summary, **(others or {})}
    responses = {str(status): _response(meaning, schema) for status, meaning in meanings.items()}
    return {"get": {"summary": summary, "responses": responses}}


def _response(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {JSON: {"schema": schema}}}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def _list(name: str) -> dict[str, Any]:
    return {"type": "array", "items": _ref(name)}
