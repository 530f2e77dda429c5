"""The requests and responses of the HTTP API, and the OpenAPI document generated from them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from simulmt import __version__
from simulmt.serve.models import ModelInfo

AUTO = "auto"  # detect the source language
JSON, URL_ENCODED, MULTIPART = "application/json", "application/x-www-form-urlencoded", "multipart/form-data"

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
    """A language that a text may be in."""

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
    """An error message, for people."""

    error: str


STRUCTS = (TranslateRequest, TranslateResponse, DetectRequest, Detection, Language, Models, Status, ErrorResponse)
TRANSLATE_ERRORS = {
    400: "The request is invalid, or no model translates these languages.",
    403: "The API key is missing or invalid, or the origin is not allowed.",
    413: "The request is too long.",
    429: "Too many translations at once.",
    500: "Internal server error.",
    503: "The server is shutting down, or has too many connections.",
}
DETECT_ERRORS = {status: TRANSLATE_ERRORS[status] for status in (400, 403, 413, 503)}


def document(models: Collection[ModelInfo]) -> dict[str, Any]:
    """Return the OpenAPI document of a server with these models."""
    _, schemas = msgspec.json.schema_components(STRUCTS, ref_template="#/components/schemas/{name}")
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
                "Translate whole texts.", "TranslateRequest", _ref("TranslateResponse"), TRANSLATE_ERRORS
            ),
            "/detect": _post("Detect the language of a text.", "DetectRequest", _list("Detection"), DETECT_ERRORS),
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
    content = {JSON: {"schema": _ref(request)}, URL_ENCODED: form, MULTIPART: form}
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
