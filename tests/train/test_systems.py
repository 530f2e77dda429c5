from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from simulmt.errors import CheckpointError, ConfigError, VocabularyError
from simulmt.model.asn import ASNConfig, SortedCTCModel
from simulmt.model.ctc import CTCConfig, CTCModel
from simulmt.model.seq2seq import Seq2SeqConfig, Seq2SeqModel
from simulmt.text import Tokenizer
from simulmt.train.restore import initialise_from
from simulmt.train.systems import (
    System,
    SystemConfig,
    TrainableModel,
    TrainingConfig,
    build_model,
    check_vocabularies,
    load_model,
    save_model,
    translator_of,
    vocabulary_checksums,
)

from .helpers import SIZES, same, snapshot

SYSTEMS: tuple[System, ...] = ("ctc", "ctc+asn", "wait-k", "teacher")


def config_of(system: System, **changes: Any) -> SystemConfig:
    model = {**SIZES, **changes.pop("model", {})}
    return SystemConfig(system, 50, 60, model, **{"asn": ASNConfig(layers=2, tau=0.5), "delays": (1, 3), **changes})


def fresh(config: SystemConfig, seed: int) -> TrainableModel:
    torch.manual_seed(seed)
    return build_model(config)


def saved(system: System, directory: Path, seed: int = 1, **changes: Any) -> TrainableModel:
    config = config_of(system, **changes)
    model = fresh(config, seed)
    save_model(model, config, directory, {"dev_bleu": 12.5})
    return model


def test_the_default_settings_are_the_papers() -> None:
    """Those for English to Chinese; sorting networks are pre-norm by default, for older checkpoints."""
    assert CTCConfig(9, 9) == CTCConfig(
        9, 9, width=512, inner=2048, heads=8, layers=6, mu=2, dropout=0.1, whole_words=False, look_ahead_layer=0
    )
    assert Seq2SeqConfig(9, 9) == Seq2SeqConfig(
        9, 9, width=512, inner=2048, heads=8, encoder_layers=6, decoder_layers=6, dropout=0.1, policy_inner=0
    )
    assert ASNConfig() == ASNConfig(
        layers=3, iterations=16, tau=0.25, delta=0.3, gamma=0.5, norm="pre", query_scale=1.0
    )
    assert TrainingConfig() == TrainingConfig(
        update_tokens=32_768,
        learning_rate=5e-4,
        warmup_updates=4000,
        cooldown=0.0,
        betas=(0.9, 0.98),
        weight_decay=1e-4,
        clip_norm=10.0,
        smoothing=0.1,
        max_updates=300_000,
        validate_every=500,
        patience=25_000,
        keep_best=5,
        ema_decay=0.0,
        max_minutes=0.0,
    )


def test_a_system_is_its_network() -> None:
    models = {system: build_model(config_of(system)) for system in SYSTEMS}
    assert isinstance(models["ctc"], CTCModel)
    assert isinstance(models["ctc+asn"], SortedCTCModel)
    assert isinstance(models["wait-k"], Seq2SeqModel)
    assert isinstance(models["teacher"], Seq2SeqModel)
    assert models["wait-k"].encoder.causal
    assert not models["teacher"].encoder.causal
    assert len(models["ctc+asn"].sorter.layers) == 2
    assert translator_of(models["ctc+asn"]) is models["ctc+asn"].translator
    assert translator_of(models["teacher"]) is models["teacher"]


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_saved_model_loads_unchanged(system: System, tmp_path: Path) -> None:
    model = saved(system, tmp_path / "final")
    loaded, config = load_model(tmp_path / "final")
    assert config == config_of(system)
    assert same(snapshot(loaded), snapshot(model))
    assert type(loaded) is type(model)
    assert not loaded.training
    assert not any(parameter.is_meta for parameter in loaded.parameters())
    again, _ = load_model(tmp_path)  # a run directory is accepted for its final model
    assert same(snapshot(again), snapshot(model))


def test_a_sorted_model_without_norm_placement_is_pre_norm(tmp_path: Path) -> None:
    model = saved("ctc+asn", tmp_path, asn=ASNConfig(norm="post", query_scale=0.1))
    loaded, config = load_model(tmp_path)
    assert config.asn == ASNConfig(norm="post", query_scale=0.1)
    assert isinstance(loaded, SortedCTCModel)
    assert loaded.sorter.layers[0].post_norm
    description = json.loads((tmp_path / "model.json").read_text(encoding="utf-8"))
    del description["config"]["asn"]["norm"], description["config"]["asn"]["query_scale"]
    (tmp_path / "model.json").write_text(json.dumps(description), encoding="utf-8")
    old, config = load_model(tmp_path)
    assert config.asn == ASNConfig()
    assert isinstance(old, SortedCTCModel)
    assert not old.sorter.layers[0].post_norm
    assert same(snapshot(old), snapshot(model))


