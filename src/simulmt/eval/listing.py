"""Sentences with their translations and references one below the other, for a reader who knows both languages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from simulmt.eval.facts import FactChecker

REFERENCE = "reference"


def listing(
    sources: Sequence[str], hypotheses: Mapping[str, Sequence[str]], references: Sequence[Sequence[str]]
) -> Iterator[str]:
    """The lines of a listing; a translation that lost a number or a negation is marked."""
    checker = FactChecker(sources, references)
    width = max(map(len, (*hypotheses, REFERENCE)))
    for index, source in enumerate(sources):
        yield f"{index + 1:>4}  {source}"
        for name, translations in hypotheses.items():
            losses = checker.losses(index, translations[index])
            mark = f"   <-- {', '.join(losses)}" if losses else ""
            yield f"      {name:<{width}}  {translations[index]}{mark}"
        for lines in references:
            if lines[index].strip():
                yield f"      {REFERENCE:<{width}}  {lines[index]}"
        yield ""
