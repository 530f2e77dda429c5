"""Run stages in processes, with fake commands."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from simulmt.recipe.plan import Recipe, Stage, Workspace
from simulmt.recipe.runner import Program, RunningStage, run_stages
from simulmt.recipe.state import LOG, RECORD, StageStatus, stage_statuses

LAUNCHER = """
import pathlib, signal, sys, time
def stop(*_):
    time.sleep(0.3)  # slow to stop its children
    pathlib.Path(sys.argv[1], "stopped").touch()
    sys.exit(1)
signal.signal(signal.SIGTERM, stop)
pathlib.Path(sys.argv[1], "started").touch()
time.sleep(60)
"""


def command(words: list[str], processes: int = 1) -> int:
    """Run a fake command.

    The commands are `touch OUT`, `fail OUT`, `launch OUT DIR`, which starts a process that must be stopped, and
    `meet OUT DIR N`, which waits until N such commands are there at the same time.
    """
    verb, out, *rest = words
    print(f"{verb} at work")
    if verb == "fail":
        return 3
    if verb == "launch" and not Path(rest[0], "started").exists():
        return subprocess.run([sys.executable, "-c", LAUNCHER, rest[0]], check=False, close_fds=False).returncode
    if verb == "launch":
        rest = sorted(path.name for path in Path(rest[0]).iterdir())
    if verb == "meet":
        directory, count = Path(rest[0]), int(rest[1])
        (directory / Path(out).name).touch()
        while len(list(directory.iterdir())) < count:
            time.sleep(0.01)
    (Path(out) / "scratch").mkdir(exist_ok=True)
    (Path(out) / "result.txt").write_text(" ".join(rest) if processes == 1 else f"{processes} processes")
    return 0


FAKES = Program(command, scratch="scratch")


class RecordingView:
    """A view that records what it is shown."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self.most_at_once = 0

    def started(self, stage: RunningStage) -> None:
        self.events.append(("started", stage.name))

    def running(self, stages: Sequence[RunningStage]) -> None:
        self.most_at_once = max(self.most_at_once, len(stages))

    def done(self, stage: RunningStage) -> None:
        self.events.append(("done", stage.name))

    def failed(self, stage: RunningStage, code: int) -> None:
        self.events.append((f"failed {code} {stage.last_line()}", stage.name))

    def skipped(self, stage: Stage, needed: str) -> None:
        self.events.append((f"left out for {needed}", stage.name))

    def close(self) -> None: ...


def prepare(runs: dict[str, str], work: Path) -> tuple[list[StageStatus], Workspace]:
    recipe = Recipe.build({"title": "t", "stages": {name: {"run": run} for name, run in runs.items()}}, "recipe")
    workspace = Workspace(work)
    return list(stage_statuses(recipe, workspace, lambda _stage: "code").values()), workspace


def test_stages_run_in_order_and_leave_records(tmp_path: Path) -> None:
    statuses, workspace = prepare({"b": "touch {out} {a}", "a": "touch {out} word", "c": "touch {out} {b}"}, tmp_path)
    view = RecordingView()
    assert run_stages(statuses, workspace, 1, FAKES, view)
    assert view.events == [(event, name) for name in "abc" for event in ("started", "done")]
    assert (tmp_path / "b" / "result.txt").read_text() == str(tmp_path / "a")
    assert (tmp_path / "b" / LOG).read_text() == f"$ simulmt touch {tmp_path}/b {tmp_path}/a\ntouch at work\n"
    assert {status.state for status in prepare({"a": "touch {out} word"}, tmp_path)[0]} == {"done"}


def test_a_stage_runs_in_its_number_of_processes(tmp_path: Path) -> None:
    statuses, workspace = prepare({"a": "touch {out} word"}, tmp_path)
    shared = replace(statuses[0], stage=replace(statuses[0].stage, processes=4))
    assert run_stages([shared], workspace, 1, FAKES, RecordingView())
    assert (tmp_path / "a" / "result.txt").read_text() == "4 processes"
    assert {status.state for status in prepare({"a": "touch {out} word"}, tmp_path)[0]} == {"done"}, "the same result"


