"""Two processes compute what one does, and restart when one of them dies."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
import traceback
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from simulmt.data.store import Dataset
from simulmt.errors import ConfigError
from simulmt.train.analysis import translate_store
from simulmt.train.batches import DeviceStore
from simulmt.train.loop import system_config, train
from simulmt.train.monitor import UpdateReport
from simulmt.train.run import CheckpointFolder, RunProgress, World, init_distributed
from simulmt.train.systems import RunConfig, System, build_model, load_model, translator_of

from .helpers import Recorder, fork, outcome_of, run, snapshot, tiny


class Slow(Recorder):
    def update(self, report: UpdateReport, totals: RunProgress) -> None:
        super().update(report, totals)
        time.sleep(0.02)


def be_one_of_two(rank: int, port: int, config: RunConfig, directory: Path, slowly: bool = False) -> None:
    """Join the other process, train, translate a share of a store, and save the results."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    recorder = Slow() if slowly else Recorder()
    try:
        with init_distributed("cpu") as world:
            assert world == World(rank, 2, torch.device("cpu"))
            assert world.is_first == (rank == 0)
            outcome = train(config, directory, world, recorder)
            translations = world.merge(translate_shard(config, world))
    except Exception:
        traceback.print_exc()
        os._exit(1)  # PyTorch may wait forever when it destroys a group whose other process was killed
    report = {
        "losses": recorder.losses,
        "tokens": [report.tokens for report in recorder.reports],
        "scores": recorder.scores,
        "status": outcome.status,
        "translations": translations,
    }
    (directory / f"rank-{rank}.json").write_text(json.dumps(report))


def translate_shard(config: RunConfig, world: World) -> dict[int, list[int]]:
    """Translate this process's share of the development set, in several small batches."""
    dataset = Dataset.open(config.data)
    torch.manual_seed(4)
    model = translator_of(build_model(system_config(config, dataset)))
    store = DeviceStore(dataset.dev, world.device)
    return translate_store(model, store, 2, batch_tokens=150, shard=(world.rank, world.size))


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return int(server.getsockname()[1])


def start_two(config: RunConfig, directory: Path, slowly: bool = False) -> list[BaseProcess]:
    directory.mkdir(exist_ok=True)
    port = free_port()
    return [fork(be_one_of_two, rank, port, config, directory, slowly) for rank in range(2)]


def run_two(config: RunConfig, directory: Path) -> None:
    children = start_two(config, directory)
    assert exit_codes(children) == [0, 0]


def exit_codes(children: list[BaseProcess]) -> list[int | None]:
    """Return the exit codes of processes; kill those that hang."""
    for child in children:
        child.join(60)
    hanging = [child for child in children if child.is_alive()]
    for child in hanging:
        child.kill()
        child.join()
    return [None if child in hanging else child.exitcode for child in children]


