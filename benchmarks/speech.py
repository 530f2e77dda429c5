"""Speech translation on this machine: word error rate, BLEU, lag by cause, real-time factor, memory.

    python benchmarks/speech.py --source ted-dev.en --reference ted-dev.zh --sentences 200 --delay 1 3 9

Translates the sample recording of moonshine-voice and, given text, a recording of it synthesised by espeak-ng. The
real-time factor (RTF) is measured in wall-clock time and in CPU time, which depends less on other load. `share` is the
time of translation relative to that of recognition. Run it on one core (`taskset -c 0`) to compare with the goals: a
real-time factor below 0.3, a median lag below 2.5 s at k = 1.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from unittest.mock import patch

import numpy as np
from rich.console import Console
from rich.table import Table

import simulmt
from simulmt.config import as_table
from simulmt.eval.speech import CAUSES, Recording, SpeechScores, score_speech
from simulmt.speech import recogniser as recognisers
from simulmt.speech.audio import RATE, Voice, read_audio, synthesise
from simulmt.speech.recogniser import Recogniser, open_recogniser
from simulmt.text.words import Unit

VOICES = ("en-us", "en-gb", "en-us+f2", "en-us+m3", "en-gb+f3")
SAMPLE_TEXT = (  # the text of two_cities.wav: A Tale of Two Cities, 1859
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, "
    "it was the epoch of belief, it was the epoch of incredulity, it was the season of Light, it was the season of "
    "Darkness, it was the spring of hope, it was the winter of despair, we had everything before us, we had nothing "
    "before us, we were all going direct to Heaven, we were all going direct the other way in short, the period was so "
    "far like the present period, that some of its noisiest authorities insisted on its being received, for good or "
    "for evil, in the superlative degree of comparison only."
)
SCORES = (
    "s",
    "WER",
    "BLEU",
    "whole",
    "bare",
    "clean",
    "StreamLAAL",
    "CA",
    "lag",
    *CAUSES,
    "p90",
    "RTF",
    "CPU",
    "share",
    "MB",
)


def synthesised_recording(source: Path, reference: Path, sentences: int) -> Recording:
    """Synthesise sentences with several voices at several speeds."""
    lines = zip(source.read_text("utf-8").splitlines(), reference.read_text("utf-8").splitlines(), strict=True)
    spoken = []
    for number, (text, translation) in enumerate(list(lines)[:sentences]):
        voice = Voice(VOICES[number % len(VOICES)], 140 + 10 * (number % 4), 40 + 5 * (number % 5))
        spoken.append((synthesise(text, voice), text, (translation,)))
    return Recording.join(spoken)


def sample_recording(translation: str, seconds: float | None) -> Recording:
    """Return the sample of moonshine-voice, with the model's translation of its text as the reference."""
    import moonshine_voice

    wav = Path(moonshine_voice.__file__).parent / "assets" / "two_cities.wav"
    with wav.open("rb") as file:
        samples = np.concatenate(list(read_audio(file, wav.name)))
    samples = samples if seconds is None else samples[: int(seconds * RATE)]
    return Recording.join([(samples, SAMPLE_TEXT, (translation,))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="English sentences, one per line")
    parser.add_argument("--reference", type=Path, help="reference translations, one per line")
    parser.add_argument("--sentences", type=int, default=200)
    parser.add_argument("--model", default="en-zh")
    parser.add_argument("--delay", type=int, nargs="+", default=[1], help="one or more delays")
    parser.add_argument("--recogniser", default="moonshine")
    parser.add_argument(
        "--interval", type=float, default=recognisers.UPDATE_SECONDS, help="seconds between hypotheses of moonshine"
    )
    parser.add_argument("--seconds", type=float, help="use only the beginning of the sample, to try the benchmark")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the scores to this file")
    arguments = parser.parse_args()
    recogniser = open_recogniser(arguments.recogniser)
    recordings = {
        "two_cities": sample_recording(simulmt.load(arguments.model).translate(SAMPLE_TEXT), arguments.seconds)
    }
    if arguments.source and arguments.reference:
        name = f"{arguments.source.stem}, {arguments.sentences} synthesised"
        recordings[name] = synthesised_recording(arguments.source, arguments.reference, arguments.sentences)
    with patch.object(recognisers, "UPDATE_SECONDS", arguments.interval):
        found = {
            f"{name}, k = {delay}": measure(recording, recogniser, arguments.model, delay, arguments.threads)
            for name, recording in recordings.items()
            for delay in arguments.delay
        }
    show(found)
    if arguments.json:
        arguments.json.write_text(json.dumps({name: as_table(each) for name, each in found.items()}, indent=2))


def measure(recording: Recording, recogniser: Recogniser, model: str, delay: int, threads: int) -> SpeechScores:
    translator = simulmt.load(model, threads)
    unit: Unit = "word" if translator.bundle.target.spaced else "char"
    return score_speech(translator, recogniser, recording, delay, unit)


def show(found: dict[str, SpeechScores]) -> None:
    table = Table("recording", *SCORES)
    for name, scores in found.items():
        table.add_row(
            name,
            f"{scores.seconds:.0f}",
            f"{scores.word_error_rate:.1f}",
            *(f"{bleu:.1f}" for bleu in (scores.BLEU, scores.BLEU_whole, scores.BLEU_bare, scores.BLEU_clean)),
            f"{scores.stream_laal:.0f}",
            f"{scores.stream_laal_ca:.0f}",
            *(f"{scores.lag[part]:.0f}" for part in ("total", *CAUSES)),
            f"{scores.lag_p90:.0f}",
            f"{scores.recognition_rtf + scores.translation_rtf:.2f}",
            f"{scores.cpu_rtf:.2f}",
            f"{scores.translation_rtf / scores.recognition_rtf:.2f}",
            f"{scores.peak_memory_mb:.0f}",
        )
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
