"""The one definition of the wire format: JSON, one object a message, told apart by `type`.

    client   start | resume, then source, delay, end ..., finish
    server   ready, then commit, sentence ..., done; or error

Parsing, writing and the JSON Schema at /v1/schema all follow from the dataclasses below.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from simulmt import stream
from simulmt.config import build, require
from simulmt.errors import ConfigError, StreamError

LONGEST_QUOTE = 300  # characters of an error message


class Remedy(enum.Enum):
    """What a client can do about an error."""

    NONE = "nothing: the same messages would fail again"
    RESTART = "start anew, here or elsewhere, send all messages again and drop the commits it has"
    RESUME = "resume the session"


class Failure(NamedTuple):
    """What an error means, and what follows from it."""

    close_code: int
    remedy: Remedy
    meaning: str


class ErrorCode(enum.StrEnum):
    BAD_MESSAGE = "bad_message"
    TOO_BIG = "too_big"
    OUT_OF_ORDER = "out_of_order"
    UNAUTHORIZED = "unauthorized"
    UNKNOWN_MODEL = "unknown_model"
    BAD_DELAY = "bad_delay"
    UNKNOWN_SESSION = "unknown_session"
    TAKEN_OVER = "taken_over"
    TOO_MANY_STREAMS = "too_many_streams"
    TOO_LONG = "too_long"
    IDLE = "idle"
    SLOW_READER = "slow_reader"
    DRAINING = "draining"
    INTERNAL = "internal"

    @property
    def failure(self) -> Failure:
        return FAILURES[self]


FAILURES: Mapping[ErrorCode, Failure] = {
    ErrorCode.BAD_MESSAGE: Failure(1008, Remedy.NONE, "not JSON, not a message of this protocol, or a binary frame"),
    ErrorCode.TOO_BIG: Failure(1009, Remedy.NONE, "the message is longer than the server allows"),
    ErrorCode.OUT_OF_ORDER: Failure(1008, Remedy.NONE, "the message may not come at this point"),
    ErrorCode.UNAUTHORIZED: Failure(1008, Remedy.NONE, "an API key is missing or wrong"),
    ErrorCode.UNKNOWN_MODEL: Failure(1008, Remedy.NONE, "the server has no such model"),
    ErrorCode.BAD_DELAY: Failure(1008, Remedy.NONE, "the model was not trained for this delay"),
    ErrorCode.TAKEN_OVER: Failure(1008, Remedy.NONE, "another connection has resumed the session"),
    ErrorCode.TOO_LONG: Failure(1008, Remedy.NONE, "the session has lasted as long as the server allows"),
    ErrorCode.UNKNOWN_SESSION: Failure(1008, Remedy.RESTART, "the session is not, or no longer, known here"),
    ErrorCode.TOO_MANY_STREAMS: Failure(1013, Remedy.RESTART, "the server, or the client's address, has its fill"),
    ErrorCode.DRAINING: Failure(1012, Remedy.RESTART, "the server is shutting down"),
    ErrorCode.INTERNAL: Failure(1011, Remedy.RESTART, "a fault of the server"),
    ErrorCode.IDLE: Failure(1008, Remedy.RESUME, "no message for too long"),
    ErrorCode.SLOW_READER: Failure(1008, Remedy.RESUME, "what was sent is not being read"),
}


class RefusedError(StreamError):
    """Why the server, or a client that was told so, cannot go on with a stream."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(quotable(message))
        self.code = code


def quotable(message: str) -> str:
    """An error message that may quote what a client sent, made short and fit for any encoding."""
    short = message if len(message) <= LONGEST_QUOTE else f"{message[:LONGEST_QUOTE]}..."
    return short.encode("utf-8", "backslashreplace").decode("utf-8")


def _field(description: str, *, minimum: int | None = None, default: Any = dataclasses.MISSING, **facts: Any) -> Any:
    return dataclasses.field(default=default, metadata={"description": description, "minimum": minimum, **facts})


@dataclass(frozen=True)
class Start:
    """Open a session; the first message of a connection."""

    model: str = _field("a name from /v1/models")
    delay: int | None = _field("k; without one the model's own", minimum=1, default=None)
    format: Literal["text"] = _field("how source text is written", default="text")
    api_key: str | None = _field("where the server asks for one; or send the header Authorization", default=None)


@dataclass(frozen=True)
class Resume:
    """Go on with a session after a lost connection; the first message of a connection."""

    session: str = _field("from ready")
    seq: int = _field("of the last commit that arrived, 0 for none", minimum=0)
    api_key: str | None = _field("as in start", default=None)


@dataclass(frozen=True)
class Source:
    """More source text, in any chunks; a word is read once white space or an ideograph follows it."""

    text: str = _field("what is appended to the source")


@dataclass(frozen=True)
class Delay:
    """Change the delay, from the next source piece on."""

    k: int = _field("one of the model's delays", minimum=1)


@dataclass(frozen=True)
class End:
    """The sentence is over, even without a full stop."""


@dataclass(frozen=True)
class Finish:
    """The text is over; done follows when all of it is translated."""


@dataclass(frozen=True)
class Ready:
    """The answer to start and resume."""

    session: str = _field("for resume; keep it to yourself")
    model: str = _field("its name")
    delay: int | None = _field("k, or null for a model that waits for the end of the sentence")
    received: int = _field("client messages of this session accepted so far; resend from here on", minimum=0)


