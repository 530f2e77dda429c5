"""Audio files as samples at 16 kHz: every kind of WAV, and invalid files."""

from __future__ import annotations

import io
import struct
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from simulmt.errors import MissingExtraError, SpeechError
from simulmt.speech.audio import BLOCK, RATE, Samples, listen_to_microphone, read_audio, resample

PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE


def tone(rate: int, seconds: float = 1.0, hertz: float = 440.0) -> NDArray[np.float64]:
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate)


def encode(samples: NDArray[np.float64], encoding: int, bits: int) -> bytes:
    if encoding == FLOAT:
        return samples.astype(f"<f{bits // 8}").tobytes()
    if bits == 8:
        return (samples * 127 + 128).astype(np.uint8).tobytes()
    if bits == 24:
        return (samples * (2**31 - 1)).astype("<i4").view(np.uint8).reshape(-1, 4)[:, 1:].tobytes()
    return (samples * (2 ** (bits - 1) - 1)).astype(f"<i{bits // 8}").tobytes()


def wav(
    data: bytes, rate: int = RATE, channels: int = 1, bits: int = 16, encoding: int = PCM, size: int | None = None
) -> bytes:
    frame = channels * bits // 8
    layout = struct.pack("<HHIIHH", encoding, channels, rate, rate * frame, frame, bits)
    if encoding == EXTENSIBLE:
        layout += struct.pack("<HHIH14s", 22, bits, 0, PCM, b"\0" * 14)
    chunks = struct.pack("<4sI", b"fmt ", len(layout)) + layout + struct.pack("<4sI3sx", b"LIST", 3, b"abc")
    chunks += struct.pack("<4sI", b"data", len(data) if size is None else size) + data
    return struct.pack("<4sI4s", b"RIFF", len(chunks) + 4, b"WAVE") + chunks


def read(data: bytes, allow_raw: bool = False) -> Samples:
    blocks = list(read_audio(io.BytesIO(data), "speech.wav", allow_raw))
    return np.concatenate(blocks) if blocks else np.zeros(0, np.float32)


@pytest.mark.parametrize(
    ("encoding", "bits"), [(PCM, 8), (PCM, 16), (PCM, 24), (PCM, 32), (FLOAT, 32), (FLOAT, 64), (EXTENSIBLE, 16)]
)
def test_every_encoding_gives_the_same_samples(encoding: int, bits: int) -> None:
    samples = tone(RATE)
    found = read(wav(encode(samples, encoding, bits), bits=bits, encoding=encoding))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, samples, atol=0.02 if bits == 8 else 1e-4)


def test_channels_are_averaged() -> None:
    left, right = tone(RATE), tone(RATE, hertz=300)
    found = read(wav(encode(np.stack([left, right], axis=1).ravel(), PCM, 16), channels=2))
    np.testing.assert_allclose(found, (left + right) / 2, atol=1e-4)


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000])
def test_other_rates_are_resampled(rate: int) -> None:
    found = read(wav(encode(tone(rate), PCM, 16), rate))
    expected = tone(RATE)
    assert abs(len(found) - RATE) <= 1
    middle = slice(200, RATE - 200)
    np.testing.assert_allclose(found[middle], expected[middle], atol=2e-3)


def test_what_16_khz_cannot_hold_is_filtered_out() -> None:
    found = read(wav(encode(tone(48_000, hertz=12_000), PCM, 16), 48_000))
    assert np.abs(found[200:-200]).max() < 0.005


def test_resampling_does_not_depend_on_the_blocks() -> None:
    samples = tone(44_100).astype(np.float32)

    def blocks(size: int) -> Iterator[Samples]:
        yield from (samples[start : start + size] for start in range(0, len(samples), size))

    whole = np.concatenate(list(resample(blocks(len(samples)), 44_100)))
    for size in (7, 333, 4_410):
        np.testing.assert_allclose(np.concatenate(list(resample(blocks(size), 44_100))), whole, atol=1e-6)


@pytest.mark.parametrize("size", [0, 0xFFFFFFFF])
def test_a_pipe_may_have_an_unknown_length(size: int) -> None:
    samples = tone(RATE)
    np.testing.assert_allclose(read(wav(encode(samples, PCM, 16), size=size)), samples, atol=1e-4)


