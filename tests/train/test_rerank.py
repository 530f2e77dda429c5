from __future__ import annotations

import json
import time
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from data.helpers import lines, write
from simulmt.data.corpus import Pair
from simulmt.data.store import Dataset
from simulmt.data.transforms import Dropped
from simulmt.errors import ConfigError, DataError, VocabularyError
from simulmt.model.beam import BeamConfig, Hypothesis, beam_search
from simulmt.text import END, Tokenizer
from simulmt.train import rewrite as rewriting
from simulmt.train.rerank import Direction, RerankConfig, Reranker, rerank_corpus
from simulmt.train.rewrite import CorpusTranslator, TranslationConfig
from simulmt.train.systems import System

from .helpers import fork
from .test_rewrite import results, save_random

CPU = torch.device("cpu")
SEARCH = BeamConfig(beam=4, max_ratio=0.5, max_extra=4)
CONFIG = RerankConfig(TranslationConfig(SEARCH, delay=2, batch_tokens=200, max_length=90))


@pytest.fixture(scope="module")
def reverse(data: Path, dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Direction:
    """Return a teacher from target to source, with vocabularies in its direction."""
    folder = tmp_path_factory.mktemp("reverse")
    for side, other in (("source", "target"), ("target", "source")):
        (folder / f"{side}.model").write_bytes((data / f"{other}.model").read_bytes())
    return Direction(save_random("teacher", dataset, folder / "run", seed=6, std=0.8), folder)


@pytest.fixture(scope="module")
def directions(data: Path, dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> dict[System, Direction]:
    systems: tuple[System, System] = ("teacher", "wait-k")
    return {
        system: Direction(save_random(system, dataset, tmp_path_factory.mktemp(system)), data) for system in systems
    }


@pytest.fixture(params=["teacher", "wait-k"])
def reranker(request: pytest.FixtureRequest, directions: dict[System, Direction], reverse: Direction) -> Reranker:
    return Reranker.load(directions[request.param], reverse, CONFIG, CPU)


@pytest.fixture
def forward(directions: dict[System, Direction]) -> Direction:
    return directions["wait-k"]


@pytest.fixture
def source(data: Path, tmp_path: Path) -> Path:
    """Write sentences, among them an empty one and one that is too long."""
    text = lines(data.parent / "text" / "train.source")[:24]
    text[3], text[15] = " \u3000", " ".join(text)
    return write(tmp_path / "text.source", text)


@pytest.fixture
def target(data: Path, tmp_path: Path) -> Path:
    """Write translations, among them an empty one and one that is too long."""
    text = lines(data.parent / "text" / "train.target")[:24]
    text[5], text[6] = "", " ".join(text)
    return write(tmp_path / "text.target", text)


def brute_force(translator: CorpusTranslator, source: str, target: str) -> float:
    """Return the mean log-probability per token, from the logits of one sentence pair."""
    ours, theirs = (
        torch.tensor([[*tokenizer.encode(side), END]])
        for tokenizer, side in ((translator.source, source), (translator.target, target))
    )
    with torch.no_grad():
        logits = translator.model(ours, torch.tensor([ours.shape[1]]), theirs, translator.config.delay)
    return float(logits.log_softmax(-1)[0, range(theirs.shape[1]), theirs[0]].mean())


def candidates_of(data: Path) -> tuple[list[str], list[str], NDArray[np.int64]]:
    """Return lines, one to five texts of various lengths for each, and the line of each text."""
    sources, targets = (lines(data.parent / "text" / f"train.{side}")[:24] for side in ("source", "target"))
    texts = [[" ".join(targets[n : n + 2]), *targets[: n % 5]] for n in range(24)]
    return sources, [*chain.from_iterable(texts)], np.repeat(np.arange(24), [*map(len, texts)])


class TestScores:
    def test_they_are_those_of_single_sentences(self, reranker: Reranker, data: Path) -> None:
        sources, texts, line_of = candidates_of(data)
        forward, reverse = reranker.scores(sources, texts, line_of)
        for n, (text, line) in enumerate(zip(texts, line_of, strict=True)):
            assert forward[n] == pytest.approx(brute_force(reranker.forward, sources[line], text), abs=1e-5)
            assert reverse[n] == pytest.approx(brute_force(reranker.reverse, text, sources[line]), abs=1e-5)
        assert min(np.ptp(forward), np.ptp(reverse)) > 0.2

    def test_a_text_scores_the_same_alone(self, reranker: Reranker, data: Path) -> None:
        sources, texts, line_of = candidates_of(data)
        together = reranker.scores(sources, texts, line_of)
        one = np.zeros(1, np.int64)
        alone = [reranker.scores([sources[n]], [text], one) for text, n in zip(texts, line_of, strict=True)]
        assert np.allclose(np.array(together), np.array(alone)[:, :, 0].T, atol=1e-5)

    def test_the_order_of_texts_and_the_size_of_batches_do_not_matter(self, reranker: Reranker, data: Path) -> None:
        sources, texts, line_of = candidates_of(data)
        shuffled = np.random.default_rng(1).permutation(len(texts))
        large = replace(CONFIG.translation, batch_tokens=5000)
        forward = replace(reranker.forward, config=replace(large, delay=reranker.forward.config.delay))
        other = Reranker(forward, replace(reranker.reverse, config=replace(large, delay=None)), CONFIG)
        found = other.scores(sources, [texts[n] for n in shuffled], line_of[shuffled])
        assert np.allclose(np.array(found), np.array(reranker.scores(sources, texts, line_of))[:, shuffled], atol=1e-5)

    def test_there_may_be_none(self, reranker: Reranker) -> None:
        assert [len(each) for each in reranker.scores(["a line"], [], np.zeros(0, np.int64))] == [0, 0]

    def test_hypotheses_score_as_in_beam_search(self, reranker: Reranker, source: Path) -> None:
        compared = 0
        for line in usable_lines(reranker, source):
            for text, (ids, score) in hypotheses(reranker, line):
                if reranker.forward.target.encode(text) == ids:  # not if the model splits a word in another way
                    (found,), _ = reranker.scores([line], [text], np.zeros(1, np.int64))
                    assert found == pytest.approx(score, abs=1e-5)
                    compared += 1
        assert compared > 5


def usable_lines(reranker: Reranker, source: Path) -> list[str]:
    """Return the lines that are neither empty nor too long."""
    return [line for line in lines(source) if 0 < len(reranker.forward.source.encode(line)) <= 90]


def hypotheses(reranker: Reranker, line: str) -> list[tuple[str, Hypothesis]]:
    """Return the texts and hypotheses of a sentence."""
    translator = reranker.forward
    ids = torch.tensor([[*translator.source.encode(line), END]])
    (found,) = beam_search(translator.model, ids, torch.tensor([ids.shape[1]]), SEARCH, translator.config.delay)
    return [(translator.target.decode(hypothesis.tokens), hypothesis) for hypothesis in found]


class TestRerankCorpus:
    @pytest.mark.parametrize("weight", [0.0, 1.0, 4.0])
    def test_the_candidate_with_the_best_score_is_chosen(
        self, reranker: Reranker, source: Path, target: Path, weight: float
    ) -> None:
        """A longer translation may win; with a weight of zero, the forward model decides alone."""
        chosen = replace(reranker, config=replace(CONFIG, weight=weight))
        longer = replace(reranker.forward.config, search=replace(SEARCH, max_ratio=0.8))
        found = replace(reranker.forward, config=longer)(usable_lines(reranker, source)[:12])
        ranks = []
        for translated, other in zip(found, lines(target), strict=False):
            assert not isinstance(translated, Dropped)
            for line, given in (translated, (translated[0], other)):
                texts = [text for text, _ in hypotheses(reranker, line)]
                if 0 < len(reranker.forward.target.encode(given)) <= 90:
                    texts.append(given)
                scores = [
                    brute_force(reranker.forward, line, text) + weight * brute_force(reranker.reverse, text, line)
                    for text in texts
                ]
                assert chosen([Pair(line, given, 0)]) == [(line, texts[int(np.argmax(scores))])]
                ranks.append(int(np.argmax(scores)))
        assert SEARCH.beam in ranks  # a given translation won
        assert min(ranks) < SEARCH.beam
        assert weight == 0 or len({*ranks}) > 2

    @pytest.mark.parametrize("system", ["teacher", "wait-k"])
    def test_every_line_is_paired_with_its_best_candidate(
        self,
        directions: dict[System, Direction],
        reverse: Direction,
        source: Path,
        target: Path,
        tmp_path: Path,
        system: System,
    ) -> None:
        reranker = Reranker.load(directions[system], reverse, CONFIG, CPU)
        for given in (target, None):
            prefix = tmp_path / "out" / str(given is None)
            made = rerank_corpus(directions[system], reverse, source, given, prefix, CONFIG, CPU)
            assert (made["rewrite"], made["lines"], made["kept"]) == ("rerank", 24, 22)
            assert made["left"] == {"empty": [4], "too_long": [16]}
            others = [""] * 24 if given is None else lines(given)
            expected = [reranker([Pair(*pair, 0)])[0] for pair in zip(lines(source), others, strict=True)]
            sides = (lines(prefix.with_name(f"{prefix.name}.{side}")) for side in ("source", "target"))
            assert [*zip(*sides, strict=True)] == [each for each in expected if not isinstance(each, Dropped)]

    def test_unlikely_pairs_are_dropped(
        self, forward: Direction, reverse: Direction, source: Path, target: Path, tmp_path: Path
    ) -> None:
        rerank_corpus(forward, reverse, source, target, tmp_path / "all", CONFIG, CPU)
        pairs = [*zip(lines(tmp_path / "all.source"), lines(tmp_path / "all.target"), strict=True)]
        model = Reranker.load(forward, reverse, CONFIG, CPU).reverse
        scores = [brute_force(model, text, line) for line, text in pairs]
        limit = (sorted(scores)[10] + sorted(scores)[11]) / 2
        made = rerank_corpus(
            forward, reverse, source, target, tmp_path / "likely", replace(CONFIG, min_reverse=limit), CPU
        )
        kept = [pair for pair, score in zip(pairs, scores, strict=True) if score >= limit]
        assert len(kept) == 11
        assert [*zip(lines(tmp_path / "likely.source"), lines(tmp_path / "likely.target"), strict=True)] == kept
        numbers = [number for number in range(1, 25) if number not in (4, 16)]
        unlikely = [number for number, score in zip(numbers, scores, strict=True) if score < limit]
        assert made["left"] == {"empty": [4], "too_long": [16], "unlikely": unlikely}

    def test_a_line_without_hypotheses_keeps_its_given_translation(
        self, forward: Direction, reverse: Direction, source: Path, target: Path, tmp_path: Path, dataset: Dataset
    ) -> None:
        nothing = dataset.target_tokenizer.pieces.index("▁")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CorpusTranslator, "_translate", lambda _, s, __: [[[nothing], []]] * len(s))
            made = rerank_corpus(forward, reverse, source, target, tmp_path / "out", CONFIG, CPU)
        # The given translations of lines 6 and 7 are empty and too long.
        assert made["left"] == {"empty": [4], "no_translation": [6, 7], "too_long": [16]}
        given = [line for number, line in enumerate(lines(target), start=1) if number not in (4, 6, 7, 16)]
        assert lines(tmp_path / "out.target") == given

    def test_equal_texts_are_one_candidate(self, reranker: Reranker) -> None:
        assert reranker._candidates(["a", "b", "a"], "b") == ["a", "b"]
        assert reranker._candidates(["a"], " ") == ["a"]

    def test_it_resumes_after_a_kill_and_is_shared(
        self, forward: Direction, reverse: Direction, source: Path, target: Path, tmp_path: Path
    ) -> None:
        arguments = forward, reverse, source, target
        folder = tmp_path / "killed.shards"
        rerank_in_shards(*arguments, tmp_path / "whole")
        killed = fork(rerank_in_shards, *arguments, tmp_path / "killed")
        until = time.monotonic() + 60
        while not list(folder.glob("*/*.json")) and killed.is_alive() and time.monotonic() < until:
            time.sleep(0.005)
        killed.kill()
        killed.join()
        finished = [fork(rerank_in_shards, *arguments, tmp_path / "killed") for _ in range(2)]
        for process in finished:
            process.join()
        assert [process.exitcode for process in finished] == [0, 0]
        assert results(tmp_path / "killed") == results(tmp_path / "whole")

    def test_every_input_is_part_of_the_identity(
        self, forward: Direction, reverse: Direction, source: Path, target: Path, tmp_path: Path
    ) -> None:
        rerank_corpus(forward, reverse, source, target, tmp_path / "out", CONFIG, CPU)
        made = json.loads((tmp_path / "out.json").read_text())
        assert made["inputs"].keys() == {
            *("model", "source vocabulary", "target vocabulary", "source", "target"),
            *("reverse model", "reverse source vocabulary", "reverse target vocabulary"),
        }
        assert len({made["inputs"]["model"], made["inputs"]["reverse model"]}) == 2
        other = Direction(changed_copy(reverse.model, tmp_path / "other"), reverse.vocabularies)
        for changes in ({"reverse": other}, {"config": replace(CONFIG, weight=0.5)}, {"target": None}):
            inputs: dict[str, Any] = {"reverse": reverse, "target": target, "config": CONFIG, **changes}
            with pytest.raises(DataError, match="--overwrite"):
                rerank_corpus(forward, source=source, prefix=tmp_path / "out", device=CPU, **inputs)

    def test_no_model_is_loaded_for_an_existing_result(
        self, forward: Direction, reverse: Direction, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = rerank_corpus(forward, reverse, source, None, tmp_path / "out", CONFIG, CPU)
        monkeypatch.setattr(rewriting, "load_model_or_bundle", lambda _: pytest.fail("the model was loaded"))
        assert rerank_corpus(forward, reverse, source, None, tmp_path / "out", CONFIG, CPU) == first


def rerank_in_shards(forward: Direction, reverse: Direction, source: Path, target: Path, prefix: Path) -> None:
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(rewriting.SHARD_LINES, "cpu", 5)
        rerank_corpus(forward, reverse, source, target, prefix, CONFIG, CPU)


def changed_copy(model: Path, directory: Path) -> Path:
    """Copy a model with one other weight."""
    directory.mkdir()
    (directory / "model.json").write_bytes((model / "model.json").read_bytes())
    (directory / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:-4] + b"\0\0\0\0")
    return directory


class TestRefusals:
    """Nothing is replaced when a model, a vocabulary or a text does not fit."""

    def test_the_reverse_model_must_be_a_teacher_from_target_to_source(
        self,
        directions: dict[System, Direction],
        forward: Direction,
        reverse: Direction,
        dataset: Dataset,
        source: Path,
        tmp_path: Path,
    ) -> None:
        ctc = Direction(save_random("ctc", dataset, tmp_path / "ctc"), forward.vocabularies)
        for ours, theirs, message in (
            (forward, forward, "a wait-k model, but --reverse needs a teacher, trained from target to source"),
            (forward, directions["teacher"], "--reverse .*: translates from the source language; give a teacher"),
            (ctc, reverse, "a ctc model, but reranking needs a teacher or a wait-k model"),
        ):
            (tmp_path / "out.target").write_text("somebody's text", encoding="utf-8")
            with pytest.raises(ConfigError, match=message):
                rerank_corpus(ours, theirs, source, None, tmp_path / "out", CONFIG, CPU, overwrite=True)
            assert (tmp_path / "out.target").exists()

    def test_other_vocabularies(
        self, forward: Direction, reverse: Direction, source: Path, tmp_path: Path, target_tokenizer: Tokenizer
    ) -> None:
        for side in ("source", "target"):
            (tmp_path / f"{side}.model").write_bytes(target_tokenizer.model)
        for ours, theirs in (
            (forward._replace(vocabularies=tmp_path), reverse),
            (forward, reverse._replace(vocabularies=tmp_path)),
        ):
            with pytest.raises(VocabularyError, match=r"of \(150, 150\) pieces, but .* trained with \(300, 300\);"):
                rerank_corpus(ours, theirs, source, None, tmp_path / "out", CONFIG, CPU)

    def test_translations_of_other_lines(
        self, forward: Direction, reverse: Direction, source: Path, tmp_path: Path
    ) -> None:
        short = write(tmp_path / "short", ["only one line"])
        with pytest.raises(DataError, match=r"--target .*short: 1 lines, but .*text.source has 24; line n must"):
            rerank_corpus(forward, reverse, source, short, tmp_path / "out", CONFIG, CPU)
        assert not list(tmp_path.glob("out.*"))

    @pytest.mark.parametrize("read", ["forward", "reverse"])
    def test_the_models_are_not_replaced(self, forward: Direction, reverse: Direction, source: Path, read: str) -> None:
        directory = {"forward": forward, "reverse": reverse}[read].model
        with pytest.raises(ConfigError, match=r"would replace its own input .*model\.json"):
            rerank_corpus(forward, reverse, source, None, directory / "model", CONFIG, CPU, overwrite=True)

    def test_bad_settings(self) -> None:
        for weight in (-1.0, float("nan"), float("inf")):
            with pytest.raises(ConfigError, match="weight must be a number of at least 0, got"):
                RerankConfig(weight=weight)
        with pytest.raises(ConfigError, match=r"min_reverse is a log-probability per token, at most 0, got 0\.5"):
            RerankConfig(min_reverse=0.5)
