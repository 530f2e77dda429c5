"""Translation quality: BLEU and chrF2 with intervals, significance against a baseline, and error counts.

Scores are computed by sacrebleu, lower-cased (customary in simultaneous translation) and cased. BLEU uses the tokenizer
`zh` if the references are mostly written without spaces, else `13a`. An empty line in one of several reference files
means a missing reference. Systems are compared by paired bootstrap, per delay.

Four kinds of errors are counted. Repeated and unknown words are typical of models that predict frames independently,
and need no reference. Lost numbers and negations do: a number of the source counts if it also occurs in a reference, by
value; a negation, if all references have one. Negations are found by word lists.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.significance import PairedTest

from simulmt.data.corpus import read_lines
from simulmt.errors import DataError
from simulmt.eval.results import Interval, Result, check_baseline, read_all, read_instances, read_results
from simulmt.text.numbers import Number, find_numbers, unmatched
from simulmt.text.words import HAN, KANA, Unit, guess_language, script_unit

_RESAMPLES = 1000  # of a bootstrap; sacrebleu draws them with seed 12345
_TOKENIZERS: Mapping[Unit, str] = {"word": "13a", "char": "zh"}
SIGNIFICANT = 0.05
COMPARISON_HEADINGS = ("test set", "k", "system", "BLEU", "gain", "p", "chrF2", "gain", "p", "AL")
_REPEATED = re.compile(rf"(?=([{HAN}]{{1,2}})\1)")  # overlaps count, so three in a row count twice
_WORD = re.compile(rf"[^\W\d_{KANA}{HAN}]+(?:['’-][^\W\d_{KANA}{HAN}]+)*")


@dataclass(frozen=True)
class Score:
    """A score in 0..100, its 95% bootstrap interval, and its signature."""

    value: float
    interval: Interval
    signature: str


@dataclass(frozen=True)
class Quality:
    """BLEU, BLEU_cased, chrF2 and chrF2_cased, and the components of lower-cased BLEU."""

    scores: dict[str, Score]
    precisions: tuple[float, ...]  # of 1-grams to 4-grams, in percent
    brevity_penalty: float


@dataclass(frozen=True)
class Difference:
    """Difference from a baseline by paired bootstrap; `p` is two-sided."""

    system: float
    baseline: float
    p: float
    signature: str

    @property
    def gain(self) -> float:
        return self.system - self.baseline


class QualityScorer:
    """Scores systems against the same references, given as one sequence per reference file.

    `unit` is that of the references' script; the unit of delays may differ.
    """

    def __init__(self, references: Sequence[Sequence[str]]) -> None:
        self._sentences = len(references[0])
        present: Any = _mark_missing(references)
        self.unit = script_unit(chain.from_iterable(zip(*references, strict=True)))
        tokenizer = _TOKENIZERS[self.unit]
        self._metrics: dict[str, Any] = {
            "BLEU": BLEU(lowercase=True, tokenize=tokenizer, references=present, force=True),
            "BLEU_cased": BLEU(tokenize=tokenizer, references=present, force=True),
            "chrF2": CHRF(lowercase=True, references=present),
            "chrF2_cased": CHRF(references=present),
        }

    def score(self, hypotheses: Sequence[str]) -> Quality:
        """Score one system."""
        self._check(hypotheses)
        scores = {name: _score(metric, hypotheses) for name, metric in self._metrics.items()}
        bleu = self._metrics["BLEU"].corpus_score(hypotheses, None)
        return Quality(scores, tuple(bleu.precisions), bleu.bp)

    def compare(self, baseline: Sequence[str], system: Sequence[str]) -> dict[str, Difference]:
        """Compare a system with a baseline in lower-cased BLEU and chrF2."""
        self._check(baseline)
        self._check(system)
        return {name: _difference(self._metrics[name], baseline, system) for name in ("BLEU", "chrF2")}

    def _check(self, hypotheses: Sequence[str]) -> None:
        if len(hypotheses) != self._sentences:
            raise DataError(f"expected {self._sentences} hypotheses, one per reference, got {len(hypotheses)}")


def _mark_missing(references: Sequence[Sequence[str]]) -> list[list[str | None]]:
    """Replace missing references with None, as sacrebleu expects; keep one empty reference if all are missing."""
    lengths = {len(lines) for lines in references}
    if len(lengths) > 1:
        raise DataError(
            f"reference files have {' and '.join(map(str, sorted(lengths)))} lines; expected the same number in each"
        )
    rows = []
    for row in zip(*references, strict=True):
        present = [line if line.strip() else None for line in row]
        rows.append(present if any(present) else ["", *[None] * (len(row) - 1)])
    return [list(column) for column in zip(*rows, strict=True)]


def _score(metric: Any, hypotheses: Sequence[str]) -> Score:
    # Not `metric.corpus_score(..., n_bootstrap)`: that fails as soon as a resample has no match at all.
    (result,), signature = _bootstrap(metric, [hypotheses])
    # sacrebleu gives the interval as mean and width, which may exceed 0..100 on a few sentences.
    interval = (max(0.0, float(result.mean - result.ci)), min(100.0, float(result.mean + result.ci)))
    return Score(float(result.score), interval, signature)


def _difference(metric: Any, baseline: Sequence[str], system: Sequence[str]) -> Difference:
    (base, result), signature = _bootstrap(metric, [baseline, system])
    # For identical outputs sacrebleu reports a significant difference, since no resample differs.
    p = 1.0 if list(baseline) == list(system) else float(result.p_value)
    return Difference(float(result.score), float(base.score), p, signature)


def _bootstrap(metric: Any, systems: Sequence[Sequence[str]]) -> tuple[list[Any], str]:
    """Run sacrebleu's paired bootstrap; the first system is the baseline. Return results and signature."""
    named: list[Any] = [(str(number), list(hypotheses)) for number, hypotheses in enumerate(systems)]
    test: Any = PairedTest(named, {"metric": metric}, None, test_type="bs", n_samples=_RESAMPLES)
    (signature,), (_, results) = (found.values() for found in test())
    return results, str(signature)


