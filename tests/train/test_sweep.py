from __future__ import annotations

import csv
import fcntl
import math
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import optuna
import pytest
import safetensors.torch
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from matplotlib import pyplot

from simulmt.config import build
from simulmt.errors import CheckpointError, ConfigError, TrainingError
from simulmt.model.asn import ASNConfig
from simulmt.train import sweep as sweep_module
from simulmt.train.loop import Outcome
from simulmt.train.monitor import Monitor
from simulmt.train.run import CheckpointFolder, World
from simulmt.train.sweep import NAMES, UNPRUNED_TRIALS, SearchSpace, SweepConfig, run_toml, sweep, with_parameters
from simulmt.train.systems import RunConfig, TrainingConfig

from .helpers import fork, same, tiny

QUICK = SearchSpace(layers=(1,), iterations=(2, 4))


@dataclass
class Stub:
    """A stub of training: three validations that rise to `score(number)`, or the error it raises."""

    score: Callable[[int], float] = lambda number: 10.0 + number % 3
    stopped_at: int | None = None  # the trial that a signal stops, the first time it is run
    runs: list[tuple[int, ASNConfig, int]] = field(default_factory=list)  # number, settings, mu
    validated: dict[int, int] = field(default_factory=dict)  # last update, by trial

    def __call__(self, config: RunConfig, directory: Path, _world: World, monitor: Monitor) -> Outcome:
        with (directory / "sweep.lock").open() as other, pytest.raises(BlockingIOError):  # no other process can lock it
            fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
        number = int(directory.name.removeprefix("trial-"))
        self.runs.append((number, config.asn, config.model["mu"]))
        (directory / "checkpoints").mkdir(exist_ok=True)
        score = self.score(number)
        for update in (10, 20, 30):
            self.validated[number] = update
            monitor.validation(update, {"1": score * update / 30 - 1, "3": score * update / 30 + 1}, score)
            if number == self.stopped_at:
                self.stopped_at = None
                return Outcome("stopped", update, score, signal=signal.SIGTERM)
        return Outcome("finished", 30, score, directory / "final")

    @property
    def numbers(self) -> list[int]:
        return [number for number, _, _ in self.runs]


@pytest.fixture
def config(data: Path) -> RunConfig:
    return tiny(data, "ctc+asn")


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Stub:
    stub = Stub()
    monkeypatch.setattr(sweep_module, "train", stub)
    monkeypatch.setattr(sweep_module, "plot_study", lambda *_: None)  # slow
    return stub


def trials_of(stub: Stub, config: RunConfig, directory: Path, *totals: int, **changes: Any) -> list[Any]:
    """Return the settings of all trials of a sweep that is resumed with each of the totals."""
    del stub.runs[:]
    for total in totals:
        sweep(config, directory, SweepConfig(trials=total, **changes), "cpu")
    return list(stub.runs)