def test_a_model_is_stored_as_tensors_and_plain_data(tmp_path: Path) -> None:
    model = saved("ctc", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"model.safetensors", "model.json"}
    assert same(safetensors.torch.load_file(tmp_path / "model.safetensors"), snapshot(model))
    description = json.loads((tmp_path / "model.json").read_text(encoding="utf-8"))
    assert description["dev_bleu"] == 12.5
    assert description["config"]["delays"] == [1, 3]


def test_a_sorted_model_starts_from_all_weights_of_a_plain_one(tmp_path: Path) -> None:
    other = saved("ctc", tmp_path)
    model = fresh(config_of("ctc+asn"), seed=2)
    before = snapshot(model)
    initialise_from(model, tmp_path, config_of("ctc+asn"))
    after = snapshot(model)
    shared = {name.removeprefix("translator."): after[name] for name in after if name.startswith("translator.")}
    assert same(shared, snapshot(other))
    own = {name for name in after if name.startswith("sorter.")}
    assert own
    assert all(torch.equal(after[name], before[name]) for name in own)


def test_a_plain_model_starts_from_a_sorted_one(tmp_path: Path) -> None:
    other = saved("ctc+asn", tmp_path)
    model = fresh(config_of("ctc"), seed=2)
    initialise_from(model, tmp_path, config_of("ctc"))
    assert same(snapshot(model), snapshot(translator_of(other)))


def test_a_sorted_model_does_not_start_from_one_of_another_norm_placement(tmp_path: Path) -> None:
    saved("ctc+asn", tmp_path, asn=ASNConfig(layers=2, norm="pre"))
    config = config_of("ctc+asn", asn=ASNConfig(layers=2, norm="post"))
    with pytest.raises(CheckpointError, match=r"asn\.norm = 'pre', not 'post'"):
        initialise_from(fresh(config, seed=2), tmp_path, config)
    initialise_from(fresh(config_of("ctc"), seed=2), tmp_path, config_of("ctc"))


def test_a_sorted_model_starts_from_all_of_another_sorted_one(tmp_path: Path) -> None:
    other = saved("ctc+asn", tmp_path)
    model = fresh(config_of("ctc+asn"), seed=2)
    initialise_from(model, tmp_path, config_of("ctc+asn"))
    assert same(snapshot(model), snapshot(other))


@pytest.mark.parametrize(("theirs", "ours"), [(False, True), (True, False), (True, True)])
@pytest.mark.parametrize("system", ["ctc", "ctc+asn"])
def test_whole_words_may_be_switched_on_or_off_when_initialising(
    system: System, theirs: bool, ours: bool, tmp_path: Path
) -> None:
    other = saved(system, tmp_path, model={"whole_words": theirs})
    config = config_of("ctc+asn", model={"whole_words": ours})
    model = fresh(config, seed=2)
    translator_of(model).encoder.mark_words([token % 2 == 0 for token in range(50)])
    initialise_from(model, tmp_path, config)
    found, expected = (snapshot(translator_of(each)) for each in (model, other))
    assert ("encoder.word_starts" in found) == ours
    if ours:
        assert found.pop("encoder.word_starts").tolist() == [token % 2 == 0 for token in range(50)]  # still its own
    expected.pop("encoder.word_starts", None)
    assert same(found, expected)


@pytest.mark.parametrize(
    ("system", "model"), [("ctc", {"width": 32}), ("ctc", {"layers": 2}), ("ctc", {"mu": 3}), ("teacher", {})]
)
def test_a_model_of_other_sizes_or_kind_cannot_be_started_from(
    system: System, model: dict[str, int], tmp_path: Path
) -> None:
    saved(system, tmp_path, model=model)
    config = config_of("ctc+asn", model={"layers": 6})
    with pytest.raises(CheckpointError, match=f"{tmp_path}: cannot initialise"):
        initialise_from(fresh(config, seed=2), tmp_path, config)


def break_json(directory: Path, change: Any) -> None:
    path = directory / "model.json"
    description = json.loads(path.read_text(encoding="utf-8"))
    change(description)
    path.write_text(json.dumps(description), encoding="utf-8")


DAMAGE: dict[str, Any] = {
    "nothing there": shutil.rmtree,
    "no weights": lambda path: (path / "model.safetensors").unlink(),
    "no description": lambda path: (path / "model.json").unlink(),
    "weights cut off": lambda path: (path / "model.safetensors").write_bytes(b"\x08\0\0"),
    "description cut off": lambda path: (path / "model.json").write_text('{"config":'),
    "no configuration": lambda path: break_json(path, lambda description: description.pop("config")),
    "other sizes": lambda path: break_json(path, lambda description: description["config"]["model"].update(width=32)),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_model_is_an_error_that_names_it(damage: Any, tmp_path: Path) -> None:
    saved("ctc", tmp_path / "model")
    damage(tmp_path / "model")
    with pytest.raises(CheckpointError, match=str(tmp_path / "model")):
        load_model(tmp_path / "model")


def test_a_model_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "final").write_text("a file in place of the directory")
    with pytest.raises(CheckpointError, match=str(tmp_path / "final")):
        saved("ctc", tmp_path / "final")


