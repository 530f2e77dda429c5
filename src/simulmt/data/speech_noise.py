"""Add recognition noise to training text: disfluencies, misheard words, spelled numbers, no punctuation.

    noise = SpeechNoise("en")
    noise.apply("In 1990 I didn't know the way.", random.Random(1))

The rates are modelled on the errors of a small recogniser on synthetic speech, at about a tenth of its error rate. A
quarter of its substitutions were function words, one in sixteen a lost plural, most others similar-sounding words.
Numbers and negations are never changed.
"""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from typing import Literal
from unicodedata import normalize

from simulmt.text.numbers import EN_MULTIPLIERS, EN_ONES, EN_TENS
from simulmt.text.words import combining_marks

Language = Literal["en"]
Event = Callable[[str, random.Random], Sequence[str]]  # maps a word to the recognised words

FILLERS = ("uh", "um", "uh", "um", "er", "ah")
INSERTED = ("and", "the", "to", "a", "of", "it", "in")
DROPPED = frozenset({"the", "a", "an", "of", "that", "have", "as", "to", "at"})
NEGATIONS = frozenset({"no", "not", "nor", "none", "never", "nothing", "nobody", "nowhere", "neither", "without"})
CUT_OFF = 3  # letters that a broken-off word keeps

_ONES = ("zero", *EN_ONES)
_TENS = ("", "", *EN_TENS)
_ORDINALS = {
    "one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth", "nine": "ninth",
    "twelve": "twelfth",
}  # fmt: skip
_COUNTING = frozenset(
    (*_ONES, *_TENS[2:], *EN_MULTIPLIERS, *_ORDINALS.values(), "half", "quarter", "once", "twice", "dozen")
)
_WORD_TO_NUMBER = {word: number for number, word in enumerate(_ONES) if number >= 10} | {
    f"{tens}-{ones}" if ones != "zero" else tens: 10 * ten + one
    for ten, tens in enumerate(_TENS)
    if tens
    for one, ones in enumerate(_ONES[:10])
}

_NUMBER = re.compile(r"(\$?)(\d{1,3}(?:,\d{3})+|\d+)(?:(\.)(\d+)|(:)(\d\d))?(%|st|nd|rd|th|s)?(?=[^\w%]*\Z)")
_DIGIT = re.compile(r"\d")
_CORE = re.compile(r"\A(\W*)(.*?)(\W*)\Z", re.DOTALL)
_PLURAL = re.compile(r"[a-z]{3,}[^siu']s\Z")

_MARKS = combining_marks()  # part of words, but not matched by \w
_IN_WORD = rf"[\w{_MARKS}]"
_NOT_SPOKEN = re.compile(
    rf"(?<!{_IN_WORD})['’-]|['’-](?!{_IN_WORD})|(?<!\d)[.,:]|[.,:](?!\d)|[^\w{_MARKS}\s%$€£+'’.,:-]|_"
)


def unpunctuated(text: str) -> str:
    """Lower-case a text and remove punctuation, except inside words and numbers: don't, well-known, 3.5, 50%."""
    return " ".join(_NOT_SPOKEN.sub(" ", normalize("NFC", text).lower()).split())


@dataclass(frozen=True)
class NoiseRates:
    """Probabilities; the last three are per sentence, the others per word."""

    filler: float = 0.015  # preceded by "uh"
    repeat: float = 0.008  # spoken twice
    cut_off: float = 0.003  # broken off and repeated
    misheard: float = 0.02  # replaced by a similar-sounding word
    lost_plural: float = 0.004
    dropped: float = 0.01  # of the short words in DROPPED only
    inserted: float = 0.002
    restart: float = 0.03  # the first two or three words spoken twice
    spelled: float = 0.6  # digits to number words; otherwise, with the same probability, number words to digits
    unpunctuated: float = 0.7  # neither punctuation nor capitals


