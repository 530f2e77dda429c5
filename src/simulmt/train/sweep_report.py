"""Search space and results of a sweep."""

from __future__ import annotations

import csv
import sys
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import matplotlib
import optuna
from matplotlib import pyplot
from optuna.exceptions import ExperimentalWarning
from optuna.trial import TrialState
from optuna.visualization.matplotlib import plot_parallel_coordinate, plot_slice
from rich.console import Console
from rich.table import Table

from simulmt.config import as_table, as_toml, require
from simulmt.model.asn import ASNConfig
from simulmt.runtime.bundle import shipped_names
from simulmt.train.settings import RunConfig

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
    signal: int | None = None  # that stopped it, if any

    @property
    def best(self) -> TrialResult | None:
        return self.trials[0] if self.trials and self.trials[0].state == "complete" else None


def with_parameters(config: RunConfig, parameters: Mapping[str, Any]) -> RunConfig:
    """Return the run configuration with a trial's hyperparameters."""
    asn = {name: value for name, value in parameters.items() if name != "mu"}
    return replace(config, asn=replace(config.asn, **asn), model={**config.model, "mu": parameters["mu"]})


def resolved(config: RunConfig) -> RunConfig:
    """Return the configuration with absolute paths; `init` may be the name of a shipped bundle instead."""
    init = config.init
    if init and (init.exists() or str(init) not in shipped_names()):
        init = init.resolve()
    return replace(config, data=config.data.resolve(), init=init)


def report(outcome: SweepOutcome, study: optuna.Study, config: RunConfig, directory: Path) -> None:
    """Write trials.csv, best.toml and plots, and print the best trials."""
    _write_csv(outcome.trials, directory / "trials.csv")
    Console(stderr=True).print(_table(outcome.trials[:BEST_SHOWN]))
    if outcome.best:
        plot_study(study, directory)
        (directory / "best.toml").write_text(
            run_toml(with_parameters(config, outcome.best.parameters)), encoding="utf-8"
        )
        echo(f"{_summary(outcome.trials)}; next: simulmt train {directory / 'best.toml'} --run RUN")
    else:
        echo(f"{_summary(outcome.trials)}; no trial was completed")


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


def run_toml(config: RunConfig) -> str:
    """Format a configuration as TOML for `RunConfig.read`, without unset values."""
    return as_toml(_without_none(as_table(resolved(config))))


def _without_none(table: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_none(value) if isinstance(value, Mapping) else value
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
