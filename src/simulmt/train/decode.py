"""Greedy translation of a token store, for validation: in batches, with the same output as a live stream.

A causal encoder gives the same states whether it reads a sentence at once or word by word, so validation runs whole
sentences and still scores what a live stream would have written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import numpy as np
import sacrebleu
import torch
from numpy.typing import NDArray
from torch import Tensor

from simulmt.data.store import Dataset
from simulmt.model.beam import BeamConfig, beam_search
from simulmt.model.ctc import CTCModel
from simulmt.model.layers import Batch
from simulmt.model.transducer import TransducerModel
from simulmt.runtime.rules import NO_RULES, Context, DecodingRules, SourcePrefix
from simulmt.text import BLANK, Tokenizer
from simulmt.train.batches import DeviceStore
from simulmt.train.systems import InferenceModel, evaluation_mode

GREEDY = BeamConfig(beam=1, length_penalty=0.0, reads_on=True)
# Candidates for the penalty on the blank's logit; the more confident a model, the larger its best penalty.
BLANK_PENALTIES = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0)


@torch.inference_mode()
def translate_store(
    model: InferenceModel,
    store: DeviceStore,
    delay: int | None,
    batch_tokens: int = 16_384,
    blank_penalty: float = 0.0,
    shard: tuple[int, int] = (0, 1),
) -> dict[int, list[int]]:
    """Return target ids by sentence number; with shard (i, n), of every n-th batch starting at the i-th."""
    results: dict[int, list[int]] = {}
    with evaluation_mode(model):
        for number, (rows, batch) in enumerate(store.by_length(batch_tokens)):
            if number % shard[1] == shard[0]:
                hypotheses = translate_batch(model, batch, delay, blank_penalty)
                results.update(zip(rows.tolist(), hypotheses, strict=True))
    return results


def translate_batch(
    model: InferenceModel, batch: Batch, delay: int | None, blank_penalty: float = 0.0
) -> list[list[int]]:
    """Return greedy target ids of a batch; `blank_penalty` is subtracted from the blank's logit."""
    if isinstance(model, TransducerModel):
        frames = model.frames(model.encode(batch.source, batch.source_lengths, delay or 1))
        rows, lengths = model.write(frames, blank_penalty)[:, 0].tolist(), (batch.source_lengths * model.mu).tolist()
        # Unlike CTC, a transducer does not collapse repeated symbols.
        return [[symbol for symbol in row[:n] if symbol != BLANK] for row, n in zip(rows, lengths, strict=True)]
    if isinstance(model, CTCModel):
        logits = model(batch.source, batch.source_lengths, delay or 1)
        logits[:, :, BLANK] -= blank_penalty
        return collapse(logits.argmax(-1), (batch.source_lengths * model.mu).tolist())
    # Layers are compiled for training batches; beam search has other shapes at every step and would recompile.
    eager = torch.compiler.set_stance("force_eager") if batch.source.is_cuda else nullcontext()
    with eager:
        searched = beam_search(model, batch.source, batch.source_lengths, GREEDY, delay)
    return [hypotheses[0].tokens for hypotheses in searched]


