from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from onnx import numpy_helper

from simulmt.errors import BundleError, ConfigError
from simulmt.model.ctc import CTCModel
from simulmt.model.seq2seq import Policy
from simulmt.runtime.bundle import Bundle, Kind
from simulmt.text import Tokenizer
from simulmt.train import export as export_module
from simulmt.train import export as module
from simulmt.train.export import TOLERANCE, ExportConfig, TrainedModel, export
from simulmt.train.graph import Graph, Precision, build_graph
from tiny_models import STABILITIES, export_config, trained

DEVELOPMENT = [
    ("The old bridge was closed.", "Die alte Brücke war gesperrt."),
    ("We waited at the station.", "Wir warteten am Bahnhof."),
    ("", ""),
]


@pytest.fixture(scope="module")
def network(source_tokenizer: Tokenizer, target_tokenizer: Tokenizer) -> TrainedModel:
    return trained("ctc", source_tokenizer, target_tokenizer)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_bundle_sees_whole_words_if_its_model_does(
    network: TrainedModel,
    source_tokenizer: Tokenizer,
    target_tokenizer: Tokenizer,
    tmp_path: Path,
    precision: Precision,
) -> None:
    seeing = trained("ctc", source_tokenizer, target_tokenizer, whole_words=True)
    for name, model in (("pieces", network), ("words", seeing)):
        described = export(model, tmp_path / name, export_config("ctc", precision, longest=12), "", DEVELOPMENT)
        assert described.whole_words == (name == "words")
        assert ("look-ahead: whole words" in (tmp_path / name / "README.md").read_text()) == (name == "words")


def test_a_model_with_whole_words_must_know_where_words_begin(
    source_tokenizer: Tokenizer, target_tokenizer: Tokenizer
) -> None:
    seeing = trained("ctc", source_tokenizer, target_tokenizer, whole_words=True)
    seeing.model.encoder.mark_words([True] * source_tokenizer.size)
    with pytest.raises(ConfigError, match="sees whole words of another source vocabulary"):
        replace(seeing)


@pytest.mark.parametrize("kind", ["ctc", "transducer", "wait-k", "full-sentence"])
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_every_kind_is_exported_in_every_precision(
    source_tokenizer: Tokenizer, target_tokenizer: Tokenizer, tmp_path: Path, kind: Kind, precision: Precision
) -> None:
    network = trained(kind, source_tokenizer, target_tokenizer)
    described = export(network, tmp_path / "bundle", export_config(kind, precision, longest=12))
    bundle = Bundle(tmp_path / "bundle")
    bundle.verify()
    assert bundle.config == described
    assert (described.kind, described.precision) == (kind, precision)
    assert 0 < described.checks["fp32_largest_difference"] < 1e-4
    assert ("int8_agreement" in described.checks) == (precision == "int8")
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_policy_is_exported_with_its_thresholds(
    source_tokenizer: Tokenizer, target_tokenizer: Tokenizer, tmp_path: Path, precision: Precision
) -> None:
    network = trained("wait-k", source_tokenizer, target_tokenizer, policy=True)
    config = export_config("wait-k", precision, longest=12, stabilities=STABILITIES)
    described = export(network, tmp_path / "bundle", config)
    bundle = Bundle(tmp_path / "bundle")
    assert bundle.config == described
    assert (described.has_policy, described.stabilities) == (True, STABILITIES)
    outputs = {name: [each.name for each in bundle.session(name, 1).get_outputs()] for name in ("encoder", "decoder")}
    assert "stability" in outputs["decoder"]
    assert ("int8_stability_difference" in described.checks) == (precision == "int8")
    card = (tmp_path / "bundle" / "README.md").read_text(encoding="utf-8")
    assert f"- policy: stability thresholds {', '.join(map(str, STABILITIES))}\n" in card


def test_a_graph_with_another_policy_is_not_exported(
    source_tokenizer: Tokenizer, target_tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shifted(graph: Graph, policy: Policy, states: str, rows: str) -> None:
        with torch.no_grad():
            changed = Policy(policy.expand.in_features, policy.expand.out_features)
            changed.load_state_dict(policy.state_dict())
            changed.contract.bias.add_(0.01)
        original(graph, changed, states, rows)

    original = Graph.predict_stability
    monkeypatch.setattr(Graph, "predict_stability", shifted)
    network = trained("wait-k", source_tokenizer, target_tokenizer, policy=True)
    with pytest.raises(BundleError, match="export failed: at delay 1 the stability differs by"):
        export(network, tmp_path / "bundle", export_config("wait-k", "fp32", longest=12, stabilities=STABILITIES))


@pytest.mark.parametrize("policy", [False, True])
def test_a_policy_needs_thresholds_and_thresholds_need_a_policy(
    policy: bool, source_tokenizer: Tokenizer, target_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    network = trained("wait-k", source_tokenizer, target_tokenizer, policy=policy)
    message = "a model with a policy needs stabilities" if policy else "stabilities need a wait-k model with a policy"
    with pytest.raises(ConfigError, match=message):
        export(network, tmp_path / "bundle", export_config("wait-k", "fp32", stabilities=() if policy else STABILITIES))
    assert not list(tmp_path.iterdir())


def test_the_model_card_has_the_measured_checks(network: TrainedModel, tmp_path: Path) -> None:
    config = export_config("ctc", "int8", max_bleu_loss=100)
    described = export(network, tmp_path / "bundle", config, "## Data\n\nNone at all.", DEVELOPMENT)
    card = (tmp_path / "bundle" / "README.md").read_text(encoding="utf-8")
    assert f"int8 agreement: {described.checks['int8_agreement']:.6g}" in card
    assert {"fp32_bleu", "int8_bleu"} <= described.checks.keys()
    assert card.startswith("# en to de, ctc\n")
    assert card.endswith("\n## Data\n\nNone at all.\n")


def test_weights_have_the_permissions_of_their_graph(network: TrainedModel, tmp_path: Path) -> None:
    export(network, tmp_path / "bundle", export_config("ctc", "fp32"))
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "bundle").iterdir()}
    assert len(set(modes.values())) == 1, modes


