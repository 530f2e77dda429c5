"""Speech synthesis with espeak-ng, for tests and training data."""

from __future__ import annotations

import io
import random
import subprocess
from dataclasses import dataclass

import numpy as np

from simulmt.config import require
from simulmt.errors import SpeechError
from simulmt.speech.audio import Samples, read_audio

COMMAND = "espeak-ng"
VOICES = ("en-us", "en-gb", "en-gb-x-rp", "en-us+f2", "en-us+f4", "en-us+m3", "en-us+m7", "en-gb+f3", "en-gb+m5")


@dataclass(frozen=True)
class Voice:
    """An espeak-ng voice."""

    name: str = "en-us"
    words_per_minute: int = 150
    pitch: int = 50

    def __post_init__(self) -> None:
        require(80 <= self.words_per_minute <= 450, f"words_per_minute must be in 80..450, got {self.words_per_minute}")
        require(0 <= self.pitch <= 99, f"pitch must be in 0..99, got {self.pitch}")


def random_voice(seed: str) -> Voice:
    """Return a random English voice, speed and pitch."""
    generator = random.Random(seed)
    return Voice(generator.choice(VOICES), generator.randint(130, 190), generator.randint(30, 70))


def synthesise(text: str, voice: Voice | None = None) -> Samples:
    """Synthesise a sentence."""
    voice = voice or Voice()
    options = ["-v", voice.name, "-s", str(voice.words_per_minute), "-p", str(voice.pitch), "--stdin", "--stdout"]
    try:
        done = subprocess.run([COMMAND, *options], input=text.encode(), capture_output=True, check=False)
    except FileNotFoundError:
        raise SpeechError(f"{COMMAND} is not installed (apt-get install {COMMAND})") from None
    if done.returncode:
        reason = done.stderr.decode("utf-8", "replace").strip().splitlines() or ["it failed"]
        raise SpeechError(f"{COMMAND}: {reason[0]}")
    return np.concatenate([np.zeros(0, np.float32), *read_audio(io.BytesIO(done.stdout), COMMAND)])
