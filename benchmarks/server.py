"""How many speakers, or viewers of one room, a server can serve, measured over WebSockets from another process.

    python benchmarks/server.py [--model NAME_OR_DIR] [--streams 100 300 600] [--workers 2] [--seconds 20] [--paste]
    python benchmarks/server.py --viewers 1000
    python benchmarks/server.py --model en-zh --ray 2

Every stream sends 2.5 words per second. "Queue" and "compute" are reported by the server, in milliseconds; "answer" is
measured by the client, from sending the last word that a commit depends on to receiving the commit. "Spread" is the
p95 of queue + compute of the fastest and of the slowest stream. "Errors" counts error messages of the server, streams
that failed and streams with missing commits. CPU is in percent of one core. --paste adds a stream that sends 10,000
words at once. Without --model, a model of base size with random weights is measured.

--viewers measures one speaker with many viewers: "viewer" is like "answer", but up to the receipt by a viewer, and
"missing" counts commits that a viewer did not receive.

--ray measures a local Ray cluster (extra `ray`) with this many replicas instead of a server with workers. CPU and
memory then include the processes of Ray, and only errors seen by clients are counted.
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

from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from simulmt.serve.client import LiveTranslation
from simulmt.serve.protocol import Commit, RefusedError, parse_room
from simulmt.text import SPACE, SPECIAL_SYMBOLS, split_words

PACE = 2.5  # words per second
CONNECTS_PER_SECOND = 200  # of viewers
PASTED_WORDS = 10_000
VOCABULARY = 32_000
TWO_PIECES = 0.3  # share of words of two pieces, as in real text
SENTENCE_END = 1 / 15  # share of words that end a sentence
# fmt: off
COLUMNS = (
    "streams", "words/s", "queue+compute p50", "p95", "p99", "queue p95", "compute p95", "policy p50",
    "answer p50", "p95", "spread", "errors", "server CPU", "client CPU", "MB",
)
VIEWER_COLUMNS = (
    "viewers", "messages/s", "answer p50", "p95", "viewer p50", "p95", "missing", "errors", "server CPU", "client CPU",
    "MB",
)
# fmt: on
RAY = """
import sys, time
import ray
from ray import serve
from simulmt.serve.app import ray_app

