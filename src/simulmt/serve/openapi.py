"""The HTTP part in the words of OpenAPI."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from simulmt import __version__
from simulmt.serve.models import Description


def _text_or_texts(fewest: int) -> dict[str, Any]:
    return {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": fewest}]}


TEXT_OR_TEXTS = _text_or_texts(fewest=0)
STATUS = {"type": "object", "required": ["status"], "properties": {"status": {"type": "string"}}}
ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}

MODELS = {
    "type": "object",
    "required": ["models"],
    "properties": {
        "models": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name", "kind", "source", "target", "delays", "default_delay"],
                "properties": {
                    "name": {"type": "string"},
                    "kind": {"enum": ["ctc", "wait-k", "full-sentence"]},
                    "source": {"type": "string"},
                    "target": {"type": "string"},
                    "delays": {"type": "array", "items": {"type": "integer", "minimum": 1}},
                    "default_delay": {"type": ["integer", "null"]},
                },
            },
        }
    },
}
LANGUAGES = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["code", "name", "targets"],
        "properties": {
            "code": {"type": "string"},
            "name": {"type": "string"},
            "targets": {"type": "array", "items": {"type": "string"}},
        },
    },
}
TRANSLATED = {"type": "object", "required": ["translatedText"], "properties": {"translatedText": TEXT_OR_TEXTS}}
REFUSALS = {
    400: "The request cannot be understood or served.",
    403: "The API key is missing or wrong, or the page is of another origin.",
    413: "The request is too long.",
    429: "Too many translations are under way.",
    500: "A fault of the server.",
    503: "The server is shutting down.",
}


def document(models: Collection[Description]) -> dict[str, Any]:
    """The OpenAPI document of a server with these models."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "simulmt",
            "version": __version__,
            "description": "Simultaneous translation; live streams use the WebSocket /v1/stream, see /v1/schema.",
        },
        "paths": {
            "/translate": {"post": _translate(models)},
            "/languages": _get("The languages and what each can be translated to.", LANGUAGES),
            "/v1/models": _get("The models.", MODELS),
            "/v1/schema": _get("The messages of the WebSocket /v1/stream as JSON Schema.", {"type": "object"}),
            "/health": _get("Whether the process is alive.", STATUS),
            "/ready": _get("Whether new streams are taken.", STATUS, {503: ("It is shutting down.", STATUS)}),
            "/metrics": {"get": {"summary": "For Prometheus.", "responses": {"200": _answer("Metrics.", None)}}},
        },
    }


def _request(models: Collection[Description], is_form: bool) -> dict[str, Any]:
    """The body of a translation; a form knows neither null nor an empty list."""
    sources, targets = {model.source for model in models}, {model.target for model in models}
    delays = {delay for model in models for delay in model.delays}
    nothing = [] if is_form else ["null"]
    return {
        "type": "object",
        "required": ["q", "source", "target"],
        "additionalProperties": False,
        "properties": {
            "q": {**_text_or_texts(fewest=int(is_form)), "description": "a text, or several; every line is a sentence"},
            "source": {"enum": ["auto", *sorted(sources)], "description": "auto where the target leaves only one"},
            "target": {"enum": sorted(targets)},
            "format": {"enum": ["text"], "default": "text"},
            "delay": {
                "type": ["integer", *nothing],
                "enum": [*sorted(delays), *([] if is_form else [None])],
                "description": "one of the model's; without it the model's own",
            },
            "api_key": {"type": ["string", *nothing], "description": "or send the header Authorization: Bearer"},
            "alternatives": {"type": "integer", "description": "accepted for compatibility, and ignored"},
        },
    }


def _translate(models: Collection[Description]) -> dict[str, Any]:
    contents = {
        "application/json": {"schema": _request(models, is_form=False)},
        "application/x-www-form-urlencoded": {"schema": _request(models, is_form=True)},
    }
    refusals = {str(status): _answer(meaning, ERROR) for status, meaning in REFUSALS.items()}
    return {
        "summary": "Translate whole texts.",
        "requestBody": {"required": True, "content": contents},
        "responses": {"200": _answer("A text for a text, a list for a list.", TRANSLATED), **refusals},
    }


def _get(summary: str, schema: Any, others: dict[int, tuple[str, Any]] | None = None) -> dict[str, Any]:
    answers = {200: (summary, schema), **(others or {})}
    return {
        "get": {
            "summary": summary,
            "responses": {str(status): _answer(meaning, shape) for status, (meaning, shape) in answers.items()},
        }
    }


def _answer(description: str, schema: Any) -> dict[str, Any]:
    content = {"text/plain": {"schema": {"type": "string"}}}
    if schema is not None:
        content = {"application/json": {"schema": schema}}
    return {"description": description, "content": content}
