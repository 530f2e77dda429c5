from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulmt.data import store as store_module
from simulmt.data.corpus import Pair, ParallelFiles, TabSeparatedFile, read_lines
from simulmt.data.store import DATA_FILES, MANIFEST, Filters, TokenStore, token_type, write_token_store
from simulmt.errors import ConfigError, DataError, VocabularyError
from simulmt.text import END, SPECIAL_SYMBOLS, Tokenizer, VocabularySpec

PAIRS = [
    ("Our cat sleeps in the kitchen.", "我们的猫在厨房里睡觉。"),
    ("My sister's cat sleeps in the garden.", "我妹妹的猫在花园里睡觉。"),
    ("We paint small boats in the garden.", "我们在花园里画小船。"),
    ("My sister paints a yellow moon.", "我妹妹画黄色的月亮。"),
    ("The small boats are yellow.", "小船是黄色的。"),
    ("We sleep under the moon.", "我们在月亮下睡觉。"),
    ("The kitchen smells of rain.", "厨房里有雨的味道。"),
]


class WordTokenizer:
    """A fake tokenizer with one id per word, from its length, so that tests can predict lengths and ids."""

    def __init__(self, size: int = 100) -> None:
        self.size = size
        self.model = b"one id a word"

    def encode_training_source(self, text: str) -> list[int]:
        return self.encode(text)

    def encode(self, text: str) -> list[int]:
        return [int(word) if word.isdecimal() else len(SPECIAL_SYMBOLS) + len(word) for word in text.split()]


WORDS = cast(Tokenizer, WordTokenizer())


class ListedPairs:
    """A corpus in memory that counts how many of its pairs were read."""

    paths: tuple[Path, ...] = ()

    def __init__(self, pairs: Sequence[tuple[str, str]]) -> None:
        self._pairs = pairs
        self.drawn = 0

    def pairs(self) -> Iterator[Pair]:
        for source, target in self._pairs:
            self.drawn += 1
            yield Pair(source, target, self.drawn)


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Tokenizer]:
    folder = tmp_path_factory.mktemp("vocabularies")
    sources, targets = zip(*PAIRS, strict=True)
    return (
        Tokenizer.train(sources, folder / "source.model", VocabularySpec(size=42, normalization="nmt_nfkc_cf")),
        Tokenizer.train(
            targets, folder / "target.model", VocabularySpec(size=38, normalization="identity", spaced=False)
        ),
    )


@pytest.fixture
def store_path(tmp_path: Path) -> Path:
    """Prepare a store of PAIRS with the tokenizer WORDS."""
    write_token_store([write_parallel(tmp_path, PAIRS)], WORDS, WORDS, tmp_path / "store", filters=Filters())
    return tmp_path / "store"


def pack(path: Path, text: str) -> Path:
    """Write text, compressed according to the suffix."""
    data = text.encode("utf-8")
    packers: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".xz": lzma.compress}
    path.write_bytes(packers[path.suffix](data) if path.suffix in packers else data)
    return path


def write_parallel(folder: Path, pairs: Sequence[tuple[str, str]], suffix: str = "") -> ParallelFiles:
    source = pack(folder / f"text.en{suffix}", "".join(f"{source}\n" for source, _ in pairs))
    target = pack(folder / f"text.zh{suffix}", "".join(f"{target}\n" for _, target in pairs))
    return ParallelFiles(source, target)


def write_tab_separated(folder: Path, pairs: Sequence[tuple[str, str]], suffix: str = "") -> TabSeparatedFile:
    return TabSeparatedFile(pack(folder / f"text.tsv{suffix}", "".join(f"{s}\t{t}\n" for s, t in pairs)))


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def sentences(store: TokenStore) -> list[tuple[list[int], list[int]]]:
    return [(source.tolist(), target.tolist()) for source, target in map(store.pair, range(len(store)))]


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# ---------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("suffix", ["", ".txt", ".gz", ".xz"])
def test_reads_plain_and_compressed_files(tmp_path: Path, suffix: str) -> None:
    path = pack(tmp_path / f"text{suffix}", "one\n\nthree 三\n")
    assert list(read_lines(path)) == ["one", "", "three 三"]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg\nnext\n", ["a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg", "next"]),
        ("one\r\ntwo\r\r\nth\rree\n", ["one", "two\r", "th\rree"]),
        ("the last line\nis open", ["the last line", "is open"]),
        ("\n\n", ["", ""]),
        ("\ufeffone\n\ufefftwo\n", ["one", "\ufefftwo"]),
        ("\ufeff\ufeffone", ["\ufeffone"]),
    ],
)
def test_only_a_newline_ends_a_line(tmp_path: Path, text: str, lines: list[str]) -> None:
    assert list(read_lines(pack(tmp_path / "text", text))) == lines


