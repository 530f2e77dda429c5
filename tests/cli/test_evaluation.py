from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.helpers import WITHOUT_TORCH, assert_refused, call, simulmt_after
from simulmt.eval.results import read_results
from simulmt.text import Tokenizer
from simulmt.train.export import ExportConfig, export
from tiny_models import trained, translator

ENGLISH = ["The old bridge was closed.", "Wait. Nobody knows.", "Close the window"]
GERMAN = ["Die alte Brücke war gesperrt.", "Warte. Niemand weiß es.", "Schließe das Fenster"]


@pytest.fixture(scope="session")
def test_set(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Return the options of a test set."""
    directory = tmp_path_factory.mktemp("test-set")
    for language, lines in (("en", ENGLISH), ("de", GERMAN)):
        (directory / f"news.{language}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return "--source", str(directory / "news.en"), "--reference", str(directory / "news.de")


@pytest.fixture(scope="session")
def results(bundle: Path, test_set: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Evaluate a bundle under two names at two delays, with timing, in a process without PyTorch."""
    output = tmp_path_factory.mktemp("results")
    models = ("--model", f"one={bundle}", "--model", f"two={bundle}", "--delay", "3, 1", "--timed", "1", "--runs", "1")
    done = simulmt_after(WITHOUT_TORCH, "evaluate", *models, *test_set, "--output", output)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[0] for line in done.stdout.splitlines()[1:5]] == ["one-k3", "one-k1", "two-k3", "two-k1"]
    assert done.stdout.splitlines()[-1].startswith("nrefs:1|bs:1000|seed:12345|case:lc|")
    return output


def test_evaluate_writes_scores_hypotheses_and_logs(results: Path) -> None:
    found = read_results(results)
    assert [(result.system, result.delay) for result in found] == [("one", 3), ("one", 1), ("two", 3), ("two", 1)]
    assert all(result.test_set == "news" and result.AL_CA is not None for result in found)
    assert found[0].command[1] == "evaluate"
    for result in found:
        assert len((results / f"{result.name}.hyp").read_text(encoding="utf-8").splitlines()) == 3
        assert len((results / result.name / "instances.log").read_text(encoding="utf-8").splitlines()) == 3


