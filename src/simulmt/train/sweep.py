"""Hyperparameter search for the sorting network; every trial is an ordinary training run.

DIR/study.db        trials and scores (Optuna, SQLite)
DIR/trial-0007/     the run of trial 7; only the best trial keeps its checkpoints
DIR/trials.csv      DIR/best.toml      DIR/parallel.png      DIR/slice.png
"""

from __future__ import annotations

import csv
import os
import shutil
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TextIO

import matplotlib
import optuna
import torch
from matplotlib import pyplot
from optuna.exceptions import ExperimentalWarning, StorageInternalError
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState
from optuna.visualization.matplotlib import plot_parallel_coordinate, plot_slice
from rich.console import Console
from rich.table import Table
from sqlalchemy.exc import SQLAlchemyError

from simulmt.config import as_table, as_toml, require
from simulmt.data.store import Dataset
from simulmt.errors import CheckpointError, TrainingError
from simulmt.files import lock
from simulmt.model.asn import ASNConfig
from simulmt.runtime.bundle import shipped_names
from simulmt.train.loop import system_config, train
from simulmt.train.monitor import Monitor
from simulmt.train.run import World, differences, flat, init_distributed, open_to_lock, record_run
from simulmt.train.systems import RunConfig

STUDY = "sweep"
LOCK = "sweep.lock"
UNPRUNED_TRIALS = 5  # trials completed before any is pruned
BEST_SHOWN = 10
RANGES = ("tau", "delta", "gamma")  # the others are choices
SYMBOLS = {"layers": "M", "iterations": "l"}  # where the paper's symbol differs

State = Literal["complete", "pruned", "running", "failed"]
STATES: dict[TrialState, State] = {  # in the order of the report
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.RUNNING: "running",
    TrialState.FAIL: "failed",
}


@dataclass(frozen=True)
class SearchSpace:
    """Choices of integers and ranges of floats; defaults are the paper's."""

    layers: tuple[int, ...] = (1, 3)
    iterations: tuple[int, ...] = (4, 8, 16)
    tau: tuple[float, float] = (0.05, 0.3)
    delta: tuple[float, float] = (0.1, 0.3)
    mu: tuple[int, ...] = (2, 3)
    gamma: tuple[float, float] = (0.0, 0.7)

    def __post_init__(self) -> None:
        for name, values in asdict(self).items():
            if name in RANGES:
                require(values[0] <= values[1], f"{name}: expected [lowest, highest], got {list(values)}")
            else:
                require(0 < len(values) == len(set(values)), f"{name}: expected distinct values, got {list(values)}")
        require(min(self.mu) >= 1, f"mu must be at least 1, got {min(self.mu)}")
        for pick in (min, max):  # ASNConfig validates its settings
            ASNConfig(**{name: pick(values) for name, values in asdict(self).items() if name != "mu"})

    def draw(self, trial: optuna.Trial) -> dict[str, Any]:
        """Draw values for a trial, or return those it already has."""
        return {
            name: trial.suggest_float(name, *values) if name in RANGES else trial.suggest_categorical(name, values)
            for name, values in asdict(self).items()
        }


NAMES = tuple(each.name for each in fields(SearchSpace))


@dataclass(frozen=True)
class SweepConfig:
    """Search settings."""

    trials: int = 20  # in total, including those of earlier calls
    seed: int = 1
    space: SearchSpace = field(default_factory=SearchSpace)

    def __post_init__(self) -> None:
        require(self.trials >= 1, f"trials must be at least 1, got {self.trials}")
        require(self.seed >= 0, f"seed must not be negative, got {self.seed}")


@dataclass(frozen=True)
class TrialResult:
    """One trial, with its final or latest validation score."""

    number: int
    state: State
    score: float | None
    updates: int
    parameters: Mapping[str, Any]
    reason: str = ""