@dataclass(frozen=True)
class LagMs:
    """Milliseconds from a source word to its translation, by cause."""

    policy: float = _field("until the look-ahead that the delay asks for had arrived")
    queue: float = _field("until the computation began")
    compute: float = _field("the computation")


@dataclass(frozen=True)
class Commit:
    """A piece of translation, never taken back; the texts of all commits, joined, are the translation."""

    seq: int = _field("counts the commits of a session from 1", minimum=1)
    text: str = _field("what is appended to the translation")
    source_words: int = _field("words of the session that had been read for it", minimum=0)
    lag_ms: LagMs = _field("how long it took")  # noqa: RUF009, what makes a field is called for every field

    @staticmethod
    def of(commit: stream.Commit) -> Commit:
        lag = LagMs(*(round(part, 1) for part in (commit.lag.policy, commit.lag.queue, commit.lag.compute)))
        return Commit(commit.seq, commit.text, commit.source_words, lag)


@dataclass(frozen=True)
class Sentence:
    """Every commit up to this one belongs to a finished sentence; may be repeated after resume."""

    seq: int = _field("the last commit of the sentence, 0 if there is none yet", minimum=0)


@dataclass(frozen=True)
class Done:
    """All is translated; the server closes with 1000."""


@dataclass(frozen=True)
class Error:
    """The last message of a connection, save after unknown_session, when a start may follow."""

    code: str = _field("for programs", enum=list(ErrorCode))
    message: str = _field("for people")


Opening = Start | Resume
Input = Source | Delay | End | Finish
ClientMessage = Opening | Input
ServerMessage = Ready | Commit | Sentence | Done | Error

CLIENT: Mapping[str, type[ClientMessage]] = {kind.__name__.lower(): kind for kind in typing.get_args(ClientMessage)}
SERVER: Mapping[str, type[ServerMessage]] = {kind.__name__.lower(): kind for kind in typing.get_args(ServerMessage)}


def parse_client(text: str) -> ClientMessage:
    """What a client sent; anything else is a RefusedError."""
    return _parse(text, CLIENT)


def parse_server(text: str) -> ServerMessage:
    """What a server sent; anything else is a RefusedError."""
    return _parse(text, SERVER)


def write(message: ClientMessage | ServerMessage) -> str:
    """A message as JSON; fields that are None by default are left out."""
    fields = dataclasses.asdict(message)
    optional = {field.name for field in dataclasses.fields(message) if field.default is None}
    table = {name: value for name, value in fields.items() if not (name in optional and value is None)}
    return json.dumps({"type": type(message).__name__.lower(), **table}, ensure_ascii=False, separators=(",", ":"))


M = typing.TypeVar("M")


def _parse(text: str, kinds: Mapping[str, type[M]]) -> M:
    try:
        table = json.loads(text)
    except (ValueError, RecursionError):
        raise RefusedError(ErrorCode.BAD_MESSAGE, "expected a JSON object, got something that is not JSON") from None
    kind = table.pop("type", None) if isinstance(table, dict) else None
    if not isinstance(kind, str) or kind not in kinds:
        raise RefusedError(ErrorCode.BAD_MESSAGE, f"expected a JSON object with a type among {', '.join(kinds)}")
    try:
        message = build(kinds[kind], table, kind)
        _check_minima(message, kind)
    except ConfigError as error:
        raise RefusedError(ErrorCode.BAD_MESSAGE, str(error)) from None
    return message


def _check_minima(message: Any, kind: str) -> None:
    for field in dataclasses.fields(message):
        value, minimum = getattr(message, field.name), field.metadata["minimum"]
        if minimum is not None and value is not None:
            require(value >= minimum, f"{kind}: {field.name}: expected {minimum} or more, got {value}")


def schema() -> dict[str, Any]:
    """The JSON Schema of all messages, those of the client and those of the server apart."""
    every = {**CLIENT, **SERVER}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "simulmt, WebSocket /v1/stream",
        "$defs": {
            **{name: _message_schema(name, kind) for name, kind in every.items()},
            "client": {"oneOf": [{"$ref": f"#/$defs/{name}"} for name in CLIENT]},
            "server": {"oneOf": [{"$ref": f"#/$defs/{name}"} for name in SERVER]},
        },
        "oneOf": [{"$ref": "#/$defs/client"}, {"$ref": "#/$defs/server"}],
    }


def _message_schema(name: str, kind: type[Any]) -> dict[str, Any]:
    table = _object_schema(kind)
    table["properties"] = {"type": {"const": name}, **table["properties"]}
    table["required"] = ["type", *table["required"]]
    return table


def _object_schema(kind: type[Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    fields = dataclasses.fields(kind)
    return {
        "type": "object",
        "description": kind.__doc__,
        "properties": {field.name: _field_schema(hints[field.name], field) for field in fields},
        "required": [field.name for field in fields if field.default is dataclasses.MISSING],
        "additionalProperties": False,
    }


def _field_schema(hint: Any, field: dataclasses.Field[Any]) -> dict[str, Any]:
    facts = {name: fact for name, fact in field.metadata.items() if fact is not None}
    return {**_type_schema(hint), **facts}


def _type_schema(hint: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(hint):
        return _object_schema(typing.cast(type, hint))
    if typing.get_origin(hint) is Literal:
        return {"enum": list(typing.get_args(hint))}
    if isinstance(hint, types.UnionType):
        return {"type": [_TYPES[part] for part in typing.get_args(hint)]}
    return {"type": _TYPES[hint]}


_TYPES: Mapping[Any, str] = {str: "string", int: "integer", float: "number", type(None): "null"}
