"""The bigram objective: an order-free loss for a second training stage, computed on the inference path.

CTC requires the order of the reference, which a simultaneous translator cannot always produce. Bigrams may match
anywhere, so the order of phrases is free. The loss is 1 - F1 between the bigrams of the reference and the expected
bigrams of the model over all alignments: short output lowers recall, repetition lowers precision.

A bigram (u, v) is written at frames i < j if frame i emits u, frame j emits v, and all frames between emit the blank:

    E[u v] = sum over i < j of p_i(u) * p_j(v) * product over i < m < j of p_m(blank)

except for u = v at j = i + 1, where CTC merges the two. A start symbol in an extra first frame gives the first token a
bigram as well.

Apart from the normalisers, only the probability that frames i and i + 1 emit the same symbol needs the whole
vocabulary. It is summed chunk by chunk, and again for the gradient, so frames x V is never stored.

Axis letters: B batch, U frames, V vocabulary, T labels, C label columns (the blank and the labels), D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from simulmt.model.ctc import Alignments, CTCModel
from simulmt.model.layers import Batch, check_tokens, compiled_on_gpu
from simulmt.model.output import (
    FRAMES_PER_CHUNK,
    Loss,
    at_least_float32,
    autocast_disabled,
    first_occurrences,
    softmax_rows,
)
from simulmt.text import BLANK

BEGIN = -1  # precedes the first label; not in the vocabulary


def inference_path_loss(model: CTCModel, batch: Batch, delay: int = 1) -> Loss:
    """Return the bigram loss on the inference path, in source order."""
    check_tokens(batch.target, model.target_embedding.num_embeddings, "target")
    frames = model.frames(model.encode(batch.source, batch.source_lengths, delay))
    alignments = Alignments.of(batch.target, batch.target_lengths, batch.source_lengths * model.mu)
    return bigram_loss(frames, model.target_embedding.weight, alignments)


def bigram_loss(
    frames: Float[Tensor, "B U D"], table: Float[Tensor, "V D"], alignments: Alignments, chunk: int = FRAMES_PER_CHUNK
) -> Loss:
    """Return 1 - F1 of each sentence, weighted by its labels; sentences without labels or frames count zero."""
    lengths = alignments.label_lengths
    inside = torch.arange(frames.shape[1], device=frames.device) < alignments.frame_lengths[:, None]  # [B U]
    with autocast_disabled(frames) as (frames,):
        log_probs, same = _LabelsAndSame.apply(  # type: ignore[no-untyped-call]
            frames, table, alignments.columns, inside, chunk
        )
        matched, written = _matched_and_written(log_probs, same, inside, alignments)
    f1 = 2 * matched / (written + lengths).clamp(min=1e-6)
    counted = (lengths > 0) & (alignments.frame_lengths > 0)
    total = ((1 - f1) * lengths * counted).sum()
    return Loss(total, total.detach(), (lengths * counted).sum(), len(lengths) - counted.sum())


def _matched_and_written(
    log_probs: Float[Tensor, "B U C"], same: Float[Tensor, "B U"], inside: Bool[Tensor, "B U"], alignments: Alignments
) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
    """Return the expected numbers of matched and of written bigrams."""
    labels = alignments.columns[:, 1:]
    # Prepend a frame with the start symbol; padding emits blanks.
    shown = F.pad(log_probs[:, :, 1:].exp() * inside[:, :, None], (1, 0, 1, 0))  # [B U+1 T+1]
    shown = shown + F.pad(torch.ones_like(shown[:, :1, :1]), (0, shown.shape[2] - 1, 0, shown.shape[1] - 1))
    log_blank = F.pad(log_probs[:, :, 0].where(inside, 0.0), (1, 0), value=-torch.inf)
    written_at = 1 - log_blank.exp()
    paths = blank_paths(log_blank)

    before = paths.transpose(1, 2) @ shown  # [B U+1 T+1]: label t, then only blanks up to this frame
    expected = (before[:, :, :-1] * shown[:, :, 1:]).sum(1)  # [B T]
    bigrams = torch.stack([F.pad(labels[:, :-1], (1, 0), value=BEGIN), labels], -1)
    merged = (shown[:, :-1, :-1] * shown[:, 1:, 1:]).sum(1) * (bigrams[:, :, 0] == bigrams[:, :, 1])
    first, count = _occurrences(bigrams, alignments.label_lengths)
    matched = ((expected - merged).minimum(count) * first).sum(-1)

    all_pairs = (written_at[:, None, :] @ paths.transpose(1, 2) @ written_at[:, :, None]).flatten()
    return matched, all_pairs - same.sum(1)


def blank_paths(log_blank: Float[Tensor, "B U"]) -> Float[Tensor, "B U U"]:
    """Return the probability that all frames between i and j emit the blank; zero unless i < j."""
    until = log_blank.nan_to_num(neginf=0.0).cumsum(1)  # the first frame is never between two others
    between = F.pad(until[:, :-1], (1, 0))[:, None, :] - until[:, :, None]
    later = torch.ones_like(between, dtype=torch.bool).triu(1)
    return between.masked_fill(~later, -torch.inf).exp()


def _occurrences(
    bigrams: Int[Tensor, "B T 2"], lengths: Int[Tensor, " B"]
) -> tuple[Bool[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Return a mask of the first occurrence of each distinct bigram, and its count."""
    inside = torch.arange(bigrams.shape[1], device=bigrams.device) < lengths[:, None]
    equal = (bigrams[:, :, None] == bigrams[:, None, :]).all(-1) & inside[:, :, None] & inside[:, None, :]
    return inside & ~equal.tril(-1).any(-1), equal.sum(-1).to(torch.float32)


