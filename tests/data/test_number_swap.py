"""Replacing numbers: which are replaced, how each language writes the new ones, and which are left alone."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

from data.helpers import lines, write
from simulmt.data.number_swap import NumberSwapConfig, match_numbers, swap_corpus_numbers, swap_matches
from simulmt.errors import ConfigError
from simulmt.text.numbers import find_numbers

EN_ZH, DE_EN, ZH_EN = ("en", "zh"), ("de", "en"), ("zh", "en")


class Sevens(random.Random):
    """Draws 7, or the number nearest to it; of the years, 1987."""

    def randint(self, a: int, b: int) -> int:
        return min(max(a, 7), b)

    def choice(self, seq: Any) -> Any:
        assert 1987 in seq
        return 1987


def swap(languages: tuple[str, str], source: str, target: str, rng: random.Random) -> tuple[str, str] | None:
    matches = match_numbers((source, target), languages)
    return swap_matches((source, target), languages, matches, rng) if matches else None


GOLDEN = [
    # figures: digits, final zeros, decimals and separators stay
    (EN_ZH, "It has 3,000 seats.", "有3000个座位。", "It has 7,000 seats.", "有7000个座位。"),
    (EN_ZH, "It has 3500 seats.", "有3,500个座位。", "It has 7700 seats.", "有7,700个座位。"),
    (EN_ZH, "He paid $4.50.", "他付了4.50美元。", "He paid $7.70.", "他付了7.70美元。"),
    (EN_ZH, "She is 9.", "她9岁。", "She is 7.", "她7岁。"),
    (DE_EN, "Es sind 1.284,5 km.", "It is 1,284.5 km.", "Es sind 7.777,7 km.", "It is 7,777.7 km."),
    (DE_EN, "Es waren 0,25 Liter.", "It was 0.25 litres.", "Es waren 0,77 Liter.", "It was 0.77 litres."),
    # percentages
    (EN_ZH, "It rose 12 percent.", "上涨了12%。", "It rose 77 percent.", "上涨了77%。"),
    (EN_ZH, "It rose 12%.", "上涨了百分之12。", "It rose 77%.", "上涨了百分之77。"),
    (EN_ZH, "It fell 5 percentage points.", "下降了5个百分点。", "It fell 7 percentage points.", "下降了7个百分点。"),
    (DE_EN, "Es waren 30 Prozent.", "It was 30%.", "Es waren 70 Prozent.", "It was 70%."),
    # years
    (EN_ZH, "Born in 1964, he left.", "他生于1964年，后来离开。", "Born in 1987, he left.", "他生于1987年，后来离开。"),
    (EN_ZH, "On May 3, 1964 he left.", "他于1964年5月3日离开。", "On May 3, 1987 he left.", "他于1987年5月3日离开。"),
    (EN_ZH, "It has 1964 rooms.", "有1964个房间。", "It has 7777 rooms.", "有7777个房间。"),
    (DE_EN, "Das war im Mai 1964.", "That was in May 1964.", "Das war im Mai 1987.", "That was in May 1987."),
    # scales
    (EN_ZH, "It cost $1.5 billion.", "花费15亿美元。", "It cost $7.7 billion.", "花费77亿美元。"),
    (EN_ZH, "It cost £1.5bn.", "花费15亿英镑。", "It cost £7.7bn.", "花费77亿英镑。"),
    (EN_ZH, "It cost 30 mn euros.", "花费3000万欧元。", "It cost 70 mn euros.", "花费7000万欧元。"),
    (EN_ZH, "800 million people left.", "8亿人离开了。", "700 million people left.", "7亿人离开了。"),
    (EN_ZH, "20 thousand people left.", "2万人离开了。", "70 thousand people left.", "7万人离开了。"),
    (EN_ZH, "It cost 1.25 million.", "花费125万。", "It cost 7.77 million.", "花费777万。"),
    (EN_ZH, "It cost 12.5 trillion yen.", "花费12.5万亿日元。", "It cost 77.7 trillion yen.", "花费77.7万亿日元。"),
    (EN_ZH, "It cost 800,000 yen.", "花费80万日元。", "It cost 700,000 yen.", "花费70万日元。"),
    (EN_ZH, "It cost 32,500 yen.", "花费3.25万日元。", "It cost 77,700 yen.", "花费7.77万日元。"),
    (ZH_EN, "花费15亿日元。", "It cost 1.5 billion yen.", "花费77亿日元。", "It cost 7.7 billion yen."),
    (DE_EN, "Es kostet 1,5 Mrd. Euro.", "It costs 1.5 billion.", "Es kostet 7,7 Mrd. Euro.", "It costs 7.7 billion."),
    (EN_ZH, "It cost 5\u00a0million yen.", "花费500万日元。", "It cost 7\u00a0million yen.", "花费700万日元。"),
    (DE_EN, "30\u00a0Millionen kamen.", "30 million came.", "70\u00a0Millionen kamen.", "70 million came."),
    (DE_EN, "30 Millionen kamen.", "30 million came.", "70 Millionen kamen.", "70 million came."),
    # words
    (EN_ZH, "Six dogs ran.", "六只狗跑了。", "Seven dogs ran.", "七只狗跑了。"),
    (EN_ZH, "I saw two dogs.", "我看见2只狗。", "I saw seven dogs.", "我看见7只狗。"),
    (EN_ZH, "I read chapter 6.", "我读了第六章。", "I read chapter 7.", "我读了第七章。"),
    (EN_ZH, "I saw twenty-three dogs.", "我看见二十三只狗。", "I saw thirteen dogs.", "我看见十三只狗。"),
    (EN_ZH, "I saw thirty dogs.", "我看见三十只狗。", "I saw seventy dogs.", "我看见七十只狗。"),
    (DE_EN, "Zwei Hunde liefen.", "Two dogs ran.", "Sieben Hunde liefen.", "Seven dogs ran."),
    (DE_EN, "Ich sah zweiunddreißig.", "I saw thirty-two.", "Ich sah dreizehn.", "I saw thirteen."),
    # only the numbers that are certain
    (EN_ZH, "At 6:45 we saw 9 dogs.", "6点45分我们看见9只狗。", "At 6:45 we saw 7 dogs.", "6点45分我们看见7只狗。"),
    (EN_ZH, "On March 15 we saw 22 dogs.", "3月15日我们看见22只狗。", "On March 15 we saw 77 dogs.",
     "3月15日我们看见77只狗。"),
    (EN_ZH, "3 dogs saw 3 cats and 40 birds.", "3只狗看见3只猫和40只鸟。", "3 dogs saw 3 cats and 70 birds.",
     "3只狗看见3只猫和70只鸟。"),
    (EN_ZH, "COVID-19 hit 40 people.", "COVID-19感染了40人。", "COVID-19 hit 70 people.", "COVID-19感染了70人。"),
    (EN_ZH, "From 10 to 15 hours, 40 slept.", "从10到15小时，40人睡了。", "From 10 to 15 hours, 70 slept.",
     "从10到15小时，70人睡了。"),
]  # fmt: skip


@pytest.mark.parametrize(("languages", "source", "target", "new_source", "new_target"), GOLDEN)
def test_replacing(languages: tuple[str, str], source: str, target: str, new_source: str, new_target: str) -> None:
    assert swap(languages, source, target, Sevens()) == (new_source, new_target)


LEFT_ALONE = [
    (EN_ZH, "It opens at 7:45.", "7点45分开门。"),
    (EN_ZH, "It opens at 7 p.m. today.", "今天晚上7点开门。"),
    (EN_ZH, "It opens at 7 o'clock.", "7时开门。"),
    (EN_ZH, "He came on March 15.", "他3月15日来了。"),
    (EN_ZH, "He came on 15 March.", "他3月15号来了。"),
    (EN_ZH, "I use version 3.11.", "我用版本 3.11。"),
    (EN_ZH, "I use 3.11.2 now.", "我现在用3.11.2。"),
    (EN_ZH, "Call 555-1234 now.", "现在拨打555-1234。"),
    (EN_ZH, "Call 0800 123 456.", "拨打 0800 123 456。"),
    (EN_ZH, "About 2/3 left.", "约2/3离开了。"),
    (EN_ZH, "It takes 10-15 days.", "需要10-15天。"),
    (EN_ZH, "It takes 10 to 15 days.", "需要10到15天。"),
    (EN_ZH, "COVID-19 and mp3 files.", "COVID-19和mp3文件。"),
    (EN_ZH, "It was -5 degrees.", "气温-5度。"),
    (EN_ZH, "I have 1 dog.", "我有1只狗。"),
    (EN_ZH, "I have two dogs.", "我有两只狗。"),
    (EN_ZH, "I have 2 dogs.", "我有二只狗。"),
    (EN_ZH, "I want three.", "我要三明治。"),
    (EN_ZH, "More than twenty came.", "来了二十多人。"),
    (EN_ZH, "It took 3 and a half years.", "花了3年半。"),
    (EN_ZH, "In the 1990s it grew.", "1990年代增长了。"),
    (EN_ZH, "His 3rd and 4th.", "他的第3和第4。"),
    (EN_ZH, "3 dogs saw 3 cats.", "3只狗看见3只猫。"),
    (EN_ZH, "I have 30 dogs.", "我有40只狗。"),
    (EN_ZH, "It cost twenty million.", "花费2000万。"),
    (EN_ZH, "It cost 30 million.", "花费3000多万。"),
    (EN_ZH, "It cost 1,284,567 yen.", "花费128.4567万日元。"),
    (DE_EN, "Er kam am 24.12.1990.", "He came on 24.12.1990."),
    (DE_EN, "Es war 7.45 Uhr.", "It was 7.45 in the morning."),
    (DE_EN, "Er kam um 7 Uhr.", "He came at 7."),
    (DE_EN, "Der 25. Platz ist gut.", "Place 25 is good."),
    (DE_EN, "Um halb sieben kam er.", "At half past six he came."),
    (DE_EN, "Es sind drei Viertel.", "It is three quarters."),
    (DE_EN, "Einer oder zwei kamen, ein oder zwei.", "One or two came."),
]


@pytest.mark.parametrize(("languages", "source", "target"), LEFT_ALONE)
@pytest.mark.parametrize("seed", range(3))
def test_left_alone(languages: tuple[str, str], source: str, target: str, seed: int) -> None:
    assert swap(languages, source, target, random.Random(seed)) is None


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("I saw 40 dogs and 30 cats.", "我看见40只狗和50只猫。"),  # other numbers disagree
        ("Half of them, 30 dogs, ran.", "一半，30只狗，跑了。"),  # the old value remains: half may be 30 minutes
    ],
)
def test_uncertain_pairs_are_dropped(source: str, target: str) -> None:
    assert match_numbers((source, target), EN_ZH)
    assert swap(EN_ZH, source, target, random.Random(1)) is None


@pytest.mark.parametrize("seed", range(30))
def test_articles_stay_right(seed: int) -> None:
    swapped = swap(EN_ZH, "He saw an 18-year-old and a 20-year-old.", "他看见18岁和20岁的人。", random.Random(seed))
    assert swapped is not None
    assert re.search(r" an (?:8\d|11|18)-year-old and a [1-79]0-", swapped[0])


NUMBERS = [
    ("3", "3"), ("12", "十二"), ("nine", "九"), ("forty-two", "42"), ("3,000", "3000"), ("1,284.75", "1284.75"),
    ("1.5 billion", "15亿"), ("20 million", "2000万"), ("1.25 trillion", "1.25万亿"), ("560,000", "56万"),
    ("0.35", "0.35"), ("12%", "12%"),
]  # fmt: skip


@pytest.mark.parametrize(("english", "chinese"), NUMBERS)
@pytest.mark.parametrize("seed", range(20))
def test_both_sides_have_the_same_new_value(english: str, chinese: str, seed: int) -> None:
    texts = f"We counted {english} of them.", f"我们数了{chinese}个。"
    swapped = swap(EN_ZH, *texts, random.Random(seed))
    assert swapped is not None
    (ours,), (theirs,) = find_numbers(swapped[0], "en"), find_numbers(swapped[1], "zh")
    (old,) = find_numbers(texts[0], "en")
    assert ours.values == theirs.values != old.values


def corpus(folder: Path, count: int = 300) -> tuple[Path, Path]:
    numbers = [f"{n}" if n % 3 else "no" for n in range(100, 100 + count)]
    source = write(folder / "source", [f"They have {n} dogs." for n in numbers])
    return source, write(folder / "target", [f"他们有{n}只狗。" for n in numbers])


def test_a_share_of_the_pairs_is_written(tmp_path: Path) -> None:
    source, target = corpus(tmp_path)
    record = swap_corpus_numbers(source, target, tmp_path / "new", NumberSwapConfig(EN_ZH, share=0.5))
    assert 70 < record["lines"] == record["kept"] < 130  # half of 300, of which a third has no number
    pairs = [*zip(lines(tmp_path / "new.source"), lines(tmp_path / "new.target"), strict=True)]
    assert len(pairs) == record["kept"]
    assert all(one.split()[2] == other[3:6] for one, other in pairs)


def test_results_depend_on_the_seed_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = corpus(tmp_path)

    def written(name: str, seed: int) -> list[str]:
        swap_corpus_numbers(source, target, tmp_path / name, NumberSwapConfig(EN_ZH, 1.0, seed))
        return lines(tmp_path / f"{name}.source")

    first = written("a", 1)
    assert written("c", 2) != first
    monkeypatch.setattr("simulmt.data.number_swap.CHUNK_PAIRS", 50)  # several processes
    assert written("b", 1) == first


@pytest.mark.parametrize(("languages", "share"), [(("fr", "en"), 0.5), (EN_ZH, 0.0), (EN_ZH, 1.5)])
def test_invalid_settings(languages: tuple[str, str], share: float) -> None:
    with pytest.raises(ConfigError):
        NumberSwapConfig(languages, share)