class SpeechNoise:
    """Rewrites sentences as a speech recogniser might output them."""

    def __init__(
        self,
        language: Language = "en",
        rates: NoiseRates | None = None,
        misheard: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self._rates = rates = rates or NoiseRates()
        self._misheard = misheard_words(language) if misheard is None else misheard
        self._events: Sequence[tuple[float, Event]] = (
            (rates.filler, lambda word, rng: (rng.choice(FILLERS), word)),
            (rates.repeat, lambda word, _: (_strip_punctuation(word), word)),
            (rates.cut_off, lambda word, _: (word[:CUT_OFF], word) if _can_break_off(word) else (word,)),
            (rates.misheard, self._misheard_as),
            (rates.lost_plural, lambda word, _: (word[:-1] if _PLURAL.match(word) else word,)),
            (rates.dropped, lambda word, _: () if word in DROPPED else (word,)),
            (rates.inserted, lambda word, rng: (rng.choice(INSERTED), word)),
        )
        self._any_event = sum(rate for rate, _ in self._events)

    def apply(self, text: str, rng: random.Random) -> str:
        """Add noise drawn from `rng`."""
        words = text.split()
        if rng.random() < self._rates.spelled:
            words = _spell_numbers(words)
        elif rng.random() < self._rates.spelled:
            words = list(map(_as_digits, words))
        spoken = _false_start(words, rng) if rng.random() < self._rates.restart else []
        for word in words:
            draw = rng.random()
            if draw < self._any_event and not _is_protected(word):
                spoken += self._event(draw)(word, rng)
            else:
                spoken.append(word)
        noisy = " ".join(spoken)
        return unpunctuated(noisy) if rng.random() < self._rates.unpunctuated else noisy

    def _event(self, draw: float) -> Event:
        """Return the event for a random number below the sum of all rates."""
        for rate, event in self._events:
            if draw < rate:
                return event
            draw -= rate
        return self._events[-1][1]  # rounding

    def _misheard_as(self, word: str, rng: random.Random) -> Sequence[str]:
        matched = _CORE.match(word)
        assert matched is not None  # it matches any text
        before, core, after = matched.groups()
        others = self._misheard.get(core.lower())
        if others is None:
            return (word,)
        other = rng.choice(others)
        return (f"{before}{other.capitalize() if core[:1].isupper() else other}{after}",)


def _can_break_off(word: str) -> bool:
    return len(word) > CUT_OFF + 2 and word.isalpha()


def _false_start(words: Sequence[str], rng: random.Random) -> list[str]:
    """Return the first words of a sentence, which the speaker then repeats."""
    start = words[: rng.randint(2, 3)]
    return [] if len(words) < 5 or any(map(_is_protected, start)) else list(map(_strip_punctuation, start))


@cache
def misheard_words(language: Language) -> Mapping[str, Sequence[str]]:
    """Return similar-sounding words for common words."""
    lines = Path(__file__).with_name(f"misheard.{language}.tsv").read_text(encoding="utf-8").splitlines()
    return {word: others.split() for word, others in (line.split("\t") for line in lines)}


def learn_misheard(pairs: Iterable[tuple[str, str]]) -> Mapping[str, Sequence[str]]:
    """Learn a confusion table from pairs of reference and recognised text.

    It maps a word to those recognised in its place at least twice, each listed as often as it occurred. Numbers
    and negations are excluded.
    """
    counts: Counter[tuple[str, str]] = Counter()
    for said, heard in pairs:
        words, others = unpunctuated(said).split(), unpunctuated(heard).split()
        for kind, start, end, other_start, other_end in SequenceMatcher(None, words, others, False).get_opcodes():
            if kind == "replace" and end - start == other_end - other_start:
                counts.update(zip(words[start:end], others[other_start:other_end], strict=True))
    learnt: defaultdict[str, list[str]] = defaultdict(list)
    for (word, other), count in sorted(counts.items()):
        if count >= 2 and not _is_protected(word) and not _is_protected(other):
            learnt[word] += count * [other]
    return learnt


def spell_number(number: int) -> str:
    """Spell a whole number below a trillion in English."""
    if number < 20:
        return _ONES[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return _TENS[tens] + (f" {_ONES[ones]}" if ones else "")
    scale, size = next(each for each in reversed(EN_MULTIPLIERS.items()) if number >= each[1])
    count, rest = divmod(number, size)
    return f"{spell_number(count)} {scale}" + (f" {spell_number(rest)}" if rest else "")


def spell_year(year: int) -> str:
    """Spell a year: nineteen ninety, two thousand five, twenty ten."""
    century, rest = divmod(year, 100)
    if not 11 <= century <= 20 or (century == 20 and rest < 10):
        return spell_number(year)
    if rest == 0:
        return f"{spell_number(century)} hundred"
    return f"{spell_number(century)} {'oh ' if rest < 10 else ''}{spell_number(rest)}"


def _spell_numbers(words: Sequence[str]) -> list[str]:
    """Spell out the numbers, except in "$5 million", where the order of words would change."""
    spelled: list[str] = []
    for word, following in zip(words, (*words[1:], ""), strict=False):
        is_scaled = word[0] == "$" and following.rstrip(".,;:!?").lower() in EN_MULTIPLIERS
        spelled += _spelled(word).split() if _DIGIT.search(word) and not is_scaled else [word]
    return spelled


def _spelled(word: str) -> str:
    """Spell a word that is a number; return ambiguous ones and other words unchanged."""
    found = _NUMBER.search(word)
    if found is None or word[: found.start()].strip("(\"'“‘"):
        return word
    spelled = _read_aloud(*found.groups())
    return word if spelled is None else word[: found.start()] + spelled + word[found.end() :]


def _read_aloud(
    dollar: str, digits: str, point: str, decimals: str, colon: str, minutes: str, suffix: str | None
) -> str | None:
    """Spell the groups of `_NUMBER` in words; return None if the reading is ambiguous."""
    number = int(digits.replace(",", ""))
    is_plain = "," not in digits
    if (is_plain and len(digits) > 1 and digits[0] == "0") or number >= 10**12 or (dollar and (point or suffix)):
        return None
    if colon:
        return None if suffix or dollar or number > 24 else _clock(number, int(minutes))
    if point:
        ending = {None: "", "%": " percent"}.get(suffix)
        fraction = " ".join(_ONES[int(digit)] for digit in decimals)
        return None if ending is None else f"{spell_number(number)} point {fraction}{ending}"
    if suffix in ("st", "nd", "rd", "th"):
        return _ordinal(spell_number(number))
    if suffix == "s":
        return _plural(spell_year(number)) if is_plain and len(digits) == 4 and number % 10 == 0 else None
    is_year = is_plain and len(digits) == 4 and 1100 <= number < 2100 and not dollar and not suffix
    spelled = spell_year(number) if is_year else spell_number(number)
    return spelled + (" dollars" if dollar else " percent" if suffix == "%" else "")


def _clock(hour: int, minute: int) -> str:
    past = "" if minute == 0 else f" {'oh ' if minute < 10 else ''}{spell_number(minute)}"
    return spell_number(hour) + past


def _ordinal(spelled: str) -> str:
    head, _, last = spelled.rpartition(" ")
    last = _ORDINALS.get(last) or (f"{last[:-1]}ieth" if last.endswith("y") else f"{last}th")
    return f"{head} {last}".strip()


def _plural(spelled: str) -> str:
    return f"{spelled[:-1]}ies" if spelled.endswith("y") else f"{spelled}s"


def _as_digits(word: str) -> str:
    """Write number words from ten to ninety-nine in digits; return other words unchanged."""
    number = _WORD_TO_NUMBER.get(word.lower())
    return word if number is None else str(number)


def _is_protected(word: str) -> bool:
    """Return whether a word is a number or a negation."""
    core = word.strip(".,;:!?\"'()“”‘’").lower()
    return (
        core in NEGATIONS
        or core.endswith(("n't", "n’t", "nnot"))
        or _DIGIT.search(core) is not None
        or any(part.removesuffix("s") in _COUNTING for part in core.split("-"))
    )


def _strip_punctuation(word: str) -> str:
    """Strip trailing punctuation."""
    return word.rstrip(".,;:!?…") or word
