"""Convert English numbers to digits."""

from __future__ import annotations

import re
from fractions import Fraction

from simulmt.text.numbers import (
    DECIMAL,
    VERSION,
    Ambiguous,
    Notation,
    NumberWords,
    Rule,
    any_of,
    format_number,
    with_values,
    words,
)

ONES = words("one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen")
ONES += words("seventeen eighteen nineteen")
TENS = words("twenty thirty forty fifty sixty seventy eighty ninety")
_ORDINALS = words("third fourth fifth sixth seventh eighth ninth tenth")
_TEENTHS = words("eleventh twelfth thirteenth fourteenth fifteenth sixteenth seventeenth eighteenth nineteenth")
_MONTHS = words("january february march april may june july august september october november december")

_VALUES = {
    **{word: value for value, word in enumerate(ONES, start=1)},
    **{word: 10 * value for value, word in enumerate(TENS, start=2)},
    **{word: value for value, word in enumerate(_TEENTHS, start=11)},
    **{f"{word[:-1]}ieth": 10 * value for value, word in enumerate(TENS, start=2)},
    **{
        f"{ten}-{one}": 10 * tens + ones
        for tens, ten in enumerate(TENS, start=2)
        for ones, one in enumerate(["first", "second", *_ORDINALS[:7]], start=1)
    },
}
_COUNTS = {word: value for word, value in _VALUES.items() if word in {*ONES, *TENS}}
MULTIPLIERS = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_AFTER_NUMBER = {f"{word}s": value for word, value in MULTIPLIERS.items()}  # "hundreds" alone is not a number
_AFTER_NUMBER |= {"dozen": 12, "decades": 10, "mn": 10**6, "bn": 10**9, "tn": 10**12}
_FRACTIONS = {f"{word}s": value for value, word in enumerate(_ORDINALS, start=3)} | {"quarters": 4}

_AMBIGUOUS: Ambiguous = {
    **with_values("zero", 0),
    **with_values("one once first single", 1),
    **with_values("second twice both couple pair double doubled", 2),
    **with_values("triple tripled", 3),
    **with_values("decade", 10),
    **with_values("dozen noon", 12),
    **with_values("midnight", 0, 12, 24),
    **with_values("half", Fraction(1, 2), 30),
    **with_values("quarter", Fraction(1, 4), 15),
    **{word: (value, Fraction(1, value)) for value, word in enumerate(_ORDINALS, start=3)},
    **{word: (value,) for value, month in enumerate(_MONTHS, start=1) for word in (month, month[:3])},
    **with_values("sept", 9),
}
_WORDS = NumberWords(_VALUES, MULTIPLIERS | _AFTER_NUMBER, _AMBIGUOUS)

_VALUE = rf"(?:{DECIMAL}|\b(?:{any_of(_COUNTS)})\b)"
_SMALL = rf"(?:(?<![\d.])\d{{1,3}}(?:\.\d+)?|\b(?:{any_of(_COUNTS)})\b)"
_FIRST = rf"(?:{DECIMAL}|\b(?:{any_of([*_VALUES, *MULTIPLIERS])})\b)"
_NEXT = rf"(?:{DECIMAL}|\b(?:{any_of([*_VALUES, *MULTIPLIERS, *_AFTER_NUMBER])})\b)"
_RUN = rf"{_FIRST}(?:[\s-]+{_NEXT}|\s+and\s+\b(?:{any_of(_VALUES)})\b)*"
_SCALE = rf"(?:\s?%|\s+per\s?cent\b|\s+(?:{any_of([*MULTIPLIERS, 'mn', 'bn', 'tn'])})\b)"
_HOUR = rf"(\d{{1,2}}|{any_of(ONES[:12])})\b"
_DIGITS = rf"(?:{any_of(['zero', *ONES[:9]])})"


def _point(match: re.Match[str]) -> str:
    return f"{_WORDS.value(match[1])}.{''.join(str(_VALUES.get(word, 0)) for word in match[2].split())}"


def _clock(match: re.Match[str]) -> str:
    hour = int(_WORDS.value(match[2]))
    return {"half past": f"{hour}:30", "quarter past": f"{hour}:15", "quarter to": f"{hour - 1 or 12}:45"}[match[1]]


_RULES: list[Rule] = [
    ("’", "'"),
    (r"(?<=\d),(?=\d{3}(?!\d))|(?<=\d) (?=000(?!\d))", ""),
    VERSION,
    (r"(?<=\d)(?:st|nd|rd|th)\b", ""),
    (r"\b(\d{1,2})\.(\d{2})(?=\s?[ap]\.?m\b)", r"\1:\2"),
    (r"(?<=\d)(?=(?:[mbt]n|[mbtr]+illion)\b)", " "),
    (rf"({_SMALL})(\s*[-–—]\s*|\s+(?:to|or)\s+)({_VALUE})({_SCALE})", r"\1\4\2\3\4"),
    (rf"(?<=between )({_SMALL})(\s+and\s+)({_VALUE})({_SCALE})", r"\1\4\2\3\4"),
    (rf"\b(?:several|few|many|some|of)\s+(?:{any_of(MULTIPLIERS)})\b", ""),
    (r"\bhalf\s+an?\s+(?=[mbtr]+illion|dozen)", "0.5 "),
    (r"\b(?:an?|one)\s+([a-z]+)\s+and\s+a\s+half\b", r"1.5 \1"),
    (
        rf"({_VALUE})[\s-]and[\s-](?:a[\s-])?half\b",
        lambda match: format_number(_WORDS.value(match[1]) + Fraction(1, 2)),
    ),
    (rf"\b(half past|quarter past|quarter to)\s+{_HOUR}", _clock),
    (rf"({_VALUE})\s+point\s+({_DIGITS}(?:\s{_DIGITS})*)\b", _point),
    (rf"({_VALUE})[\s-]({any_of(_FRACTIONS)})\b", lambda match: f"{_WORDS.value(match[1])}⁄{_FRACTIONS[match[2]]}"),
    (rf"\bone\s+(?:in|out\s+of)\s+({_VALUE})", lambda match: f"1⁄{_WORDS.value(match[1])}"),
    (r"\bone[\s-](third|quarter|fifth)\b", lambda match: f"1⁄{_FRACTIONS[match[1] + 's']}"),
    (_RUN, _WORDS.to_digits),
    (r"(?<=\d)\s*(?:per\s?cent(?:age\s+points?)?|pct)\b", "%"),
    (r"(?<![\d:.])(\d{1,2})(?=\s?[ap]\.?m\b|\s?o'?\s?clock\b)", r"\1:00"),
    (r"(?<![\d:.])(\d{1,2})(?=\s*(?:[-–]|to|and|or|until|till)\s*\d{1,2}:\d\d)", r"\1:00"),
]
NOTATION = Notation(_RULES, _AMBIGUOUS)
