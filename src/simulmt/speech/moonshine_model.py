"""The encoder and decoder of a Moonshine model, run with ONNX Runtime.

moonshine-voice can run them itself, but decodes every hypothesis from its first token and leaks memory. Here decoding
is speculative, with the last hypothesis as the draft: one pass of the decoder verifies it, and only the tokens after
the first difference are decoded one by one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulmt.errors import SpeechError
from simulmt.runtime.bundle import Session, onnxruntime
from simulmt.speech.audio import RATE, Samples

ENCODER, DECODER, TOKENS = "encoder_model.ort", "decoder_model_merged.ort", "tokenizer.bin"
START, END = 1, 2
MIN_SAMPLES = RATE // 10  # required by the encoder
TOKENS_PER_SECOND = {"en": 6.5}  # more indicate a repetition loop
DEFAULT_TOKENS_PER_SECOND = 13.0
SPACE = "▁"

Arrays = dict[str, NDArray[Any]]


class MoonshineModel:
    """A loaded model."""

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
        samples = np.pad(samples, (0, max(0, MIN_SAMPLES - len(samples))))
        context = self._encode(samples)
        max_tokens = math.ceil(len(samples) / RATE * self._tokens_per_second)
        draft = draft[:max_tokens]
        best, cache = self._decode([START, *draft], context, self._empty_cache())
        agreed = next((index for index, token in enumerate(draft) if best[index] != token), len(draft))
        tokens = list(draft[:agreed])
        cache = {
            name: value[:, :, : agreed + 1] if _is_self_attention(name) else value for name, value in cache.items()
        }
        token = int(best[agreed])
        while token != END and len(tokens) < max_tokens:
            tokens.append(token)
            best, update = self._decode([token], context, cache)
            cache.update((name, value) for name, value in update.items() if _is_self_attention(name))
            token = int(best[-1])
        return tokens

    def text(self, tokens: Sequence[int]) -> str:
        """Join tokens into text."""
        pieces = (self._vocabulary[token] for token in tokens)
        text = b"".join(piece for piece in pieces if not _is_special(piece)).decode("utf-8", "ignore")
        return text.replace(SPACE, " ").strip()

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


def _is_special(piece: bytes) -> bool:
    return len(piece) > 2 and piece.startswith(b"<") and piece.endswith(b">")


def _read_vocabulary(data: bytes) -> Iterator[bytes]:
    """Read length-prefixed pieces; a length above 127 takes two bytes."""
    position = 0
    while position < len(data):
        length = data[position]
        position += 1
        if length > 127:
            length += int.from_bytes(data[position : position + 1]) * 128 - 128
            position += 1
        yield data[position : position + length]
        position += length
