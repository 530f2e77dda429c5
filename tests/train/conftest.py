from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from simulmt.data.corpus import ParallelFiles
from simulmt.data.store import Dataset, prepare_dataset
from simulmt.data.synthetic import write_corpus
from simulmt.text import VocabularySpec


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread here and in child processes: the networks are too small for more."""
    before, os.environ["OMP_NUM_THREADS"] = torch.get_num_threads(), "1"
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare a data directory of 300 synthetic training pairs and 20 development pairs."""
    directory = tmp_path_factory.mktemp("tiny")
    text = directory / "text"
    write_corpus(text, reorder=0.5, train=300, dev=20, test=0)
    prepare_dataset(
        directory / "data",
        [ParallelFiles(text / "train.source", text / "train.target")],
        ParallelFiles(text / "dev.source", text / "dev.target"),
        VocabularySpec(size=300, normalization="nmt_nfkc_cf"),
        VocabularySpec(size=300),
    )
    return directory / "data"


@pytest.fixture(scope="session")
def dataset(data: Path) -> Dataset:
    return Dataset.open(data)
