"""Score systems on a test set: bundles at their delays, or SimulEval logs.

Quality and delays are measured on every sentence, in batches. Timings (AL_CA, time per source piece, lag at speaking
pace) are measured on some evenly spaced sentences, each translated alone, word by word, several times.
"""

from __future__ import annotations

import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from simulmt import __version__
from simulmt.config import require
from simulmt.data.corpus import read_references, read_sentences
from simulmt.errors import ConfigError, DataError
from simulmt.eval.latency import (
    Instance,
    TimedSentence,
    computation,
    detect_unit,
    latency,
    spaced_words_read,
    split_units,
    unit_delays,
)
from simulmt.eval.quality import FactChecker, Lexicon, QualityScorer, repeated_words
from simulmt.eval.results import (
    INSTANCES,
    Result,
    check_system_name,
    prepare_directory,
    read_instances,
    result_name,
    write_instances,
    write_results,
)
from simulmt.files import commit, cores, environment, sha256, timestamp
from simulmt.runtime.bundle import MANIFEST, Bundle, find
from simulmt.runtime.stream import Commit, Translator
from simulmt.text import split_words
from simulmt.text.words import Unit

STREAMS = 64  # per batch

T = TypeVar("T")
_LOG = re.compile(r"(?P<system>[^=:]+)(?::(?P<delay>[1-9][0-9]*))?=(?P<path>.+)")


@dataclass(frozen=True)
class TestSet:
    """Source sentences and references, one sequence per reference file."""

    __test__ = False  # not a pytest class

    name: str
    sources: tuple[str, ...]
    references: tuple[tuple[str, ...], ...]
    files: dict[str, str]  # SHA-256 of the files, by path


@dataclass(frozen=True)
class Timing:
    """Timing settings."""

    sentences: int = 100
    runs: int = 3
    words_per_second: float = 2.5

    def __post_init__(self) -> None:
        require(self.sentences >= 0, f"timed sentences must be 0 or more, got {self.sentences}")
        require(self.runs >= 1, f"runs must be 1 or more, got {self.runs}")
        require(self.words_per_second > 0, f"words per second must be above 0, got {self.words_per_second}")


@dataclass(frozen=True)
class Evaluation:
    """A result and the translations behind it."""

    result: Result
    hypotheses: list[str]
    instances: list[Instance]

    def write(self, directory: Path) -> None:
        """Add the result to a results directory: hypotheses, log and, last, scores."""
        write_instances(directory / self.result.name, self.instances)
        text = "".join(f"{hypothesis}\n" for hypothesis in self.hypotheses)
        (directory / f"{self.result.name}.hyp").write_text(text, encoding="utf-8")
        write_results(directory, [self.result])


def read_test_set(source: Path, references: Sequence[Path], name: str = "", limit: int | None = None) -> TestSet:
    """Read a test set from text or .sgm files, named after its source file by default; `limit` keeps the first lines.

    An .sgm file may hold several reference sets.
    """
    if not references:
        raise ConfigError("no reference: give at least one --reference")
    sources = list(read_sentences(source))
    translations = []
    for path in references:
        for lines in read_references(path):
            if len(lines) != len(sources):
                raise DataError(f"{path} has {len(lines)} sentences but {source} has {len(sources)}")
            translations.append(lines)
    for number, line in enumerate(sources, start=1):
        if not line.strip():
            raise DataError(
                f"{source}:{number}: an empty sentence cannot be scored; delete it here and in the references"
            )
    return TestSet(
        name or source.name.partition(".")[0],
        tuple(sources[:limit]),
        tuple(tuple(lines[:limit]) for lines in translations),
        {str(path): sha256(path) for path in (source, *references)},
    )


class Job(NamedTuple):
    """A bundle to score at a delay, or a SimulEval log of a system."""

    system: str
    delay: int | None
    origin: Bundle | Path