def test_without_delays_all_of_a_model_are_scored(
    bundle: Path, test_set: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = call(
        "evaluate", "--model", bundle, *test_set, "--output", tmp_path, "--timed", "0", "--limit", "1", capture=capsys
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = read_results(tmp_path)
    assert [(result.system, result.delay, result.sentences) for result in found] == [
        (bundle.name, delay, 1) for delay in (1, 2, 3, 5)
    ]


def test_wait_k_stops_at_its_own_end_on_demand(
    source_tokenizer: Tokenizer, target_tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    waiting = translator(trained("wait-k", source_tokenizer, target_tokenizer), "wait-k", "fp32", tmp_path)
    (tmp_path / "ends.en").write_text("Wait. Is the harbour closed? Nobody knows.\nClose it\n", encoding="utf-8")
    (tmp_path / "ends.de").write_text("Warte. Ist der Hafen gesperrt? Niemand weiß es.\nSchließe es\n", "utf-8")
    test_set = ("--source", tmp_path / "ends.en", "--reference", tmp_path / "ends.de", "--timed", "0", "--delay", "1")
    for name, stopping in (("reading-on", ()), ("stopping", ("--stop-at-end",))):
        model = ("--model", f"one={waiting.bundle.directory}", "--output", tmp_path / name)
        done = call("evaluate", *model, *test_set, *stopping, capture=capsys)
        assert (done.returncode, done.stderr) == (0, "")
    longer, shorter = ((tmp_path / name / "one-k1.hyp").read_text("utf-8") for name in ("reading-on", "stopping"))
    assert len(shorter) < len(longer)


def test_models_of_one_name_share_the_delays(
    bundle: Path,
    source_tokenizer: Tokenizer,
    target_tokenizer: Tokenizer,
    test_set: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two models with one delay each, and a full-sentence model, which ignores delays."""
    for kind, delay in (("ctc", 7), ("full-sentence", None)):
        network = trained(kind, source_tokenizer, target_tokenizer)  # type: ignore[arg-type]
        delays = (delay,) if delay else ()
        export(network, tmp_path / kind, ExportConfig("en", "de", delays=delays, precision="fp32", longest=12))
    models = ("--model", f"both={bundle}", "--model", f"both={tmp_path / 'ctc'}", "--model", tmp_path / "full-sentence")
    options = ("--delay", "7,3", "--timed", "0", "--output", tmp_path / "out")
    assert call("evaluate", *models, *test_set, *options, capture=capsys).returncode == 0
    found = [result.name for result in read_results(tmp_path / "out")]
    assert found == ["both-k3", "both-k7", "full-sentence-full"]


def test_logs_are_scored_beside_models(
    results: Path, test_set: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = ("--log", f"old:3={results / 'one-k3'}", "--log", f"whole={results / 'one-k1' / 'instances.log'}")
    done = call("evaluate", *logs, *test_set, "--output", tmp_path, "--test-set", "mine", capture=capsys)
    assert (done.returncode, done.stderr) == (0, "")
    by_name = {result.name: result for result in read_results(tmp_path)}
    before = {result.name: result for result in read_results(results)}
    assert by_name.keys() == {"old-k3", "whole-full"}
    assert by_name["old-k3"].test_set == "mine"
    assert (by_name["old-k3"].BLEU, by_name["old-k3"].AL) == (before["one-k3"].BLEU, before["one-k3"].AL)


def test_compare_prints_a_table(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = call("compare", results, "--baseline", "two", capture=capsys)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [line.split()[:3] for line in lines[1:5]] == [
        ["news", "3", "two"],
        ["news", "3", "one"],
        ["news", "1", "two"],
        ["news", "1", "one"],
    ]
    assert "+0.00" in lines[2]
    assert lines[5] == "* p < 0.05"
    assert lines[6].startswith("BLEU: nrefs:1|bs:1000|")


def test_compare_prints_markdown_and_json(results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "comparison.md"
    done = call("compare", results, "--format", "markdown", "--output", file, capture=capsys)
    assert done.stdout.startswith("| test set | k | system |")
    assert file.read_text() == done.stdout
    done = call("compare", results, "--format", "json", capture=capsys)
    tables = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(table["system"], table["delay"]) for table in tables] == [("one", 3), ("two", 3), ("one", 1), ("two", 1)]


@pytest.mark.parametrize(
    ("options", "code", "mentioned"),
    [
        ((), 2, "nothing to score: give --model or --log"),
        (("--model", "nowhere"), 1, "nowhere: no such model"),
        (("--model", "BUNDLE", "--delay", "1,x"), 2, "--delay 1,x: expected comma-separated whole numbers from 1"),
        (("--model", "BUNDLE", "--delay", "0"), 2, "--delay 0: expected comma-separated whole numbers from 1"),
        (("--model", "a=BUNDLE", "--delay", "3,4"), 2, "--delay 3,4: a was trained for 1, 2, 3, 5"),
        (("--model", "a=BUNDLE", "--model", "a=BUNDLE"), 2, "a-k1 is given twice; rename one system with NAME=..."),
        (("--model", "a b=BUNDLE"), 2, "system 'a b': invalid name; names must not contain"),
        (("--log", "nothing"), 2, "--log nothing: expected NAME:DELAY=PATH"),
        (("--log", "x:3=nothing"), 1, "nothing: no such file"),
        (("--model", "BUNDLE", "--words-per-second", "0"), 2, "--words-per-second"),
    ],
)
def test_wrong_usage_is_one_line(
    options: tuple[str, ...],
    code: int,
    mentioned: str,
    bundle: Path,
    test_set: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = tuple(option.replace("BUNDLE", str(bundle)) for option in options)
    done = call("evaluate", *options, *test_set, "--output", tmp_path / "out", capture=capsys)
    assert_refused(done, code, mentioned)


def test_file_errors_are_one_line(
    bundle: Path, test_set: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short.de").write_text("eins\n", encoding="utf-8")
    model = ("--model", bundle, "--output", tmp_path / "out")
    done = call("evaluate", *model, *test_set, "--reference", tmp_path / "short.de", capture=capsys)
    assert_refused(done, 1, f"{tmp_path / 'short.de'} has 1 sentences but {test_set[1]} has 3")
    done = call("evaluate", *model, *test_set[:2], "--reference", tmp_path / "none.de", capture=capsys)
    assert_refused(done, 1, "none.de: no such file")
    assert not (tmp_path / "out").exists()
    assert_refused(
        call("compare", tmp_path, capture=capsys), 1, "scores.jsonl: no such file; create it with `simulmt evaluate`"
    )


def test_a_directory_of_another_test_set_is_refused_before_any_work(
    results: Path, bundle: Path, test_set: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    done = call("evaluate", "--model", bundle, *test_set, "--test-set", "talks", "--output", results, capture=capsys)
    assert_refused(done, 2, "contains results of the test set news; use another directory for talks")
    assert not list(results.glob(f"{bundle.name}*"))


def test_a_plot_that_cannot_be_drawn_is_refused_before_any_is_written(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "plots"
    for options, mentioned in (
        (("--sentences", "1,4"), f"--sentences 4: {results} has 3 sentences"),
        (("--baseline", "best"), "--baseline best: no such system"),
    ):
        done = call("plot", results, "--output", output, *options, capture=capsys)
        assert mentioned in done.stderr
        assert (done.returncode > 0, output.exists()) == (True, False)
    assert call("plot", results, "--output", output, "--sentences", "3", capture=capsys).returncode == 0
    assert len(list(output.glob("news-line3-*-path.svg"))) == 4


def test_a_missing_extra_is_named(test_set: tuple[str, ...], tmp_path: Path) -> None:
    without = "import sys; sys.modules['sacrebleu'] = None\n"
    done = simulmt_after(without, "evaluate", "--model", "x", *test_set, "--output", tmp_path)
    assert_refused(done, 1, "simulmt evaluate needs the extra 'eval': pip install 'simulmt[eval]'")
    assert_refused(simulmt_after(without, "compare", tmp_path), 1, "simulmt compare needs the extra 'eval'")
