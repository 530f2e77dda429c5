from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Optional

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulmt.config import as_table, build, override, read_toml, require
from simulmt.errors import ConfigError

# `nan` is left out of round trips only because it does not equal itself.
NUMBERS = st.floats(allow_nan=False)
NAMES = st.text(max_size=8)
PATHS = st.sampled_from([Path(), Path("/data/store"), Path("runs") / "one"])


@dataclass(frozen=True)
class Engine:
    layers: int
    dropout: float = 0.1
    norm: Literal["pre", "post"] = "pre"

    def __post_init__(self) -> None:
        require(self.layers >= 1, f"layers must be at least 1, got {self.layers}")


@dataclass(frozen=True)
class Machine:
    name: str
    engine: Engine
    spare: Engine | None = None
    more: tuple[Engine, ...] = ()
    delays: tuple[int, ...] = (1,)
    range: tuple[float, float] = (0.0, 1.0)
    place: Path = Path()
    limit: Optional[int] = None  # noqa: UP045 - the old spelling must work too
    size: int | str = 0
    loud: bool = False
    files: tuple[Path, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)


MINIMAL: dict[str, Any] = {"name": "m", "engine": {"layers": 2}}

ENGINES = st.builds(Engine, st.integers(1, 99), NUMBERS, st.sampled_from(["pre", "post"]))
MACHINES = st.builds(
    Machine,
    NAMES,
    ENGINES,
    st.none() | ENGINES,
    st.lists(ENGINES, max_size=3).map(tuple),
    st.lists(st.integers(), max_size=3).map(tuple),
    st.tuples(NUMBERS, NUMBERS),
    PATHS,
    st.none() | st.integers(),
    st.integers() | NAMES,
    st.booleans(),
    st.lists(PATHS, max_size=2).map(tuple),
    st.dictionaries(NAMES, st.integers(), max_size=3),
    st.dictionaries(NAMES, st.integers() | NAMES | st.lists(st.booleans()), max_size=3),
)


# --- building --------------------------------------------------------------------------------------------------------


def test_missing_keys_take_their_default() -> None:
    assert build(Machine, MINIMAL) == Machine("m", Engine(2))


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("spare", {"layers": 3, "dropout": 0}, Engine(3, 0.0)),
        ("spare", None, None),
        ("more", [{"layers": 1}, {"layers": 2, "norm": "post"}], (Engine(1), Engine(2, norm="post"))),
        ("delays", [], ()),
        ("delays", (3, 1), (3, 1)),
        ("range", [1, 2.5], (1.0, 2.5)),
        ("place", "runs/one", Path("runs/one")),
        ("place", Path("runs"), Path("runs")),
        ("files", ["a", "b/c"], (Path("a"), Path("b/c"))),
        ("limit", 5, 5),
        ("limit", None, None),
        ("size", 5, 5),
        ("size", "large", "large"),
        ("loud", True, True),
        ("counts", {"a": 1}, {"a": 1}),
        ("notes", {"a": [1, "b"], "c": {"d": None}}, {"a": [1, "b"], "c": {"d": None}}),
    ],
)
def test_values_become_what_their_field_declares(key: str, value: object, expected: object) -> None:
    built = getattr(build(Machine, {**MINIMAL, key: value}), key)
    assert built == expected
    assert type(built) is type(expected)