@dataclass(frozen=True)
class SweepOutcome:
    """All trials so far, best first."""

    status: Literal["finished", "stopped"]
    trials: tuple[TrialResult, ...]
    signal: int | None = None  # signal that stopped the sweep, if any

    @property
    def best(self) -> TrialResult | None:
        return self.trials[0] if self.trials and self.trials[0].state == "complete" else None


def sweep(config: RunConfig, directory: Path, settings: SweepConfig, device: str = "auto") -> SweepOutcome:
    """Run trials until there are `settings.trials`, resuming an existing sweep, and report.

    Interrupted trials resume in their run directories. To use several devices, start the same command once per device;
    the processes share the trials. torchrun is not supported.
    """
    require(
        int(os.environ.get("WORLD_SIZE", 1)) == 1,
        "sweeps do not run under torchrun; to use several devices, run simulmt sweep once per --device cuda:N",
    )
    _check(config, settings.space)
    signal: int | None = None
    with init_distributed(device) as world, _open_storage(directory) as storage:
        study = _join_study(storage, config, directory, settings)
        while signal is None and (claim := _claim_trial(study, storage, directory, settings)):
            trial, lock = claim
            with lock:
                signal = _run_trial(trial, config, directory, settings, world)
            _drop_checkpoints(_results(study), directory)
        outcome = SweepOutcome("finished" if signal is None else "stopped", _results(study), signal)
        report(outcome, study, config, directory)
    return outcome


def _check(config: RunConfig, space: SearchSpace) -> None:
    """Raise errors that would otherwise occur in every trial."""
    require(
        config.system == "ctc+asn",
        f"system: a sweep searches the settings of the sorting network and needs 'ctc+asn', got '{config.system}'",
    )
    require(
        config.init is None or len(space.mu) == 1,
        f"init: the initial model has one mu, but the sweep tries {list(space.mu)}; narrow the space of mu",
    )
    system_config(config, Dataset.open(config.data)).network()


# Trials are claimed with locks that end with their process, so a trial that is running in the database but not locked
# was interrupted.


@contextmanager
def _open_storage(directory: Path) -> Iterator[RDBStorage]:
    path = directory / "study.db"
    try:
        with _lock(directory):
            storage = RDBStorage(f"sqlite:///{path}", engine_kwargs={"connect_args": {"timeout": 60}})
        try:
            yield storage
        finally:
            storage.remove_session()
            storage.engine.dispose()
    except (SQLAlchemyError, StorageInternalError) as error:
        raise CheckpointError(f"{path}: cannot be used: {str(error).splitlines()[0]}") from None


def _join_study(storage: RDBStorage, config: RunConfig, directory: Path, settings: SweepConfig) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    # Scores during warm-up are not informative.
    pruner = optuna.pruners.MedianPruner(UNPRUNED_TRIALS, n_warmup_steps=config.training.warmup_updates)
    with _lock(directory):
        study = optuna.create_study(
            storage=storage, study_name=STUDY, direction="maximize", pruner=pruner, load_if_exists=True
        )
        _check_same(study, config, settings, directory)
    return study


def _check_same(study: optuna.Study, config: RunConfig, settings: SweepConfig, directory: Path) -> None:
    """Raise an error unless all settings but the hyperparameters are unchanged."""
    now = flat({**as_table(resolved(config)), "sweep": {"seed": settings.seed}, "space": as_table(settings.space)})
    before = study.user_attrs.get("settings")
    if before is None:
        study.set_user_attr("settings", now)
        return
    changes = differences(before, now)
    require(not changes, f"{directory}: a sweep with different settings ({'; '.join(changes)}); use another directory")


def _claim_trial(
    study: optuna.Study, storage: RDBStorage, directory: Path, settings: SweepConfig
) -> tuple[optuna.Trial, TextIO] | None:
    """Claim and lock an interrupted or new trial; return None if all are taken."""
    with _lock(directory):
        trials = _trials(study)
        for known in trials:
            if known.state == TrialState.RUNNING and (lock := _lock_free(_run_directory(directory, known.number))):
                study_id = storage.get_study_id_from_name(STUDY)
                trial_id = storage.get_trial_id_from_study_id_trial_number(study_id, known.number)
                return optuna.Trial(study, trial_id), lock
        if len(trials) >= settings.trials:
            return None
        trial = study.ask()
        return trial, _lock(_run_directory(directory, trial.number))


