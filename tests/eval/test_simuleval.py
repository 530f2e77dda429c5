from __future__ import annotations

import csv
import os
import subprocess
import sys
import warnings
from argparse import ArgumentParser
from pathlib import Path

import pytest

from eval.sentences import ENGLISH
from simulmt.errors import StreamError
from simulmt.eval.results import read_instances
from simulmt.eval.run import Evaluation, Evaluator, Timing, read_test_set
from simulmt.runtime.bundle import SIMULEVAL_AGENT, write_system_configs
from simulmt.runtime.stream import Translator

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # SimulEval imports libraries that are deprecated
    from simuleval.data.segments import EmptySegment, TextSegment

    from simulmt.eval.simuleval import BundleAgent, BundleStates


SIMULEVAL = (sys.executable, "-W", "ignore", "-m", "simuleval.cli")


def simuleval(output: Path, files: Path, language: str, *options: str | Path) -> dict[str, float]:
    """Run an agent in SimulEval, in another process; return its scores, which have three digits."""
    test_set: list[str | Path] = [
        "--source",
        files / "test.en",
        "--target",
        files / f"test.{language}",
        "--output",
        output,
    ]
    metrics = ["--latency-metrics", "AL", "LAAL", "DAL", "--no-progress-bar"]
    command = [*SIMULEVAL, *options, *test_set, *metrics]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    with (output / "scores.tsv").open(encoding="utf-8") as file:
        (row,) = csv.DictReader(file, delimiter="\t")
    return {name: float(value) for name, value in row.items()}


def assert_same(said: dict[str, float], output: Path, evaluation: Evaluation) -> None:
    """Assert that text, delays and scores are the same."""
    assert read_instances(output) == evaluation.instances
    for name in ("AL", "LAAL", "DAL"):
        assert said[name] == pytest.approx(getattr(evaluation.result, name), abs=6e-4), name


def evaluate(translator: Translator, files: Path, language: str, delay: int | None) -> Evaluation:
    test_set = read_test_set(files / "test.en", [files / f"test.{language}"])
    return Evaluator(test_set, "auto", Timing(sentences=0)).score_bundle("toy", translator, delay, threads=1)


def test_as_agent_class(german: Translator, files: Path, tmp_path: Path) -> None:
    model = ("--model", german.bundle.directory, "--delay", "3", "--threads", "1")
    said = simuleval(tmp_path, files, "de", "--agent-class", SIMULEVAL_AGENT, *model)
    evaluation = evaluate(german, files, "de", 3)
    assert_same(said, tmp_path, evaluation)
    assert said["BLEU"] == pytest.approx(evaluation.result.BLEU_cased, abs=6e-4)


def test_as_system_directory(chinese: Translator, files: Path, tmp_path: Path) -> None:
    write_system_configs(chinese.bundle.directory)
    system = ("--system-dir", chinese.bundle.directory, "--system-config", "k2.yaml", "--eval-latency-unit", "char")
    said = simuleval(tmp_path, files, "zh", *system)
    assert_same(said, tmp_path, evaluate(chinese, files, "zh", 2))


def test_a_whole_sentence_model_as_system_directory(teacher: Translator, files: Path, tmp_path: Path) -> None:
    assert [path.name for path in write_system_configs(teacher.bundle.directory)] == ["main.yaml"]
    said = simuleval(tmp_path, files, "de", "--system-dir", teacher.bundle.directory)
    assert_same(said, tmp_path, evaluate(teacher, files, "de", None))


def test_simuleval_scores_our_logs(chinese: Translator, files: Path, tmp_path: Path) -> None:
    evaluation = evaluate(chinese, files, "zh", 3)
    evaluation.write(tmp_path)
    output = tmp_path / "toy-k3"
    options = ("--score-only", "--output", str(output), "--eval-latency-unit", "char", "--latency-metrics", "AL")
    done = subprocess.run([*SIMULEVAL, *options], capture_output=True, text=True, check=True)
    assert float(done.stdout.split()[-1]) == pytest.approx(evaluation.result.AL, abs=6e-4)


@pytest.fixture
def agent(german: Translator) -> BundleAgent:
    return build(german, "--delay", "3")


def build(translator: Translator, *options: str) -> BundleAgent:
    parser = ArgumentParser()
    BundleAgent.add_args(parser)
    return BundleAgent(parser.parse_args(["--model", str(translator.bundle.directory), "--threads", "1", *options]))


def push(agent: BundleAgent, states: BundleStates | None, sentence: str, read: int) -> str:
    """Give the agent word `read` of a sentence; return what it writes."""
    words = sentence.split()
    segment = agent.pushpop(TextSegment(content=words[read], finished=read + 1 == len(words)), states)
    return "" if segment.is_empty else str(segment.content)


def test_an_agent_keeps_nothing_but_its_states(agent: BundleAgent) -> None:
    """Two sentences that take turns in one agent are translated as if alone."""
    first, second = ENGLISH[0], ENGLISH[4]
    texts = ["", ""]
    states = [agent.build_states(), agent.build_states()]
    for read in range(len(second.split())):
        for number, sentence in enumerate((first, second)):
            if read < len(sentence.split()):
                texts[number] += push(agent, states[number], sentence, read)
    for text, sentence in zip(texts, (first, second), strict=True):
        agent.reset()
        assert text == "".join(push(agent, None, sentence, read) for read in range(len(sentence.split())))


def test_a_sentence_without_words_is_over_at_once(agent: BundleAgent) -> None:
    segment = agent.pushpop(EmptySegment(finished=True))
    assert segment.finished
    assert not segment.content


def test_the_delay_is_the_models_own_if_none_is_given(german: Translator) -> None:
    default = german.config.default_delay
    sentence = ENGLISH[0]
    agents = [build(german), build(german, "--delay", str(default))]
    written = [[push(agent, None, sentence, read) for read in range(len(sentence.split()))] for agent in agents]
    assert written[0] == written[1]
    with pytest.raises(StreamError, match="was trained for"):
        build(german, "--delay", "4")