@settings(deadline=None, max_examples=60)
@given(
    lines=st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n")), min_size=1),
    suffix=st.sampled_from(["", ".gz", ".xz"]),
    line_end=st.sampled_from(["\n", "\r\n"]),
)
def test_written_lines_are_read_back(lines: list[str], suffix: str, line_end: str) -> None:
    lines = [line.rstrip("\r") for line in lines]
    with tempfile.TemporaryDirectory() as folder:
        path = pack(Path(folder) / f"text{suffix}", "\ufeff" + "".join(line + line_end for line in lines))
        assert list(read_lines(path)) == lines


def test_reading_is_lazy_and_names_the_line_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "text.en"
    path.write_bytes(b"one\ntwo\nca\xe9f\n")
    lines = read_lines(path)
    assert [next(lines), next(lines)] == ["one", "two"]
    with pytest.raises(DataError, match=r"text\.en: line 3: not valid UTF-8 at byte 3 of the line"):
        next(lines)


def damaged_gz(data: bytes) -> bytes:
    packed = bytearray(gzip.compress(data))
    packed[12:20] = b"\xff" * 8
    return bytes(packed)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("text.en", b"", "the file is empty"),
        ("text.gz", gzip.compress(b"", mtime=0), "the file is empty"),
        ("text.xz", lzma.compress(b""), "the file is empty"),
        ("text.gz", b"plain text", "cannot be read"),
        ("text.gz", gzip.compress(bytes(range(100)), mtime=0)[:-9], "cannot be read"),
        ("text.gz", damaged_gz(bytes(range(100))), "cannot be read"),
        ("text.xz", b"plain text", "cannot be read"),
        ("text.xz", lzma.compress(b"some text")[:-20], "cannot be read"),
        ("text.en", None, "no such file"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, name: str, data: bytes | None, message: str) -> None:
    path = tmp_path / name
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(DataError) as raised:
        list(read_lines(path))
    assert str(raised.value).startswith(f"{path}: {message}")


def test_a_directory_is_not_a_text_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        list(read_lines(tmp_path))


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
@pytest.mark.parametrize("write", [write_parallel, write_tab_separated])
def test_pairs_come_in_order_with_their_lines(
    tmp_path: Path, suffix: str, write: Callable[..., ParallelFiles | TabSeparatedFile]
) -> None:
    pairs = write(tmp_path, PAIRS, suffix).pairs()
    assert list(pairs) == [Pair(source, target, line) for line, (source, target) in enumerate(PAIRS, start=1)]


@pytest.mark.parametrize(("source_lines", "target_lines"), [(2, 5), (5, 2), (1, 2), (4, 3)])
def test_unequal_line_counts_name_both_files_and_counts(tmp_path: Path, source_lines: int, target_lines: int) -> None:
    source = pack(tmp_path / "text.en", "word\n" * source_lines)
    target = pack(tmp_path / "text.zh", "字\n" * target_lines)
    with pytest.raises(DataError) as raised:
        list(ParallelFiles(source, target).pairs())
    assert f"{source} has {source_lines} lines but {target} has {target_lines};" in str(raised.value)


@pytest.mark.parametrize("empty", ["text.en", "text.zh"])
def test_an_empty_side_of_parallel_files_is_named(tmp_path: Path, empty: str) -> None:
    files = write_parallel(tmp_path, PAIRS)
    (tmp_path / empty).write_bytes(b"")
    with pytest.raises(DataError, match=rf"{empty}: the file is empty"):
        list(files.pairs())


@pytest.mark.parametrize(("line", "columns"), [("alone", 1), ("one\ttwo\tthree", 3), ("", 1)])
def test_a_line_without_two_columns_is_named(tmp_path: Path, line: str, columns: int) -> None:
    path = pack(tmp_path / "text.tsv", f"one\t一\ntwo\t二\n{line}\n")
    message = rf"text\.tsv: line 3: expected 2 tab-separated columns, found {columns}"
    with pytest.raises(DataError, match=message):
        list(TabSeparatedFile(path).pairs())