def _run_trial(
    trial: optuna.Trial, config: RunConfig, directory: Path, settings: SweepConfig, world: World
) -> int | None:
    """Train and report to the study; return the signal that stopped it, if any."""
    # Each trial has its own seed, so that a resumed sweep does not draw its first trials again.
    seed = (settings.seed * 1_000_003 + trial.number) % 2**32
    trial.study.sampler = optuna.samplers.TPESampler(seed=seed)
    parameters = settings.space.draw(trial)
    config = with_parameters(config, parameters)
    run = _run_directory(directory, trial.number)
    label = f"trial {trial.number} ({trial.number + 1} of {settings.trials})"
    echo(f"{label}: {'  '.join(f'{SYMBOLS.get(name, name)} {value:.3g}' for name, value in parameters.items())}")
    try:
        with _TrialMonitor(run, trial) as monitor:
            record_run(config, run, world, monitor.warn)
            outcome = train(config, run, world, monitor)
        if outcome.status == "stopped":
            return outcome.signal
        trial.study.tell(trial, outcome.score)
        echo(f"{label}: dev BLEU {outcome.score:.2f}")
    except optuna.TrialPruned:
        trial.study.tell(trial, state=TrialState.PRUNED)
        echo(f"{label}: pruned, worse than the median of earlier trials")
    except (TrainingError, torch.OutOfMemoryError) as error:
        reason = str(error).splitlines()[0]
        trial.set_user_attr("reason", reason)
        trial.study.tell(trial, state=TrialState.FAIL)
        echo(f"{label}: failed: {reason}")
    return None


class _TrialMonitor(Monitor):
    """Also reports to the study, which may prune the trial."""

    def __init__(self, directory: Path, trial: optuna.Trial) -> None:
        super().__init__(directory)
        self._trial = trial
        self._reported = trial.study.get_trials()[trial.number].intermediate_values.keys()

    def validation(self, update: int, scores: dict[str, float], best: float) -> None:
        super().validation(update, scores, best)
        if update not in self._reported:  # a resumed trial repeats the updates after its last checkpoint
            self._trial.report(sum(scores.values()) / len(scores), update)
        if self._trial.should_prune():
            raise optuna.TrialPruned

    def finish(self, update: int, score: float, model: Path, data: Path) -> None:
        """Print nothing; the sweep reports the end of a trial."""


def _run_directory(directory: Path, number: int) -> Path:
    return directory / f"trial-{number:04d}"


def _lock(directory: Path) -> TextIO:
    """Wait for the lock of a sweep or trial; return the open file."""
    file = open_to_lock(directory / LOCK)
    lock(file)
    return file


def _lock_free(directory: Path) -> TextIO | None:
    """Lock a trial, or return None if another process holds it."""
    file = open_to_lock(directory / LOCK)
    if lock(file, wait=False):
        return file
    file.close()
    return None


def _results(study: optuna.Study) -> tuple[TrialResult, ...]:
    """Return all trials, best first."""

    def rank(result: TrialResult) -> tuple[int, float, int]:
        return list(STATES.values()).index(result.state), -(result.score or 0.0), result.number

    return tuple(sorted(map(_result, _trials(study)), key=rank))


def _trials(study: optuna.Study) -> list[FrozenTrial]:
    return study.get_trials(deepcopy=False, states=tuple(STATES))


def _result(trial: FrozenTrial) -> TrialResult:
    updates = trial.last_step or 0
    score = trial.value if trial.state == TrialState.COMPLETE else trial.intermediate_values.get(updates)
    reason = trial.user_attrs.get("reason", "")
    return TrialResult(trial.number, STATES[trial.state], score, updates, trial.params, reason)


