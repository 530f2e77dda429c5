"""Terminal output of the demonstration and the benchmark."""

from __future__ import annotations

from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from simulmt.runtime.bundle import BundleConfig
from simulmt.runtime.demo import DemoStep, Measurements
from simulmt.runtime.stream import Lag, Translator

TRACE_SHOWN = 60  # most recent reads and writes


def describe(translator: Translator, delay: int | None) -> str:
    """Return a one-line description of the demonstration."""
    config, k = translator.config, translator.stream(delay).delay
    policy = "full sentences" if k is None else f"delay {k}"
    return f"{translator.bundle.name}: {config.source_language} to {config.target_language}, {policy}"


class View(Protocol):
    """Displays the steps of a demonstration; `close` is always called last."""

    def show(self, step: DemoStep) -> None: ...

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


class TerminalView:
    """Shows the current sentence in a panel, with finished sentences above it."""

    def __init__(self, console: Console, config: BundleConfig) -> None:
        self._labels = _labels(config)
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._begin()
        self._live.start()

    def show(self, step: DemoStep) -> None:
        self._source += step.read
        self._target += "".join(commit.text for commit in step.commits)
        self._trace += "R" * bool(step.read) + "W" * len(step.commits)
        if step.commits:
            self._lag = step.commits[-1].lag
        if step.ends_sentence:
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
        table.add_column(overflow="fold")  # wrap text without spaces anywhere
        table.add_row(self._labels[0], Text(self._source))
        table.add_row(self._labels[1], Text(self._target, "bold green"))
        return table

    def _frame(self) -> Table:
        table = self._sentence()
        lag = f"{self._lag.policy:5.0f} ms waiting for words, {self._lag.compute:4.1f} ms computing"
        table.add_row("lag", Text(lag, "cyan"))
        table.add_row("trace", _colour_trace(self._trace[-TRACE_SHOWN:]))
        return table


def benchmark_table(found: Measurements) -> Table:
    """Return measurements as a table."""
    table = Table.grid("", "", padding=(0, 2))
    token, delay = found.ms_per_token, found.delay or "none"
    table.add_row("model", f"{found.model}, delay {delay}, threads {found.threads}")
    table.add_row("load", f"{found.load_ms:.0f} ms")
    if found.memory_mb is not None:
        table.add_row("memory", f"{found.memory_mb:.0f} MB")
    table.add_row("per token", f"{token.median:.2f} ms median, {token.p95:.2f} ms p95, {token.p99:.2f} ms p99")
    for row in found.throughput:
        streams = f"{row.streams} stream{'s' * (row.streams > 1)}"
        table.add_row(streams, f"{row.tokens_per_second:,.0f} tokens/s, {row.speakers_per_core:,.0f} speakers per core")
    return table


def _labels(config: BundleConfig) -> tuple[str, str]:
    """Return padded language names, or source and target if they are the same."""
    source, target = config.source_language, config.target_language
    if source == target:
        source, target = "source", "target"
    length = max(len(source), len(target))
    return source.ljust(length), target.ljust(length)


def _colour_trace(trace: str) -> Text:
    """Return the trace: R for a word read, W for a piece written."""
    text = Text(no_wrap=True)
    for letter in trace:
        text.append(letter, "dim" if letter == "R" else "bold green")
    return text
