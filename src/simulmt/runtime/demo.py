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
        "Good morning, everyone, and welcome to our school.",
        "My name is Anna, and I am a teacher.",
        "Today I would like to talk about languages.",
        "Learning a new language is not easy.",
        "Last year, 40 percent of our students came from China.",
        "The course takes 12 weeks and costs 300 dollars.",
        "You do not need to be afraid of making mistakes.",
        "Computers can help us, but they cannot replace teachers.",
        "If you have any questions, please raise your hand.",
        "Let's take a break and have some tea.",
    ),
    "de": (
        "Guten Morgen, und herzlich willkommen in unserer Schule.",
        "Mein Name ist Anna, und ich bin Lehrerin.",
        "Heute möchte ich über Sprachen sprechen.",
        "Es ist nicht einfach, eine neue Sprache zu lernen.",
        "Der Kurs dauert 12 Wochen und kostet 300 Euro.",
        "Wenn Sie Fragen haben, heben Sie bitte die Hand.",
        "Vielen Dank für Ihre Aufmerksamkeit.",
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