def _drop_checkpoints(results: Sequence[TrialResult], directory: Path) -> None:
    """Delete checkpoints except those of the best trial and of unfinished ones."""
    for result in results[1:]:
        if result.state != "running":
            shutil.rmtree(_run_directory(directory, result.number) / "checkpoints", ignore_errors=True)


def with_parameters(config: RunConfig, parameters: Mapping[str, Any]) -> RunConfig:
    """Return the run configuration with a trial's hyperparameters."""
    asn = {name: value for name, value in parameters.items() if name != "mu"}
    return replace(config, asn=replace(config.asn, **asn), model={**config.model, "mu": parameters["mu"]})


def resolved(config: RunConfig) -> RunConfig:
    """Return the configuration with absolute paths; `init` may name a shipped bundle instead."""
    init = config.init
    if init and (init.exists() or str(init) not in shipped_names()):
        init = init.resolve()
    low_delay = replace(config.low_delay, data=config.low_delay.data and config.low_delay.data.resolve())
    return replace(config, data=config.data.resolve(), init=init, low_delay=low_delay)


def report(outcome: SweepOutcome, study: optuna.Study, config: RunConfig, directory: Path) -> None:
    """Write trials.csv, best.toml and plots, and print the best trials."""
    _write_csv(outcome.trials, directory / "trials.csv")
    Console(stderr=True).print(_table(outcome.trials[:BEST_SHOWN]))
    conclusion = "no trial was completed"
    if outcome.best:
        plot_study(study, directory)
        best = run_toml(with_parameters(config, outcome.best.parameters))
        (directory / "best.toml").write_text(best, encoding="utf-8")
        conclusion = f"next: simulmt train {directory / 'best.toml'} --run RUN"
    counts = Counter(result.state for result in outcome.trials)
    echo(f"trials: {', '.join(f'{counts[state]} {state}' for state in STATES.values() if counts[state])}; {conclusion}")


def _table(results: Sequence[TrialResult]) -> Table:
    table = Table(title="best trials")
    for heading in ("trial", "state", "dev BLEU", "update", *(SYMBOLS.get(name, name) for name in NAMES)):
        table.add_column(heading, justify="left" if heading == "state" else "right")
    for result in results:
        score = "" if result.score is None else f"{result.score:.2f}"
        values = (f"{result.parameters[name]:.3g}" if name in result.parameters else "" for name in NAMES)
        table.add_row(str(result.number), result.state, score, str(result.updates), *values)
    return table


def _write_csv(results: Sequence[TrialResult], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["trial", "state", "score", "updates", *NAMES, "reason"], restval="")
        writer.writeheader()
        for result in sorted(results, key=lambda result: result.number):
            row = {"trial": result.number, "state": result.state, "score": result.score, "updates": result.updates}
            writer.writerow({**row, **result.parameters, "reason": result.reason})


def run_toml(config: RunConfig) -> str:
    """Format a configuration as TOML for `RunConfig.read`, without unset values."""
    return as_toml(_without_none(as_table(resolved(config))))


def _without_none(table: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_none(value) if isinstance(value, dict) else value
        for key, value in table.items()
        if value is not None
    }


def plot_study(study: optuna.Study, directory: Path) -> None:
    """Write Optuna's plots of the completed trials, parallel.png and slice.png, if their hyperparameters differ."""
    trials = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    varied = [name for name in NAMES if len({trial.params[name] for trial in trials}) > 1]
    if not varied:
        return
    matplotlib.use("agg")  # Optuna uses pyplot, which would otherwise need a display
    # Optuna marks its Matplotlib plots as experimental, and sets a global style.
    with warnings.catch_warnings(action="ignore", category=ExperimentalWarning), matplotlib.rc_context():
        for name, plot in (("parallel", plot_parallel_coordinate), ("slice", plot_slice)):
            plot(study, varied, target_name="dev BLEU")
            figure = pyplot.gcf()
            figure.set_size_inches(14, 5)
            figure.savefig(directory / f"{name}.png", dpi=150, bbox_inches="tight")
            pyplot.close(figure)


def echo(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