# ---------------------------------------------------------------------------------------------- filters


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("max_length", 0),
        ("max_length", -1),
        ("max_ratio", 0.99),
        ("max_ratio", float("inf")),
        ("max_ratio", float("nan")),
    ],
)
def test_filter_settings_are_checked(setting: str, value: float) -> None:
    with pytest.raises(ConfigError, match=setting):
        Filters(**{setting: cast(Any, value)})


def test_filters_by_hand(tmp_path: Path) -> None:
    pairs = [
        ("a b c", "x"),  # kept: 3 to 1 is the ratio allowed
        ("", "x"),  # empty
        ("a", " \u2028\t\x85 "),  # empty after strip
        ("a b c d", "x"),  # ratio 4
        ("x", "a b c d"),  # ratio 4
        ("a b c d e", "v w x y z"),  # kept: the greatest length
        ("a b c d e f", "v w x y z"),  # too long
        ("v w x", "a b c d e f"),  # too long
        ("a b c", "x"),  # duplicate
        ("a b", " cx"),  # kept: the characters of the pair above, parted elsewhere
        ("a b c d", "x"),  # ratio, not duplicate: the first was not kept
    ]
    dropped = {"empty": 2, "too_long": 2, "ratio": 3, "duplicate": 1}
    filters = Filters(max_length=5, max_ratio=3.0, drop_duplicates=True)
    manifest = write_token_store([write_parallel(tmp_path, pairs)], WORDS, WORDS, tmp_path / "store", filters=filters)
    assert (manifest.read, manifest.kept, manifest.dropped) == (11, 3, dropped)
    assert (manifest.source.tokens, manifest.target.tokens) == (3 + 5 + 2 + 3, 1 + 5 + 1 + 3)
    assert TokenStore.open(tmp_path / "store").source_lengths.tolist() == [4, 6, 3]


def test_default_filters_are_those_of_the_method(tmp_path: Path) -> None:
    pairs = [
        ("a " * 1024, "b " * 1024),
        ("a " * 1025, "b " * 1024),
        ("a", "b " * 9),
        ("a", "b " * 10),
        ("a", "b"),
        ("a", "b"),
    ]
    manifest = write_token_store([ListedPairs(pairs)], WORDS, WORDS, tmp_path / "store", filters=Filters())
    assert manifest.dropped == {"empty": 0, "too_long": 1, "ratio": 1, "duplicate": 0}


def test_blank_text_and_text_without_pieces_are_empty(tmp_path: Path, tokenizers: tuple[Tokenizer, Tokenizer]) -> None:
    control_characters, separators = "\x01\x02", "\u2028\x85 \u3000"
    source, target = PAIRS[0]
    pairs = [*PAIRS, (control_characters, target), (separators, target), (source, separators), (source, "")]
    manifest = write_token_store([ListedPairs(pairs)], *tokenizers, tmp_path / "store", filters=Filters())
    assert (manifest.kept, manifest.dropped["empty"]) == (len(PAIRS), 4)


def test_duplicates_are_found_across_chunks_and_corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "CHUNK_PAIRS", 2)
    filters = Filters(drop_duplicates=True)
    corpora = [ListedPairs([*PAIRS, *PAIRS[:3]]), ListedPairs(PAIRS[2:])]
    manifest = write_token_store(corpora, WORDS, WORDS, tmp_path / "store", filters=filters)
    assert (manifest.kept, manifest.dropped["duplicate"]) == (len(PAIRS), 3 + len(PAIRS[2:]))


def test_different_pairs_are_not_duplicates(tmp_path: Path) -> None:
    pairs = [(f"word{number % 50}", f"mot{number // 50}") for number in range(2500)]
    manifest = write_token_store(
        [ListedPairs(pairs)], WORDS, WORDS, tmp_path / "store", filters=Filters(drop_duplicates=True)
    )
    assert manifest.kept == len(pairs)


