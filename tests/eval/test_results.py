from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulmt.errors import ConfigError, DataError
from simulmt.eval.latency import Instance
from simulmt.eval.order import Anticipation, OracleScore, SortedSentence
from simulmt.eval.results import (
    INSTANCES,
    SCORES,
    Result,
    check_system_name,
    prepare_directory,
    read_all,
    read_instances,
    read_records,
    read_results,
    result_name,
    write_instances,
    write_records,
    write_results,
)

RESULT = Result(
    system="en-zh",
    delay=3,
    test_set="news",
    unit="char",
    BLEU=20.5,
    AL=2.25,
    BLEU_interval=(19.0, 22.0),
    precisions=(60.0, 30.0, 15.0, 8.0),
    signatures={"BLEU": "case:lc"},
    files={"news.en": "0" * 64},
    command=("simulmt", "evaluate", "--test-set", "line\u2028separator"),
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    written = [RESULT, replace(RESULT, delay=None, AL_CA=12.5)]
    write_results(tmp_path, written)
    assert read_results(tmp_path) == read_results(tmp_path / SCORES) == written
    assert [path.name for path in tmp_path.iterdir()] == [SCORES]


def test_a_line_has_the_keys_that_other_tools_look_for(tmp_path: Path) -> None:
    write_results(tmp_path, [RESULT])
    table = json.loads((tmp_path / SCORES).read_text(encoding="utf-8"))
    wanted = "system delay BLEU chrF2 BP AL LAAL DAL AP AL_CA compute_ms_median compute_ms_p99 signature"
    assert set(wanted.split()) <= table.keys()


def test_the_same_system_and_delay_is_replaced_and_others_stay(tmp_path: Path) -> None:
    other, better = replace(RESULT, delay=5), replace(RESULT, BLEU=30.0)
    write_results(tmp_path, [RESULT, other])
    write_results(tmp_path, [better])
    assert read_results(tmp_path) == [other, better]


def test_published_figures_need_not_be_complete(tmp_path: Path) -> None:
    line = {"system": "published", "delay": 3, "test_set": "news", "unit": "char", "BLEU": 40, "AL": 2.5}
    (tmp_path / "published.jsonl").write_text(f"{json.dumps(line)}\n\n", encoding="utf-8")
    (result,) = read_results(tmp_path / "published.jsonl")
    assert (result.BLEU, result.chrF2, result.AL_CA) == (40.0, None, None)


def test_former_names_of_fields_are_read(tmp_path: Path) -> None:
    line = {"system": "old", "delay": 1, "test_set": "news", "unit": "word", "BLEU": 20.0, "AL": 1.0}
    line |= {"written_twice": 3, "reference_written_twice": 2, "torn_words": 1}
    (tmp_path / "scores.jsonl").write_text(json.dumps(line))
    (result,) = read_results(tmp_path)
    assert (result.repeated_words, result.reference_repeated_words, result.unknown_words) == (3, 2, 1)


def test_another_test_set_takes_another_directory(tmp_path: Path) -> None:
    write_results(tmp_path, [RESULT])
    with pytest.raises(ConfigError, match=r"contains results of the test set news; use another directory for talks"):
        write_results(tmp_path, [replace(RESULT, test_set="talks")])
    assert read_results(tmp_path) == [RESULT]


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--output .*file/out: cannot be created: Not a directory"):
        prepare_directory(tmp_path / "file" / "out", "news")


def test_results_of_several_directories_must_differ(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_results(tmp_path / name, [RESULT])
    write_results(tmp_path / "c", [replace(RESULT, test_set="talks")])
    assert len(read_all([tmp_path / "a", tmp_path / "c"])) == 2
    with pytest.raises(DataError, match=r"b: en-zh-k3 on news is in .*a as well"):
        read_all([tmp_path / "a", tmp_path / "b"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"scores\.jsonl:2: not JSON"),
        ("[]", r"scores\.jsonl:2: expected one JSON object per line, found list"),
        ('{"BLEU": NaN}', r"scores\.jsonl:2: not JSON: NaN is not a number"),
        ('{"sistem": "x"}', r"scores\.jsonl:2: unknown key 'sistem'; did you mean 'system'\?"),
        ('{"system": "x"}', r"scores\.jsonl:2: missing key 'delay'"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    write_results(tmp_path, [RESULT])
    with (tmp_path / SCORES).open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    with pytest.raises(DataError, match=message):
        read_results(tmp_path)


def test_a_field_of_the_wrong_type_is_named(tmp_path: Path) -> None:
    write_results(tmp_path, [RESULT])
    text = (tmp_path / SCORES).read_text(encoding="utf-8")
    (tmp_path / SCORES).write_text(text.replace('"BLEU": 20.5', '"BLEU": "20.5"'), encoding="utf-8")
    with pytest.raises(DataError, match=r"scores\.jsonl:1: BLEU: expected a value of type float, got '20\.5'"):
        read_results(tmp_path)


def test_missing_and_empty_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"scores\.jsonl: no such file; create it with `simulmt evaluate`"):
        read_results(tmp_path)
    (tmp_path / SCORES).write_text("\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"scores\.jsonl: contains no results"):
        read_results(tmp_path)
    (tmp_path / SCORES).write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"scores\.jsonl: cannot be read"):
        read_results(tmp_path)


def test_files_are_called_after_system_and_delay() -> None:
    assert RESULT.name == "en-zh-k3"
    assert result_name("teacher", None) == "teacher-full"


@pytest.mark.parametrize("name", ["", "a/b", "a\\b", "a b", ".hidden"])
def test_invalid_file_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="invalid name; names must not contain"):
        check_system_name(name)
    with pytest.raises(ConfigError, match="invalid name; names must not contain"):
        replace(RESULT, system=name)
    assert check_system_name("en-zh.v2") == "en-zh.v2"


def test_a_delay_counts_from_one() -> None:
    with pytest.raises(ConfigError, match="delay must be 1 or more"):
        replace(RESULT, delay=0)


ORACLE = OracleScore("test", "asn", 3, 0.0, 10, 40.0, (39.0, 41.0), 0.9, 30.0, (29.0, 31.0), 1.0, "sig")
SORTED = SortedSentence("test", "asn", 3, 7, ("a", "</s>"), ("\u2028", "“"), ((1.0, 0.0), (0.25, 0.75)))


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert write_records(tmp_path / "new", [ORACLE]) == tmp_path / "new" / "oracle.jsonl"
    write_records(tmp_path / "new", [SORTED])
    assert read_records(OracleScore, [tmp_path, tmp_path / "new"]) == [ORACLE]
    assert read_records(SortedSentence, [tmp_path / "new"]) == [SORTED]
    assert read_records(Anticipation, [tmp_path / "new"]) == []


def test_a_record_about_the_same_thing_is_replaced(tmp_path: Path) -> None:
    write_records(tmp_path, [ORACLE, replace(ORACLE, delay=5)])
    write_records(tmp_path, [replace(ORACLE, oracle_BLEU=50.0)])
    found = read_records(OracleScore, [tmp_path])
    assert [(record.delay, record.oracle_BLEU) for record in found] == [(5, 40.0), (3, 50.0)]


@pytest.mark.parametrize("line", ["{", "[]", '{"corpus": "x"}', '{"unknown": 1}'])
def test_a_damaged_record_is_named_with_its_line(tmp_path: Path, line: str) -> None:
    (tmp_path / Anticipation.FILE).write_text(line + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"anticipation.jsonl:1: "):
        read_records(Anticipation, [tmp_path])


INSTANCE = Instance(0, "a b c", ("Ein Satz.",), "Ein Satz", (1, 3), 3)
CHARACTERS = st.characters(codec="utf-8", exclude_characters="\n\r")


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
def test_what_is_logged_is_read(tmp_path_factory: pytest.TempPathFactory, written: list[Instance]) -> None:
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


def test_latency_uses_the_first_reference_present(tmp_path: Path) -> None:
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
    ("line", "message"),
    [("{", "not JSON"), ("[]", "expected one JSON object per line, found list"), ("{}", "no 'delays'")],
)
def test_a_file_that_is_no_log_is_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / INSTANCES).write_text(f"{line}\n", encoding="utf-8")
    with pytest.raises(DataError, match=rf"instances\.log:1: {message}"):
        read_instances(tmp_path)
