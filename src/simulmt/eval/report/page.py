"""Build the report on results directories, as one HTML page and as Markdown.

The HTML page is self-contained; the Markdown has the tables only. Both are deterministic functions of the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup

from simulmt.config import require
from simulmt.errors import ConfigError, DataError
from simulmt.eval.order import Anticipation, OracleScore, SortedSentence, directories_with_scores
from simulmt.eval.quality import SIGNIFICANT, Comparison, compare
from simulmt.eval.report import blocks, plots
from simulmt.eval.report.blocks import (
    Aligner,
    Block,
    Details,
    Example,
    Figures,
    Heading,
    List,
    Note,
    Output,
    Outputs,
    Paragraph,
    Picture,
    read_outputs,
)
from simulmt.eval.results import Result, check_baseline, read_all, read_records, read_results
from simulmt.eval.run import evenly_spaced

DEFAULT_DELAY = 3  # of the examples, if most systems have it
MAX_PATH_WORDS = 45  # longer read/write paths are unreadable
UNITS = {"word": "words", "char": "characters"}


@dataclass(frozen=True)
class ReportOptions:
    """Title and contents of the report."""

    title: str = "Simultaneous translation: quality and latency"
    about: tuple[str, ...] = ()  # introductory paragraphs
    baseline: str | None = None  # system to compare with
    examples: int = 5  # number of example sentences, evenly spaced in the test set
    sentences: tuple[int, ...] = ()  # example sentences by line number, instead
    delay: int | None = None  # of the examples

    def __post_init__(self) -> None:
        require(self.examples >= 0, f"examples must be 0 or more, got {self.examples}")
        require(all(number >= 1 for number in self.sentences), f"sentences must be lines from 1, got {self.sentences}")


class Report(NamedTuple):
    html: str
    markdown: str


@dataclass(frozen=True)
class _TestSet:
    name: str
    results: list[Result]
    outputs: list[Outputs]  # the references first; results without a log have none
    complete: list[Path]  # directories that have a log of each of their results
    comparisons: list[Comparison]  # with the baseline; none without one


def build_report(
    directories: Sequence[Path],
    options: ReportOptions,
    aligner: Aligner | None = None,
    cache: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Build the report; without an aligner, only cached alignments are used to mark words.

    `progress` is called with what is being done.
    """
    scored = directories_with_scores(directories)
    systems = check_baseline(options.baseline, read_all(scored))
    evaluated = _test_sets(scored, aligner, cache, progress)
    test_sets = [_compared(each, options.baseline, progress) for each in evaluated]
    progress("drawing")
    contents = [
        ("Summary", _summary_blocks(test_sets, options)),
        *((each.name, _test_set_blocks(each, options)) for each in test_sets),
        ("Anticipation", _anticipation_blocks(read_records(Anticipation, directories))),
        ("Oracle order", _oracle_blocks(read_records(OracleScore, directories))),
        ("Sorting matrices Z", _sorting_blocks(read_records(SortedSentence, directories))),
        ("Reproducibility", _provenance_blocks(test_sets)),
    ]
    chapters = [(title, found) for title, parts in contents if (found := list(parts))]
    results = [result for test_set in test_sets for result in test_set.results]
    dates = sorted({result.date[:10] for result in results if result.date})
    html = blocks.render_html(options.title, chapters, systems=systems, dates=dates)
    return Report(html, blocks.render_markdown(options.title, chapters))


def _test_sets(
    directories: Sequence[Path], aligner: Aligner | None, cache: Path | None, progress: Callable[[str], None]
) -> list[_TestSet]:
    by_name: dict[str, _TestSet] = {}
    for directory in directories:
        progress(f"{directory}: {'aligning' if aligner else 'reading'} translations")
        results = read_results(directory)
        outputs = read_outputs(directory, results, aligner, cache)
        for name in dict.fromkeys(result.test_set for result in results):
            test_set = by_name.setdefault(name, _TestSet(name, [], [], [], []))
            test_set.complete.extend([directory] if len(outputs) > len(results) else [])
            test_set.results.extend(result for result in results if result.test_set == name)
            test_set.outputs.extend(outputs[bool(test_set.outputs) :])  # one set of references is enough
    return list(by_name.values())


def _compared(test_set: _TestSet, baseline: str | None, progress: Callable[[str], None]) -> _TestSet:
    """Return the test set with comparisons to the baseline at shared delays."""
    entries = [result for directory in test_set.complete for result in read_results(directory)]
    base = {result.delay for result in entries if result.system == baseline}
    if not any(result.system != baseline and base & {result.delay, None} for result in entries):
        return test_set
    progress(f"{test_set.name}: testing differences from {baseline} for significance")
    return replace(test_set, comparisons=compare(test_set.complete, baseline))


def _summary_blocks(test_sets: Sequence[_TestSet], options: ReportOptions) -> Iterator[Block]:
    """Yield the introduction, and the gains over the baseline per delay."""
    yield from map(Paragraph, options.about)
    lines = [line for test_set in test_sets for line in _gains(test_set.comparisons)]
    if lines:
        yield List(lines)
        yield Note(f"BLEU gained or lost against {options.baseline}; * marks p < {SIGNIFICANT}.")


