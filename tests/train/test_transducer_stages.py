"""A transducer from the first stage to a bundle: sorted states, minimum risk, export."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from simulmt.data.dataset import Dataset
from simulmt.errors import ConfigError
from simulmt.model.risk import RiskConfig
from simulmt.model.transducer import TransducerModel
from simulmt.runtime.decoding import TransducerDecoder
from simulmt.runtime.rules import RulesConfig
from simulmt.runtime.stream import load
from simulmt.train.export import ExportConfig, export_run
from simulmt.train.export_checks import TrainedModel
from simulmt.train.systems import RunConfig, load_model, translator_of
from tiny_models import reference

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
        export_run(stages[1], data, bundle, config, context_weight=weight, development=0)
        decoders.append(load(bundle, threads=1).decoder)
    histories = [(7, 8), (9, 7)]
    once, twice = (decoder.context_scores(histories) for decoder in decoders if isinstance(decoder, TransducerDecoder))
    assert np.abs(once).max() > 0
    np.testing.assert_allclose(twice, 2 * once, rtol=1e-5)


def test_only_a_transducer_has_a_context_weight(data: Path, tmp_path: Path) -> None:
    run(tiny(data), tmp_path / "ctc")
    with pytest.raises(ConfigError, match="needs a transducer"):
        export_run(tmp_path / "ctc", data, tmp_path / "bundle", ExportConfig("en", "de"), context_weight=2.0)


def test_a_decoder_from_its_first_stage_to_a_bundle(stages: tuple[Path, Path], data: Path, tmp_path: Path) -> None:
    """It starts from a transducer without a decoder, is trained on alignments, then for minimum risk."""
    first = _transducer(data, init=stages[0] / "final")
    first = replace(first, system="transducer", model={**first.model, "decoder_layers": 1})
    run(first, tmp_path / "aligned")
    risk = RiskConfig(samples=2, likelihood_weight=0.1)
    run(replace(first, objective="risk", init=tmp_path / "aligned" / "final", risk=risk), tmp_path / "risk")
    before, after = (translator_of(load_model(tmp_path / stage)[0]) for stage in ("aligned", "risk"))
    for model in (before, after):
        assert isinstance(model, TransducerModel)
        assert model.decoder is not None
        assert model.decoder.output.weight.abs().max() > 0  # zero at first
    moved = after.encoder.embedding.weight - before.encoder.embedding.weight
    assert 0 < moved.abs().max() < 0.5
    config = ExportConfig("en", "de", precision="fp32", rules=RulesConfig(doubled_punctuation=True))
    with pytest.raises(ConfigError, match="needs a transducer without a decoder"):
        export_run(tmp_path / "risk", data, tmp_path / "bundle", config, context_weight=2.0)
    described = export_run(tmp_path / "risk", data, tmp_path / "bundle", config, development=0)
    assert (described.kind, described.rules.active) == ("frame-decoder", ["doubled_punctuation"])
    dataset = Dataset.open(data)
    trained = TrainedModel(after, dataset.source_tokenizer, dataset.target_tokenizer)
    translator = load(tmp_path / "bundle", threads=1)
    delay = described.delays[0]
    with patch("tiny_models.penalty_of", return_value=0.0):
        expected = [config.rules.filter_text(reference(trained, line, delay)) for line in dataset.dev_sources()]
    assert [translator.translate(line, delay) for line in dataset.dev_sources()] == expected
    assert len(set(expected)) > 1


@pytest.mark.parametrize(
    ("system", "init"), [("ctc", "somewhere"), ("transducer+asn", "somewhere"), ("transducer", None)]
)
def test_risk_is_for_a_trained_transducer(system: str, init: str | None) -> None:
    with pytest.raises(ConfigError, match="risk"):
        RunConfig(system, Path("data"), Path(init) if init else None, objective="risk")  # type: ignore[arg-type]


def test_minimum_risk_training_is_reproducible(data: Path, stages: tuple[Path, Path], tmp_path: Path) -> None:
    """Like every run, minimum-risk training is a function of its configuration."""
    risk = RiskConfig(samples=2, emphasis="0123456789")
    config = replace(_transducer(data), system="transducer", objective="risk", init=stages[0] / "final", risk=risk)
    run(config, tmp_path / "again")
    first, second = (load_model(path)[0].state_dict() for path in (stages[1], tmp_path / "again"))
    assert all(torch.equal(first[name], second[name]) for name in first)
