"""Several servers: behind nginx, with the shipped configuration, and on Ray."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from simulmt.runtime.stream import Translator
from simulmt.serve.client import LiveTranslation
from simulmt.serve.protocol import Commit

from .helpers import Served, eventually, free_port, get, synthetic_text

CONFIGURATION = Path(__file__).parents[2] / "deploy" / "nginx.conf"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
TEXT = synthetic_text(sentences=8, seed=51)
Serve = Callable[..., Served]


@pytest.fixture
def servers(serve: Serve) -> list[Served]:
    return [serve(drain_seconds=1), serve(drain_seconds=1)]


@pytest.fixture
def proxy(servers: list[Served], tmp_path: Path) -> Iterator[int]:
    """Run nginx in front of two servers; yield its port."""
    if NGINX is None:
        pytest.skip("nginx is not installed")
    port = free_port()
    text = CONFIGURATION.read_text(encoding="utf-8")
    for before, after in (("8001", servers[0].port), ("8002", servers[1].port), ("listen 8000", f"listen {port}")):
        assert before in text
        text = text.replace(before, str(after))
    file = tmp_path / "nginx.conf"
    file.write_text(text, encoding="utf-8")
    command = [NGINX, "-p", str(tmp_path), "-c", str(file), "-g", "daemon off;"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            eventually(lambda: _answers(f"http://127.0.0.1:{port}/ready"))
            yield port
        finally:
            process.terminate()


def _answers(url: str) -> bool:
    try:
        return get(url).status_code == 200
    except httpx.TransportError:
        return False


def test_a_stream_survives_the_loss_of_its_server(proxy: int, servers: list[Served], translator: Translator) -> None:
    async def run() -> tuple[str, int]:
        words, hosts = TEXT.split(), set[int]()
        async with LiveTranslation(f"ws://127.0.0.1:{proxy}/v1/stream", "toy", 3) as live:

            async def talk() -> None:
                for number, word in enumerate(words):
                    live.source(f"{word} ")
                    await asyncio.sleep(0.01)
                    if number == len(words) // 2:
                        while not any(server.sessions._attached() for server in servers):
                            await asyncio.sleep(0.01)
                        (host,) = [index for index, server in enumerate(servers) if server.sessions._attached()]
                        hosts.add(host)
                        await asyncio.to_thread(servers[host].stop)
                live.finish()

            speaker = asyncio.create_task(talk())
            text = "".join([message.text async for message in live if isinstance(message, Commit)])
            await speaker
        return text, hosts.pop()

    text, lost = asyncio.run(run())
    assert text == translator.translate(TEXT, 3)
    assert not servers[lost].thread.is_alive()


def test_a_client_comes_back_to_the_same_server(proxy: int, servers: list[Served]) -> None:
    front = Served(servers[0].server, proxy, servers[0].thread)
    with front.talk(origin=front.http) as talk:
        session = talk.start()["session"]
    for _ in range(5):
        with front.talk() as talk:
            assert talk.send("resume", session=session, seq=0).receive()["type"] == "ready"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Ray and what it imports
def test_a_cluster_serves_the_same_protocol(translator: Translator) -> None:
    ray = pytest.importorskip("ray")
    from ray import serve

    from simulmt.serve.app import ray_app

    port = free_port()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(ray_app({"models": "toy", "min_replicas": "1", "max_replicas": "1"}))
        url = f"127.0.0.1:{port}"
        eventually(lambda: _answers(f"http://{url}/ready"))

        async def run() -> str:
            async with LiveTranslation(f"ws://{url}/v1/stream", "toy", 3) as live:
                live.source(TEXT)
                live.finish()
                return "".join([message.text async for message in live if isinstance(message, Commit)])

        assert asyncio.run(run()) == translator.translate(TEXT, 3)
        models = get(f"http://{url}/v1/models").json()["models"]
        assert [model["name"] for model in models] == ["toy"]
    finally:
        serve.shutdown()  # type: ignore[no-untyped-call, unused-ignore]
        ray.shutdown()
