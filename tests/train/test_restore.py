from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor

from conftest import ENGLISH
from simulmt.data.corpus import ParallelFiles
from simulmt.data.store import Dataset, prepare_dataset
from simulmt.data.synthetic import write_corpus
from simulmt.errors import BundleError, CheckpointError, VocabularyError
from simulmt.model.beam import BeamConfig, beam_search
from simulmt.model.seq2seq import Seq2SeqModel
from simulmt.runtime.bundle import SHIPPED, Bundle, Kind, write_description
from simulmt.runtime.stream import load
from simulmt.text import END, Tokenizer
from simulmt.train.analysis import bleu
from simulmt.train.export import TrainedModel, export
from simulmt.train.graph import EMBEDDING_LEVELS, WEIGHT_LEVELS, Precision
from simulmt.train.restore import average_models, initialise_from, load_bundle
from simulmt.train.rewrite import TranslationConfig, translate_corpus
from simulmt.train.systems import SCRATCH, System, SystemConfig, build_model, load_model, save_model, translator_of
from tiny_models import STABILITIES, by_policy, export_config, reference, trained

from .helpers import Recorder, run, same, snapshot, tiny

TOY = {"width": 128, "inner": 384, "heads": 4, "layers": 3}

Export = Callable[..., tuple[TrainedModel, Path]]

every_kind = pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("ctc", {"whole_words": True}),
        ("transducer", {}),
        ("wait-k", {}),
        ("wait-k", {"policy": True}),
        ("full-sentence", {}),
    ],
)


