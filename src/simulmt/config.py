"""Configuration: frozen dataclasses, built from TOML tables and command-line overrides.

A dataclass lives next to the class it configures and validates itself in `__post_init__`; this module only builds such
objects from untyped tables. Unknown keys and wrong types raise an error that names the file, the key and the nearest
known key.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import json
import math
import os
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from simulmt.errors import ConfigError

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")

T = TypeVar("T")


def require(condition: bool, message: str) -> None:
    """Raise ConfigError unless `condition` holds; for validation in `__post_init__`."""
    if not condition:
        raise ConfigError(message)


def build(cls: type[T], table: Mapping[str, Any], where: str = "configuration") -> T:
    """Build the dataclass `cls` from a table, recursing into dataclass fields."""
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    for key in table:
        if key not in fields:
            raise ConfigError(f"{where}: unknown key '{key}'{_suggestion(key, list(fields))}")
    for name, field in fields.items():
        if _is_required(field) and name not in table:
            raise ConfigError(f"{where}: missing key '{name}'")
    values = {key: _convert(hints[key], value, f"{where}: {key}") for key, value in table.items()}
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file; raise ConfigError if it is missing or malformed."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def override(table: Mapping[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """Apply `section.key=value` assignments; values are TOML, bare words are strings."""
    result = copy.deepcopy(dict(table))
    for assignment in assignments:
        dotted, equals, text = assignment.partition("=")
        *sections, key = (part.strip() for part in dotted.split("."))
        if not (equals and key and all(sections)):
            raise ConfigError(f"--set {assignment}: expected KEY=VALUE, for example model.layers=4")
        target: Any = result
        for section in sections:
            target = target.setdefault(section, {})
            if not isinstance(target, dict):
                raise ConfigError(f"--set {assignment}: '{section}' is not a table")
        target[key] = _toml_value(text)
    return result


def as_table(config: Any) -> dict[str, Any]:
    """Convert a dataclass to plain dicts, lists and scalars; the inverse of `build`."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=os.fspath))


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
    """Check `value` against a type hint, converting TOML tables, arrays and integers as needed."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(arguments, value, where)
    if origin is typing.Literal:
        return _expect(value in arguments, value, f"one of {', '.join(map(repr, arguments))}", where)
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), _expect(isinstance(value, Mapping), value, "a table", where), where)
    if origin is tuple:
        return _convert_tuple(arguments, value, where)
    if origin is dict:
        _expect(isinstance(value, Mapping), value, "a table", where)
        return {key: _convert(arguments[1], item, f"{where}: {key}") for key, item in value.items()}
    if hint is Any:
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is int:
        return _expect(isinstance(value, int) and not isinstance(value, bool), value, "a whole number", where)
    return _expect(isinstance(value, hint), value, f"a value of type {hint.__name__}", where)


def _convert_tuple(arguments: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    _expect(isinstance(value, list | tuple), value, "an array", where)
    if arguments[-1] is Ellipsis:
        arguments = (arguments[0],) * len(value)
    _expect(len(value) == len(arguments), value, f"an array of {len(arguments)}", where)
    return tuple(_convert(argument, item, where) for argument, item in zip(arguments, value, strict=True))


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
    raise last or ConfigError(f"{where}: invalid value {value!r}")


def _expect(condition: bool, value: Any, expected: str, where: str) -> Any:
    if not condition:
        raise ConfigError(f"{where}: expected {expected}, got {value!r}")
    return value


def as_toml(table: Mapping[str, Any], section: str = "") -> str:
    """Format a table as TOML; raise ConfigError for values that TOML cannot express."""
    text, tables = "", ""
    for key, value in table.items():
        name = f"{section}.{key}" if section else key
        if not _BARE_KEY.fullmatch(key):
            raise ConfigError(f"{name}: invalid key '{key}'; use letters, digits, - and _")
        if isinstance(value, Mapping):
            tables += f"\n[{name}]\n{as_toml(value, name)}"
        elif not _is_plain(value):
            raise ConfigError(f"{name}: expected text, a number, true, false or an array of these, got {value}")
        else:
            text += f"{key} = {_literal(value)}\n"
    return text + tables


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return isinstance(value, str | int) or (isinstance(value, float) and not math.isnan(value))


def _literal(value: Any) -> str:
    """Format a value as TOML, which differs from JSON in one character and in infinity."""
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, float) and math.isinf(value):
        return str(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