def _gains(comparisons: Sequence[Comparison]) -> Iterator[str]:
    for base in (each.result for each in comparisons if each.BLEU is None):
        gains = [
            (other.BLEU.gain, f"{other.result.name} {other.BLEU.gain:+.1f}{'*' * (other.BLEU.p < SIGNIFICANT)}")
            for other in comparisons
            if other.BLEU and base.delay in (other.result.delay, None)
        ]
        if gains:
            ranked = ", ".join(text for _, text in sorted(gains, reverse=True))
            yield f"{base.test_set}: {base.name} scores {base.BLEU:.1f}; {ranked}"


def _test_set_blocks(test_set: _TestSet, options: ReportOptions) -> Iterator[Block]:
    yield from _overview(test_set.results)
    yield from _significance(test_set.comparisons, options.baseline)
    yield from _quality(test_set.results, options.baseline)
    yield from _indicators(test_set.outputs)
    yield from _examples(test_set, options)


def _overview(results: Sequence[Result]) -> Iterator[Block]:
    sentences = " or ".join(sorted({f"{result.sentences:,}" for result in results if result.sentences}))
    unit = UNITS[results[0].unit]
    text = f"{sentences} sentences. " if sentences else ""
    text += f"AL, LAAL and DAL are in source words; target units are {unit}. "
    text += "Brackets: 95% bootstrap intervals. BLEU and chrF2 are lower-cased."
    yield Paragraph(text)
    caption = (
        "One line per system, one point per delay k; bands are 95% intervals. Dashed lines are full-sentence systems."
    )
    if any(result.AL_CA is not None for result in results):
        caption += (
            " AL-CA assumes 1 ms per source word, so it is close to the time to the first word; "
            "the time per source token in the table is closer to what users notice."
        )
    yield Figures(
        [Picture(plots.inline_svg(plots.quality_latency_figure(results), "Quality against latency"), caption)]
    )
    yield blocks.results_table(results)
    if any(result.paced_lag is not None for result in results):
        rates = sorted({result.words_per_second for result in results if result.words_per_second})
        pace = " or ".join(f"{rate:g}" for rate in rates)
        yield Note(f"Lag: mean seconds behind an ideal interpreter at {pace} source words per second.")
    if found := blocks.signatures(results):
        yield Details("Signatures", found)


def _significance(comparisons: Sequence[Comparison], baseline: str | None) -> Iterator[Block]:
    if not comparisons:
        return
    yield Heading(f"Significance against {baseline}")
    yield Paragraph(f"Paired bootstrap, 1000 resamples, two-sided; * marks p < {SIGNIFICANT}.")
    yield blocks.comparison_table(comparisons)


def _quality(results: Sequence[Result], baseline: str | None) -> Iterator[Block]:
    if not any(result.precisions for result in results):
        return
    yield Heading("Quality in detail")
    yield blocks.quality_table(results)
    figures = [
        Picture(plots.inline_svg(drawn, name), "Gain in n-gram precision, by delay.")
        for name, drawn in plots.ngram_gain_figures(results, baseline)
    ]
    if figures:
        yield Figures(figures)


def _indicators(outputs: Sequence[Outputs]) -> Iterator[Block]:
    aligned = [each for each in outputs if each.is_aligned]
    if not aligned:
        return
    yield Heading("Hallucination and under-translation")
    yield Paragraph(
        "From word alignments. A target word is hallucinated if it is not aligned to a source word that had been read "
        "when it was written. The reference row is the floor: words of the reference that the aligner leaves unaligned."
    )
    yield blocks.indicator_table(aligned)


def _examples(test_set: _TestSet, options: ReportOptions) -> Iterator[Block]:
    if not test_set.outputs or not (options.examples or options.sentences):
        return
    reference, *systems = test_set.outputs
    shown = _at_delay(systems, options.delay)
    if not shown:
        raise ConfigError(f"--delay {options.delay}: no system on {test_set.name} was evaluated at that delay")
    numbers = options.sentences or evenly_spaced(range(1, len(reference.sentences) + 1), options.examples)
    if max(numbers) > len(reference.sentences):
        raise DataError(f"--sentences {max(numbers)}: {test_set.name} has {len(reference.sentences)} sentences")
    yield Heading("Examples")
    how = "hand-picked" if options.sentences else "evenly spaced in the test set, not hand-picked"
    marks = " Marked words are hallucinated." if any(s.is_aligned for s in shown) else ""
    yield Paragraph(f"Sentences are {how}.{marks}")
    for number in numbers:
        yield _example(number, reference, shown)
    yield from _paths(numbers, shown)


def _at_delay(systems: Sequence[Outputs], delay: int | None) -> list[Outputs]:
    """Return each system at the given or most common delay; full-sentence systems always."""
    delays = [outputs.result.delay for outputs in systems if outputs.result and outputs.result.delay]
    if delay is None and delays:
        delay = max(sorted(set(delays)), key=lambda k: (delays.count(k), -abs(k - DEFAULT_DELAY)))
    return [outputs for outputs in systems if outputs.result and outputs.result.delay in (delay, None)]