def test_an_integer_is_converted_to_a_float() -> None:
    dropout = build(Engine, {"layers": 1, "dropout": 0}).dropout
    assert (dropout, type(dropout)) == (0.0, float)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"name": 3}, "name: expected a value of type str, got 3"),
        ({"loud": 1}, "loud: expected a value of type bool, got 1"),
        ({"loud": "yes"}, "loud: expected a value of type bool, got 'yes'"),
        ({"place": 3}, "place: expected a value of type Path, got 3"),
        ({"limit": "3"}, "limit: expected a whole number, got '3'"),
        ({"limit": True}, "limit: expected a whole number, got True"),
        ({"limit": 3.0}, "limit: expected a whole number, got 3.0"),
        ({"name": None}, "name: expected a value of type str, got None"),
        ({"size": None}, "size: expected a value of type str, got None"),
        ({"engine": 3}, "engine: expected a table, got 3"),
        ({"engine": [{"layers": 1}]}, "engine: expected a table, got [{'layers': 1}]"),
        ({"engine": {"layers": True}}, "engine: layers: expected a whole number, got True"),
        ({"engine": {"layers": 1, "dropout": True}}, "engine: dropout: expected a value of type float, got True"),
        ({"engine": {"layers": 1, "dropout": "0.1"}}, "engine: dropout: expected a value of type float, got '0.1'"),
        ({"engine": {"layers": 1, "norm": "mid"}}, "engine: norm: expected one of 'pre', 'post', got 'mid'"),
        ({"engine": {"layers": 1, "norm": ["pre"]}}, "engine: norm: expected one of 'pre', 'post', got ['pre']"),
        ({"spare": "none"}, "spare: expected a table, got 'none'"),
        ({"more": {"layers": 1}}, "more: expected an array, got {'layers': 1}"),
        ({"more": [3]}, "more: expected a table, got 3"),
        ({"delays": "12"}, "delays: expected an array, got '12'"),
        ({"delays": [1, "2"]}, "delays: expected a whole number, got '2'"),
        ({"range": [1.0]}, "range: expected an array of 2, got [1.0]"),
        ({"range": [1, 2, 3]}, "range: expected an array of 2, got [1, 2, 3]"),
        ({"counts": 3}, "counts: expected a table, got 3"),
        ({"counts": {"a": "one"}}, "counts: a: expected a whole number, got 'one'"),
        ({"notes": []}, "notes: expected a table, got []"),
    ],
)
def test_a_wrong_type_is_named_with_its_location(table: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(f'my.toml: {message}')}$"):
        build(Machine, {**MINIMAL, **table}, "my.toml")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"enigne": {}}, "unknown key 'enigne'; did you mean 'engine'?"),
        ({"engine": {"layer": 2}}, "engine: unknown key 'layer'; did you mean 'layers'?"),
        ({"engine": {"zzz": 2}}, "engine: unknown key 'zzz'; known keys: layers, dropout, norm"),
        ({"more": [{"layers": 1, "drop": 0.5}]}, "more: unknown key 'drop'; did you mean 'dropout'?"),
    ],
)
def test_an_unknown_key_is_named_with_a_suggestion(table: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(f'my.toml: {message}')}"):
        build(Machine, {**MINIMAL, **table}, "my.toml")


def test_a_missing_key_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^my\.toml: missing key 'engine'$"):
        build(Machine, {"name": "m"}, "my.toml")
    with pytest.raises(ConfigError, match=r"^my\.toml: engine: missing key 'layers'$"):
        build(Machine, {"name": "m", "engine": {}}, "my.toml")


def test_a_value_out_of_range_is_named_once_with_its_location() -> None:
    with pytest.raises(ConfigError, match=r"^my\.toml: engine: layers must be at least 1, got 0$"):
        build(Machine, {"name": "m", "engine": {"layers": 0}}, "my.toml")
    with pytest.raises(ConfigError, match=r"^configuration: layers must be at least 1, got -1$"):
        build(Engine, {"layers": -1})
    with pytest.raises(ConfigError, match=r"^my\.toml: spare: layers must be at least 1, got 0$"):
        build(Machine, {**MINIMAL, "spare": {"layers": 0}}, "my.toml")


def test_a_bug_in_a_check_is_not_taken_for_a_missing_key() -> None:
    @dataclass(frozen=True)
    class Faulty:
        size: int = 1

        def __post_init__(self) -> None:
            raise TypeError("a bug")

    with pytest.raises(TypeError, match=r"^a bug$"):
        build(Faulty, {})