@pytest.fixture(scope="module")
def exported(
    source_tokenizer: Tokenizer, target_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Export:
    """Export models of all kinds, once."""
    folder = tmp_path_factory.mktemp("bundles")

    @cache
    def of(kind: Kind, precision: Precision, **options: bool) -> tuple[TrainedModel, Path]:
        path = folder / "-".join((kind, precision, *options))
        model = trained(kind, source_tokenizer, target_tokenizer, **options)
        stabilities = STABILITIES if options.get("policy") else ()
        export(model, path, export_config(kind, precision, stabilities=stabilities))
        return model, path

    return of


@every_kind
def test_an_fp32_bundle_has_every_weight_of_its_model(kind: Kind, options: dict[str, bool], exported: Export) -> None:
    trained_model, path = exported(kind, "fp32", **options)
    model, config = load_bundle(path)
    found, expected = snapshot(model), snapshot(trained_model.model)
    assert found.keys() == expected.keys() == build_model(config).state_dict().keys()
    for name, tensor in expected.items():  # equal up to rounding by scaling back and forth
        torch.testing.assert_close(found[name], tensor, rtol=3e-7, atol=0)
    assert type(model) is type(trained_model.model)
    assert not model.training
    assert config.delays == ((1,) if kind == "full-sentence" else (1, 2, 3, 5))


def test_a_bundle_translates_a_corpus_like_its_model(exported: Export, tmp_path: Path) -> None:
    trained_model, path = exported("wait-k", "fp32")
    texts = ["one two three", "four", "five six seven eight nine"]
    (tmp_path / "text").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    search = BeamConfig(beam=2, length_penalty=1.0)
    config = TranslationConfig(search, delay=2, batch_tokens=100)
    translate_corpus(path, path, tmp_path / "text", tmp_path / "out", config, torch.device("cpu"))
    assert isinstance(trained_model.model, Seq2SeqModel)
    expected = []
    for text in texts:
        ids = torch.tensor([[*trained_model.source.encode(text), END]])
        ((best, *_),) = beam_search(trained_model.model, ids, torch.tensor([ids.shape[1]]), search, 2)
        expected.append(trained_model.target.decode(best.tokens))
    assert (tmp_path / "out.target").read_text(encoding="utf-8").splitlines() == expected


@every_kind
def test_int8_weights_are_half_a_step_off_at_most(kind: Kind, options: dict[str, bool], exported: Export) -> None:
    trained_model, path = exported(kind, "int8", **options)
    found, expected = snapshot(load_bundle(path)[0]), snapshot(trained_model.model)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if tensor.ndim == 1:
            torch.testing.assert_close(found[name], tensor, rtol=3e-7, atol=0)
            continue
        steps = tensor.abs().amax(1, keepdim=True) / levels(name, kind)
        errors = (found[name] - tensor).abs() / steps.where(steps > 0, 1)
        assert errors.max() < 0.501, name
        assert errors.max() > 0.4, name  # of uniform errors, or the levels above are wrong


def levels(name: str, kind: Kind) -> int:
    """Return the levels: embeddings have more, but a CTC bundle has the target embedding only as its output layer."""
    fine = name == "encoder.embedding.weight" or (name == "target_embedding.weight" and kind != "ctc")
    return EMBEDDING_LEVELS if fine else WEIGHT_LEVELS


@every_kind
def test_a_restored_model_translates_like_its_bundle(kind: Kind, options: dict[str, bool], exported: Export) -> None:
    trained_model, path = exported(kind, "fp32", **options)
    restored = replace(trained_model, model=load_bundle(path)[0])
    translator, delay = load(path, threads=1), None if kind == "full-sentence" else 3
    for line in ENGLISH:
        if options.get("policy"):
            words = restored.source.split_to_word_tokens(restored.source.encode(line))
            tokens = [token for token, _ in by_policy(restored, words, [3] * len(words)) if token != END]
            expected = restored.target.decode(tokens)
        else:
            expected = reference(restored, line, delay)
        assert translator.translate(line, delay) == expected


def test_a_restored_policy_has_its_size(exported: Export) -> None:
    _, path = exported("wait-k", "int8", policy=True)
    assert load_bundle(path)[1].model["policy_inner"] == 12
    _, path = exported("wait-k", "int8")
    assert "policy_inner" not in load_bundle(path)[1].model


def test_restoring_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    load_bundle("toy")
    assert torch.equal(torch.get_rng_state(), before)


# --- Runs that start from the shipped bundle `toy` ---------------------------------------------------------


@pytest.fixture(scope="module")
def toy_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    write_corpus(folder, reorder=0.5, train=40, dev=40, test=0)
    train, dev = (ParallelFiles(folder / f"{part}.source", folder / f"{part}.target") for part in ("train", "dev"))
    prepare_dataset(folder / "data", [train], dev, vocabularies=SHIPPED / "toy")
    return folder / "data"


def test_a_restored_int8_model_translates_nearly_like_its_bundle(toy_data: Path) -> None:
    """Activations are rounded in the bundle only."""
    bundle = Bundle(SHIPPED / "toy")
    restored, translator = TrainedModel(load_bundle("toy")[0], bundle.source, bundle.target), load("toy", threads=1)
    lines = Dataset.open(toy_data).dev_sources()
    alike = [translator.translate(line, 5) == reference(restored, line, 5) for line in lines]
    assert sum(alike) >= 0.9 * len(lines)


def test_a_run_begins_at_the_score_of_the_bundle(toy_data: Path, tmp_path: Path) -> None:
    recorder = Recorder()
    config = tiny(toy_data, init=Path("toy"), delays=(3,), model=TOY, learning_rate=1e-12, max_updates=1)
    run(config, tmp_path, recorder)
    dataset, translator = Dataset.open(toy_data), load("toy", threads=1)
    hypotheses = [translator.translate(line, 3) for line in dataset.dev_sources()]
    expected = bleu(hypotheses, dataset.dev_references, dataset.target_tokenizer)
    assert expected > 15
    assert recorder.scores[1]["3"] == pytest.approx(expected, abs=1)


def test_a_sorted_run_has_its_translator_from_the_bundle(toy_data: Path, tmp_path: Path) -> None:
    recorder, scratch = Recorder(), Recorder()
    run(tiny(toy_data, "ctc+asn", init=SHIPPED / "toy", model=TOY, max_updates=1), tmp_path / "one", recorder)
    run(tiny(toy_data, "ctc+asn", model=TOY, max_updates=1), tmp_path / "other", scratch)
    assert same(under("translator.", recorder.weights[0]), snapshot(load_bundle("toy")[0]))
    assert same(under("sorter.", recorder.weights[0]), under("sorter.", scratch.weights[0]))


# --- wait-k models that start from the encoder of another model ----------------------------------------------


def wait_k_like(config: SystemConfig, **sizes: int) -> SystemConfig:
    """Return the configuration of a wait-k model with the sizes of a CTC model or transducer, except for `sizes`."""
    model = {name: config.model[name] for name in ("width", "inner", "heads")}
    layers = {"encoder_layers": 2, "decoder_layers": 2}
    return replace(config, system="wait-k", model=model | layers | sizes)


@pytest.mark.parametrize(
    ("kind", "options", "layers"), [("transducer", {}, 2), ("transducer", {}, 3), ("ctc", {"whole_words": True}, 1)]
)
def test_a_wait_k_model_has_the_first_layers_of_an_encoder(
    kind: Kind, options: dict[str, bool], layers: int, exported: Export
) -> None:
    _, path = exported(kind, "fp32", **options)
    other, config = load_bundle(path)
    config = wait_k_like(config, encoder_layers=layers)
    model = build_model(config)
    before = snapshot(model)
    initialise_from(model, path, config)
    found, given = snapshot(model), under("encoder.", snapshot(other))
    encoder = under("encoder.", found)
    assert same(encoder, {name: given[name] for name in encoder})
    assert not any(name.startswith(f"layers.{layers}.") for name in encoder)
    assert not same(encoder, under("encoder.", before))
    decoder = {name: tensor for name, tensor in found.items() if not name.startswith("encoder.")}
    assert same(decoder, {name: before[name] for name in decoder})
    assert {name.split(".")[0] for name in decoder} == {"layers", "final_norm", "target_embedding"}


def test_a_wait_k_model_starts_from_the_encoder_of_a_run_with_sorting(
    source_tokenizer: Tokenizer, target_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    sizes = {"width": 16, "inner": 24, "heads": 2, "layers": 2}
    config = SystemConfig("ctc+asn", source_tokenizer.size, target_tokenizer.size, sizes)
    other = build_model(config)
    save_model(other, config, tmp_path / "run", {})
    config = wait_k_like(config)
    model = build_model(config)
    initialise_from(model, tmp_path / "run", config)
    encoder = under("encoder.", snapshot(model))
    given = under("translator.encoder.", snapshot(other))
    assert same(encoder, {name: given[name] for name in encoder})


def test_a_wait_k_model_starts_from_all_weights_of_a_teacher(
    source_tokenizer: Tokenizer, target_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    sizes = {"width": 16, "inner": 24, "heads": 2, "encoder_layers": 2, "decoder_layers": 1}
    config = SystemConfig("teacher", source_tokenizer.size, target_tokenizer.size, sizes)
    teacher = build_model(config)
    save_model(teacher, config, tmp_path / "run", {})
    config = replace(config, system="wait-k", delays=(1, 3))
    model = build_model(config)
    initialise_from(model, tmp_path / "run", config)
    assert same(snapshot(model), snapshot(teacher))
    assert (translator_of(model).encoder.causal, translator_of(teacher).encoder.causal) == (True, False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 32, "heads": 4}, r"different sizes; .*width = 16 \(not 32\), heads = 2 \(not 4\)"),
        ({"inner": 32}, r"different sizes; .*inner = 24 \(not 32\)"),
        ({"encoder_layers": 4}, "encoder_layers = 4 is more than the 3 layers of this model"),
    ],
)
def test_an_encoder_that_does_not_fit_is_an_error(change: dict[str, int], message: str, exported: Export) -> None:
    _, path = exported("transducer", "fp32")
    config = wait_k_like(load_bundle(path)[1], **change)
    model = build_model(config)
    before = snapshot(model)
    with pytest.raises(CheckpointError, match=f"{path}: cannot initialise .*{message}"):
        initialise_from(model, path, config)
    assert same(snapshot(model), before)


