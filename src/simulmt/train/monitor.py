"""Report training progress: live display on a terminal, plain lines elsewhere, TensorBoard files."""

from __future__ import annotations

import resource
import shlex
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from simulmt.errors import SimulmtError
from simulmt.model.asn import SortingStatistics
from simulmt.train.batches import BatchPlan
from simulmt.train.run import RunProgress

WINDOW = 100  # updates that the displayed speed is averaged over


@dataclass(frozen=True)
class UpdateReport:
    """Sums of one update over all processes."""

    update: int
    loss: float
    likelihood: float
    tokens: float
    gradient_norm: float
    learning_rate: float
    source_tokens: float
    data_seconds: float


class Scalars(Protocol):
    """Protocol of TensorBoard's writer."""

    def add_scalar(self, tag: str, value: float, step: int) -> Any: ...

    def close(self) -> None: ...


class Monitor:
    """Reports a run; `quiet` in all processes but the first. A context manager that restores the terminal."""

    def __init__(
        self, directory: Path, quiet: bool = False, wandb_project: str | None = None, log_every: int = 100
    ) -> None:
        self._quiet = quiet
        self._log_every = log_every
        self._console = Console(stderr=True)
        self._curves: list[Scalars] = []
        if not quiet:
            from torch.utils.tensorboard import SummaryWriter  # takes a second to import

            self._curves.append(SummaryWriter(str(directory / "tensorboard")))
        if wandb_project and not quiet:
            self._curves.append(_WeightsAndBiases(wandb_project, directory.name))
        self._recent: deque[tuple[float, UpdateReport]] = deque(maxlen=WINDOW)
        self._best, self._metric = 0.0, "BLEU"
        self._export_options = ""
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()
            self._bar = None
        try:
            for curve in self._curves:
                curve.close()
        except OSError as error:
            self._disable_curves(error)

    def start(self, update: int, max_updates: int, model: nn.Module, plan: BatchPlan, metric: str = "BLEU") -> None:
        """Report the size of the run; `metric` names the score of the development set."""
        parameters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        self._print(
            f"{parameters / 1e6:.1f}M parameters; {plan.batches_per_epoch} batches per epoch, "
            f"{plan.padding_share():.1%} of their source positions are padding; "
            + (f"resuming after update {update}" if update else "starting")
        )
        self._max_updates, self._metric = max_updates, metric
        self._export_options = " --stability 0.8 ..." if getattr(model, "policy", None) is not None else ""
        if self._console.is_terminal and not self._quiet:
            columns = (TextColumn("update"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, TextColumn("{task.fields[status]}", markup=False), console=self._console)
            self._bar.start()
            self._task = self._bar.add_task("train", total=max_updates, completed=update, status="")

    def update(self, report: UpdateReport, totals: RunProgress) -> None:
        self._recent.append((time.perf_counter(), report))
        if self._quiet:
            return
        if self._bar:
            self._bar.update(self._task, completed=report.update, status=self._status(report, totals))
        if report.update % self._log_every == 0:
            if not self._bar:
                seconds = self.speed().get("seconds_per_update")
                left = f"  {seconds * (self._max_updates - report.update) / 60:.0f} min left at most" if seconds else ""
                self._print(f"update {report.update}/{self._max_updates}  {self._status(report, totals)}{left}")
            for tag, value in self._scalars(report, totals).items():
                self._record(f"train/{tag}", value, report.update)

    def validation(self, update: int, scores: dict[str, float], best: float) -> None:
        """Report scores on the development set, by delay."""
        self._best = best
        shown = "  ".join(f"{score:.2f}" if k == "None" else f"k={k} {score:.2f}" for k, score in scores.items())
        self._print(f"update {update}  dev {self._metric} {shown}  (best {best:.2f})")
        for k, score in scores.items():
            self._record(f"dev/{self._metric}" if k == "None" else f"dev/{self._metric}-k{k}", score, update)
        self._recent.clear()  # the time spent on validation is not training time

    def sorting(self, update: int, statistics: SortingStatistics) -> None:
        """Report how far the sorting network is from the identity on the development set."""
        self._print(
            f"update {update}  Z: {statistics.diagonal:.4f} on the diagonal, "
            f"mean displacement {statistics.displacement:.3f} tokens"
        )
        for name, value in statistics._asdict().items():
            self._record(f"sorting/{name}", value, update)

    def warn(self, message: str) -> None:
        self._print(f"warning: {message}", style="yellow")

    def stopped(self, update: int) -> None:
        self._print(f"stopped after update {update}; run the same command to resume")

    def finish(self, update: int, score: float, model: Path, data: Path) -> None:
        self._print(f"finished after update {update}: dev {self._metric} {score:.2f}; the model is in {model}")
        files = shlex.join([str(model), "--data", str(data)])
        options = f"--source-language XX --target-language YY{self._export_options}"
        self._print(f"next: simulmt export {files} --output BUNDLE {options}")
        self._print("then: simulmt translate --model ./BUNDLE")

    def speed(self) -> dict[str, float]:
        """Return source tokens per second and the share of time spent waiting for batches, over recent updates."""
        if len(self._recent) < 2:
            return {}
        seconds = self._recent[-1][0] - self._recent[0][0]
        reports = [report for _, report in list(self._recent)[1:]]
        return {
            "source_tokens_per_second": sum(report.source_tokens for report in reports) / seconds,
            "data_share": sum(report.data_seconds for report in reports) / seconds,
            "seconds_per_update": seconds / len(reports),
        }

    def _scalars(self, report: UpdateReport, totals: RunProgress) -> dict[str, float]:
        return {
            "loss": report.loss / max(report.tokens, 1.0),
            "likelihood": report.likelihood / max(report.tokens, 1.0),
            "gradient_norm": report.gradient_norm,
            "learning_rate": report.learning_rate,
            "skipped_sentences": totals.skipped_sentences,
            "skipped_updates": totals.skipped_updates,
            "memory_gib": memory_gib(),
            **self.speed(),
        }

    def _status(self, report: UpdateReport, totals: RunProgress) -> str:
        speed = self.speed()
        parts = [f"loss {report.loss / max(report.tokens, 1.0):.3f}", f"norm {report.gradient_norm:.2f}"]
        if speed:
            parts.append(f"{speed['source_tokens_per_second'] / 1000:.1f}K tok/s")
            parts.append(f"data {speed['data_share']:.1%}")
        if self._best:
            parts.append(f"best {self._metric} {self._best:.2f}")
        if totals.skipped_updates:
            parts.append(f"{totals.skipped_updates} updates skipped")
        if totals.skipped_sentences:
            parts.append(f"{totals.skipped_sentences} sentences skipped, target too long for the source")
        return "  ".join([*parts, f"{memory_gib():.1f} GiB"])

    def _record(self, tag: str, value: float, update: int) -> None:
        try:
            for curve in self._curves:
                curve.add_scalar(tag, value, update)
        except OSError as error:
            self._disable_curves(error)

    def _disable_curves(self, error: OSError) -> None:
        """Stop writing curves; a full disk should not stop a run that can still write checkpoints."""
        self._curves = []
        self.warn(f"no longer logging curves: {error}")

    def _print(self, message: str, style: str | None = None) -> None:
        if self._quiet:
            return
        if self._console.is_terminal:  # a path may look like markup
            # Commands are copied, so the terminal has to wrap them.
            self._console.print(message, style=style, markup=False, emoji=False, highlight=False, soft_wrap=True)
        else:
            print(message, file=sys.stderr, flush=True)


class _WeightsAndBiases:
    def __init__(self, project: str, name: str) -> None:
        try:
            import wandb  # type: ignore[import-not-found, unused-ignore]
        except ImportError:
            raise SimulmtError("--wandb needs Weights & Biases, which is not installed: pip install wandb") from None
        self._run = wandb.init(project=project, name=name, resume="allow", id=name)

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self._run.log({tag: value}, step=step)

    def close(self) -> None:
        self._run.finish()


def memory_gib() -> float:
    """Return the peak memory of this process, on the GPU if there is one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
