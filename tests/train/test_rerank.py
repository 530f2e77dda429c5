from __future__ import annotations

from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

from data.helpers import lines
from simulmt.data.store import Dataset
from simulmt.model.beam import BeamConfig
from simulmt.text import END
from simulmt.train.rerank import Direction, RerankConfig, Reranker
from simulmt.train.rewrite import CorpusTranslator, TranslationConfig

from .test_rewrite import save_random

CPU = torch.device("cpu")
SEARCH = BeamConfig(beam=3, max_ratio=0.5, max_extra=4)
CONFIG = RerankConfig(TranslationConfig(SEARCH, delay=2, batch_tokens=200, max_length=90))


@pytest.fixture(scope="module")
def reverse(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Direction:
    """Return a teacher from target to source, with vocabularies in its direction."""
    folder = tmp_path_factory.mktemp("reverse")
    for side, other in (("source", "target"), ("target", "source")):
        (folder / f"{side}.model").write_bytes((data / f"{other}.model").read_bytes())
    return Direction(save_random("teacher", Dataset.open(data), folder / "run", seed=6), folder)


@pytest.fixture(scope="module", params=["teacher", "wait-k"])
def forward(
    request: pytest.FixtureRequest, data: Path, dataset: Dataset, tmp_path_factory: pytest.TempPathFactory
) -> Direction:
    return Direction(save_random(request.param, dataset, tmp_path_factory.mktemp("forward")), data)


@pytest.fixture
def reranker(forward: Direction, reverse: Direction) -> Reranker:
    return Reranker.load(forward, reverse, CONFIG, CPU)


def text(data: Path, side: str, count: int = 24) -> list[str]:
    return lines(data.parent / "text" / f"train.{side}")[:count]


def brute_force(translator: CorpusTranslator, source: str, target: str) -> float:
    """Return the mean log-probability per token, from the logits of one sentence pair."""
    ours, theirs = (
        torch.tensor([[*tokenizer.encode(side), END]])
        for tokenizer, side in ((translator.source, source), (translator.target, target))
    )
    with torch.no_grad():
        logits = translator.model(ours, torch.tensor([ours.shape[1]]), theirs, translator.config.delay)
    return float(logits.log_softmax(-1)[0, range(theirs.shape[1]), theirs[0]].mean())


def candidates_of(data: Path) -> tuple[list[str], list[str], np.ndarray]:
    """Return lines, each with several texts of various lengths, and the line of each text."""
    sources, targets = text(data, "source"), text(data, "target")
    texts = [
        [target, *targets[: number % 4], " ".join(targets[number : number + 2])]
        for number, target in enumerate(targets)
    ]
    return sources, [*chain(*texts)], np.repeat(np.arange(len(sources)), [len(each) for each in texts])


def test_scores_are_those_of_single_sentences(reranker: Reranker, data: Path) -> None:
    sources, texts, line_of = candidates_of(data)
    forward, reverse = reranker.scores(sources, texts, line_of)
    for n, (candidate, line) in enumerate(zip(texts, line_of, strict=True)):
        assert forward[n] == pytest.approx(brute_force(reranker.forward, sources[line], candidate), abs=1e-4)
        assert reverse[n] == pytest.approx(brute_force(reranker.reverse, candidate, sources[line]), abs=1e-4)
