"""Example translations, aligned with their sources to mark hallucinated words.

Alignments can be cached in a directory, in Pharaoh format. File names hold the hash of the aligned text, so that links
of other text are never used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from simulmt.data.alignment import Link, WordPair, alignment_words, format_pharaoh, read_pharaoh
from simulmt.errors import DataError
from simulmt.eval.latency import Instance
from simulmt.eval.results import INSTANCES, Result, read_instances
from simulmt.files import write_whole
from simulmt.text.words import Unit

Aligner = Callable[[Sequence[WordPair]], list[set[Link]]]


@dataclass(frozen=True)
class Output:
    """One translation of a sentence; `links` is None if it was not aligned."""

    source: list[str]
    words: list[str]
    delays: list[int]  # source words read when each word was completed
    unit: Unit
    links: set[Link] | None = None

    @property
    def hallucinated(self) -> list[bool]:
        """Whether each target word is aligned to no source word read before it was written."""
        if self.links is None:
            return [False] * len(self.words)
        grounded = {j for i, j in self.links if i <= self.delays[j - 1]}
        return [j not in grounded for j in range(1, len(self.words) + 1)]

    @property
    def untranslated(self) -> list[bool]:
        """Whether each source word is aligned to no target word."""
        translated = {i for i, _ in self.links or ()}
        return [i not in translated for i in range(1, len(self.source) + 1)]


@dataclass(frozen=True)
class Outputs:
    """All translations of a system or, without a result, the references."""

    name: str
    result: Result | None
    sentences: list[Output]

    @property
    def is_aligned(self) -> bool:
        return all(output.links is not None for output in self.sentences)

    @property
    def hallucination_rate(self) -> float:
        """Share of hallucinated target words."""
        return _share(mark for output in self.sentences for mark in output.hallucinated)

    @property
    def under_translation_rate(self) -> float:
        """Share of untranslated source words."""
        return _share(mark for output in self.sentences for mark in output.untranslated)


def _share(marks: Iterable[bool]) -> float:
    marks = list(marks)
    return sum(marks) / len(marks) if marks else 0.0


def read_outputs(
    directory: Path, results: Sequence[Result], aligner: Aligner | None = None, cache: Path | None = None
) -> list[Outputs]:
    """Return the references and the systems of a results directory that have logs.

    All are aligned together, since aligners learn from the text. Without an aligner, only cached links are used.
    """
    logs = [(result, directory / result.name / INSTANCES) for result in results]
    logged = [(result, read_instances(log)) for result, log in logs if log.exists()]
    if not logged:
        return []
    first, instances = logged[0]
    everything = [Outputs("reference", None, [_reference(instance, first.unit) for instance in instances])]
    for result, instances in logged:
        everything.append(Outputs(result.name, result, [_output(instance, result.unit) for instance in instances]))
    return _aligned(everything, aligner, cache)


def _reference(instance: Instance, unit: Unit) -> Output:
    source, words = instance.source.split(), alignment_words(instance.reference, unit)
    return Output(source, words, [len(source)] * len(words), unit)


def _output(instance: Instance, unit: Unit) -> Output:
    words = alignment_words(instance.prediction, unit)
    delays = list(instance.delays) if unit == "word" else _word_delays(instance, words)
    return Output(instance.source.split(), words, delays, unit)


def _word_delays(instance: Instance, words: Sequence[str]) -> list[int]:
    """Convert character delays to word delays; a word is complete with its last character."""
    text = instance.prediction.replace(" ", "")
    delays, end = [], 0
    for word in words:
        end = text.index(word, end) + len(word)
        delays.append(instance.delays[end - 1])
    return delays


def _aligned(everything: Sequence[Outputs], aligner: Aligner | None, cache: Path | None) -> list[Outputs]:
    kept = {outputs.name: _read_links(cache, outputs) for outputs in everything}
    if aligner is not None and None in kept.values():
        found = iter(aligner([pair for outputs in everything for pair in _pairs(outputs)]))
        for outputs in everything:
            links = [next(found) for _ in outputs.sentences]
            if kept[outputs.name] is None:
                kept[outputs.name] = links
                _write_links(cache, outputs, links)
    return [_with_links(outputs, kept[outputs.name]) for outputs in everything]


def _pairs(outputs: Outputs) -> list[WordPair]:
    return [(output.source, output.words) for output in outputs.sentences]


def _with_links(outputs: Outputs, links: Sequence[set[Link]] | None) -> Outputs:
    if links is None:
        return outputs
    linked = [replace(output, links=each) for output, each in zip(outputs.sentences, links, strict=True)]
    return replace(outputs, sentences=linked)


def _links_path(cache: Path, outputs: Outputs) -> Path:
    text = json.dumps(_pairs(outputs), ensure_ascii=False).encode()
    return cache / f"{outputs.name}-{hashlib.sha256(text).hexdigest()[:16]}.links"


def _read_links(cache: Path | None, outputs: Outputs) -> list[set[Link]] | None:
    if cache is None or not (path := _links_path(cache, outputs)).exists():
        return None
    try:
        return read_pharaoh(path, _pairs(outputs))
    except DataError:
        return None  # damaged: recompute it


def _write_links(cache: Path | None, outputs: Outputs, links: Sequence[set[Link]]) -> None:
    if cache is not None:
        write_whole(_links_path(cache, outputs), "".join(f"{format_pharaoh(each)}\n" for each in links))
