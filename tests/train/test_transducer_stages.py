"""A transducer from the first stage to a bundle: sorted states, minimum risk, export."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from simulmt.errors import ConfigError
from simulmt.model.risk import RiskConfig
from simulmt.model.transducer import TransducerModel
from simulmt.runtime.decoding import TransducerDecoder
from simulmt.runtime.stream import load
from simulmt.train.export import ExportConfig, export_run
from simulmt.train.systems import RunConfig, load_model, translator_of

from .helpers import run, tiny

SIZES = {"context_symbols": 2, "context_inner": 8, "context_rank": 8}


def _transducer(data: Path, **changes: object) -> RunConfig:
    config = tiny(data, "transducer+asn", **changes)
    return replace(config, model={**config.model, **SIZES})


@pytest.fixture(scope="module")
def stages(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Train both stages; return their runs."""
    directory = tmp_path_factory.mktemp("stages")
    first = _transducer(data)
    run(first, directory / "sorted")
    risk = RiskConfig(samples=2, emphasis="0123456789")
    second = replace(first, system="transducer", objective="risk", init=directory / "sorted" / "final", risk=risk)
    run(second, directory / "risk")
    return directory / "sorted", directory / "risk"


def test_the_second_stage_starts_from_the_first(stages: tuple[Path, Path]) -> None:
    before, after = (translator_of(load_model(stage)[0]) for stage in stages)
    assert isinstance(after, TransducerModel)
    moved = after.encoder.embedding.weight - before.encoder.embedding.weight
    assert 0 < moved.abs().max() < 0.5


def test_a_context_weight_scales_the_label_context(stages: tuple[Path, Path], data: Path, tmp_path: Path) -> None:
    decoders = []
    for weight in (1.0, 2.0):
        bundle = tmp_path / f"weight-{weight}"
        config = ExportConfig("en", "de", precision="fp32")
        export_run(stages[1], data, bundle, config, context_weight=weight, dev_sentences=0)
        decoders.append(load(bundle, threads=1).decoder)
    histories = [(7, 8), (9, 7)]
    once, twice = (decoder.context_scores(histories) for decoder in decoders if isinstance(decoder, TransducerDecoder))
    assert np.abs(once).max() > 0
    np.testing.assert_allclose(twice, 2 * once, rtol=1e-5)


def test_only_a_transducer_has_a_context_weight(data: Path, tmp_path: Path) -> None:
    run(tiny(data), tmp_path / "ctc")
    with pytest.raises(ConfigError, match="needs a transducer"):
        export_run(tmp_path / "ctc", data, tmp_path / "bundle", ExportConfig("en", "de"), context_weight=2.0)


@pytest.mark.parametrize(
    ("system", "init"), [("ctc", "somewhere"), ("transducer+asn", "somewhere"), ("transducer", None), ("wait-k", None)]
)
def test_risk_is_for_a_trained_model_that_samples(system: str, init: str | None) -> None:
    with pytest.raises(ConfigError, match="risk"):
        RunConfig(system, Path("data"), Path(init) if init else None, objective="risk")  # type: ignore[arg-type]


def test_minimum_risk_training_is_reproducible(data: Path, stages: tuple[Path, Path], tmp_path: Path) -> None:
    """Like every run, minimum-risk training is a function of its configuration."""
    risk = RiskConfig(samples=2, emphasis="0123456789")
    config = replace(_transducer(data), system="transducer", objective="risk", init=stages[0] / "final", risk=risk)
    run(config, tmp_path / "again")
    first, second = (load_model(path)[0].state_dict() for path in (stages[1], tmp_path / "again"))
    assert all(torch.equal(first[name], second[name]) for name in first)