def bundle_jobs(models: Sequence[str], delays: Sequence[int]) -> Iterator[Job]:
    """Yield a job for each delay of models given as [NAME=]MODEL; bundles of the same name are one system."""
    systems: defaultdict[str, list[Bundle]] = defaultdict(list)
    for text in models:
        is_named = "=" in text and not Path(text).exists()
        name, path = text.split("=", 1) if is_named else (None, text)
        bundle = Bundle(find(path))
        systems[check_system_name(bundle.name if name is None else name)].append(bundle)
    for system, bundles in systems.items():
        trained = {k for bundle in bundles for k in bundle.config.delays}
        if trained and not trained.issuperset(delays):
            listed = ", ".join(map(str, sorted(trained)))
            raise ConfigError(f"--delay {','.join(map(str, delays))}: {system} was trained for {listed}")
        for bundle in bundles:
            known = bundle.config.delays
            chosen = [k for k in delays or known if k in known] if known else [None]
            yield from (Job(system, k, bundle) for k in chosen)


def log_job(text: str) -> Job:
    """Return the job of a log given as NAME[:DELAY]=PATH."""
    match = _LOG.fullmatch(text)
    if match is None:
        raise ConfigError(f"--log {text}: expected NAME:DELAY=PATH, or NAME=PATH for a system without delay")
    delay = int(match["delay"]) if match["delay"] else None
    return Job(check_system_name(match["system"]), delay, Path(match["path"]))


def check_jobs(jobs: Sequence[Job]) -> None:
    """Raise ConfigError if there are no jobs, or two of the same system at the same delay."""
    if not jobs:
        raise ConfigError("nothing to score: give --model or --log")
    seen = set()
    for system, delay, _ in jobs:
        if (system, delay) in seen:
            raise ConfigError(f"{result_name(system, delay)} is given twice; rename one system with NAME=...")
        seen.add((system, delay))


def run_jobs(evaluator: Evaluator, jobs: Iterable[Job], threads: int, output: Path) -> list[Evaluation]:
    """Evaluate all jobs and write each result to a directory; a bundle is loaded once for all its delays."""
    prepare_directory(output, evaluator.test_set.name)
    evaluations = []
    translator: Translator | None = None
    for system, delay, origin in jobs:
        if isinstance(origin, Path):
            evaluation = evaluator.score_log(system, origin, delay)
        else:
            if translator is None or translator.bundle is not origin:
                translator = Translator(origin, threads)
            evaluation = evaluator.score_bundle(system, translator, delay, threads)
        evaluation.write(output)
        evaluations.append(evaluation)
    return evaluations


class StreamOptions(NamedTuple):
    """Options of the streams that translate a test set."""

    segment: bool = False  # split lines into sentences at punctuation
    reads_on: bool = True  # wait-k reads on instead of ending before the source does


BY_LINE = StreamOptions()


