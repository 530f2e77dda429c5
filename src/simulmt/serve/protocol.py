"""The wire format, defined once: JSON, one object per message, distinguished by `type`.

    /v1/stream      client: start | resume, then source, delay, undo, end ..., finish
                    server: ready, then commit, sentence, undone ..., done; or error
    /v1/rooms/NAME  client: watch, where viewers need a key
                    server: waiting, room, commit, sentence, retract ..., closed; or error

Decoding, encoding and the JSON Schema at /v1/schema are derived from these structs; docs/protocol.md describes them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

import msgspec
from msgspec import Meta

from simulmt.errors import StreamError
from simulmt.runtime import stream

MAX_MESSAGE_LENGTH = 300  # characters of an error message
ROOM_NAME = r"^[a-z0-9-]{1,40}(?!\n)$"  # in Python, $ alone would allow a line break at the end


class Remedy(enum.Enum):
    """What a client can do about an error."""

    NONE = "nothing: the same messages would fail again"
    RESTART = "start again, here or elsewhere, send all messages again and drop the commits it has"
    RESUME = "resume the session"


class ErrorCode(enum.StrEnum):
    """The errors, each with its WebSocket close code and what a client can do about it."""

    close_code: int
    remedy: Remedy

    def __new__(cls, code: str, close_code: int, remedy: Remedy) -> Self:
        member = str.__new__(cls, code)
        member._value_ = code
        member.close_code, member.remedy = close_code, remedy
        return member

    BAD_MESSAGE = "bad_message", 1008, Remedy.NONE  # not JSON, not a valid message, or not a valid frame
    TOO_BIG = "too_big", 1009, Remedy.NONE  # the message is longer than the server allows
    OUT_OF_ORDER = "out_of_order", 1008, Remedy.NONE  # the message is not allowed at this point
    UNAUTHORIZED = "unauthorized", 1008, Remedy.NONE  # missing or invalid API key
    UNKNOWN_MODEL = "unknown_model", 1008, Remedy.NONE  # the server has no such model
    NO_RECOGNISER = "no_recogniser", 1008, Remedy.NONE  # the server cannot recognise speech in this language
    BAD_DELAY = "bad_delay", 1008, Remedy.NONE  # the model was not trained for this delay
    ROOM_TAKEN = "room_taken", 1008, Remedy.NONE  # another speaker has opened the room
    TAKEN_OVER = "taken_over", 1008, Remedy.NONE  # another connection has resumed the session
    TOO_LONG = "too_long", 1008, Remedy.NONE  # the session has lasted as long as the server allows
    FLOODING = "flooding", 1008, Remedy.NONE  # too many pings or fragments
    UNKNOWN_SESSION = "unknown_session", 1008, Remedy.RESTART  # the session is unknown or has expired
    TOO_MANY_STREAMS = "too_many_streams", 1013, Remedy.RESTART  # the server, or the client's address, is at its limit
    DRAINING = "draining", 1012, Remedy.RESTART  # the server is shutting down
    INTERNAL = "internal", 1011, Remedy.RESTART  # internal server error
    IDLE = "idle", 1008, Remedy.RESUME  # no message for too long
    UNRESPONSIVE = "unresponsive", 1008, Remedy.RESUME  # no answer to a ping
    SLOW_READER = "slow_reader", 1008, Remedy.RESUME  # the client does not read what is sent


class RefusedError(StreamError):
    """The server refuses or ends a stream; raised by server and client."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(sanitise_message(message))
        self.code = code


def sanitise_message(message: str) -> str:
    """Shorten an error message that may quote user input, and make it safe for any encoding."""
    short = message if len(message) <= MAX_MESSAGE_LENGTH else f"{message[:MAX_MESSAGE_LENGTH]}..."
    return short.encode("utf-8", "backslashreplace").decode("utf-8")


def _field(description: str, **constraints: Any) -> Meta:
    return Meta(description=description, **constraints)


class Message(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="type", tag=str.lower
):
    """Base of all messages; the tag is the class name in lower case."""