def _example(number: int, reference: Outputs, systems: Sequence[Outputs]) -> Example:
    source = reference.sentences[number - 1]
    lines = [
        (f"source, line {number}", Markup(escape(" ".join(source.source)))),
        ("reference", _marked(replace(source, links=None))),
        *((outputs.name, _marked(outputs.sentences[number - 1])) for outputs in systems),
    ]
    return Example(lines)


def _marked(output: Output) -> Markup:
    """Return the translation as HTML, with hallucinated words marked."""
    text = ""
    for before, word, mark in zip(["", *output.words], output.words, output.hallucinated, strict=False):
        gap = " " if before and (output.unit == "word" or _needs_gap(before, word)) else ""
        text += gap + (f"<mark>{escape(word)}</mark>" if mark else escape(word))
    return Markup(text.replace("</mark><mark>", "").replace("</mark> <mark>", " ") or "<em>nothing</em>")


def _needs_gap(before: str, after: str) -> bool:
    """Return whether two units of text without spaces are Latin words."""
    return all(letter.isascii() and letter.isalnum() for letter in (before[-1], after[0]))


def _paths(numbers: Sequence[int], systems: Sequence[Outputs]) -> Iterator[Block]:
    drawable = [n for n in numbers if all(_is_drawable(outputs.sentences[n - 1]) for outputs in systems)]
    if not drawable or not systems:
        return
    figures = []
    for outputs in systems:
        output = outputs.sentences[drawable[0] - 1]
        figures.append(Picture(plots.inline_svg(plots.path_figure(output), f"Path of {outputs.name}"), outputs.name))
    note = "Shaded source words had been read when the target word of the row was written."
    yield Figures(figures, f"Read/write path, line {drawable[0]}", note)


def _is_drawable(output: Output) -> bool:
    return 0 < len(output.words) <= MAX_PATH_WORDS and len(output.source) <= MAX_PATH_WORDS


def _anticipation_blocks(records: Sequence[Anticipation]) -> Iterator[Block]:
    if not records:
        return
    yield Paragraph(
        "k-anticipation rate: the share of alignment links whose source word is k or more positions after its target "
        "word. Scaled: target positions are scaled to the source length, so that a shorter target alone does not count "
        "as anticipation. AER: alignment error rate against gold alignments; lower is better."
    )
    drawn = plots.anticipation_figure(records)
    yield Figures([Picture(plots.inline_svg(drawn, "k-anticipation rate over k"), "k-anticipation rate over k.")])
    yield blocks.anticipation_table(records)


def _oracle_blocks(records: Sequence[OracleScore]) -> Iterator[Block]:
    if not records:
        return
    yield Paragraph(
        "Oracle order: the sorting network sees the reference and reorders the states. Default order: the same model "
        "decoded without it, with the same settings. With all mass of Z on the diagonal, nothing is sorted; "
        "displacement is the mean distance that Z moves a source piece."
    )
    for name in dict.fromkeys(record.test_set for record in records):
        of_set = [record for record in records if record.test_set == name]
        yield Heading(name)
        yield blocks.oracle_table(of_set)
        if (sorting := blocks.sorting_table(of_set)).rows:
            yield sorting
    yield Details("Signatures", list(dict.fromkeys(f"BLEU: {record.signature}" for record in records)))


def _sorting_blocks(records: Sequence[SortedSentence]) -> Iterator[Block]:
    for record in records:
        svg = plots.inline_svg(plots.heat_map_figure(record), f"Z of line {record.number}")
        caption = (
            f"Z of {record.test_set}, line {record.number}, by {record.model} at k = {record.delay}. Columns are "
            "source pieces. Rows are output positions, labelled with the target pieces that CTC Viterbi alignment "
            "assigns to their frames (· is a blank)."
        )
        yield Figures([Picture(svg, caption)])


def _provenance_blocks(test_sets: Sequence[_TestSet]) -> Iterator[Block]:
    results = [result for test_set in test_sets for result in test_set.results]
    commands = _distinct(results, lambda result: " ".join(result.command))
    sections = {
        "Commands": commands,
        "Code": _distinct(results, lambda result: f"simulmt at commit {result.commit}" if result.commit else ""),
        "Machines": _distinct(results, lambda result: ", ".join(map(" ".join, result.environment.items()))),
        "Files (SHA-256)": list(
            dict.fromkeys(f"{path}  {digest}" for result in results for path, digest in result.files.items())
        ),
        "Bundles (SHA-256 of the manifest)": _distinct(
            results, lambda result: f"{result.name}  {result.bundle_sha256}" if result.bundle_sha256 else ""
        ),
    }
    yield from (Details(name, lines) for name, lines in sections.items() if lines)


def _distinct(results: Iterable[Result], fact: Callable[[Result], str]) -> list[str]:
    return list(dict.fromkeys(filter(None, map(fact, results))))