def test_chunks_after_the_samples_are_ignored() -> None:
    samples = encode(tone(RATE, 0.1), PCM, 16)
    assert len(read(wav(samples) + b"LIST" + b"\x7f" * 100)) == len(samples) // 2


def test_samples_without_a_header() -> None:
    samples = tone(RATE)
    np.testing.assert_allclose(read(encode(samples, PCM, 16), allow_raw=True), samples, atol=1e-4)
    assert len(read(b"", allow_raw=True)) == 0


def test_a_file_cut_off_in_mid_sample_ends_there() -> None:
    assert len(read(wav(encode(tone(RATE), PCM, 16))[:-101])) == RATE - 51


def test_no_more_than_a_block_is_read_at_once() -> None:
    assert max(map(len, read_audio(io.BytesIO(wav(b"\0" * RATE)), "x"))) == BLOCK


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"RIFF\0\0\0\0AVI ", "not a WAV file: RIFF header without WAVE"),
        (b"RIFF", "not a WAV file"),
        (wav(b"")[:50], "no data chunk"),
        (b"RIFF\0\0\0\0WAVE" + struct.pack("<4sI", b"data", 4) + b"abcd", "no fmt chunk"),
        (b"RIFF\0\0\0\0WAVE" + struct.pack("<4sI", b"fmt ", 4) + b"abcd", "fmt chunk too short"),
        (wav(b"", encoding=6, bits=8), "WAV encoding 6 with 8 bits: expected PCM or float samples"),
        (wav(b"", bits=12), "WAV encoding 1 with 12 bits"),
        (wav(b"", channels=0), "0 channels: expected 1 to 32"),
        (wav(b"", rate=100), "100 samples per second: expected 4000 to 384000"),
        (b"OggS" + b"\0" * 50, "expected a WAV file; convert it: ffmpeg"),
        (b"Good morning, everyone.", "expected a WAV file; convert it: ffmpeg"),
        (b"", "expected a WAV file; convert it: ffmpeg"),
        (b"ID3\x04" + b"\0" * 50, "expected a WAV file; convert it: ffmpeg"),
    ],
)
def test_a_broken_file_is_a_one_line_error(data: bytes, reason: str) -> None:
    with pytest.raises(SpeechError, match=f"^speech.wav: .*{reason}") as refused:
        read(data)
    assert "\n" not in str(refused.value)


class FakeDevices:
    """A fake sounddevice module."""

    class PortAudioError(Exception):
        pass

    def __init__(self, inputs: list[str]) -> None:
        self._inputs = inputs

    def query_devices(self) -> list[dict[str, Any]]:
        return [{"index": n, "name": name, "max_input_channels": 1} for n, name in enumerate(self._inputs)]

    def InputStream(self, rate: int, block: int, device: int | str | None, **settings: Any) -> Any:  # noqa: N802
        if not self._inputs or device not in (None, *range(len(self._inputs)), *self._inputs):
            raise self.PortAudioError("Error querying device -1")
        assert (rate, settings["channels"], settings["dtype"]) == (RATE, 1, "float32")
        self.callback = settings["callback"]

        def start() -> None:
            for number in range(3):
                self.callback(np.full((block, 1), number, np.float32), block, None, None)

        return _FakeStream(start)


class _FakeStream:
    def __init__(self, start: Any) -> None:
        self.start = start

    def __enter__(self) -> _FakeStream:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class TestMicrophone:
    @pytest.mark.parametrize("device", [None, "0", "Desk"])
    def test_blocks_come_in_order(self, monkeypatch: pytest.MonkeyPatch, device: str | None) -> None:
        monkeypatch.setitem(sys.modules, "sounddevice", FakeDevices(["Desk"]))
        blocks = listen_to_microphone(device)
        assert [float(next(blocks)[0]) for _ in range(3)] == [0, 1, 2]

    def test_a_machine_without_a_microphone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "sounddevice", FakeDevices([]))
        with pytest.raises(SpeechError, match="no microphone found"):
            next(listen_to_microphone())

    def test_an_unknown_device_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "sounddevice", FakeDevices(["Desk", "Lapel"]))
        with pytest.raises(SpeechError, match=r"microphone 7: .*; choose with --device: 0 Desk, 1 Lapel"):
            next(listen_to_microphone("7"))

    def test_without_the_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "sounddevice", None)
        with pytest.raises(MissingExtraError, match="needs the extra 'speech'"):
            next(listen_to_microphone())
