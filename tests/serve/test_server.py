"""The server as a process: shutdown, fairness between clients, start-up."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from simulmt.cli import app
from simulmt.errors import BundleError, ConfigError
from simulmt.runtime.bundle import SHIPPED
from simulmt.runtime.stream import Translator
from simulmt.serve.access import Limits
from simulmt.serve.models import Metrics, load_models
from simulmt.serve.server import listen

from .helpers import PATIENCE, Served, eventually, free_port, get, post, synthetic_text, text_of

TEXT = synthetic_text(sentences=4, seed=41)
Serve = Callable[..., Served]


def test_draining_translates_received_text_and_refuses_more(serve: Serve, translator: Translator) -> None:
    served = serve(drain_seconds=PATIENCE)
    with served.talk() as open_stream, served.talk() as finishing, served.talk() as newcomer:
        session = open_stream.start()["session"]
        open_stream.send("source", text=TEXT)
        finishing.start()
        finishing.send("source", text=10 * f"{TEXT} ").send("finish")
        assert newcomer.socket.ping().wait(PATIENCE)
        eventually(lambda: served.sessions._sessions[session].received == 1)
        served.server.stop()
        eventually(lambda: bool(served.sessions.is_draining))
        assert newcomer.send("start", model="toy").receive_error() == ("draining", 1012)
        expected = translator.translate(10 * f"{TEXT} ", translator.config.default_delay)
        assert text_of(finishing_messages := finishing.receive_all()) == expected
        assert finishing_messages[-1] == {"type": "done"}
        messages = open_stream.receive_all()
    assert (messages[-1]["type"], messages[-1]["code"]) == ("error", "draining")
    assert open_stream.socket.close_code == 1012
    stream = translator.stream(3)
    assert text_of(messages) == "".join(commit.text for commit in stream.push(TEXT))
    served.thread.join(PATIENCE)
    assert not served.thread.is_alive()


def test_while_draining_the_server_is_alive_but_not_ready(serve: Serve) -> None:
    served = serve(drain_seconds=20, unsent_messages=1)
    with httpx.Client(base_url=served.http, timeout=PATIENCE) as client, served.talk() as talk:
        talk.start()
        assert client.get("/ready").status_code == 200
        served.sessions.is_draining = True
        assert (client.get("/health").status_code, client.get("/ready").status_code) == (200, 503)
        body = {"q": "kyo", "source": "synthetic", "target": "synthetic"}
        assert client.post("/translate", json=body).status_code == 503


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_ends_soon_after_a_signal_whatever_its_clients_do(number: signal.Signals, tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "simulmt", "serve", "--model", "toy", "--port", str(port), "--threads", "1"]
    log = tmp_path / "log.txt"
    with log.open("w") as file, subprocess.Popen([*command, "--limit", "drain_seconds=0.5"], stderr=file) as process:
        eventually(lambda: f"127.0.0.1:{port}" in log.read_text())
        served = Served(None, port, threading.current_thread())  # type: ignore[arg-type]
        eventually(lambda: _is_ready(served))
        with served.talk() as talk:
            talk.start()
            process.send_signal(number)
            assert talk.receive_error() == ("draining", 1012)
        assert process.wait(timeout=PATIENCE) == 0
    assert "Traceback" not in log.read_text()


def _is_ready(served: Served) -> bool:
    try:
        return get(f"{served.http}/ready").status_code == 200
    except httpx.TransportError:
        return False


def test_a_long_text_does_not_delay_other_streams(serve: Serve) -> None:
    served = serve()
    with served.talk() as glutton, served.talk() as talk:
        session = served.sessions._sessions[glutton.start()["session"]]
        talk.start(delay=1)
        for _ in range(50):
            glutton.send("source", text=f"{' '.join([TEXT] * 15)} ")
        glutton.send("finish")
        eventually(lambda: session.is_busy)
        for word in TEXT.split():
            talk.send("source", text=f"{word} ")
        talk.send("finish")
        assert talk.receive_all()[-1] == {"type": "done"}
        assert session.is_busy  # it came first and had far more to do, and still has


def test_a_failing_model_ends_its_streams_with_an_error_and_no_text_in_the_log(
    serve: Serve, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve()
    model = served.server.config.app.state.service.models["toy"]  # type: ignore[union-attr]

    def fail(_: object) -> None:
        raise RuntimeError(f"cannot translate {TEXT}")

    monkeypatch.setattr(model.translator, "step", fail)
    with served.talk() as talk:
        session = talk.start()["session"]
        talk.send("source", text=TEXT)
        assert talk.receive_error() == ("internal", 1011)
    body = {"q": TEXT, "source": "synthetic", "target": "synthetic"}
    assert post(f"{served.http}/translate", json=body).status_code == 500
    assert "RuntimeError" in caplog.text
    assert TEXT[:20] not in caplog.text
    monkeypatch.undo()
    with served.talk() as talk:
        assert talk.send("resume", session=session, seq=0).receive()["code"] == "unknown_session"
        talk.start()
        talk.send("source", text=TEXT).send("finish")
        assert talk.receive_all()[-1] == {"type": "done"}


def test_two_models_need_two_names() -> None:
    with pytest.raises(BundleError, match="duplicate model name toy"):
        load_models(["toy", str(SHIPPED / "toy")], Metrics(), threads=1, inline=False)


def test_a_port_in_use_is_reported() -> None:
    with listen("127.0.0.1", 0, Limits())[0] as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=f"^port {port} of 127.0.0.1 is already in use; choose another with --port$"
        ):
            listen("127.0.0.1", port, Limits())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--limit", "streems=5"], "did you mean 'streams'"),
        (["--limit", "streams"], "NAME=NUMBER"),
        (["--limit", "streams=0"], "above 0"),
        (["--api-keys-file", "nowhere.txt"], "nowhere.txt"),
        (["--model", "toy", "--origin", "example.org"], "--origin example.org: expected scheme and host"),
        (["--model", "toy", "--origin", "https://example.org/page"], "--origin"),
        (["--model", "toy", "--origin", "https://example.org:x"], "--origin"),
        (["--model", "nowhere"], "nowhere"),
    ],
)
def test_each_wrong_setting_has_its_own_message(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code != 0
    assert message in str(result.exception)
