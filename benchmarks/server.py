"""How many people one server translates for at the same time, over real WebSockets from another process.

    python benchmarks/server.py [--model NAME_OR_DIR] [--streams 25 50 100 150] [--seconds 20] [--threads 1] [--paste]

Every stream says 2.5 words a second. Queue and compute are the server's own figures, in milliseconds; "answer" is the
client's: from sending the last word that a piece of translation needed to having that piece, network included.
"Spread" is the p95 of queue + compute of the best and of the worst served stream. CPU is in percent of one core.
--paste adds one stream that sends 10,000 words at once. Without --model a model of base size with random weights is
built: its translation is nonsense, its costs are real.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from simulmt.serve.client import LiveTranslation
from simulmt.serve.protocol import Commit
from simulmt.text import SPACE, SPECIAL_SYMBOLS, split_words

PACE = 2.5  # words a second
WARM_UP = 4.0  # seconds that are not counted
PASTED_WORDS = 10_000
VOCABULARY = 32_000
TWO_PIECES = 0.3  # the share of words that take two pieces, as in real text
SENTENCE_END = 1 / 15  # the share of words that end a sentence
# fmt: off
COLUMNS = (
    "streams", "words/s", "queue+compute p50", "p95", "p99", "queue p95", "compute p95", "policy p50",
    "answer p50", "p95", "spread", "server CPU", "client CPU", "MB",
)
# fmt: on


@dataclass
class Stream:
    """What one client saw."""

    sent: list[float] = field(default_factory=list)  # when each word was
    commits: list[tuple[Commit, float]] = field(default_factory=list)  # and when each arrived

    def keep(self, begin: float, end: float) -> None:
        """Leave out what came while streams were still starting or already ending."""
        self.commits = [(commit, arrived) for commit, arrived in self.commits if begin <= arrived < end]

    def waits(self) -> list[float]:
        return [commit.lag_ms.queue + commit.lag_ms.compute for commit, _ in self.commits]

    def answers(self) -> list[float]:
        """Milliseconds from the last word that was needed to the commit."""
        return [1000 * (arrived - self.sent[commit.source_words - 1]) for commit, arrived in self.commits]


async def speak(url: str, model: str, words: Sequence[str], stream: Stream, until: float) -> None:
    """Say words at the pace of speech, beginning at a random moment."""
    async with LiveTranslation(url, model) as live:

        async def talk() -> None:
            begin = time.perf_counter() + random.random() / PACE
            for number, word in enumerate(words):
                await asyncio.sleep(begin + number / PACE - time.perf_counter())
                if time.perf_counter() > until:
                    break
                live.source(f"{word} ")
                stream.sent.append(time.perf_counter())
            live.finish()

        speaker = asyncio.create_task(talk())
        async for message in live:
            if isinstance(message, Commit):
                stream.commits.append((message, time.perf_counter()))
        await speaker


async def paste(url: str, model: str, words: Sequence[str], until: float) -> None:
    """Send thousands of words at once, again and again."""
    with suppress(TimeoutError):
        async with asyncio.timeout(until - time.perf_counter()):
            while True:
                async with LiveTranslation(url, model) as live:
                    for start in range(0, PASTED_WORDS, 1000):
                        live.source(" ".join(random.choices(words, k=1000)) + f" {start} ")
                    live.finish()
                    async for _ in live:
                        pass


async def crowd(url: str, model: str, words: Sequence[str], count: int, seconds: float, pasting: bool) -> list[Stream]:
    """All streams of one row of the table."""
    until = time.perf_counter() + WARM_UP + seconds
    streams = [Stream() for _ in range(count)]
    tasks = []
    for stream in streams:
        start = random.randrange(len(words))
        tasks.append(speak(url, model, [*words[start:], *words[:start]] * 10, stream, until))
    if pasting:
        tasks.append(paste(url, model, words, until))
    await asyncio.gather(*tasks)
    return streams


class Server:
    """`simulmt serve` in a process of its own."""

    def __init__(self, model: str, threads: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        arguments = ["--model", model, "--port", str(self._port), "--threads", str(threads)]
        limits = ["--limit", "streams=5000", "--limit", "streams_per_address=5000"]
        self._process = subprocess.Popen([sys.executable, "-m", "simulmt", "serve", *arguments, *limits])
        self.url = f"ws://127.0.0.1:{self._port}/v1/stream"

    def wait(self) -> None:
        while self._process.poll() is None:
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self._port}/ready", timeout=5):
                return
            time.sleep(0.1)
        raise SystemExit("the server did not start")

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def megabytes(self) -> float:
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))) / 1000


@contextmanager
def running(model: str, threads: int) -> Iterator[Server]:
    server = Server(model, threads)
    try:
        server.wait()
        yield server
    finally:
        server.stop()


def measure(server: Server, model: str, words: Sequence[str], count: int, seconds: float, pasting: bool) -> list[str]:
    """One row of the table."""
    begin, ours, theirs = time.perf_counter(), time.process_time(), server.cpu_seconds()
    streams = asyncio.run(crowd(server.url, model, words, count, seconds, pasting))
    elapsed = time.perf_counter() - begin
    client, cpu = (time.process_time() - ours) / elapsed, (server.cpu_seconds() - theirs) / elapsed
    counted = begin + WARM_UP
    for stream in streams:
        stream.keep(counted, counted + seconds)
    lags = [commit.lag_ms for stream in streams for commit, _ in stream.commits]
    answers = [answer for stream in streams for answer in stream.answers()]
    both = [wait for stream in streams for wait in stream.waits()]
    each = [percentile(stream.waits(), 95) for stream in streams]
    words_said = sum(counted <= moment < counted + seconds for stream in streams for moment in stream.sent)
    return [
        f"{count}{' + paste' * pasting}",
        f"{words_said / seconds:.0f}",
        *(f"{percentile(both, share):.0f}" for share in (50, 95, 99)),
        f"{percentile([lag.queue for lag in lags], 95):.0f}",
        f"{percentile([lag.compute for lag in lags], 95):.0f}",
        f"{percentile([lag.policy for lag in lags], 50):.0f}",
        f"{percentile(answers, 50):.0f}",
        f"{percentile(answers, 95):.0f}",
        f"{min(each):.0f}-{max(each):.0f}",
        f"{100 * cpu:.0f} %",
        f"{100 * client:.0f} %",
        f"{server.megabytes():.0f}",
    ]


def percentile(values: Sequence[float], share: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[share - 1] if len(values) > 1 else float("nan")


def row(cells: Sequence[str]) -> None:
    widths = [max(11, len(name)) for name in COLUMNS]
    print("| " + " | ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)) + " |", flush=True)


def build_bundle(directory: Path) -> tuple[str, list[str]]:
    """A bundle of base size with random weights, and words that it reads."""
    import torch

    from simulmt.model.ctc import CTCConfig, CTCModel
    from simulmt.runtime.bundle import FORMAT, SOURCE, TARGET, BundleConfig, write_description
    from simulmt.train.graph import ctc_graph

    torch.manual_seed(1)
    words = write_vocabulary(directory / SOURCE)
    write_vocabulary(directory / TARGET)
    model = CTCModel.build(CTCConfig(VOCABULARY, VOCABULARY)).eval()
    ctc_graph(model, 256, "int8").save(directory / "ctc.onnx")
    config = BundleConfig(FORMAT, "ctc", "en", "de", "int8", 256, mu=model.mu, delays=(3,), default_delay=3)
    write_description(directory, config, "")
    return str(directory), words


def write_vocabulary(path: Path) -> list[str]:
    """A vocabulary of made-up words; some words that it needs one piece for, some that it needs two for."""
    from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]

    from simulmt.text import Tokenizer, VocabularySpec

    letters = "the quick brown fox jumps over the lazy dog and runs away with a bag of very old wine"
    small = Tokenizer.train([letters], path, VocabularySpec(size=36))
    model = ModelProto.FromString(small.model)
    random.seed(1)
    chosen: dict[str, None] = {}
    while len(chosen) < VOCABULARY - small.size:
        chosen["".join(random.choices("abcdefghijklmnopqrstuvwxyz", k=random.randint(4, 7)))] = None
    for word in chosen:
        model.pieces.add(piece=f"{SPACE}{word}", score=-10.0)
    path.write_bytes(model.SerializeToString())
    assert Tokenizer.load(path).pieces[: len(SPECIAL_SYMBOLS)] == list(SPECIAL_SYMBOLS)
    spoken = random.sample(list(chosen), 2000)
    spoken = [f"{word}s" if random.random() < TWO_PIECES else word for word in spoken]
    return [f"{word}." if random.random() < SENTENCE_END else word for word in spoken]


def sample_words(model: str) -> list[str]:
    """Words in the source language of a model."""
    from simulmt.cli.samples import sentences_for
    from simulmt.runtime.bundle import Bundle, find

    return [word for sentence in sentences_for(Bundle(find(model)).config, None) for word in split_words(sentence)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--streams", type=int, nargs="+", default=[25, 50, 100, 150])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--paste", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "base-size"
        directory.mkdir()
        if arguments.model:
            model, words = arguments.model, sample_words(arguments.model)
        else:
            model, words = build_bundle(directory)
        random.shuffle(words)
        print(f"load average before: {os.getloadavg()[0]:.1f}")
        with running(model, arguments.threads) as server:
            row(COLUMNS)
            for count in arguments.streams:
                for pasting in (False, True)[: 1 + arguments.paste]:
                    row(measure(server, Path(model).name, words, count, arguments.seconds, pasting))


if __name__ == "__main__":
    main()
