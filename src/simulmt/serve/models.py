"""The models of a server, each with its own scheduler."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Collection, Iterator, Sequence
from typing import Annotated, Literal

import msgspec

from simulmt.errors import BundleError, StreamError
from simulmt.runtime.aio import AsyncTranslator
from simulmt.runtime.bundle import Bundle, find
from simulmt.runtime.stream import Commit, Stream, Translator
from simulmt.serve.metrics import Metrics
from simulmt.serve.protocol import ErrorCode, RefusedError

logger = logging.getLogger("simulmt.serve")

CHUNK_CHARACTERS = 512
LINES_PER_REQUEST = 4  # translated concurrently
MAX_LINES = 16  # translated concurrently, for all requests


class ModelInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model, as clients see it."""

    name: str
    kind: Literal["ctc", "transducer", "frame-decoder", "wait-k", "full-sentence"]
    source: str
    target: str
    delays: tuple[Annotated[int, msgspec.Meta(ge=1)], ...]
    default_delay: int | None
    audio: bool = False  # whether speech in its source language is recognised


class Model:
    """A translator shared by many clients."""

    def __init__(self, translator: Translator, metrics: Metrics, inline: bool, spoken: Collection[str]) -> None:
        config = translator.config
        self.translator = translator
        self.name = translator.bundle.name
        source, target = config.source_language, config.target_language
        delays, default = config.delays, config.default_delay
        self.info = ModelInfo(self.name, config.kind, source, target, delays, default, audio=source in spoken)
        self._scheduler = AsyncTranslator(translator, on_step=metrics.batch.labels(self.name).observe, inline=inline)
        self._lines = asyncio.Semaphore(MAX_LINES)

    def check_delay(self, delay: int | None) -> None:
        """Raise RefusedError if the model was not trained for this delay."""
        try:
            self.translator.checked_delay(delay)
        except StreamError as error:
            raise RefusedError(ErrorCode.BAD_DELAY, str(error)) from None

    async def step(self, stream: Stream) -> list[Commit]:
        """Compute a step of a stream, batched with other waiting streams; return its commits."""
        return await self._scheduler.step(stream)

    async def translate(self, text: str, delay: int | None = None) -> str:
        """Translate a whole text line by line, in the background; by default with the largest, best delay."""
        if delay is None:
            delay = self.translator.config.largest_delay
        lines = text.split("\n")
        translated: list[str] = []
        for start in range(0, len(lines), LINES_PER_REQUEST):
            some = lines[start : start + LINES_PER_REQUEST]
            translated += await asyncio.gather(*(self._translate_line(line, delay) for line in some))
        return "\n".join(translated)

    async def _translate_line(self, line: str, delay: int | None) -> str:
        async with self._lines:
            stream = self._scheduler.stream(delay, background=True)
            commits = [commit for chunk in chunks(line) for commit in await stream.push(chunk)]
            commits += await stream.finish()
        return "".join(commit.text for commit in commits)


def log_failure(model: Model, error: Exception) -> None:
    """Log the type and traceback of an error, but not its message, which may quote user input."""
    place = "".join(traceback.format_tb(error.__traceback__))
    logger.error("%s failed to translate: %s\n%s", model.name, type(error).__name__, place)


def chunks(text: str) -> Iterator[str]:
    """Split a text into chunks that are short enough not to block the event loop."""
    for start in range(0, len(text), CHUNK_CHARACTERS):
        yield text[start : start + CHUNK_CHARACTERS]


def load_models(
    names_or_paths: Sequence[str], metrics: Metrics, threads: int, inline: bool, spoken: Collection[str] = ()
) -> dict[str, Model]:
    """Load models and return them by name; `spoken` are the languages with a speech recogniser."""
    models: dict[str, Model] = {}
    for name_or_path in names_or_paths:
        model = Model(Translator(Bundle(find(name_or_path)), threads), metrics, inline, spoken)
        if model.name in models:
            raise BundleError(f"{name_or_path}: duplicate model name {model.name}; rename one of the directories")
        models[model.name] = model
    return models