def test_a_model_with_extreme_logits_can_be_exported(
    source_tokenizer: Tokenizer, target_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Its log-probabilities are large, and so are their rounding errors."""
    sure = trained("ctc", source_tokenizer, target_tokenizer)
    with torch.no_grad():
        sure.model.target_embedding.weight *= 300
    described = export(sure, tmp_path / "bundle", export_config("ctc", "fp32"))
    assert described.checks["fp32_largest_difference"] > TOLERANCE


@pytest.mark.parametrize("error", [1e-2, math.nan])
def test_a_graph_that_differs_from_the_model_is_not_written(
    error: float, network: TrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(name: str, model: CTCModel, longest: int, precision: Precision) -> Graph:
        right = model.length_projection.bias[0].clone()
        model.length_projection.bias[0] += error
        graph = build_graph(name, model, longest, precision)
        model.length_projection.bias[0] = right
        return graph

    monkeypatch.setattr(module, "build_graph", wrong)
    with pytest.raises(BundleError, match=r"export failed: onnxruntime differs from the trained model by"):
        export(network, tmp_path / "bundle", export_config("ctc", "fp32"))
    assert list(tmp_path.iterdir()) == []


def test_a_graph_that_chooses_other_symbols_is_not_written(
    network: TrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rewarding(graph: Graph, *arguments: Any, **options: Any) -> None:
        """Add the penalty instead of subtracting it; the scores, computed before, do not change."""
        choose(graph, *arguments, **options)
        for tensor in graph._tensors:
            once = numpy_helper.to_array(tensor)
            if once.size == network.target.size and once.min() == -1 == once.sum():
                tensor.CopyFrom(numpy_helper.from_array(-once, tensor.name))

    choose = Graph.choose
    monkeypatch.setattr(Graph, "choose", rewarding)
    with pytest.raises(
        BundleError, match="export failed: at delay 1 onnxruntime and the model choose different symbols"
    ):
        export(network, tmp_path / "bundle", export_config("ctc", "fp32"))
    assert list(tmp_path.iterdir()) == []


def test_nothing_beside_the_bundle_is_touched(network: TrainedModel, tmp_path: Path) -> None:
    (tmp_path / "bundle.draft").mkdir()
    (tmp_path / "bundle.draft" / "thesis.txt").write_text("mine")
    export(network, tmp_path / "bundle", export_config("ctc", "fp32"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "bundle.draft"]
    assert (tmp_path / "bundle.draft" / "thesis.txt").read_text() == "mine"


def test_int8_that_chooses_other_symbols_is_not_written(network: TrainedModel, tmp_path: Path) -> None:
    with pytest.raises(
        BundleError, match=r"export failed: int8 and the trained model agree on .* less than 100.0%; export in fp32"
    ):
        export(network, tmp_path / "bundle", export_config("ctc", "int8", min_agreement=1.0))
    assert list(tmp_path.iterdir()) == []


def test_int8_that_loses_bleu_is_not_written(
    network: TrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = iter([20.0, 19.0])
    monkeypatch.setattr(export_module, "bleu", lambda *_: next(scores))
    with pytest.raises(BundleError, match=r"export failed: int8 loses 1\.00 BLEU"):
        export(network, tmp_path / "bundle", export_config("ctc", "int8"), dev_pairs=DEVELOPMENT)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(network: TrainedModel, tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    with pytest.raises(BundleError, match="already exists"):
        export(network, tmp_path / "bundle", export_config("ctc", "fp32"))


def test_the_first_delay_is_the_default(network: TrainedModel, tmp_path: Path) -> None:
    config = ExportConfig("en", "de", delays=(3, 1), precision="fp32", longest=12)
    assert export(network, tmp_path / "bundle", config).default_delay == 3


def test_vocabularies_must_be_the_models_own(
    source_tokenizer: Tokenizer, target_tokenizer: Tokenizer, ideograph_tokenizer: Tokenizer
) -> None:
    model = trained("ctc", source_tokenizer, target_tokenizer).model
    with pytest.raises(ConfigError, match="vocabularies of 150 and 150 pieces, got 150 and 170"):
        TrainedModel(model, source_tokenizer, ideograph_tokenizer)
    unspaced = trained("ctc", source_tokenizer, target_tokenizer).model
    unspaced.encoder.embedding = torch.nn.Embedding(170, 16)  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="spaced"):
        TrainedModel(unspaced, ideograph_tokenizer, target_tokenizer)