@pytest.mark.parametrize("system", ["ctc+asn", "wait-k"])
def test_two_processes_do_the_arithmetic_of_one(system: System, data: Path, tmp_path: Path) -> None:
    config = tiny(data, system, delays=(1, 3), max_updates=8, validate_every=4, update_tokens=1024)
    run_two(config, tmp_path / "two")
    recorder = Recorder()
    run(config, tmp_path / "one", recorder)

    first, second = (json.loads((tmp_path / "two" / f"rank-{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first["tokens"] == [report.tokens for report in recorder.reports]
    assert first["losses"] == pytest.approx(recorder.losses, rel=1e-5)
    assert first["scores"] == {str(update): pytest.approx(scores) for update, scores in recorder.scores.items()}
    assert any(score for scores in recorder.scores.values() for score in scores.values())
    one, two = (snapshot(load_model(tmp_path / name)[0]) for name in ("one", "two"))
    for name in one:
        if "key_value.bias" not in name:  # attention does not depend on the keys' bias: its gradient is rounding
            torch.testing.assert_close(two[name], one[name], rtol=1e-3, atol=1e-4)
    # Only the first process writes.
    assert outcome_of(tmp_path / "one").keys() == {name for name in outcome_of(tmp_path / "two") if "rank" not in name}


def test_two_processes_translate_what_one_does(data: Path, tmp_path: Path) -> None:
    config = tiny(data, max_updates=1)
    run_two(config, tmp_path)
    whole = translate_shard(config, World(0, 1, torch.device("cpu")))
    assert len(whole) == 20
    for rank in range(2):
        merged = json.loads((tmp_path / f"rank-{rank}.json").read_text())["translations"]
        assert {int(row): ids for row, ids in merged.items()} == whole


def wait_for_checkpoint(directory: Path, update: int) -> None:
    while max(CheckpointFolder(directory / "checkpoints").updates(), default=0) < update:
        time.sleep(0.005)


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the files of a run of two processes."""
    directory = tmp_path_factory.mktemp("undisturbed")
    run_two(tiny(data, max_updates=12, validate_every=3), directory)
    return {name: content for name, content in outcome_of(directory).items() if "rank" not in name}


def test_when_one_process_is_killed_both_start_again_and_end_the_same(
    data: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    config = tiny(data, max_updates=12, validate_every=3)
    children = start_two(config, tmp_path / "disturbed", slowly=True)
    wait_for_checkpoint(tmp_path / "disturbed", 3)
    children[1].kill()
    assert exit_codes(children) == [1, -signal.SIGKILL]  # the first cannot continue alone, and fails
    assert not (tmp_path / "disturbed" / "final").exists()
    run_two(config, tmp_path / "disturbed")
    disturbed = outcome_of(tmp_path / "disturbed")
    assert len(undisturbed) >= 6
    assert {name: disturbed.get(name) for name in undisturbed} == undisturbed


def test_a_signal_to_one_process_stops_both(data: Path, tmp_path: Path) -> None:
    config = tiny(data, max_updates=200, validate_every=3)
    children = start_two(config, tmp_path, slowly=True)
    wait_for_checkpoint(tmp_path, 3)
    os.kill(children[1].pid or 0, signal.SIGTERM)
    assert exit_codes(children) == [0, 0]
    reports = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert [report["status"] for report in reports] == ["stopped", "stopped"]
    newest = CheckpointFolder(tmp_path / "checkpoints").updates()[-1]
    assert newest == len(reports[0]["losses"]) == len(reports[1]["losses"])


class Fragile(Recorder):
    """A monitor of a worker under torchrun: rank 1 dies in its first attempt."""

    def update(self, report: UpdateReport, totals: RunProgress) -> None:
        super().update(report, totals)
        first_attempt = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if first_attempt and os.environ["RANK"] == "1" and report.update == 7:
            os.kill(os.getpid(), signal.SIGKILL)


def be_restarted(config: RunConfig, directory: Path) -> int:
    """Train, and return where this attempt started."""
    torch.set_num_threads(1)
    with init_distributed("cpu") as world:
        recorder = Fragile()
        train(config, directory, world, recorder)
        return recorder.started_at


@pytest.fixture
def restored_handlers() -> Iterator[None]:
    """Restore the signal handlers that the launcher replaces."""
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    yield
    for number, handler in handlers.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.mark.usefixtures("restored_handlers")
def test_torchrun_restarts_and_the_run_goes_on(data: Path, undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    """With the launcher that the command calls, whose workers start faster here."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch  # slow, and no worker needs it

    torchrun = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        max_restarts=1,
        monitor_interval=0.1,
        start_method="forkserver",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
    )
    config = tiny(data, max_updates=12, validate_every=3)
    assert elastic_launch(torchrun, be_restarted)(config, tmp_path / "run") == {0: 6, 1: 6}
    restarted = outcome_of(tmp_path / "run")
    assert {name: restarted.get(name) for name in undisturbed} == undisturbed


def test_a_world_of_one_process() -> None:
    with init_distributed("cpu") as world:
        assert world == World(0, 1, torch.device("cpu"))
        assert world.sum(torch.tensor([3.0])).tolist() == [3.0]
        assert world.merge({1: "a"}) == {1: "a"}
        module = torch.nn.Linear(1, 1)
        assert world.distribute(module) is module
        world.wait()


@pytest.mark.parametrize("device", ["tpu", "mps", "xpu", "meta", "cpu:x", "cpu:0", "", "cuda:", "cuda:x", "cuda:-1"])
def test_an_unknown_device_is_an_error(device: str) -> None:
    expected = f"^--device {device}: expected auto, cpu, cuda or cuda:N$"
    with pytest.raises(ConfigError, match=expected), init_distributed(device):
        pass


def test_gpus_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two GPUs, each process gets one, and there is no third."""
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    for name, rank in (("cuda:1", 0), ("cuda", 0), ("auto", 1)):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        with init_distributed(name) as world:
            assert world.device == torch.device("cuda", taken[-1])
    assert taken == [1, 0, 1]
    monkeypatch.setenv("LOCAL_RANK", "2")
    for name, found in (("cuda", "cuda:2"), ("cuda:2", "cuda:2"), ("cuda:256", "cuda:256")):
        message = f"^--device {found}: no such GPU; the last one is cuda:1$"
        with pytest.raises(ConfigError, match=message), init_distributed(name):
            pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_cuda_without_a_gpu_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no CUDA device"), init_distributed("cuda"):
        pass
