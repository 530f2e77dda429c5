"""Terminal output: tables, the demonstration, and the stages of a recipe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

if TYPE_CHECKING:
    from simulmt.recipe.plan import Recipe, Stage
    from simulmt.recipe.runner import ProgressView, RunningStage
    from simulmt.recipe.state import StageStatus
    from simulmt.runtime.bundle import BundleConfig
    from simulmt.runtime.demo import DemoStep, Measurements
    from simulmt.runtime.stream import Translator

WIDEST = 1000  # columns; wider than any terminal, so that nothing is cut off
TRACE_SHOWN = 60  # most recent reads and writes
STYLES = {"done": "green", "new": "bold", "begun": "yellow", "stale": "yellow"}


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]], names: int = 1) -> None:
    """Print a table at its full width; all columns but the first `names` hold numbers."""
    table = Table(box=None)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < names else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(width=WIDEST).print(table)


def benchmark_table(measurements: Measurements) -> Table:
    """Return measurements as a table."""
    table = Table.grid("", "", padding=(0, 2))
    token, delay = measurements.ms_per_token, measurements.delay or "none"
    table.add_row("model", f"{measurements.model}, delay {delay}, threads {measurements.threads}")
    table.add_row("load", f"{measurements.load_ms:.0f} ms")
    if measurements.memory_mb is not None:
        table.add_row("memory", f"{measurements.memory_mb:.0f} MB")
    table.add_row("per token", f"{token.median:.2f} ms median, {token.p95:.2f} ms p95, {token.p99:.2f} ms p99")
    for row in measurements.throughput:
        streams = f"{row.streams} stream{'s' * (row.streams > 1)}"
        table.add_row(streams, f"{row.tokens_per_second:,.0f} tokens/s, {row.speakers_per_core:,.0f} speakers per core")
    return table


def describe(translator: Translator, delay: int | None) -> str:
    """Return a one-line description of the demonstration."""
    config, k = translator.config, translator.stream(delay).delay
    policy = "full sentences" if k is None else f"delay {k}"
    return f"{translator.bundle.name}: {config.source_language} to {config.target_language}, {policy}"


def open_demo(console: Console, config: BundleConfig) -> _DemoPanel | _DemoLines:
    """Open a live view of a demonstration on a terminal, plain lines elsewhere."""
    labels = _labels(config)
    return _DemoPanel(console, labels) if _can_overwrite(console) else _DemoLines(console, labels)


class _DemoLines:
    """Prints reads and writes, one line each."""

    def __init__(self, console: Console, labels: tuple[str, str]) -> None:
        self._console = console
        self._labels = labels
        self._read = ""  # since the last line

    def show(self, step: DemoStep) -> None:
        self._read += step.read
        if step.commits or step.ends_sentence:
            self._print(self._labels[0], self._read)
            self._print(self._labels[1], "".join(commit.text for commit in step.commits))
            self._read = ""
        if step.ends_sentence:
            self._console.print()

    def close(self) -> None:
        """Do nothing."""

    def _print(self, label: str, text: str) -> None:
        if text:
            self._console.print(f"{label}  {text.strip()}")
            self._console.file.flush()


class _DemoPanel:
    """Shows the current sentence in a panel, with finished sentences above it."""

    def __init__(self, console: Console, labels: tuple[str, str]) -> None:
        self._labels = labels
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._begin()
        self._live.start()

    def show(self, step: DemoStep) -> None:
        self._source += step.read
        self._target += "".join(commit.text for commit in step.commits)
        self._trace += "R" * bool(step.read) + "W" * len(step.commits)
        if step.commits:
            lag = step.commits[-1].lag
            self._waiting, self._computing = lag.policy, lag.compute
        if step.ends_sentence:
            self._live.console.print(Padding(self._sentence(), (0, 0, 1, 0)))
            self._begin()
        self._live.update(self._frame(), refresh=True)

    def close(self) -> None:
        self._live.stop()

    def _begin(self) -> None:
        self._source = self._target = self._trace = ""
        self._waiting = self._computing = 0.0  # ms

    def _sentence(self) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", min_width=len("trace"))
        table.add_column(overflow="fold")  # wrap text without spaces anywhere
        table.add_row(self._labels[0], Text(self._source))
        table.add_row(self._labels[1], Text(self._target, "bold green"))
        return table

    def _frame(self) -> Table:
        table = self._sentence()
        lag = f"{self._waiting:5.0f} ms waiting for words, {self._computing:4.1f} ms computing"
        table.add_row("lag", Text(lag, "cyan"))
        trace = [(letter, "dim" if letter == "R" else "bold green") for letter in self._trace[-TRACE_SHOWN:]]
        table.add_row("trace", Text.assemble(*trace, no_wrap=True))
        return table


def plan_tree(recipe: Recipe, statuses: Mapping[str, StageStatus]) -> Tree:
    """Return a tree of stages with their status, each below its last dependency."""
    root = Tree(Text(recipe.title, "bold"), guide_style="dim")
    branches, above = {"": root}, dict[str, set[str]]({"": set()})
    for name, stage in recipe.stages.items():
        *others, nearest = sorted(stage.needs, key=list(recipe.stages).index) or [""]
        above[name] = {nearest, *above[nearest]}
        line = Text.assemble(name, "  ", (statuses[name].description, STYLES[statuses[name].state]))
        if beside := [other for other in others if other not in above[name]]:
            line.append(f"  (also needs {', '.join(beside[:3])}{' ...' if beside[3:] else ''})", "dim")
        branches[name] = branches[nearest].add(line)
    return root


def open_progress(console: Console, done: int, todo: int) -> ProgressView:
    """Open a live view of running stages on a terminal, plain lines elsewhere."""
    if done:
        console.print(f"{done} stages done, {todo} to do", highlight=False)
    return _StagePanel(console, todo) if _can_overwrite(console) else _StageLines(console)


class _StageLines:
    """Prints a line when a stage starts and when it ends."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def started(self, stage: RunningStage) -> None:
        self._print_line(f"{stage.name}: started")

    def running(self, stages: Sequence[RunningStage]) -> None:
        """Do nothing."""

    def done(self, stage: RunningStage) -> None:
        self._print_line(f"{stage.name}: done in {_clock(stage.seconds)}", "green")

    def failed(self, stage: RunningStage, code: int) -> None:
        self._print_line(f"{stage.name}: failed (exit code {code}): {stage.last_line()}; see {stage.log}", "red")

    def skipped(self, stage: Stage, needed: str) -> None:
        self._print_line(f"{stage.name}: skipped, because {needed} failed", "yellow")

    def close(self) -> None:
        """Do nothing."""

    def _print_line(self, line: str, style: str = "") -> None:
        self._console.print(Text(line, style), soft_wrap=True)


