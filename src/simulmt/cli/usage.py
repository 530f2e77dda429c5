"""Metavars and error messages for option values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

METAVARS = {  # of options by name, in every command
    "baseline": "SYSTEM",
    "data": "DIR",
    "default_delay": "K",
    "delay": "K",
    "device": "DEVICE",
    "host": "HOST",
    "name": "NAME",
    "only": "STAGE",
    "port": "PORT",
    "run": "DIR",
    "source_language": "LANGUAGE",
    "target_language": "LANGUAGE",
    "test_set": "NAME",
    "wandb": "PROJECT",
    "work": "DIR",
}
METAVARS_BY_TYPE = {bool: "", int: "N", float: "NUMBER", str: "TEXT", Path: "FILE"}


class Value(NamedTuple):
    """The type and range of a parameter's value, or of each value of a repeatable one."""

    kind: type
    low: float | None = None
    high: float | None = None

    def metavar(self, name: str) -> str:
        """Return the metavar of an option."""
        if issubclass(self.kind, Enum):
            return "|".join(each.value for each in self.kind)
        return METAVARS.get(name) or METAVARS_BY_TYPE[self.kind]

    def accepts(self, text: str) -> bool:
        """Return whether a text is a valid value."""
        try:
            value = self.kind(text)
        except ValueError:
            return False
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    @property
    def description(self) -> str:
        """The expected value, as error messages describe it."""
        if issubclass(self.kind, Enum):
            *others, last = (each.value for each in self.kind)
            return f"{', '.join(others)} or {last}"
        low = "" if self.low is None else f" from {self.low:g}"
        high = "" if self.high is None else f" to {self.high:g}"
        return f"a{' whole' * (self.kind is int)} number{low}{high}"


class InvalidValueError(typer.BadParameter):
    """An option's value of the wrong type or out of range."""

    def format_message(self) -> str:
        return self.message


class _MetavarMixin:
    """Sets the metavars of parameters in the help."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            is_argument = param.param_type_name == "argument"
            if param.metavar is None:
                param.metavar = param.name.upper() if is_argument else value_of(self, param.name).metavar(param.name)
            if is_argument:
                param.display_type_rich = lambda ctx: None  # noqa: ARG005 - the metavar says enough
        return params


class Group(_MetavarMixin, TyperGroup):
    """A group of commands."""


class Command(_MetavarMixin, TyperCommand):
    """A command whose errors name the expected value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = list(args)
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            if type(error) is not typer.BadParameter or error.param is None:  # a missing parameter
                raise
            given = self.make_parser(ctx).parse_args(words)[0][error.param.name]
            raise InvalidValueError(self._explain(error.param, given), ctx) from None

    def _explain(self, param: Any, given: str | Sequence[str]) -> str:
        value, texts = value_of(self, param.name), [given] if isinstance(given, str) else given
        wrong = next((text for text in texts if not value.accepts(text)), texts[-1])
        return f"{param.opts[0]} {wrong}: expected {value.description}"


def value_of(command: Any, name: str) -> Value:
    """Return the type and range of a parameter; those that typer adds are flags."""
    return _values(command.callback).get(name, Value(bool))


@cache
def _values(callback: Callable[..., Any] | None) -> dict[str, Value]:
    """Return the values of a function's annotated parameters."""
    hints = get_type_hints(inspect.unwrap(callback), include_extras=True) if callback else {}
    return {name: _value(*get_args(hint)) for name, hint in hints.items() if get_origin(hint) is Annotated}


def _value(kind: Any, info: Any) -> Value:
    while inner := get_args(kind):  # optional or repeatable
        kind = inner[0]
    return Value(kind, info.min, info.max)
