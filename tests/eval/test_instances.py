from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulmt.errors import DataError
from simulmt.eval.instances import (
    CompleteWords,
    Instance,
    detect_unit,
    read_instances,
    spaced_words_read,
    split_units,
    unit_delays,
    write_instances,
)
from simulmt.eval.latency import (
    average_lagging,
    average_proportion,
    differentiable_average_lagging,
    length_adaptive_average_lagging,
    reference_length,
)
from simulmt.eval.results import INSTANCES
from simulmt.text import split_words
from simulmt.text.words import Unit

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # SimulEval imports libraries that are deprecated
    from simuleval.evaluator.instance import LogInstance
    from simuleval.evaluator.scorers.latency_scorer import ALScorer, APScorer, DALScorer, LAALScorer

INSTANCE = Instance(0, "a b c", ("Ein Satz.",), "Ein Satz", (1, 3), 3)
CHARACTERS = st.characters(codec="utf-8", exclude_characters="\n\r")
SENTENCES = st.text(st.sampled_from("ab 河。"), max_size=12)


@st.composite
def instances(draw: st.DrawFn) -> Instance:
    source = draw(st.lists(st.sampled_from(["a", "bc"]), min_size=1, max_size=7))
    delays = sorted(draw(st.lists(st.integers(1, len(source)), max_size=9)))
    references = draw(st.lists(st.text(CHARACTERS, max_size=9), min_size=1, max_size=3))
    prediction = " ".join("x" for _ in delays)
    return Instance(
        draw(st.integers(0, 99)), " ".join(source), tuple(references), prediction, tuple(delays), len(source)
    )


@settings(deadline=None, max_examples=40)
@given(st.lists(instances(), min_size=1, max_size=4))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, written: list[Instance]) -> None:
    directory = tmp_path_factory.mktemp("log")
    write_instances(directory, written)
    assert read_instances(directory) == read_instances(directory / INSTANCES) == written


def test_a_line_is_that_of_simuleval(tmp_path: Path) -> None:
    """The keys and their order are those of a line that SimulEval 1.1.4 wrote."""
    write_instances(tmp_path, [INSTANCE])
    assert list(json.loads((tmp_path / INSTANCES).read_text(encoding="utf-8")).items()) == [
        ("index", 0),
        ("prediction", "Ein Satz"),
        ("delays", [1, 3]),
        ("elapsed", [0, 0]),
        ("prediction_length", 2),
        ("reference", "Ein Satz."),
        ("source", "a b c"),
        ("source_length", 3),
    ]


def test_a_line_of_simuleval_is_read(tmp_path: Path) -> None:
    line = (
        '{"index": 4, "prediction": "Ein Satz", "delays": [1, 3], "elapsed": [0, 0], "prediction_length": 2, '
        '"reference": "\\u00dcben.\\n", "source": "a b c", "source_length": 3}\n'
    )
    (tmp_path / INSTANCES).write_text(line, encoding="utf-8")
    assert read_instances(tmp_path) == [Instance(4, "a b c", ("Üben.",), "Ein Satz", (1, 3), 3)]


def test_latency_goes_by_the_first_reference_that_is_there(tmp_path: Path) -> None:
    instance = Instance(0, "a", ("", "b", "c"), "", (), 1)
    assert instance.reference == "b"
    assert Instance(0, "a", ("", ""), "", (), 1).reference == ""
    write_instances(tmp_path, [instance])
    table = json.loads((tmp_path / INSTANCES).read_text(encoding="utf-8"))
    assert (table["reference"], table["references"]) == ("b", ["", "b", "c"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"delays": None}, r":1: delays: expected list, got None"),
        ({"delays": [120.5, 300.0]}, r":1: delays: .* speech logs are not supported"),
        ({"delays": [1, 4]}, r":1: delays: 4 words read, but the source has 3"),
        ({"delays": [2, 1]}, r":1: delays: decrease from 2 to 1"),
        ({"source": ["file.wav"]}, r":1: source: expected str"),
        ({"prediction": 7}, r":1: prediction: expected str, got 7"),
    ],
)
def test_a_broken_log_is_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    write_instances(tmp_path, [INSTANCE])
    table = json.loads((tmp_path / INSTANCES).read_text(encoding="utf-8")) | change
    (tmp_path / INSTANCES).write_text(json.dumps(table), encoding="utf-8")
    with pytest.raises(DataError, match=rf"instances\.log{message}"):
        read_instances(tmp_path)