def test_an_encoder_of_another_vocabulary_is_an_error(exported: Export) -> None:
    _, path = exported("transducer", "fp32")
    config = wait_k_like(load_bundle(path)[1])
    assert config.vocabulary_sha256 is not None
    config = replace(config, vocabulary_sha256=("another", config.vocabulary_sha256[1]))
    with pytest.raises(VocabularyError, match=f"{path}: .* source vocabulary that differs"):
        initialise_from(build_model(config), path, config)


def test_a_teacher_cannot_start_from_an_encoder_that_sees_no_later_words(exported: Export) -> None:
    _, path = exported("transducer", "fp32")
    config = replace(wait_k_like(load_bundle(path)[1]), system="teacher")
    with pytest.raises(CheckpointError, match=f"{path}: cannot initialise teacher from transducer"):
        initialise_from(build_model(config), path, config)


def under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


# --- Policies come and go ----------------------------------------------------------------------------------


@pytest.fixture
def saved_as(exported: Export, tmp_path: Path) -> Callable[[bool, str], Path]:
    """Return the paths of a wait-k model with or without a policy, as a run or a bundle."""

    def path_of(policy: bool, form: str) -> Path:
        _, path = exported("wait-k", "fp32", **({"policy": True} if policy else {}))
        if form == "bundle":
            return path
        save_model(*load_bundle(path), tmp_path / "run", {})
        return tmp_path / "run"

    return path_of