@dataclass(frozen=True)
class Comparison:
    """A system compared with the baseline at the same delay; the baseline itself has no difference."""

    result: Result
    BLEU: Difference | None = None
    chrF2: Difference | None = None  # noqa: N815

    def cells(self) -> list[str]:
        """Return the table cells for COMPARISON_HEADINGS."""
        result = self.result
        BLEU, chrF2 = _cells(result.BLEU, self.BLEU), _cells(result.chrF2, self.chrF2)
        return [result.test_set, result.delay_name, result.system, *BLEU, *chrF2, f"{result.AL:.2f}"]


@dataclass(frozen=True)
class _Entry:
    """A result and its directory."""

    result: Result
    directory: Path

    @cached_property
    def hypotheses(self) -> list[str]:
        return list(read_lines(self.directory / f"{self.result.name}.hyp"))

    @cached_property
    def references(self) -> list[list[str]]:
        rows = [instance.references for instance in read_instances(self.directory / self.result.name)]
        return [list(column) for column in zip(*rows, strict=True)]


def compare(directories: Sequence[Path], baseline: str | None = None) -> list[Comparison]:
    """Compare every system with the baseline (default: the first system) at each shared delay.

    A full-sentence baseline is compared with systems at any delay.
    """
    systems = check_baseline(baseline, read_all(directories))
    entries = [_Entry(result, directory) for directory in directories for result in read_results(directory)]
    baseline = baseline or systems[0]
    comparisons = []
    for base in (entry for entry in entries if entry.result.system == baseline):
        same = [entry for entry in entries if entry.result.test_set == base.result.test_set]
        others = [entry for entry in same if entry.result.system != baseline]
        shared = [entry for entry in others if base.result.delay in (entry.result.delay, None)]
        comparisons += [Comparison(base.result), *_compare_with(shared, base)]
    if all(comparison.BLEU is None for comparison in comparisons):
        raise DataError(f"no other system shares a test set and a delay with the baseline {baseline}")
    return comparisons


