"""Audio as mono samples at 16 kHz: read from WAV files, pipes and microphones, or synthesised by espeak-ng."""

from __future__ import annotations

import io
import math
import random
import struct
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Full, Queue
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from simulmt.config import require
from simulmt.errors import MissingExtraError, SpeechError

RATE = 16_000  # samples per second
BLOCK = RATE // 10  # samples read at once
MIN_RATE, MAX_RATE = 4_000, 384_000
MAX_CHANNELS = 32
ZERO_CROSSINGS = 16  # of the sinc, on either side
UNREAD_SECONDS = 30  # of audio buffered while the recogniser is busy; more is dropped

OTHER_FORMATS = (b"OggS", b"fLaC", b"ID3", b"\xff\xfb", b"\x1aE", b"FORM")  # OGG, FLAC, MP3, Matroska, AIFF
PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE

Samples = NDArray[np.float32]
ESPEAK = "espeak-ng"
VOICES = ("en-us", "en-gb", "en-gb-x-rp", "en-us+f2", "en-us+f4", "en-us+m3", "en-us+m7", "en-gb+f3", "en-gb+m5")


@dataclass(frozen=True)
class WavFormat:
    """The sample format of a WAV file."""

    encoding: int
    channels: int
    rate: int
    bits: int

    def __post_init__(self) -> None:
        if (self.encoding, self.bits) not in {(PCM, 8), (PCM, 16), (PCM, 24), (PCM, 32), (FLOAT, 32), (FLOAT, 64)}:
            raise SpeechError(f"WAV encoding {self.encoding} with {self.bits} bits: expected PCM or float samples")
        if not 1 <= self.channels <= MAX_CHANNELS:
            raise SpeechError(f"{self.channels} channels: expected 1 to {MAX_CHANNELS}")
        if not MIN_RATE <= self.rate <= MAX_RATE:
            raise SpeechError(f"{self.rate} samples per second: expected {MIN_RATE} to {MAX_RATE}")

    @property
    def frame_bytes(self) -> int:
        return self.channels * self.bits // 8

    def decode(self, data: bytes) -> Samples:
        """Decode whole frames into mono samples in -1..1; channels are averaged."""
        samples: NDArray[np.floating]
        if self.encoding == FLOAT:
            samples = np.frombuffer(data, f"<f{self.bits // 8}")
        elif self.bits == 8:
            samples = np.frombuffer(data, np.uint8) / np.float32(128) - 1
        elif self.bits == 24:
            padded = np.zeros((len(data) // 3, 4), np.uint8)
            padded[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
            samples = padded.view("<i4").ravel() / np.float32(2**31)
        else:
            samples = np.frombuffer(data, f"<i{self.bits // 8}") / np.float32(2 ** (self.bits - 1))
        mono = samples.reshape(-1, self.channels).mean(axis=1, dtype=np.float32)
        return np.nan_to_num(mono, posinf=0.0, neginf=0.0).clip(-1, 1)


RAW = WavFormat(PCM, 1, RATE, 16)


def read_audio(file: BinaryIO, name: str, allow_raw: bool = False) -> Iterator[Samples]:
    """Read a WAV file of any sample rate, or with `allow_raw` headerless 16-bit mono PCM at 16 kHz, block by block.

    The file may be a pipe; only one block is held in memory.
    """
    beginning = file.read(12)
    try:
        if beginning[:4] in (b"RIFF", b"RF64"):
            layout, size = _read_header(file, beginning)
            beginning = b""
        elif not allow_raw or beginning.startswith(OTHER_FORMATS) or beginning[4:8] == b"ftyp":
            raise SpeechError("expected a WAV file; convert it: ffmpeg -i FILE -ar 16000 -ac 1 speech.wav")
        else:
            layout, size = RAW, None
        yield from resample(_read_samples(file, layout, size, beginning), layout.rate)
    except SpeechError as error:
        raise SpeechError(f"{name}: {error}") from None


def read_whole(path: Path) -> Samples:
    """Read a whole file, as mono samples at 16 kHz."""
    try:
        with path.open("rb") as file:
            return np.concatenate([np.zeros(0, np.float32), *read_audio(file, str(path))])
    except OSError as error:
        raise SpeechError(f"{path}: cannot be read: {error.strerror}") from None


def _read_header(file: BinaryIO, beginning: bytes) -> tuple[WavFormat, int | None]:
    """Read up to the samples; return their format and their size in bytes, None if unknown."""
    if beginning[8:] != b"WAVE":
        raise SpeechError("not a WAV file: RIFF header without WAVE")
    layout: WavFormat | None = None
    while True:
        head = file.read(8)
        if len(head) < 8:
            raise SpeechError("invalid WAV file: no data chunk")
        kind, size = struct.unpack("<4sI", head)
        if kind == b"data":
            if layout is None:
                raise SpeechError("invalid WAV file: no fmt chunk before the data")
            return layout, None if size in (0, 0xFFFFFFFF) else size
        if kind == b"fmt ":
            layout = _parse_format(file.read(size + size % 2))
        else:
            _skip(file, size + size % 2)


def _skip(file: BinaryIO, size: int) -> None:
    while size > 0 and (skipped := len(file.read(min(size, 1 << 16)))):
        size -= skipped


def _parse_format(content: bytes) -> WavFormat:
    if len(content) < 16:
        raise SpeechError("invalid WAV file: fmt chunk too short")
    encoding, channels, rate, _, _, bits = struct.unpack("<HHIIHH", content[:16])
    if encoding == EXTENSIBLE and len(content) >= 26:
        encoding = struct.unpack("<H", content[24:26])[0]
    return WavFormat(encoding, channels, rate, bits)


def _read_samples(file: BinaryIO, layout: WavFormat, size: int | None, beginning: bytes) -> Iterator[Samples]:
    block = max(1, layout.rate * BLOCK // RATE) * layout.frame_bytes
    left, data = math.inf if size is None else size, beginning
    while True:
        more = file.read(int(min(block, left)))
        left -= len(more)
        data += more
        whole = len(data) - len(data) % layout.frame_bytes
        if whole:
            yield layout.decode(data[:whole])
        data = data[whole:]
        if not more:
            return


def resample(blocks: Iterator[Samples], rate: int) -> Iterator[Samples]:
    """Resample blocks to 16 kHz with a windowed sinc filter."""
    if rate == RATE:
        yield from blocks
        return
    resampler = _Resampler(rate)
    for block in blocks:
        yield resampler.push(block)
    yield resampler.push(np.zeros(resampler.reach, np.float32))


class _Resampler:
    """Resamples block by block.

    Output sample n lies at input time n * rate / RATE; it depends on `reach` input samples on either side.
    """

    def __init__(self, rate: int) -> None:
        common = math.gcd(rate, RATE)
        self._step, self._phases = rate // common, RATE // common
        cutoff = min(1.0, RATE / rate)  # of the input's Nyquist frequency
        self.reach = math.ceil(ZERO_CROSSINGS / cutoff)
        offsets = np.arange(-self.reach, self.reach + 1) - np.arange(self._phases)[:, None] / self._phases
        window = np.cos(np.pi / 2 * np.clip(offsets / (self.reach + 1), -1, 1)) ** 2
        kernels = cutoff * np.sinc(cutoff * offsets) * window
        self._kernels = (kernels / kernels.sum(axis=1, keepdims=True)).astype(np.float32)
        self._held = np.zeros(self.reach, np.float32)  # input that later output still depends on
        self._position = self.reach * self._phases  # of the next output in it, in steps of 1 / phases of a sample

    def push(self, samples: Samples) -> Samples:
        held = np.concatenate([self._held, samples])
        last = (len(held) - 1 - self.reach) * self._phases  # the latest position with all of its input
        positions = np.arange(self._position, last + 1, self._step)
        places, phases = np.divmod(positions, self._phases)
        output = np.empty(0, np.float32)
        if len(positions):
            windows = np.lib.stride_tricks.sliding_window_view(held, 2 * self.reach + 1)
            output = np.einsum("nk,nk->n", windows[places - self.reach], self._kernels[phases])
        following = self._position + len(positions) * self._step
        dropped = max(0, min(following // self._phases - self.reach, len(held)))
        self._held, self._position = held[dropped:], following - dropped * self._phases
        return output


def listen_to_microphone(device: str | None = None) -> Iterator[Samples]:
    """Record from a microphone until the caller stops iterating."""
    sounddevice = _sounddevice()
    queue: Queue[Samples] = Queue(UNREAD_SECONDS * RATE // BLOCK)

    def record(samples: Samples, *_: Any) -> None:
        with suppress(Full):  # the caller is more than UNREAD_SECONDS behind
            queue.put_nowait(samples[:, 0].copy())

    chosen = int(device) if device is not None and device.isdigit() else device
    try:
        stream = sounddevice.InputStream(RATE, BLOCK, chosen, channels=1, dtype="float32", callback=record)
        stream.start()
    except (sounddevice.PortAudioError, ValueError) as error:
        raise SpeechError(_microphone_error(sounddevice, device, error)) from None
    return _recorded(stream, queue)


def _recorded(stream: Any, queue: Queue[Samples]) -> Iterator[Samples]:
    with stream:
        while True:
            yield queue.get()


def _sounddevice() -> Any:
    try:
        import sounddevice
    except ImportError:
        raise MissingExtraError("a microphone", "speech") from None
    except OSError:
        raise SpeechError("no microphone: the PortAudio library is missing (apt-get install libportaudio2)") from None
    return sounddevice


def _microphone_error(sounddevice: Any, device: str | None, error: Exception) -> str:
    inputs = [
        f"{found['index']} {found['name']}" for found in sounddevice.query_devices() if found["max_input_channels"]
    ]
    if not inputs:
        return "no microphone found or permitted; give a WAV file instead"
    reason = str(error).splitlines()[0]
    return f"microphone {device or '(default)'}: {reason}; choose with --device: {', '.join(inputs)}"


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
        done = subprocess.run([ESPEAK, *options], input=text.encode(), capture_output=True, check=False)
    except FileNotFoundError:
        raise SpeechError(f"{ESPEAK} is not installed (apt-get install {ESPEAK})") from None
    if done.returncode:
        reason = done.stderr.decode("utf-8", "replace").strip().splitlines() or ["it failed"]
        raise SpeechError(f"{ESPEAK}: {reason[0]}")
    return np.concatenate([np.zeros(0, np.float32), *read_audio(io.BytesIO(done.stdout), ESPEAK)])
