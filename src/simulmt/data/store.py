"""Token stores, memory-mapped, and data directories, which hold what a model is trained on.

    corpora --prepare_dataset()--> directory --Dataset.open()--> vocabularies, token stores, references

    source.model  target.model          the vocabularies
    train/  dev/                        token stores
        manifest.json                   inputs, dropped pairs by reason, checksums
        source.tokens, target.tokens    concatenated sentences, each ending with END; little-endian uint16 or uint32
        source.offsets, target.offsets  little-endian int64; sentence i is tokens[offsets[i]:offsets[i+1]]
    dev.source                          the development set as text
    dev.reference  dev.reference2       its references, one set per file, all used for scoring

Corpora are streamed: memory does not grow with their size, except for the hashes that find duplicates. Stores are
written atomically.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulmt.config import as_table, build, require
from simulmt.data.corpus import (
    Corpus,
    Pair,
    file_sha256,
    map_chunks,
    read_lines,
    wrap_read_errors,
    wrap_write_errors,
)
from simulmt.errors import ConfigError, DataError, VocabularyError
from simulmt.files import atomic_directory, write_atomic
from simulmt.text import BACK_TRANSLATED, END, Tokenizer, VocabularySpec

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
DATA_FILES = ("source.tokens", "source.offsets", "target.tokens", "target.offsets")
CHUNK_PAIRS = 16_384  # pairs per chunk; some ten megabytes
TokenType = Literal["<u2", "<u4"]  # numpy's names of little-endian uint16 and uint32
_OFFSET_TYPE = "<i8"
_SOURCE_SPEC = VocabularySpec(normalization="nmt_nfkc_cf")
_TARGET_SPEC = VocabularySpec(normalization="nmt_nfkc")
_DROP_REASONS = ("empty", "too_long", "ratio", "duplicate")
_HINT = "prepare the token store again"


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
    source_spec: VocabularySpec = _SOURCE_SPEC,
    target_spec: VocabularySpec = _TARGET_SPEC,
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
    source = _vocabulary(directory, "source", source_spec, sources)
    target = _vocabulary(directory, "target", target_spec, (pair.target for pair in _pairs(train)))
    for name, corpora, applied in (("train", train, filters or Filters()), ("dev", [dev], None)):
        write_token_store(
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
    with wrap_write_errors(path):
        write_atomic(path, "".join(line + "\n" for line in lines))


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
    with wrap_write_errors(directory):
        for name in ("train", "dev"):
            _refuse_to_overwrite(directory / name, overwrite)
        missing = [name for name, model in models.items() if not _has_vocabulary(directory / name, model)]
        for name in missing:
            write_atomic(directory / name, models[name])


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


def _vocabulary(directory: Path, side: str, spec: VocabularySpec, lines: Iterator[str]) -> Tokenizer:
    path = directory / f"{side}.model"
    if path.exists():
        return Tokenizer.load(path)
    try:
        return Tokenizer.train(lines, path, spec)
    except VocabularyError as error:
        raise VocabularyError(f"--{side}-vocabulary {spec.size}: {error}") from None


@dataclass(frozen=True)
class Filters:
    """Filters for training pairs; lengths are in pieces, without END."""

    max_length: int = 1024
    max_ratio: float = 9.0
    drop_duplicates: bool = False

    def __post_init__(self) -> None:
        require(self.max_length >= 1, f"max_length must be at least 1, got {self.max_length}")
        require(1 <= self.max_ratio < math.inf, f"max_ratio must be finite and at least 1, got {self.max_ratio}")


@dataclass(frozen=True)
class SideManifest:
    """Manifest of the source or target side; `tokens` includes END."""

    vocabulary_size: int
    tokenizer_sha256: str
    dtype: TokenType
    tokens: int


@dataclass(frozen=True)
class Manifest:
    """Contents and origin of a token store.

    `filters` is None for an evaluation set. `inputs` and `files` map input paths and output names to the SHA-256 of the
    file on disk.
    """

    format_version: int
    read: int
    kept: int
    dropped: dict[str, int]
    filters: Filters | None
    source: SideManifest
    target: SideManifest
    inputs: dict[str, str]
    files: dict[str, str]


def write_token_store(
    corpora: Sequence[Corpus],
    source_tokenizer: Tokenizer,
    target_tokenizer: Tokenizer,
    directory: Path,
    *,
    filters: Filters | None,
    overwrite: bool = False,
    progress: Callable[[int], None] | None = None,
    processes: int = 1,
) -> Manifest:
    """Encode the pairs of all corpora, in order, into a token store.

    With `filters` None, for evaluation sets, every pair is kept, so that pair i is line i of the files, and empty sides
    are errors. `progress` is called after each chunk with the number of pairs read. The store is the same with any
    number of `processes`.
    """
    with _replacing(directory, overwrite) as new:
        inputs = {str(path): file_sha256(path) for corpus in corpora for path in corpus.paths}
        pair_filter = _PairFilter(source_tokenizer, target_tokenizer, filters, processes)
        with (
            _open_side(new, "source", source_tokenizer) as source,
            _open_side(new, "target", target_tokenizer) as target,
        ):
            for source_sentences, target_sentences in chain.from_iterable(map(pair_filter.encode, corpora)):
                source.append(source_sentences)
                target.append(target_sentences)
                if progress is not None:
                    progress(pair_filter.read)
        if pair_filter.kept == 0:
            raise DataError(
                f"{directory}: all {pair_filter.read} pairs were dropped: {pair_filter.dropped}; "
                "check that the files are translations of each other, or loosen the filters"
            )
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            read=pair_filter.read,
            kept=pair_filter.kept,
            dropped=pair_filter.dropped,
            filters=filters,
            source=source.manifest(),
            target=target.manifest(),
            inputs=inputs,
            files={name: file_sha256(new / name) for name in DATA_FILES},
        )
        (new / MANIFEST).write_text(json.dumps(as_table(manifest), indent=2) + "\n", encoding="utf-8")
    return manifest


@dataclass(frozen=True, eq=False)
class TokenStore:
    """A prepared corpus, as read-only memory-mapped arrays."""

    manifest: Manifest
    source_tokens: NDArray[Any]
    source_offsets: NDArray[np.int64]
    target_tokens: NDArray[Any]
    target_offsets: NDArray[np.int64]

    @staticmethod
    def open(path: Path) -> TokenStore:
        """Open a store; raise DataError if the size of a file differs from the manifest."""
        manifest = _read_manifest(path)
        return TokenStore(
            manifest,
            _map_array(path / "source.tokens", manifest.source.dtype, manifest.source.tokens),
            _map_array(path / "source.offsets", _OFFSET_TYPE, manifest.kept + 1),
            _map_array(path / "target.tokens", manifest.target.dtype, manifest.target.tokens),
            _map_array(path / "target.offsets", _OFFSET_TYPE, manifest.kept + 1),
        )

    def __len__(self) -> int:
        return self.manifest.kept

    @cached_property
    def source_lengths(self) -> NDArray[np.int64]:
        """Length of each source sentence, including END."""
        return np.diff(self.source_offsets)

    @cached_property
    def target_lengths(self) -> NDArray[np.int64]:
        """Length of each target sentence, including END."""
        return np.diff(self.target_offsets)

    def pair(self, index: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the source and target ids of a pair, each ending with END."""
        if not 0 <= index < len(self):
            raise IndexError(f"pair {index} of a token store with {len(self)} pairs")
        source = slice(self.source_offsets[index], self.source_offsets[index + 1])
        target = slice(self.target_offsets[index], self.target_offsets[index + 1])
        return self.source_tokens[source], self.target_tokens[target]


