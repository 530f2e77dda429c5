"""A data directory: two vocabularies, a training store and a development set, ready to train on.

source.model  target.model      the vocabularies
train/  dev/                    token stores
dev.reference                   the development targets as text, which scores are computed against
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from simulmt.corpus import Corpus, Pair, read_lines
from simulmt.errors import DataError, VocabularyError
from simulmt.store import Filters, SideManifest, TokenStore, prepare
from simulmt.text import Tokenizer, VocabularySpec

SOURCE_SPEC = VocabularySpec(normalization="nmt_nfkc_cf")
TARGET_SPEC = VocabularySpec(normalization="nmt_nfkc")


@dataclass(frozen=True, eq=False)
class Dataset:
    """An opened data directory."""

    source_tokenizer: Tokenizer
    target_tokenizer: Tokenizer
    train: TokenStore
    dev: TokenStore
    dev_references: list[str]

    @staticmethod
    def open(directory: Path) -> Dataset:
        """Open a data directory, checking that its parts belong together."""
        if not directory.is_dir():
            raise DataError(f"{directory}: no such data directory; make one with simulmt prepare")
        source = Tokenizer.load(directory / "source.model")
        target = Tokenizer.load(directory / "target.model")
        train, dev = TokenStore.open(directory / "train"), TokenStore.open(directory / "dev")
        for store in (train, dev):
            _check_vocabulary(directory / "source.model", source, store.manifest.source)
            _check_vocabulary(directory / "target.model", target, store.manifest.target)
        references = list(read_lines(directory / "dev.reference"))
        if len(references) != len(dev):
            raise DataError(
                f"{directory}/dev.reference: {len(references)} lines for {len(dev)} pairs; prepare it again"
            )
        return Dataset(source, target, train, dev, references)


def prepare_dataset(
    directory: Path,
    train: Sequence[Corpus],
    dev: Corpus,
    source_spec: VocabularySpec = SOURCE_SPEC,
    target_spec: VocabularySpec = TARGET_SPEC,
    filters: Filters | None = None,
    overwrite: bool = False,
    progress: Callable[[str, int], None] = lambda _stage, _pairs: None,
) -> Dataset:
    """Learn both vocabularies from the training text and encode training and development sets.

    Vocabularies that lie in the directory already are used as they are, so that several corpora can share them.
    `progress` is told the stage and how many pairs of it are done.
    """
    progress("vocabularies", 0)
    source = _vocabulary(directory / "source.model", source_spec, (pair.source for pair in _pairs(train)))
    target = _vocabulary(directory / "target.model", target_spec, (pair.target for pair in _pairs(train)))
    for name, corpora, applied in (("train", train, filters or Filters()), ("dev", [dev], None)):
        prepare(
            corpora,
            source,
            target,
            directory / name,
            filters=applied,
            overwrite=overwrite,
            progress=lambda pairs, name=name: progress(name, pairs),  # type: ignore[misc]
        )
    references = "".join(pair.target + "\n" for pair in dev.pairs())
    (directory / "dev.reference").write_text(references, encoding="utf-8")
    return Dataset.open(directory)


def _pairs(corpora: Sequence[Corpus]) -> Iterator[Pair]:
    return chain.from_iterable(corpus.pairs() for corpus in corpora)


def _check_vocabulary(path: Path, tokenizer: Tokenizer, encoded: SideManifest) -> None:
    if hashlib.sha256(tokenizer.model).hexdigest() != encoded.tokenizer_sha256:
        raise VocabularyError(f"{path}: not the vocabulary that the data beside it was encoded with; prepare it again")


def _vocabulary(path: Path, spec: VocabularySpec, lines: Iterator[str]) -> Tokenizer:
    return Tokenizer.load(path) if path.exists() else Tokenizer.train(lines, path, spec)
