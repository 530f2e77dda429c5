"""Run every benchmark at toy size, where its figures mean nothing."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "benchmarks"
TOY = {
    "decode.py": ("--toy --runs 1", "CTranslate2 int8"),
    "policy.py": ("--toy --stability 0.5 0.7", "stability 0.7"),
    "speech.py": ("--model toy --seconds 4 --interval 0.5", "two_cities"),
    "standard_library.py": ("--units 100 --rounds 1", "lines (as_toml)"),
    "start.py": ("--pairs 1000", "first batch after"),
    "stream.py": ("--toy --vocabulary 64 --threads 1 --rounds 1", "32 streams together, fp32"),
    "train_step.py": ("--toy --sentences 4 --device cpu --seconds 0", "speed-up"),
}
IN_SUBPROCESS = {"server.py"}  # tested separately, below


@pytest.fixture(autouse=True)
def _restore_process_settings() -> Iterator[None]:
    threads, environment = torch.get_num_threads(), dict(os.environ)
    yield
    torch.set_num_threads(threads)
    os.environ.clear()
    os.environ.update(environment)


def test_every_benchmark_is_run() -> None:
    assert {path.name for path in FOLDER.glob("*.py")} == TOY.keys() | IN_SUBPROCESS


@pytest.mark.parametrize("name", TOY)
def test_benchmark_runs(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "speech.py":
        pytest.importorskip("moonshine_voice")
    options, expected = TOY[name]
    monkeypatch.setattr(sys, "argv", [name, *options.split()])
    runpy.run_path(str(FOLDER / name), run_name="__main__")
    assert expected in capsys.readouterr().out


def test_policies_are_compared_at_every_delay(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["policy.py", "--toy", "--stability", "0", "1", "--max-wait", "0", "1"])
    runpy.run_path(str(FOLDER / "policy.py"), run_name="__main__")
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:-1]]
    names = ("as exported", "stability 0", "stability 0, wait 1", "stability 1", "stability 1, wait 1")
    assert [" ".join(row[:-7]) for row in rows] == [*names] * 2
    for delay, (_, hasty, also_hasty, patient, short) in zip("13", (rows[:5], rows[5:]), strict=True):
        assert {row[-7] for row in (hasty, short)} == {delay}
        assert hasty[-6:] == also_hasty[-6:]
        for column in (-5, -1):  # AL and attempts
            assert float(hasty[column]) <= float(short[column]) <= float(patient[column])
            assert float(hasty[column]) < float(patient[column])


def test_only_a_bundle_with_a_policy_has_thresholds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["policy.py", "--model", "toy"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(FOLDER / "policy.py"), run_name="__main__")
    assert "toy is a ctc bundle without a policy" in capsys.readouterr().err


@pytest.mark.parametrize("system", ["transducer+asn", "transducer", "risk"])
def test_train_step_of_other_systems(
    system: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = TOY["train_step.py"][0].split()
    monkeypatch.setattr(sys, "argv", ["train_step.py", *options, "--system", system])
    runpy.run_path(str(FOLDER / "train_step.py"), run_name="__main__")
    first, _, row = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{system}, ")
    assert row.startswith("simulmt")


@pytest.mark.parametrize("load", ["--streams", "--viewers"])
def test_server_benchmark_runs(load: str) -> None:
    command = [
        sys.executable,
        str(FOLDER / "server.py"),
        *["--model", "toy", load, "2", "--seconds", "1", "--workers", "1"],
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("|           2 |")