@pytest.mark.parametrize("form", ["run", "bundle"])
@pytest.mark.parametrize(("theirs", "ours"), [(False, 8), (True, 0), (True, 12), (False, 0)])
def test_a_policy_can_be_added_kept_and_dropped(
    theirs: bool, ours: int, form: str, saved_as: Callable[[bool, str], Path], exported: Export
) -> None:
    path = saved_as(theirs, form)
    other, config = load_bundle(exported("wait-k", "fp32", **({"policy": True} if theirs else {}))[1])
    config = replace(config, model=config.model | {"policy_inner": ours})
    model = build_model(config)
    before = under("policy.", snapshot(model))
    initialise_from(model, path, config)
    found, given = snapshot(model), snapshot(other)
    assert bool(under("policy.", found)) == bool(ours)
    assert same(under("policy.", found), under("policy.", given) if theirs and ours else before)
    assert same(*({name: each[name] for name in each if not name.startswith("policy.")} for each in (found, given)))


def test_a_policy_of_another_size_is_an_error(exported: Export) -> None:
    _, path = exported("wait-k", "fp32", policy=True)
    _, config = load_bundle(path)
    config = replace(config, model=config.model | {"policy_inner": 8})
    with pytest.raises(CheckpointError, match=f"{path}: cannot initialise from a model of different sizes: .*policy"):
        initialise_from(build_model(config), path, config)


def test_a_policy_can_be_added_to_a_model_that_starts_from_an_encoder(exported: Export) -> None:
    _, path = exported("transducer", "fp32")
    other, config = load_bundle(path)
    config = wait_k_like(config, policy_inner=8)
    model = build_model(config)
    before = under("policy.", snapshot(model))
    initialise_from(model, path, config)
    found = snapshot(model)
    assert torch.equal(found["encoder.embedding.weight"], other.encoder.embedding.weight)
    assert same(under("policy.", found), before)


# --- What cannot be restored -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 4}, r"layers = 3 \(not 4\)"),
        ({"width": 32, "heads": 4}, r"width = 16 \(not 32\), heads = 2 \(not 4\)"),
        ({"heads": 4}, r"heads = 2 \(not 4\)"),
        ({"mu": 3}, r"mu = 2 \(not 3\)"),
        ({"look_ahead_layer": 0}, r"look_ahead_layer = 1 \(not 0\)"),
        ({"context_symbols": 2}, r"context_symbols = 3 \(not 2\)"),
        ({"context_inner": 8, "context_rank": 12}, r"context_inner = 12 \(not 8\), context_rank = 8 \(not 12\)"),
    ],
)
def test_other_sizes_are_an_error_that_names_both(change: dict[str, Any], message: str, exported: Export) -> None:
    _, path = exported("transducer", "int8")
    _, config = load_bundle(path)
    initialise_from(build_model(config), path, config)
    config = replace(config, model=config.model | change)
    with pytest.raises(
        CheckpointError, match=f"{path}: cannot initialise from a model of different sizes; .*{message}"
    ):
        initialise_from(build_model(config), path, config)


@pytest.mark.parametrize(
    ("kind", "system"), [("ctc", "transducer"), ("transducer", "ctc+asn"), ("full-sentence", "ctc")]
)
def test_another_kind_of_model_is_an_error(kind: Kind, system: System, exported: Export) -> None:
    _, path = exported(kind, "int8")
    _, config = load_bundle(path)
    config = SystemConfig(system, config.source_vocabulary, config.target_vocabulary)
    with pytest.raises(CheckpointError, match=f"{path}: cannot initialise {system[:3]}.* from "):
        initialise_from(build_model(replace(config, model=TOY)), path, config)


def test_data_with_other_vocabularies_are_an_error_that_tells_what_to_do(data: Path, tmp_path: Path) -> None:
    with pytest.raises(VocabularyError, match=r"toy: .* source vocabulary .*simulmt prepare --vocabularies toy"):
        run(tiny(data, init=Path("toy"), model=TOY), tmp_path)