@pytest.mark.parametrize(
    ("line", "message"), [("{", "not JSON"), ("[]", "expected a JSON object"), ("{}", "no 'delays'")]
)
def test_a_file_that_is_no_log_is_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / INSTANCES).write_text(f"{line}\n", encoding="utf-8")
    with pytest.raises(DataError, match=rf"instances\.log:1: {message}"):
        read_instances(tmp_path)


def test_the_unit_of_a_log_is_found() -> None:
    characters = Instance(0, "a b c", ("x",), "你好", (1, 3), 3)
    both = Instance(1, "a b c", ("x",), "你", (1,), 3)
    assert detect_unit([INSTANCE, both], "log") == "word"
    assert detect_unit([both, characters], "log") == "char"
    with pytest.raises(DataError, match="log:2: expected one delay per word or per character"):
        detect_unit([INSTANCE, Instance(1, "a b c", ("x",), "Ein Satz", (1, 2, 3), 3)], "log")


def test_a_word_is_written_when_the_next_one_begins() -> None:
    """ "Brü" and "cke" at words 1 and 2, " war" at 3, " zu" at 3 and "." at the end, word 5."""
    written = [("Brü", 1), ("cke", 2), (" war", 3), (" zu", 3), (".", 5)]
    assert unit_delays(written, 5, "word", spaced=True) == [3, 3, 5]
    # the same words counted in characters: Brücke and war at 3, zu. at 5
    assert unit_delays(written, 5, "char", spaced=True) == [3] * 9 + [5] * 3


def test_a_character_is_written_at_once_where_there_are_no_spaces() -> None:
    written = [("你好", 1), ("，New", 2), (" York", 4)]
    assert unit_delays(written, 4, "char", spaced=False) == [1, 1, 2, 2, 2, 2, 4, 4, 4, 4]
    assert unit_delays([], 4, "char", spaced=False) == []


@settings(deadline=None, max_examples=60)
@given(st.lists(st.text(st.sampled_from("ab "), max_size=4), max_size=8), st.booleans())
def test_holding_words_back_loses_nothing_and_tears_nothing(texts: list[str], spaced: bool) -> None:
    words = CompleteWords(spaced)
    parts = [*map(words.push, texts), words.finish()]
    assert "".join(parts) == "".join(texts)
    if spaced:
        assert [word for part in parts for word in part.split()] == "".join(texts).split()


def test_words_of_the_runtime_become_words_between_spaces() -> None:
    """The runtime reads The | sign | 小 | 心 | here; the third and the fourth are one word between spaces."""
    assert list(spaced_words_read("The sign 小心 here", [1, 2, 3, 4, 5])) == [1, 2, 3, 3, 4]


@settings(deadline=None, max_examples=60)
@given(st.text(st.sampled_from("ab 河。\u3000"), min_size=1).filter(str.strip))
def test_every_word_of_the_runtime_has_its_place(source: str) -> None:
    count = len(split_words(source))
    read = list(spaced_words_read(source, range(1, count + 1)))
    assert read == sorted(read)
    assert set(read) == set(range(1, len(source.split()) + 1))


def test_units_by_hand() -> None:
    assert split_units(" Die  Brücke. ", "word") == ["Die", "Brücke."]
    assert split_units("你好 Bob", "char") == ["你", "好", "B", "o", "b"]
    assert reference_length("Die alte Brücke.", "word") == 3
    assert reference_length(" 你好 Bob ", "char") == 6  # with the space in between, as SimulEval has it
    assert reference_length("", "word") == reference_length("", "char") == 1


@settings(deadline=None, max_examples=100)
@given(instances(), SENTENCES.filter(str.strip), st.sampled_from(get_args(Unit)))
def test_simuleval_agrees(instance: Instance, reference: str, unit: Unit) -> None:
    """On the length of the reference, AL, LAAL, DAL, and AP if that goes by the length of the hypothesis."""
    info = {"index": 0, "reference": reference, "delays": instance.delays, "source_length": instance.source_length}
    logged: Any = LogInstance(json.dumps(info), unit)
    length = reference_length(reference, unit)
    assert length == logged.reference_length
    if instance.delays:
        arguments = (instance.delays, instance.source_length, length)
        assert average_lagging(*arguments) == pytest.approx(ALScorer().compute(logged))
        assert length_adaptive_average_lagging(*arguments) == pytest.approx(LAALScorer().compute(logged))
        assert differentiable_average_lagging(*arguments[:2]) == pytest.approx(DALScorer().compute(logged))
        proportion = APScorer(use_ref_len=False).compute(logged)
        assert average_proportion(*arguments[:2]) == pytest.approx(proportion)