def comparison_markdown(comparisons: Sequence[Comparison]) -> str:
    """Format comparisons as a Markdown table with signatures."""
    rows = [
        COMPARISON_HEADINGS,
        tuple("---" for _ in COMPARISON_HEADINGS),
        *(comparison.cells() for comparison in comparisons),
    ]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"{table}\n\n" + "\n".join(f"- {line}" for line in comparison_signatures(comparisons)) + "\n"


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as a JSON object."""
    result = comparison.result
    return {
        "test_set": result.test_set,
        "system": result.system,
        "delay": result.delay,
        "AL": result.AL,
        "BLEU": _difference_table(result.BLEU, comparison.BLEU),
        "chrF2": _difference_table(result.chrF2, comparison.chrF2),
    }


def comparison_signatures(comparisons: Sequence[Comparison]) -> list[str]:
    """Return the distinct signatures of all scores."""
    found = [
        f"{name}: {difference.signature}"
        for comparison in comparisons
        for name, difference in (("BLEU", comparison.BLEU), ("chrF2", comparison.chrF2))
        if difference is not None
    ]
    return list(dict.fromkeys(found))


def _compare_with(systems: Sequence[_Entry], base: _Entry) -> Iterator[Comparison]:
    if not systems:
        return
    scorer = QualityScorer(base.references)
    for system in systems:
        if (system.references, system.result.unit) != (base.references, base.result.unit):
            raise DataError(
                f"{system.directory / system.result.name} and {base.directory / base.result.name} "
                "were scored with different references or units; evaluate both again with the same"
            )
        yield Comparison(system.result, **scorer.compare(base.hypotheses, system.hypotheses))


def _cells(score: float | None, difference: Difference | None) -> tuple[str, str, str]:
    shown = "" if score is None else f"{score:.2f}"
    if difference is None:
        return shown, "", ""
    star = "*" if difference.p < SIGNIFICANT else ""
    return shown, f"{difference.gain:+.2f}", f"{difference.p:.3f}{star}"


def _difference_table(score: float | None, difference: Difference | None) -> dict[str, Any]:
    if difference is None:
        return {"score": score}
    names = ("baseline", "gain", "p", "signature")
    return {"score": score, **{name: getattr(difference, name) for name in names}}


def repeated_words(text: str, unit: Unit) -> int:
    """Count words that occur twice in a row; in text counted in characters, one or two ideographs."""
    if unit == "char":
        return len(_REPEATED.findall(text))
    return sum(one == other and one.isalpha() for one, other in pairwise(text.lower().split()))


def words_of(text: str) -> list[str]:
    """Return the lower-cased alphabetic words, without numbers, punctuation and ideographs."""
    return _WORD.findall(text.lower())


class Lexicon:
    """A vocabulary of full words, to find words that subword models made up."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._words = {word for line in lines for word in words_of(line)}

    def unknown(self, translation: str, source: str) -> list[str]:
        """Return the words of a translation that are neither in the lexicon nor in its source."""
        copied = words_of(source)
        return [word for word in words_of(translation) if word not in self._words and word not in copied]


class Facts(NamedTuple):
    """Numbers and negation that the translation of a sentence must preserve."""

    numbers: tuple[Number, ...]
    negated: bool


class FactChecker:
    """Counts the facts of a test set that translations preserve; languages are guessed from the text."""

    def __init__(self, sources: Sequence[str], references: Sequence[Sequence[str]]) -> None:
        self._languages = guess_language(sources), guess_language(references[0])
        self.facts = [self._find(source, lines) for source, *lines in zip(sources, *references, strict=True)]

    def lost(self, index: int, translation: str) -> tuple[int, bool]:
        """Return how many numbers the translation of a sentence lacks, and whether it lacks a negation."""
        (numbers, negated), language = self.facts[index], self._languages[1]
        missing = unmatched(numbers, find_numbers(translation, language))
        return len(missing), negated and not may_be_negated(translation, language)

    def count(self, translations: Sequence[str]) -> dict[str, int]:
        """Count numbers and negations, and how many are kept, by field of `Result`."""
        lost = [self.lost(index, text) for index, text in enumerate(translations)]
        numbers = sum(len(facts.numbers) for facts in self.facts)
        negations = sum(facts.negated for facts in self.facts)
        return {
            "numbers": numbers,
            "numbers_kept": numbers - sum(count for count, _ in lost),
            "negations": negations,
            "negations_kept": negations - sum(negation for _, negation in lost),
        }

    def _find(self, source: str, references: Sequence[str]) -> Facts:
        """Return the facts of a sentence that its references preserve; empty references are skipped."""
        language, target = self._languages
        given = [reference for reference in references if reference.strip()]
        numbers = find_numbers(source, language)
        lost = unmatched(numbers, [number for reference in given for number in find_numbers(reference, target)])
        kept = tuple(number for number in numbers if number.is_certain and number not in lost)
        negated = is_negated(source, language) and all(is_negated(each, target) for each in given)
        return Facts(kept, negated and bool(given))


