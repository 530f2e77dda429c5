from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import accumulate, combinations, pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from simulmt.errors import ConfigError, StreamError
from simulmt.model.ctc import CTCModel
from simulmt.runtime.bundle import Kind
from simulmt.runtime.stream import Commit, Lag, Stream, StreamState, Translator, load
from simulmt.text import BLANK, END, Detokenizer, Tokenizer, split_words
from simulmt.text.words import ends_sentence
from simulmt.train.export import TrainedModel
from tiny_models import (
    DELAYS,
    LONGEST,
    MAX_WAITS,
    STABILITIES,
    by_policy,
    collapse,
    facts,
    joined,
    penalty_of,
    reference,
    states_with_visible_keys,
    trained,
    translator,
)

SYSTEMS: list[tuple[Kind, str]] = [
    ("ctc", "fp32"),
    ("ctc", "int8"),
    ("ctc", "whole words"),
    ("transducer", "fp32"),
    ("transducer", "int8"),
    ("wait-k", "fp32"),
    ("wait-k", "int8"),
    ("wait-k", "policy"),
    ("wait-k", "int8 policy"),
    ("full-sentence", "fp32"),
    ("full-sentence", "int8"),
]
# fmt: off
WORDS = [
    "the", "old", "bridge", "over", "river", "wind's", "closed,", "driver", "河", "大", "(frozen)", "10:45", "Mr.",
    "window!?", "end.", "。", "\u00ad", "x", "7.",
]
# fmt: on
texts = st.lists(st.sampled_from(WORDS), max_size=30).map(" ".join)
BLANK_DECIDES = "waiter is from tickets knew"  # where at delay 3 the blank penalty decides what is written
PATIENT = "the quick waiter juggled five boxes of frozen pizza"  # where a policy reads on
delays = st.sampled_from(DELAYS)
fuzz = settings(max_examples=25, deadline=None)


@pytest.fixture(scope="session")
def networks(source_tokenizer: Tokenizer, target_tokenizer: Tokenizer) -> dict[Kind, TrainedModel]:
    kinds: tuple[Kind, ...] = ("ctc", "transducer", "wait-k", "full-sentence")
    return {kind: trained(kind, source_tokenizer, target_tokenizer) for kind in kinds}


@pytest.fixture(scope="session")
def seeing_words(source_tokenizer: Tokenizer, target_tokenizer: Tokenizer) -> TrainedModel:
    """A CTC network with `whole_words`."""
    return trained("ctc", source_tokenizer, target_tokenizer, whole_words=True)


@pytest.fixture(scope="session")
def deciding(source_tokenizer: Tokenizer, target_tokenizer: Tokenizer) -> TrainedModel:
    """A wait-k network with a policy."""
    return trained("wait-k", source_tokenizer, target_tokenizer, policy=True)


