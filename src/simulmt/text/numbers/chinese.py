"""Convert Chinese numbers to digits."""

from __future__ import annotations

import re
from fractions import Fraction
from unicodedata import normalize

from simulmt.text.numbers import DECIMAL, VERSION, Ambiguous, Notation, Part, Rule, compose, format_number, with_values
from simulmt.text.words import HAN

_DIGITS = {character: value for value, character in enumerate("零一二三四五六七八九")} | {"〇": 0, "两": 2}
_SMALL_UNITS = {"十": 10, "百": 100, "千": 1000}
_UNITS = {**_SMALL_UNITS, "万": 10**4, "亿": 10**8, "兆": 10**12}
_DIGIT = f"[{''.join(_DIGITS)}]"
_NUMERAL = rf"(?:{DECIMAL}|[{''.join(_DIGITS)}{''.join(_UNITS)}]){{1,24}}"
_TOKEN = re.compile(rf"{DECIMAL}|.")

# One character alone is often part of a word.
_AMBIGUOUS: Ambiguous = {
    **{character: (value,) for character, value in {**_DIGITS, **_SMALL_UNITS}.items()},
    **with_values("首", 1),
    **with_values("俩 双", 2),
    **with_values("仨", 3),
    **with_values("刻", 15),
    **with_values("半", Fraction(1, 2), 30),
}

_FIRST = rf"(?<![\d{''.join(_DIGITS)}{''.join(_UNITS)}])"  # not inside a numeral
_NOT_NUMBERS = re.compile(
    r"(?:星期|礼拜|周)[一二三四五六](?![次个])"
    rf"|{_FIRST}(?:十分(?![之钟])|千万(?=[别不要记小注])|万一|亿万|万千|百姓|百万富翁|一万步|三明治|四川)"
    rf"|[几数][十百千万亿]+|数以[百千万亿]+计|成千上万|{_FIRST}十几|(?<!以)上[百千万亿]+(?![分{''.join(_DIGITS)}])"
    rf"|{_FIRST}[一二两三四五六七八九]{{2}}[十百千万亿]+"  # 六七十, sixty or seventy
)


def _value(text: str) -> Fraction:
    """Return the value of a numeral: 三千五百, 3万5千, 1.5亿, 二〇二六, 三万五."""
    tokens = _TOKEN.findall(text)
    if all(token in _DIGITS for token in tokens):
        return Fraction(int("".join(str(_DIGITS[token]) for token in tokens)))
    if tokens[-1] in _DIGITS and tokens[-2] in _UNITS and _UNITS[tokens[-2]] > 10:
        tokens.append(format_number(Fraction(_UNITS[tokens[-2]], 10)))  # 三万五 is 35,000
        tokens[-2:] = [format_number(_DIGITS[tokens[-2]] * Fraction(tokens[-1]))]
    parts = []
    for token in tokens:
        if token in _UNITS:
            parts.append(Part(Fraction(_UNITS[token]), multiplies=True))
        elif token not in "零〇":
            parts.append(Part(Fraction(_DIGITS.get(token, 0)) if token in _DIGITS else Fraction(token)))
    return sum(compose(parts), Fraction(0))


def _digits(text: str) -> str:
    return format_number(_value(text))


def _numeral(match: re.Match[str]) -> str:
    """Convert a numeral to digits, except single characters and two digits in a row, which are approximate (三四个)."""
    text = match[0]
    is_approximate = len(text) == 2 and all(c in _DIGITS and c not in "零〇" for c in text)
    is_kept = text in _AMBIGUOUS or text in "万亿兆" or text.isdecimal() or is_approximate
    return text if is_kept else _digits(text)


def _clock(match: re.Match[str]) -> str:
    hour, minute = match["hour"], match["minute"]
    if hour == "一" and not match["rest"]:
        return match[0]  # 一点, a little
    value = _value(hour)
    if minute and all(c in _DIGITS for c in minute) and not match["mark"]:
        return f"{format_number(value)}.{''.join(str(_DIGITS[c]) for c in minute)}"  # 三点五
    if value > 24:
        return f"{format_number(value)}{match[0][len(hour) :]}"
    minutes = {"半": 30, "一刻": 15, "三刻": 45}.get(match["rest"] or "") or (int(_value(minute)) if minute else 0)
    return f"{format_number(value)}:{minutes:02d} " if minutes < 60 else match[0]


def _decimals(match: re.Match[str]) -> str:
    return f"{_digits(match[1])}.{''.join(str(_DIGITS.get(c, c)) for c in match[2])}"


_RULES: list[Rule] = [
    ("[０-９％．：]", lambda match: normalize("NFKC", match[0])),
    (r"(?<=\d),(?=\d{3}(?!\d))", ""),
    VERSION,
    (_NOT_NUMBERS, "·"),
    (rf"(?<=[\d%])\s+(?=[{HAN}])|(?<=[{HAN}])\s+(?=\d)", ""),
    (r"(?<=[\d十百千])[多余来](?=[万亿])|(?<=\d)个(?=[万亿])", ""),
    (rf"{_NUMERAL}世纪(?={_NUMERAL}年代)", ""),
    (
        rf"(?<![\d.])({DECIMAL}|{_DIGIT}+)(\s*(?:到|至|-|–|—|~|、)\s*)({DECIMAL}|[十百千]|{_DIGIT}+)(万亿|[百千万亿%])",
        r"\1\4\2\3\4",
    ),
    (rf"百分之({_NUMERAL})点({_DIGIT}+)", lambda match: f"{_decimals(match)}%"),
    (rf"百分之({_NUMERAL})", lambda match: f"{_digits(match[1])}%"),
    (rf"({_NUMERAL})个百分点", lambda match: f"{_digits(match[1])}%"),
    (rf"({_NUMERAL})分之({_NUMERAL})", lambda match: f"{_digits(match[2])}⁄{_digits(match[1])}"),
    (rf"差一刻({_NUMERAL})点", lambda match: f"{int(_value(match[1])) - 1 or 12}:45"),
    (
        rf"(?P<hour>{_NUMERAL})(?:点|(?<=\d)时)(?P<rest>半|[一三]刻|钟|整|(?P<minute>{_NUMERAL})(?P<mark>分?))?(?!{_DIGIT})",
        _clock,
    ),
    (
        rf"({_NUMERAL})(个|年|天|周|星期|小时|岁|倍|公里|里)半",
        lambda match: f"{format_number(_value(match[1]) + Fraction(1, 2))}{match[2]}",
    ),
    (rf"({_NUMERAL})块({_DIGIT}|\d)(?=美元|钱|的|$|[，。！？、；])", _decimals),
    (rf"({_NUMERAL})千(?=[米克瓦卡])", lambda match: f"{_digits(match[1])}k"),
    (rf"({_NUMERAL})(?=成(?![为了功员立本人就长交绩果熟年]))", lambda match: _digits(match[1])),
    (_NUMERAL, _numeral),
]
NOTATION = Notation(_RULES, _AMBIGUOUS, boundary="")
