"""The models that a server offers, each with its own scheduler."""

from __future__ import annotations

import asyncio
import logging
import os
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from simulmt.errors import BundleError, StreamError
from simulmt.runtime.aio import AsyncTranslator
from simulmt.runtime.bundle import SHIPPED, Bundle, find, shipped_names
from simulmt.serve.metrics import Metrics
from simulmt.serve.protocol import ErrorCode, RefusedError
from simulmt.stream import Commit, Stream, Translator

logger = logging.getLogger("simulmt.serve")

INVENTED = "synthetic"  # the language of models that are for trying out only
CHARACTERS_AT_ONCE = 512
LINES_OF_A_REQUEST = 4  # that are translated at the same time
LINES_OF_ALL_REQUESTS = 16  # so that live streams never wait for more than one step of them


@dataclass(frozen=True)
class Description:
    """What a client must know of a model."""

    name: str
    kind: str
    source: str
    target: str
    delays: tuple[int, ...]
    default_delay: int | None


class Model:
    """A translator, advanced for many clients at once."""

    def __init__(self, translator: Translator, metrics: Metrics) -> None:
        config = translator.config
        self.translator = translator
        self.name = translator.bundle.name
        self.description = Description(
            self.name, config.kind, config.source_language, config.target_language, config.delays, config.default_delay
        )
        self._scheduler = AsyncTranslator(translator, on_step=metrics.batch.labels(self.name).observe)
        self._lines = asyncio.Semaphore(LINES_OF_ALL_REQUESTS)

    def stream(self, delay: int | None) -> Stream:
        """Open a stream."""
        self.check_delay(delay)
        return self.translator.stream(delay)

    def check_delay(self, delay: int | None) -> None:
        """Refuse a delay that the model was not trained for."""
        try:
            self.translator.checked_delay(delay)
        except StreamError as error:
            raise RefusedError(ErrorCode.BAD_DELAY, str(error)) from None

    async def step(self, stream: Stream) -> list[Commit]:
        """Advance a stream a little, beside all others that wait; what it wrote."""
        return await self._scheduler.step(stream)

    async def translate(self, text: str, delay: int | None) -> str:
        """Translate a whole text line by line, beside the live streams."""
        lines = text.split("\n")
        translated: list[str] = []
        for start in range(0, len(lines), LINES_OF_A_REQUEST):
            some = lines[start : start + LINES_OF_A_REQUEST]
            translated += await asyncio.gather(*(self._translate_line(line, delay) for line in some))
        return "\n".join(translated)

    async def _translate_line(self, line: str, delay: int | None) -> str:
        async with self._lines:
            stream = self._scheduler.stream(delay)
            commits = [commit for part in slices(line) for commit in await stream.push(part)]
            commits += await stream.finish()
        return "".join(commit.text for commit in commits)


def log_failure(model: Model, error: Exception) -> None:
    """Log a fault; only its type and place, for its message might quote what a user said."""
    place = "".join(traceback.format_tb(error.__traceback__))
    logger.error("%s failed to translate: %s\n%s", model.name, type(error).__name__, place)


def slices(text: str) -> Iterator[str]:
    """A text in parts so short that taking one in does not hold up the event loop."""
    for start in range(0, len(text), CHARACTERS_AT_ONCE):
        yield text[start : start + CHARACTERS_AT_ONCE]


def default_models() -> list[str]:
    """All shipped models; those of invented languages only where there is no other."""
    names = shipped_names()
    if not names:
        raise BundleError("no model came with this installation: give the directory of one with --model")
    real = [name for name in names if Bundle(SHIPPED / name).config.source_language != INVENTED]
    return real or names


def load_models(names_or_paths: Sequence[str | Path], metrics: Metrics, threads: int = 0) -> dict[str, Model]:
    """Load models, by name; `threads` 0 takes all cores but one, which is left to the network."""
    threads = threads or max(1, (os.cpu_count() or 1) - 1)
    models: dict[str, Model] = {}
    for name_or_path in names_or_paths:
        model = Model(Translator(Bundle(find(name_or_path)), threads), metrics)
        if model.name in models:
            raise BundleError(f"{name_or_path}: there is already a model of the name {model.name}; rename a directory")
        models[model.name] = model
    return models
