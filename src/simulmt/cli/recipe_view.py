"""How a recipe is shown: its plan as a tree, and its stages while they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text
from rich.tree import Tree

from simulmt.recipe.plan import Recipe, Stage
from simulmt.recipe.runner import Running, View
from simulmt.recipe.state import Standing

WIDEST = 1000  # characters of a line of the tree; no screen is so wide, so that nothing is cut off
STATES = {
    "done": ("done", "green"),
    "new": ("to do", "bold"),
    "begun": ("begun", "yellow"),
    "stale": ("out of date", "yellow"),
}


def in_words(standing: Standing) -> str:
    """Where a stage stands, and why."""
    return ": ".join(filter(None, (STATES[standing.state][0], "; ".join(standing.reasons))))


def plan_tree(recipe: Recipe, standings: Mapping[str, Standing]) -> Tree:
    """Each stage below the last of those that it needs, with where it stands."""
    root = Tree(Text(recipe.title, "bold"), guide_style="dim")
    branches, above = {"": root}, dict[str, set[str]]({"": set()})
    for name, stage in recipe.stages.items():
        *others, nearest = sorted(stage.needs, key=list(recipe.stages).index) or [""]
        above[name] = {nearest, *above[nearest]}
        line = Text.assemble(name, "  ", (in_words(standings[name]), STATES[standings[name].state][1]))
        if beside := [other for other in others if other not in above[name]]:
            line.append(f"  (needs {', '.join(beside[:3])}{' ...' if beside[3:] else ''} as well)", "dim")
        branches[name] = branches[nearest].add(line)
    return root


def open_view(console: Console, done: int, todo: int) -> View:
    """A line for each running stage on a terminal, plain lines elsewhere."""
    if done:
        console.print(f"{done} stages are done, {todo} are to do", highlight=False)
    return _TerminalView(console, todo) if console.is_terminal and not console.is_dumb_terminal else _PlainView(console)


class _PlainView:
    """A line when a stage starts and when it ends."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def started(self, stage: Running) -> None:
        self._say(f"{stage.name}: started")

    def running(self, stages: Sequence[Running]) -> None:
        """Nothing moves."""

    def done(self, stage: Running) -> None:
        self._say(f"{stage.name}: done in {_clock(stage.seconds)}", "green")

    def failed(self, stage: Running, code: int) -> None:
        self._say(f"{stage.name}: failed (exit code {code}): {stage.last_line()}; its log: {stage.log}", "red")

    def left_out(self, stage: Stage, needed: str) -> None:
        self._say(f"{stage.name}: left out, since {needed} failed", "yellow")

    def close(self) -> None:
        """Nothing is held back."""

    def _say(self, line: str, style: str = "") -> None:
        self._console.print(Text(line, style), soft_wrap=True)


class _TerminalView(_PlainView):
    """Below the lines of what has ended, one for each stage that runs: its time and the newest line of its log."""

    def __init__(self, console: Console, todo: int) -> None:
        super().__init__(console)
        self._done, self._todo = 0, todo
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()

    def started(self, stage: Running) -> None:
        """It is in the moving part."""

    def running(self, stages: Sequence[Running]) -> None:
        lines = [Text(f"{self._done} of {self._todo} done", "dim")]
        for stage in stages:
            newest = (stage.last_line(), "dim")
            lines.append(Text.assemble((stage.name, "bold"), f"  {_clock(stage.seconds)}  ", newest))
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
        self._live.update(Group(*lines), refresh=True)

    def done(self, stage: Running) -> None:
        self._done += 1
        super().done(stage)

    def close(self) -> None:
        self._live.stop()


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