def test_a_missing_bundle_is_an_error_that_names_the_shipped_ones(tmp_path: Path) -> None:
    _, config = load_bundle("toy")
    with pytest.raises(CheckpointError, match=r"to: no such model; .* \(en-zh, de-en, toy\)"):
        initialise_from(build_model(config), Path("to"), config)
    with pytest.raises(CheckpointError, match=f"{tmp_path}: no trained model found"):
        initialise_from(build_model(config), tmp_path, config)


def test_a_run_comes_before_a_shipped_bundle_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, config = load_bundle("toy")
    monkeypatch.chdir(tmp_path)
    Path("toy").mkdir()
    initialise_from(build_model(config), Path("toy"), config)  # a directory without a model
    Path("toy/model.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"toy: damaged model: .*model\.safetensors"):
        initialise_from(build_model(config), Path("toy"), config)


def flip_a_byte(path: Path) -> None:
    content = bytearray((path / "ctc.weights").read_bytes())
    content[len(content) // 2] ^= 1
    (path / "ctc.weights").write_bytes(content)


def rewrite(bundle: Path, change: Callable[[Path], object]) -> None:
    """Modify the graph of a bundle, and update its checksums."""
    config = Bundle(bundle).config
    change(bundle / "ctc.onnx")
    write_description(bundle, config, card="")


def drop_all_weights(graph: Path) -> None:
    model = onnx.load(str(graph))
    del model.graph.initializer[:]
    onnx.save_model(model, str(graph))


def drop_the_last_weight(graph: Path) -> None:
    model = onnx.load(str(graph))
    del model.graph.initializer[-1]
    onnx.save_model(model, str(graph))


def add_a_weight(graph: Path) -> None:
    model = onnx.load(str(graph))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(3, np.float32), "more"))
    onnx.save_model(model, str(graph))


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a byte": (flip_a_byte, r"ctc\.weights: damaged \(checksum differs\)"),
    "a file": (lambda path: (path / "ctc.weights").unlink(), r"ctc\.weights: missing"),
    "no graph": (
        lambda path: rewrite(path, lambda graph: graph.write_bytes(b"none")),
        r"ctc\.onnx: cannot be read as ONNX",
    ),
    "fewer weights": (lambda path: rewrite(path, drop_the_last_weight), "not those that this version of simulmt"),
    "no weights": (lambda path: rewrite(path, drop_all_weights), "not those that this version of simulmt"),
    "more weights": (lambda path: rewrite(path, add_a_weight), "not those that this version of simulmt"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_bundle_is_an_error(damage: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    shutil.copytree(SHIPPED / "toy", tmp_path / "bundle")
    _, config = load_bundle(tmp_path / "bundle")
    damage(tmp_path / "bundle")
    with pytest.raises(BundleError, match=f"{tmp_path}/bundle.*{message}"):
        initialise_from(build_model(config), tmp_path / "bundle", config)


class TestAverage:
    def test_weights_are_averaged(self, exported: Export, tmp_path: Path) -> None:
        trained_model, path = exported("wait-k", "fp32", policy=True)
        first, config = load_bundle(path)
        with torch.no_grad():
            for parameter in first.parameters():
                parameter.add_(1.0)
        save_model(first, config, tmp_path / "first", {})
        other = tmp_path / f"{SCRATCH}.new"  # of a model that is being written at the same time
        other.mkdir()
        average_models([tmp_path / "first", path], [3, 1], tmp_path / "averaged")
        assert other.exists()
        averaged, own = load_model(tmp_path / "averaged")
        assert own == config
        expected = snapshot(trained_model.model)
        names = {name for name, _ in averaged.named_parameters()}
        for name, tensor in snapshot(averaged).items():
            torch.testing.assert_close(tensor, expected[name] + 0.75 if name in names else expected[name])

    @pytest.mark.parametrize(
        ("kind", "options", "message"),
        [
            ("ctc", {}, "cannot be averaged with .*: ctc with delays"),
            ("wait-k", {}, "only one of them has a policy"),
        ],
    )
    def test_models_that_do_not_fit_are_refused(
        self, kind: Kind, options: dict[str, bool], message: str, exported: Export, tmp_path: Path
    ) -> None:
        _, path = exported("wait-k", "fp32", policy=True)
        _, other = exported(kind, "fp32", **options)
        with pytest.raises(CheckpointError, match=message):
            average_models([path, other], [1, 1], tmp_path / "averaged")
        assert not (tmp_path / "averaged").exists()
