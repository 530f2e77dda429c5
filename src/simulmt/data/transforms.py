"""Transform training text line by line: filter, add speech noise, reweight, concatenate or reorder.

Each transform is a job that writes three files, each atomically, and returns the record:

    PREFIX.source, PREFIX.target   the pairs, one sentence per line
    PREFIX.json                    the record: inputs, settings and dropped lines

A finished job is not repeated. Files of another job are replaced only on request.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import re
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from itertools import chain, islice, pairwise, repeat
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO

from simulmt.config import as_table, require
from simulmt.data import alignment
from simulmt.data.alignment import Link, UnitChoice, alignment_words, find_unit
from simulmt.data.corpus import Pair, ParallelFiles, file_sha256, map_chunks, read_lines, wrap_write_errors
from simulmt.data.lexicon import Lexicon
from simulmt.data.speech_noise import Language, SpeechNoise, learn_misheard, unpunctuated
from simulmt.errors import ConfigError, DataError
from simulmt.files import atomic_writer, cores, lock, write_atomic
from simulmt.text import BACK_TRANSLATED
from simulmt.text.numbers import find_numbers, unmatched
from simulmt.text.words import HAN, Unit, guess_language, is_spaceless

SIDES = ("source", "target")
_OUTPUT_SUFFIXES = (*SIDES, "json", "shards")  # suffixes of the files a job may replace
EMPTY = "empty"  # reason to drop a line
_LINES_BETWEEN_REPORTS = 65_536
SHARD_LINES = 65_536
# Reasons to drop a pair.
_LONG, _SHORT, _NUMBERS, _REPEATS, _HELD_OUT = "long", "short", "numbers", "repeats", "held_out"
_MISTRANSLATED = "mistranslated"
CHUNK_PAIRS = 4096  # about a second of work
_MAX_PHRASE_LENGTH = 12  # words or ideographs; longer repeated phrases are not searched for
_LONG_PHRASE = 4  # repeating a phrase of this length twice is an error; shorter ones may be meant, as in "very, very"
_SHARED_WORDS = 10  # length of the n-grams that count as overlap with a test set
_MIN_SENTENCE_LENGTH = 4  # words; shorter test sentences are too common to count as overlap

_UNIT = re.compile(rf"[{HAN}]|[^\W_{HAN}]+")
_ONE = frozenset({Fraction(1)})  # often an article of the other language


class Dropped(NamedTuple):
    """Why a line was dropped, and its number if it differs from its index in the job."""

    reason: str
    line: int = 0


Rewritten = tuple[str, str] | Dropped  # result of a line


class Progress(NamedTuple):
    """Progress of a job: lines done by all processes, and the speed of this one."""

    lines: int
    sentences_per_second: float


Report = Callable[[Progress], None]


@dataclass(frozen=True)
class Job:
    """A job: its output prefix, inputs and settings."""

    prefix: Path
    metadata: Mapping[str, Any]  # settings and checksums of the inputs
    inputs: Sequence[Path]  # never replaced, not even with `overwrite`
    overwrite: bool = False
    shard_lines: int = SHARD_LINES  # of a sharded job; part of the identity of every job

    def __post_init__(self) -> None:
        refuse_to_overwrite_inputs(self.prefix, self.inputs)

    @staticmethod
    def on_files(
        prefix: Path,
        name: str,
        settings: Any,
        inputs: Mapping[str, Path],
        overwrite: bool = False,
        shard_lines: int = SHARD_LINES,
    ) -> Job:
        """Return the job `name`, which depends on its settings and on the contents of its input files."""
        checksums = {each: file_sha256(path) for each, path in inputs.items()}
        metadata = {"rewrite": name, "settings": settings, "inputs": checksums}
        return Job(prefix, metadata, [*inputs.values()], overwrite, shard_lines)

    def path(self, suffix: str) -> Path:
        return self.prefix.with_name(f"{self.prefix.name}.{suffix}")

    @property
    def identity(self) -> str:
        metadata = {**self.metadata, "shard_lines": self.shard_lines}
        return hashlib.sha256(json.dumps(metadata, sort_keys=True).encode()).hexdigest()


def refuse_to_overwrite_inputs(prefix: Path, inputs: Iterable[Path], written: Sequence[str] = _OUTPUT_SUFFIXES) -> None:
    """Raise ConfigError if an output file is also an input, or a directory that contains one."""
    replaced = [prefix.with_name(f"{prefix.name}.{suffix}") for suffix in written]
    for path in inputs:
        if any(_is_same_file(place, own) for place in (path, *path.resolve().parents) for own in replaced):
            raise ConfigError(f"--output {prefix}: would replace its own input {path}; choose another prefix")


def _is_same_file(one: Path, other: Path) -> bool:
    with suppress(OSError):  # such as a missing file
        return one.samefile(other)
    return False


def write_pairs(
    job: Job, results: Callable[[], Iterable[Rewritten]], report: Report = lambda _: None
) -> dict[str, Any]:
    """Run a job line by line in constant memory, unless it is finished, and return its record."""
    with wrap_write_errors(job.prefix), exclusive_lock(job.prefix):
        record = finished_record(job)
        if record is None:
            remove_previous(job)
            with open_output(job) as (record, source, target):
                _stream(results(), record, source, target, report)
    return record


def _stream(
    results: Iterable[Rewritten], record: dict[str, Any], source: BinaryIO, target: BinaryIO, report: Report
) -> None:
    began, line = time.perf_counter(), 0
    for line, result in enumerate(results, start=1):
        if isinstance(result, Dropped):
            record["left"].setdefault(result.reason, []).append(result.line or line)
        else:
            source.write(f"{result[0]}\n".encode())
            target.write(f"{result[1]}\n".encode())
            record["kept"] += 1
        if line % _LINES_BETWEEN_REPORTS == 0:
            report(Progress(line, line / (time.perf_counter() - began)))
    record["lines"] = line
    report(Progress(line, line / (time.perf_counter() - began)))


def finished_record(job: Job) -> dict[str, Any] | None:
    """Return the record of a finished job, or None."""
    record = _read_table(job.path("json"))
    is_complete = record.get("identity") == job.identity and all(job.path(side).is_file() for side in SIDES)
    return record if is_complete else None


def remove_previous(job: Job) -> None:
    """Remove the files of other jobs if `overwrite` is set; otherwise raise DataError."""
    shards = job.path("shards")
    begun = list(shards.iterdir()) if shards.is_dir() else []
    foreign = [path for path in begun if path.name != job.identity]
    if not begun and _read_table(job.path("json")).get("identity") != job.identity:  # otherwise this job was killed
        foreign += [path for path in map(job.path, ("json", *SIDES)) if path.exists()]
    if foreign and not job.overwrite:
        raise _exists_error(foreign[0])
    for path in foreign:
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


@contextmanager
def open_output(job: Job) -> Iterator[tuple[dict[str, Any], BinaryIO, BinaryIO]]:
    """Open the record and the two files of a job; publish them if the block succeeds.

    Earlier text is removed and the record is written before the new text, so that text next to a record always belongs
    to it.
    """
    record = {"identity": job.identity, **job.metadata, "lines": 0, "kept": 0, "left": {}}
    with atomic_writer(job.path("source")) as source, atomic_writer(job.path("target")) as target:
        yield record, source, target
        for side in SIDES:
            job.path(side).unlink(missing_ok=True)
        write_atomic(job.path("json"), json.dumps(record, indent=2, ensure_ascii=False) + "\n")


@contextmanager
def exclusive_lock(prefix: Path) -> Iterator[None]:
    """Hold an exclusive lock on a prefix; the lock file is removed afterwards."""
    path = prefix.with_name(f".{prefix.name}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with path.open("w") as file:
            lock(file)
            if not _is_still_at(path, file):  # the previous holder removed the file while we waited
                continue
            try:
                yield
            finally:
                path.unlink()
            return


def _is_still_at(path: Path, file: TextIO) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    return False


def write_once(path: Path, metadata: Mapping[str, Any], overwrite: bool, make: Callable[[], Iterable[str]]) -> Path:
    """Write a file of lines unless it is up to date; replace another one only with `overwrite`.

    The caller must hold `exclusive_lock`. PATH.json records the inputs and the checksum, to recognise files of other
    origin.
    """
    record_path = path.with_name(f"{path.name}.json")
    if path.exists():
        if _read_table(record_path) == {**metadata, "sha256": file_sha256(path)}:
            return path
        if not overwrite:
            raise _exists_error(path)
    text = "".join(line + "\n" for line in make())
    path.unlink(missing_ok=True)  # so that it is never next to the record of another file
    write_atomic(record_path, json.dumps({**metadata, "sha256": hashlib.sha256(text.encode()).hexdigest()}))
    write_atomic(path, text)
    return path


def _exists_error(path: Path) -> DataError:
    return DataError(
        f"{path}: exists and was not made by this command from the same text and settings; "
        "choose another --output, or replace it with --overwrite"
    )


def _read_table(path: Path) -> dict[str, Any]:
    """Return the contents of a JSON file, or an empty table if it cannot be read."""
    with suppress(OSError, ValueError):
        table = json.loads(path.read_bytes())
        return table if isinstance(table, dict) else {}
    return {}


def filter_corpus(
    source: Path,
    target: Path,
    prefix: Path,
    languages: tuple[str, str] | None = None,
    overwrite: bool = False,
    report: Report = lambda _: None,
    held_out: Sequence[Path] = (),
    max_words: int = 0,
    drop_shortest: float = 0.0,
    check_numbers: bool = True,
    lexicon: Path | None = None,
) -> dict[str, Any]:
    """Drop pairs that would teach errors, or that overlap with a test set:

    - numbers disagree, unless `check_numbers` is False;
    - the target has a repetition loop, or the source of a back-translation has one;
    - the pair shares a sentence of at least four words, or ten consecutive words, with a `held_out` file;
    - either side has more than `max_words` words (0: no limit);
    - the target is among the shortest for its source length, a share of `drop_shortest`: there teachers omit most;
    - the target has none of the translations that a `lexicon` has of a word of the source.

    Languages are guessed if not given.
    """
    require(0 <= drop_shortest < 1, f"drop_shortest must be at least 0 and below 1, got {drop_shortest:g}")
    languages = languages or (guess_language(read_lines(source)), guess_language(read_lines(target)))
    inputs = {"source": file_sha256(source), "target": file_sha256(target)}
    if held_out:
        inputs["held out"] = " ".join(map(file_sha256, held_out))
    optional = {"max_words": max_words, "drop_shortest": drop_shortest}
    settings: dict[str, Any] = {"languages": [*languages]} | {name: value for name, value in optional.items() if value}
    if not check_numbers:
        settings["check_numbers"] = False
    known = Lexicon({})
    if lexicon is not None:
        inputs["lexicon"] = file_sha256(lexicon)
        known = Lexicon.read(lexicon)
    metadata = {"rewrite": "filter", "settings": settings, "inputs": inputs}
    job = Job(prefix, metadata, [source, target, *held_out, *([lexicon] if lexicon else [])], overwrite)

    def results() -> Iterator[Rewritten]:
        limits = minimum_lengths(ParallelFiles(source, target).pairs(), drop_shortest) if drop_shortest else {}
        unwanted = HeldOut(chain.from_iterable(map(read_lines, held_out)))
        work = partial(_filter_pairs, languages if check_numbers else None, unwanted, max_words, limits, known)
        chunks = map_chunks(work, ParallelFiles(source, target).pairs(), CHUNK_PAIRS, cores())
        return chain.from_iterable(rewritten for _, rewritten in chunks)

    return write_pairs(job, results, report)


class HeldOut:
    """Sentences that must not be trained on."""

    def __init__(self, lines: Iterable[str]) -> None:
        sentences = [tuple(_words(line)) for line in lines]
        self._sentences = {sentence for sentence in sentences if len(sentence) >= _MIN_SENTENCE_LENGTH}
        self._ngrams = {ngram for sentence in sentences for ngram in _ngrams(sentence)}

    def __contains__(self, text: str) -> bool:
        """Return whether a text is one of the sentences, or shares _SHARED_WORDS consecutive words with one."""
        words = tuple(_words(text))
        return words in self._sentences or not self._ngrams.isdisjoint(_ngrams(words))


def _words(text: str) -> list[str]:
    return _UNIT.findall(text.lower())


def _ngrams(words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    return (words[start : start + _SHARED_WORDS] for start in range(len(words) - _SHARED_WORDS + 1))


def minimum_lengths(pairs: Iterable[Pair], share: float) -> dict[int, int]:
    """Return, by source length, the target length that at most `share` of the pairs are below."""
    lengths: defaultdict[int, list[int]] = defaultdict(list)
    for pair in pairs:
        lengths[_length(pair.source)].append(_length(pair.target))
    return {source: sorted(targets)[int(share * len(targets))] for source, targets in lengths.items()}


def _length(text: str) -> int:
    """Return the number of words or ideographs."""
    return len(_UNIT.findall(text))


def _filter_pairs(
    languages: tuple[str, str] | None,
    held_out: HeldOut,
    max_words: int,
    limits: Mapping[int, int],
    lexicon: Lexicon,
    pairs: Sequence[Pair],
) -> list[Rewritten]:
    """Return each pair, or why it is dropped."""
    reasons = [(pair, _reason_to_drop(pair, languages, held_out, max_words, limits, lexicon)) for pair in pairs]
    return [Dropped(reason, pair.line) if reason else (pair.source, pair.target) for pair, reason in reasons]


def _reason_to_drop(
    pair: Pair,
    languages: tuple[str, str] | None,
    held_out: HeldOut,
    max_words: int,
    limits: Mapping[int, int],
    lexicon: Lexicon,
) -> str | None:
    """Return why to drop a pair, if at all; numbers are compared if languages are given."""
    if max_words and any(_length(text) > max_words for text in (pair.source, pair.target)):
        return _LONG
    if limits and _length(pair.target) < limits[_length(pair.source)]:
        return _SHORT
    if pair.source in held_out or pair.target in held_out:
        return _HELD_OUT
    if has_repetition(pair.target, pair.source):
        return _REPEATS
    if pair.source.startswith(BACK_TRANSLATED) and has_repetition(pair.source, pair.target):
        return _REPEATS
    if languages and numbers_disagree(pair.source, pair.target, languages):
        return _NUMBERS
    return _MISTRANSLATED if lexicon.mistranslated(pair.source, pair.target) else None


def numbers_disagree(source: str, target: str, languages: tuple[str, str]) -> bool:
    """Return whether one side has a number, by value, that the other does not have."""
    ours, theirs = find_numbers(source, languages[0]), find_numbers(target, languages[1])
    return any(number.values != _ONE for number in (*unmatched(ours, theirs), *unmatched(theirs, ours)))


def has_repetition(target: str, source: str) -> bool:
    """Return whether the target repeats a phrase more often in a row than the source does."""
    return max_repetitions(_words(target)) > max_repetitions(_words(source))


def max_repetitions(words: Sequence[str]) -> int:
    """Return the highest number of consecutive occurrences of a phrase; two in a row count only for long phrases."""
    highest = 1
    for length in range(1, min(_MAX_PHRASE_LENGTH, len(words) // 2) + 1):
        same = 0
        for word, later in zip(words, islice(words, length, None)):  # noqa: B905 (the second is shorter)
            same = same + 1 if word == later else 0
            times = same // length + 1
            if times > (1 if length >= _LONG_PHRASE else 2):
                highest = max(highest, times)
    return highest


@dataclass(frozen=True)
class SpeechConfig:
    """Settings of `speech_corpus`."""

    share: float = 0.15
    seed: int = 1
    noise: Language | None = None  # the source language, or None for text that only lacks punctuation and capitals

    def __post_init__(self) -> None:
        require(0 < self.share <= 1, f"share must be above 0 and at most 1, got {self.share}")


def speech_corpus(
    source: Path,
    target: Path,
    prefix: Path,
    config: SpeechConfig,
    overwrite: bool = False,
    report: Report = lambda _: None,
    examples: ParallelFiles | None = None,
) -> dict[str, Any]:
    """Copy a share of the pairs with sources like the output of a speech recogniser.

    Joined with the original pairs, they make a model robust to missing punctuation, disfluencies and misheard words.
    Misheard words are learnt from `examples`, pairs of reference and recognised text, if given.
    """
    inputs = {"source": source, "target": target}
    misheard = None
    if examples is not None:
        inputs |= {"said": examples.source, "heard": examples.target}
        misheard = learn_misheard((pair.source, pair.target) for pair in examples.pairs())
    job = Job.on_files(prefix, "speech", as_table(config), inputs, overwrite)
    noise = SpeechNoise(config.noise, misheard=misheard) if config.noise else None

    def add_noise(pair: Pair) -> Rewritten:
        """Add noise to the source, seeded by the line number, so independent of other lines."""
        if noise is None:
            heard = unpunctuated(pair.source)
        else:
            heard = noise.apply(pair.source, random.Random(f"{config.seed}:{pair.line}"))
        return (heard, pair.target) if heard and pair.target else Dropped(EMPTY, pair.line)

    return write_pairs(job, lambda: map(add_noise, sample_pairs(source, target, config.share, config.seed)), report)


def sample_pairs(source: Path, target: Path, share: float, seed: int) -> Iterator[Pair]:
    """Yield a random share of the pairs."""
    rng = random.Random(seed)
    return (pair for pair in ParallelFiles(source, target).pairs() if rng.random() < share)


@dataclass(frozen=True)
class WeightingConfig:
    """Weights of labels: 2 takes pairs twice, 0.5 a random half, 0 none."""

    weights: dict[str, float] = field(default_factory=dict)
    others: float = 1.0  # for labels that are not in `weights`
    seed: int = 1

    def __post_init__(self) -> None:
        for label, weight in (*self.weights.items(), ("others", self.others)):
            require(0 <= weight < math.inf, f"a weight must be 0 or more, got {weight:g} for {label}")


def weight_corpus(
    source: Path,
    target: Path,
    labels: Path,
    prefix: Path,
    config: WeightingConfig,
    overwrite: bool = False,
    report: Report = lambda _: None,
) -> dict[str, Any]:
    """Repeat or sample pairs by label; line n of `labels` is the label of pair n, such as its corpus."""
    known = Counter(label.strip() for label in read_lines(labels))
    unknown = sorted(config.weights.keys() - known.keys())
    if unknown:
        found = ", ".join(f"{label} ({count:,})" for label, count in known.most_common(20))
        raise DataError(f"{labels}: no line has the label {', '.join(unknown)}; labels found: {found}")
    if not any(config.weights.get(label, config.others) for label in known):
        raise DataError(f"{labels}: every label has weight 0, so no pairs remain; give one a weight above 0")
    inputs = {"source": source, "target": target, "labels": labels}
    job = Job.on_files(prefix, "weigh", as_table(config), inputs, overwrite)

    def results() -> Iterator[tuple[str, str]]:
        rng = random.Random(config.seed)
        for pair, label in ParallelFiles(source, target).pairs_with(labels, read_lines(labels)):
            weight = config.weights.get(label.strip(), config.others)
            times = int(weight) + (rng.random() < weight % 1)
            yield from repeat((pair.source, pair.target), times)

    return write_pairs(job, results, report)


@dataclass(frozen=True)
class JoinedSet:
    """A set to join: its first `limit` pairs (0 for all), `repeat` times."""

    source: Path
    target: Path
    repeat: int = 1
    limit: int = 0

    def __post_init__(self) -> None:
        require(self.repeat >= 1, f"repeat must be at least 1, got {self.repeat} for {self.source}")
        require(self.limit >= 0, f"limit must not be negative, got {self.limit} for {self.source}")

    def pairs(self) -> Iterator[tuple[str, str]]:
        for _ in repeat(None, self.repeat):
            pairs = ParallelFiles(self.source, self.target).pairs()
            yield from ((pair.source, pair.target) for pair in islice(pairs, self.limit or None))


def join_corpora(
    sets: Sequence[JoinedSet], prefix: Path, overwrite: bool = False, report: Report = lambda _: None
) -> dict[str, Any]:
    """Concatenate several sets."""
    if not sets:
        raise ConfigError("nothing to join: give --source and --target")
    inputs = [[file_sha256(each.source), file_sha256(each.target)] for each in sets]
    settings = [{"repeat": each.repeat, "limit": each.limit} for each in sets]
    files = [path for each in sets for path in (each.source, each.target)]
    job = Job(prefix, {"rewrite": "join", "settings": settings, "inputs": inputs}, files, overwrite)
    return write_pairs(job, lambda: chain.from_iterable(each.pairs() for each in sets), report)


def align_and_reorder(
    source: Path,
    target: Path,
    prefix: Path,
    *,
    links: Path | None = None,
    units: tuple[UnitChoice, UnitChoice] = ("auto", "auto"),
    segment_chinese: bool = False,
    overwrite: bool = False,
    report: Report = lambda _: None,
    log: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Reorder a corpus, aligning it with eflomal first unless `links` are given.

    Links are saved as PREFIX.links, since eflomal is not deterministic. `segment_chinese` segments the target into
    words, saved as PREFIX.words.
    """
    refuse_to_overwrite_inputs(prefix, (source, target), (*_OUTPUT_SUFFIXES, "words", "links"))
    with wrap_write_errors(prefix), exclusive_lock(prefix):
        if segment_chinese:
            target = _segment_target(target, prefix.with_name(f"{prefix.name}.words"), overwrite)
            units = units[0], "word"
        detected_units = find_unit(source, units[0]), find_unit(target, units[1])
        aligned = links or _align(
            source, target, detected_units, prefix.with_name(f"{prefix.name}.links"), overwrite, log
        )
    return reorder_corpus(source, target, aligned, prefix, detected_units, overwrite, report)