model, port, replicas = sys.argv[1:]
ray.init(num_cpus=int(replicas), include_dashboard=False, log_to_driver=False)
serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
sizes = {"min_replicas": replicas, "max_replicas": replicas, "streams_per_replica": "1000"}
serve.run(ray_app({"models": model, **sizes}))
time.sleep(1e9)
"""


@dataclass
class Stream:
    """Words sent and commits received by one client, with times."""

    sent: list[float] = field(default_factory=list)  # time of each word
    commits: list[tuple[Commit, float]] = field(default_factory=list)  # with arrival times
    failures: int = 0

    def keep(self, begin: float, end: float) -> None:
        """Drop commits that arrived before or after this interval."""
        self.commits = [(commit, arrived) for commit, arrived in self.commits if begin <= arrived < end]

    def waits(self) -> list[float]:
        return [commit.lag_ms.queue + commit.lag_ms.compute for commit, _ in self.commits]

    def answers(self) -> list[float]:
        """Return the milliseconds from the last word that each commit depends on to its arrival."""
        return [1000 * (arrived - self.sent[commit.source_words - 1]) for commit, arrived in self.commits]


async def speak(
    url: str, model: str, words: Sequence[str], stream: Stream, until: float, room: str | None = None
) -> None:
    """Send words at the pace of speech, starting at a random time."""
    try:
        await _speak(url, model, words, stream, until, room)
    except (RefusedError, OSError) as error:
        print(f"a stream failed: {error}", file=sys.stderr)
        stream.failures += 1
    numbers = [commit.seq for commit, _ in stream.commits]
    stream.failures += numbers != list(range(1, len(numbers) + 1))


async def _speak(url: str, model: str, words: Sequence[str], stream: Stream, until: float, room: str | None) -> None:
    async with LiveTranslation(url, model, room=room) as live:

        async def send() -> None:
            begin = time.perf_counter() + random.random() / PACE
            for number, word in enumerate(words):
                await asyncio.sleep(begin + number / PACE - time.perf_counter())
                if time.perf_counter() > until:
                    break
                live.source(f"{word} ")
                stream.sent.append(time.perf_counter())
            live.finish()

        sender = asyncio.create_task(send())
        async for message in live:
            if isinstance(message, Commit):
                stream.commits.append((message, time.perf_counter()))
        await sender


async def paste(url: str, model: str, words: Sequence[str], until: float) -> None:
    """Send thousands of words at once, repeatedly."""
    with suppress(TimeoutError):
        async with asyncio.timeout(until - time.perf_counter()):
            while True:
                async with LiveTranslation(url, model) as live:
                    for start in range(0, PASTED_WORDS, 1000):
                        live.source(" ".join(random.choices(words, k=1000)) + f" {start} ")
                    live.finish()
                    async for _ in live:
                        pass


def warm_up(seconds: float) -> float:
    """Return the seconds to wait before measuring."""
    return min(4.0, seconds)


async def run_streams(
    url: str, model: str, words: Sequence[str], count: int, seconds: float, pasting: bool
) -> list[Stream]:
    """Run streams concurrently, and return them."""
    until = time.perf_counter() + warm_up(seconds) + seconds
    streams = [Stream() for _ in range(count)]
    tasks = []
    for stream in streams:
        start = random.randrange(len(words))
        tasks.append(speak(url, model, [*words[start:], *words[:start]] * 10, stream, until))
    if pasting:
        tasks.append(paste(url, model, words, until))
    await asyncio.gather(*tasks)
    return streams


async def view(url: str, arrivals: dict[int, float], until: float) -> None:
    """View a room, recording when each commit arrives."""
    with suppress(TimeoutError, ConnectionClosed):
        async with asyncio.timeout(until - time.perf_counter()), connect(url, compression=None) as connection:
            async for text in connection:
                message = parse_room(str(text))
                if isinstance(message, Commit):
                    arrivals[message.seq] = time.perf_counter()


async def measure_viewers(server: Server, model: str, words: Sequence[str], count: int, seconds: float) -> list[str]:
    """Measure one speaker with many viewers; return a row of the table."""
    stream, viewers = Stream(), [dict[int, float]() for _ in range(count)]
    until = time.perf_counter() + warm_up(seconds) + seconds + count / CONNECTS_PER_SECOND
    tasks = []
    for arrivals in viewers:
        tasks.append(asyncio.create_task(view(f"{server.room_url}/hall", arrivals, until + 2)))
        await asyncio.sleep(1 / CONNECTS_PER_SECOND)
    with server.measured() as usage:
        await speak(server.url, model, list(words) * 10, stream, until, room="hall")
        await asyncio.gather(*tasks)
    answers = stream.answers()
    delays = [
        1000 * (arrivals[commit.seq] - stream.sent[commit.source_words - 1])
        for arrivals in viewers
        for commit, _ in stream.commits
        if commit.seq in arrivals
    ]
    return [
        str(count),
        f"{len(delays) / usage.elapsed:.0f}",
        *(f"{percentile(answers, share):.0f}" for share in (50, 95)),
        *(f"{percentile(delays, share):.0f}" for share in (50, 95)),
        str(count * len(stream.commits) - len(delays)),
        str(usage.errors + stream.failures),
        f"{100 * usage.server:.0f} %",
        f"{100 * usage.client:.0f} %",
        f"{server.megabytes():.0f}",
    ]


@dataclass
class Usage:
    """Resources used during a measurement."""

    elapsed: float = 0.0
    server: float = 0.0  # cores
    client: float = 0.0
    errors: int = 0


class Server:
    """`simulmt serve`, or Ray Serve with a number of replicas, in other processes."""

    def __init__(self, model: str, workers: int, replicas: int = 0) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        arguments = ["--model", model, "--port", str(self._port), "--workers", str(workers)]
        for limit in ("streams", "streams_per_address", "connections", "connections_per_address", "viewers"):
            arguments += ["--limit", f"{limit}=5000"]
        serve = (
            ["-c", RAY, model, str(self._port), str(replicas)] if replicas else ["-m", "simulmt", "serve", *arguments]
        )
        self._is_cluster = replicas > 0
        self._process = subprocess.Popen([sys.executable, *serve])
        self.room_url = f"ws://127.0.0.1:{self._port}/v1/rooms"
        self.url = f"ws://127.0.0.1:{self._port}/v1/stream"

    def wait(self) -> None:
        while self._process.poll() is None:
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self._port}/ready", timeout=5):
                return
            time.sleep(0.1)
        raise SystemExit("the server exited before it was ready; its output is above")

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()

    @contextmanager
    def measured(self) -> Iterator[Usage]:
        """Measure the resources that server and client use during the block."""
        usage = Usage()
        begin, ours, theirs, errors = time.perf_counter(), time.process_time(), self._cpu_seconds(), self._errors()
        yield usage
        usage.elapsed = time.perf_counter() - begin
        usage.client = (time.process_time() - ours) / usage.elapsed
        usage.server = (self._cpu_seconds() - theirs) / usage.elapsed
        usage.errors = self._errors() - errors

    def megabytes(self) -> float:
        """Return the resident memory of all server processes; shared memory counts for each."""
        lines = [
            line for process in self._processes() for line in Path(f"/proc/{process}/status").read_text().splitlines()
        ]
        return sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1000

    def _cpu_seconds(self) -> float:
        ticks = 0
        for process in self._processes():
            fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def _processes(self) -> list[int]:
        """Return the ids of the server's processes, including those of Ray."""
        found = [self._process.pid]
        for process in found:  # grows while iterating
            for children in Path(f"/proc/{process}/task").glob("*/children"):
                found += map(int, children.read_text().split())
        return found

    def _errors(self) -> int:
        """Return the number of errors sent so far; 0 for a cluster, where each replica counts only its own."""
        if self._is_cluster:
            return 0
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics") as response:
            lines = response.read().decode().splitlines()
        return int(sum(float(line.split()[-1]) for line in lines if line.startswith("simulmt_errors_total")))


