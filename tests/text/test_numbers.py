"""Numbers by value across languages."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulmt.text.numbers import Number, find_numbers, unmatched


def certain(text: str, language: str) -> list[frozenset[Fraction]]:
    return [number.values for number in find_numbers(text, language) if number.is_certain]


def values(text: str, language: str) -> list[Fraction]:
    """Return the values of the certain numbers of a text, each of which must have only one."""
    return [value for (value,) in certain(text, language)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3000 customers", "3000"),
        ("3,000 customers", "3000"),
        ("1,000.5 metres", "1000.5"),
        ("1.5 billion people", "1500000000"),
        ("£1.5bn", "1500000000"),
        ("half a million", "500000"),
        ("10% or ten per cent", "0.1 0.1"),
        ("up 2.5 percentage points", "0.025"),
        ("twelve", "12"),
        ("twenty-one", "21"),
        ("two hundred and fifty thousand", "250000"),
        ("between two hundred and three hundred", "200 300"),
        ("a hundred and one", "101"),
        ("three, four and five", "3 4 5"),
        ("nineteen ninety-five", "1995"),
        ("in 2020 three people", "2020 3"),
        ("2 to 3 million", "2000000 3000000"),
        ("10-15%", "0.1 0.15"),
        ("between five and ten percent", "0.05 0.1"),
        ("eleven and a half hours", "11.5"),
        ("an hour and a half", "1.5"),
        ("2½ weeks", "2.5"),
        ("three point one four", "3.14"),
        ("the 21st of May", "21"),
        ("the nineteenth century, the twenty-fifth time", "19 25"),
        ("10 000 people use version 2.4.19", "10000 2 4 19"),
        ("two dozen eggs", "24"),
        ("three decades", "30"),
        ("a 10-year-old boy", "10"),
        ("one of them, the first, a second time", ""),
        ("hundreds of people, several million", ""),
        ("COVID-19 as an mp3", ""),
    ],
)
def test_english(text: str, expected: str) -> None:
    assert values(text, "en") == [*map(Fraction, expected.split())]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3.000 Kunden", "3000"),
        ("1.000,5 Meter", "1000.5"),
        ("40 000 Polizisten", "40000"),
        ("1,5 Millionen Euro", "1500000"),
        ("acht Milliarden Menschen", "8000000000"),
        ("eine Million", "1000000"),
        ("mehr als einer halben Million", "500000"),
        ("3 Mio. und 2 Mrd.", "3000000 2000000000"),
        ("12 Prozent", "0.12"),
        ("die Fünf-Prozent-Hürde", "0.05"),
        ("5 bis 10 Prozent", "0.05 0.1"),
        ("zwischen zwei und drei Millionen", "2000000 3000000"),
        ("einundvierzig", "41"),
        ("DREISSIG, dreißig", "30 30"),
        ("zweihundertfünfzig Gramm", "250"),
        ("neunzehnhundertneunundachtzig", "1989"),
        ("dreitausendfünfhundert", "3500"),
        ("anderthalb Stunden", "1.5"),
        ("zweieinhalb Jahre, ein dreieinhalbjähriges Kind", "2.5 3.5"),
        ("zweieinhalb Millionen, dreieinhalbtausend", "2500000 3500"),
        ("zweieinhalb bis drei Prozent", "0.025 0.03"),
        ("dreimal täglich, ein fünfjähriges Kind", "3 5"),
        ("drei Komma fünf", "3.5"),
        ("am 12.03.2024", "12 3 2024"),
        ("am 3. Mai", "3"),
        ("der zwanzigste", "20"),
        ("ein einfacher zweiter Versuch, acht", "8"),
        ("Hunderte von Menschen und Tausende, mehrere tausend Jahre, außer Acht", ""),
    ],
)
def test_german(text: str, expected: str) -> None:
    assert values(text, "de") == [*map(Fraction, expected.split())]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3000多名客户", "3000"),
        ("３０００名", "3000"),
        ("三千名", "3000"),
        ("3,000名", "3000"),
        ("15亿人", "1500000000"),
        ("十五亿人", "1500000000"),
        ("1.5亿", "150000000"),
        ("3万亿", "3000000000000"),
        ("3万5千", "35000"),
        ("55000万", "550000000"),
        ("三万五", "35000"),
        ("1万2", "12000"),
        ("一百零二", "102"),
        ("一百二", "120"),
        ("十多万", "100000"),
        ("400 余万", "4000000"),
        ("4个亿", "400000000"),
        ("200到300万", "2000000 3000000"),
        ("百分之十", "0.1"),
        ("百分之六点二", "0.062"),
        ("10至15%", "0.1 0.15"),
        ("2个百分点", "0.02"),
        ("二〇二六年", "2026"),
        ("一九九八年", "1998"),
        ("十一个半小时", "11.5"),
        ("三点五", "3.5"),
        ("四块五。", "4.5"),
        ("15张票只剩2张", "15 2"),
        ("3月15日", "15"),
        ("20世纪90年代", ""),
        ("星期三，十分有趣，慢一点", ""),
        ("十几个，几千人，数百万，成千上万，六七十岁", ""),
    ],
)
def test_chinese(text: str, expected: str) -> None:
    found = [each for each in certain(text, "zh") if len(each) == 1]
    assert [value for (value,) in found] == [*map(Fraction, expected.split())]


@pytest.mark.parametrize(
    ("text", "language", "hour", "minute"),
    [
        ("half past three", "en", 3, 30),
        ("a quarter to nine", "en", 8, 45),
        ("7.45pm", "en", 7, 45),
        ("at 15:30", "en", 3, 30),
        ("6 p.m.", "en", 18, None),
        ("six o'clock", "en", 6, None),
        ("halb vier", "de", 3, 30),
        ("Viertel nach acht", "de", 8, 15),
        ("Viertel vor neun", "de", 8, 45),
        ("7.45 Uhr", "de", 7, 45),
        ("18 Uhr", "de", 6, None),
        ("三点半", "zh", 3, 30),
        ("7点45分", "zh", 7, 45),
        ("七点四十五分", "zh", 7, 45),
        ("差一刻九点", "zh", 8, 45),
        ("下午6点", "zh", 18, None),
        ("晚上7:45", "zh", 7, 45),
    ],
)
def test_times_on_either_clock(text: str, language: str, hour: int, minute: int | None) -> None:
    hours, *minutes = certain(text, language)
    assert hour in hours
    assert len({value % 12 for value in hours}) == 1
    assert minutes == ([] if minute is None else [{Fraction(minute)}])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("two thirds of them", "en"), ("三分之二", "zh")),
        (("one in four adults", "en"), ("每四个成年人中", "zh")),
        (("one in four adults", "en"), ("四分之一", "zh")),
        (("the 1990s", "en"), ("90年代", "zh")),
        (("in den 90er Jahren", "de"), ("in the 1990s", "en")),
        (("30 percent", "en"), ("三成", "zh")),
        (("five kilometers", "en"), ("五千米", "zh")),
        (("March 15", "en"), ("3月15日", "zh")),
        (("zwei Drittel", "de"), ("two thirds", "en")),
        (("zwei Jahrzehnte", "de"), ("twenty years", "en")),
        (("zwischen 17 und 18 Uhr", "de"), ("between 5 and 6 p.m.", "en")),
        (("Das sind 1.000,5 Meter", "de"), ("That is 1,000.5 metres", "en")),
        (("40 Prozent", "de"), ("forty percent", "en")),
        (("3000 Menschen", "fr"), ("3 000 people, no: 3,000", "en")),
    ],
)
def test_the_same_numbers_in_other_words(one: tuple[str, str], other: tuple[str, str]) -> None:
    assert any(number.is_certain for number in find_numbers(*one))
    assert unmatched(find_numbers(*one), find_numbers(*other)) == []


@pytest.mark.parametrize(
    ("source", "translation"),
    [
        ("3000 customers", "30000名客户"),
        ("1.5 billion people", "1.5亿人"),
        ("100 million dollars", "100万美元"),
        ("10%", "1%"),
        ("10%", "10"),
        ("twelve months", "两个月"),
        ("2 of the 15 tickets", "215张票"),
        ("half past three", "三点"),
    ],
)
def test_changed_numbers_are_found(source: str, translation: str) -> None:
    assert unmatched(find_numbers(source, "en"), find_numbers(translation, "zh"))


def english_words(value: int) -> str:
    ones = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
    small = [*ones.split(), "seventeen", "eighteen", "nineteen"]
    tens = "_ _ twenty thirty forty fifty sixty seventy eighty ninety"
    for size, name in ((10**9, "billion"), (10**6, "million"), (1000, "thousand"), (100, "hundred")):
        if value >= size:
            rest = f" {english_words(value % size)}" if value % size else ""
            return f"{english_words(value // size)} {name}{rest}"
    if value < 20:
        return small[value]
    return tens.split()[value // 10] + (f"-{small[value % 10]}" if value % 10 else "")


def german_words(value: int) -> str:
    ones = "null ein zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn"
    small = [*ones.split(), "siebzehn", "achtzehn", "neunzehn"]
    tens = "_ _ zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig"
    for size, name in ((1000, "tausend"), (100, "hundert")):
        if value >= size:
            return f"{german_words(value // size)}{name}{german_words(value % size) if value % size else ''}"
    if value < 20:
        return small[value]
    return (f"{small[value % 10]}und" if value % 10 else "") + tens.split()[value // 10]


def chinese_numerals(value: int) -> str:
    for size, name in ((10**8, "亿"), (10**4, "万"), (1000, "千"), (100, "百"), (10, "十")):
        if value >= size:
            rest = value % size
            gap = "零" if rest and rest < size // 10 else ""
            return f"{chinese_numerals(value // size)}{name}{gap}{chinese_numerals(rest) if rest else ''}"
    return "零一二三四五六七八九"[value]


@given(st.integers(min_value=13, max_value=10**10))
def test_every_number_is_the_same_in_all_languages(value: int) -> None:
    expected = [Fraction(value)]
    assert values(f"about {value} of them", "en") == expected
    assert values(f"about {value:,} of them", "en") == expected
    assert values(f"about {english_words(value)} of them", "en") == expected
    assert values(f"etwa {value:,} davon".replace(",", "."), "de") == expected
    assert values(f"etwa {german_words(value % 999_998 + 2)} davon", "de") == [Fraction(value % 999_998 + 2)]
    assert values(f"大约{value}个", "zh") == expected
    assert values(f"大约{chinese_numerals(value)}个", "zh") == expected


@given(st.integers(min_value=0, max_value=10**6), st.integers(min_value=1, max_value=99))
def test_decimals_are_the_same_in_all_languages(whole: int, hundredths: int) -> None:
    expected = [Fraction(whole) + Fraction(hundredths, 100)]
    assert values(f"it is {whole:,}.{hundredths:02d} kg", "en") == expected
    german = f"{whole:,}".replace(",", ".")
    assert values(f"es sind {german},{hundredths:02d} kg", "de") == expected
    assert values(f"是{whole}.{hundredths:02d}公斤", "zh") == expected


@given(st.text(max_size=60), st.sampled_from(["en", "de", "zh", "fr"]))
def test_any_text_is_accepted(text: str, language: str) -> None:
    found = find_numbers(text, language)
    assert all(number.values for number in found)
    assert unmatched(found, found) == []


def test_ambiguous_numbers_may_match_but_need_not() -> None:
    assert unmatched(find_numbers("two cats", "en"), find_numbers("两只猫", "zh")) == []
    assert unmatched(find_numbers("两只猫", "zh"), []) == []
    assert unmatched([Number(frozenset({Fraction(2)}))], []) == [Number(frozenset({Fraction(2)}))]


@pytest.mark.parametrize("language", ["en", "de", "zh", "fr"])
@pytest.mark.parametrize(
    "part", ["9", "1.", "1,000", "one ", "dreizehn", "einund", "一百", "三千万", "一点", "1到", "百分之"]
)
def test_no_text_causes_unbounded_backtracking(language: str, part: str) -> None:
    """Patterns with unbounded backtracking would not return."""
    assert find_numbers(part * 2000, language) is not None
