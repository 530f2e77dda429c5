"""The training loop, from top to bottom.

A run is a function of its configuration and data: batch g, its delay and its random draws depend on g alone. So a
killed run resumes from its newest checkpoint, and any number of processes computes the same updates.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor, nn

from simulmt.data.store import Dataset
from simulmt.errors import CheckpointError, TrainingError, VocabularyError
from simulmt.model.asn import SortedCTCModel
from simulmt.model.ctc import CTCModel
from simulmt.model.layers import Batch, DecoderLayer, EncoderLayer, Loss
from simulmt.model.risk import inference_path_loss, risk_loss, wait_k_risk_loss
from simulmt.model.seq2seq import Seq2SeqModel, proportional_rates
from simulmt.model.transducer import TransducerModel
from simulmt.train.analysis import bleu, explained_variance, sorting_statistics, translate_store
from simulmt.train.batches import BatchPlan, BatchQueue, DeviceStore, MixedQueue, draw_delay, draws_low_delay_data
from simulmt.train.monitor import Monitor, UpdateReport
from simulmt.train.restore import initialise_from
from simulmt.train.run import CheckpointFolder, RunProgress, RunState, World
from simulmt.train.systems import (
    FINAL,
    RunConfig,
    SystemConfig,
    TrainableModel,
    TrainingConfig,
    build_model,
    save_model,
    translator_of,
    vocabulary_checksums,
)

MAX_LOSS_RATIO = 5.0  # to the running average; updates with a larger loss are skipped


@dataclass(frozen=True)
class Outcome:
    """Result of a call of `train`; a stopped run resumes with the next call."""

    status: Literal["finished", "stopped"]
    update: int
    score: float | None
    model: Path | None = None
    signal: int | None = None  # signal that stopped the run, if any


def train(config: RunConfig, directory: Path, world: World, monitor: Monitor) -> Outcome:
    """Train until finished or interrupted, resuming an existing run directory."""
    settings = config.training
    dataset = Dataset.open(config.data)
    system = system_config(config, dataset)
    checkpoints = CheckpointFolder(directory / "checkpoints")
    newest = checkpoints.load_latest(monitor.warn)
    if newest is None and (directory / FINAL).exists():
        raise CheckpointError(f"{directory}: a finished run without its checkpoints; choose another run directory")
    torch.manual_seed(settings.seed)
    model = build_model(system)
    if newest is None and config.init is not None:
        initialise_from(model, config.init, system)
    translator_of(model).encoder.mark_words(dataset.source_tokenizer.word_starts)
    if config.objective == "policy":
        model.requires_grad_(False)
    if isinstance(model, Seq2SeqModel) and model.policy is not None:
        model.policy.requires_grad_(config.objective == "policy")  # other objectives give it no gradient
    state = RunState.start(model.to(world.device).train(), settings)
    if newest is not None:
        # The teacher and wait-k have the same tensors, so loading one as the other would not fail.
        if newest.state["system"] != config.system:
            raise CheckpointError(f"{directory}: a {newest.state['system']} run; choose another for {config.system}")
        state.restore(newest)
    progress = state.progress

    store, dev = DeviceStore(dataset.train, world.device), DeviceStore(dataset.dev, world.device)
    plan = BatchPlan(store.source_lengths, store.target_lengths, settings.batch_tokens, settings.seed)
    queue, batches = batch_queue(config, dataset, store, plan), batches_in_update(settings, world.size)
    if warning := update_size_warning(settings, world.size):
        monitor.warn(warning)
    compile_layers(model, settings, world.device)
    objective = world.distribute(_Objective(model, config, dataset.target_tokenizer.pieces))
    validate = partial(_validate, model, dev, dataset, config, world)
    metric = "R2" if config.objective == "policy" else "BLEU"
    monitor.start(progress.update, settings.max_updates, model, plan, metric)

    with _StopRequests(settings.max_minutes) as stop, monitor:
        while progress.update < settings.max_updates and not _should_stop_early(progress, settings):
            update = progress.update + 1
            numbers = range(progress.batches + world.rank, progress.batches + batches, world.size)
            totals, timing = _accumulate(objective, queue, numbers, config, world)
            # Stop requests are summed with the losses, so that all processes stop together.
            totals[4:] = torch.tensor([stop.out_of_time(), stop.signal is not None])
            loss, likelihood, tokens, skipped, out_of_time, interrupted = world.sum(totals).tolist()
            per_token = loss / tokens if tokens else math.nan  # no sentence could be aligned
            norm = _apply_update(state, update, per_token, world.size / max(tokens, 1.0), settings)
            progress.update = update
            progress.batches += batches
            progress.skipped_sentences += int(skipped)
            rate = learning_rate(update, settings)
            monitor.update(UpdateReport(update, loss, likelihood, tokens, norm, rate, **timing), progress)

            validating = update % settings.validate_every == 0 or update == settings.max_updates or out_of_time
            if validating:
                with state.averaged_weights():
                    scores = validate()
                    if isinstance(model, SortedCTCModel) and world.is_first:
                        with precision(settings, world.device):
                            monitor.sorting(update, sorting_statistics(model, dev, min(config.delays)))
                progress.scores[str(update)] = sum(scores.values()) / len(scores)
                monitor.validation(update, scores, max(progress.scores.values()))
            if (validating or interrupted) and world.is_first:
                checkpoints.save(update, state.tensors(), {"system": config.system, "progress": asdict(progress)})
                checkpoints.prune(set(progress.best(settings.keep_best)))
            if interrupted:
                stop.handled = True
                monitor.stopped(update)
                return Outcome("stopped", update, max(progress.scores.values(), default=None), signal=stop.signal)
            if out_of_time:
                break

    world.wait()  # until the last checkpoint is written
    best = checkpoints.intact(progress.best(settings.keep_best), monitor.warn)
    chosen, scores = _choose_final(best, state, checkpoints, validate)
    if world.is_first:
        name = f"dev_{metric.lower()}"
        metadata = {"update": progress.update, name: scores, "chosen": chosen, "best_updates": best}
        save_model(model, system, directory / FINAL, metadata)
    world.wait()
    monitor.finish(progress.update, scores[chosen], directory / FINAL, config.data)
    return Outcome("finished", progress.update, scores[chosen], directory / FINAL)


def system_config(config: RunConfig, dataset: Dataset) -> SystemConfig:
    """Return the configuration of a run's system, with the vocabularies of its data."""
    source, target = dataset.source_tokenizer, dataset.target_tokenizer
    checksums = vocabulary_checksums(source, target)
    return SystemConfig(config.system, source.size, target.size, config.model, config.asn, config.delays, checksums)


