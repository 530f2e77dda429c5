from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eval.sentences import ENGLISH
from simulmt.errors import StreamError
from simulmt.eval.instances import CompleteWords, split_units
from simulmt.eval.results import Unit
from simulmt.eval.systems import SentenceStream, Translation, count_pieces, time_words, translate_all
from simulmt.stream import Translator
from simulmt.text import split_words
from tiny_models import LONGEST, joined

WORDS = st.lists(
    st.sampled_from(["the", "bridge", "closed.", "Wait!", "小心", "harbour", "x。y"]), min_size=1, max_size=30
)


def translate(translator: Translator, sources: list[str], delay: int | None, unit: Unit) -> list[Translation]:
    return translate_all(translator, sources, delay, unit, lambda _: None)


def word_by_word(translator: Translator, source: str, delay: int | None, unit: Unit) -> Translation:
    """What the definitions say: count the words pushed when each unit is complete."""
    stream, words = SentenceStream(translator, delay), CompleteWords(translator.bundle.target.spaced)
    text, delays = "", []
    for read, word in enumerate(source.split(), start=1):
        commits = stream.push(f"{word} ")
        text += joined(commits)
        delays += [read] * len(split_units("".join(words.push(commit.text) for commit in commits), unit))
    rest = joined(stream.finish())
    delays += [read] * len(split_units(words.push(rest) + words.finish(), unit))
    return Translation(text + rest, tuple(delays))


@settings(deadline=None, max_examples=15)
@given(st.lists(WORDS.map(" ".join), min_size=1, max_size=4), st.sampled_from([1, 3]))
@example(ENGLISH, 3)  # the last of which is just too long for the model
def test_many_at_once_is_one_by_one_word_by_word(
    german: Translator, chinese: Translator, sources: list[str], delay: int
) -> None:
    for translator, unit in ((german, "word"), (german, "char"), (chinese, "char")):
        expected = [word_by_word(translator, source, delay, unit) for source in sources]  # type: ignore[arg-type]
        assert translate(translator, sources, delay, unit) == expected  # type: ignore[arg-type]


def test_there_is_a_delay_for_each_unit(german: Translator, chinese: Translator) -> None:
    for translation in translate(german, ENGLISH, 3, "word"):
        assert len(translation.delays) == len(translation.text.split())
    for translation in translate(chinese, ENGLISH, 3, "char"):
        assert len(translation.delays) == len(translation.text.replace(" ", ""))


def test_a_line_is_one_sentence(german: Translator) -> None:
    stream = SentenceStream(german, 3)
    commits = [*stream.push("Wait. Is the harbour closed? Nobody knows. "), *stream.finish()]
    assert {commit.sentence for commit in commits} == {0}
    assert stream.sentences_finished == 1
    plain = german.stream(3)
    assert {commit.sentence for commit in [*plain.push("Wait. Is it closed? Yes. "), *plain.finish()]} == {0, 1, 2}


def test_a_line_too_long_for_the_model_is_cut(german: Translator) -> None:
    source = " ".join(["bridge"] * LONGEST)
    stream = SentenceStream(german, 3)
    stream.push(source)
    stream.finish()
    assert stream.sentences_finished > 1
    (translation,) = translate(german, [source], 3, "word")
    assert translation.delays[-1] == LONGEST


def test_a_whole_sentence_model_writes_at_the_end(teacher: Translator) -> None:
    for source, translation in zip(ENGLISH, translate(teacher, ENGLISH, None, "word"), strict=True):
        assert set(translation.delays) <= {len(source.split())}


def test_a_delay_that_was_not_trained_is_refused(german: Translator) -> None:
    with pytest.raises(StreamError, match="was trained for 1, 2, 3, 5"):
        translate(german, ENGLISH, 4, "word")


def test_progress_counts_sentences(german: Translator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simulmt.eval.systems.STREAMS", 2)
    news: list[int] = []
    assert translate_all(german, ENGLISH, 1, "word", news.append) == translate(german, ENGLISH, 1, "word")
    assert news == [2, 4, 5]


def test_each_word_is_timed(german: Translator, clock: Iterator[float]) -> None:
    """The clock is read before and after each word: at 0 and 1 s, 3 and 6 s, 10 and 15 s, 21 and 28 s."""
    assert time_words(german, "The old bridge closed", 3, clock.__next__) == [1.0, 3.0, 5.0, 7.0]


def test_pieces_are_those_that_the_model_reads(german: Translator) -> None:
    for source in ENGLISH:
        counts = count_pieces(german, source)
        assert len(counts) == len(source.split())
        assert sum(counts) == len(german.bundle.source.encode(source)) + 1
        assert all(count >= len(split_words(word)) for count, word in zip(counts, source.split(), strict=True))
    assert count_pieces(german, "\u200b the") == [1, 1 + len(german.bundle.source.encode("the"))]
