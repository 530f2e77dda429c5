"""A data directory: two vocabularies, a training store and a development set.

    source.model  target.model      the vocabularies
    train/  dev/                    token stores
    dev.source                      the development set as text
    dev.reference  dev.reference2   its references, one set per file

All references are used for scoring.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from simulmt.data.corpus import Corpus, Pair, read_lines, writing
from simulmt.data.store import Filters, SideManifest, TokenStore, prepare, refuse_to_overwrite
from simulmt.errors import DataError, VocabularyError
from simulmt.files import write_whole
from simulmt.text import BACK_TRANSLATED, Tokenizer, VocabularySpec

SOURCE_SPEC = VocabularySpec(normalization="nmt_nfkc_cf")
TARGET_SPEC = VocabularySpec(normalization="nmt_nfkc")


@dataclass(frozen=True, eq=False)
class Dataset:
    """An opened data directory."""

    directory: Path
    source_tokenizer: Tokenizer
    target_tokenizer: Tokenizer
    train: TokenStore
    dev: TokenStore
    dev_references: list[list[str]]  # one list per set; the first is encoded in `dev`

    @staticmethod
    def open(directory: Path) -> Dataset:
        """Open a data directory and check that its parts match."""
        if not directory.is_dir():
            raise DataError(f"{directory}: no such data directory; make one with simulmt prepare")
        source = Tokenizer.load(directory / "source.model")
        target = Tokenizer.load(directory / "target.model")
        train, dev = TokenStore.open(directory / "train"), TokenStore.open(directory / "dev")
        for store in (train, dev):
            _check_vocabulary(directory / "source.model", source, store.manifest.source)
            _check_vocabulary(directory / "target.model", target, store.manifest.target)
        return Dataset(directory, source, target, train, dev, _read_references(directory, len(dev)))

    def dev_sources(self) -> list[str]:
        """Return the source text of the development set, before normalisation."""
        return _read_development(self.directory / "dev.source", len(self.dev))


def prepare_dataset(
    directory: Path,
    train: Sequence[Corpus],
    dev: Corpus,
    source_spec: VocabularySpec = SOURCE_SPEC,
    target_spec: VocabularySpec = TARGET_SPEC,
    filters: Filters | None = None,
    overwrite: bool = False,
    progress: Callable[[str, int], None] = lambda _stage, _pairs: None,
    more_references: Sequence[Sequence[str]] = (),
    vocabularies: Path | None = None,
    processes: int = 1,
) -> Dataset:
    """Train both vocabularies and encode the training and development sets.

    Vocabularies already in the directory are reused, so that several corpora can share them; `vocabularies` is another
    data directory to copy them from. `progress` is called with the stage and the number of pairs done.
    `more_references` are further references of the development set.
    """
    _write_vocabularies(directory, overwrite, {} if vocabularies is None else _read_models(vocabularies))
    progress("vocabularies", 0)
    sources = (pair.source.removeprefix(BACK_TRANSLATED) for pair in _pairs(train))
    source = _vocabulary(directory / "source.model", source_spec, sources)
    target = _vocabulary(directory / "target.model", target_spec, (pair.target for pair in _pairs(train)))
    for name, corpora, applied in (("train", train, filters or Filters()), ("dev", [dev], None)):
        prepare(
            corpora,
            source,
            target,
            directory / name,
            filters=applied,
            overwrite=overwrite,
            processes=processes,
            progress=lambda pairs, name=name: progress(name, pairs),  # type: ignore[misc]
        )
    _write_development_text(directory, list(dev.pairs()), more_references)
    return Dataset.open(directory)


def _pairs(corpora: Sequence[Corpus]) -> Iterator[Pair]:
    return chain.from_iterable(corpus.pairs() for corpus in corpora)


def _write_development_text(directory: Path, pairs: Sequence[Pair], more_references: Sequence[Sequence[str]]) -> None:
    for path in directory.glob("dev.reference*"):  # an earlier set may have had more
        path.unlink()
    _write_lines(directory / "dev.source", [pair.source for pair in pairs])
    references = [[pair.target for pair in pairs], *more_references]
    for number, lines in enumerate(references, start=1):
        _write_lines(_reference_path(directory, number), lines)


def _write_lines(path: Path, lines: Sequence[str]) -> None:
    with writing(path):
        write_whole(path, "".join(line + "\n" for line in lines))


def _read_references(directory: Path, count: int) -> list[list[str]]:
    references: list[list[str]] = []
    while not references or _reference_path(directory, len(references) + 1).exists():
        references.append(_read_development(_reference_path(directory, len(references) + 1), count))
    return references


def _read_development(path: Path, count: int) -> list[str]:
    lines = list(read_lines(path))
    if len(lines) != count:
        raise DataError(f"{path}: {len(lines)} lines for {count} pairs; prepare the data again")
    return lines


def _reference_path(directory: Path, number: int) -> Path:
    return directory / f"dev.reference{number if number > 1 else ''}"


def _check_vocabulary(path: Path, tokenizer: Tokenizer, encoded: SideManifest) -> None:
    if hashlib.sha256(tokenizer.model).hexdigest() != encoded.tokenizer_sha256:
        raise VocabularyError(f"{path}: not the vocabulary that the data was encoded with; prepare the data again")


def _write_vocabularies(directory: Path, overwrite: bool, models: Mapping[str, bytes]) -> None:
    """Write the vocabularies, unless that would overwrite stores or other vocabularies."""
    with writing(directory):
        for name in ("train", "dev"):
            refuse_to_overwrite(directory / name, overwrite)
        missing = [name for name, model in models.items() if not _has_vocabulary(directory / name, model)]
        for name in missing:
            write_whole(directory / name, models[name])


def _has_vocabulary(path: Path, model: bytes) -> bool:
    """Return whether this vocabulary already exists; raise DataError if a different one does."""
    if not path.exists():
        return False
    if path.read_bytes() != model:
        raise DataError(f"{path}: differs from the one in --vocabularies; choose another --output, or remove the file")
    return True


def _read_models(vocabularies: Path) -> dict[str, bytes]:
    try:
        return {name: Tokenizer.load(vocabularies / name).model for name in ("source.model", "target.model")}
    except VocabularyError as error:
        raise VocabularyError(f"--vocabularies: {error}") from None


def _vocabulary(path: Path, spec: VocabularySpec, lines: Iterator[str]) -> Tokenizer:
    return Tokenizer.load(path) if path.exists() else Tokenizer.train(lines, path, spec)
