"""Search space and results of a sweep."""

from __future__ import annotations

import csv
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import matplotlib
import optuna
from matplotlib.figure import Figure
from optuna.trial import TrialState
from rich.console import Console
from rich.table import Table

from simulmt.config import as_table, as_toml, require
from simulmt.model.asn import ASNConfig
from simulmt.train.settings import RunConfig

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
        for pick in (min, max):  # the sorting network knows what its settings can be
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
    signal: int | None = None  # what stopped it

    @property
    def best(self) -> TrialResult | None:
        return self.trials[0] if self.trials and self.trials[0].state == "complete" else None


def with_parameters(config: RunConfig, parameters: Mapping[str, Any]) -> RunConfig:
    """Return the run configuration with a trial's hyperparameters."""
    asn = {name: value for name, value in parameters.items() if name != "mu"}
    return replace(config, asn=replace(config.asn, **asn), model={**config.model, "mu": parameters["mu"]})


def resolved(config: RunConfig) -> RunConfig:
    """Return the configuration with absolute paths."""
    return replace(config, data=config.data.resolve(), init=config.init.resolve() if config.init else None)


def report(outcome: SweepOutcome, config: RunConfig, directory: Path, space: SearchSpace) -> None:
    _write_csv(outcome.trials, directory / "trials.csv")
    if any(result.score is not None for result in outcome.trials):
        draw_parallel(outcome.trials, space, directory / "parallel.png")
    Console(stderr=True).print(_table(outcome.trials[:BEST_SHOWN]))
    if outcome.best:
        (directory / "best.toml").write_text(
            run_toml(with_parameters(config, outcome.best.parameters)), encoding="utf-8"
        )
        say(f"{_summary(outcome.trials)}; next: simulmt train {directory / 'best.toml'} --run RUN")
    else:
        say(f"{_summary(outcome.trials)}; no trial was completed")


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
    """Format a configuration as TOML for `RunConfig.read`, without what is not set."""
    return as_toml(_set(as_table(resolved(config))))


def _set(table: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _set(value) if isinstance(value, Mapping) else value for key, value in table.items() if value is not None
    }


def draw_parallel(results: Sequence[TrialResult], space: SearchSpace, path: Path) -> None:
    """Plot each trial as a line through its hyperparameters to its score; grey if not completed."""
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
    """Map scores to colours, without the brightest, which fade on white."""
    complete = [result.score or 0.0 for result in results if result.state == "complete"] or [0.0]
    heights, _ = _along_range((min(complete), max(complete)), [result.score or 0.0 for result in results])
    return [matplotlib.colormaps["viridis_r"](0.1 + 0.9 * height) for height in heights]


def _along_range(ends: tuple[float, float], values: Sequence[float]) -> tuple[list[float], list[tuple[float, str]]]:
    """Return positions from 0 to 1 of the values and of the axis ticks."""
    low, high = ends
    if low == high:
        return [0.5] * len(values), [(0.5, f"{low:.4g}")]
    ticks = [(step / 4, f"{low + (high - low) * step / 4:.4g}") for step in range(5)]
    return [(value - low) / (high - low) for value in values], ticks


def _along_choices(choices: Sequence[int], values: Sequence[int]) -> tuple[list[float], list[tuple[float, str]]]:
    """Same for choices; lines through one choice are spread out, worst to best."""
    step = 1 / len(choices)
    middles = {choice: (place + 0.5) * step for place, choice in enumerate(sorted(choices))}
    fan = [0.4 * step * ((row + 0.5) / len(values) - 0.5) for row in range(len(values))]
    heights = [middles[value] + offset for value, offset in zip(values, fan, strict=True)]
    return heights, [(height, str(choice)) for choice, height in middles.items()]


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