class Evaluator:
    """Scores systems on a test set; `unit` auto detects the target unit.

    `stop_at_end` selects the paper's wait-k policy, which stops when the model predicts END. With `segment`, lines are
    split into sentences at punctuation, as in live streams.
    """

    def __init__(
        self,
        test_set: TestSet,
        unit: Unit | Literal["auto"],
        timing: Timing,
        progress: Callable[[str], None] = lambda _: None,
        lexicon: Lexicon | None = None,
        stop_at_end: bool = False,
        warn: Callable[[str], None] = lambda _: None,
        segment: bool = False,
    ) -> None:
        self.test_set = test_set
        self._unit = unit
        self._timing = timing
        self._progress = progress
        self._lexicon = lexicon
        self._options = StreamOptions(segment, reads_on=not stop_at_end)
        self._warn = warn
        self._title = ""  # of the current result
        self._scorer = QualityScorer(test_set.references)
        self._facts = FactChecker(test_set.sources, test_set.references)

    def score_bundle(self, system: str, translator: Translator, delay: int | None, threads: int) -> Evaluation:
        """Translate the test set with a bundle at a delay, and score it."""
        self._title = result_name(system, delay)
        unit = self._bundle_unit(translator)
        translations = translate_all(translator, self.test_set.sources, delay, unit, self._report_done, self._options)
        instances = [self._instance(index, unit, *translation) for index, translation in enumerate(translations)]
        timings = self._time(translator, instances, delay, unit) if self._timing.sentences else {}
        extra = {"bundle_sha256": sha256(translator.bundle.directory / MANIFEST), "threads": threads, **timings}
        extra["segment"] = self._options.segment
        return self._score(system, delay, unit, [translation.text for translation in translations], instances, extra)

    def score_log(self, system: str, path: Path, delay: int | None) -> Evaluation:
        """Score a SimulEval log, given as a file or its directory."""
        self._title = result_name(system, delay)
        path = path / INSTANCES if path.is_dir() else path
        logged = read_instances(path)
        self._check_log(path, logged)
        unit = self._log_unit(path, logged)
        instances = [self._instance(index, unit, entry.prediction, entry.delays) for index, entry in enumerate(logged)]
        extra = {"files": {**self.test_set.files, str(path): sha256(path)}}
        return self._score(system, delay, unit, [entry.prediction for entry in logged], instances, extra)

    def _bundle_unit(self, translator: Translator) -> Unit:
        spaced = translator.bundle.target.spaced
        if self._unit == "word" and not spaced:
            raise ConfigError(f"--unit word: {translator.bundle.name} writes no spaces between words; use char")
        if self._unit == "auto":
            return "word" if spaced else "char"
        return self._unit

    def _log_unit(self, path: Path, logged: Sequence[Instance]) -> Unit:
        unit = detect_unit(logged, str(path))
        if self._unit not in ("auto", unit):
            again = f"run SimulEval again with --eval-latency-unit {self._unit}"
            raise ConfigError(f"--unit {self._unit}: {path} has one delay per {unit}; {again}")
        if (unit, self._scorer.unit) == ("word", "char"):
            self._warn(
                f"warning: {path} has one delay per space-separated word, but the references have no spaces, so its "
                "latency is not comparable; run SimulEval again with --eval-latency-unit char"
            )
        return unit

    def _report(self, message: str) -> None:
        self._progress(f"{self._title}: {message}")

    def _report_done(self, done: int) -> None:
        self._report(f"{done:,} of {len(self.test_set.sources):,} sentences translated")

    def _instance(self, index: int, unit: Unit, text: str, delays: tuple[int, ...]) -> Instance:
        source = self.test_set.sources[index].split()
        return Instance(
            index=index,
            source=" ".join(source),
            references=tuple(lines[index] for lines in self.test_set.references),
            prediction=(" " if unit == "word" else "").join(split_units(text, unit)),
            delays=delays,
            source_length=len(source),
        )

    def _check_log(self, path: Path, logged: Sequence[Instance]) -> None:
        sources, origin = self.test_set.sources, next(iter(self.test_set.files))
        if len(logged) != len(sources):
            raise DataError(f"{path} has {len(logged)} sentences, expected the {len(sources)} of {origin}")
        for number, (entry, source) in enumerate(zip(logged, sources, strict=True), start=1):
            if entry.source.split() != source.split():
                raise DataError(f"{path}:{number}: the source differs from line {number} of {origin}")

    def _time(
        self, translator: Translator, instances: Sequence[Instance], delay: int | None, unit: Unit
    ) -> dict[str, float]:
        chosen = evenly_spaced(instances, self._timing.sentences)
        time_words(translator, chosen[0].source, delay, self._options)  # warm-up
        timed = []
        for run in range(self._timing.runs):
            self._report(f"timing {len(chosen):,} sentences, run {run + 1} of {self._timing.runs}")
            for instance in chosen:
                seconds = time_words(translator, instance.source, delay, self._options)
                timed.append(TimedSentence(instance, count_pieces(translator, instance.source), seconds))
        counts = {"timed_sentences": len(chosen), "timed_runs": self._timing.runs}
        return {**computation(timed, unit, self._timing.words_per_second), **counts}

    def _score(
        self,
        system: str,
        delay: int | None,
        unit: Unit,
        hypotheses: list[str],
        instances: list[Instance],
        extra: Mapping[str, Any],
    ) -> Evaluation:
        self._report("scoring")
        quality = self._scorer.score(hypotheses)
        table: dict[str, Any] = {
            **{name: score.value for name, score in quality.scores.items()},
            **{f"{name}_interval": score.interval for name, score in quality.scores.items()},
            "signature": quality.scores["BLEU"].signature,
            "signatures": {name: score.signature for name, score in quality.scores.items()},
            "precisions": quality.precisions,
            "BP": quality.brevity_penalty,
            "sentences": len(hypotheses),
            "empty_hypotheses": sum(not hypothesis.strip() for hypothesis in hypotheses),
            "repeated_words": self._repeated_words(hypotheses),
            "reference_repeated_words": self._repeated_words(self.test_set.references[0]),
            "unknown_words": self._unknown_words(hypotheses),
            **self._facts.count(hypotheses),
            "files": self.test_set.files,
            **latency(instances, unit),
            **_provenance(),
            **extra,
        }
        return Evaluation(Result(system, delay, self.test_set.name, unit, **table), hypotheses, instances)

    def _repeated_words(self, lines: Iterable[str]) -> int:
        return sum(repeated_words(line, self._scorer.unit) for line in lines)

    def _unknown_words(self, hypotheses: Sequence[str]) -> int | None:
        if self._lexicon is None:
            return None
        pairs = zip(hypotheses, self.test_set.sources, strict=True)
        return sum(len(self._lexicon.unknown(hypothesis, source)) for hypothesis, source in pairs)


