"""sherpa-onnx streaming transducers; needs `pip install sherpa-onnx` and a model directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from simulmt.errors import SpeechError
from simulmt.runtime.revisions import Hypothesis
from simulmt.speech.audio import RATE, Samples

PARTS = ("encoder", "decoder", "joiner")
UPDATE_SAMPLES = RATE * 3 // 10  # between hypotheses; more frequent ones agree too readily


class SherpaRecogniser:
    """A loaded streaming transducer: tokens.txt and encoder, decoder and joiner as .onnx files."""

    language: str | None = None

    def __init__(self, directory: Path) -> None:
        try:
            import sherpa_onnx
        except ImportError:
            raise SpeechError("the recogniser sherpa is not installed: pip install sherpa-onnx") from None
        tokens = directory / "tokens.txt"
        if not tokens.is_file():
            raise SpeechError(f"{directory}: no tokens.txt; expected the directory of a streaming transducer")
        files = {part: str(find_part(directory, part)) for part in PARTS}
        try:
            self._recognizer = sherpa_onnx.OnlineRecognizer.from_transducer(
                tokens=str(tokens), num_threads=1, enable_endpoint_detection=True, **files
            )
        except Exception as error:  # the library's errors have no common base class
            raise SpeechError(f"{directory}: sherpa-onnx cannot load it: {str(error).splitlines()[0]}") from None

    def start(self) -> SherpaRecognition:
        return SherpaRecognition(self._recognizer)


class SherpaRecognition:
    """Recognises one speaker."""

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
        if not is_final and self._since_update < UPDATE_SAMPLES:
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


def find_part(directory: Path, part: str) -> Path:
    """Find a file of the model; prefer the quantized one."""
    found = sorted(directory.glob(f"{part}*.onnx"), key=lambda path: (".int8." not in path.name, path.name))
    if not found:
        raise SpeechError(f"{directory}: no {part}*.onnx; expected the directory of a streaming transducer")
    return found[0]
