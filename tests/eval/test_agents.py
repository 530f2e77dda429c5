"""SimulEval itself drives the agent, in a process of its own, since what it imports warns and logs."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from simulmt.eval.evaluate import Evaluation, Evaluator, Timing, read_test_set
from simulmt.eval.instances import read_instances
from simulmt.eval.system_dir import write_system_configs
from simulmt.stream import Translator

AGENT = ("--agent-class", "simulmt.eval.agents.BundleAgent")
METRICS = ("--latency-metrics", "AL", "LAAL", "DAL", "AP", "--no-use-ref-len")


def simuleval(*options: str | Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "simuleval.cli", *options, "--no-progress-bar"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr


def scores(directory: Path) -> dict[str, float]:
    """What SimulEval says, which is rounded to three digits."""
    with (directory / "scores.tsv").open(encoding="utf-8") as file:
        (row,) = csv.DictReader(file, delimiter="\t")
    return {name: float(value) for name, value in row.items()}


def evaluate(translator: Translator, files: Path, language: str, delay: int | None) -> Evaluation:
    test_set = read_test_set(files / "test.en", [files / f"test.{language}"])
    return Evaluator(test_set, "auto", Timing(0)).bundle("toy", translator, delay, threads=1)


def assert_same(evaluation: Evaluation, output: Path) -> None:
    """The same text and delays, sentence by sentence, and the same figures."""
    logged = read_instances(output)
    assert [entry.prediction for entry in logged] == [entry.prediction for entry in evaluation.instances]
    assert [entry.delays for entry in logged] == [entry.delays for entry in evaluation.instances]
    assert logged == evaluation.instances
    said: dict[str, Any] = scores(output)
    for name in ("AL", "LAAL", "DAL", "AP"):
        assert said[name] == pytest.approx(getattr(evaluation.result, name), abs=6e-4), name


def test_words_of_an_agent_class(german: Translator, files: Path, tmp_path: Path) -> None:
    test_set = ("--source", files / "test.en", "--target", files / "test.de")
    model = ("--model", german.bundle.directory, "--delay", "3", "--threads", "1")
    simuleval(*AGENT, *model, *test_set, "--output", tmp_path, "--latency-metrics", "AL", "LAAL", "DAL")
    evaluation = evaluate(german, files, "de", 3)
    said = scores(tmp_path)
    for name in ("AL", "LAAL", "DAL"):
        assert said[name] == pytest.approx(getattr(evaluation.result, name), abs=6e-4)
    assert read_instances(tmp_path) == evaluation.instances
    assert said["BLEU"] == pytest.approx(evaluation.result.BLEU_cased, abs=6e-4)