class _LabelsAndSame(torch.autograd.Function):
    """Compute log-probabilities of the label columns, undefined on padding, [B U C], and the probability that a frame
    and the next show the same non-blank symbol, [B U].

    With p_i the softmax of frame i and same_i the sum of p_i(v) p_{i+1}(v), the gradient by a logit of frame i is

        p_i(v) * (g_i p_{i+1}(v) + g_{i-1} p_{i-1}(v) - s_i),   s_i = g_i same_i + g_{i-1} same_{i-1} + d_i summed

    where g is the gradient by `same`, and d, added in the label columns, the one by those. As in model/output.py the
    label columns are taken in fp32, apart from the rest.
    """

    @staticmethod
    def forward(
        ctx: Any, frames: Tensor, table: Tensor, columns: Tensor, inside: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        rows = _Rows(frames, table.to(frames.dtype), columns, inside)
        log_probs, same = rows.weights.new_empty(rows.columns.shape), torch.empty_like(rows.weights)
        for part, logits, normalisers, p in rows.chunks(chunk):
            log_probs[part] = logits.gather(-1, rows.columns[part]).to(same.dtype) - normalisers[:, None]
            p[:, BLANK] = 0
            same[part] = _same_as_next(p) * rows.joined[part]
        log_probs, same = (x.unflatten(0, inside.shape) for x in (log_probs, same))
        ctx.save_for_backward(frames, table, columns, inside, log_probs, same)
        ctx.chunk = chunk
        return log_probs, same

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        frames, table, columns, inside, log_probs, same = ctx.saved_tensors
        grad_log_probs, grad_same = gradients
        with torch.autocast(frames.device.type, enabled=False):
            rows = _Rows(frames, table.to(frames.dtype), columns, inside)
            after = grad_same * rows.joined.view_as(grad_same)
            before = _previous(after)
            shrink = after * same + before * _previous(same) + grad_log_probs.sum(-1)
            grad_frames, grad_table = _gradients_without_labels(rows, after, before, shrink, ctx.chunk)

            shown = log_probs.exp() * inside[:, :, None]
            pull = after[:, :, None] * F.pad(shown[:, 1:], (0, 0, 0, 1)) + before[:, :, None] * _previous(shown)
            pull = pull * (columns != BLANK)[:, None, :] - shrink[:, :, None]
            grad_labels = shown * pull * first_occurrences(columns)[:, None, :] + grad_log_probs
            wide, label_rows = frames.to(grad_labels.dtype), table[columns].to(grad_labels.dtype)
            grad_frames = grad_frames + grad_labels @ label_rows
            grad_table.index_add_(0, columns.flatten(), (grad_labels.transpose(1, 2) @ wide).flatten(0, 1))
        return grad_frames.to(frames.dtype), grad_table.to(table.dtype), None, None, None


def _gradients_without_labels(
    rows: _Rows, after: Float[Tensor, "B U"], before: Float[Tensor, "B U"], shrink: Float[Tensor, "B U"], chunk: int
) -> tuple[Float[Tensor, "B U D"], Float[Tensor, "V D"]]:
    """Return the gradients of frames and table through symbols that are not labels of the sentence."""
    grad_frames, grad_table = torch.empty_like(rows.frames), torch.zeros_like(rows.table, dtype=after.dtype)
    scalars = torch.stack([x.flatten() for x in (after, before, shrink)])[:, :, None]  # [3 B*U 1]
    for part, _, _, p in rows.chunks(chunk):
        p[1:-1].scatter_(-1, rows.columns[part], 0)
        grad_logits = _grad_logits(p, *scalars[:, part])
        grad_frames[part] = grad_logits @ rows.table
        grad_table += grad_logits.T @ rows.frames[part]
    return grad_frames.unflatten(0, after.shape).to(after.dtype), grad_table


class _Rows:
    """Concatenated frames of all sentences, with their softmax in chunks."""

    def __init__(self, frames: Tensor, table: Tensor, columns: Tensor, inside: Tensor) -> None:
        weights = at_least_float32(inside.to(frames.dtype))
        self.frames, self.table, self.weights = frames.flatten(0, 1), table, weights.flatten()
        self.columns = columns[:, None, :].expand(-1, frames.shape[1], -1).flatten(0, 1)  # [B*U C]
        self.joined = (weights * F.pad(weights[:, 1:], (0, 1))).flatten()  # to a next frame of the same sentence

    def chunks(self, size: int) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Yield logits and normalisers in chunks of rows, and their softmax with one extra row on either side."""
        frames, weights = F.pad(self.frames, (0, 0, 1, 1)), F.pad(self.weights, (1, 1))  # with zero weight
        for start in range(0, len(self.frames), size):
            stop = min(start + size, len(self.frames))
            logits = frames[start : stop + 2] @ self.table.T
            normalisers, p = softmax_rows(logits, weights[start : stop + 2])
            yield slice(start, stop), logits[1:-1], normalisers[1:-1], p


def _previous(x: Float[Tensor, "B U *C"]) -> Float[Tensor, "B U *C"]:
    """Shift by one frame, with zero for the first."""
    return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)


@compiled_on_gpu
def _same_as_next(p: Float[Tensor, "R+2 V"]) -> Float[Tensor, " R"]:
    return (at_least_float32(p[1:-1]) * at_least_float32(p[2:])).sum(-1)


@compiled_on_gpu
def _grad_logits(p: Float[Tensor, "R+2 V"], after: Tensor, before: Tensor, shrink: Tensor) -> Float[Tensor, "R V"]:
    return (p[1:-1] * (after * p[2:] + before * p[:-2] - shrink)).to(p.dtype)