def _segment_target(target: Path, words: Path, overwrite: bool) -> Path:
    metadata = {"target": file_sha256(target)}
    return write_once(words, metadata, overwrite, lambda: map(" ".join, alignment.segment_chinese(read_lines(target))))


def _align(
    source: Path, target: Path, units: tuple[Unit, Unit], links: Path, overwrite: bool, log: Callable[[str], None]
) -> Path:
    def align() -> Iterator[str]:
        log(f"{links}: aligning with eflomal ...")
        words = alignment.read_word_pairs(source, target, units)
        return map(alignment.format_pharaoh, alignment.align_with_eflomal(words))

    metadata = {"source": file_sha256(source), "target": file_sha256(target), "units": [*units]}
    return write_once(links, metadata, overwrite, align)


def reorder_corpus(
    source: Path,
    target: Path,
    links: Path,
    prefix: Path,
    units: tuple[Unit, Unit] = ("word", "word"),
    overwrite: bool = False,
    report: Report = lambda _: None,
) -> dict[str, Any]:
    """Reorder a corpus with the given alignments.

    `links` holds 0-based Pharaoh alignments of units: "word" for space-separated words, or "char" for text without
    spaces, where each ideograph is a unit. To keep Chinese words together, segment the text first.
    """
    inputs = {"source": source, "target": target, "links": links}
    job = Job.on_files(prefix, "reorder", {"units": list(units)}, inputs, overwrite)

    def results() -> Iterator[Rewritten]:
        alignments = alignment.read_alignments(links, alignment.parse_pharaoh)
        pairs = ParallelFiles(source, target).pairs_with(links, alignments)
        return (_reorder(pair, aligned, links, units) for pair, aligned in pairs)

    return write_pairs(job, results, report)


