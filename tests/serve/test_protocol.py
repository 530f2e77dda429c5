from __future__ import annotations

import dataclasses
import json
import typing
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulmt.serve.limits import Limits
from simulmt.serve.protocol import (
    CLIENT,
    FAILURES,
    SERVER,
    ErrorCode,
    LagMs,
    RefusedError,
    parse_client,
    parse_server,
    quotable,
    schema,
    write,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "protocol.md"
VALIDATOR = jsonschema.Draft202012Validator(schema())
text = st.text(st.characters(exclude_categories=["Cs"]))
seconds = st.floats(0, 1e6)


def values_of(hint: Any, minimum: int | None) -> st.SearchStrategy[Any]:
    """Everything that a field may hold."""
    if hint is str:
        return text
    if hint is int:
        return st.integers(min_value=minimum)
    if hint is LagMs:
        return st.builds(LagMs, seconds, seconds, seconds)
    if typing.get_origin(hint) is typing.Literal:
        return st.sampled_from(typing.get_args(hint))
    return st.none() | values_of(next(part for part in typing.get_args(hint) if part is not type(None)), minimum)


def messages_of(kind: type[Any]) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind)
    fields = {field.name: values_of(hints[field.name], field.metadata["minimum"]) for field in dataclasses.fields(kind)}
    if kind is SERVER["error"]:
        fields["code"] = st.sampled_from([code.value for code in ErrorCode])
    return st.builds(kind, **fields)


@settings(max_examples=100, deadline=None)
@given(st.one_of(*map(messages_of, CLIENT.values())), st.one_of(*map(messages_of, SERVER.values())))
def test_what_is_written_is_read_back_and_fits_the_schema(from_client: Any, from_server: Any) -> None:
    assert parse_client(write(from_client)) == from_client
    assert parse_server(write(from_server)) == from_server
    VALIDATOR.validate(json.loads(write(from_client)))
    VALIDATOR.validate(json.loads(write(from_server)))


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(0, 1) | st.sampled_from(["text", "toy", ""]),
    lambda inner: st.lists(inner, max_size=2),
    max_leaves=3,
)
names = st.sampled_from(sorted({field.name for kind in CLIENT.values() for field in dataclasses.fields(kind)} | {"x"}))
tables: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {"type": st.sampled_from([*CLIENT, "ready", 1])}
) | st.just({})


@settings(max_examples=300, deadline=None)
@given(tables, st.dictionaries(names, plain, max_size=4))
def test_the_parser_takes_exactly_what_the_schema_allows(kind: dict[str, Any], fields: dict[str, Any]) -> None:
    table = {**fields, **kind}
    # JSON Schema takes 1.0 for an integer; the parser, like everybody who writes k by hand, does not.
    allowed = VALIDATOR.evolve(schema={**schema(), "oneOf": [{"$ref": "#/$defs/client"}]}).is_valid(table)
    allowed = allowed and not any(isinstance(value, float) for value in fields.values())
    if allowed:
        parse_client(json.dumps(table))
    else:
        with pytest.raises(RefusedError) as caught:
            parse_client(json.dumps(table))
        assert caught.value.code is ErrorCode.BAD_MESSAGE


def test_an_error_says_what_is_wrong() -> None:
    with pytest.raises(RefusedError, match="delay: k: expected 1 or more, got 0"):
        parse_client('{"type": "delay", "k": 0}')
    with pytest.raises(RefusedError, match="unknown key 'dely'; did you mean 'delay'"):
        parse_client('{"type": "start", "model": "a", "dely": 1}')
    with pytest.raises(RefusedError, match="source: missing key 'text'"):
        parse_client('{"type": "source"}')


@given(st.text())
def test_what_is_quoted_is_short_and_can_be_encoded(message: str) -> None:
    assert len(quotable(100 * message).encode()) < 3_000


def test_every_code_says_what_follows_from_it() -> None:
    assert set(FAILURES) == set(ErrorCode)


@pytest.mark.parametrize("kinds", [CLIENT, SERVER], ids=["client", "server"])
def test_the_document_describes_every_message_and_field(kinds: dict[str, type[Any]]) -> None:
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    for name, kind in kinds.items():
        (row,) = [line for line in lines if line.startswith(f"| `{name}` |")]
        for field in dataclasses.fields(kind):
            assert f"`{field.name}`" in row, f"{name}.{field.name}"


def test_the_document_lists_every_error_with_its_close_code() -> None:
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    for code, failure in FAILURES.items():
        (row,) = [line for line in lines if line.startswith(f"| `{code}` |")]
        _, _, close_code, remedy, *_ = (cell.strip() for cell in row.split("|"))
        assert close_code == str(failure.close_code)
        assert remedy == failure.remedy.name.lower()


def test_the_document_lists_every_limit_with_its_default() -> None:
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    for field in dataclasses.fields(Limits):
        (row,) = [line for line in lines if line.startswith(f"| `{field.name}` |")]
        assert row.split("|")[2].strip() == f"{field.default:,.0f}"
