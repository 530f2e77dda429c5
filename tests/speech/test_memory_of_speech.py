"""An hour of speech: neither memory nor accuracy changes over time."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulmt.speech.audio import read_audio
from simulmt.speech.live import Listener
from simulmt.speech.recogniser import MoonshineRecogniser

ROUNDS = 82  # of 44 seconds
WARM_UP = 8
GROWTH = 30 << 20  # bytes; all audio of the hour would be 230 MB


def resident() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.slow
def test_memory_stays_flat_over_an_hour_of_audio() -> None:
    library = pytest.importorskip("moonshine_voice")
    wav = Path(library.__file__).parent / "assets" / "two_cities.wav"
    listener = Listener(MoonshineRecogniser().start())
    counts: list[int] = []
    early = 0
    for number in range(ROUNDS):
        with wav.open("rb") as file:
            counts.append(sum(len(listener.push(samples)) for samples in read_audio(file, wav.name)))
        if number == WARM_UP:
            early = resident()
    assert listener.seconds > 3600
    assert resident() - early < GROWTH
    assert min(counts[1:]) > 0.8 * max(counts)
