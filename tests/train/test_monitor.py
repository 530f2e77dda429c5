from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from simulmt.errors import SimulmtError
from simulmt.model.asn import SortingStatistics
from simulmt.model.seq2seq import Seq2SeqConfig, Seq2SeqModel
from simulmt.train.batches import BatchPlan
from simulmt.train.monitor import Monitor, UpdateReport, memory_gib
from simulmt.train.run import RunProgress

from .helpers import run, tiny


def report(update: int) -> UpdateReport:
    return UpdateReport(
        update=update,
        loss=300.0,
        likelihood=200.0,
        tokens=100.0,
        gradient_norm=1.5,
        learning_rate=0.25,
        source_tokens=80.0,
        data_seconds=0.0,
    )


def start(monitor: Monitor, update: int = 0, metric: str = "BLEU") -> None:
    lengths = torch.tensor([4, 4, 5, 9]).numpy()
    monitor.start(update, 1000, torch.nn.Linear(1000, 2000), BatchPlan(lengths, lengths, 12, seed=1), metric)


def tell_all(monitor: Monitor) -> None:
    """Report a short run, from start to end."""
    start(monitor)
    with monitor:
        for update in range(1, 7):
            monitor.update(report(update), RunProgress(skipped_updates=2, skipped_sentences=7))
        monitor.validation(6, {"1": 12.345, "3": 20.0}, best=20.0)
        monitor.sorting(6, SortingStatistics(diagonal=0.98765, displacement=1.25))
        monitor.warn("something odd")
        monitor.update(report(7), RunProgress())
    monitor.finish(7, 21.5, Path("run/final"), Path("data/my text"))


