"""The command `simulmt run`: killed, interrupted, moved to another machine."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.run import parse_args as torchrun_arguments

from simulmt.cli.recipes import run_command

from .helpers import assert_refused, call, exit_code, start

RECIPE = """
title = "A short experiment"

[settings.student]
system = "ctc"
data = "."
[settings.student.model]
width = 16
inner = 16
heads = 2
layers = 1
[settings.student.training]
batch_tokens = 256
update_tokens = 256
max_updates = 30
validate_every = 10
keep_best = 2

[stages.text]
run = "synthetic --train=400 --dev=10 --test=10 --output={out}"

[stages.prepared]
run = '''prepare --source={text}/train.source --target={text}/train.target --dev-source={text}/dev.source
  --dev-target={text}/dev.target --source-vocabulary=500 --target-vocabulary=500 --output={out}'''

[stages.ctc]
each.k = [1, 3]
run = "train {settings.student} --set=data={prepared} --set=delays=[{k}] --run={out}"
"""
MODELS = ("ctc-k1/final/model.safetensors", "ctc-k3/final/model.safetensors")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "short.toml"
    path.write_text(RECIPE)
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the recipe without interruption."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "short.toml").write_text(RECIPE)
    assert exit_code("run", folder / "short.toml", "--work", folder / "work", "--jobs", "2") == 0
    return folder / "work"


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.02)


def test_a_recipe_that_is_killed_and_interrupted_ends_with_the_same_files(
    recipe: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    for sent, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)):
        process = start("run", recipe, "--work", broken, "--jobs", "1")
        wait_for(broken / ("prepared/begun.json" if sent == signal.SIGKILL else "ctc-k1/checkpoints"))
        process.send_signal(sent)
        process.communicate()
        assert process.returncode == code
    assert not (broken / "ctc-k1" / "stage.json").exists()

    done = call("run", recipe, "--work", broken, "--jobs", "1", capture=capsys)
    assert done.returncode == 0, done.stderr
    for name in ("text/train.target", "prepared/source.model", *MODELS):
        assert (broken / name).read_bytes() == (whole / name).read_bytes(), name
    again = call("run", recipe, "--work", broken, capture=capsys)
    assert (again.returncode, again.stderr) == (0, "4 stages done, 0 to do\n")


def test_a_stage_done_on_another_machine_counts_when_it_is_brought_back(
    recipe: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("text", "prepared", "ctc-k3"):
        shutil.copytree(whole / name, tmp_path / "here" / name)
    shown = call("run", recipe, "--work", tmp_path / "here", "--dry-run", capture=capsys).stdout
    assert "ctc-k1  to do" in shown
    assert "ctc-k3  done" in shown


def test_a_dry_run_shows_what_is_stale_and_why(
    recipe: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = ("--work", tmp_path / "work")
    shutil.copytree(whole / "text", tmp_path / "work" / "text")
    recipe.write_text(RECIPE.replace("--test=10", "--test=20"))
    shown = call("run", recipe, *work, "--dry-run", "--only", "prepared", capture=capsys).stdout
    assert "└── text  out of date: command changed: --test=20" in shown
    assert "    └── prepared  to do" in shown
    assert f"prepared: simulmt prepare --source={tmp_path}/work/text/train.source" in shown
    assert not (tmp_path / "work" / "prepared").exists()


def test_a_dry_run_says_which_settings_are_not_written_yet(
    recipe: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--dry-run", "--only", "ctc-k1")
    done = call("run", recipe, "--work", tmp_path / "work", *options, capture=capsys)
    path = tmp_path / "work" / "ctc-k1" / "settings.student.toml"
    assert f"ctc-k1: simulmt train {path} " in done.stdout
    assert done.stderr == f"{path} does not exist yet: it is written when the stage starts\n"
    assert call("run", recipe, "--work", whole, *options, capture=capsys).stderr == ""


def test_a_failing_stage_says_where_its_log_is(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe.write_text(RECIPE.replace("--source-vocabulary=500", "--source-vocabulary=9999"))
    done = call("run", recipe, "--work", tmp_path / "work", capture=capsys)
    assert done.returncode == 1
    assert f"see {tmp_path}/work/prepared/stage.log" in done.stderr
    assert "ctc-k3: skipped, because prepared failed" in done.stderr


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("--train=400", "--trian=400", "stages.text: synthetic: No such option: --trian"),
        ("--output={out}", "", "stages.text: synthetic: Missing option '--output'"),
        ("--train=400", "--train=many", "stages.text: synthetic: --train many: expected a whole number from 0"),
        ('"synthetic', '"sinthetic', "stages.text: unknown command 'sinthetic'"),
        ("--train=400", "--links={given}/links", "stages.text: synthetic: No such option: --links"),
    ],
)
def test_a_wrong_command_line_is_found_before_anything_is_run(
    before: str, after: str, message: str, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe.write_text(RECIPE.replace(before, after, 1))
    assert_refused(call("run", recipe, "--work", tmp_path / "work", capture=capsys), 2, message)
    assert not (tmp_path / "work").exists()


def test_missing_inputs_are_reported_before_anything_is_run(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = ("--work", tmp_path / "work")
    refused = call("run", recipe, *work, "--only", "ctc", capture=capsys)
    assert_refused(refused, 2, "--only ctc-k1: needs prepared, which is to do")
    recipe.write_text(RECIPE.replace("{text}/train.source", "{given}/train.en"))
    assert_refused(call("run", recipe, *work, capture=capsys), 2, "prepared reads train.en")
    (tmp_path / "work" / "text").mkdir(parents=True)
    (tmp_path / "work" / "text" / "thesis.txt").write_text("mine")
    assert_refused(call("run", recipe, *work, capture=capsys), 2, "work/text was not written by a recipe")


def test_a_result_is_kept_if_its_replacement_cannot_run(
    recipe: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = tmp_path / "work"
    options = ("--work", work, "--only", "prepared")
    recipe.write_text(RECIPE.replace("{text}", "{given}"))
    assert call("run", recipe, *options, "--data", whole / "text", capture=capsys).returncode == 0
    before = (work / "prepared" / "source.model").read_bytes()
    recipe.write_text(RECIPE.replace("{text}", "{given}").replace("--source-vocabulary=500", "--source-vocabulary=400"))
    assert_refused(call("run", recipe, *options, capture=capsys), 2, "prepared reads train.source")
    assert (work / "prepared" / "source.model").read_bytes() == before


def test_shared_commands_are_spread_over_the_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands: list[list[str]] = []

    def pretend(command: list[str], check: bool, close_fds: bool) -> subprocess.CompletedProcess[str]:
        assert not check
        assert not close_fds, "it holds the lock of its stage"
        commands.append(command)
        return subprocess.CompletedProcess(command, 7)

    monkeypatch.setattr(subprocess, "run", pretend)
    monkeypatch.setattr(sys, "argv", ["torchrun"])  # which it changes
    assert run_command(["rewrite", "distil", "run"], gpus=4) == 7
    assert run_command(["train", "c.toml", "--run=r"], gpus=4) == 7
    for command, words in zip(commands, (["rewrite", "distil", "run"], ["train", "c.toml", "--run=r"]), strict=True):
        understood = torchrun_arguments(command[3:])  # behind "python -m torch.distributed.run"
        assert (understood.nproc_per_node, understood.module, understood.training_script) == ("4", True, "simulmt")
        assert understood.training_script_args == words
    assert run_command(["synthetic", f"--output={tmp_path}", "--train=5", "--dev=5", "--test=5"], gpus=4) == 0
    assert run_command(["synthetic", f"--output={tmp_path}", "--reorder=7"], gpus=1) == 2
    assert len(commands) == 2
    assert (tmp_path / "train.source").exists()


def test_additional_processes_share_the_work_of_a_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They start with the command and are stopped when it returns, even if it fails."""
    helpers: list[subprocess.Popen[bytes]] = []

    def pretend(command: list[str], close_fds: bool) -> subprocess.Popen[bytes]:
        assert (command[1:], close_fds) == (["-m", "simulmt", *words], False)
        helpers.append(popen(["sleep", "60"]))
        return helpers[-1]

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", pretend)
    monkeypatch.setattr(sys, "argv", ["simulmt"])  # which it changes
    text = tmp_path / "text"
    text.write_text("a\n")
    for words, code in (
        (["rewrite", "filter", f"--source={text}", f"--target={text}", f"--output={tmp_path}/out"], 0),
        (["rewrite", "filter", f"--source={text}", f"--target={text}-2", f"--output={tmp_path}/out"], 1),
    ):
        assert run_command(words, processes=3) == code
    assert [helper.returncode for helper in helpers] == [-signal.SIGTERM] * 4


def test_only_shardable_commands_are_shared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "shared.toml"
    recipe.write_text('title = "T"\n[stages.text]\nprocesses = 2\nrun = "synthetic --output={out}"\n')
    refused = call("run", recipe, "--work", tmp_path, capture=capsys)
    assert_refused(refused, 2, "stages.text: processes: synthetic cannot run in several processes")


def test_training_runs_in_several_processes(
    recipe: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("text", "prepared"):
        shutil.copytree(whole / name, tmp_path / "work" / name)
    done = call("run", recipe, "--work", tmp_path / "work", "--only", "ctc-k1", "--gpus", "2", capture=capsys)
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "work" / "ctc-k1" / "stage.log").read_text()
    assert "2 processes make updates of 512 tokens" in log
    assert "finished after update 30" in log


def test_a_place_that_cannot_be_written_is_named(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("not a directory")
    done = call("run", recipe, "--work", tmp_path / "file", capture=capsys)
    assert done.returncode == 1
    assert f"--work {tmp_path / 'file'}: not writable" in done.stderr
