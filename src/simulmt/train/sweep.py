"""A search for the sorting network's hyperparameters: every trial is an ordinary training run.

DIR/study.db        what was tried and how it went (Optuna, SQLite)
DIR/trial-0007/     the run of trial 7; only the best trial keeps its checkpoints
DIR/trials.csv      DIR/best.toml      DIR/parallel.png
"""

from __future__ import annotations

import csv
import fcntl
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TextIO

import matplotlib
import optuna
import torch
from matplotlib.figure import Figure
from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console
from rich.table import Table
from sqlalchemy.exc import SQLAlchemyError

from simulmt.config import as_table, require
from simulmt.dataset import Dataset
from simulmt.errors import CheckpointError, TrainingError
from simulmt.model.asn import ASNConfig
from simulmt.train.loop import system_of, train
from simulmt.train.monitor import Monitor
from simulmt.train.record import record_run
from simulmt.train.settings import RunConfig
from simulmt.train.world import World, join_world

STUDY = "sweep"
LOCK = "sweep.lock"
UNPRUNED_TRIALS = 5  # completed before any other is given up
BEST_SHOWN = 10
RANGES = ("tau", "delta", "gamma")  # the others are choices
SYMBOLS = {"layers": "M", "iterations": "l"}  # where the paper's name is another

State = Literal["complete", "pruned", "running", "failed"]
STATES: dict[TrialState, State] = {  # in the order of the report
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.RUNNING: "running",
    TrialState.FAIL: "failed",
}


@dataclass(frozen=True)
class SearchSpace:
    """Choices of whole numbers and ranges of real ones; the defaults are the paper's."""

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
        for pick in (min, max):  # the sorting network knows what its settings can be
            ASNConfig(**{name: pick(values) for name, values in asdict(self).items() if name != "mu"})

    def draw(self, trial: optuna.Trial) -> dict[str, Any]:
        """The trial's values: those it has already, or new ones."""
        return {
            name: trial.suggest_float(name, *values) if name in RANGES else trial.suggest_categorical(name, values)
            for name, values in asdict(self).items()
        }


NAMES = tuple(each.name for each in fields(SearchSpace))


@dataclass(frozen=True)
class SweepConfig:
    """How long to search, and where."""

    trials: int = 20  # in all, those of earlier calls included
    seed: int = 1
    space: SearchSpace = field(default_factory=SearchSpace)

    def __post_init__(self) -> None:
        require(self.trials >= 1, f"trials must be at least 1, got {self.trials}")
        require(self.seed >= 0, f"seed must not be negative, got {self.seed}")


@dataclass(frozen=True)
class TrialResult:
    """One trial; the score of one that was not completed is its latest validation score."""

    number: int
    state: State
    score: float | None
    updates: int
    parameters: Mapping[str, Any]
    reason: str = ""


@dataclass(frozen=True)
class SweepOutcome:
    """All trials so far, best first; a stopped sweep goes on with the next call."""

    status: Literal["finished", "stopped"]
    trials: tuple[TrialResult, ...]
    signal: int | None = None  # what stopped it

    @property
    def best(self) -> TrialResult | None:
        return self.trials[0] if self.trials and self.trials[0].state == "complete" else None


def sweep(config: RunConfig, directory: Path, settings: SweepConfig, device: str = "auto") -> SweepOutcome:
    """Run trials until there are `settings.trials`, and report; on an existing sweep, go on where it was.

    A trial that was cut off goes on in its own run directory. To use several devices start the same command
    once for each: the processes share the trials of the directory. Under torchrun it refuses to start.
    """
    require(
        int(os.environ.get("WORLD_SIZE", 1)) == 1,
        "a sweep is no torchrun job; to use several devices start simulmt sweep once for each, with --device cuda:N",
    )
    _check(config, settings.space)
    signal: int | None = None
    with join_world(device) as world, _open_storage(directory) as storage:
        study = _join_study(storage, config, directory, settings)
        while signal is None and (claim := _claim_trial(study, storage, directory, settings)):
            trial, lock = claim
            with lock:
                signal = _run_trial(trial, config, directory, settings, world)
            _drop_checkpoints(_results(study), directory)
        outcome = SweepOutcome("finished" if signal is None else "stopped", _results(study), signal)
    _report(outcome, config, directory, settings.space)
    return outcome