def batch_queue(config: RunConfig, dataset: Dataset, store: DeviceStore, plan: BatchPlan) -> BatchQueue | MixedQueue:
    """Return the queue of all batches, mixed with those for low delays, if any."""
    queue, low, settings = BatchQueue(store, plan), config.low_delay, config.training
    if low.data is None:
        return queue
    added = Dataset.open(low.data)
    ours, theirs = (vocabulary_checksums(each.source_tokenizer, each.target_tokenizer) for each in (dataset, added))
    if ours != theirs:
        raise VocabularyError(
            f"{low.data}: its vocabularies differ from those of {config.data}; prepare it with "
            f"--vocabularies {config.data}"
        )
    low_store = DeviceStore(added.train, store.device)
    low_plan = BatchPlan(low_store.source_lengths, low_store.target_lengths, settings.batch_tokens, settings.seed)

    def is_low(number: int) -> bool:
        is_low_delay = draw_delay(config.delays, settings.seed, number) <= low.max_delay
        return is_low_delay and draws_low_delay_data(number, settings.seed, low.share)

    return MixedQueue(queue, BatchQueue(low_store, low_plan), is_low)


def batches_in_update(settings: TrainingConfig, processes: int) -> int:
    """Return the number of batches per update over all processes, a multiple of `processes`."""
    count = max(1, round(settings.update_tokens / settings.batch_tokens))
    return math.ceil(count / processes) * processes