def token_type(vocabulary_size: int) -> TokenType:
    """Return the narrowest integer type for a vocabulary."""
    return "<u2" if vocabulary_size <= 1 << 16 else "<u4"


class _Sentences(NamedTuple):
    """Encoded sentences of one side, each ending with END; arrays, because lists of integers are slow to pickle."""

    tokens: NDArray[np.int32]
    lengths: NDArray[np.int64]

    @staticmethod
    def of(sentences: Sequence[list[int]]) -> _Sentences:
        lengths = np.fromiter(map(len, sentences), np.int64, len(sentences)) + 1
        tokens = np.full(lengths.sum(), END, np.int32)
        tokens[_all_but_last(lengths)] = np.fromiter(chain.from_iterable(sentences), np.int32, (lengths - 1).sum())
        return _Sentences(tokens, lengths)

    def select(self, rows: NDArray[np.bool_]) -> _Sentences:
        return self if rows.all() else _Sentences(self.tokens[np.repeat(rows, self.lengths)], self.lengths[rows])


def _all_but_last(lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return a mask over concatenated sentences, False on the last token of each."""
    mask = np.ones(lengths.sum(), bool)
    mask[np.cumsum(lengths) - 1] = False
    return mask


def _encode(source: Tokenizer, target: Tokenizer, pairs: Sequence[Pair]) -> tuple[_Sentences, _Sentences]:
    sources = _Sentences.of([source.encode_training_source(pair.source) for pair in pairs])
    return sources, _Sentences.of([target.encode(pair.target) for pair in pairs])


class _PairFilter:
    """Encodes and filters pairs, counting dropped pairs by reason."""

    def __init__(self, source: Tokenizer, target: Tokenizer, filters: Filters | None, processes: int) -> None:
        self.read = 0
        self.dropped = dict.fromkeys(_DROP_REASONS, 0)
        self._encode = partial(_encode, source, target)
        self._filters = filters
        self._processes = processes
        self._kept_hashes: set[int] = set()

    @property
    def kept(self) -> int:
        return self.read - sum(self.dropped.values())

    def encode(self, corpus: Corpus) -> Iterator[tuple[_Sentences, _Sentences]]:
        """Yield chunks of source and target sentences to keep."""
        for chunk, (sources, targets) in map_chunks(self._encode, corpus.pairs(), CHUNK_PAIRS, self._processes):
            self.read += len(chunk)
            lengths = np.stack([sources.lengths, targets.lengths]) - 1
            if self._filters is not None:
                kept = self._filter(self._filters, chunk, lengths)
                yield sources.select(kept), targets.select(kept)
            elif lengths.all():
                yield sources, targets
            else:
                row = int(np.flatnonzero(lengths.min(0) == 0)[0])
                raise _empty_side(corpus, chunk[row], is_source=not lengths[0, row])

    def _filter(self, filters: Filters, chunk: Sequence[Pair], lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which pairs to keep, given the lengths of both sides; a pair is counted for its first reason."""
        shorter, longer = lengths.min(0), lengths.max(0)
        kept = np.ones(len(chunk), bool)
        for reason, found in (
            ("empty", shorter == 0),  # blank after normalisation
            ("too_long", longer > filters.max_length),
            ("ratio", longer > filters.max_ratio * shorter),
        ):
            self.dropped[reason] += int((kept & found).sum())
            kept &= ~found
        if filters.drop_duplicates:
            for row in np.flatnonzero(kept).tolist():
                kept[row] = not self._is_duplicate(chunk[row])
                self.dropped["duplicate"] += not kept[row]
        return kept

    def _is_duplicate(self, pair: Pair) -> bool:
        """Return whether the pair was kept before; if not, remember it."""
        # With 64 bits, the probability of any collision among ten million pairs is one in 370,000.
        digest = hashlib.blake2b(f"{pair.source}\n{pair.target}".encode(), digest_size=8).digest()
        known = len(self._kept_hashes)
        self._kept_hashes.add(int.from_bytes(digest))
        return len(self._kept_hashes) == known


def _empty_side(corpus: Corpus, pair: Pair, is_source: bool) -> DataError:
    path, side = (corpus.paths[0], "source") if is_source else (corpus.paths[-1], "target")
    return DataError(
        f"{path}: line {pair.line}: the {side} is empty; an evaluation set keeps every pair, "
        "so fill the line or remove it from every file of the set"
    )


class _SideWriter:
    """Appends sentences to the two files of one side."""

    def __init__(self, token_file: BinaryIO, offset_file: BinaryIO, tokenizer: Tokenizer) -> None:
        self._token_file = token_file
        self._offset_file = offset_file
        self._tokenizer = tokenizer
        self._dtype = token_type(tokenizer.size)
        self._tokens = 0
        offset_file.write(np.zeros(1, _OFFSET_TYPE).tobytes())

    def append(self, sentences: _Sentences) -> None:
        tokens, lengths = sentences
        invalid = tokens[(tokens < 0) | (tokens >= self._tokenizer.size)]
        if invalid.size:
            raise VocabularyError(f"token id {invalid[0]} is not in 0..{self._tokenizer.size - 1}")
        self._token_file.write(tokens.astype(self._dtype).tobytes())
        self._offset_file.write((self._tokens + np.cumsum(lengths)).astype(_OFFSET_TYPE).tobytes())
        self._tokens += len(tokens)

    def manifest(self) -> SideManifest:
        return SideManifest(
            vocabulary_size=self._tokenizer.size,
            tokenizer_sha256=hashlib.sha256(self._tokenizer.model).hexdigest(),
            dtype=self._dtype,
            tokens=self._tokens,
        )


@contextmanager
def _open_side(directory: Path, side: str, tokenizer: Tokenizer) -> Iterator[_SideWriter]:
    with (
        (directory / f"{side}.tokens").open("wb") as tokens,
        (directory / f"{side}.offsets").open("wb") as offsets,
    ):
        yield _SideWriter(tokens, offsets, tokenizer)


@contextmanager
def _replacing(directory: Path, overwrite: bool) -> Iterator[Path]:
    """Yield a temporary directory that replaces `directory` if the block succeeds."""
    directory = directory.resolve()  # replace the target of a symbolic link, not the link
    with wrap_write_errors(directory):
        _refuse_to_overwrite(directory, overwrite)
        with atomic_directory(directory) as new:
            yield new
            _refuse_to_overwrite(directory, overwrite)  # it may have appeared meanwhile


def _refuse_to_overwrite(directory: Path, overwrite: bool) -> None:
    """Raise DataError if `directory` exists, unless it is a token store that may be overwritten."""
    if not directory.exists():
        return
    if not overwrite:
        raise DataError(f"{directory}: already exists; choose another directory or replace it with --overwrite")
    if not directory.is_dir() or {path.name for path in directory.iterdir()} - {MANIFEST, *DATA_FILES}:
        raise DataError(f"{directory}: not just a token store, so it is not overwritten; choose another directory")


def _read_manifest(directory: Path) -> Manifest:
    path = directory / MANIFEST
    with wrap_read_errors(path):
        text = path.read_bytes()
    try:
        table = json.loads(text)
    except ValueError:
        raise DataError(f"{path}: not valid JSON; {_HINT}") from None
    version = table.get("format_version") if isinstance(table, dict) else None
    if version != FORMAT_VERSION:
        raise DataError(f"{path}: format version {version}, expected {FORMAT_VERSION}; {_HINT}")
    try:
        return build(Manifest, table, str(path))
    except ConfigError as error:
        raise DataError(f"{error}; {_HINT}") from None


def _map_array(path: Path, dtype: str, count: int) -> NDArray[Any]:
    if not path.is_file():
        raise DataError(f"{path}: no such file; {_HINT}")
    size, expected = path.stat().st_size, count * np.dtype(dtype).itemsize
    if size != expected:
        raise DataError(f"{path}: {size} bytes, but the manifest says {expected}; {_HINT}")
    # A plain array, because slicing a memmap is several times slower.
    return np.asarray(np.memmap(path, dtype, mode="r", shape=(count,)))
