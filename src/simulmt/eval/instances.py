"""SimulEval logs: sentences with their delays.

Every line of `instances.log` is a JSON object with index, prediction, delays, elapsed, prediction_length, reference,
source and source_length. Logs written here add `references` if there are several, which SimulEval ignores. `elapsed` is
always 0, as in SimulEval's own logs of text, which have no computation-aware latency.

A target unit is a word, or a character for targets without spaces (not counting spaces). A word counts as written once
it is complete, that is, when the next one begins or the sentence ends.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from simulmt.data.corpus import read_lines
from simulmt.errors import DataError
from simulmt.eval.latency import end_offset
from simulmt.eval.results import INSTANCES
from simulmt.text import split_words
from simulmt.text.words import Unit

# `simuleval --score-only --output DIRECTORY` needs this next to the log.
_CONFIG = ("config.yaml", "source_type: text\ntarget_type: text\n")


@dataclass(frozen=True)
class Instance:
    """A sentence, its translation, and the number of source words read for each target unit."""

    index: int
    source: str
    references: tuple[str, ...]  # empty if missing
    prediction: str
    delays: tuple[int, ...]
    source_length: int

    @property
    def reference(self) -> str:
        """First reference, which defines the length for latency metrics."""
        return next(filter(None, self.references), "")


class CompleteWords:
    """Buffers incomplete words of append-only text; text without spaces passes unchanged."""

    def __init__(self, spaced: bool) -> None:
        self._spaced = spaced
        self._held = ""

    def push(self, text: str) -> str:
        """Return the completed text, up to and including the last space."""
        if not self._spaced:
            return text
        complete, space, self._held = (self._held + text).rpartition(" ")
        return complete + space

    def finish(self) -> str:
        """Return the rest at the end of the sentence."""
        rest, self._held = self._held, ""
        return rest


def split_units(text: str, unit: Unit) -> list[str]:
    """Split a hypothesis into units."""
    return text.split() if unit == "word" else list(text.replace(" ", ""))


def unit_delays(written: Iterable[tuple[str, int]], source_length: int, unit: Unit, spaced: bool) -> list[int]:
    """Return the delay of each target unit of text written in pieces, given with the source words read.

    `spaced` is False for targets written without spaces.
    """
    words = CompleteWords(spaced)
    delays = [delay for text, delay in written for _ in split_units(words.push(text), unit)]
    return delays + [source_length] * len(split_units(words.finish(), unit))


def spaced_words_read(source: str, words: Iterable[int]) -> Iterator[int]:
    """Convert counts of runtime words, which are also split at ideographs, to counts of space-separated words."""
    ends = list(accumulate(len(split_words(word)) for word in source.split()))
    for count in words:
        yield bisect_left(ends, count) + 1


def write_instances(directory: Path, instances: Sequence[Instance]) -> None:
    """Write a log that `simuleval --score-only --output DIRECTORY` can score."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / _CONFIG[0]).write_text(_CONFIG[1], encoding="utf-8")
    lines = (json.dumps(_table(instance), ensure_ascii=False) + "\n" for instance in instances)
    (directory / INSTANCES).write_text("".join(lines), encoding="utf-8")


def read_instances(path: Path) -> list[Instance]:
    """Read a log, given as a file or its directory."""
    path = path / INSTANCES if path.is_dir() else path
    return [_parse(line, f"{path}:{number}") for number, line in enumerate(read_lines(path), start=1)]


def detect_unit(instances: Sequence[Instance], origin: str) -> Unit:
    """Detect the unit of a log: the one with as many units as there are delays."""
    fitting: list[set[Unit]] = [_fitting_units(instance) for instance in instances]
    for number, units in enumerate(fitting, start=1):
        if not units:
            raise DataError(f"{origin}:{number}: expected one delay per word or per character of the prediction")
    return "word" if all("word" in units for units in fitting) else "char"


def _fitting_units(instance: Instance) -> set[Unit]:
    units: tuple[Unit, ...] = ("word", "char")
    return {unit for unit in units if len(split_units(instance.prediction, unit)) == len(instance.delays)}


def _table(instance: Instance) -> dict[str, Any]:
    table = {
        "index": instance.index,
        "prediction": instance.prediction,
        "delays": instance.delays,
        "elapsed": [0] * len(instance.delays),
        "prediction_length": len(instance.delays),
        "reference": instance.reference,
        "source": instance.source,
        "source_length": instance.source_length,
    }
    return table if len(instance.references) == 1 else table | {"references": instance.references}


def _parse(line: str, where: str) -> Instance:
    try:
        table = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: not JSON: {error}") from None
    if not isinstance(table, dict):
        raise DataError(f"{where}: expected a JSON object, found {type(table).__name__}")
    delays = _field(table, "delays", list, where)
    if not all(isinstance(delay, int) for delay in delays):
        raise DataError(f"{where}: delays: expected integer numbers of source words; speech logs are not supported")
    source_length = _field(table, "source_length", int, where)
    try:
        end_offset(delays, source_length)  # validates the delays
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
    reference = _field(table, "reference", str | None, where) or ""
    references = _field(table, "references", list, where) if "references" in table else [reference.removesuffix("\n")]
    return Instance(
        index=_field(table, "index", int, where),
        source=_field(table, "source", str, where),
        references=tuple(references),
        prediction=_field(table, "prediction", str, where),
        delays=tuple(delays),
        source_length=source_length,
    )


def _field(table: dict[str, Any], key: str, kind: Any, where: str) -> Any:
    if key not in table:
        raise DataError(f"{where}: no '{key}'; expected a line of SimulEval's {INSTANCES}")
    if not isinstance(table[key], kind):
        raise DataError(f"{where}: {key}: expected {getattr(kind, '__name__', kind)}, got {table[key]!r}")
    return table[key]