class _StagePanel(_StageLines):
    """Shows finished stages, and below them each running stage with its time and last log line."""

    def __init__(self, console: Console, todo: int) -> None:
        super().__init__(console)
        self._done, self._todo = 0, todo
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()

    def started(self, stage: RunningStage) -> None:
        """Do nothing: `running` shows it."""

    def running(self, stages: Sequence[RunningStage]) -> None:
        lines = [Text(f"{self._done} of {self._todo} done", "dim")]
        for stage in stages:
            newest = (stage.last_line(), "dim")
            lines.append(Text.assemble((stage.name, "bold"), f"  {_clock(stage.seconds)}  ", newest))
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
        self._live.update(Group(*lines), refresh=True)

    def done(self, stage: RunningStage) -> None:
        self._done += 1
        super().done(stage)

    def close(self) -> None:
        self._live.stop()


def _can_overwrite(console: Console) -> bool:
    """Return whether the console can overwrite lines."""
    return console.is_terminal and not console.is_dumb_terminal


def _labels(config: BundleConfig) -> tuple[str, str]:
    """Return padded language names, or source and target if they are the same."""
    source, target = config.source_language, config.target_language
    if source == target:
        source, target = "source", "target"
    length = max(len(source), len(target))
    return source.ljust(length), target.ljust(length)


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