@contextmanager
def running(model: str, workers: int, replicas: int = 0) -> Iterator[Server]:
    server = Server(model, workers, replicas)
    try:
        server.wait()
        yield server
    finally:
        server.stop()


def measure_streams(
    server: Server, model: str, words: Sequence[str], count: int, seconds: float, pasting: bool
) -> list[str]:
    """Measure many streams; return a row of the table."""
    counted = time.perf_counter() + warm_up(seconds)
    with server.measured() as usage:
        streams = asyncio.run(run_streams(server.url, model, words, count, seconds, pasting))
    for stream in streams:
        stream.keep(counted, counted + seconds)
    lags = [commit.lag_ms for stream in streams for commit, _ in stream.commits]
    answers = [answer for stream in streams for answer in stream.answers()]
    both = [wait for stream in streams for wait in stream.waits()]
    each = [percentile(stream.waits(), 95) for stream in streams]
    words_sent = sum(counted <= moment < counted + seconds for stream in streams for moment in stream.sent)
    return [
        f"{count}{' + paste' * pasting}",
        f"{words_sent / seconds:.0f}",
        *(f"{percentile(both, share):.0f}" for share in (50, 95, 99)),
        f"{percentile([lag.queue for lag in lags], 95):.0f}",
        f"{percentile([lag.compute for lag in lags], 95):.0f}",
        f"{percentile([lag.policy for lag in lags], 50):.0f}",
        f"{percentile(answers, 50):.0f}",
        f"{percentile(answers, 95):.0f}",
        f"{min(each):.0f}-{max(each):.0f}",
        str(usage.errors + sum(stream.failures for stream in streams)),
        f"{100 * usage.server:.0f} %",
        f"{100 * usage.client:.0f} %",
        f"{server.megabytes():.0f}",
    ]


def percentile(values: Sequence[float], share: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[share - 1] if len(values) > 1 else float("nan")


def print_row(cells: Sequence[str], columns: Sequence[str] = COLUMNS) -> None:
    widths = [max(11, len(name)) for name in columns]
    print("| " + " | ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)) + " |", flush=True)


def build_bundle(directory: Path) -> tuple[str, list[str]]:
    """Write a bundle of base size with random weights; return its path, and words to translate."""
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
    """Write a vocabulary of made-up words; return sample words of one or two pieces."""
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
    """Return sample words in the source language of a model."""
    from simulmt.runtime.bundle import Bundle, find
    from simulmt.runtime.demo import sentences_for

    return [word for sentence in sentences_for(Bundle(find(model)).config, None) for word in split_words(sentence)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--streams", type=int, nargs="+", default=[100, 300, 600])
    parser.add_argument("--viewers", type=int, nargs="+", help="measure viewers of one room instead of streams")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--ray", type=int, default=0, metavar="REPLICAS", help="measure Ray Serve")
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
        with running(model, arguments.workers, arguments.ray) as server:
            if arguments.viewers:
                print_row(VIEWER_COLUMNS, VIEWER_COLUMNS)
                for count in arguments.viewers:
                    cells = asyncio.run(measure_viewers(server, Path(model).name, words, count, arguments.seconds))
                    print_row(cells, VIEWER_COLUMNS)
                return
            print_row(COLUMNS)
            for count in arguments.streams:
                for pasting in (False, True)[: 1 + arguments.paste]:
                    print_row(measure_streams(server, Path(model).name, words, count, arguments.seconds, pasting))


if __name__ == "__main__":
    main()