def _reorder(pair: Pair, links: set[Link], path: Path, units: tuple[Unit, Unit]) -> Rewritten:
    source, target = alignment_words(pair.source, units[0]), alignment_words(pair.target, units[1])
    if not source or not target:
        return Dropped(EMPTY)
    alignment.check_links(path, pair.line, links, (source, target))
    order = alignment.reorder_target(range(len(target)), links)
    return pair.source, _write_units(target, order, pair.target)


def _write_units(units: Sequence[str], order: Sequence[int], text: str) -> str:
    """Join reordered units with spaces as in running text.

    Ideographs are joined without a space, other characters with one; between the two there is a space if the original
    text has one on that side.
    """
    spaces = _spaces(units, text)
    written = units[order[0]]
    for left, right in pairwise(order):
        ideographs = is_spaceless(units[left][-1]), is_spaceless(units[right][0])
        if ideographs[0] == ideographs[1]:
            spaced = not ideographs[0]
        else:
            spaced = spaces[right] if ideographs[0] else spaces[left + 1]
        written += f" {units[right]}" if spaced else units[right]
    return written


def _spaces(units: Sequence[str], text: str) -> list[bool]:
    """Return whether whitespace precedes each unit; ends with False."""
    spaces, end = [], 0
    for unit in units:
        start = text.index(unit, end)
        spaces.append(0 < end < start)
        end = start + len(unit)
    return [*spaces, False]
