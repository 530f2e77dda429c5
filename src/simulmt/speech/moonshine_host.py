"""Host a Moonshine transcriber in a process of its own: python -m simulmt.speech.moonshine_host DIR ARCHITECTURE.

Every request on standard input is a line of JSON, followed by float32 samples if it says so; every answer on standard
output is a line of JSON. The process ends with its input.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any, BinaryIO

import numpy as np

RATE = 16_000
OPTIONS = {"return_audio_data": "false", "identify_speakers": "false"}


class Host:
    """Runs requests on the streams of one transcriber."""

    def __init__(self, transcriber: Any) -> None:
        self._transcriber = transcriber
        self._streams: dict[int, Any] = {}

    def run(self, operation: str, stream: int, samples: list[float]) -> Any:
        """Run one request; return its answer."""
        if operation == "open":
            self._streams[stream] = self._transcriber.create_stream(update_interval=sys.float_info.max)
            self._streams[stream].start()
        elif operation == "add":
            self._streams[stream].add_audio(samples, RATE)
        elif operation == "update":
            return [_line(line) for line in self._streams[stream].update_transcription().lines]
        elif operation == "stop":
            self._streams[stream].stop()
        elif operation == "close":
            self._streams.pop(stream).close()
        return None


def _line(line: Any) -> dict[str, Any]:
    names = ("text", "line_id", "is_complete", "is_updated", "is_new", "start_time", "duration")
    return {name: getattr(line, name) for name in names}


def serve(host: Host, requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until there are no more."""
    for header in requests:
        request = json.loads(header)
        samples = np.frombuffer(requests.read(request["bytes"]), np.float32).tolist()
        try:
            answer = {"result": host.run(request["operation"], request["stream"], samples)}
        except Exception as error:  # what the library raises
            answer = {"error": str(error).split("\n", 1)[0]}
        _write(answers, answer)


def _write(answers: BinaryIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer).encode() + b"\n")
    answers.flush()


def main(directory: str, architecture: str) -> None:
    """Load the model, say whether that worked, and serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which still wants the last words
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever the library prints is no answer
    try:
        from moonshine_voice.moonshine_api import ModelArch
        from moonshine_voice.transcriber import Transcriber

        transcriber = Transcriber(directory, getattr(ModelArch, architecture), options=OPTIONS)
    except Exception as error:
        _write(answers, {"error": str(error).split("\n", 1)[0]})
        return
    _write(answers, {"result": "ready"})
    serve(Host(transcriber), sys.stdin.buffer, answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
