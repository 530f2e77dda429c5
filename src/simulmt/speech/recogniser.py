"""Speech recognisers behind one interface; their libraries are imported only when a recogniser is opened.

    recogniser = open_recogniser("moonshine")
    recognition = recogniser.start()
    for samples in blocks:
        for hypothesis in recognition.push(samples): ...

Recognisers are named by library and model directory: moonshine, moonshine:DIR, vosk:DIR, sherpa:DIR. The wheel of
moonshine-voice 0.0.65 includes the model tiny-en. Vosk supports some twenty languages and writes no punctuation;
sherpa-onnx runs streaming transducers.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from simulmt.errors import ConfigError, MissingExtraError, SpeechError
from simulmt.runtime.bundle import Session, onnxruntime
from simulmt.runtime.revisions import EventReader, Hypothesis
from simulmt.speech.audio import RATE, Samples

DEFAULT = "moonshine"
DEFAULT_LANGUAGE = "en"

# Vosk and sherpa-onnx.
_UPDATE_SAMPLES = RATE * 3 // 10  # between hypotheses; more frequent ones agree too readily
_VOSK_FILES = ("am/final.mdl", "final.mdl")  # one of them
_SHERPA_FILES = {"tokens": "tokens.txt", **{part: f"{part}*.onnx" for part in ("encoder", "decoder", "joiner")}}

# Moonshine.
UPDATE_SECONDS = 1.0  # between hypotheses
RESTART_AFTER = 60.0  # seconds after which a stream is restarted at the next silence ...
RESTART_AT_LATEST = 600.0  # ... or during speech
_SILENCE_SECONDS = 1.0  # without speech
_OVERLAP_SECONDS = 0.4  # of silence replayed to the new stream, so that it misses no onset
_KEPT_SECONDS = 5.0  # of audio kept between lines, since a line starts before it is detected
_VAD_OPTIONS = {  # detect lines of speech, do not transcribe them
    "skip_transcription": "true",
    "transcription_interval": "0.05",
    "return_audio_data": "false",
    "identify_speakers": "false",
}
ENCODER, DECODER, TOKENS = "encoder_model.ort", "decoder_model_merged.ort", "tokenizer.bin"
_START, _END = 1, 2
_MIN_SAMPLES = RATE // 10  # required by the encoder
TOKENS_PER_SECOND = {"en": 6.5}  # more indicate a repetition loop
DEFAULT_TOKENS_PER_SECOND = 13.0
_WORD_START = "▁"

Arrays = dict[str, NDArray[Any]]


class Recognition(Protocol):
    """Recognises one speaker; hypotheses are timed in seconds of audio."""

    def push(self, samples: Samples) -> list[Hypothesis]:
        """Add samples at 16 kHz, in blocks of any length; return new and revised hypotheses."""

    def finish(self) -> list[Hypothesis]:
        """End the audio; return the last hypotheses. Nothing may be pushed after this."""

    def close(self) -> None:
        """Free all resources; may be called more than once."""


class Recogniser(Protocol):
    """A loaded model, shared by any number of speakers."""

    language: str | None  # None if the model does not say

    def start(self) -> Recognition:
        """Start recognising a speaker."""


def open_recogniser(name: str = DEFAULT) -> Recogniser:
    """Load a recogniser by name."""
    kind, directory = _parse_name(name)
    if kind == "moonshine":
        return MoonshineRecogniser(directory)
    assert directory is not None
    return VoskRecogniser(directory) if kind == "vosk" else SherpaRecogniser(directory)


def _parse_name(name: str) -> tuple[str, Path | None]:
    """Split the name of a recogniser into library and model directory, and check both."""
    kind, _, path = name.partition(":")
    if kind not in ("moonshine", "vosk", "sherpa"):
        raise ConfigError(f"recogniser {name!r}: expected moonshine, moonshine:DIR, vosk:DIR or sherpa:DIR")
    if not path:
        if kind == DEFAULT:
            return kind, None
        raise ConfigError(f"recogniser {name}: expected the directory of a model, {kind}:DIR")
    directory = Path(path).expanduser()
    if not directory.is_dir():
        raise SpeechError(f"{directory}: no such directory; expected a model of the recogniser")
    return kind, directory


def language_of(name: str) -> str | None:
    """Return the language of a recogniser if its name implies one."""
    kind, directory = _parse_name(name)
    if kind != DEFAULT:
        return None
    return DEFAULT_LANGUAGE if directory is None else directory.name.partition("-")[2] or None


def is_default_installed() -> bool:
    """Return whether the default recogniser is installed, without importing it."""
    return find_spec("moonshine_voice") is not None


class VoskRecogniser:
    """A loaded Vosk model."""

    language: str | None = None

    def __init__(self, directory: Path) -> None:
        try:
            import vosk
        except ImportError:
            raise SpeechError("the recogniser vosk is not installed: pip install vosk") from None
        if not any((directory / name).is_file() for name in _VOSK_FILES):  # the library would log its own errors
            raise SpeechError(f"{directory}: no {_VOSK_FILES[0]}; expected the directory of a Vosk model")
        vosk.SetLogLevel(-1)
        self._library = vosk
        try:
            self._model = vosk.Model(str(directory))
        except Exception:  # the library raises a plain Exception
            raise SpeechError(f"{directory}: Vosk cannot load it; download the model again") from None

    def start(self) -> VoskRecognition:
        recognizer = self._library.KaldiRecognizer(self._model, float(RATE))
        recognizer.SetWords(True)
        return VoskRecognition(recognizer)


class VoskRecognition:
    """Recognises one speaker with Vosk."""

    def __init__(self, recognizer: Any) -> None:
        self._recognizer = recognizer
        self._events = EventReader()
        self._since_update = 0  # samples

    def push(self, samples: Samples) -> list[Hypothesis]:
        is_final = self._recognizer.AcceptWaveform((samples * 32767).astype(np.int16).tobytes())
        self._since_update += len(samples)
        if not is_final and self._since_update < _UPDATE_SAMPLES:
            return []
        self._since_update = 0
        return self._read(self._recognizer.Result() if is_final else self._recognizer.PartialResult())

    def finish(self) -> list[Hypothesis]:
        return self._read(self._recognizer.FinalResult())

    def close(self) -> None:
        """Do nothing: the library frees its own resources."""

    def _read(self, event: str) -> list[Hypothesis]:
        return self._events.read_vosk(json.loads(event))


class SherpaRecogniser:
    """A loaded streaming transducer: tokens.txt and encoder, decoder and joiner as .onnx files."""

    language: str | None = None

    def __init__(self, directory: Path) -> None:
        try:
            import sherpa_onnx
        except ImportError:
            raise SpeechError("the recogniser sherpa is not installed: pip install sherpa-onnx") from None
        files = {part: _find(directory, pattern) for part, pattern in _SHERPA_FILES.items()}
        try:
            self._recognizer = sherpa_onnx.OnlineRecognizer.from_transducer(
                **files, num_threads=1, enable_endpoint_detection=True
            )
        except Exception as error:  # the library's errors have no common base class
            raise SpeechError(f"{directory}: sherpa-onnx cannot load it: {str(error).splitlines()[0]}") from None

    def start(self) -> SherpaRecognition:
        return SherpaRecognition(self._recognizer)


class SherpaRecognition:
    """Recognises one speaker with sherpa-onnx."""

    def __init__(self, recognizer: Any) -> None:
        self._recognizer = recognizer
        self._stream = recognizer.create_stream()
        self._segment = 0
        self._since_update = 0  # samples

    def push(self, samples: Samples) -> list[Hypothesis]:
        self._stream.accept_waveform(RATE, samples)
        self._decode()
        self._since_update += len(samples)
        is_final = self._recognizer.is_endpoint(self._stream)
        if not is_final and self._since_update < _UPDATE_SAMPLES:
            return []
        self._since_update = 0
        return self._hypotheses(is_final)

    def finish(self) -> list[Hypothesis]:
        self._stream.input_finished()
        self._decode()
        return self._hypotheses(is_final=True)

    def close(self) -> None:
        """Do nothing: the library frees its own resources."""

    def _decode(self) -> None:
        while self._recognizer.is_ready(self._stream):
            self._recognizer.decode_stream(self._stream)

    def _hypotheses(self, is_final: bool) -> list[Hypothesis]:
        text = self._recognizer.get_result(self._stream)
        text = text.lower() if text.isupper() else text  # many models write capitals only
        found = [Hypothesis(text, is_final, self._segment)] if text else []
        if is_final:
            self._recognizer.reset(self._stream)
            self._segment += 1
        return found


def _find(directory: Path, pattern: str) -> str:
    """Return the path of a file of the model; prefer the quantized one."""
    found = sorted(directory.glob(pattern), key=lambda path: (".int8." not in path.name, path.name))
    if not found:
        raise SpeechError(f"{directory}: no {pattern}; expected the directory of a streaming transducer")
    return str(found[0])


class MoonshineRecogniser:
    """A Moonshine model, by default the one in the wheel, with the voice activity detection of moonshine-voice."""

    language: str | None

    def __init__(self, directory: Path | None = None) -> None:
        library = find_spec("moonshine_voice")
        if library is None or library.origin is None:
            raise MissingExtraError("the recogniser moonshine", "speech")
        path = directory or Path(library.origin).parent / "assets" / "tiny-en"
        if not path.is_dir():
            raise SpeechError(f"{path}: not in this version of moonshine-voice; install moonshine-voice==0.0.65")
        from moonshine_voice.moonshine_api import ModelArch
        from moonshine_voice.transcriber import Transcriber

        self.language = path.name.partition("-")[2] or None
        self._model = MoonshineModel(path, self.language)
        self._detector = Transcriber(path, ModelArch.TINY, options=_VAD_OPTIONS)

    def start(self) -> MoonshineRecognition:
        return MoonshineRecognition(self._model, self._open_stream)

    def _open_stream(self) -> Any:
        stream: Any = self._detector.create_stream(update_interval=sys.float_info.max)
        stream.start()
        return stream


class MoonshineRecognition:
    """Recognises one speaker with Moonshine.

    Voice activity detection keeps all lines of a stream, so streams are restarted regularly to bound memory.
    """

    def __init__(self, model: MoonshineModel, open_stream: Callable[[], Any]) -> None:
        self._model = model
        self._open_stream = open_stream
        self._stream = open_stream()
        self._stream_number = 0  # makes line ids unique
        self._stream_start = 0.0  # start of this stream, in seconds of audio
        self._audio_seconds = 0.0  # received
        self._last_update = 0.0
        self._lines_finished = 0  # lines of this stream
        self._line_start: float | None = None  # start of the open line
        self._draft: list[int] = []  # tokens of the open line
        self._speech_end = 0.0  # end of the last line
        self._audio: Samples = np.zeros(0, np.float32)  # most recent samples

    def push(self, samples: Samples) -> list[Hypothesis]:
        self._audio = np.concatenate([self._audio, samples])
        self._audio_seconds += len(samples) / RATE
        self._stream.add_audio(samples.tolist(), RATE)
        found = self._update()
        kept = _KEPT_SECONDS if self._line_start is None else self._audio_seconds - self._line_start
        self._audio = self._audio[-math.ceil(kept * RATE) :]
        age = self._audio_seconds - self._stream_start
        is_silent = self._line_start is None and self._audio_seconds - self._speech_end > _SILENCE_SECONDS
        if age > RESTART_AT_LATEST or (age > RESTART_AFTER and is_silent):
            found += self._restart(is_silent)
        return found

    def finish(self) -> list[Hypothesis]:
        self._stream.stop()
        found = self._update()
        self.close()
        return found

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _update(self) -> list[Hypothesis]:
        """Recognise finished lines, and at intervals the open one."""
        found = []
        lines = self._stream.update_transcription().lines
        for number in range(self._lines_finished, len(lines)):
            line = lines[number]
            start = self._stream_start + line.start_time
            self._speech_end = start + line.duration
            if line.is_complete:
                found.append(self._recognise(number, start, True))
                self._lines_finished, self._line_start, self._draft = number + 1, None, []
            else:
                self._line_start = start
                if self._audio_seconds - self._last_update >= UPDATE_SECONDS:
                    found.append(self._recognise(number, start, False))
        return found

    def _recognise(self, number: int, start: float, is_final: bool) -> Hypothesis:
        self._last_update = self._audio_seconds
        origin = self._audio_seconds - len(self._audio) / RATE
        first, last = (max(0, round((time - origin) * RATE)) for time in (start, self._speech_end))
        self._draft = self._model.transcribe(self._audio[first:last], self._draft)
        text = self._model.text(self._draft)
        return Hypothesis(text, is_final, f"{self._stream_number}.{number}", start=start, end=self._speech_end)

    def _restart(self, is_silent: bool) -> list[Hypothesis]:
        """Finish this stream and open another; return the last hypotheses of this one."""
        found = self.finish()
        recent = self._audio[-int(_OVERLAP_SECONDS * RATE) :] if is_silent else self._audio[:0]
        self._stream = self._open_stream()
        self._stream_start = self._audio_seconds - len(recent) / RATE
        self._stream_number += 1
        self._lines_finished = 0
        self._stream.add_audio(recent.tolist(), RATE)
        return found


class MoonshineModel:
    """The encoder and decoder, run with ONNX Runtime.

    moonshine-voice can run them itself, but decodes every hypothesis from its first token and leaks memory. Here
    decoding is speculative, with the last hypothesis as the draft: one pass of the decoder verifies it, and only the
    tokens after the first difference are decoded one by one.
    """

    def __init__(self, directory: Path, language: str | None) -> None:
        for name in (ENCODER, DECODER, TOKENS):
            if not (directory / name).is_file():
                raise SpeechError(f"{directory}: no {name}; expected the directory of a Moonshine model")
        self._vocabulary = list(_read_vocabulary((directory / TOKENS).read_bytes()))
        self._tokens_per_second = TOKENS_PER_SECOND.get(language or "", DEFAULT_TOKENS_PER_SECOND)
        self._encoder = _session(directory / ENCODER)
        self._decoder = _session(directory / DECODER)
        self._inputs = {each.name: each.shape for each in self._decoder.get_inputs()}
        logits, *caches = self._decoder.get_outputs()
        self._caches = [each.name.replace("present", "past_key_values", 1) for each in caches]
        if len(self._vocabulary) != logits.shape[-1]:
            raise SpeechError(f"{directory / TOKENS}: {len(self._vocabulary)} tokens, expected {logits.shape[-1]}")

    def transcribe(self, samples: Samples, draft: Sequence[int] = ()) -> list[int]:
        """Return the tokens of a segment; `draft` holds those of an earlier hypothesis (speculative decoding)."""
        samples = np.pad(samples, (0, max(0, _MIN_SAMPLES - len(samples))))
        context = self._encode(samples)
        max_tokens = math.ceil(len(samples) / RATE * self._tokens_per_second)
        draft = draft[:max_tokens]
        best, cache = self._decode([_START, *draft], context, self._empty_cache())
        agreed = next((index for index, token in enumerate(draft) if best[index] != token), len(draft))
        tokens = list(draft[:agreed])
        cache = {
            name: value[:, :, : agreed + 1] if _is_self_attention(name) else value for name, value in cache.items()
        }
        token = int(best[agreed])
        while token != _END and len(tokens) < max_tokens:
            tokens.append(token)
            best, update = self._decode([token], context, cache)
            cache.update((name, value) for name, value in update.items() if _is_self_attention(name))
            token = int(best[-1])
        return tokens

    def text(self, tokens: Sequence[int]) -> str:
        """Join tokens into text."""
        text = b"".join(self._vocabulary[token] for token in tokens).decode("utf-8", "ignore")
        return text.replace(_WORD_START, " ").strip()

    def _encode(self, samples: Samples) -> Arrays:
        """Return the encoder states and mask that the decoder takes as inputs."""
        audio: Arrays = {"input_values": samples[None], "attention_mask": np.ones((1, len(samples)), np.int64)}
        names = [each.name for each in self._encoder.get_inputs()]  # older models have no mask
        states = self._encoder.run(None, {name: audio[name] for name in names})[0]
        context: Arrays = {"encoder_hidden_states": states, "encoder_attention_mask": audio["attention_mask"]}
        return {name: value for name, value in context.items() if name in self._inputs}

    def _decode(self, tokens: Sequence[int], context: Arrays, cache: Arrays) -> tuple[NDArray[np.int64], Arrays]:
        """Return the best next token after each token, and the new key-value caches."""
        has_cache = next(iter(cache.values())).shape[2] > 0
        inputs = {"input_ids": np.array([tokens], np.int64), "use_cache_branch": np.array([has_cache])}
        logits, *values = self._decoder.run(None, {**inputs, **context, **cache})
        return logits[0].argmax(-1), dict(zip(self._caches, values, strict=True))

    def _empty_cache(self) -> Arrays:
        shapes = {name: self._inputs[name] for name in self._caches}
        return {name: np.zeros((1, heads, 0, size), np.float32) for name, (_, heads, _, size) in shapes.items()}


def _session(path: Path) -> Session:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4  # errors are raised as exceptions
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's errors have no common base class
        raise SpeechError(f"{path}: ONNX Runtime cannot load it: {str(error).splitlines()[0]}") from None


def _is_self_attention(name: str) -> bool:
    """Return whether this is a self-attention cache, which grows; cross-attention caches do not."""
    return ".decoder." in name


def _read_vocabulary(data: bytes) -> Iterator[bytes]:
    """Read length-prefixed pieces, special ones as empty; a length above 127 takes two bytes."""
    position = 0
    while position < len(data):
        length = data[position]
        position += 1
        if length > 127:
            length += int.from_bytes(data[position : position + 1]) * 128 - 128
            position += 1
        piece = data[position : position + length]
        yield b"" if length > 2 and piece.startswith(b"<") and piece.endswith(b">") else piece
        position += length
