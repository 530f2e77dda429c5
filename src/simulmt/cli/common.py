"""Arguments shared by the commands, and their checks."""

from __future__ import annotations

import enum
import re
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from simulmt.errors import ConfigError, DataError

Device = Annotated[str, typer.Option(help="Device: auto, cpu, cuda or cuda:N.")]
Directories = Annotated[list[Path], typer.Argument(help="Results directories written by `simulmt evaluate`.")]

print_note = partial(typer.echo, err=True)


class UnitChoice(enum.StrEnum):
    AUTO = "auto"
    WORD = "word"
    CHAR = "char"


def require_file(path: Path) -> Path:
    """Return the path if it is a file; raise DataError otherwise."""
    if path.is_file():
        return path
    raise DataError(f"{path}: is a directory, expected a file" if path.is_dir() else f"{path}: no such file")


def require_vocabularies(data: Path) -> None:
    """Raise DataError unless --data is a directory with two vocabularies."""
    for name in ("source.model", "target.model"):
        if not (data / name).is_file():
            raise DataError(f"--data {data}: no {name}; expected a data directory written by simulmt prepare")


def parse_numbers(option: str, text: str) -> tuple[int, ...]:
    """Parse a comma-separated list of positive integers, without duplicates; empty text gives none."""
    if not re.fullmatch(r"(\s*[1-9][0-9]*\s*(,\s*[1-9][0-9]*\s*)*)?", text):
        raise ConfigError(f"{option} {text}: expected comma-separated whole numbers from 1, such as 1,3,5")
    return tuple(dict.fromkeys(map(int, text.split(",")))) if text.strip() else ()