def listing(
    sources: Sequence[str], hypotheses: Mapping[str, Sequence[str]], references: Sequence[Sequence[str]]
) -> Iterator[str]:
    """Yield each sentence with its translations and references below it; lost numbers and negations are marked."""
    checker = FactChecker(sources, references)
    width = max(map(len, (*hypotheses, "reference")))
    for index, source in enumerate(sources):
        yield f"{index + 1:>4}  {source}"
        for name, translations in hypotheses.items():
            number, negation = checker.lost(index, translations[index])
            losses = ["number lost"] * bool(number) + ["negation lost"] * negation
            mark = f"   <-- {', '.join(losses)}" if losses else ""
            yield f"      {name:<{width}}  {translations[index]}{mark}"
        for lines in references:
            if lines[index].strip():
                yield f"      {'reference':<{width}}  {lines[index]}"
        yield ""


class _Markers(NamedTuple):
    """Negation words, idioms that contain one but do not negate, and indirect negations (unable, 难以)."""

    plain: re.Pattern[str]
    apparent: re.Pattern[str]
    indirect: re.Pattern[str]


_MARKERS = {
    "en": _Markers(
        plain=re.compile(
            r"\b(?:not|never|no|none|nobody|nothing|nowhere|neither|nor|cannot|without|no-one)\b|n['’]t\b"
            r"|\b(?:dont|doesnt|didnt|isnt|arent|wasnt|werent|cant|wont|couldnt|shouldnt|wouldnt|havent|hasnt)\b"
        ),
        apparent=re.compile(
            r"\bnot (?:only|just|until|least)\b|\bor not\b|\bno (?:doubt|matter|later|longer than|less|fewer|sooner)\b"
            r"|\bnothing but\b|\bwhy (?:not|don['’]t (?:you|we))\b|\bnever ?mind\b|\bno\.(?= ?\d)|^no(?=[,.!])"
            r"|, \w+n['’]t (?:it|you|he|she|we|they|i|there)\?"
        ),
        indirect=re.compile(
            r"\b(?:unable|unlikely|unsafe|unclear|unknown|unnecessary|unsuitable|unaware|impossible|incapable|hardly|barely"
            r"|fail\w*|lack\w*|refus\w*|out of)\b"
        ),
    ),
    "de": _Markers(
        plain=re.compile(
            r"\b(?:nicht|nie|niemals|nichts|niemand\w{0,2}|kein\w{0,2}|keinesfalls|weder|nirgend\w*|ohne)\b"
        ),
        apparent=re.compile(
            r"\bnicht (?:nur|zuletzt)\b|\boder nicht\b|\bwarum nicht\b|\bohne(?:hin| weiteres)\b|, nicht wahr"
        ),
        indirect=re.compile(r"\b(?:un(?:möglich|fähig|klar|bekannt|nötig)|kaum|fehl\w*|verweiger\w*|weiger\w*)\b"),
    ),
    "zh": _Markers(
        plain=re.compile(
            r"[不没無无未莫勿]|非(?![洲常])|(?:^|[，。！？；、请你您们就也都可万])别(?![人的墅名])|别[忘再担着怕让把动碰哭走跑太管想急]"
        ),
        apparent=re.compile(
            r"(.)[不没]\1|有没有|不[同错久断过仅但只管论少禁单止免足]|不到(?=[\d一二三四五六七八九十半])|无论|无疑|不好意思|对不起|差不多|了不起|(?<!从)未来|未必不|说不定"
            r"|不得不|不由得|不客气|没关系|毫不|无非|不是吗|好不好|要不然|要不是"
        ),
        indirect=re.compile(r"难以|很难|禁止|拒绝|缺乏|缺少|以免|避免|否认"),
    ),
}


def is_negated(text: str, language: str) -> bool:
    """Return whether a sentence contains a negation word; always False for languages other than en, de and zh."""
    if language not in _MARKERS:
        return False
    markers = _MARKERS[language]
    return markers.plain.search(markers.apparent.sub(" ", text.casefold())) is not None


def may_be_negated(text: str, language: str) -> bool:
    """Return whether a sentence contains a negation word or an indirect negation (unable, 难以)."""
    if language not in _MARKERS:
        return False
    return is_negated(text, language) or _MARKERS[language].indirect.search(text.casefold()) is not None
