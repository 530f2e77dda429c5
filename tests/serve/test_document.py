"""The examples in docs/protocol.md match the answers of the server.

PYTHONPATH=src:tests python -m serve.test_document    updates them, for example for a new model
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from simulmt.serve.app import Settings, create_app

from .helpers import PATIENCE, Served, running

DOCUMENT = Path(__file__).parents[2] / "docs" / "protocol.md"
BLOCK = re.compile(r"^```(stream|http)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ANY = "…"
VARYING = [(r'"session":"[^"]*"', f'"session":"{ANY}"'), (r'"lag_ms":\{[^}]*\}', f'"lag_ms":{{{ANY}}}')]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with running(create_app(Settings(("en-zh", "de-en"), "127.0.0.1", threads=1))) as served:
        yield served


@pytest.mark.parametrize(("kind", "block"), BLOCK.findall(DOCUMENT.read_text(encoding="utf-8")))
def test_the_examples_match_the_answers_of_the_server(server: Served, kind: str, block: str) -> None:
    assert replay(server, kind, block) == block


def replay(server: Served, kind: str, block: str) -> str:
    """Send the client's lines of an example; return the example with the real answers."""
    lines = [line.removeprefix("> ") for line in block.splitlines() if line.startswith("> ")]
    return ask(server, lines) if kind == "http" else converse(server, lines)


def answer(text: str) -> str:
    """Format a line of the document, without the parts that differ between runs."""
    for pattern, varying in VARYING:
        text = re.sub(pattern, varying, text)
    return f"< {text}\n"


def ask(server: Served, lines: list[str]) -> str:
    replayed = ""
    for line in lines:
        method, path, body = line.split(" ", 2)
        response = httpx.request(method, server.http + path, content=body, timeout=PATIENCE)
        replayed += f"> {line}\n" + answer(f"{response.status_code} {response.text}")
    return replayed


def converse(server: Served, lines: list[str]) -> str:
    """Send lines; receive everything after `finish`, and one answer to each other message that has one."""
    replayed = ""
    with server.talk() as talk:
        for line in lines:
            talk.socket.send(line)
            replayed += f"> {line}\n"
            kind = json.loads(line)["type"]
            if kind in ("start", "resume", "undo"):
                replayed += answer(str(talk.socket.recv(timeout=PATIENCE)))
            while kind == "finish":
                text = str(talk.socket.recv(timeout=PATIENCE))
                replayed += answer(text)
                kind = "" if json.loads(text)["type"] == "done" else kind
    return replayed


def main() -> None:
    with running(create_app(Settings(("en-zh", "de-en"), "127.0.0.1", threads=1))) as server:
        text = DOCUMENT.read_text(encoding="utf-8")
        text = BLOCK.sub(lambda match: f"```{match[1]}\n{replay(server, match[1], match[2])}```", text)
        DOCUMENT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