ApiKey = Annotated[str | None, _field("required if the server has keys; or send the header Authorization: Bearer KEY")]
RoomName = Annotated[str, _field("the name of a room", pattern=ROOM_NAME)]
SentenceNumber = Annotated[int, _field("counts the sentences of a session from 0", ge=0)]


class Start(Message, frozen=True):
    """Open a session; the first message of a connection."""

    model: Annotated[str, _field("a name from /v1/models")]
    delay: Annotated[int, _field("delay k; default: the model's default delay", ge=1)] | None = None
    format: Annotated[Literal["text"], _field("the format of the source")] = "text"
    input: Annotated[Literal["text", "audio"], _field("audio: speech follows in binary frames")] = "text"
    output: Annotated[Literal["translation", "transcript"], _field("transcript: speech is only recognised")] = (
        "translation"
    )
    api_key: ApiKey = None
    room: Annotated[str, _field("open a room of this name for viewers", pattern=ROOM_NAME)] | None = None
    room_key: (
        Annotated[str, _field("a secret that opens the same room again; by default the session", min_length=1)] | None
    ) = None


class Resume(Message, frozen=True):
    """Continue a session after a lost connection; the first message of a connection."""

    session: Annotated[str, _field("session id from ready")]
    seq: Annotated[
        int,
        _field("seq of the last commit received, or of the last transcript if output is transcript; 0 if none", ge=0),
    ]
    api_key: ApiKey = None


class Source(Message, frozen=True):
    """Append source text, in chunks of any size; a word is read once whitespace or an ideograph follows it."""

    text: Annotated[str, _field("text appended to the source")]


class Delay(Message, frozen=True):
    """Change the delay, from the next source word on."""

    k: Annotated[int, _field("one of the model's delays", ge=1)]


class Undo(Message, frozen=True):
    """Undo the last sentence; undone follows."""


class End(Message, frozen=True):
    """End the sentence, even without a full stop."""


class Finish(Message, frozen=True):
    """End the text; done follows once all of it is translated."""


class Watch(Message, frozen=True):
    """The first message of a viewer, where viewers need an API key."""

    api_key: ApiKey = None


class Ready(Message, frozen=True):
    """Reply to start and resume."""

    session: Annotated[str, _field("for resume; keep it secret")]
    model: Annotated[str, _field("name of the model")]
    delay: Annotated[int | None, _field("k, or null for a model that waits for the end of the sentence")]
    received: Annotated[int, _field("number of messages received in this session; resend from this index", ge=0)]
    room: Annotated[str | None, _field("the room that is open")] = None
    captions: Annotated[str | None, _field("the path of its page for viewers")] = None
    samples: Annotated[int, _field("with audio: samples received so far; send again from there", ge=0)] | None = None


class LagMs(msgspec.Struct, frozen=True, omit_defaults=True):
    """Milliseconds from a source word to its translation, by cause."""

    policy: Annotated[float, _field("until the look-ahead required by the delay had arrived")]
    queue: Annotated[float, _field("until the computation began")]
    compute: Annotated[float, _field("the computation")]
    recognition: Annotated[float, _field("with audio: from the end of the spoken word until it was stable")] | None = (
        None
    )


class Commit(Message, frozen=True):
    """A piece of translation that never changes; the texts of all commits, joined, are the translation."""

    seq: Annotated[int, _field("counts the commits of a session from 1", ge=1)]
    sentence: SentenceNumber
    text: Annotated[str, _field("text appended to the translation")]
    source_words: Annotated[int, _field("number of source words read so far in the session", ge=0)]
    lag_ms: LagMs

    @staticmethod
    def of(commit: stream.Commit) -> Commit:
        lag = commit.lag
        recognition = round(lag.recognition, 1) or None
        parts = LagMs(round(lag.policy, 1), round(lag.queue, 1), round(lag.compute, 1), recognition)
        return Commit(commit.seq, commit.sentence, commit.text, commit.source_words, parts)


class Sentence(Message, frozen=True):
    """A sentence is finished: every commit up to seq belongs to a finished sentence. May be repeated after resume."""

    seq: Annotated[int, _field("of the last commit of the sentence, 0 if there is none yet", ge=0)]
    sentence: SentenceNumber


