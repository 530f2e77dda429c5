"""Greedy translation of a whole token store, as validation needs it: batched, and what streaming would write.

A causal encoder gives the same states whether it reads a sentence at once or word by word, so validation runs whole
sentences and still scores what a live stream would have written.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import sacrebleu
import torch
from numpy.typing import NDArray
from torch import Tensor

from simulmt.model.beam import BeamConfig, beam_search
from simulmt.model.ctc import CTCModel
from simulmt.runtime.marks import one_mark
from simulmt.runtime.wording import Context, Heard, Wording
from simulmt.text import BLANK, Tokenizer
from simulmt.train.batches import Batch, DeviceStore
from simulmt.train.systems import Translator

GREEDY = BeamConfig(beam=1, length_penalty=0.0, reads_on=True)


@torch.inference_mode()
def translate_store(
    model: Translator,
    store: DeviceStore,
    delay: int | None,
    batch_tokens: int = 4096,
    blank_penalty: float = 0.0,
    shard: tuple[int, int] = (0, 1),
) -> dict[int, list[int]]:
    """Target ids of every sentence by its number; with shard (i, n), of every n-th batch from the i-th."""
    was_training = model.training
    model.eval()
    results: dict[int, list[int]] = {}
    for number, batch in enumerate(store.in_order(batch_tokens)):
        if number % shard[1] == shard[0]:
            hypotheses = translate_batch(model, batch, delay, blank_penalty)
            results.update(zip(batch.rows.tolist(), hypotheses, strict=True))
    model.train(was_training)
    return results


def translate_batch(model: Translator, batch: Batch, delay: int | None, blank_penalty: float = 0.0) -> list[list[int]]:
    """Greedy target ids of a batch; `blank_penalty` is taken off the blank's logit."""
    if isinstance(model, CTCModel):
        logits = model(batch.source, batch.source_lengths, delay or 1)
        logits[:, :, BLANK] -= blank_penalty
        return collapse(logits.argmax(-1), (batch.source_lengths * model.mu).tolist())
    # Training compiles the layers for the shapes of its batches; a search has other shapes at every step.
    as_they_are = torch.compiler.set_stance("force_eager") if batch.source.is_cuda else nullcontext()
    with as_they_are:
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
    wording: Wording | None = None,
) -> dict[float, float]:
    """Greedy BLEU of a store for every blank penalty, beside those of a wording, from one pass of the network."""
    texts: dict[float, dict[int, str]] = {penalty: {} for penalty in penalties}
    for batch in store.in_order(batch_tokens):
        logits = model(batch.source, batch.source_lengths, delay)
        blank = logits[:, :, BLANK].clone()
        logits[:, :, BLANK] = -torch.inf
        best, symbols = logits.max(-1)
        for penalty, translated in texts.items():
            written = symbols.masked_fill(blank - penalty > best, BLANK)
            if wording is not None:
                logits[:, :, BLANK] = blank - penalty
                written = _reworded(wording, written, logits, batch, model.encoder.seen(batch.source, delay), model.mu)
            for row, ids in zip(batch.rows, collapse(written, (batch.source_lengths * model.mu).tolist()), strict=True):
                text = tokenizer.decode(ids)
                translated[int(row)] = one_mark(text) if wording is not None and wording.repeat_penalty else text
    in_order = {penalty: [translated[row] for row in range(len(store))] for penalty, translated in texts.items()}
    return {penalty: bleu(hypotheses, references, tokenizer) for penalty, hypotheses in in_order.items()}


def _reworded(wording: Wording, symbols: Tensor, scores: Tensor, batch: Batch, seen: Tensor, mu: int) -> Tensor:
    """The symbols [B F] that a stream would choose, given the best without penalties and all scores [B F V].

    `seen` [B S] is how many tokens had been read for each state.
    """
    chosen = symbols.cpu().numpy().copy()
    sources = zip(batch.source.tolist(), batch.source_lengths.tolist(), seen.tolist(), strict=True)
    for row, frames, (tokens, length, ends) in zip(chosen, scores.float().cpu().numpy(), sources, strict=True):
        heard = [Heard(tokens[: min(end, length)]) for end in ends[:length]]
        by_frame = [each for each in heard for _ in range(mu)]
        F = length * mu
        row[:F] = wording.choose(row[:F].tolist(), frames[:F], by_frame, BLANK, Context())
    return torch.from_numpy(chosen)


def collapse(symbols: Tensor, frame_lengths: Sequence[int]) -> list[list[int]]:
    """CTC's many-to-one map: a frame counts if it is no blank and differs from the frame before it."""
    frames: NDArray[np.int64] = symbols.cpu().numpy()
    changed = np.ones_like(frames, dtype=bool)
    changed[:, 1:] = frames[:, 1:] != frames[:, :-1]
    counts = changed & (frames != BLANK)
    return [row[:n][kept[:n]].tolist() for row, kept, n in zip(frames, counts, frame_lengths, strict=True)]


def bleu(hypotheses: Sequence[str], references: Sequence[Sequence[str]], tokenizer: Tokenizer) -> float:
    """Lower-cased corpus BLEU by all sets of references; text without spaces is scored by characters, like Chinese."""
    metric = sacrebleu.BLEU(lowercase=True, tokenize="13a" if tokenizer.spaced else "zh", force=True)
    return float(metric.corpus_score(list(hypotheses), [list(each) for each in references]).score)