@pytest.mark.parametrize("touched", range(1, 9))
def test_an_interrupted_write_leaves_no_partial_model(
    touched: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at every step of replacing an earlier model; the next call succeeds."""

    class Killed(BaseException):
        pass

    def killing(deed: Callable[..., Any]) -> Callable[..., Any]:
        def do(*arguments: Any, **options: Any) -> Any:
            if next(deeds) == touched:
                raise Killed
            return deed(*arguments, **options)

        return do

    earlier, deeds = saved("ctc", tmp_path / "final", seed=1), count(1)
    with monkeypatch.context() as patch, suppress(Killed):
        for place, name in ((Path, "mkdir"), (Path, "write_text"), (Path, "rename"), (os, "fsync")):
            patch.setattr(place, name, killing(getattr(place, name)))
        saved("ctc", tmp_path / "final", seed=2)
    if (tmp_path / "final").exists():
        assert same(snapshot(load_model(tmp_path)[0]), snapshot(earlier if touched < 8 else fresh(config_of("ctc"), 2)))
    else:
        assert touched == 7  # the earlier one is moved away, the new one not yet in place
    later = saved("ctc", tmp_path / "final", seed=3)
    assert same(snapshot(load_model(tmp_path)[0]), snapshot(later))
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


class TestVocabularies:
    """Vocabularies of the same size are distinguished by checksum, if known."""

    @pytest.fixture
    def known(self, source_tokenizer: Tokenizer, target_tokenizer: Tokenizer) -> SystemConfig:
        sizes = source_tokenizer.size, target_tokenizer.size
        assert sizes[0] == sizes[1]
        checksums = vocabulary_checksums(source_tokenizer, target_tokenizer)
        return SystemConfig("ctc", *sizes, SIZES, vocabulary_sha256=checksums)

    def test_they_are_stored_with_the_model(self, known: SystemConfig, tmp_path: Path) -> None:
        save_model(build_model(known), known, tmp_path / "final", {})
        assert load_model(tmp_path)[1] == known

    def test_a_run_starts_only_from_a_model_with_its_own(self, known: SystemConfig, tmp_path: Path) -> None:
        model, (source, target) = build_model(known), known.vocabulary_sha256 or ("", "")
        save_model(model, known, tmp_path / "final", {})
        initialise_from(model, tmp_path, known)
        initialise_from(model, tmp_path, replace(known, vocabulary_sha256=None))
        for checksums, side in (((target, target), "source"), ((source, source), "target")):
            with pytest.raises(VocabularyError, match=f"a {side} vocabulary that differs .* --vocabularies"):
                initialise_from(model, tmp_path, replace(known, vocabulary_sha256=checksums))

    def test_a_model_of_an_older_version_is_not_checked(self, known: SystemConfig, tmp_path: Path) -> None:
        save_model(build_model(known), known, tmp_path / "final", {})
        break_json(tmp_path / "final", lambda description: description["config"].pop("vocabulary_sha256"))
        initialise_from(build_model(known), tmp_path, known)

    def test_a_data_directory_must_have_those_of_the_model(
        self, known: SystemConfig, source_tokenizer: Tokenizer, target_tokenizer: Tokenizer
    ) -> None:
        model, data = Path("runs/a"), Path("data/b")
        check_vocabularies(model, known, data, source_tokenizer, target_tokenizer)
        with pytest.raises(VocabularyError, match=r"data/b: target\.model .* despite its size; pass the data"):
            check_vocabularies(model, known, data, source_tokenizer, source_tokenizer)
        older = replace(known, vocabulary_sha256=None)
        check_vocabularies(model, older, data, source_tokenizer, source_tokenizer)
        with pytest.raises(VocabularyError, match=r"data/b: vocabularies of \(150, 150\) pieces, but runs/a"):
            check_vocabularies(model, replace(older, target_vocabulary=9), data, source_tokenizer, source_tokenizer)


def test_an_unknown_or_impossible_setting_is_an_error() -> None:
    with pytest.raises(ConfigError, match="unknown key 'widht'; did you mean 'width'"):
        config_of("ctc", model={"widht": 3}).network()
    with pytest.raises(ConfigError, match="unknown key 'encoder_layers'"):
        config_of("ctc", model={"encoder_layers": 3}).network()
    with pytest.raises(ConfigError, match="at least one k"):
        config_of("ctc", delays=())
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        config_of("ctc", delays=(3, 0))
