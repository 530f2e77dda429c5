"""Configuration: frozen dataclasses, built from TOML tables and command-line overrides.

A dataclass lives beside the thing it configures and checks its own ranges in `__post_init__`;
this module only turns untyped tables into such objects. An unknown key or a wrong type is an error
that names the file, the key and, where there is one, the key that was probably meant.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from simulmt.errors import ConfigError

T = TypeVar("T")


def require(condition: bool, message: str) -> None:
    """Raise ConfigError(message) unless the condition holds; for `__post_init__` range checks."""
    if not condition:
        raise ConfigError(message)


def build(cls: type[T], table: Mapping[str, Any], where: str = "configuration") -> T:
    """Build dataclass `cls` from a table, recursing into fields that are dataclasses themselves."""
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]
    for key in table:
        if key not in names:
            raise ConfigError(f"{where}: unknown key '{key}'{_suggestion(key, names)}")
    values = {key: _convert(hints[key], value, f"{where}: {key}") for key, value in table.items()}
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    except TypeError:
        missing = [f.name for f in dataclasses.fields(cls) if _is_required(f) and f.name not in table]  # type: ignore[arg-type]
        raise ConfigError(f"{where}: missing key '{missing[0]}'") from None


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file; a missing or malformed one is a ConfigError that names file and line."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def override(table: Mapping[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """Apply `section.key=value` assignments, values in TOML syntax (bare words are taken as strings)."""
    result = {key: dict(value) if isinstance(value, Mapping) else value for key, value in table.items()}
    for assignment in assignments:
        dotted, equals, text = assignment.partition("=")
        if not equals or not dotted.strip():
            raise ConfigError(f"--set {assignment}: expected KEY=VALUE, for example model.layers=4")
        *sections, key = dotted.strip().split(".")
        target: Any = result
        for section in sections:
            target = target.setdefault(section, {})
            if not isinstance(target, dict):
                raise ConfigError(f"--set {assignment}: '{section}' is not a table")
        target[key] = _toml_value(text)
    return result


def as_table(config: Any) -> dict[str, Any]:
    """The inverse of `build`: plain dicts, lists and scalars, ready for JSON."""
    return {
        key: list(value) if isinstance(value, tuple) else value for key, value in dataclasses.asdict(config).items()
    }


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text.strip()


def _suggestion(key: str, names: list[str]) -> str:
    close = difflib.get_close_matches(key, names, n=1)
    return f"; did you mean '{close[0]}'?" if close else f"; known keys: {', '.join(names)}"


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _convert(hint: Any, value: Any, where: str) -> Any:
    """Check `value` against a type hint, converting what TOML spells differently (tables, arrays, ints)."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(arguments, value, where)
    if origin is typing.Literal:
        return _expect(value in arguments, value, f"one of {', '.join(map(repr, arguments))}", where)
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), _expect(isinstance(value, Mapping), value, "a table", where), where)
    if origin is tuple:
        _expect(isinstance(value, list | tuple), value, "an array", where)
        return tuple(_convert(arguments[0], item, where) for item in value)
    if origin is dict or hint is dict:
        return dict(_expect(isinstance(value, Mapping), value, "a table", where))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is int:
        return _expect(isinstance(value, int) and not isinstance(value, bool), value, "a whole number", where)
    return _expect(isinstance(value, hint), value, f"a value of type {hint.__name__}", where)


def _convert_union(arguments: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in arguments:
        return None
    last: ConfigError | None = None
    for argument in arguments:
        if argument is not type(None):
            try:
                return _convert(argument, value, where)
            except ConfigError as error:
                last = error
    raise last or ConfigError(f"{where}: {value!r} does not fit")


def _expect(condition: bool, value: Any, expected: str, where: str) -> Any:
    if not condition:
        raise ConfigError(f"{where}: expected {expected}, got {value!r}")
    return value