def curves(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the scalars in the TensorBoard files of a run, by tag."""
    from tensorboard.backend.event_processing.event_file_loader import (  # type: ignore[import-untyped]
        EventFileLoader,
    )

    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted((directory / "tensorboard").iterdir()):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.tensor.float_val[0]))
    return found


def test_without_a_terminal_there_are_plain_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tell_all(Monitor(tmp_path, log_every=3))
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert captured.out == ""
    assert "\x1b" not in captured.err
    assert "\r" not in captured.err
    # 2002000 parameters; batches [4 4] [5] [9] or the like of 12 tokens
    assert lines[0].startswith(
        "2.0M parameters; 3 batches per epoch, 0.0% of their source positions are padding; starting"
    )
    assert [line.split()[1] for line in lines[1:3]] == ["3/1000", "6/1000"]
    assert all(part in lines[1] for part in ("loss 3.000", "norm 1.50", "tok/s", "data", "GiB", "min left"))
    assert "2 updates skipped" in lines[1]
    assert "7 sentences skipped, target too long for the source" in lines[1]
    assert lines[3] == "update 6  dev BLEU k=1 12.35  k=3 20.00  (best 20.00)"
    assert lines[4] == "update 6  Z: 0.9877 on the diagonal, mean displacement 1.250 tokens"
    assert lines[5] == "warning: something odd"
    assert lines[6] == "finished after update 7: dev BLEU 21.50; the model is in run/final"
    assert lines[7].startswith("next: simulmt export run/final --data 'data/my text' --output BUNDLE ")
    assert lines[8] == "then: simulmt translate --model ./BUNDLE"
    assert len(lines) == 9


def test_scores_have_the_name_of_their_metric(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monitor = Monitor(tmp_path, log_every=1)
    start(monitor, metric="R2")
    with monitor:
        monitor.validation(6, {"None": 54.321}, best=60.0)
        monitor.update(report(7), RunProgress())
    monitor.finish(7, 61.5, Path("run/final"), Path("data"))
    _, validated, updated, finished, *_ = capsys.readouterr().err.splitlines()
    assert validated == "update 6  dev R2 54.32  (best 60.00)"
    assert "best R2 60.00" in updated
    assert finished == "finished after update 7: dev R2 61.50; the model is in run/final"
    assert [tag for tag in curves(tmp_path) if tag.startswith("dev/")] == ["dev/R2"]


def test_a_resumed_run_reports_its_update(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monitor = Monitor(tmp_path)
    start(monitor, update=500)
    monitor.stopped(503)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("resuming after update 500")
    assert lines[1] == "stopped after update 503; run the same command to resume"


def test_a_quiet_monitor_neither_prints_nor_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tell_all(Monitor(tmp_path, quiet=True, log_every=1))
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("message", ["[/tmp/run] damaged", "run[red]s", "a [/] b", "disk :warning: full", "a\\[b]"])
def test_messages_are_shown_as_they_are(message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monitor = Monitor(tmp_path)
    monitor.warn(message)
    monitor.finish(1, 2.0, Path(message), Path("data"))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"warning: {message}"
    assert message in lines[1]


@pytest.mark.parametrize("message", ["[/tmp/run] damaged", "run[red]s", "disk :warning: full"])
def test_messages_are_shown_as_they_are_on_a_terminal(message: str, tmp_path: Path) -> None:
    monitor, screen = Monitor(tmp_path, quiet=False), io.StringIO()
    monitor._console = Console(file=screen, force_terminal=True, width=200)
    monitor.warn(message)
    assert f"warning: {message}" in screen.getvalue()


def test_on_a_terminal_there_is_a_live_display(tmp_path: Path) -> None:
    monitor, screen = Monitor(tmp_path, log_every=1), io.StringIO()
    monitor._console = Console(file=screen, force_terminal=True, width=200)
    tell_all(monitor)
    shown = screen.getvalue()
    assert "\x1b[?25l" in shown  # the cursor is hidden during the live display
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # and is shown again
    assert "7/1000" in shown
    assert "best BLEU 20.00" in shown
    assert "update 7/1000" not in shown  # no lines beside the display


def test_commands_to_copy_stay_on_one_line_of_a_terminal(tmp_path: Path) -> None:
    monitor, screen = Monitor(tmp_path), io.StringIO()
    monitor._console = Console(file=screen, force_terminal=True, width=40)
    monitor.finish(1, 2.0, Path("run/final"), Path("data"))
    languages = "--source-language XX --target-language YY"
    assert f"next: simulmt export run/final --data data --output BUNDLE {languages}\n" in screen.getvalue()


def test_the_next_command_names_the_thresholds_of_a_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monitor = Monitor(tmp_path)
    model = Seq2SeqModel.build(Seq2SeqConfig(9, 9, True, 8, 8, 2, 1, 1, policy_inner=4))
    lengths = torch.tensor([4, 5]).numpy()
    monitor.start(0, 1, model, BatchPlan(lengths, lengths, 12, seed=1), "R2")
    monitor.finish(1, 50.0, Path("run/final"), Path("data"))
    shown = capsys.readouterr().err
    assert "--target-language YY --stability 0.8 ...\n" in shown
    assert "dev R2 50.00" in shown


def test_a_failed_run_restores_the_terminal(tmp_path: Path) -> None:
    monitor, screen = Monitor(tmp_path), io.StringIO()
    monitor._console = Console(file=screen, force_terminal=True, width=200)
    start(monitor)
    with pytest.raises(KeyboardInterrupt), monitor:
        raise KeyboardInterrupt
    assert screen.getvalue().endswith("\x1b[?25h")


def test_the_curves_of_a_run_are_in_its_tensorboard_files(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tiny(data, delays=(1, 3), max_updates=10), tmp_path, Monitor(tmp_path, log_every=2))
    assert "update 10/10" in capsys.readouterr().err
    found = curves(tmp_path)
    train = {"loss", "likelihood", "gradient_norm", "learning_rate", "skipped_sentences", "skipped_updates"}
    speed = {"source_tokens_per_second", "data_share", "seconds_per_update", "memory_gib"}
    assert found.keys() == {f"train/{tag}" for tag in train | speed} | {"dev/BLEU-k1", "dev/BLEU-k3"}
    assert [step for step, _ in found["train/loss"]] == [2, 4, 6, 8, 10]
    assert [step for step, _ in found["dev/BLEU-k3"]] == [5, 10]
    assert [rate for _, rate in found["train/learning_rate"][:2]] == pytest.approx([2.5e-3, 5e-3])
    assert all(0 < share < 1 for _, share in found["train/data_share"])


def test_the_curves_of_a_stopped_run_are_on_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monitor = Monitor(tmp_path, log_every=1)
    start(monitor)
    with monitor:
        monitor.update(report(1), RunProgress())
        monitor.sorting(1, SortingStatistics(diagonal=0.5, displacement=1.25))
        monitor.stopped(1)
    assert capsys.readouterr().err
    found = curves(tmp_path)
    assert found["train/loss"] == [(1, 3.0)]
    assert (found["sorting/diagonal"], found["sorting/displacement"]) == ([(1, 0.5)], [(1, 1.25)])


def test_the_speed_is_that_of_the_recent_updates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 10.5, 12.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    monitor = Monitor(tmp_path, quiet=True)
    monitor.update(report(1), RunProgress())
    assert monitor.speed() == {}
    monitor.update(report(2), RunProgress())
    monitor.update(report(3), RunProgress())
    assert monitor.speed() == {"source_tokens_per_second": 80.0, "data_share": 0.0, "seconds_per_update": 1.0}
    monitor.validation(3, {"1": 2.0}, 2.0)
    assert monitor.speed() == {}  # the time of a validation is not training time


def test_memory_is_a_plausible_figure() -> None:
    assert 0.01 < memory_gib() < 1000 or torch.cuda.is_available()


def test_missing_weights_and_biases_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SimulmtError, match=r"^--wandb needs .*: pip install wandb$"):
        Monitor(tmp_path, wandb_project="project")


def test_a_full_disk_stops_the_curves_but_not_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Full:
        def add_scalar(self, *_: object) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            raise OSError(28, "No space left on device")

    for at_once in (True, False):
        monitor = Monitor(tmp_path, log_every=1 if at_once else 1000)
        monitor._curves = [Full()]
        start(monitor)
        with monitor:
            monitor.update(report(1), RunProgress())
            monitor.update(report(2), RunProgress())
        assert capsys.readouterr().err.count("no longer logging curves: [Errno 28] No space left on device") == 1