@settings(deadline=None, max_examples=60)
@given(
    pairs=st.lists(st.tuples(*[st.text(st.sampled_from("ab \u3000"), max_size=9)] * 2), max_size=12),
    filters=st.builds(
        Filters, max_length=st.integers(1, 4), max_ratio=st.sampled_from([1.0, 1.5, 2.0]), drop_duplicates=st.booleans()
    ),
)
def test_the_store_holds_the_same_pairs_as_a_plain_loop(pairs: list[tuple[str, str]], filters: Filters) -> None:
    expected: list[tuple[str, str]] = [("a", "a")]
    for source, target in pairs:
        lengths = len(source.split()), len(target.split())
        fits = min(lengths) > 0 and max(lengths) <= filters.max_length
        balanced = fits and max(lengths) / min(lengths) <= filters.max_ratio
        if balanced and not (filters.drop_duplicates and (source, target) in expected):
            expected.append((source, target))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store"
        manifest = write_token_store([ListedPairs([("a", "a"), *pairs])], WORDS, WORDS, path, filters=filters)
        assert manifest.read == manifest.kept + sum(manifest.dropped.values()) == len(pairs) + 1
        assert sentences(TokenStore.open(path)) == [
            ([*WORDS.encode(source), END], [*WORDS.encode(target), END]) for source, target in expected
        ]


def test_an_evaluation_set_keeps_every_pair(tmp_path: Path) -> None:
    pairs = [("a", "b " * 2000), ("a b", "c"), ("a b", "c")]
    manifest = write_token_store([ListedPairs(pairs)], WORDS, WORDS, tmp_path / "store", filters=None)
    assert manifest.kept == 3
    assert manifest.filters is None
    assert TokenStore.open(tmp_path / "store").target_lengths.tolist() == [2001, 2, 2]


@pytest.mark.parametrize(("pair", "side"), [(("\x85", "b"), "en"), (("a", "\x85"), "zh"), (("", ""), "en")])
def test_an_empty_side_of_an_evaluation_set_is_an_error(
    tmp_path: Path, tokenizers: tuple[Tokenizer, Tokenizer], pair: tuple[str, str], side: str
) -> None:
    files = write_parallel(tmp_path, [*PAIRS[:2], pair])
    word = {"en": "source", "zh": "target"}[side]
    with pytest.raises(DataError, match=rf"text\.{side}: line 3: the {word} is empty; .* remove it from every file"):
        write_token_store([files], tokenizers[1], tokenizers[1], tmp_path / "store", filters=None)


def test_a_corpus_without_remaining_pairs_is_an_error(tmp_path: Path) -> None:
    files = write_parallel(tmp_path, [("", "b"), ("a b", "c d e")])
    with pytest.raises(DataError, match=r"store: all 2 pairs were dropped: \{'empty': 1, 'too_long': 1,"):
        write_token_store([files], WORDS, WORDS, tmp_path / "store", filters=Filters(max_length=2))
    assert names_in(tmp_path) == {"text.en", "text.zh"}


# ------------------------------------------------------------------------------------- writing a store


def test_a_stored_pair_reads_back_unchanged(tmp_path: Path, tokenizers: tuple[Tokenizer, Tokenizer]) -> None:
    source_tokenizer, target_tokenizer = tokenizers
    manifest = write_token_store([write_parallel(tmp_path, PAIRS)], *tokenizers, tmp_path / "store", filters=Filters())
    store = TokenStore.open(tmp_path / "store")
    expected = [([*source_tokenizer.encode(s), END], [*target_tokenizer.encode(t), END]) for s, t in PAIRS]
    assert sentences(store) == expected
    assert len(store) == manifest.kept == len(PAIRS)
    assert store.source_lengths.tolist() == [len(source) for source, _ in expected]
    assert store.target_lengths.tolist() == [len(target) for _, target in expected]
    assert store.source_lengths.dtype == store.target_lengths.dtype == np.int64
    assert manifest.source.tokens == store.source_lengths.sum() == len(store.source_tokens)
    assert store.manifest == manifest


