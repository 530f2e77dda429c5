from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simulmt.data.corpus import ParallelFiles, TabSeparatedFile
from simulmt.data.store import Dataset, Filters, prepare_dataset
from simulmt.data.synthetic import write_corpus
from simulmt.errors import DataError, SimulmtError, VocabularyError
from simulmt.text import END, START, Tokenizer, VocabularySpec

SOURCE = VocabularySpec(size=150, normalization="nmt_nfkc_cf")
TARGET = VocabularySpec(size=160)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("text")
    write_corpus(directory, reorder=0.5, train=150, dev=12, test=30)
    return directory


def files(text: Path, name: str) -> ParallelFiles:
    return ParallelFiles(text / f"{name}.source", text / f"{name}.target")


def prepared(text: Path, directory: Path, **changes: Any) -> Dataset:
    arguments = {"source_spec": SOURCE, "target_spec": TARGET, **changes}
    return prepare_dataset(directory, [files(text, "train")], files(text, "dev"), **arguments)


@pytest.fixture(scope="module")
def original(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data") / "original"
    prepared(text, directory)
    return directory


@pytest.fixture
def directory(original: Path, tmp_path: Path) -> Path:
    """Copy the prepared directory, so that a test may damage it."""
    return Path(shutil.copytree(original, tmp_path / "data"))


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def test_a_prepared_dataset_is_opened_unchanged(original: Path, text: Path) -> None:
    dataset = Dataset.open(original)
    assert (dataset.source_tokenizer.size, dataset.target_tokenizer.size) == (150, 160)
    assert (len(dataset.train), len(dataset.dev)) == (150, 12)
    assert dataset.dev_references == [lines(text / "dev.target")]
    for store, name in ((dataset.train, "train"), (dataset.dev, "dev")):
        for row, (source, target) in enumerate(zip(*map(lines, files(text, name).paths), strict=True)):
            expected = [
                [*dataset.source_tokenizer.encode(source), END],
                [*dataset.target_tokenizer.encode(target), END],
            ]
            assert [ids.tolist() for ids in store.pair(row)] == expected


def test_preparing_twice_gives_the_same_files(original: Path, text: Path, tmp_path: Path) -> None:
    prepared(text, tmp_path / "again")
    paths = [path.relative_to(original) for path in original.rglob("*") if path.is_file()]
    assert len(paths) == 14
    assert all((tmp_path / "again" / path).read_bytes() == (original / path).read_bytes() for path in paths)


def test_existing_vocabularies_are_used(original: Path, text: Path, tmp_path: Path) -> None:
    shutil.copy(original / "target.model", tmp_path)
    dataset = prepare_dataset(tmp_path, [files(text, "test")], files(text, "dev"), VocabularySpec(size=90), TARGET)
    assert dataset.target_tokenizer.model == Tokenizer.load(original / "target.model").model
    assert dataset.source_tokenizer.size == 90
    assert np.array_equal(dataset.dev.target_tokens, Dataset.open(original).dev.target_tokens)


def test_the_back_translation_tag_is_one_symbol_outside_the_vocabulary(
    original: Path, text: Path, tmp_path: Path
) -> None:
    tagged = tmp_path / "tagged.source"
    tagged.write_text("".join(f"<bt> {line}\n" for line in lines(text / "train.source")), encoding="utf-8")
    corpus = ParallelFiles(tagged, text / "train.target")
    made = prepare_dataset(tmp_path / "data", [corpus], files(text, "dev"), SOURCE, TARGET)
    untagged = Dataset.open(original)
    assert made.source_tokenizer.model == untagged.source_tokenizer.model
    for number in range(9):
        (source, target), (plain, same) = made.train.pair(number), untagged.train.pair(number)
        assert source.tolist() == [START, *plain]
        assert target.tolist() == same.tolist()


def test_filters_are_for_training_only(text: Path, tmp_path: Path) -> None:
    dataset = prepared(text, tmp_path / "data", filters=Filters(max_length=20))
    assert 0 < len(dataset.train) < 150
    assert dataset.train.source_lengths.max() <= 21
    assert len(dataset.dev) == 12
    assert dataset.dev.source_lengths.max() > 21


def test_progress_is_reported_by_stage(text: Path, tmp_path: Path) -> None:
    told: list[tuple[str, int]] = []
    prepared(text, tmp_path / "data", progress=lambda stage, pairs: told.append((stage, pairs)))
    assert told == [("vocabularies", 0), ("train", 150), ("dev", 12)]


def test_stores_are_replaced_only_on_request(directory: Path, text: Path) -> None:
    with pytest.raises(DataError, match="already exists"):
        prepared(text, directory)
    assert len(prepared(text, directory, overwrite=True).train) == 150


def test_development_text_that_cannot_be_written_is_named(text: Path, tmp_path: Path) -> None:
    (tmp_path / "data" / "dev.source").mkdir(parents=True)
    with pytest.raises(DataError, match=r"dev\.source: cannot be written: Is a directory"):
        prepared(text, tmp_path / "data")


def test_only_line_feeds_end_a_reference(text: Path, directory: Path, tmp_path: Path) -> None:
    """Other line breaks occur inside sentences and must not misalign the references."""
    strange = ["one\rtwo", "three\u2028four", "five\x85six\x0b", "seven "]
    (tmp_path / "dev.tsv").write_text("".join(f"tam\t{target}\n" for target in strange), newline="", encoding="utf-8")
    dev = TabSeparatedFile(tmp_path / "dev.tsv")
    dataset = prepare_dataset(directory, [files(text, "train")], dev, SOURCE, TARGET, overwrite=True)
    assert dataset.dev_references == [strange]
    assert lines(directory / "dev.source") == ["tam"] * 4


def test_further_references_are_kept_beside_the_first(directory: Path, text: Path) -> None:
    more = [[f"{kind} {number}" for number in range(12)] for kind in ("second", "third")]
    dataset = prepared(text, directory, overwrite=True, more_references=more)
    assert dataset.dev_references == [lines(text / "dev.target"), *more]
    assert lines(directory / "dev.source") == lines(text / "dev.source")
    assert lines(directory / "dev.reference3") == more[1]
    again = prepared(text, directory, overwrite=True, more_references=more[1:])
    assert again.dev_references == [lines(text / "dev.target"), more[1]]


def swap_vocabularies(directory: Path) -> None:
    shutil.copy(directory / "source.model", directory / "target.model")


def retrain_source_vocabulary(directory: Path) -> None:
    """Replace the source vocabulary by one of the same size, trained on other text."""
    Tokenizer.train(lines(directory / "dev.reference") * 5, directory / "source.model", SOURCE)


def retell_the_manifest(directory: Path) -> None:
    path = directory / "train" / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    manifest["format_version"] = 99
    path.write_text(json.dumps(manifest), encoding="utf-8")


def add_a_reference(directory: Path) -> None:
    with (directory / "dev.reference").open("a", encoding="utf-8") as file:
        file.write("one more\n")


@pytest.mark.parametrize(
    ("spoil", "error", "named"),
    [
        (swap_vocabularies, VocabularyError, "target.model"),
        (retrain_source_vocabulary, VocabularyError, "source.model"),
        (lambda directory: (directory / "source.model").unlink(), VocabularyError, "source.model"),
        (lambda directory: (directory / "target.model").write_text("?"), VocabularyError, "target.model"),
        (lambda directory: shutil.rmtree(directory / "dev"), DataError, "dev/manifest.json"),
        (lambda directory: (directory / "train" / "source.tokens").write_text(""), DataError, "train/source.tokens"),
        (retell_the_manifest, DataError, "train/manifest.json"),
        (lambda directory: (directory / "dev.reference").unlink(), DataError, "dev.reference"),
        (lambda directory: (directory / "dev.reference").write_bytes(b"\xff\n"), DataError, "dev.reference"),
        (add_a_reference, DataError, "dev.reference: 13 lines for 12 pairs"),
        (
            lambda directory: (directory / "dev.reference2").write_text("one\n"),
            DataError,
            "dev.reference2: 1 lines for 12",
        ),
        (shutil.rmtree, DataError, "no such data directory"),
    ],
)
def test_mismatched_parts_are_refused_by_name(
    directory: Path, spoil: Any, error: type[SimulmtError], named: str
) -> None:
    spoil(directory)
    with pytest.raises(error, match=named) as raised:
        Dataset.open(directory)
    assert str(directory) in str(raised.value)
