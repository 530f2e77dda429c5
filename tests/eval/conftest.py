from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from eval.sentences import CHINESE, ENGLISH, GERMAN
from simulmt.runtime.bundle import Kind
from simulmt.runtime.stream import Translator
from simulmt.text import Tokenizer
from tiny_models import trained, translator


@pytest.fixture(scope="session")
def german(
    source_tokenizer: Tokenizer, target_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Translator:
    """Return an untrained CTC model from English to German."""
    return _translator("ctc", source_tokenizer, target_tokenizer, tmp_path_factory)


@pytest.fixture(scope="session")
def teacher(
    source_tokenizer: Tokenizer, target_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Translator:
    """Return an untrained full-sentence model from English to German."""
    return _translator("full-sentence", source_tokenizer, target_tokenizer, tmp_path_factory)


@pytest.fixture(scope="session")
def chinese(
    source_tokenizer: Tokenizer, ideograph_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Translator:
    """Return an untrained CTC model from English to Chinese."""
    return _translator("ctc", source_tokenizer, ideograph_tokenizer, tmp_path_factory)


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a test set to a directory: test.en, test.de, test.zh."""
    directory = tmp_path_factory.mktemp("test-set")
    for language, lines in (("en", ENGLISH), ("de", GERMAN), ("zh", CHINESE)):
        (directory / f"test.{language}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return directory


@pytest.fixture
def clock() -> Iterator[float]:
    """Return times that are 1, 2, 3, ... seconds apart."""
    return (float(step * (step + 1) // 2) for step in range(10_000))


def _translator(
    kind: Kind, source: Tokenizer, target: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Translator:
    return translator(trained(kind, source, target), kind, "fp32", tmp_path_factory.mktemp("bundle"))
