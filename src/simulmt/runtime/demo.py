"""The live demonstration: sample sentences by source language, read word by word at speaking pace."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from simulmt.errors import ConfigError, DataError
from simulmt.runtime.bundle import SYNTHETIC, BundleConfig
from simulmt.runtime.stream import Commit, Lag, Translator
from simulmt.text import split_words

SYNTHETIC_SENTENCES = 5
SYNTHETIC_SEED = 2023

SENTENCES = {
    "en": (
        "Good morning, and thank you all for coming.",
        "Today I would like to talk about water.",
        "Many people in the world do not have clean water.",
        "When I was a child, we had no water in the house.",
        "Ten years ago, we built a small pump that runs on sunlight.",
        "It is not expensive, and everyone in the village can use it.",
        "Since then, my sister has become a teacher, and nobody has to carry water anymore.",
        "If you have any questions, please ask me after the talk.",
    ),
    "de": (
        "Guten Morgen zusammen, und vielen Dank, dass Sie gekommen sind.",
        "Heute möchte ich über Wasser sprechen.",
        "Zwei Milliarden Menschen auf der Welt haben zu Hause kein sauberes Wasser.",
        "Als ich ein Kind war, lag der nächste Brunnen drei Kilometer entfernt, und meine Schwester ging jeden Morgen "
        "vor der Schule dorthin.",
        "Vor zehn Jahren haben wir eine kleine Pumpe gebaut, die mit Sonnenlicht läuft.",
        "Sie ist nicht teuer, und jeder im Dorf kann sie reparieren.",
        "Inzwischen ist meine Schwester Lehrerin geworden, und niemand muss mehr Wasser tragen.",
        "Wenn Sie Fragen haben, stellen Sie sie bitte nach dem Vortrag.",
    ),
}


def sentences_for(config: BundleConfig, file: Path | None) -> list[str]:
    """Return the lines of a file or, without one, samples in the model's source language."""
    if file is not None:
        return _lines_of(file)
    if config.source_language == SYNTHETIC:
        from simulmt.data.synthetic import generate

        return [pair.source for pair in generate(SYNTHETIC_SENTENCES, reorder=0.0, seed=SYNTHETIC_SEED)]
    if config.source_language not in SENTENCES:
        raise ConfigError(f"no sample text in '{config.source_language}': give a file with --text")
    return list(SENTENCES[config.source_language])


def _lines_of(file: Path) -> list[str]:
    try:
        text = file.read_text(encoding="utf-8-sig", errors="replace")
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}") from None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise DataError(f"{file}: contains no text")
    return lines


class DemoStep(NamedTuple):
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
) -> Iterator[DemoStep]:
    """Translate sentences live at `pace` words per second, or without pauses if 0."""
    due = clock()
    for sentence in sentences:
        stream = translator.stream(delay)
        for word in spoken(sentence):
            if pace:
                due += 1 / pace
                sleep(max(0.0, due - clock()))
            yield DemoStep(word, stream.push(word))
        yield DemoStep("", stream.finish(), ends_sentence=True)


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


@dataclass
class DemoStatistics:
    """Totals of a demonstration."""

    words: int = 0
    sentences: int = 0
    lags: list[Lag] = field(default_factory=list)  # one per commit

    def count(self, step: DemoStep) -> None:
        self.words += bool(step.read)
        self.sentences += step.ends_sentence
        self.lags += [commit.lag for commit in step.commits]

    def summary(self) -> str:
        """Return the totals as two lines."""
        policy = statistics.median([lag.policy for lag in self.lags] or [0.0])
        compute = statistics.median([lag.compute for lag in self.lags] or [0.0])
        return (
            f"{self.sentences} sentences, {self.words} words read, {len(self.lags)} pieces written, none taken back\n"
            f"median lag of a piece: {policy:.0f} ms until the words it needed were said, {compute:.1f} ms to compute"
        )