@given(MACHINES)
@settings(deadline=None, max_examples=100)
def test_a_configuration_survives_json(machine: Machine) -> None:
    table = as_table(machine)
    assert json.loads(json.dumps(table)) == table
    assert build(Machine, table) == machine


# --- reading ---------------------------------------------------------------------------------------------------------


def test_a_toml_file_is_read_as_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text('name = "桥"\n[engine]\nlayers = 2\n', encoding="utf-8")
    assert read_toml(path) == {"name": "桥", "engine": {"layers": 2}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"layers = 2\nname = = 3\n", "not valid TOML: Invalid value (at line 2, column 8)"),
        (b"layers = 2\nlayers = 3\n", "not valid TOML: Cannot overwrite a value (at line 2, column 11)"),
        (b'name = "\xff"\n', "not valid TOML: 'utf-8' codec can't decode byte 0xff in position 8"),
    ],
)
def test_a_malformed_file_is_named_with_the_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "my.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"^{re.escape(f'{path}: {message}')}"):
        read_toml(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(str(tmp_path / 'my.toml'))}: no such file$"):
        read_toml(tmp_path / "my.toml")
    with pytest.raises(ConfigError, match=f"^{re.escape(str(tmp_path))}: cannot be read: "):
        read_toml(tmp_path)


# --- overriding ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("a=4", {"a": 4}),
        ("a = -2.5e-3 ", {"a": -2.5e-3}),
        ("a=true", {"a": True}),
        ("a=[1, 2]", {"a": [1, 2]}),
        ('a="4"', {"a": "4"}),
        ("a={b = 1}", {"a": {"b": 1}}),
        ("a=wait-k", {"a": "wait-k"}),
        ("a= runs/one two ", {"a": "runs/one two"}),
        ("a=x=y", {"a": "x=y"}),
        ("a=", {"a": ""}),
        ("b.c=4", {"b": {"c": 4}}),
        (" b . c =4", {"b": {"c": 4}}),
        ("b.c.d.e=4", {"b": {"c": {"d": {"e": 4}}}}),
    ],
)
def test_an_assignment_sets_one_value(assignment: str, expected: dict[str, object]) -> None:
    assert override({}, [assignment]) == expected


def test_assignments_add_to_a_table_and_the_last_one_counts() -> None:
    table = {"name": "m", "engine": {"layers": 2, "dropout": 0.1}}
    result = override(table, ["engine.layers=3", "loud=true", "engine.layers=4", "name=n"])
    assert result == {"name": "n", "loud": True, "engine": {"layers": 4, "dropout": 0.1}}


def test_the_original_table_is_unchanged() -> None:
    table = {"a": {"b": {"c": {"d": 1}}}, "e": [1]}
    before = json.dumps(table)
    override(table, ["a.b.c.d=2", "a.b.x=3", "a.y=4", "e=5", "z=6"])
    assert json.dumps(table) == before


@pytest.mark.parametrize("assignment", ["", "layers", "=4", " =4", "engine.=4", ".layers=4", "engine..layers=4", ".=4"])
def test_an_invalid_assignment_is_refused(assignment: str) -> None:
    message = f"--set {assignment}: expected KEY=VALUE, for example model.layers=4"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        override({}, [assignment])


def test_a_subkey_of_a_scalar_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--set name\.first=x: 'name' is not a table$"):
        override({"name": "m"}, ["name.first=x"])
    with pytest.raises(ConfigError, match=r"^--set a\.b\.c=x: 'b' is not a table$"):
        override({"a": {"b": [1]}}, ["a.b.c=x"])


def test_an_overridden_table_is_checked_like_any_other() -> None:
    assert build(Machine, override(MINIMAL, ["engine.layers=6", "spare.layers=1"])) == Machine(
        "m", Engine(6), Engine(1)
    )
    with pytest.raises(ConfigError, match=r"^configuration: engine: layers: expected a whole number, got 'six'$"):
        build(Machine, override(MINIMAL, ["engine.layers=six"]))
