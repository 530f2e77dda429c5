"""Train on the synthetic pair: sorting helps if words move far, and does no harm otherwise.

The configurations are those of recipes/toy.toml at k = 1, where every word that moves forward must be anticipated;
both systems learn from scratch, with the same number of updates. The bounds leave room for other processors' rounding.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from recipe.configurations import training_configurations
from simulmt.data.corpus import ParallelFiles
from simulmt.data.store import prepare_dataset
from simulmt.data.synthetic import write_corpus
from simulmt.recipe.plan import Recipe
from simulmt.text import VocabularySpec
from simulmt.train.loop import train
from simulmt.train.monitor import Monitor
from simulmt.train.run import init_distributed

RECIPE = Path(__file__).parents[2] / "recipes" / "toy.toml"
PLAIN, SORTED = "ctc-k1", "asn-from-scratch"  # stages of it


def learn(stage: str, data: Path, directory: Path, updates: int = 800) -> float:
    config = replace(training_configurations(Recipe.read(RECIPE))[stage], data=data)
    config = replace(config, training=replace(config.training, max_updates=updates))
    with init_distributed("cpu") as world:
        outcome = train(config, directory / stage, world, Monitor(directory / stage, quiet=True))
    assert outcome.score is not None
    return outcome.score


def prepared(reorder: float, directory: Path) -> Path:
    text, data = directory / "text", directory / "data"
    write_corpus(text, reorder, train=15_000, dev=300, test=1, seed=1)
    prepare_dataset(
        data,
        [ParallelFiles(text / "train.source", text / "train.target")],
        ParallelFiles(text / "dev.source", text / "dev.target"),
        VocabularySpec(540, "nmt_nfkc_cf"),
        VocabularySpec(540, "nmt_nfkc"),
    )
    return data


@pytest.mark.learning
def test_sorting_beats_plain_ctc_where_words_move_far(tmp_path: Path) -> None:
    data = prepared(1.0, tmp_path)
    plain, sorted_ = learn(PLAIN, data, tmp_path), learn(SORTED, data, tmp_path)
    assert plain > 5.0, "plain CTC did not learn at all, so beating it would mean nothing"
    assert sorted_ > plain + 2.0


@pytest.mark.slow  # two minutes; recipes/toy.toml shows the same
@pytest.mark.learning
def test_sorting_does_no_harm_where_nothing_moves(tmp_path: Path) -> None:
    data = prepared(0.0, tmp_path)
    plain, sorted_ = (learn(stage, data, tmp_path, updates=900) for stage in (PLAIN, SORTED))
    assert plain > 60.0
    assert sorted_ > plain - 3.0
