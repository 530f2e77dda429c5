"""Something to say: sentences for the demonstration and the benchmark, by source language."""

from __future__ import annotations

from pathlib import Path

from simulmt.errors import ConfigError, DataError
from simulmt.runtime.bundle import BundleConfig

SYNTHETIC = "synthetic"  # the source language of models for the invented pair of `simulmt synthetic`
SYNTHETIC_SENTENCES = 5
SYNTHETIC_SEED = 2023

SENTENCES = {
    "en": (
        "Good morning, and welcome to our little museum by the harbour.",
        "The lighthouse in front of you was built by two brothers who had never seen the sea before.",
        "Every evening, when the fishing boats came home, the younger one climbed the stairs and lit the lamp.",
        "Today a computer does the work, but on stormy nights the neighbours still put a candle in the window.",
        "Please follow me, and mind the third step.",
    ),
    "de": (
        "Guten Morgen und herzlich willkommen in unserem kleinen Museum am Hafen.",
        "Den Leuchtturm vor Ihnen haben zwei Brüder gebaut, die das Meer noch nie gesehen hatten.",
        "Jeden Abend, wenn die Fischerboote nach Hause kamen, stieg der jüngere die Treppe hinauf und zündete die "
        "Lampe an.",
        "Heute erledigt das ein Computer, aber in stürmischen Nächten stellen die Nachbarn noch immer eine Kerze ins "
        "Fenster.",
        "Folgen Sie mir bitte, und geben Sie auf die dritte Stufe acht.",
    ),
}


def sentences_for(config: BundleConfig, file: Path | None) -> list[str]:
    """The lines of a file or, without one, sentences in the source language of a model."""
    if file is not None:
        return _lines_of(file)
    if config.source_language == SYNTHETIC:
        from simulmt.synthetic import generate

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
