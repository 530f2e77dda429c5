"""Sample sentences for the demonstration and the benchmark, by source language."""

from __future__ import annotations

from pathlib import Path

from simulmt.errors import ConfigError, DataError
from simulmt.runtime.bundle import BundleConfig

SYNTHETIC = "synthetic"  # the source language of models for the invented pair of `simulmt synthetic`
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
        raise ConfigError(f"there is no built-in text in '{config.source_language}': give a file with --text")
    return list(SENTENCES[config.source_language])


def _lines_of(file: Path) -> list[str]:
    try:
        text = file.read_text(encoding="utf-8-sig", errors="replace")
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}") from None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise DataError(f"{file}: there is no text in it")
    return lines