class Undone(Message, frozen=True):
    """Reply to undo. The commits stay; send the text again, edited, as a new sentence."""

    sentence: Annotated[int, _field("the sentence that was undone, null if there is none", ge=0)] | None
    source: Annotated[str, _field("its source text")]


class Ack(Message, frozen=True):
    """Acknowledges audio: samples up to this number need not be sent again."""

    samples: Annotated[int, _field("samples of the session received so far", ge=0)]


class Transcript(Message, frozen=True):
    """Recognised text. May be repeated after resume: ignore a seq that was received before."""

    seq: Annotated[int, _field("counts the transcripts of a session from 1", ge=1)]
    text: Annotated[str, _field("text appended to the recognised source; never changes")]
    tentative: Annotated[str, _field("text recognised after that, which may still be revised")]
    ends_sentence: Annotated[bool, _field("whether the sentence ends after text")] = False


class Done(Message, frozen=True):
    """Everything is translated; the server closes with 1000."""


class Error(Message, frozen=True):
    """The last message of a connection, except after the first unknown_session, when start may follow."""

    code: Annotated[str, _field("machine-readable error code", extra_json_schema={"enum": list(ErrorCode)})]
    message: Annotated[str, _field("human-readable explanation")]

    def as_exception(self) -> RefusedError:
        """Return the exception to raise; a code that is unknown here counts as internal."""
        code = next((known for known in ErrorCode if known == self.code), ErrorCode.INTERNAL)
        return RefusedError(code, self.message)


class Waiting(Message, frozen=True):
    """Nobody is speaking in the room."""

    room: RoomName


class Room(Message, frozen=True):
    """A speech has begun; the messages of its last sentences follow."""

    room: RoomName
    model: Annotated[str, _field("name of the model")]
    source: Annotated[str, _field("the source language")]
    target: Annotated[str, _field("the target language")]
    speech: Annotated[str, _field("id of the speech; unchanged after reconnecting")]


class Retract(Message, frozen=True):
    """The speaker has undone a sentence: strike it through."""

    sentence: SentenceNumber


class Closed(Message, frozen=True):
    """The speech is over; waiting follows."""

    room: RoomName


Opening = Start | Resume
Input = Source | Delay | Undo | End | Finish
ClientMessage = Opening | Input
ServerMessage = Ready | Commit | Sentence | Undone | Ack | Transcript | Done | Error
ViewerMessage = Watch
RoomMessage = Waiting | Room | Commit | Sentence | Retract | Closed | Error

_encoder = msgspec.json.Encoder()


def write(message: Message) -> str:
    """Encode a message; optional fields with their default are left out."""
    return _encoder.encode(message).decode()


def _parser(union: Any) -> Callable[[str], Any]:
    decoder = msgspec.json.Decoder(union)

    def parse(text: str) -> Any:
        """Decode a message; raise RefusedError if it is invalid."""
        try:
            return decoder.decode(text)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
            raise RefusedError(ErrorCode.BAD_MESSAGE, f"invalid message: {error}") from None

    return parse


parse_client: Callable[[str], ClientMessage] = _parser(ClientMessage)
parse_server: Callable[[str], ServerMessage] = _parser(ServerMessage)
parse_viewer: Callable[[str], ViewerMessage] = _parser(ViewerMessage)
parse_room: Callable[[str], RoomMessage] = _parser(RoomMessage)


def schema() -> dict[str, Any]:
    """Return the JSON Schema of all messages, grouped by who sends them."""
    groups = {"client": ClientMessage, "server": ServerMessage, "viewer": ViewerMessage, "room_messages": RoomMessage}
    schemas, components = msgspec.json.schema_components(groups.values(), ref_template="#/$defs/{name}")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "simulmt: WebSockets /v1/stream and /v1/rooms/NAME",
        "$defs": {**components, **dict(zip(groups, schemas, strict=True))},
        "anyOf": [{"$ref": f"#/$defs/{group}"} for group in groups],
    }
