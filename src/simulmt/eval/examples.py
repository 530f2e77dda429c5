"""Translations looked at one by one: aligned with their sources, words without ground in what was read marked.

The alignments of a results directory are kept in DIR/alignments, in Pharaoh format, a file a system, and are made again
only when a system was evaluated again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from simulmt.alignment import Link, format_pharaoh
from simulmt.errors import DataError
from simulmt.eval.aligners import WordPair, alignment_words, read_pharaoh
from simulmt.eval.instances import Instance, read_instances
from simulmt.eval.results import INSTANCES, Result, Unit
from simulmt.eval.score import hallucinated, hallucination_rate, under_translation_rate

Aligner = Callable[[Sequence[WordPair]], list[set[Link]]]


@dataclass(frozen=True)
class Output:
    """A sentence as one system translated it; `links` are None where nothing was aligned."""

    source: list[str]
    words: list[str]
    delays: list[int]  # for each word the source words that had been read when it was complete
    unit: Unit
    links: set[Link] | None = None

    @property
    def marks(self) -> list[bool]:
        """Which words have no ground in what had been read."""
        return [False] * len(self.words) if self.links is None else hallucinated(self.links, self.delays)


@dataclass(frozen=True)
class Outputs:
    """All that one system wrote, or, without a result, the references, as if written with the whole source read."""

    name: str
    result: Result | None
    sentences: list[Output]
    written: float  # when the log was written that they are from

    @property
    def is_aligned(self) -> bool:
        return all(output.links is not None for output in self.sentences)

    @property
    def hallucination_rate(self) -> float:
        """The share of target words that are aligned to nothing that had been read."""
        return hallucination_rate((output.links or (), output.delays) for output in self.sentences)

    @property
    def under_translation_rate(self) -> float:
        """The share of source words that nothing is aligned to."""
        return under_translation_rate((output.links or (), len(output.source)) for output in self.sentences)


def read_outputs(directory: Path, results: Sequence[Result], aligner: Aligner | None) -> list[Outputs]:
    """The references and then the systems of a results directory, as far as their logs are there.

    All of them are aligned together, since an aligner learns from what it aligns. Without one, there are only the
    links that were kept.
    """
    logged = [result for result in results if _log(directory, result).exists()]
    if not logged:
        return []
    everything = [_system_outputs(directory, result) for result in logged]
    instances = read_instances(_log(directory, logged[0]))
    references = [_reference(instance, logged[0].unit) for instance in instances]
    everything.insert(0, Outputs("reference", None, references, max(outputs.written for outputs in everything)))
    return _aligned(directory, everything, aligner)


def _log(directory: Path, result: Result) -> Path:
    return directory / result.name / INSTANCES


def _system_outputs(directory: Path, result: Result) -> Outputs:
    log = _log(directory, result)
    outputs = [_output(instance, result.unit) for instance in read_instances(log)]
    return Outputs(result.name, result, outputs, log.stat().st_mtime)


def _reference(instance: Instance, unit: Unit) -> Output:
    source, words = instance.source.split(), alignment_words(instance.reference, unit)
    return Output(source, words, [len(source)] * len(words), unit)


def _output(instance: Instance, unit: Unit) -> Output:
    words = alignment_words(instance.prediction, unit)
    delays = list(instance.delays) if unit == "word" else _word_delays(instance, words)
    return Output(instance.source.split(), words, delays, unit)


def _word_delays(instance: Instance, words: Sequence[str]) -> list[int]:
    """From delays of characters to delays of words, which are complete with their last character."""
    text = instance.prediction.replace(" ", "")
    delays, end = [], 0
    for word in words:
        end = text.index(word, end) + len(word)
        delays.append(instance.delays[end - 1])
    return delays


def _aligned(directory: Path, everything: Sequence[Outputs], aligner: Aligner | None) -> list[Outputs]:
    kept = {outputs.name: _read_links(directory, outputs) for outputs in everything}
    if aligner is not None and None in kept.values():
        found = iter(aligner([pair for outputs in everything for pair in _pairs(outputs)]))
        for outputs in everything:
            links = [next(found) for _ in outputs.sentences]
            if kept[outputs.name] is None:
                kept[outputs.name] = links
                _write_links(directory, outputs.name, links)
    return [_with_links(outputs, kept[outputs.name]) for outputs in everything]


def _pairs(outputs: Outputs) -> list[WordPair]:
    return [(output.source, output.words) for output in outputs.sentences]


def _with_links(outputs: Outputs, links: Sequence[set[Link]] | None) -> Outputs:
    if links is None:
        return outputs
    linked = [replace(output, links=each) for output, each in zip(outputs.sentences, links, strict=True)]
    return replace(outputs, sentences=linked)


def _links_path(directory: Path, name: str) -> Path:
    return directory / "alignments" / f"{name}.links"


def _read_links(directory: Path, outputs: Outputs) -> list[set[Link]] | None:
    """The links that were kept, unless the translations are newer."""
    path = _links_path(directory, outputs.name)
    if not path.exists() or path.stat().st_mtime < outputs.written:
        return None
    try:
        return read_pharaoh(path, _pairs(outputs))
    except DataError:
        return None  # cut off, or of other text: they are made again


def _write_links(directory: Path, name: str, links: Sequence[set[Link]]) -> None:
    path = _links_path(directory, name)
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{format_pharaoh(each)}\n" for each in links), encoding="utf-8")