def evenly_spaced(items: Sequence[T], count: int) -> list[T]:
    """Return `count` evenly spaced items, or all if there are fewer."""
    if count >= len(items):
        return list(items)
    return [items[position * len(items) // count] for position in range(count)]


def _provenance() -> dict[str, Any]:
    """Return the provenance of a result, by field of `Result`."""
    return {
        "commit": commit(),
        "command": tuple(sys.argv),
        "date": timestamp(),
        "environment": {
            "simulmt": __version__,
            **environment("onnxruntime", "sacrebleu", "sentencepiece"),
            "cores": str(cores()),
        },
    }


class Translation(NamedTuple):
    """A hypothesis and the delays of its units."""

    text: str
    delays: tuple[int, ...]


def translate_all(
    translator: Translator,
    sources: Sequence[str],
    delay: int | None,
    unit: Unit,
    progress: Callable[[int], None],
    options: StreamOptions = BY_LINE,
) -> list[Translation]:
    """Translate all sentences, batched by length; `progress` is called with the number done."""
    translations: dict[int, Translation] = {}
    order = sorted(range(len(sources)), key=lambda index: len(sources[index]))
    for start in range(0, len(order), STREAMS):
        batch = order[start : start + STREAMS]
        streams = [translator.stream(delay, **options._asdict()) for _ in batch]
        for stream, index in zip(streams, batch, strict=True):
            stream.accept(sources[index])
            stream.accept_finish()
        for index, commits in zip(batch, translator.drain(streams), strict=True):
            translations[index] = _translation(sources[index], commits, unit, translator.bundle.target.spaced)
        progress(len(translations))
    return [translations[index] for index in range(len(sources))]


def _translation(source: str, commits: Sequence[Commit], unit: Unit, spaced: bool) -> Translation:
    texts = [commit.text for commit in commits]
    read = spaced_words_read(source, [commit.source_words for commit in commits])
    delays = unit_delays(zip(texts, read, strict=True), len(source.split()), unit, spaced)
    return Translation("".join(texts), tuple(delays))


def time_words(
    translator: Translator,
    source: str,
    delay: int | None,
    options: StreamOptions = BY_LINE,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Return the seconds taken by each word of a sentence; the last includes the end of the sentence."""
    stream = translator.stream(delay, **options._asdict())
    words = source.split()
    seconds = []
    for number, word in enumerate(words, start=1):
        started = clock()
        stream.push(f"{word} ")
        if number == len(words):
            stream.finish()
        seconds.append(clock() - started)
    return seconds


def count_pieces(translator: Translator, source: str) -> list[int]:
    """Return the number of source pieces of each word; END is added to the last word."""
    encode = translator.bundle.source.encode_word
    counts = [sum(len(encode(word)) for word in split_words(spaced)) for spaced in source.split()]
    counts[-1] += 1
    return [max(1, count) for count in counts]