@settings(deadline=None, max_examples=40)
@given(
    pairs=st.lists(
        st.tuples(*[st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r\ufeff"))] * 2), max_size=8
    )
)
def test_any_unicode_line_reads_back_unchanged(
    tokenizers: tuple[Tokenizer, Tokenizer], pairs: list[tuple[str, str]]
) -> None:
    source_tokenizer, target_tokenizer = tokenizers
    pairs = [PAIRS[0], *pairs]
    encoded = [(source_tokenizer.encode(s), target_tokenizer.encode(t)) for s, t in pairs if s.strip() and t.strip()]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        loose = Filters(max_length=10**6, max_ratio=1e6)
        write_token_store([write_parallel(path, pairs)], *tokenizers, path / "store", filters=loose)
        assert sentences(TokenStore.open(path / "store")) == [
            ([*source, END], [*target, END]) for source, target in encoded if source and target
        ]


def test_every_input_format_gives_the_same_store(tmp_path: Path) -> None:
    hashes = []
    for number, suffix in enumerate(["", ".gz", ".xz"]):
        for kind, write in (("lines", write_parallel), ("tabs", write_tab_separated)):
            store = tmp_path / f"{kind}{number}"
            manifest = write_token_store([write(tmp_path, PAIRS, suffix)], WORDS, WORDS, store, filters=Filters())
            hashes.append([sha256(store / name) for name in DATA_FILES])
            assert manifest.files == dict(zip(DATA_FILES, hashes[-1], strict=True))
    assert all(each == hashes[0] for each in hashes)


def test_the_manifest_records_the_inputs(tmp_path: Path, tokenizers: tuple[Tokenizer, Tokenizer]) -> None:
    files, table = write_parallel(tmp_path, PAIRS, ".xz"), write_tab_separated(tmp_path, PAIRS[:2], ".gz")
    write_token_store([files, table], *tokenizers, tmp_path / "store", filters=Filters(max_length=500))
    manifest = json.loads((tmp_path / "store" / MANIFEST).read_text(encoding="utf-8"))
    assert manifest["format_version"] == 1
    assert manifest["read"] == manifest["kept"] == len(PAIRS) + 2
    assert manifest["filters"] == {"max_length": 500, "max_ratio": 9.0, "drop_duplicates": False}
    assert manifest["inputs"] == {str(path): sha256(path) for path in (*files.paths, *table.paths)}
    for side, tokenizer in zip(("source", "target"), tokenizers, strict=True):
        assert manifest[side]["vocabulary_size"] == tokenizer.size
        assert manifest[side]["tokenizer_sha256"] == hashlib.sha256(tokenizer.model).hexdigest()
        assert manifest[side]["dtype"] == "<u2"


def test_the_same_input_gives_the_same_bytes_whatever_the_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = write_parallel(tmp_path, PAIRS)
    for chunk_pairs in (1, 3, 1000):
        monkeypatch.setattr(store_module, "CHUNK_PAIRS", chunk_pairs)
        write_token_store([files], WORDS, WORDS, tmp_path / f"store{chunk_pairs}", filters=Filters())
    for name in (MANIFEST, *DATA_FILES):
        assert len({(tmp_path / f"store{n}" / name).read_bytes() for n in (1, 3, 1000)}) == 1


def test_several_processes_give_the_same_bytes(
    tmp_path: Path, tokenizers: tuple[Tokenizer, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "CHUNK_PAIRS", 1)
    files = write_parallel(tmp_path, PAIRS)
    for processes in (1, 2):
        write_token_store([files], *tokenizers, tmp_path / f"store{processes}", filters=Filters(), processes=processes)
    for name in (MANIFEST, *DATA_FILES):
        assert len({(tmp_path / f"store{n}" / name).read_bytes() for n in (1, 2)}) == 1


def test_pairs_are_read_in_chunks_and_progress_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "CHUNK_PAIRS", 3)
    pairs = ListedPairs(PAIRS)
    calls: list[tuple[int, int]] = []
    write_token_store(
        [pairs], WORDS, WORDS, tmp_path / "store", filters=None, progress=lambda read: calls.append((read, pairs.drawn))
    )
    assert calls == [(3, 3), (6, 6), (7, 7)]


@pytest.mark.parametrize(("size", "dtype"), [(65_536, "<u2"), (65_537, "<u4")])
def test_the_largest_id_survives_at_the_boundary_of_the_types(tmp_path: Path, size: int, dtype: str) -> None:
    wide = cast(Tokenizer, WordTokenizer(size))
    assert token_type(size) == dtype
    write_token_store([ListedPairs([(str(size - 1), "a")])], wide, WORDS, tmp_path / "store", filters=None)
    store = TokenStore.open(tmp_path / "store")
    assert store.pair(0)[0].tolist() == [size - 1, END]
    assert (store.source_tokens.dtype, store.target_tokens.dtype) == (np.dtype(dtype), np.dtype("<u2"))
    assert (tmp_path / "store" / "source.tokens").stat().st_size == 2 * np.dtype(dtype).itemsize


@pytest.mark.parametrize("size", [100, 65_536, 65_537])
def test_an_id_out_of_range_never_enters_a_store(tmp_path: Path, size: int) -> None:
    wide = cast(Tokenizer, WordTokenizer(size))
    with pytest.raises(VocabularyError, match=rf"token id {size} is not in 0\.\.{size - 1}"):
        write_token_store([ListedPairs([("a", "b"), (str(size), "b")])], wide, WORDS, tmp_path / "store", filters=None)
    assert names_in(tmp_path) == set()


# ---------------------------------------------------------------------------- whole or not there at all


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("overwrite", [False, True])
def test_an_interruption_leaves_things_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], overwrite: bool
) -> None:
    monkeypatch.setattr(store_module, "CHUNK_PAIRS", 2)
    store = tmp_path / "store"
    if overwrite:
        write_token_store([ListedPairs([("old", "pair")])], WORDS, WORDS, store, filters=None)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def interrupt(read: int) -> None:
        if read >= 4:
            assert len(names_in(tmp_path)) == 1 + overwrite
            raise error

    with pytest.raises(error):
        write_token_store(
            [ListedPairs(PAIRS)], WORDS, WORDS, store, filters=None, overwrite=overwrite, progress=interrupt
        )
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert names_in(tmp_path) == ({"store"} if overwrite else set())


