"""Stabilising revised text: when a word is stable, in which form, and where sentences end."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulmt.errors import ConfigError
from simulmt.runtime.revisions import Hypothesis, Stabiliser, Word, feed
from simulmt.runtime.stream import Translator

END = "|"  # of a sentence


def shown(words: Iterable[Word]) -> str:
    """Join words, with a mark where a sentence ends."""
    return " ".join(word.text + (END if word.ends_sentence else "") for word in words)


def partials(*texts: str) -> list[str]:
    """Return the stable words after each of these partial hypotheses, one second apart."""
    stabiliser = Stabiliser(timeout=1000)
    return [shown(stabiliser.push(Hypothesis(text), float(number))) for number, text in enumerate(texts)]


class TestLocalAgreement:
    def test_a_word_is_stable_when_two_consecutive_updates_agree(self) -> None:
        assert partials("a b c", "a x c", "a x y", "a x y z") == ["", "a", "x", "y"]

    def test_the_last_word_of_an_open_segment_waits(self) -> None:
        assert partials("good morn", "good morn", "good morning every") == ["", "good", ""]

    def test_agreement_must_be_consecutive(self) -> None:
        assert partials("one two", "won two", "one two", "one two three") == ["", "", "", "one two"]

    def test_case_and_marks_do_not_matter_to_agreement(self) -> None:
        assert partials("The best.", "the best of", "the best of all") == ["", "the best", "of"]

    def test_punctuation_also_needs_agreement(self) -> None:
        assert partials("Well, it. is x", "Well, it, is x y")[1] == "Well, it is x"

    def test_a_full_stop_before_a_lower_case_word_is_dropped(self) -> None:
        assert partials("so it was. it x", "so it was. it x y")[1] == "so it was it x"
        assert partials("so it was. It x", "so it was. It x y")[1] == "so it was. It x"

    def test_numbers_and_capitals_pass_through(self) -> None:
        assert partials("In 1,740 NATO x", "In 1,740 NATO x y")[1] == "In 1,740 NATO x"

    def test_stable_words_stay_even_if_they_are_revised(self) -> None:
        assert partials("in to the x", "in to the x", "into the woods", "into the woods now") == [
            "", "in to the", "", "woods",
        ]  # fmt: skip
        assert partials("a b x", "a b x", "so a b c d", "so a b c d e") == ["", "a b", "", "c d"]

    def test_a_revision_of_a_stable_word_is_dropped_only_if_similar(self) -> None:
        assert partials("the woof x", "the woof x y", "the wolf x y z") == ["", "the woof x", "y"]
        assert partials("of the x", "of the inc", "of incredulous people", "of incredulous people now")[2:] == [
            "", "incredulous people",
        ]  # fmt: skip

    def test_slips_of_punctuation(self) -> None:
        assert partials("In short,, , the x", "In short,, , the x y")[1] == "In short, the x"

    def test_a_shorter_hypothesis_makes_no_word_stable(self) -> None:
        assert partials("a b c", "a b c", "a", "", "a b c d", "a b c d e") == ["", "a b", "", "", "", "c d"]


class TestFinalSegments:
    def test_all_words_of_a_final_segment_are_stable_with_their_punctuation(self) -> None:
        stabiliser = Stabiliser()
        stabiliser.push(Hypothesis("It is"), 0)
        assert shown(stabiliser.push(Hypothesis("It is far, friends.", is_final=True), 1)) == "It is far, friends. |"
        assert stabiliser.tentative == ""

    def test_a_segment_without_a_full_stop_ends_no_sentence_where_others_have_one(self) -> None:
        stabiliser = Stabiliser()
        assert shown(stabiliser.push(Hypothesis("Well, hello there.", True, 0), 0)) == "Well, hello there. |"
        assert shown(stabiliser.push(Hypothesis("and then", True, 1), 1)) == "and then"
        assert shown(stabiliser.push(Hypothesis("it stopped.", True, 2), 2)) == "it stopped. |"

    def test_every_segment_ends_a_sentence_where_there_is_no_punctuation(self) -> None:
        stabiliser = Stabiliser()
        for segment in range(3):
            text = "it is 3.5 or 1,740"
            assert shown(stabiliser.push(Hypothesis(text, True, segment), segment)) == f"{text} |"

    def test_a_sentence_ends_even_if_its_last_word_was_already_stable(self) -> None:
        stabiliser = Stabiliser(timeout=1)
        stabiliser.push(Hypothesis("it is far"), 0)
        assert shown(stabiliser.tick(2)) == "it is far"
        assert shown(stabiliser.push(Hypothesis("it is far.", True), 3)) == "|"

    def test_a_new_segment_ends_the_one_before(self) -> None:
        stabiliser = Stabiliser()
        stabiliser.push(Hypothesis("one two", segment=0), 0)
        assert shown(stabiliser.push(Hypothesis("three", segment=1), 1)) == "one two"
        assert stabiliser.tentative == "three"

    def test_words_declared_final_by_the_recogniser(self) -> None:
        stabiliser = Stabiliser()
        assert shown(stabiliser.push(Hypothesis("one, two. three four", stable=2), 0)) == "one, two."
        assert shown(stabiliser.push(Hypothesis("one two tree", stable=3), 1)) == "tree"

    def test_silence_gives_no_words(self) -> None:
        stabiliser = Stabiliser()
        assert stabiliser.push(Hypothesis("", True), 0) == []
        assert stabiliser.tick(1000) == []
        assert stabiliser.flush(1001) == []


class TestTime:
    def test_unchanged_words_are_stable_after_a_timeout(self) -> None:
        stabiliser = Stabiliser(timeout=2, pause=3)
        stabiliser.push(Hypothesis("good morning."), 10)
        assert stabiliser.tick(11.9) == []
        assert shown(stabiliser.tick(12)) == "good morning"
        assert stabiliser.tick(100) == []  # the segment may go on

    def test_a_sentence_without_a_full_stop_ends_after_a_pause(self) -> None:
        stabiliser = Stabiliser(timeout=2, pause=3)
        stabiliser.push(Hypothesis("Good, and", is_final=True), 10)
        assert stabiliser.tick(12.9) == []
        assert shown(stabiliser.tick(13)) == "|"
        assert stabiliser.tick(100) == []

    def test_every_change_restarts_the_timeout(self) -> None:
        stabiliser = Stabiliser(timeout=2)
        stabiliser.push(Hypothesis("good"), 0)
        stabiliser.push(Hypothesis("wood"), 1.5)
        assert stabiliser.tick(3) == []
        stabiliser.push(Hypothesis("wood"), 3)  # the same again is no change
        assert shown(stabiliser.tick(3.5)) == "wood"

    def test_flush_returns_all_words_and_ends_the_sentence(self) -> None:
        stabiliser = Stabiliser()
        stabiliser.push(Hypothesis("good morning"), 0)
        assert shown(stabiliser.flush(1)) == "good morning |"
        assert stabiliser.flush(2) == []

    def test_a_word_counts_from_its_first_appearance(self) -> None:
        stabiliser = Stabiliser()
        stabiliser.push(Hypothesis("one tow"), 1)
        stabiliser.push(Hypothesis("one two"), 2)
        stabiliser.push(Hypothesis("one two three"), 3)
        words = stabiliser.push(Hypothesis("one two three.", True), 4)
        assert [word.spoken for word in words] == [3, 3]
        stabiliser = Stabiliser()
        stabiliser.push(Hypothesis("one tow"), 1)
        assert [word.spoken for word in stabiliser.push(Hypothesis("one two x", stable=2), 2)] == [1, 2]

    def test_a_word_counts_from_its_place_in_the_audio(self) -> None:
        words = Stabiliser().push(Hypothesis("aaa b ccccc", True, start=10.0, end=16.0), 20)
        assert [word.spoken for word in words[:3]] == [12.0, 13.0, 16.0]

    def test_settings_must_be_positive(self) -> None:
        with pytest.raises(ConfigError, match="timeout must be above 0, got 0"):
            Stabiliser(timeout=0)
        with pytest.raises(ConfigError, match="pause must be above 0, got -1"):
            Stabiliser(pause=-1)


WORDS = st.lists(st.sampled_from("abcde"), max_size=8)


@given(st.lists(st.tuples(WORDS, st.booleans(), st.integers(0, 9)), max_size=12))
def test_a_revision_repeats_at_most_two_words(updates: list[tuple[list[str], bool, int]]) -> None:
    stabiliser, segment, now = Stabiliser(timeout=5, pause=5), 0, 0.0
    stable = 0  # words of the segment
    for words, is_final, seconds in updates:
        now += seconds
        stable += sum(bool(word.text) for word in stabiliser.tick(now))
        new = stabiliser.push(Hypothesis(" ".join(words), is_final, segment), now)
        added = sum(bool(word.text) for word in new)
        assert added + len(stabiliser.tentative.split()) <= max(0, len(words) - max(0, stable - 2))
        stable += added
        if is_final:
            assert stabiliser.tentative == ""
            stable = 0
            segment += 1


@given(WORDS, st.lists(st.integers(0, 8), max_size=10))
def test_growing_text_is_returned_unchanged(words: list[str], lengths: list[int]) -> None:
    """Hypotheses that only grow give the words of the last one, each once and in order."""
    stabiliser = Stabiliser()
    passed: list[str] = []
    for now, length in enumerate(sorted(lengths)):
        passed += [word.text for word in stabiliser.push(Hypothesis(" ".join(words[:length])), now) if word.text]
        assert passed == words[: len(passed)]
    passed += [word.text for word in stabiliser.push(Hypothesis(" ".join(words), True), 99) if word.text]
    assert passed == words


def test_a_stream_reads_certain_words_and_knows_how_long_they_took(model: Translator) -> None:
    stream = model.stream(1)
    feed(stream, [Word("good", 1.0), Word("morning", 2.0), Word("", 2.0, ends_sentence=True)], now=3.5)
    commits = model.drain([stream])[0]
    assert stream.sentences_finished == 1
    assert {commit.lag.recognition for commit in commits} <= {0.0, 2500.0, 1500.0}
    assert any(commit.lag.recognition for commit in commits)
    assert all(commit.lag.total >= commit.lag.recognition for commit in commits)
    whole = model.stream(1)
    whole.accept("good morning ")
    whole.accept_end()
    assert [commit.text for commit in commits] == [commit.text for commit in model.drain([whole])[0]]
