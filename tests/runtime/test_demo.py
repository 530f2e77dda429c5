from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulmt.errors import ConfigError, DataError
from simulmt.runtime import demo
from simulmt.runtime.bundle import SYNTHETIC
from simulmt.runtime.stream import Translator
from simulmt.text import split_words


def test_words_come_at_their_pace(model: Translator) -> None:
    """At four words a second, computing takes a tenth of a second and must not slow the speaker down."""
    now, spoken = [0.0], []

    def sleep(seconds: float) -> None:
        now[0] += seconds

    for moment in demo.play(model, ["the old river", "the wind"], 1, 4, lambda: now[0], sleep):
        if moment.read:
            spoken.append(now[0])
        now[0] += 0.1
    assert spoken == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.25])


@given(sentence=st.lists(st.sampled_from(["the", " ", "old", "河", "大。", "\t", "é"])).map("".join))
@settings(max_examples=50, deadline=None)
def test_what_is_spoken_is_the_sentence(sentence: str) -> None:
    parts = demo.spoken(sentence)
    assert "".join(parts) == sentence.strip()
    assert [split_words(part) for part in parts] == [[word] for word in split_words(sentence)]


@pytest.mark.parametrize("language", [*demo.SENTENCES, SYNTHETIC])
def test_the_samples_take_less_than_a_minute_to_speak(model: Translator, language: str) -> None:
    config = replace(model.config, source_language=language)
    words = split_words(" ".join(demo.sentences_for(config, None)))
    assert 20 < len(words) < 2.5 * 50


def test_an_unknown_language_needs_a_text(model: Translator) -> None:
    config = replace(model.config, source_language="fi")
    with pytest.raises(ConfigError, match=r"no sample text in 'fi'.*--text"):
        demo.sentences_for(config, None)


def test_a_file_without_text(model: Translator, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text(" \n\n", encoding="utf-8")
    with pytest.raises(DataError, match="empty: contains no text"):
        demo.sentences_for(model.config, tmp_path / "empty")


def test_percentiles() -> None:
    found = demo._percentiles([float(value) for value in range(101)])
    assert (found.median, found.p95, found.p99) == (50, 95, 99)


def test_a_text_of_unknown_words_cannot_be_timed(model: Translator) -> None:
    with pytest.raises(DataError, match=r"no word that .* knows"):
        demo.measure(lambda: model, ["\u200b 😀"], 1, threads=1)