@torch.inference_mode()
def scores_by_blank_penalty(
    model: CTCModel,
    store: DeviceStore,
    delay: int,
    penalties: Sequence[float],
    references: Sequence[Sequence[str]],
    tokenizer: Tokenizer,
    batch_tokens: int = 4096,
    rules: DecodingRules = NO_RULES,
) -> dict[float, float]:
    """Return the greedy BLEU of a store for every blank penalty, under decoding rules, from one forward pass.

    A transducer needs one pass per penalty, because its symbols depend on each other.
    """
    if isinstance(model, TransducerModel):
        found = {penalty: translate_store(model, store, delay, batch_tokens, penalty) for penalty in penalties}
        return {
            penalty: bleu([tokenizer.decode(ids[row]) for row in range(len(store))], references, tokenizer)
            for penalty, ids in found.items()
        }
    texts: dict[float, dict[int, str]] = {penalty: {} for penalty in penalties}
    for rows, batch in store.by_length(batch_tokens):
        logits = model(batch.source, batch.source_lengths, delay)
        blank = logits[:, :, BLANK].clone()
        logits[:, :, BLANK] = -torch.inf
        best, symbols = logits.max(-1)
        for penalty, translated in texts.items():
            written = symbols.masked_fill(blank - penalty > best, BLANK)
            if rules.filters:
                logits[:, :, BLANK] = blank - penalty
                written = _apply_rules(rules, written, logits, batch, model.encoder.seen(batch.source, delay), model.mu)
            for row, ids in zip(rows, collapse(written, (batch.source_lengths * model.mu).tolist()), strict=True):
                translated[int(row)] = rules.config.filter_text(tokenizer.decode(ids))
    in_order = {penalty: [translated[row] for row in range(len(store))] for penalty, translated in texts.items()}
    return {penalty: bleu(hypotheses, references, tokenizer) for penalty, hypotheses in in_order.items()}


def _apply_rules(rules: DecodingRules, symbols: Tensor, scores: Tensor, batch: Batch, seen: Tensor, mu: int) -> Tensor:
    """Return the symbols [B F] chosen under the rules, given those chosen without and all scores [B F V].

    `seen` [B S] is the number of tokens read for each state.
    """
    chosen = symbols.cpu().numpy().copy()
    sources = zip(batch.source.tolist(), batch.source_lengths.tolist(), seen.tolist(), strict=True)
    for row, frames, (tokens, length, ends) in zip(chosen, scores.float().cpu().numpy(), sources, strict=True):
        prefixes = [SourcePrefix(tokens[: min(end, length)]) for end in ends[:length]]
        by_frame = [prefix for prefix in prefixes for _ in range(mu)]
        F = length * mu
        row[:F] = rules.choose(row[:F].tolist(), frames[:F], by_frame, BLANK, Context())
    return torch.from_numpy(chosen)


def collapse(symbols: Tensor, frame_lengths: Sequence[int]) -> list[list[int]]:
    """Collapse repeated symbols and drop blanks."""
    frames: NDArray[np.int64] = symbols.cpu().numpy()
    changed = np.ones_like(frames, dtype=bool)
    changed[:, 1:] = frames[:, 1:] != frames[:, :-1]
    counts = changed & (frames != BLANK)
    return [row[:n][kept[:n]].tolist() for row, kept, n in zip(frames, counts, frame_lengths, strict=True)]


def bleu(hypotheses: Sequence[str], references: Sequence[Sequence[str]], tokenizer: Tokenizer) -> float:
    """Return lower-cased corpus BLEU; text without spaces is scored by characters."""
    metric = sacrebleu.BLEU(lowercase=True, tokenize="13a" if tokenizer.spaced else "zh", force=True)
    return float(metric.corpus_score(list(hypotheses), [list(each) for each in references]).score)


def tune_blank_penalties(
    model: CTCModel,
    dataset: Dataset,
    delays: Sequence[int],
    rules: DecodingRules = NO_RULES,
    report: Callable[[str], None] = lambda _: None,
) -> tuple[float, ...]:
    """Return, for each delay, the blank penalty with the best BLEU on the development set; ties go to the smallest.

    `rules` are those that the bundle will decode with.
    """
    dev = DeviceStore(dataset.dev, torch.device("cpu"))
    chosen = []
    for delay in delays:
        scores = scores_by_blank_penalty(
            model, dev, delay, BLANK_PENALTIES, dataset.dev_references, dataset.target_tokenizer, rules=rules
        )
        chosen.append(max(scores, key=lambda penalty: (scores[penalty], -penalty)))
        shown = ", ".join(f"{penalty:g}: {score:.2f}" for penalty, score in scores.items())
        report(f"k={delay}: development BLEU by blank penalty {shown}")
    return tuple(chosen)