def test_a_failed_write_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(28, f"no space left for {descriptor}")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(DataError, match=r"store: cannot be written: .*no space left"):
        write_token_store([ListedPairs(PAIRS)], WORDS, WORDS, tmp_path / "store", filters=None)
    assert names_in(tmp_path) == set()


def test_everything_is_on_disk_before_the_store_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "store"
    synced: list[tuple[int, int, bool]] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        status = os.fstat(descriptor)
        synced.append((status.st_ino, status.st_size, store.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    write_token_store([ListedPairs(PAIRS)], WORDS, WORDS, store, filters=None)
    before = {(inode, size) for inode, size, named in synced if not named}
    for name in (MANIFEST, *DATA_FILES):
        status = (store / name).stat()
        assert (status.st_ino, status.st_size) in before
    assert store.stat().st_ino in {inode for inode, _ in before}
    assert [inode for inode, _, named in synced if named] == [tmp_path.stat().st_ino]


def test_an_existing_store_is_overwritten_only_on_request(store_path: Path) -> None:
    pairs = ListedPairs([("new", "pair")])
    with pytest.raises(DataError, match="store: already exists; choose another directory"):
        write_token_store([pairs], WORDS, WORDS, store_path, filters=None)
    assert pairs.drawn == 0
    assert len(TokenStore.open(store_path)) == len(PAIRS)
    write_token_store([pairs], WORDS, WORDS, store_path, filters=None, overwrite=True)
    assert len(TokenStore.open(store_path)) == 1
    assert names_in(store_path.parent) == {"store", "text.en", "text.zh"}


def test_a_link_to_a_store_stays_a_link(store_path: Path) -> None:
    link = store_path.parent / "link"
    link.symlink_to(store_path)
    write_token_store([ListedPairs([("new", "pair")])], WORDS, WORDS, link, filters=None, overwrite=True)
    assert link.is_symlink()
    assert len(TokenStore.open(store_path)) == 1


def test_other_directories_are_never_overwritten(store_path: Path) -> None:
    (store_path / "diary.txt").write_text("mine")
    for path in (store_path, store_path / "diary.txt"):
        with pytest.raises(DataError, match="is not overwritten"):
            write_token_store([ListedPairs(PAIRS)], WORDS, WORDS, path, filters=None, overwrite=True)
    assert (store_path / "diary.txt").read_text() == "mine"


def test_a_store_that_appears_meanwhile_is_not_lost(tmp_path: Path) -> None:
    store = tmp_path / "store"

    def compete(_: int) -> None:
        write_token_store([ListedPairs([("first", "come")])], WORDS, WORDS, store, filters=None)

    with pytest.raises(DataError, match="already exists"):
        write_token_store([ListedPairs(PAIRS)], WORDS, WORDS, store, filters=None, progress=compete)
    assert len(TokenStore.open(store)) == 1
    assert names_in(tmp_path) == {"store"}


def test_missing_parents_are_made(tmp_path: Path) -> None:
    write_token_store([ListedPairs(PAIRS)], WORDS, WORDS, tmp_path / "data" / "en-zh" / "train", filters=None)
    assert len(TokenStore.open(tmp_path / "data" / "en-zh" / "train")) == len(PAIRS)


@pytest.mark.parametrize("missing", ["text.en", "text.zh"])
def test_a_missing_input_is_named(tmp_path: Path, missing: str) -> None:
    files = write_parallel(tmp_path, PAIRS)
    (tmp_path / missing).unlink()
    with pytest.raises(DataError, match=rf"{missing}: no such file"):
        write_token_store([files], WORDS, WORDS, tmp_path / "store", filters=Filters())
    assert len(names_in(tmp_path)) == 1


# ------------------------------------------------------------------------------------- opening a store


@pytest.mark.parametrize("index", [-1, len(PAIRS), 10**9])
def test_there_is_no_pair_out_of_range(store_path: Path, index: int) -> None:
    with pytest.raises(IndexError, match=f"pair {index} of a token store with {len(PAIRS)} pairs"):
        TokenStore.open(store_path).pair(index)


def test_a_store_cannot_be_changed_through_its_arrays(store_path: Path) -> None:
    source, _ = TokenStore.open(store_path).pair(0)
    with pytest.raises(ValueError, match="read-only"):
        source[0] = 0


@pytest.mark.parametrize("name", [MANIFEST, *DATA_FILES])
def test_a_missing_file_is_named(store_path: Path, name: str) -> None:
    (store_path / name).unlink()
    with pytest.raises(DataError, match=rf"{name}: no such file"):
        TokenStore.open(store_path)


@pytest.mark.parametrize("name", DATA_FILES)
@pytest.mark.parametrize("change", [-1, 1, 8])
def test_a_file_of_the_wrong_size_is_an_error_with_a_remedy(store_path: Path, name: str, change: int) -> None:
    size = (store_path / name).stat().st_size
    os.truncate(store_path / name, size + change)
    message = rf"{name}: {size + change} bytes, but the manifest says {size}; prepare the token store again"
    with pytest.raises(DataError, match=message):
        TokenStore.open(store_path)


def edit_manifest(store_path: Path, **changes: Any) -> None:
    table = json.loads((store_path / MANIFEST).read_text(encoding="utf-8"))
    (store_path / MANIFEST).write_text(json.dumps(table | changes), encoding="utf-8")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 2}, "format version 2, expected 1; prepare the token store again"),
        ({"format_version": None}, "format version None, expected 1"),
        ({"kept": "many"}, "kept: expected a whole number, got 'many'; prepare the token store again"),
        ({"extra": 1}, "unknown key 'extra'"),
        ({"source": {"vocabulary_size": 9, "tokenizer_sha256": "", "dtype": "|O", "tokens": 1}}, "source: dtype"),
    ],
)
def test_a_manifest_of_another_kind_is_refused(store_path: Path, changes: dict[str, Any], message: str) -> None:
    edit_manifest(store_path, **changes)
    with pytest.raises(DataError) as raised:
        TokenStore.open(store_path)
    assert str(raised.value).startswith(f"{store_path / MANIFEST}: {message}")


@pytest.mark.parametrize(
    ("data", "message"), [(b"{", "not valid JSON"), (b"\xff", "not valid JSON"), (b"[]", "format version")]
)
def test_an_invalid_manifest_is_refused(store_path: Path, data: bytes, message: str) -> None:
    (store_path / MANIFEST).write_bytes(data)
    with pytest.raises(DataError, match=rf"{MANIFEST}: {message}"):
        TokenStore.open(store_path)


def test_a_store_of_ten_million_pairs_opens(store_path: Path) -> None:
    pairs, tokens = 10_000_000, 600_000_000
    sides = {"vocabulary_size": 100, "tokenizer_sha256": "", "dtype": "<u2", "tokens": tokens}
    edit_manifest(store_path, kept=pairs, read=pairs, source=sides, target=sides)
    for name in DATA_FILES:  # holes in the files: they take no room on disk
        os.truncate(store_path / name, tokens * 2 if name.endswith("tokens") else (pairs + 1) * 8)
    store = TokenStore.open(store_path)
    assert len(store) == pairs
    assert store.source_tokens[-1] == 0
    assert store.pair(0)[0].tolist() == [*WORDS.encode(PAIRS[0][0]), END]
