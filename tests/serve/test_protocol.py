from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import jsonschema  # type: ignore[import-untyped]
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from simulmt.serve.access import Limits
from simulmt.serve.protocol import (
    ClientMessage,
    ErrorCode,
    RefusedError,
    RoomMessage,
    ServerMessage,
    ViewerMessage,
    parse_client,
    parse_room,
    parse_server,
    parse_viewer,
    sanitise_message,
    schema,
    write,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "protocol.md"
VALIDATOR = jsonschema.Draft202012Validator(schema())


def message_types(union: Any) -> dict[str, Any]:
    """Return the message types of a union by tag."""
    return {kind.__struct_config__.tag: kind for kind in get_args(union) or (union,)}


CLIENT, SERVER = message_types(ClientMessage), message_types(ServerMessage)
VIEWER, ROOM = message_types(ViewerMessage), message_types(RoomMessage)
PARSERS = {parse_client: CLIENT, parse_server: SERVER, parse_viewer: VIEWER, parse_room: ROOM}


def values_of(info: inspect.Type) -> st.SearchStrategy[Any]:
    """Return a strategy for everything that a field may hold."""
    match info:
        case inspect.Metadata(type=inner, extra_json_schema=extra):
            return st.sampled_from(extra["enum"]) if extra and "enum" in extra else values_of(inner)
        case inspect.StrType(pattern=str(pattern)):
            return st.from_regex(pattern.replace("$", r"\Z"))
        case inspect.StrType(min_length=shortest):
            return st.text(st.characters(exclude_categories=["Cs"]), min_size=shortest or 0)
        case inspect.BoolType():
            return st.booleans()
        case inspect.IntType(ge=least):
            return st.integers(min_value=least)
        case inspect.FloatType():
            return st.floats(0, 1e6)
        case inspect.LiteralType(values=values):
            return st.sampled_from(values)
        case inspect.NoneType():
            return st.none()
        case inspect.UnionType(types=types):
            return st.one_of(*map(values_of, types))
        case inspect.StructType(cls=cls, fields=fields):
            return st.builds(cls, **{field.name: values_of(field.type) for field in fields})
    raise AssertionError(info)


MESSAGES = [
    st.tuples(st.just(parse), values_of(inspect.type_info(kind)))
    for parse in PARSERS
    for kind in PARSERS[parse].values()
]


@settings(max_examples=150, deadline=None)
@given(st.one_of(*MESSAGES))
def test_a_message_survives_encoding_and_fits_the_schema(example: tuple[Callable[[str], Any], Any]) -> None:
    parse, message = example
    assert parse(write(message)) == message
    VALIDATOR.validate(json.loads(write(message)))


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(0, 1) | st.sampled_from(["text", "toy", ""]),
    lambda inner: st.lists(inner, max_size=2),
    max_leaves=3,
)
FIELDS = {field.name for kind in CLIENT.values() for field in msgspec.structs.fields(kind)}
names = st.sampled_from(sorted(FIELDS | {"x"}))
tables: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {"type": st.sampled_from([*CLIENT, "ready", 1])}
) | st.just({})


@settings(max_examples=300, deadline=None)
@given(tables, st.dictionaries(names, plain, max_size=4))
def test_the_parser_takes_exactly_what_the_schema_allows(kind: dict[str, Any], fields: dict[str, Any]) -> None:
    table = {**fields, **kind}
    # JSON Schema takes 1.0 for an integer; the parser, like everybody who writes k by hand, does not.
    allowed = VALIDATOR.evolve(schema={**schema(), "anyOf": [{"$ref": "#/$defs/client"}]}).is_valid(table)
    allowed = allowed and not any(isinstance(value, float) for value in fields.values())
    if allowed:
        parse_client(json.dumps(table))
    else:
        with pytest.raises(RefusedError) as caught:
            parse_client(json.dumps(table))
        assert caught.value.code is ErrorCode.BAD_MESSAGE


def test_an_error_says_what_is_wrong() -> None:
    with pytest.raises(RefusedError, match=r"Expected `int` >= 1 - at `\$.k`"):
        parse_client('{"type": "delay", "k": 0}')
    with pytest.raises(RefusedError, match="unknown field `dely`"):
        parse_client('{"type": "start", "model": "a", "dely": 1}')
    with pytest.raises(RefusedError, match="missing required field `text`"):
        parse_client('{"type": "source"}')


@pytest.mark.parametrize("room", ["", "a\n", "a b", "A", 41 * "a"])
def test_a_room_name_is_checked_to_its_end(room: str) -> None:
    start = {"type": "start", "model": "toy", "room": room}
    with pytest.raises(RefusedError, match=r"\$\.room"):
        parse_client(json.dumps(start))
    assert not VALIDATOR.evolve(schema={**schema(), "anyOf": [{"$ref": "#/$defs/client"}]}).is_valid(start)


@given(st.text())
def test_quoted_input_is_shortened_and_encodable(message: str) -> None:
    assert len(sanitise_message(100 * message).encode()) < 3_000


@pytest.mark.parametrize("kinds", [CLIENT, SERVER, VIEWER, ROOM], ids=["client", "server", "viewer", "room"])
def test_the_document_describes_every_message_and_field(kinds: dict[str, type[Any]]) -> None:
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    for name, kind in kinds.items():
        (row,) = [line for line in lines if line.startswith(f"| `{name}` |")]
        for field in msgspec.structs.fields(kind):
            assert f"`{field.name}`" in row, f"{name}.{field.name}"


def test_the_document_lists_every_error_with_its_close_code() -> None:
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    for code in ErrorCode:
        (row,) = [line for line in lines if line.startswith(f"| `{code}` |")]
        _, _, close_code, remedy, *_ = (cell.strip() for cell in row.split("|"))
        assert close_code == str(code.close_code)
        assert remedy == code.remedy.name.lower()


def test_the_document_lists_every_limit_with_its_default() -> None:
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    for field in dataclasses.fields(Limits):
        (row,) = [line for line in lines if line.startswith(f"| `{field.name}` |")]
        assert row.split("|")[2].strip() == f"{field.default:,.0f}"
