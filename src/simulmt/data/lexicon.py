"""Find pairs in which a rare word is mistranslated, with a lexicon from trusted pairs and a dictionary.

Teachers write fluent sentences around rare words that they do not know: of 66 dolphins, one teacher wrote no 海豚. A
student learns such errors well, since they are consistent.

The lexicon has one word a line, with its translations, separated by tabs. Common words are left out, because they are
often translated freely.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from simulmt.config import require
from simulmt.data.alignment import segment_chinese
from simulmt.data.corpus import Pair, ParallelFiles, read_lines
from simulmt.errors import DataError
from simulmt.files import write_atomic
from simulmt.text.words import HAN, guess_language

Translations = Mapping[str, tuple[str, ...]]

COMMON = 0.002  # share of the trusted pairs; words in more pairs are not checked
MIN_OCCURRENCES = 3  # in trusted pairs; for rarer words the dictionary decides
MIN_AGREEMENT = 0.75  # share of its trusted pairs in which a word is translated as in the lexicon
# Two words that occur together this often are translations of each other.
MIN_DICE = 0.08
MIN_RATIO = 15.0  # of their joint to their expected frequency

_WORD = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*")
_HAN_WORD = re.compile(rf"[{HAN}]+")
# Endings of words by language, and what replaces them in the dictionary.
_ENDINGS = {
    "en": (
        ("'s", ""),
        ("ies", "y"),
        ("es", ""),
        ("s", ""),
        ("ied", "y"),
        ("ed", ""),
        ("ed", "e"),
        ("ing", ""),
        ("ing", "e"),
    ),
    "de": (("s", ""), ("es", ""), ("e", ""), ("er", ""), ("en", ""), ("en", "e"), ("n", ""), ("em", "")),
}
_MIN_STEM = 3


class Lexicon:
    """Accepted translations of words."""

    def __init__(self, translations: Translations) -> None:
        self.translations = translations

    @staticmethod
    def read(path: Path) -> Lexicon:
        """Read a file written by `write_lexicon`."""
        table = {}
        for number, line in enumerate(read_lines(path), start=1):
            word, *translations = line.split("\t")
            if not word or not all(translations) or not translations:
                raise DataError(f"{path}, line {number}: expected a word and its translations, separated by tabs")
            table[word] = tuple(translations)
        return Lexicon(table)

    def mistranslated(self, source: str, target: str) -> str | None:
        """Return a word of the source of which the target has no translation, if any."""
        target = target.lower()
        for word in _words(source):
            translations = self.translations.get(word)
            if translations and not any(each in target for each in translations):
                return word
        return None


def write_lexicon(source: Path, target: Path, dictionary: Iterable[tuple[str, str]], output: Path) -> int:
    """Write a lexicon from trusted pairs and the entries of a dictionary, and return its number of words."""
    require(not output.exists(), f"{output}: exists; choose another --output or delete it")
    known = defaultdict(set)
    for word, translation in dictionary:
        known[word.lower()].add(translation.lower())
    language = guess_language(read_lines(source))
    lexicon = build_lexicon(list(ParallelFiles(source, target).pairs()), known, language)
    lines = ("\t".join([word, *sorted(lexicon[word])]) for word in sorted(lexicon))
    write_atomic(output, "".join(f"{line}\n" for line in lines))
    return len(lexicon)


def build_lexicon(pairs: Sequence[Pair], dictionary: Mapping[str, set[str]], language: str) -> Translations:
    """Return the translations of words that trusted pairs translate consistently, or that only the dictionary has.

    `language` is that of the source.
    """
    found, occurrences = _associated(pairs)
    words = {*found, *occurrences, *dictionary}
    merged = {word: _merge([word, *word.split("-"), *_stems(word, language)], found, dictionary) for word in words}
    agreeing = Counter(
        word
        for pair in pairs
        for word in _words(pair.source)
        if any(each in pair.target.lower() for each in merged[word])
    )
    return {
        word: tuple(merged[word])
        for word in words
        if merged[word]
        and occurrences[word] <= COMMON * len(pairs)
        and (occurrences[word] < MIN_OCCURRENCES or agreeing[word] >= MIN_AGREEMENT * occurrences[word])
    }


def _associated(pairs: Sequence[Pair]) -> tuple[Mapping[str, set[str]], Counter[str]]:
    """Return the target words that occur with each source word, and how many pairs have each source word."""
    sources, targets = Counter[str](), Counter[str]()
    joint = Counter[tuple[str, str]]()
    for pair, target in zip(pairs, _target_words(pair.target for pair in pairs), strict=True):
        own = _words(pair.source)
        sources.update(own)
        targets.update(target)
        joint.update((word, other) for word in own for other in target)
    found = defaultdict(set)
    for (word, other), count in joint.items():
        dice = 2 * count / (sources[word] + targets[other])
        ratio = count * len(pairs) / (sources[word] * targets[other])
        if count > 1 and dice >= MIN_DICE and ratio >= MIN_RATIO:
            found[word].add(other)
    return found, sources


def _merge(forms: Iterable[str], *tables: Mapping[str, set[str]]) -> set[str]:
    """Return the translations of all forms of a word."""
    return {each for form in forms for table in tables for each in table.get(form, ())}


def _stems(word: str, language: str) -> Iterator[str]:
    for ending, replacement in _ENDINGS.get(language, ()):
        if word.endswith(ending) and len(word) >= len(ending) + _MIN_STEM:
            stem = word[: len(word) - len(ending)]
            yield stem + replacement
            if len(stem) > _MIN_STEM and stem[-1] == stem[-2]:  # stopped, running
                yield stem[:-1]


def _words(text: str) -> set[str]:
    return set(_WORD.findall(text.lower().replace("’", "'")))


def _target_words(targets: Iterable[str]) -> Iterator[set[str]]:
    """Return the words of each target; Chinese is segmented."""
    for text in targets:
        if _HAN_WORD.search(text):
            yield {word for word in next(segment_chinese([text])) if _HAN_WORD.fullmatch(word)}
        else:
            yield _words(text)
