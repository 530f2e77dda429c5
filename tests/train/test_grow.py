"""Growing a model: it translates as before, and can learn to write new characters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from simulmt.errors import CheckpointError, ConfigError, VocabularyError
from simulmt.text import UNK, Tokenizer
from simulmt.train.grow import grow_model
from simulmt.train.restore import load_model_or_bundle
from simulmt.train.systems import System, SystemConfig, build_model, save_model, vocabulary_checksums

SIZES = {"width": 16, "inner": 24, "heads": 2}
LAYERS = {"wait-k": {"encoder_layers": 2, "decoder_layers": 1}, "teacher": {"encoder_layers": 2, "decoder_layers": 1}}
NEW = "囱豚"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "new.zh"
    path.write_text(f"{NEW}囱\n豚 a,罕\n", encoding="utf-8")  # 罕 occurs only once
    return path


def saved(folder: Path, system: System, vocabularies: tuple[Tokenizer, Tokenizer]) -> Path:
    source, target = vocabularies
    config = SystemConfig(
        system,
        source.size,
        target.size,
        model={**SIZES, **LAYERS.get(system, {"layers": 2})},
        delays=(1, 3),
        vocabulary_sha256=vocabulary_checksums(source, target),
    )
    torch.manual_seed(1)
    save_model(build_model(config), config, folder / "model", {})
    for side, tokenizer in zip(("source", "target"), vocabularies, strict=True):
        (folder / f"{side}.model").write_bytes(tokenizer.model)
    return folder / "model"


@pytest.fixture
def vocabularies(source_tokenizer: Tokenizer, ideograph_tokenizer: Tokenizer) -> tuple[Tokenizer, Tokenizer]:
    return source_tokenizer, ideograph_tokenizer


@pytest.mark.parametrize("system", ["ctc", "transducer", "wait-k", "teacher"])
def test_a_grown_model_computes_what_it_computed_before(
    system: System, vocabularies: tuple[Tokenizer, Tokenizer], text: Path, tmp_path: Path
) -> None:
    path = saved(tmp_path, system, vocabularies)
    grown = grow_model(path, tmp_path / "grown", tmp_path, [text], encoder_layers=4)
    assert ({*grown.characters}, grown.layers) == ({*NEW}, 2)
    models: Any = [load_model_or_bundle(each) for each in (path, tmp_path / "grown")]
    (model, config), (larger, larger_config) = models
    old = config.target_vocabulary
    assert larger_config.target_vocabulary == old + len(NEW)
    source, lengths = torch.randint(6, vocabularies[0].size, (2, 7)), torch.tensor([7, 5])
    if system in ("wait-k", "teacher"):
        target = torch.randint(6, old, (2, 5))
        before, after = (each(source, lengths, target, 3 if system == "wait-k" else None) for each in (model, larger))
    else:
        states = [each.encode(source, lengths, 3) for each in (model, larger)]
        before, after = (each.logits(each.frames(H)) for each, H in zip((model, larger), states, strict=True))
    torch.testing.assert_close(after[..., :old], before)
    assert len([*larger.encoder.layers]) == 4


def test_new_characters_follow_the_known_pieces(
    vocabularies: tuple[Tokenizer, Tokenizer], text: Path, tmp_path: Path
) -> None:
    path = saved(tmp_path, "wait-k", vocabularies)
    grow_model(path, tmp_path / "grown", tmp_path, [text])
    old, new = vocabularies[1], Tokenizer.load(tmp_path / "grown" / "target.model")
    assert new.pieces[: old.size] == old.pieces
    assert {*new.pieces[old.size :]} == {*NEW}
    assert old.encode(NEW) == [UNK]
    assert new.decode(new.encode(f"{NEW}囱")) == f"{NEW}囱"
    assert Tokenizer.load(tmp_path / "grown" / "source.model").model == vocabularies[0].model


def test_known_text_is_encoded_as_before(ideograph_tokenizer: Tokenizer) -> None:
    grown = ideograph_tokenizer.with_characters(NEW)
    known = "".join(piece for piece in ideograph_tokenizer.pieces[6:] if "▁" not in piece)
    assert grown.encode(known) == ideograph_tokenizer.encode(known)


def test_a_bundle_brings_its_vocabularies(text: Path, tmp_path: Path) -> None:
    grown = grow_model(Path("toy"), tmp_path / "grown", text=[text])
    assert {*NEW} <= {*grown.characters}
    assert load_model_or_bundle(tmp_path / "grown")[1].network().layers == 3  # type: ignore[union-attr]


def test_a_run_needs_its_vocabularies(vocabularies: tuple[Tokenizer, Tokenizer], text: Path, tmp_path: Path) -> None:
    path = saved(tmp_path, "ctc", vocabularies)
    with pytest.raises(ConfigError, match="--data"):
        grow_model(path, tmp_path / "grown", text=[text])
    (tmp_path / "target.model").write_bytes(vocabularies[0].model)
    with pytest.raises(VocabularyError):
        grow_model(path, tmp_path / "grown", tmp_path, [text])


def test_a_sorting_network_cannot_grow(vocabularies: tuple[Tokenizer, Tokenizer], text: Path, tmp_path: Path) -> None:
    path = saved(tmp_path, "ctc+asn", vocabularies)
    with pytest.raises(CheckpointError, match="sorting network"):
        grow_model(path, tmp_path / "grown", tmp_path, [text])
    assert not (tmp_path / "grown").exists()


def test_layers_cannot_be_removed(vocabularies: tuple[Tokenizer, Tokenizer], text: Path, tmp_path: Path) -> None:
    path = saved(tmp_path, "wait-k", vocabularies)
    with pytest.raises(ConfigError, match=r"--encoder-layers 1: .* has 2 already"):
        grow_model(path, tmp_path / "grown", tmp_path, [text], encoder_layers=1)