def test_independent_stages_run_together_but_not_more_than_allowed(tmp_path: Path) -> None:
    (tmp_path / "meeting").mkdir()
    runs = dict.fromkeys(("a", "b", "c"), f"meet {{out}} {tmp_path}/meeting 2")
    statuses, workspace = prepare(runs, tmp_path / "work")
    view = RecordingView()
    assert run_stages(statuses, workspace, 2, FAKES, view), "two had to be there at the same time to go on"
    assert view.most_at_once == 2


def test_a_failure_stops_what_needs_it_and_nothing_else(tmp_path: Path) -> None:
    runs = {
        "bad": "fail {out}",
        "needs": "touch {out} {bad}",
        "then": "touch {out} {needs}",
        "other": "touch {out}",
    }
    statuses, workspace = prepare(runs, tmp_path)
    view = RecordingView()
    assert not run_stages(statuses, workspace, 1, FAKES, view)
    assert view.events == [
        ("started", "bad"),
        ("failed 3 fail at work", "bad"),
        ("left out for bad", "needs"),
        ("left out for bad", "then"),
        ("started", "other"),
        ("done", "other"),
    ]
    assert not (tmp_path / "bad" / RECORD).exists()
    assert not (tmp_path / "needs").exists()


def test_a_stage_finished_by_another_runner_is_not_run_again(tmp_path: Path) -> None:
    statuses, workspace = prepare({"a": "touch {out} word"}, tmp_path)
    assert run_stages(statuses, workspace, 1, FAKES, RecordingView())
    record = (tmp_path / "a" / RECORD).stat().st_mtime_ns
    assert run_stages(statuses, workspace, 1, FAKES, RecordingView())
    assert (tmp_path / "a" / RECORD).stat().st_mtime_ns == record


def test_the_scratch_directory_is_deleted(tmp_path: Path) -> None:
    statuses, workspace = prepare({"a": "touch {out} word"}, tmp_path)
    assert run_stages(statuses, workspace, 1, FAKES, RecordingView())
    assert not (tmp_path / "a" / "scratch").exists()
    other = prepare({"a": "touch {out} words"}, tmp_path)[0]
    assert run_stages(other, workspace, 1, Program(command), RecordingView())
    assert (tmp_path / "a" / "scratch").exists()
    # As if it had been killed after writing its record, before deleting the scratch directory.
    assert run_stages(other, workspace, 1, FAKES, RecordingView())
    assert not (tmp_path / "a" / "scratch").exists()


def test_only_resumable_commands_find_unfinished_work(tmp_path: Path) -> None:
    statuses, workspace = prepare({"a": "fail {out}"}, tmp_path)
    for program, left in ((FAKES, False), (Program(command, resumable=("fail",)), True)):
        assert not run_stages(statuses, workspace, 1, program, RecordingView())
        (tmp_path / "a" / "half.txt").touch()
        assert not run_stages(statuses, workspace, 1, program, RecordingView())
        assert (tmp_path / "a" / "half.txt").exists() == left


def test_children_of_a_stage_are_stopped_when_the_runner_is_killed(tmp_path: Path) -> None:
    (tmp_path / "launched").mkdir()
    runs = {"a": f"launch {{out}} {tmp_path}/launched"}
    program = "import sys, pathlib; from recipe.test_runner import *; work = pathlib.Path(sys.argv[2])\n"
    program += "run_stages(*prepare({'a': sys.argv[1]}, work), 1, FAKES, RecordingView())"
    runner = subprocess.Popen(
        [sys.executable, "-c", program, runs["a"], str(tmp_path / "work")], cwd=Path(__file__).parents[1]
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "launched" / "started").exists():
        assert time.monotonic() < deadline, "it never started"
        time.sleep(0.02)
    runner.kill()
    runner.wait()
    statuses, workspace = prepare(runs, tmp_path / "work")
    assert run_stages(statuses, workspace, 1, FAKES, RecordingView())
    assert (tmp_path / "work" / "a" / "result.txt").read_text() == "started stopped", "it had to be waited for"


def test_the_runner_itself_needs_no_torch() -> None:
    program = "import sys, simulmt.cli.display, simulmt.recipe.runner; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