def update_size_warning(settings: TrainingConfig, processes: int) -> str:
    """Return a warning if this many processes make updates larger than configured, or an empty string."""
    tokens = batches_in_update(settings, processes) * settings.batch_tokens
    if tokens < 1.25 * settings.update_tokens:
        return ""
    return (
        f"{processes} processes make updates of {tokens:,} tokens, more than training.update_tokens "
        f"({settings.update_tokens:,}); lower training.batch_tokens to {settings.update_tokens // processes:,}"
    )


def learning_rate(update: int, settings: TrainingConfig) -> float:
    """Return the learning rate: linear warm-up, inverse square root decay, linear cooldown to zero."""
    warmup = max(1, settings.warmup_updates)
    rate = settings.learning_rate * min(update / warmup, math.sqrt(warmup / update))
    cooldown = settings.cooldown * settings.max_updates
    return rate * min(1.0, (settings.max_updates + 1 - update) / max(1.0, cooldown))


def compile_layers(model: nn.Module, settings: TrainingConfig, device: torch.device) -> None:
    """Compile layer by layer, so that all layers share one graph with dynamic shapes."""
    if device.type == "cuda":
        # Up to about 128 tokens, memory-efficient attention is the fastest (1.3 to 2.4 times at 32 tokens).
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)
    if settings.compile == "no":
        torch.compiler.set_stance("force_eager")
    elif settings.compile == "yes" or device.type == "cuda":
        for module in model.modules():
            if isinstance(module, EncoderLayer | DecoderLayer):
                module.compile(dynamic=True)


def precision(settings: TrainingConfig, device: torch.device) -> AbstractContextManager[Any]:
    """Return an autocast context: bfloat16 where supported, or as configured."""
    wanted = settings.precision
    if wanted == "auto":
        wanted = "bfloat16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "float32"
    return torch.autocast(device.type, torch.bfloat16, enabled=wanted == "bfloat16")


