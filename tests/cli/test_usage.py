"""What the help and the errors say about the values of options."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
import typer

from cli.helpers import assert_refused, call
from simulmt.cli import app
from simulmt.cli.usage import Value


class Colour(StrEnum):
    RED = "red"
    GREEN = "green"
    BLUE = "blue"


def commands(command: Any, words: str = "simulmt") -> Iterator[tuple[str, Any]]:
    """Yield every command and group with its command line."""
    yield words, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, f"{words} {name}")


ALL = dict(commands(typer.main.get_command(app)))


def metavars(words: str) -> dict[str, str]:
    """Return the metavar of each parameter by name."""
    command = ALL[words]
    return {param.name: param.metavar for param in command.get_params(typer.Context(command))}


@pytest.mark.parametrize("words", ALL)
def test_the_help_names_values_instead_of_types(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    done = call(*words.split()[1:], "--help", capture=capsys)
    assert done.returncode == 0
    for kind in ("bool", "int", "float", "str", "path", "list"):
        assert f"<{kind}" not in done.stdout


@pytest.mark.parametrize(
    ("words", "name", "metavar"),
    [
        ("translate", "delay", "K"),
        ("translate", "style", "text|jsonl|srt|vtt"),
        ("translate", "file", "FILE"),
        ("translate", "model", "NAME_OR_DIR"),
        ("bench", "as_json", ""),
        ("serve", "port", "PORT"),
        ("demo", "pace", "NUMBER"),
        ("evaluate", "delay", "K,K,..."),
        ("evaluate", "reference", "FILE"),
        ("evaluate", "output", "DIR"),
        ("report", "output", "FILE"),
        ("rewrite pseudo", "delay", "K"),
        ("rewrite pseudo", "run", "RUN"),
        ("train", "config", "CONFIG"),
        ("train", "run", "DIR"),
        ("compare", "directories", "DIR"),
        ("rewrite pseudo", "output", "PREFIX"),
    ],
)
def test_metavars(words: str, name: str, metavar: str) -> None:
    assert metavars(f"simulmt {words}")[name] == metavar


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("translate --format xml", "--format xml: expected text, jsonl, srt or vtt"),
        ("translate --delay abc", "--delay abc: expected a whole number"),
        ("translate --delay 1.5", "--delay 1.5: expected a whole number"),
        ("translate --threads -1", "--threads -1: expected a whole number from 0"),
        ("compare results --format xml", "--format xml: expected table, markdown or json"),
        ("serve --port 99999", "--port 99999: expected a whole number from 0 to 65535"),
        ("demo --pace nan", "--pace nan: expected a number from 0.1"),
        ("rewrite join --repeat 2 --repeat x --repeat 3", "--repeat x: expected a whole number from 1"),
    ],
)
def test_invalid_values(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    done = call(*arguments.split(), capture=capsys)
    assert_refused(done, 2, f"simulmt: {message}; see ", f"{arguments.split(' -')[0].split(' results')[0]} --help")


@pytest.mark.parametrize("delays", ["abc", "0", "1,", "1,,3", "1;3", "-1", "1.5"])
@pytest.mark.parametrize("command", ["evaluate", "analyse run"])
def test_invalid_lists_of_delays(command: str, delays: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text"
    text.write_text("a\n", encoding="utf-8")
    files = ("--source", text, "--reference", text, "--output", tmp_path / "new")
    done = call(*command.split(), *files, "--delay", delays, capture=capsys)
    assert_refused(done, 2, f"--delay {delays}: expected comma-separated whole numbers from 1, such as 1,3,5")


@pytest.mark.parametrize(
    ("value", "description", "accepted", "refused"),
    [
        (Value(int), "a whole number", ["-3", "0"], ["abc", "1.5", ""]),
        (Value(int, 1), "a whole number from 1", ["1"], ["0"]),
        (Value(float, 0, 1), "a number from 0 to 1", ["0", "0.5", "1"], ["-0.1", "2", "x", "nan"]),
        (Value(Colour), "red, green or blue", ["red"], ["Red", "xml"]),
    ],
)
def test_values(value: Value, description: str, accepted: list[str], refused: list[str]) -> None:
    assert value.description == description
    assert all(map(value.accepts, accepted))
    assert not any(map(value.accepts, refused))
