"""All plots of results directories, with their file names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from simulmt.errors import ConfigError, DataError
from simulmt.eval.report.examples import Output, read_outputs
from simulmt.eval.report.plots import (
    ReadWritePath,
    anticipation_figure,
    heat_map_figure,
    ngram_gain_figure,
    path_figure,
    quality_latency_figure,
)
from simulmt.eval.results import (
    Anticipation,
    Result,
    SortedSentence,
    directories_with_scores,
    read_all,
    read_records,
    read_results,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Named = tuple[str, "Figure"]


def draw_gallery(
    directories: Sequence[Path], baseline: str | None, sentences: Sequence[int], alignments: Path | None = None
) -> Iterator[Named]:
    """Yield all plots; with a baseline also n-gram gains, and read/write paths of the given sentences."""
    results = read_all(directories_with_scores(directories))
    systems = dict.fromkeys(result.system for result in results)
    if baseline is not None and baseline not in systems:
        raise ConfigError(f"--baseline {baseline}: no such system; there are {', '.join(systems)}")
    for test_set in dict.fromkeys(result.test_set for result in results):
        of_set = [result for result in results if result.test_set == test_set]
        yield f"{test_set}-quality-latency", quality_latency_figure(of_set)
        yield from ngram_gain_figures(of_set, baseline)
    if rates := anticipation_rates(read_records(Anticipation, directories)):
        yield "anticipation", anticipation_figure(rates)
    for record in read_records(SortedSentence, directories):
        name = f"{record.test_set}-line{record.number}-{record.model}-k{record.delay}-Z"
        yield name, sorting_figure(record)
    for directory in directories_with_scores(directories) if sentences else ():
        yield from _paths(directory, sentences, alignments)


def ngram_gain_figures(results: Sequence[Result], baseline: str | None) -> Iterator[Named]:
    """Yield plots of n-gram precision gained over the baseline, for systems that share a delay with it."""
    base = [result for result in results if result.system == baseline and result.precisions]
    for system in dict.fromkeys(result.system for result in results):
        other = [result for result in results if result.system == system and result.precisions]
        if system != baseline and {result.delay for result in base} & {result.delay for result in other}:
            yield f"{results[0].test_set}-gain-{system}-over-{baseline}", ngram_gain_figure(base, other)


def anticipation_rates(records: Sequence[Anticipation]) -> dict[str, tuple[float, ...]]:
    """Return the lines of the anticipation plot by name: plain and scaled rates."""
    plain = {f"{record.corpus}, {record.aligner}": record.rates for record in records}
    scaled = {f"{record.corpus}, {record.aligner}, scaled": record.scaled_rates for record in records}
    return {name: rates for name, rates in {**plain, **scaled}.items() if rates}


def sorting_figure(record: SortedSentence) -> Figure:
    return heat_map_figure(np.array(record.Z), record.columns, record.rows)


def output_figure(output: Output) -> Figure:
    """Return the read/write path of a translation, with links if aligned."""
    links = frozenset(output.links or ())
    return path_figure(ReadWritePath(output.source, output.words, output.delays, links))


def _paths(directory: Path, sentences: Sequence[int], alignments: Path | None) -> Iterator[Named]:
    results = read_results(directory)
    for outputs in read_outputs(directory, results, cache=alignments)[1:]:
        if max(sentences) > len(outputs.sentences):
            raise DataError(f"--sentences {max(sentences)}: {directory} has {len(outputs.sentences)} sentences")
        for number in sentences:
            name = f"{results[0].test_set}-line{number}-{outputs.name}-path"
            yield name, output_figure(outputs.sentences[number - 1])