def test_default_space_is_the_papers() -> None:
    assert SearchSpace() == build(
        SearchSpace,
        {
            "layers": [1, 3],
            "iterations": [4, 8, 16],
            "tau": [0.05, 0.3],
            "delta": [0.1, 0.3],
            "mu": [2, 3],
            "gamma": [0, 0.7],
        },
    )


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"space": {"taw": [0.1, 0.2]}}, "unknown key 'taw'; did you mean 'tau'"),
        ({"space": {"iteration": [4]}}, "unknown key 'iteration'; did you mean 'iterations'"),
        ({"space": {"tau": [0.1]}}, "tau: expected an array of 2"),
        ({"space": {"tau": [0.2, 0.1]}}, "tau: expected .lowest, highest., got .0.2, 0.1."),
        ({"space": {"tau": [0.0, 0.1]}}, "tau must be above 0"),
        ({"space": {"gamma": [0.5, 1.5]}}, "gamma must be in 0..1"),
        ({"space": {"layers": []}}, "layers: expected distinct values, got .."),
        ({"space": {"layers": [0, 1]}}, "layers .M. must be at least 1, got 0"),
        ({"space": {"iterations": [4, 4]}}, "iterations: expected distinct values, got .4, 4."),
        ({"space": {"mu": [2.5]}}, "mu: expected a whole number"),
        ({"space": {"mu": [0, 2]}}, "mu must be at least 1, got 0"),
        ({"trials": 0}, "trials must be at least 1"),
        ({"seed": -1}, "seed must not be negative"),
    ],
)
def test_invalid_search_spaces_are_refused(table: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(SweepConfig, table)


def test_trials_stay_in_the_space(stub: Stub, config: RunConfig, tmp_path: Path) -> None:
    space = SearchSpace(layers=(2,), iterations=(4, 8), tau=(0.1, 0.12), delta=(0.2, 0.2), mu=(2, 4), gamma=(0.3, 0.4))
    outcome = sweep(config, tmp_path / "narrow", SweepConfig(12, space=space), "cpu")
    for number, asn, mu in stub.runs:
        drawn = next(trial.parameters for trial in outcome.trials if trial.number == number)
        assert drawn == {name: value for name, value in {**vars(asn), "mu": mu}.items() if name in NAMES}
        assert (asn.layers, asn.delta) == (2, 0.2)
        assert asn.iterations in (4, 8)
        assert mu in (2, 4)
        assert 0.1 <= asn.tau <= 0.12
        assert 0.3 <= asn.gamma <= 0.4
    assert len({asn.tau for _, asn, _ in stub.runs}) == 12
    assert {mu for *_, mu in stub.runs} == {2, 4}


def test_base_settings_are_kept(config: RunConfig) -> None:
    parameters = {"layers": 2, "iterations": 9, "tau": 0.11, "delta": 0.22, "mu": 5, "gamma": 0.33}
    changed = with_parameters(config, parameters)
    assert changed.asn == ASNConfig(2, 9, 0.11, 0.22, 0.33)
    assert changed.model == {**config.model, "mu": 5}
    assert replace(changed, asn=config.asn, model=config.model) == config


def test_a_sweep_depends_on_its_seed_and_not_on_restarts(stub: Stub, config: RunConfig, tmp_path: Path) -> None:
    at_once = trials_of(stub, config, tmp_path / "once", 12)
    assert [number for number, *_ in at_once] == list(range(12))
    assert len({str(settings) for _, *settings in at_once}) == 12
    assert trials_of(stub, config, tmp_path / "restarted", 1, 2, 5, 11, 12) == at_once
    assert trials_of(stub, config, tmp_path / "seeded", 2, seed=2) != at_once[:2]
    assert trials_of(stub, config, tmp_path / "once", 12) == []
    assert trials_of(stub, config, tmp_path / "once", 3) == []


def test_trials_below_the_median_are_pruned(stub: Stub, config: RunConfig, tmp_path: Path) -> None:
    bad = UNPRUNED_TRIALS + 1
    stub.score = lambda number: 3.0 if number in (1, bad) else 10.0 + number
    config = replace(config, training=replace(config.training, warmup_updates=15))
    outcome = sweep(config, tmp_path, SweepConfig(bad + 2), "cpu")
    # 1 is as bad, but within the unpruned trials; scores at 10 are within the warm-up and do not count
    assert stub.validated == {number: 20 if number == bad else 30 for number in range(bad + 2)}
    assert [(trial.number, trial.score) for trial in outcome.trials if trial.state == "pruned"] == [(bad, 2.0)]
    assert [trial.state for trial in outcome.trials].count("complete") == bad + 1
    assert outcome.trials[-1].updates == 20


@pytest.mark.parametrize("error", [TrainingError("diverged\nbadly"), torch.OutOfMemoryError("out of memory")])
def test_a_failed_trial_does_not_stop_the_sweep(
    stub: Stub, config: RunConfig, tmp_path: Path, error: Exception
) -> None:
    def score(number: int) -> float:
        if number == 1:
            raise error
        return 10.0

    stub.score = score
    outcome = sweep(config, tmp_path, SweepConfig(3), "cpu")
    assert (outcome.status, stub.numbers) == ("finished", [0, 1, 2])
    last = outcome.trials[-1]
    assert (last.number, last.state, last.score) == (1, "failed", None)
    assert last.reason == str(error).splitlines()[0]
    assert trials_of(stub, config, tmp_path, 3) == []


def test_other_errors_end_the_sweep_and_leave_the_trial_for_later(
    stub: Stub, config: RunConfig, tmp_path: Path
) -> None:
    def score(_number: int) -> float:
        raise CheckpointError("disk full")

    stub.score, good = score, stub.score
    with pytest.raises(CheckpointError, match="disk full"):
        sweep(config, tmp_path, SweepConfig(2), "cpu")
    stub.score = good
    sweep(config, tmp_path, SweepConfig(2), "cpu")
    assert stub.numbers == [0, 0, 1]
    assert stub.runs[0] == stub.runs[1]


def test_a_sweep_without_completed_trials_is_reported(
    stub: Stub, config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def score(_number: int) -> float:
        raise TrainingError("diverged")

    stub.score = score
    outcome = sweep(config, tmp_path, SweepConfig(2), "cpu")
    assert outcome.best is None
    assert "2 failed; no trial was completed" in capsys.readouterr().err
    assert not (tmp_path / "best.toml").exists()


def test_a_signal_stops_the_sweep_and_the_trial_resumes_later(stub: Stub, config: RunConfig, tmp_path: Path) -> None:
    stub.stopped_at = 1
    outcome = sweep(config, tmp_path, SweepConfig(3), "cpu")
    assert (outcome.status, outcome.signal) == ("stopped", signal.SIGTERM)
    assert [(trial.number, trial.state) for trial in outcome.trials] == [(0, "complete"), (1, "running")]
    assert (tmp_path / "trial-0001" / "checkpoints").exists()
    outcome = sweep(config, tmp_path, SweepConfig(3), "cpu")
    assert outcome.status == "finished"
    assert stub.numbers == [0, 1, 1, 2]
    assert stub.runs[1] == stub.runs[2]


def test_a_trial_of_another_process_is_left_alone(stub: Stub, config: RunConfig, tmp_path: Path) -> None:
    stub.stopped_at = 0
    sweep(config, tmp_path, SweepConfig(3), "cpu")
    with (tmp_path / "trial-0000" / "sweep.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        outcome = sweep(config, tmp_path, SweepConfig(3), "cpu")
    assert stub.numbers == [0, 1, 2]
    assert (outcome.trials[-1].number, outcome.trials[-1].state) == (0, "running")
    assert trials_of(stub, config, tmp_path, 3) == [stub.runs[0]]


def test_only_the_best_trial_keeps_its_checkpoints(stub: Stub, config: RunConfig, tmp_path: Path) -> None:
    stub.score = lambda number: [3.0, 5.0, 4.0][number]
    sweep(config, tmp_path, SweepConfig(3), "cpu")
    assert [path.parent.name for path in tmp_path.glob("trial-*/checkpoints")] == ["trial-0001"]


def test_another_configuration_is_another_sweep(stub: Stub, config: RunConfig, tmp_path: Path) -> None:
    sweep(config, tmp_path, SweepConfig(1), "cpu")
    longer = replace(config, training=replace(config.training, max_updates=99))
    with pytest.raises(ConfigError, match=r"training.max_updates was 20, is 99\); use another directory"):
        sweep(longer, tmp_path, SweepConfig(2), "cpu")
    with pytest.raises(ConfigError, match=r"space.mu was \[2, 3\], is \[2\]; sweep.seed was 1, is 2\);"):
        sweep(config, tmp_path, SweepConfig(2, seed=2, space=SearchSpace(mu=(2,))), "cpu")
    assert stub.numbers == [0]


def test_invalid_sweeps_are_refused_before_anything_is_written(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "sweep"
    wrong = {
        "needs 'ctc\\+asn', got 'ctc'": replace(config, system="ctc"),
        "the sweep tries .2, 3.; narrow": replace(config, init=tmp_path),
        "unknown key 'depth'": replace(config, model={"depth": 3}),
    }
    for message, run in wrong.items():
        with pytest.raises(ConfigError, match=message):
            sweep(run, directory, SweepConfig(1), "cpu")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="run simulmt sweep once per --device"):
        sweep(config, directory, SweepConfig(1), "cpu")
    assert not directory.exists()


def test_unusable_directories_are_named(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file: cannot be written"):
        sweep(config, tmp_path / "file", SweepConfig(1), "cpu")
    (tmp_path / "study.db").write_text("no database at all, but long enough to look like one\n" * 100)
    with pytest.raises(CheckpointError, match=r"study.db: cannot be used: .*not a database"):
        sweep(config, tmp_path, SweepConfig(1), "cpu")


def test_report(stub: Stub, config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def score(number: int) -> float:
        if number == 3:
            raise TrainingError("diverged, alas")
        return [11.0, 12.5, 12.25][number]

    stub.score = score
    outcome = sweep(config, tmp_path, SweepConfig(4), "cpu")
    assert [trial.number for trial in outcome.trials] == [1, 2, 0, 3]
    assert outcome.best is not None
    assert outcome.best.score == 12.5

    with (tmp_path / "trials.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["trial"] for row in rows] == ["0", "1", "2", "3"]
    assert [row["score"] for row in rows] == ["11.0", "12.5", "12.25", ""]
    assert (rows[3]["state"], rows[3]["reason"]) == ("failed", "diverged, alas")
    assert {name: float(rows[1][name]) for name in NAMES} == outcome.best.parameters

    best = RunConfig.read(tmp_path / "best.toml")
    assert best == with_parameters(config, outcome.best.parameters)
    assert (best.asn, best.model["mu"]) == stub.runs[1][1:]
    shown = capsys.readouterr().err
    assert "3 complete, 1 failed" in shown
    assert shown.index("12.50 │") < shown.index("12.25 │") < shown.index("11.00 │")


def test_optuna_prints_nothing(stub: Stub, config: RunConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    optuna.logging.set_verbosity(optuna.logging.DEBUG)
    optuna.logging.enable_propagation()
    try:
        sweep(config, tmp_path, SweepConfig(2), "cpu")
    finally:
        optuna.logging.disable_propagation()
    assert stub.numbers == [0, 1]
    assert not [record for record in caplog.records if record.name.startswith("optuna")]


words = st.text(st.characters(codec="utf-8", exclude_characters="\x7f"))
numbers = st.integers(-(2**62), 2**62) | st.floats(allow_nan=False)


@settings(deadline=None, max_examples=100)
@given(
    model=st.dictionaries(st.sampled_from(["width", "dropout", "mu", "name"]), words | numbers | st.booleans()),
    clip_norm=st.floats(1e-300, allow_infinity=True),
    betas=st.tuples(*[st.floats(0, 1, exclude_max=True)] * 2),
    init=st.none() | st.just(Path("/models/the \"best\" \\ of 'all'")),
)
@example(model={}, clip_norm=math.inf, betas=(0.9, 0.98), init=None)
def test_configuration_files_are_read_back(
    tmp_path_factory: pytest.TempPathFactory,
    model: dict[str, Any],
    clip_norm: float,
    betas: tuple[float, float],
    init: Path | None,
) -> None:
    training = TrainingConfig(clip_norm=clip_norm, betas=betas, compile="no")
    config = RunConfig("ctc+asn", Path("/data"), init, (1, 3, 5), model, ASNConfig(gamma=0.0), training)
    path = tmp_path_factory.getbasetemp() / "written.toml"
    path.write_text(run_toml(config), encoding="utf-8")
    assert RunConfig.read(path) == config


def test_configuration_files_work_from_anywhere(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(config.data.parent)
    path = tmp_path / "best.toml"
    path.write_text(run_toml(replace(config, data=Path("data"), init=Path("model"))), encoding="utf-8")
    assert RunConfig.read(path) == replace(config, init=config.data.parent / "model")
    path.write_text(run_toml(replace(config, init=Path("toy"))), encoding="utf-8")
    assert RunConfig.read(path).init == Path("toy")  # a shipped bundle


def test_plots_show_completed_trials(config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_module, "train", Stub())
    background = matplotlib.rcParams["axes.facecolor"]
    sweep(config, tmp_path, SweepConfig(trials=1, space=QUICK), "cpu")
    assert not list(tmp_path.glob("*.png"))  # nothing to compare yet
    sweep(config, tmp_path, SweepConfig(trials=2, space=QUICK), "cpu")
    assert matplotlib.rcParams["axes.facecolor"] == background  # Optuna sets a style
    assert pyplot.get_fignums() == []
    for name in ("parallel.png", "slice.png"):
        picture = matplotlib.image.imread(tmp_path / name)[..., :3]
        assert np.ptp(picture, axis=-1).max() > 0.1  # there are lines or points, in colour


def sweep_until_killed(config: RunConfig, directory: Path, settings: SweepConfig) -> None:
    """Die in the second trial at update 10, after its score is reported and before its checkpoint is written."""
    save = CheckpointFolder.save

    def save_or_die(self: CheckpointFolder, update: int, *arguments: Any) -> None:
        if update == 10 and "trial-0001" in self.folder.parts:
            os.kill(os.getpid(), signal.SIGKILL)
        save(self, update, *arguments)

    CheckpointFolder.save = save_or_die  # type: ignore[assignment, method-assign]
    sweep(config, directory, settings, "cpu")


def test_a_killed_sweep_resumes_as_if_nothing_had_happened(
    config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(config, training=replace(config.training, max_updates=10))
    settings = SweepConfig(3, space=QUICK)
    process = fork(sweep_until_killed, config, tmp_path / "killed", settings)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not (tmp_path / "killed" / "trial-0001" / "final").exists()

    whole = sweep(config, tmp_path / "whole", settings, "cpu")
    assert "ignoring it" not in capsys.readouterr().err
    resumed = sweep(config, tmp_path / "killed", settings, "cpu")
    shown = capsys.readouterr().err
    assert "trial 0 (" not in shown
    assert shown.index("trial 1 (2 of 3)") < shown.index("resuming after update 5") < shown.index("trial 2 (3 of 3)")
    assert resumed == whole
    assert [trial.state for trial in whole.trials] == ["complete"] * 3
    for number in range(3):
        assert (tmp_path / "killed" / f"trial-{number:04d}" / "run.json").exists()
        file = f"trial-{number:04d}/final/model.safetensors"
        models = [safetensors.torch.load_file(tmp_path / name / file) for name in ("whole", "killed")]
        assert same(*models)


def test_a_diverging_trial_fails_with_its_reason(config: RunConfig, tmp_path: Path) -> None:
    wild = replace(config.training, learning_rate=1e12, warmup_updates=0, max_skipped=1)
    outcome = sweep(replace(config, training=wild), tmp_path, SweepConfig(2, space=QUICK), "cpu")
    assert [trial.state for trial in outcome.trials] == ["failed", "failed"]
    assert "diverged" in outcome.trials[0].reason
