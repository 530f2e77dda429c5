"""Scores systems on a test set: bundles at their delays, or the logs that SimulEval left.

Quality and delays are of every sentence, translated many at a time. What depends on the machine (AL_CA, the time
of a source piece, the lag at speaking pace) is of some sentences, evenly spread, each translated alone, word by word,
several times over.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, TypeVar

from simulmt import __version__
from simulmt.config import require
from simulmt.corpus import read_lines
from simulmt.errors import ConfigError, DataError
from simulmt.eval.flaws import Lexicon, written_twice
from simulmt.eval.instances import Instance, read_instances, split_units, unit_of, write_instances
from simulmt.eval.lag import Timed, computation, latency
from simulmt.eval.results import INSTANCES, Result, Unit, result_name, write_results
from simulmt.eval.score import QualityScorer
from simulmt.eval.systems import count_pieces, time_words, translate_all
from simulmt.runtime.bundle import MANIFEST
from simulmt.stream import Translator

Progress = Callable[[str], None]
T = TypeVar("T")


@dataclass(frozen=True)
class TestSet:
    """Source sentences and their references, one sequence for each file of references."""

    __test__ = False  # it is not a test, whatever pytest thinks of its name

    name: str
    sources: tuple[str, ...]
    references: tuple[tuple[str, ...], ...]
    files: dict[str, str]  # SHA-256 of the files, by path


@dataclass(frozen=True)
class Timing:
    """How computation is timed."""

    sentences: int = 100
    runs: int = 3
    words_per_second: float = 2.5

    def __post_init__(self) -> None:
        require(self.sentences >= 0, f"timed sentences must be 0 or more, got {self.sentences}")
        require(self.runs >= 1, f"runs must be 1 or more, got {self.runs}")
        require(self.words_per_second > 0, f"words per second must be above 0, got {self.words_per_second}")


@dataclass(frozen=True)
class Evaluation:
    """A result with what it was computed from."""

    result: Result
    hypotheses: list[str]
    instances: list[Instance]

    def write(self, directory: Path) -> None:
        """Add it to a results directory: hypotheses, log and, last, the line of scores."""
        write_instances(directory / self.result.name, self.instances)
        text = "".join(f"{hypothesis}\n" for hypothesis in self.hypotheses)
        (directory / f"{self.result.name}.hyp").write_text(text, encoding="utf-8")
        write_results(directory, [self.result])


def read_test_set(source: Path, references: Sequence[Path], name: str = "", limit: int | None = None) -> TestSet:
    """Read a test set, which is called like its source file if no name is given; `limit` keeps its first sentences."""
    if not references:
        raise ConfigError("no reference: give at least one --reference")
    sources = list(read_lines(source))
    translations = [list(read_lines(path)) for path in references]
    for path, lines in zip(references, translations, strict=True):
        if len(lines) != len(sources):
            raise DataError(
                f"{path} has {len(lines)} lines but {source} has {len(sources)}; expected a line a sentence"
            )
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


class Evaluator:
    """Scores systems on one test set; `unit` is what their targets are counted in, found out if it is auto."""

    def __init__(
        self,
        test_set: TestSet,
        unit: Unit | Literal["auto"],
        timing: Timing,
        progress: Progress = lambda _: None,
        lexicon: Lexicon | None = None,
    ) -> None:
        self._test_set = test_set
        self._unit = unit
        self._timing = timing
        self._progress = progress
        self._lexicon = lexicon
        self._title = ""  # of what is being scored
        self._scorers: dict[Unit, QualityScorer] = {}

    def bundle(self, system: str, translator: Translator, delay: int | None, threads: int) -> Evaluation:
        """Translate the test set with a bundle at a delay, and score it."""
        self._title = result_name(system, delay)
        unit = self._bundle_unit(translator)
        translations = translate_all(translator, self._test_set.sources, delay, unit, self._report_done)
        instances = [self._instance(index, unit, *translation) for index, translation in enumerate(translations)]
        figures = self._time(translator, instances, delay, unit) if self._timing.sentences else {}
        facts = {"bundle_sha256": sha256(translator.bundle.directory / MANIFEST), "threads": threads, **figures}
        return self._score(system, delay, unit, [translation.text for translation in translations], instances, facts)

    def log(self, system: str, path: Path, delay: int | None) -> Evaluation:
        """Score what SimulEval logged, in a file or in the directory it is in."""
        self._title = result_name(system, delay)
        path = path / INSTANCES if path.is_dir() else path
        logged = read_instances(path)
        self._check_log(path, logged)
        unit = unit_of(logged, str(path))
        if self._unit not in ("auto", unit):
            raise ConfigError(f"--unit {self._unit}: the delays of {path} are one a {unit}")
        instances = [self._instance(index, unit, entry.prediction, entry.delays) for index, entry in enumerate(logged)]
        facts = {"files": {**self._test_set.files, str(path): sha256(path)}}
        return self._score(system, delay, unit, [entry.prediction for entry in logged], instances, facts)

    def _bundle_unit(self, translator: Translator) -> Unit:
        spaced = translator.bundle.target.spaced
        if self._unit == "word" and not spaced:
            raise ConfigError(f"--unit word: {translator.bundle.name} writes no spaces between words; use char")
        if self._unit == "auto":
            return "word" if spaced else "char"
        return self._unit

    def _report(self, news: str) -> None:
        self._progress(f"{self._title}: {news}")

    def _report_done(self, done: int) -> None:
        self._report(f"{done:,} of {len(self._test_set.sources):,} sentences translated")

    def _instance(self, index: int, unit: Unit, text: str, delays: tuple[int, ...]) -> Instance:
        source = self._test_set.sources[index].split()
        return Instance(
            index=index,
            source=" ".join(source),
            references=tuple(lines[index] for lines in self._test_set.references),
            prediction=(" " if unit == "word" else "").join(split_units(text, unit)),
            delays=delays,
            source_length=len(source),
        )

    def _check_log(self, path: Path, logged: Sequence[Instance]) -> None:
        sources, origin = self._test_set.sources, next(iter(self._test_set.files))
        if len(logged) != len(sources):
            raise DataError(f"{path} has {len(logged)} sentences but {len(sources)} of {origin} are to be scored")
        for number, (entry, source) in enumerate(zip(logged, sources, strict=True), start=1):
            if entry.source.split() != source.split():
                raise DataError(f"{path}:{number}: its source is not line {number} of {origin}")

    def _time(
        self, translator: Translator, instances: Sequence[Instance], delay: int | None, unit: Unit
    ) -> dict[str, float]:
        chosen = evenly_spread(instances, self._timing.sentences)
        time_words(translator, chosen[0].source, delay)  # the first one pays for what the others find ready
        timed = []
        for run in range(self._timing.runs):
            self._report(f"timing {len(chosen):,} sentences, run {run + 1} of {self._timing.runs}")
            for instance in chosen:
                seconds = time_words(translator, instance.source, delay)
                timed.append(Timed(instance, count_pieces(translator, instance.source), seconds))
        counts = {"timed_sentences": len(chosen), "timed_runs": self._timing.runs}
        return {**computation(timed, unit, self._timing.words_per_second), **counts}

    def _score(
        self,
        system: str,
        delay: int | None,
        unit: Unit,
        hypotheses: list[str],
        instances: list[Instance],
        facts: Mapping[str, Any],
    ) -> Evaluation:
        self._report("scoring")
        if unit not in self._scorers:
            self._scorers[unit] = QualityScorer(self._test_set.references, unit)
        quality = self._scorers[unit].score(hypotheses)
        table: dict[str, Any] = {
            **{name: score.value for name, score in quality.scores.items()},
            **{f"{name}_interval": score.interval for name, score in quality.scores.items()},
            "signature": quality.scores["BLEU"].signature,
            "signatures": {name: score.signature for name, score in quality.scores.items()},
            "precisions": quality.precisions,
            "BP": quality.brevity_penalty,
            "sentences": len(hypotheses),
            "empty_hypotheses": sum(not hypothesis.strip() for hypothesis in hypotheses),
            "written_twice": sum(written_twice(hypothesis, unit) for hypothesis in hypotheses),
            "reference_written_twice": sum(written_twice(line, unit) for line in self._test_set.references[0]),
            "torn_words": self._torn_words(hypotheses),
            "files": self._test_set.files,
            **latency(instances, unit),
            **provenance(),
            **facts,
        }
        return Evaluation(Result(system, delay, self._test_set.name, unit, **table), hypotheses, instances)

    def _torn_words(self, hypotheses: Sequence[str]) -> int | None:
        if self._lexicon is None:
            return None
        pairs = zip(hypotheses, self._test_set.sources, strict=True)
        return sum(len(self._lexicon.torn(hypothesis, source)) for hypothesis, source in pairs)


def evenly_spread(items: Sequence[T], count: int) -> list[T]:
    """So many items at equal distances, or all if there are no more."""
    if count >= len(items):
        return list(items)
    return [items[position * len(items) // count] for position in range(count)]


def provenance() -> dict[str, Any]:
    """The code, the command and the machine that a result comes from, by the fields of `Result`."""
    return {
        "commit": _commit(),
        "command": tuple(sys.argv),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": {
            "simulmt": __version__,
            "python": platform.python_version(),
            **{package: metadata.version(package) for package in ("onnxruntime", "sacrebleu", "sentencepiece")},
            "machine": platform.platform(),
            "cores": str(os.cpu_count()),
        },
    }


@cache
def _commit() -> str | None:
    """The commit of the code that runs, with a mark if it was changed since; None outside a checkout."""
    command = ["git", "-C", os.fspath(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def sha256(path: Path) -> str:
    """The checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
