from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from simulmt.runtime.bundle import SYNTHETIC
from simulmt.runtime.stream import Translator
from simulmt.text import Tokenizer
from simulmt.train.export import export
from tiny_models import export_config, trained, translator


@pytest.fixture(scope="session")
def bundle(model: Translator) -> Path:
    return model.bundle.directory


@pytest.fixture(scope="session")
def unspaced(
    source_tokenizer: Tokenizer, ideograph_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Translator:
    """Return an untrained model from English to Chinese."""
    network = trained("ctc", source_tokenizer, ideograph_tokenizer)
    return translator(network, "ctc", "fp32", tmp_path_factory.mktemp("unspaced"))


@pytest.fixture(scope="session")
def shipped(
    bundle: Path, source_tokenizer: Tokenizer, target_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Return a directory of shipped models: `invented`, for the synthetic pair, and `real`."""
    folder = tmp_path_factory.mktemp("shipped")
    shutil.copytree(bundle, folder / "real")
    config = replace(export_config("ctc", "fp32"), source_language=SYNTHETIC, target_language=SYNTHETIC)
    export(trained("ctc", source_tokenizer, target_tokenizer), folder / "invented", config)
    return folder