def with_parameters(config: RunConfig, parameters: Mapping[str, Any]) -> RunConfig:
    """The run with a trial's hyperparameters."""
    asn = {name: value for name, value in parameters.items() if name != "mu"}
    return replace(config, asn=replace(config.asn, **asn), model={**config.model, "mu": parameters["mu"]})


def _resolved(config: RunConfig) -> RunConfig:
    """The same run, from whichever directory it is started."""
    return replace(config, data=config.data.resolve(), init=config.init.resolve() if config.init else None)


def _check(config: RunConfig, space: SearchSpace) -> None:
    """Find out now what else would fail in the first trial, or after hours in a later one."""
    require(
        config.system == "ctc+asn",
        f"system: a sweep searches the settings of the sorting network and needs 'ctc+asn', got '{config.system}'",
    )
    require(
        config.init is None or len(space.mu) == 1,
        f"init: the model to start from has one mu, but the sweep tries {list(space.mu)}; narrow the space of mu",
    )
    system_of(config, Dataset.open(config.data)).network()


# The study: trials are claimed under locks that die with their process, so a trial that is running for the
# database but not locked was cut off.


@contextmanager
def _open_storage(directory: Path) -> Iterator[RDBStorage]:
    path = directory / "study.db"
    try:
        with _lock(directory / LOCK):
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
    # While the learning rate still rises, scores say little.
    pruner = optuna.pruners.MedianPruner(UNPRUNED_TRIALS, n_warmup_steps=config.training.warmup_updates)
    with _lock(directory / LOCK):
        study = optuna.create_study(
            storage=storage, study_name=STUDY, direction="maximize", pruner=pruner, load_if_exists=True
        )
        _check_same(study, config, settings, directory)
    return study