@pytest.fixture(scope="session")
def translators(
    networks: dict[Kind, TrainedModel],
    seeing_words: TrainedModel,
    deciding: TrainedModel,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[tuple[str, str], Translator]:
    folder = tmp_path_factory.mktemp("bundles")
    made: dict[tuple[str, str], Translator] = {
        (kind, precision): translator(networks[kind], kind, precision, folder)  # type: ignore[arg-type]
        for kind, precision in SYSTEMS
        if precision in ("fp32", "int8")
    }
    made["ctc", "whole words"] = translator(seeing_words, "ctc", "fp32", folder, "whole-words")
    policy = {"stabilities": STABILITIES}
    made["wait-k", "policy"] = translator(deciding, "wait-k", "fp32", folder, "policy", **policy)
    made["wait-k", "short waits"] = translator(
        deciding, "wait-k", "fp32", folder, "short", **policy, max_waits=MAX_WAITS
    )
    made["wait-k", "int8 policy"] = translator(deciding, "wait-k", "int8", folder, "int8-policy", **policy)
    return made


@pytest.fixture(scope="session")
def ctc(translators: dict[tuple[str, str], Translator]) -> Translator:
    return translators["ctc", "fp32"]


def delay_for(system: tuple[str, str], delay: int) -> int | None:
    return None if system[0] == "full-sentence" else delay


def open_stream(model: Translator, delay: int | None = None, beam: int = 1) -> Stream:
    """Open a stream after invalidating what earlier ones left in the caches."""
    for pool in model.decoder.caches.pools.values():
        for row in range(pool.block.shape[1]):
            if pool.holder(row) is None:
                pool.block[:, row] = 1e3
    return model.stream(delay, beam)


def at_once(model: Translator, text: str, delay: int | None, beam: int = 1) -> list[Commit]:
    stream = open_stream(model, delay, beam)
    return stream.push(text) + stream.finish()


def sentences_of(text: str, tokenizer: Tokenizer) -> list[str]:
    """Split a text into sentences by the definition of where they end."""
    sentences, words = list[str](), list[str]()
    for word in split_words(text):
        words.append(word)
        read = sum(len(tokenizer.encode_word(before)) for before in words[:-1])
        if ends_sentence(word, "en", is_first=read == 0):
            sentences.append(" ".join(words))
            words = []
    return [sentence for sentence in [*sentences, " ".join(words)] if tokenizer.encode(sentence)]


class TestAgainstPyTorch:
    @given(text=texts, delay=delays)
    @fuzz
    def test_whole_sentences(
        self, translators: dict[tuple[str, str], Translator], networks: dict[Kind, TrainedModel], text: str, delay: int
    ) -> None:
        for kind, network in networks.items():
            k = delay_for((kind, ""), delay)
            sentences = [s for s in sentences_of(text, network.source) if len(network.source.encode(s)) < LONGEST]
            commits = [at_once(translators[kind, "fp32"], sentence, k) for sentence in sentences]
            assert [joined(c) for c in commits] == [reference(network, sentence, k) for sentence in sentences]

    @given(text=texts, delay=delays)
    @example(text="driver bridge closed, driver.", delay=1)
    @fuzz
    def test_whole_words_are_seen(
        self, translators: dict[tuple[str, str], Translator], seeing_words: TrainedModel, text: str, delay: int
    ) -> None:
        network, model = seeing_words, translators["ctc", "whole words"]
        assert model.config.whole_words
        for sentence in sentences_of(text, network.source):
            if len(network.source.encode(sentence)) < LONGEST:
                assert joined(at_once(model, sentence, delay)) == reference(network, sentence, delay)

    def test_whole_words_change_the_output(
        self, networks: dict[Kind, TrainedModel], seeing_words: TrainedModel
    ) -> None:
        """The two networks have the same weights."""
        sentence = "driver bridge closed, driver."
        assert reference(networks["ctc"], sentence, 1) != reference(seeing_words, sentence, 1)
        plain, whole = (network.model.encoder.embedding.weight for network in (networks["ctc"], seeing_words))
        assert torch.equal(plain, whole)

    def test_a_word_that_is_too_long_for_a_sentence_is_cut(
        self, translators: dict[tuple[str, str], Translator], seeing_words: TrainedModel
    ) -> None:
        word = 30 * "xz"
        pieces = seeing_words.source.encode_word(word)
        room = LONGEST - 1
        assert room < len(pieces) < 2 * room
        scores = [logits_of(seeing_words, [*part, END], 1) for part in (pieces[:room], pieces[room:])]
        parts = [seeing_words.target.decode(collapse(each, penalty_of(1))) for each in scores]
        assert joined(at_once(translators["ctc", "whole words"], word, 1)) == " ".join(parts)

    def test_the_blank_penalty_changes_something(self, networks: dict[Kind, TrainedModel]) -> None:
        network = networks["ctc"]
        scores = logits_of(network, [*network.source.encode(BLANK_DECIDES), END], 3)
        assert network.target.decode(collapse(scores, 0.0)) != reference(network, BLANK_DECIDES, 3)

    @pytest.mark.parametrize("system", ["fp32", "whole words"])
    @given(text=texts, changes=st.lists(delays, min_size=1, max_size=6), every=st.integers(1, 4))
    @example(text="driver bridge driver bridge driver", changes=[5, 5, 1], every=2)
    @fuzz
    def test_steps_with_changing_delays(
        self,
        translators: dict[tuple[str, str], Translator],
        networks: dict[Kind, TrainedModel],
        seeing_words: TrainedModel,
        system: str,
        text: str,
        changes: list[int],
        every: int,
    ) -> None:
        """The delay changes every few words; when it falls, a frame sees less than the one before."""
        network = seeing_words if system == "whole words" else networks["ctc"]
        words = [word for word in split_words(text) if not ends_sentence(word, "en")][:12]
        schedule = [changes[index // every % len(changes)] for index in range(len(words))]
        stream, written = open_stream(translators["ctc", system], schedule[0] if schedule else 1), ""
        for word, delay in zip(words, schedule, strict=True):
            stream.set_delay(delay)
            written += joined(stream.push(f"{word} "))
        assert written + joined(stream.finish()) == by_steps(network, words, schedule)

    @pytest.mark.parametrize("name", ["policy", "short waits"])
    @given(text=texts, changes=st.lists(delays, min_size=1, max_size=6), every=st.integers(1, 4))
    @example(text=PATIENT, changes=[1], every=1)
    @example(text=PATIENT, changes=[3], every=1)
    @example(text=PATIENT, changes=[5, 1, 3], every=2)
    @fuzz
    def test_a_policy_with_changing_delays(
        self,
        translators: dict[tuple[str, str], Translator],
        deciding: TrainedModel,
        name: str,
        text: str,
        changes: list[int],
        every: int,
    ) -> None:
        """Text and words read are those of a plain implementation of the policy."""
        words = [word for word in split_words(text) if not ends_sentence(word, "en")]
        lengths = accumulate(len(deciding.source.encode_word(word)) for word in words)
        words = words[: sum(length < LONGEST for length in lengths)]  # a longer sentence would be cut
        schedule = [changes[index // every % len(changes)] for index in range(len(words))]
        stream, commits = open_stream(translators["wait-k", name], changes[0]), list[Commit]()
        for word, delay in zip(words, schedule, strict=True):
            stream.set_delay(delay)
            commits += stream.push(f"{word} ")
        commits += stream.finish()
        found = [(commit.text, commit.source_words) for commit in commits]
        max_waits = translators["wait-k", name].bundle.config.max_waits or (0,) * len(DELAYS)
        assert found == texts_by_policy(deciding, words, schedule, max_waits)

    def test_a_threshold_changes_something(self, translators: dict[tuple[str, str], Translator]) -> None:
        bundle = translators["wait-k", "policy"].bundle
        thresholds = (0.0, 0.6, 0.7, STABILITIES[DELAYS.index(3)])
        found = [facts(at_once(Translator(bundle.with_policy(each), threads=1), PATIENT, 3)) for each in thresholds]
        assert all(one != other for one, other in combinations(found, 2))
        assert found[3] == facts(at_once(translators["wait-k", "policy"], PATIENT, 3))

    def test_a_maximum_wait_changes_something(self, translators: dict[tuple[str, str], Translator]) -> None:
        bundle = translators["wait-k", "policy"].bundle
        found = [facts(at_once(Translator(bundle.with_policy(1.0, wait), threads=1), PATIENT, 3)) for wait in (0, 1, 3)]
        assert all(one != other for one, other in combinations(found, 2))

    def test_a_policy_that_never_writes_early_translates_whole_sentences(
        self, translators: dict[tuple[str, str], Translator], networks: dict[Kind, TrainedModel]
    ) -> None:
        """The other weights are those of the network without a policy."""
        patient = Translator(translators["wait-k", "policy"].bundle.with_policy(1.0), threads=1)
        commits = at_once(patient, PATIENT, 1)
        assert joined(commits) == reference(networks["wait-k"], PATIENT, None)
        assert {commit.source_words for commit in commits} == {len(PATIENT.split())}

    @pytest.mark.parametrize(("kind", "delay"), [("full-sentence", None), ("wait-k", max(DELAYS))])
    @given(text=texts, beam=st.integers(2, 3))
    @settings(max_examples=10, deadline=None)
    def test_beam_search_of_whole_sentences(
        self,
        translators: dict[tuple[str, str], Translator],
        networks: dict[Kind, TrainedModel],
        kind: Kind,
        delay: int | None,
        text: str,
        beam: int,
    ) -> None:
        network = networks[kind]
        sentences = [s for s in sentences_of(text, network.source) if len(network.source.encode(s)) < LONGEST][:2]
        for sentence in sentences:
            found = joined(at_once(translators[kind, "fp32"], sentence, delay, beam))
            assert found == reference(network, sentence, None, beam)

    def test_a_beam_search_reads_whole_sentences(self, translators: dict[tuple[str, str], Translator]) -> None:
        model = translators["wait-k", "policy"]
        assert model.translate(PATIENT, beam=1) != model.translate(PATIENT, beam=3)


def texts_by_policy(
    network: TrainedModel, words: Sequence[str], schedule: Sequence[int], max_waits: Sequence[int]
) -> list[tuple[str, int]]:
    """Return the texts that a wait-k network with a policy writes, each with the number of words read before it."""
    read = list[tuple[list[int], int, int]]()  # tokens, delay and number of each word
    for number, (word, delay) in enumerate(zip(words, schedule, strict=True), start=1):
        tokens = network.source.encode_word(word)
        read += [(part, delay, number) for part in network.source.split_to_word_tokens(tokens)]
    if not read:
        return []
    parts, delays_of_parts, numbers = zip(*read, strict=True)
    numbers = (*numbers, len(words))  # END comes after all words
    detokenizer = Detokenizer(network.target)
    written = [
        (detokenizer.push(token), numbers[parts_read - 1])
        for token, parts_read in by_policy(network, parts, delays_of_parts, max_waits)
    ]
    return [(text, words_read) for text, words_read in written if text]


@torch.inference_mode()
def by_steps(network: TrainedModel, words: Sequence[str], schedule: Sequence[int]) -> str:
    """Translate a stream whose delay changes from word to word."""
    model = network.model
    assert isinstance(model, CTCModel)
    tokens, waited_for, visible = list[int](), list[int](), list[int]()  # the latter two for each state

    def read(word: Sequence[int], delay: int) -> None:
        tokens.extend(word)
        while (position := len(visible)) < len(tokens) and (position + delay <= len(tokens) or word == [END]):
            waited_for.append(delay)
            visible.append(min(seen(network, tokens, position + delay), len(tokens)))

    for word, delay in zip(words, schedule, strict=True):
        for pieces in network.source.split_to_word_tokens(network.source.encode_word(word)):
            read(pieces, delay)
    if not tokens:
        return ""
    read([END], schedule[-1])
    scores = model.logits(model.frames(states_with_visible_keys(model.encoder, torch.tensor([tokens]), visible)))[0]
    penalties = torch.tensor([penalty_of(delay) for delay in waited_for])
    scores[:, BLANK] -= penalties.repeat_interleave(model.mu)
    return network.target.decode(collapse(scores, 0.0))


def seen(network: TrainedModel, tokens: Sequence[int], count: int) -> int:
    """Return how many tokens are visible once the first `count` have been read."""
    assert isinstance(network.model, CTCModel)
    if network.model.encoder.word_starts is not None:
        while count < len(tokens) and tokens[count] != END and network.source.pieces[tokens[count]][0] != "▁":
            count += 1
    return count


@torch.inference_mode()
def logits_of(network: TrainedModel, tokens: Sequence[int], delay: int) -> torch.Tensor:
    """Return the scores [F V] of a whole sentence."""
    assert isinstance(network.model, CTCModel)
    return network.model(torch.tensor([tokens]), torch.tensor([len(tokens)]), delay)[0]


class TestContract:
    @pytest.mark.parametrize("system", SYSTEMS)
    @given(text=texts, delay=delays, cuts=st.lists(st.integers(0, 12), max_size=40))
    @fuzz
    def test_chunks_do_not_matter(
        self,
        translators: dict[tuple[str, str], Translator],
        system: tuple[str, str],
        text: str,
        delay: int,
        cuts: list[int],
    ) -> None:
        model, k = translators[system], delay_for(system, delay)
        stream, commits, rest = open_stream(model, k), list[Commit](), text
        for cut in cuts:
            commits += stream.push(rest[:cut])
            rest = rest[cut:]
        commits += stream.push(rest) + stream.finish()
        assert facts(commits) == facts(at_once(model, text, k))

    @pytest.mark.parametrize("system", SYSTEMS)
    @given(data=st.data(), several=st.lists(st.tuples(texts, delays), min_size=2, max_size=5))
    @settings(max_examples=15, deadline=None)
    def test_output_does_not_depend_on_the_batch(
        self,
        translators: dict[tuple[str, str], Translator],
        system: tuple[str, str],
        data: st.DataObject,
        several: list[tuple[str, int]],
    ) -> None:
        """Streams of different texts, delays and ages are advanced in changing groups."""
        model = translators[system]
        streams = [open_stream(model, delay_for(system, delay)) for _, delay in several]
        rests = [text for text, _ in several]
        commits: list[list[Commit]] = [[] for _ in several]
        for _ in range(6):
            group = data.draw(st.lists(st.integers(0, len(several) - 1), unique=True))
            sizes = [data.draw(st.integers(0, 40)) for _ in group]
            chunks = [(streams[index], rests[index][:size]) for index, size in zip(group, sizes, strict=True)]
            for index, size, news in zip(group, sizes, model.push_many(chunks), strict=True):
                rests[index] = rests[index][size:]
                commits[index] += news
        for stream, rest in zip(streams, rests, strict=True):
            stream.accept(rest)
            stream.accept_finish()
        for mine, news in zip(commits, model.drain(streams), strict=True):
            mine += news
        alone = [at_once(model, text, delay_for(system, delay)) for text, delay in several]
        assert list(map(facts, commits)) == list(map(facts, alone))

    @given(text=texts, delay=delays)
    @fuzz
    def test_commits_count_up(self, ctc: Translator, text: str, delay: int) -> None:
        commits = at_once(ctc, text, delay)
        assert [commit.seq for commit in commits] == list(range(1, len(commits) + 1))
        assert all(commit.text for commit in commits)
        for before, after in pairwise(commits):
            assert (before.sentence, before.source_words) <= (after.sentence, after.source_words)
        assert all(commit.source_words <= len(split_words(text)) for commit in commits)

    @given(text=texts)
    @fuzz
    def test_sentences_are_translated_separately_and_joined_by_spaces(
        self, ctc: Translator, networks: dict[Kind, TrainedModel], text: str
    ) -> None:
        sentences = sentences_of(text, networks["ctc"].source)
        short = [s for s in sentences if len(networks["ctc"].source.encode(s)) < LONGEST]
        whole = joined(at_once(ctc, " ".join(short), 2))
        assert whole == " ".join(filter(None, (reference(networks["ctc"], sentence, 2) for sentence in short)))

    @pytest.mark.parametrize("system", SYSTEMS)
    @given(text=st.text(max_size=60), cut=st.integers(0, 60))
    @fuzz
    def test_any_text_is_translated(
        self, translators: dict[tuple[str, str], Translator], system: tuple[str, str], text: str, cut: int
    ) -> None:
        stream = open_stream(translators[system])
        assert facts(stream.push(text[:cut]) + stream.push(text[cut:]) + stream.finish()) == facts(
            at_once(translators[system], text, None)
        )

    @pytest.mark.parametrize("text", ["", " \n\t", "\x00\x01", "\ud83d", "a\udc80b", "\ufeff", "\u200b", "e" * 1000])
    def test_odd_text_is_translated(self, ctc: Translator, text: str) -> None:
        assert joined(at_once(ctc, text, 1)).strip() == joined(at_once(ctc, text, 1))

    def test_an_unfinished_word_waits(self, ctc: Translator) -> None:
        stream = open_stream(ctc, 1)
        assert stream.push("bridg") == []
        assert stream.push("e") == []
        assert stream.push(" ")[0].source_words == 1

    def test_an_idle_stream_is_unaffected_by_others(self, ctc: Translator) -> None:
        """A stream that has nothing to do stays as it is while others advance."""
        idle, busy = open_stream(ctc, 3), open_stream(ctc, 1)
        idle.push("the old ")
        alone = facts(at_once(ctc, "the old bridge", 3))
        for word in WORDS:
            busy.push(f"{word} ")
        assert facts(idle.push("bridge") + idle.finish()) == alone


class TestSentences:
    def test_an_endless_sentence_is_cut_at_the_bound(self, ctc: Translator, networks: dict[Kind, TrainedModel]) -> None:
        network = networks["ctc"]
        words = ["window"] * 100
        pieces = len(network.source.encode_word("window"))
        each, left = divmod(LONGEST - 1, pieces)
        assert left > 0, "the bound must fall into the middle of a word"
        expected = [reference(network, " ".join(words[i : i + each]), 2) for i in range(0, len(words), each)]
        commits = at_once(ctc, " ".join(words), 2)
        assert joined(commits) == " ".join(expected)
        assert commits[-1].sentence == len(expected) - 1

    def test_a_word_longer_than_the_sentence_limit_is_cut(self, ctc: Translator) -> None:
        word = "q" * 127
        assert len(ctc.bundle.source.encode_word(word)) > LONGEST
        stream = open_stream(ctc, 1)
        stream.push(f"{word} the bridge")
        stream.finish()
        assert stream.sentences_finished > 1

    def test_a_number_right_after_a_cut_does_not_end_the_sentence(self, ctc: Translator) -> None:
        """As in a list, "3." at the start of a sentence is a label."""
        source = ctc.bundle.source
        filler = next(word for word in ("a", "the", "we") if len(source.encode_word(word)) == 1)
        stream = open_stream(ctc, 2)
        stream.push(f"{filler} " * (LONGEST - 2) + "1234. the old bridge ")
        assert len(source.encode_word("1234.")) > 1
        assert stream.sentences_finished == 1
        stream.finish()
        assert stream.sentences_finished == 2

    def test_only_its_end_ends_a_sentence_that_is_not_segmented(self, ctc: Translator) -> None:
        stream = ctc.stream(2, segment=False)
        stream.push("wait. is it closed? no! ")
        assert stream.sentences_finished == 0
        stream.end_sentence()
        assert stream.sentences_finished == 1

    def test_end_sentence_ends_it_without_a_full_stop(
        self, ctc: Translator, networks: dict[Kind, TrainedModel]
    ) -> None:
        stream = open_stream(ctc, 3)
        written = joined(stream.push("the old bridge") + stream.end_sentence())
        assert written == reference(networks["ctc"], "the old bridge", 3)
        assert stream.sentences_finished == 1
        assert stream.end_sentence() == []

    def test_a_line_gives_a_line(self, translators: dict[tuple[str, str], Translator]) -> None:
        lines = ["the old bridge", "", "  ", "We waited. The wind!", *(f"river {n}" for n in range(70))]
        for model in translators.values():
            found = model.translate("\n".join(lines)).split("\n")
            assert found == [joined(at_once(model, line, model.config.largest_delay)) for line in lines]
            found = model.translate("\n".join(lines), model.config.default_delay).split("\n")
            assert found == [joined(at_once(model, line, None)) for line in lines]

    def test_sentences_of_an_unspaced_target_are_joined_without_spaces(
        self, source_tokenizer: Tokenizer, ideograph_tokenizer: Tokenizer, tmp_path: Path
    ) -> None:
        network = trained("ctc", source_tokenizer, ideograph_tokenizer)
        model = translator(network, "ctc", "fp32", tmp_path)
        first, second = "the old bridge.", "the river."
        expected = reference(network, first, 1) + reference(network, second, 1)
        assert joined(at_once(model, f"{first} {second}", 1)) == expected


class TestState:
    def test_a_finished_stream_refuses_everything(self, ctc: Translator) -> None:
        stream = open_stream(ctc)
        states = [stream.state, stream.finish() or stream.state]
        assert states == [StreamState.OPEN, StreamState.FINISHED]
        calls: list[tuple[str, Callable[[], object]]] = [
            ("push", lambda: stream.push("more")),
            ("end_sentence", stream.end_sentence),
            ("finish", stream.finish),
            ("set_delay", lambda: stream.set_delay(1)),
            ("push", lambda: stream.accept("more")),
        ]
        for name, call in calls:
            with pytest.raises(StreamError, match=f"^{name}: this stream is finished"):
                call()

    def test_streams_of_another_translator_are_refused(self, ctc: Translator) -> None:
        mine, foreign = open_stream(ctc, 1), Translator(ctc.bundle, threads=1).stream(1)
        with pytest.raises(StreamError, match="another translator"):
            ctc.push_many([(mine, "the old bridge "), (foreign, "the river ")])
        assert not mine.is_due
        mine.accept("the old bridge ")
        foreign.accept("the river ")
        for call in (ctc.drain, ctc.step):
            with pytest.raises(StreamError, match="another translator"):
                call([mine, foreign])
        assert joined(mine.push("")) == joined(open_stream(ctc, 1).push("the old bridge "))

    def test_negative_threads_are_refused(self, ctc: Translator) -> None:
        with pytest.raises(ConfigError, match=r"threads .* got -1"):
            load(ctc.bundle.directory, threads=-1)

    def test_only_trained_delays_are_accepted(self, translators: dict[tuple[str, str], Translator]) -> None:
        stream = translators["ctc", "fp32"].stream()
        assert stream.delay == DELAYS[0]
        with pytest.raises(StreamError, match=r"delay 4: .* trained for 1, 2, 3, 5"):
            stream.set_delay(4)
        with pytest.raises(StreamError, match="whole sentences"):
            translators["full-sentence", "fp32"].stream(3)
        assert translators["full-sentence", "fp32"].stream().delay is None

    def test_impossible_beams_are_refused(self, translators: dict[tuple[str, str], Translator]) -> None:
        with pytest.raises(StreamError, match="beam"):
            translators["ctc", "fp32"].stream(beam=0)
        with pytest.raises(StreamError, match="beam 2: a beam search reads whole sentences; use delay 5, or beam 1"):
            translators["wait-k", "fp32"].stream(beam=2)
        with pytest.raises(StreamError, match="ctc model writes while it reads"):
            translators["ctc", "fp32"].stream(beam=2)


class TestLag:
    @pytest.mark.parametrize("delay", [1, 2, 3])
    def test_lag_is_split_by_cause(self, ctc: Translator, delay: int) -> None:
        """Words arrive at seconds 10, 11, ... and are computed from second 25 to 26."""
        ticks = iter([25.0, 26.0])
        model = Translator(ctc.bundle, threads=1, clock=lambda: next(ticks))
        stream = open_stream(model, delay)
        words = [word for word in ("the", "river", "in", "was", "we") if len(ctc.bundle.source.encode_word(word)) == 1]
        for second, word in enumerate(words, start=10):
            stream.accept(f"{word} ", arrived=float(second))
        model.step([stream])
        commits = stream.take()
        assert commits
        for commit in commits:
            queue = 1000 * (25 - 10 - (commit.source_words - 1))
            assert commit.lag == Lag(policy=1000 * (delay - 1), queue=queue, compute=1000)

    def test_total_is_the_sum(self) -> None:
        assert Lag(1.0, 2.0, 4.0).total == 7.0


def test_the_runtime_needs_no_pytorch(ctc: Translator) -> None:
    program = (
        "import sys, simulmt\n"
        f"model = simulmt.load({str(ctc.bundle.directory)!r}, threads=1)\n"
        "stream = model.stream(delay=3)\n"
        "assert stream.push('the old bridge ') + stream.finish()\n"
        "print(*sorted({'torch', 'onnx', 'jaxtyping', 'simulmt.model', 'simulmt.train'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.slow
def test_a_million_words_cost_the_same_a_word_and_leave_no_trace(ctc: Translator) -> None:
    stream, page = open_stream(ctc, 3), " ".join(WORDS) + " "
    pages = 1_000_000 // len(WORDS)
    marks = []  # seconds and bytes, taken ten times on the way
    for number in range(pages):
        if number % (pages // 10) == 0:
            marks.append((time.process_time(), resident_bytes()))
        stream.push(page)
    paces = [after[0] - before[0] for before, after in pairwise(marks)]
    assert statistics.median(paces[5:]) < 1.3 * statistics.median(paces[:4])
    assert marks[-1][1] - marks[1][1] < 20e6


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_a_word_without_any_known_piece_begins_no_sentence(model: Translator) -> None:
    expected = [commit.text for commit in model.stream(1).push("the old bridge. ")]
    stream = model.stream(1)
    assert [commit.text for commit in stream.push("the old bridge. 😀 ♪ \u200b ")] == expected
    assert (stream.sentences_finished, stream.finish()) == (1, [])


def test_words_without_any_known_piece_are_not_stored(model: Translator) -> None:
    stream = model.stream(1)
    stream.push("the old bridge. " + "\u200b " * 1000)
    undone = stream.undo()
    assert undone is not None
    assert undone.source == "the old bridge."


@pytest.mark.parametrize(
    ("text", "segment", "sentences"),
    [
        ("the old river " * 8, True, 2),
        ("the old river, " * 8, True, 1),  # never ten tokens without a comma
        ("the old river " * 8, False, 1),
        ("the old river. " * 2, True, 2),
    ],
)
def test_text_without_punctuation_is_cut(
    model: Translator, monkeypatch: pytest.MonkeyPatch, text: str, segment: bool, sentences: int
) -> None:
    tokens = len(model.bundle.source.encode("the old river " * 8))
    monkeypatch.setattr("simulmt.runtime.stream.MAX_UNPUNCTUATED", tokens // 2 + 1)
    whole, by_character = model.stream(1, segment=segment), model.stream(1, segment=segment)
    commits = whole.push(text) + whole.finish()
    assert whole.sentences_finished == sentences
    small = [commit for character in text for commit in by_character.push(character)] + by_character.finish()
    assert joined(small) == joined(commits)
