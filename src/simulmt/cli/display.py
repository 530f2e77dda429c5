"""Views of the live demonstration."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from rich.console import Console
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from simulmt.runtime.bundle import BundleConfig
from simulmt.runtime.stream import Commit, Lag, Translator
from simulmt.text import split_words

TRACE_SHOWN = 60  # of the last reads and writes


class Moment(NamedTuple):
    """Text read, and the commits that followed."""

    read: str
    commits: list[Commit]
    ends_sentence: bool = False


def play(
    translator: Translator,
    sentences: Iterable[str],
    delay: int | None,
    pace: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Moment]:
    """Translate sentences live at `pace` words per second, or without pauses if 0."""
    due = clock()
    for sentence in sentences:
        stream = translator.stream(delay)
        for word in spoken(sentence):
            if pace:
                due += 1 / pace
                sleep(max(0.0, due - clock()))
            yield Moment(word, stream.push(word))
        yield Moment("", stream.finish(), ends_sentence=True)


def spoken(sentence: str) -> list[str]:
    """Split a sentence into words, each with its trailing white space."""
    parts, end = list[str](), 0
    for word in split_words(sentence):
        start = sentence.index(word, end)
        if parts:
            parts[-1] += sentence[end:start]
        end = start + len(word)
        parts.append(word)
    return parts


def describe(translator: Translator, delay: int | None) -> str:
    """Return a one-line description of the demonstration."""
    config, k = translator.config, translator.stream(delay).delay
    waiting = "waiting for the end of each sentence" if k is None else f"delay {k}"
    return f"{translator.bundle.name}: {config.source_language} to {config.target_language}, {waiting}"


@dataclass
class Tally:
    """Totals of a demonstration."""

    words: int = 0
    sentences: int = 0
    lags: list[Lag] = field(default_factory=list)  # one a commit

    def count(self, moment: Moment) -> None:
        self.words += bool(moment.read)
        self.sentences += moment.ends_sentence
        self.lags += [commit.lag for commit in moment.commits]

    def summary(self) -> str:
        """Return the totals as two lines."""
        policy = statistics.median([lag.policy for lag in self.lags] or [0.0])
        compute = statistics.median([lag.compute for lag in self.lags] or [0.0])
        return (
            f"{self.sentences} sentences, {self.words} words read, {len(self.lags)} pieces written, none taken back\n"
            f"median lag of a piece: {policy:.0f} ms until the words it needed were said, {compute:.1f} ms to compute"
        )


class View(Protocol):
    """Displays moments; `close` is always called last."""

    def show(self, moment: Moment) -> None: ...

    def close(self) -> None: ...


def open_view(console: Console, config: BundleConfig) -> View:
    """Open a live view on a terminal, plain lines elsewhere."""
    can_move = console.is_terminal and not console.is_dumb_terminal
    return TerminalView(console, config) if can_move else PlainView(console, config)


class PlainView:
    """Prints reads and writes, one line each."""

    def __init__(self, console: Console, config: BundleConfig) -> None:
        self._console = console
        self._labels = _labels(config)
        self._read = ""  # since the last line

    def show(self, moment: Moment) -> None:
        self._read += moment.read
        if moment.commits or moment.ends_sentence:
            self._print(self._labels[0], self._read)
            self._print(self._labels[1], "".join(commit.text for commit in moment.commits))
            self._read = ""
        if moment.ends_sentence:
            self._console.print()

    def close(self) -> None:
        """Do nothing."""

    def _print(self, label: str, text: str) -> None:
        if text:
            self._console.print(f"{label}  {text.strip()}")
            self._console.file.flush()


class TerminalView:
    """Shows the current sentence in a panel, with finished sentences above it."""

    def __init__(self, console: Console, config: BundleConfig) -> None:
        self._labels = _labels(config)
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._begin()
        self._live.start()

    def show(self, moment: Moment) -> None:
        self._source += moment.read
        self._target += "".join(commit.text for commit in moment.commits)
        self._trace += "R" * bool(moment.read) + "W" * len(moment.commits)
        if moment.commits:
            self._lag = moment.commits[-1].lag
        if moment.ends_sentence:
            self._live.console.print(Padding(self._sentence(), (0, 0, 1, 0)))
            self._begin()
        self._live.update(self._frame(), refresh=True)

    def close(self) -> None:
        self._live.stop()

    def _begin(self) -> None:
        self._source = self._target = self._trace = ""
        self._lag = Lag(0.0, 0.0, 0.0)

    def _sentence(self) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", min_width=len("trace"))
        table.add_column(overflow="fold")  # text without spaces is broken anywhere
        table.add_row(self._labels[0], Text(self._source))
        table.add_row(self._labels[1], Text(self._target, "bold green"))
        return table

    def _frame(self) -> Table:
        table = self._sentence()
        waited = f"{self._lag.policy:5.0f} ms for words to come, {self._lag.compute:4.1f} ms to compute"
        table.add_row("lag", Text(waited, "cyan"))
        table.add_row("trace", _coloured(self._trace[-TRACE_SHOWN:]))
        return table


def _labels(config: BundleConfig) -> tuple[str, str]:
    """Return padded language names, or source and target if they are the same."""
    source, target = config.source_language, config.target_language
    if source == target:
        source, target = "source", "target"
    length = max(len(source), len(target))
    return source.ljust(length), target.ljust(length)


def _coloured(trace: str) -> Text:
    """Return the trace: R for a word read, W for a piece written."""
    text = Text(no_wrap=True)
    for step in trace:
        text.append(step, "dim" if step == "R" else "bold green")
    return text