def _check_same(study: optuna.Study, config: RunConfig, settings: SweepConfig, directory: Path) -> None:
    """Trials can only be compared if all but their hyperparameters is the same."""
    table = {**as_table(_resolved(config)), "sweep": {"seed": settings.seed}, "space": as_table(settings.space)}
    now = {
        f"{section}.{key}" if key else section: value
        for section, entries in table.items()
        for key, value in (entries.items() if isinstance(entries, dict) else [("", entries)])
    }
    before = study.user_attrs.get("settings")
    if before is None:
        study.set_user_attr("settings", now)
        return
    changes = [
        f"{key} was {before.get(key)}, is {now.get(key)}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]
    require(not changes, f"{directory}: a sweep with other settings ({'; '.join(changes)}); use another directory")


def _claim_trial(
    study: optuna.Study, storage: RDBStorage, directory: Path, settings: SweepConfig
) -> tuple[optuna.Trial, TextIO] | None:
    """A trial for this process alone, and its lock: one that was cut off, or a new one; None if all are taken."""
    with _lock(directory / LOCK):
        trials = _trials(study)
        for known in trials:
            if known.state == TrialState.RUNNING and (lock := _lock_free(_run_directory(directory, known.number))):
                study_id = storage.get_study_id_from_name(STUDY)
                trial_id = storage.get_trial_id_from_study_id_trial_number(study_id, known.number)
                return optuna.Trial(study, trial_id), lock
        if len(trials) >= settings.trials:
            return None
        trial = study.ask()
        return trial, _lock(_run_directory(directory, trial.number) / LOCK)


def _run_trial(
    trial: optuna.Trial, config: RunConfig, directory: Path, settings: SweepConfig, world: World
) -> int | None:
    """Train, and tell the study how it went; the signal that stopped it, if one did."""
    # Each trial has its own seed, so that a sweep that is taken up again does not draw its first trials once more.
    seed = (settings.seed * 1_000_003 + trial.number) % 2**32
    trial.study.sampler = optuna.samplers.TPESampler(seed=seed)
    parameters = settings.space.draw(trial)
    config = with_parameters(config, parameters)
    run = _run_directory(directory, trial.number)
    label = f"trial {trial.number} ({trial.number + 1} of {settings.trials})"
    _say(f"{label}: {'  '.join(f'{SYMBOLS.get(name, name)} {value:.3g}' for name, value in parameters.items())}")
    monitor = _TrialMonitor(run, trial)
    try:
        record_run(config, run, world, monitor.warn)
        outcome = train(config, run, world, monitor)
        if outcome.status == "stopped":
            return outcome.signal
        trial.study.tell(trial, outcome.score)
        _say(f"{label}: dev BLEU {outcome.score:.2f}")
    except optuna.TrialPruned:
        trial.study.tell(trial, state=TrialState.PRUNED)
        _say(f"{label}: given up, worse than half of the trials before it")
    except (TrainingError, torch.OutOfMemoryError) as error:
        reason = str(error).splitlines()[0]
        trial.set_user_attr("reason", reason)
        trial.study.tell(trial, state=TrialState.FAIL)
        _say(f"{label}: failed: {reason}")
    finally:
        monitor.close()
    return None


class _TrialMonitor(Monitor):
    """Also reports to the study, which may give the trial up."""

    def __init__(self, directory: Path, trial: optuna.Trial) -> None:
        super().__init__(directory)
        self._trial = trial
        self._known = trial.study.get_trials()[trial.number].intermediate_values.keys()

    def validation(self, update: int, scores: dict[str, float], best: float) -> None:
        super().validation(update, scores, best)
        if update not in self._known:  # a trial that was cut off repeats what it did after its last checkpoint
            self._trial.report(sum(scores.values()) / len(scores), update)
        if self._trial.should_prune():
            raise optuna.TrialPruned

    def finish(self, update: int, score: float | None, model: Path | None) -> None:
        """The sweep says how a trial ended, and what to do next is not up to a single one."""

    def close(self) -> None:
        self._close()


def _run_directory(directory: Path, number: int) -> Path:
    return directory / f"trial-{number:04d}"


def _lock(path: Path) -> TextIO:
    """An open file that no other process can lock until it is closed, or its process dies."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        raise CheckpointError(f"{path.parent}: cannot be written: {error.strerror}") from None
    return file


def _lock_free(run: Path) -> TextIO | None:
    """The lock of a trial, unless another process has it."""
    run.mkdir(exist_ok=True)
    file = (run / LOCK).open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def _results(study: optuna.Study) -> tuple[TrialResult, ...]:
    def rank(result: TrialResult) -> tuple[int, float, int]:
        return list(STATES.values()).index(result.state), -(result.score or 0.0), result.number

    return tuple(sorted(map(_result, _trials(study)), key=rank))


def _trials(study: optuna.Study) -> list[FrozenTrial]:
    return study.get_trials(deepcopy=False, states=tuple(STATES))


def _result(trial: FrozenTrial) -> TrialResult:
    updates = trial.last_step or 0
    score = trial.value if trial.state == TrialState.COMPLETE else trial.intermediate_values.get(updates)
    return TrialResult(
        trial.number, STATES[trial.state], score, updates, trial.params, trial.user_attrs.get("reason", "")
    )


def _drop_checkpoints(results: Sequence[TrialResult], directory: Path) -> None:
    """Keep those of the best trial, which may be worth going on with, and of trials that are not done."""
    for result in results[1:]:
        if result.state != "running":
            shutil.rmtree(_run_directory(directory, result.number) / "checkpoints", ignore_errors=True)


# The report.


def _report(outcome: SweepOutcome, config: RunConfig, directory: Path, space: SearchSpace) -> None:
    _write_csv(outcome.trials, directory / "trials.csv")
    if any(result.score is not None for result in outcome.trials):
        draw_parallel(outcome.trials, space, directory / "parallel.png")
    Console(stderr=True).print(_table(outcome.trials[:BEST_SHOWN]))
    if outcome.best:
        (directory / "best.toml").write_text(
            as_toml(with_parameters(config, outcome.best.parameters)), encoding="utf-8"
        )
        _say(f"{_summary(outcome.trials)}; next: simulmt train {directory / 'best.toml'} --run RUN")
    else:
        _say(f"{_summary(outcome.trials)}; no trial was completed")


def _summary(results: Sequence[TrialResult]) -> str:
    counts = Counter(result.state for result in results)
    shown = ", ".join(f"{counts[state]} {state}" for state in STATES.values() if counts[state])
    return f"trials: {shown}"


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


def as_toml(config: RunConfig) -> str:
    """A configuration file that `RunConfig.read` reads back from any directory."""
    table = as_table(_resolved(config))
    plain = {key: value for key, value in table.items() if not isinstance(value, dict) and value is not None}
    sections = [("", plain), *((f"[{key}]\n", value) for key, value in table.items() if isinstance(value, dict))]
    return "\n".join(
        heading + "".join(f"{key} = {_toml_value(value)}\n" for key, value in entries.items())
        for heading, entries in sections
    )


def _toml_value(value: Any) -> str:
    """As JSON writes it, which is TOML too, but for numbers like inf."""
    return str(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def draw_parallel(results: Sequence[TrialResult], space: SearchSpace, path: Path) -> None:
    """One line a trial through its hyperparameters to its score, darker for better; grey if not completed."""
    shown = sorted((result for result in results if result.score is not None), key=lambda result: result.score or 0.0)
    scores = [result.score or 0.0 for result in shown]
    axes = [
        (_along_range if name in RANGES else _along_choices)(values, [result.parameters[name] for result in shown])
        for name, values in asdict(space).items()
    ]
    axes.append(_along_range((scores[0], scores[-1]), scores))
    figure = Figure(figsize=(10, 5), layout="constrained")
    plot = figure.add_subplot()
    best = max((row for row, result in enumerate(shown) if result.state == "complete"), default=None)
    for row, (result, colour) in enumerate(zip(shown, _colours(shown), strict=True)):
        heights = [axis_heights[row] for axis_heights, _ in axes]
        if result.state == "complete":
            plot.plot(heights, color=colour, linewidth=3.5 if row == best else 1.5)
        else:
            plot.plot(heights, color="0.8", linewidth=0.8, zorder=1)
    behind_text = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 1}
    for column, (_, ticks) in enumerate(axes):
        plot.axvline(column, color="0.6", linewidth=1, zorder=0)
        for height, text in ticks:
            plot.annotate(
                text, (column, height), (4, 0), textcoords="offset points", va="center", fontsize=9, bbox=behind_text
            )
    plot.set_xticks(range(len(axes)), [*(SYMBOLS.get(name, name) for name in NAMES), "dev BLEU"])
    plot.set_ylim(-0.05, 1.05)
    plot.set_yticks([])
    plot.spines[:].set_visible(False)
    plot.set_title(f"{_summary(results)} (the darker the better; grey: not completed)", fontsize=10)
    figure.savefig(path, dpi=150)


def _colours(results: Sequence[TrialResult]) -> list[Any]:
    """By score, over the scores of the completed trials; the brightest colours are left out, as they fade on white."""
    complete = [result.score or 0.0 for result in results if result.state == "complete"] or [0.0]
    heights, _ = _along_range((min(complete), max(complete)), [result.score or 0.0 for result in results])
    return [matplotlib.colormaps["viridis_r"](0.1 + 0.9 * height) for height in heights]


def _along_range(ends: tuple[float, float], values: Sequence[float]) -> tuple[list[float], list[tuple[float, str]]]:
    """Heights from 0 to 1 of the values, and of the ticks of their axis."""
    low, high = ends
    if low == high:
        return [0.5] * len(values), [(0.5, f"{low:.4g}")]
    ticks = [(step / 4, f"{low + (high - low) * step / 4:.4g}") for step in range(5)]
    return [(value - low) / (high - low) for value in values], ticks


def _along_choices(choices: Sequence[int], values: Sequence[int]) -> tuple[list[float], list[tuple[float, str]]]:
    """The same for choices; lines through the same choice are fanned out, worst to best, to tell them apart."""
    step = 1 / len(choices)
    middles = {choice: (place + 0.5) * step for place, choice in enumerate(sorted(choices))}
    fan = [0.4 * step * ((row + 0.5) / len(values) - 0.5) for row in range(len(values))]
    heights = [middles[value] + offset for value, offset in zip(values, fan, strict=True)]
    return heights, [(height, str(choice)) for choice, height in middles.items()]


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
