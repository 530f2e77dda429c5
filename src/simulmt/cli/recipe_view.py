"""Display a recipe: its stages as a tree, and their progress."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text
from rich.tree import Tree

from simulmt.recipe.plan import Recipe, Stage
from simulmt.recipe.runner import ProgressView, RunningStage
from simulmt.recipe.state import StageStatus

WIDEST = 1000  # columns; wider than any terminal, so that nothing is cut off
STYLES = {"done": "green", "new": "bold", "begun": "yellow", "stale": "yellow"}


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


def open_view(console: Console, done: int, todo: int) -> ProgressView:
    """Open a live view on a terminal, plain lines elsewhere."""
    if done:
        console.print(f"{done} stages done, {todo} to do", highlight=False)
    return _TerminalView(console, todo) if console.is_terminal and not console.is_dumb_terminal else _PlainView(console)


class _PlainView:
    """Prints a line when a stage starts and when it ends."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def started(self, stage: RunningStage) -> None:
        self._say(f"{stage.name}: started")

    def running(self, stages: Sequence[RunningStage]) -> None:
        """Do nothing."""

    def done(self, stage: RunningStage) -> None:
        self._say(f"{stage.name}: done in {_clock(stage.seconds)}", "green")

    def failed(self, stage: RunningStage, code: int) -> None:
        self._say(f"{stage.name}: failed (exit code {code}): {stage.last_line()}; see {stage.log}", "red")

    def skipped(self, stage: Stage, needed: str) -> None:
        self._say(f"{stage.name}: skipped, because {needed} failed", "yellow")

    def close(self) -> None:
        """Do nothing."""

    def _say(self, line: str, style: str = "") -> None:
        self._console.print(Text(line, style), soft_wrap=True)


class _TerminalView(_PlainView):
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


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