class _Objective(nn.Module):
    """Computes the loss in its forward pass, as DistributedDataParallel requires."""

    def __init__(self, model: TrainableModel, config: RunConfig, pieces: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.config = config
        self.weights = config.risk.weights(pieces).to(next(model.parameters()).device)

    def forward(self, batch: Batch, delay: int | None) -> Loss:
        model, smoothing = self.model, self.config.training.smoothing
        if isinstance(model, Seq2SeqModel):
            rates = proportional_rates(batch) if self.config.reading == "proportional" else None
            if self.config.objective == "policy":
                assert delay is not None, "only a teacher has no delay"
                return model.policy_loss(batch, delay, rates)
            if self.config.objective == "risk":
                return wait_k_risk_loss(model, batch, delay, self.config.risk, self.weights, rates)
            return model.loss(batch, delay, smoothing, rates)
        assert delay is not None, "only a teacher has no delay"
        if self.config.objective == "bigrams":
            return inference_path_loss(cast(CTCModel, model), batch, delay)
        if self.config.objective == "risk":
            return risk_loss(cast(TransducerModel, model), batch, delay, self.config.risk, self.weights)
        return model.loss(batch, delay, smoothing)


def _accumulate(
    objective: nn.Module, queue: BatchQueue | MixedQueue, numbers: range, config: RunConfig, world: World
) -> tuple[Tensor, dict[str, float]]:
    """Accumulate the gradients of this process; return sums of loss, likelihood, tokens, skipped, and two zeros."""
    totals = torch.zeros(6, dtype=torch.float64, device=world.device)
    timing = {"source_tokens": 0.0, "data_seconds": 0.0}
    for number in numbers:
        started = time.perf_counter()
        batch = queue.take(number)
        timing["data_seconds"] += time.perf_counter() - started
        timing["source_tokens"] += float(batch.source_lengths.sum()) * world.size
        # Each batch has its own seed, so its dropout and noise do not depend on the process that runs it.
        torch.manual_seed(config.training.seed * 1_000_003 + number)
        delay = None if config.system == "teacher" else draw_delay(config.delays, config.training.seed, number)
        is_last = number == numbers[-1]
        with world.sync_gradients(objective, is_last), precision(config.training, world.device):
            loss: Loss = objective(batch, delay)
            loss.total.backward()
        queue.prepare(number + world.size)
        totals[:4] += torch.stack([value.detach().to(world.device, torch.float64) for value in loss])
    return totals, timing


def _apply_update(state: RunState, update: int, loss: float, scale: float, settings: TrainingConfig) -> float:
    """Scale and clip the gradients and step, or skip a diverging update; return the norm before clipping."""
    progress = state.progress
    gradients = [p.grad for p in state.model.parameters() if p.grad is not None]
    norm = float(nn.utils.get_total_norm(gradients)) * scale
    if math.isfinite(norm) and math.isfinite(loss) and loss <= MAX_LOSS_RATIO * progress.average_loss:
        torch._foreach_mul_(gradients, scale * min(1.0, settings.clip_norm / (norm + 1e-6)))
        state.step(learning_rate(update, settings), settings.ema_decay)
        progress.record_step(loss)
    else:
        progress.record_skipped_step()
    state.optimizer.zero_grad(set_to_none=True)
    if progress.skipped_in_a_row > settings.max_skipped:
        diverged, too_long = "training has diverged: lower training.learning_rate", "no target fits: raise model.mu"
        raise TrainingError(
            f"update {update}: {progress.skipped_in_a_row} updates in a row were skipped (loss {loss:.3g}, gradient "
            f"norm {norm:.3g}); {diverged if norm else too_long} and start a new run"
        )
    return norm


def _validate(
    model: TrainableModel, dev: DeviceStore, dataset: Dataset, config: RunConfig, world: World
) -> dict[str, float]:
    """Return the greedy BLEU of the development set by delay or, for a policy, the percentage of variance explained."""
    if config.objective == "policy":
        proportional = config.reading == "proportional"
        with precision(config.training, world.device):
            return {"None": explained_variance(cast(Seq2SeqModel, model), dev, config.delays, proportional)}
    scores = {}
    for delay in [None] if config.system == "teacher" else config.delays:
        with precision(config.training, world.device):
            part = translate_store(translator_of(model), dev, delay, shard=(world.rank, world.size))
        ids = world.merge(part)
        hypotheses = [dataset.target_tokenizer.decode(ids[row]) for row in range(len(dev))]
        scores[str(delay)] = bleu(hypotheses, dataset.dev_references, dataset.target_tokenizer)
    return scores


def _choose_final(
    best: list[int], state: RunState, checkpoints: CheckpointFolder, validate: Callable[[], dict[str, float]]
) -> tuple[str, dict[str, float]]:
    """Load the best checkpoint or the average of the best, whichever scores higher; return its name and all scores."""
    weights = {"best": checkpoints.average(best[:1], state.validated_prefix)}
    scores = {"best": state.progress.scores[str(best[0])]}  # validated during the run
    if len(best) > 1:
        weights["average of the best"] = checkpoints.average(best, state.validated_prefix)
        state.model.load_state_dict(weights["average of the best"])
        by_delay = validate()
        scores["average of the best"] = sum(by_delay.values()) / len(by_delay)
    chosen = max(scores, key=lambda name: scores[name])
    state.model.load_state_dict(weights[chosen])
    return chosen, scores


def _should_stop_early(progress: RunProgress, settings: TrainingConfig) -> bool:
    best = max(progress.scores.values(), default=None)
    reached = [int(update) for update, score in progress.scores.items() if score == best]
    return bool(reached) and progress.update - min(reached) >= settings.patience


class _StopRequests:
    """Records SIGTERM and SIGINT, for the loop to check after each update."""

    def __init__(self, max_minutes: float) -> None:
        self.signal: int | None = None
        self.handled = False
        self._deadline = time.monotonic() + 60 * max_minutes if max_minutes > 0 else math.inf

    def out_of_time(self) -> bool:
        return time.monotonic() > self._deadline

    def __enter__(self) -> Self:
        self._previous = {each: signal.signal(each, self._receive) for each in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._previous.items():
            signal.signal(each, handler)
        if self.signal is not None and not self.handled:
            signal.raise_signal(self.signal)  # it arrived after the last check of the loop

    def _receive(self, number: int, _frame: object) -> None:
        self.signal = number
