"""The transducer: the frames of CTC, each writing at most one symbol, with a label context.

CTC predicts the symbols of its frames independently. Here the prediction also depends on the last few symbols written,
as in a stateless transducer for speech. After the labels y_1 ... y_u the score of symbol v in frame t is

    a_t(v) + b_u(v)

where a comes from the encoder and b from the last labels before y_{u+1}. A frame writes at most one symbol, and
repeated symbols are not collapsed.

The normaliser of all (t, u) is one product, exp(a) exp(b)^T, so frames x labels x V is never stored; frames x V is
stored for a few sentences at a time.

Axis letters: B batch, U frames, T labels, C = T + 1 histories, V vocabulary, D width, R rank of the context, L its
symbols, K = T + 1 columns (the blank and the labels).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from simulmt.config import require
from simulmt.model.ctc import CTCConfig, CTCModel
from simulmt.model.layers import (
    Batch,
    Encoder,
    GradientsInForward,
    Loss,
    at_least_float32,
    autocast_disabled,
    compiled_on_gpu,
    first_occurrences,
    sentence_chunks,
)
from simulmt.text import BLANK, MASK, START

FRAMES_PER_CHUNK = 16_384
TINY = 1e-37  # keeps the logarithm of a normaliser finite


@dataclass(frozen=True)
class TransducerConfig(CTCConfig):
    """Sizes of the transducer: CTC's, and those of its label context."""

    context_symbols: int = 4  # number of previous symbols
    context_inner: int = 512
    context_rank: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("context_symbols", "context_inner", "context_rank"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")


class LabelContext(nn.Module):
    """The part of the score that depends on the last symbols written."""

    def __init__(self, vocabulary: int, width: int, symbols: int, inner: int, rank: int, dropout: float) -> None:
        super().__init__()
        self.symbols = symbols
        self.dropout = dropout
        self.expand = nn.Linear(symbols * width, inner)
        self.contract = nn.Linear(inner, rank)
        self.table = nn.Parameter(torch.zeros(vocabulary, rank))  # zero, so that at first the context has no effect
        for linear in (self.expand, self.contract):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def histories(self, labels: Int[Tensor, "*B T"]) -> Int[Tensor, "*B C L"]:
        """Return the last symbols, newest first, before each label and after the last one."""
        padded = F.pad(labels, (self.symbols, 0), value=START)
        return padded.unfold(-1, self.symbols, 1).flip(-1)

    def mask_tokens(self, history: Int[Tensor, "*N L"]) -> Int[Tensor, "*N L"]:
        """During training on references, replace some symbols with MASK, since at inference the history has errors."""
        if not self.training or self.dropout == 0:
            return history
        return history.masked_fill(torch.rand(history.shape, device=history.device) < self.dropout, MASK)

    def forward(self, history: Int[Tensor, "*N L"], embedding: Float[Tensor, "V D"]) -> Float[Tensor, "*N R"]:
        """Return vectors whose products with `table` are the scores b of the next symbol."""
        x = F.embedding(history, embedding) * math.sqrt(embedding.shape[1])
        return self.contract(F.relu(self.expand(x.flatten(-2))))


class TransducerModel(CTCModel):
    """A CTC translator's encoder and frames, with a label context."""

    def __init__(self, encoder: Encoder, target_vocabulary: int, mu: int, context: LabelContext) -> None:
        super().__init__(encoder, target_vocabulary, mu)
        self.context = context

    @staticmethod
    def build(config: CTCConfig) -> TransducerModel:
        assert isinstance(config, TransducerConfig)
        plain = CTCModel.build(config)
        sizes = (config.context_symbols, config.context_inner, config.context_rank)
        context = LabelContext(config.target_vocabulary, config.width, *sizes, config.dropout)
        return TransducerModel(plain.encoder, config.target_vocabulary, config.mu, context)

    def loss_of_states(self, H: Float[Tensor, "B S D"], batch: Batch, smoothing: float) -> Loss:
        """Return the transducer loss of states, in encoder order or sorted."""
        return self.loss_of_frames(self.frames(H), batch, smoothing)

    def loss_of_frames(self, frames: Float[Tensor, "B U D"], batch: Batch, smoothing: float) -> Loss:
        lattice = Lattice.of(batch.target, batch.target_lengths, batch.source_lengths * self.mu)
        embedding = self.target_embedding.weight
        contexts = self.context(self.context.mask_tokens(self.context.histories(lattice.labels)), embedding)
        return transducer_loss(frames, embedding, contexts, self.context.table, lattice, smoothing)

    @torch.no_grad()
    def write(
        self,
        frames: Float[Tensor, "B U D"],
        blank_penalty: float = 0.0,
        samples: int = 0,
        chunk: int = FRAMES_PER_CHUNK,
    ) -> Int[Tensor, "B N U"]:
        """Decode greedily, or draw N = `samples` samples; return the symbol of each frame, BLANK for none.

        Each symbol depends on the previous ones, so this runs frame by frame.
        """
        return torch.cat([self._write(frames[rows], blank_penalty, samples) for rows in sentence_chunks(frames, chunk)])

    def _write(self, frames: Float[Tensor, "B U D"], blank_penalty: float, samples: int) -> Int[Tensor, "B N U"]:
        a = self.logits(frames)
        B, U, _ = a.shape
        N = max(1, samples)
        history = torch.full((B, N, self.context.symbols), START, device=a.device)
        embedding, table = self.target_embedding.weight, self.context.table
        written = []
        for t in range(U):
            b = self.context(history, embedding) @ table.T
            symbol = _choose(a[:, t], b, blank_penalty, samples > 0)  # [B N]
            appended = torch.cat([symbol[..., None], history[..., :-1]], -1)
            history = torch.where((symbol == BLANK)[..., None], history, appended)
            written.append(symbol)
        return torch.stack(written, -1)


@compiled_on_gpu
def _choose(a: Float[Tensor, "B V"], b: Float[Tensor, "B N V"], blank_penalty: float, draw: bool) -> Int[Tensor, "B N"]:
    scores = at_least_float32(a)[:, None] + at_least_float32(b)
    is_blank = torch.arange(scores.shape[-1], device=scores.device) == BLANK
    scores = scores - is_blank * blank_penalty
    if draw:  # Gumbel-max trick
        scores = scores - torch.log(-torch.log(torch.rand_like(scores).clamp(1e-20, 1 - 1e-7)))
    return scores.argmax(-1)


class Lattice(NamedTuple):
    """Labels and frame counts of a batch."""

    labels: Int[Tensor, "B T"]
    frame_lengths: Int[Tensor, " B"]
    label_lengths: Int[Tensor, " B"]
    alignable: Bool[Tensor, " B"]  # there are at least as many frames as labels

    @staticmethod
    def of(target: Int[Tensor, "B T"], target_lengths: Int[Tensor, " B"], frame_lengths: Int[Tensor, " B"]) -> Lattice:
        frame_lengths, label_lengths = (
            lengths.to(target.device, non_blocking=True) for lengths in (frame_lengths, target_lengths)
        )
        return Lattice(target, frame_lengths, label_lengths, label_lengths <= frame_lengths)

    def part(self, rows: slice) -> Lattice:
        return Lattice(*(tensor[rows] for tensor in self))

    def columns(self) -> Int[Tensor, "B K"]:
        """Return the symbols of the lattice: the blank, then each label."""
        return F.pad(self.labels, (1, 0), value=BLANK)


class Posteriors(NamedTuple):
    """Posteriors of writing the blank or the next label, per frame and number of labels written; zero on padding."""

    blank: Float[Tensor, "B U C"]
    label: Float[Tensor, "B U C"]  # the last column is zero: no label is left


def transducer_loss(
    frames: Float[Tensor, "B U D"],
    table: Float[Tensor, "V D"],
    contexts: Float[Tensor, "B C R"],
    context_table: Float[Tensor, "V R"],
    lattice: Lattice,
    smoothing: float,
    chunk: int = FRAMES_PER_CHUNK,
) -> Loss:
    """Return (1 - eps) * NLL + eps * cross entropy with the uniform distribution, weighted by cell posteriors."""
    with autocast_disabled(frames, contexts) as (frames, contexts):
        total, negative = _TransducerLoss.apply(  # type: ignore[no-untyped-call]
            frames, table, contexts, context_table, lattice, smoothing, chunk
        )
    return Loss.of_aligned(total, negative, lattice.label_lengths, lattice.alignable)


class _TransducerLoss(GradientsInForward):
    """Compute the gradients along with the loss, a few sentences at a time.

    With gamma the probability that a path visits cell (t, u), and p its softmax, the gradient of a_t(v) is

        sum over u of gamma(t, u) p(v | t, u)  -  (1 - eps) * posterior(t, v)  -  eps / V

    and that of b_u(v) likewise. As in layers.py the label columns are computed separately, in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        frames: Tensor,
        table: Tensor,
        contexts: Tensor,
        context_table: Tensor,
        lattice: Lattice,
        smoothing: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(frames.dtype, torch.float32)
        tables = table.to(frames.dtype), context_table.to(frames.dtype)
        grad_frames, grad_contexts = torch.empty_like(frames), torch.empty_like(contexts)
        grad_tables = [torch.zeros_like(each, dtype=wide) for each in tables]
        total, negative = (frames.new_zeros((), dtype=wide) for _ in range(2))
        for rows in sentence_chunks(frames, chunk):
            part = _SentenceChunk(frames[rows], contexts[rows], tables, lattice.part(rows), smoothing)
            total += part.total
            negative += part.negative
            grad_frames[rows], grad_contexts[rows] = part.gradients(grad_tables)
        gradients = (grad_frames, grad_tables[0].to(table.dtype), grad_contexts, grad_tables[1].to(context_table.dtype))
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(negative)
        return total, negative


class _SentenceChunk:
    """The loss of a few sentences, and its gradients."""

    def __init__(
        self, frames: Tensor, contexts: Tensor, tables: tuple[Tensor, Tensor], lattice: Lattice, smoothing: float
    ) -> None:
        self.frames, self.contexts, self.tables = frames, contexts, tables
        self.smoothing = smoothing
        self.columns = lattice.columns()
        a, b = frames @ tables[0].T, contexts @ tables[1].T  # [B U V], [B C V]
        self.top_a, self.exp_a = _shifted_exp(a)
        self.top_b, self.exp_b = _shifted_exp(b)
        self.label_a, self.label_b = (self._gather_columns(scores) for scores in (a, b))  # [B U K], [B C K]
        del a, b
        self.sums = wide_product(self.exp_a, self.exp_b.mT).clamp(min=TINY)  # [B U C]
        normalisers = self.top_a + self.top_b.mT + self.sums.log()
        blank = self.label_a[:, :, :1] + self.label_b[:, None, :, 0]  # [B U C]
        negative, self.posteriors = forward_backward(blank - normalisers, self._label() - normalisers, lattice)
        self.negative = negative.sum()
        self.visits = self.posteriors.blank + self.posteriors.label  # [B U C]
        mean_a, mean_b = (
            (x.to(normalisers.dtype) @ table.to(normalisers.dtype).mean(0))[..., None]
            for x, table in zip((frames, contexts), tables, strict=True)
        )
        uniform = (self.visits * (normalisers - mean_a - mean_b.mT)).sum()
        self.total = (1 - smoothing) * self.negative + smoothing * uniform

    def _gather_columns(self, scores: Float[Tensor, "B X V"]) -> Float[Tensor, "B X K"]:
        columns = self.columns[:, None, :].expand(-1, scores.shape[1], -1)
        return at_least_float32(scores.gather(-1, columns))

    def _label(self) -> Float[Tensor, "B U C"]:
        """Return the scores of the next label; the last column is unused."""
        next_b = self.label_b.diagonal(1, 1, 2)  # [B T]: of history u, the score of label u + 1
        return F.pad(self.label_a[:, :, 1:] + next_b[:, None, :], (0, 1))

    def gradients(self, grad_tables: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the gradients of frames and contexts; add those of the two tables to `grad_tables`."""
        ratios = self.visits / self.sums  # [B U C]
        weights = ratios.to(self.exp_a.dtype)
        blank, label = self.posteriors
        grad_a = _grad_scores(self.exp_a, weights @ self.exp_b)
        grad_b = _grad_scores(self.exp_b, weights.mT @ self.exp_a)
        label_exp_a, label_exp_b = (self.label_a - self.top_a).exp(), (self.label_b - self.top_b).exp()
        posterior_a = torch.cat([blank.sum(2, keepdim=True), label[:, :, :-1]], 2)  # [B U K]
        posterior_b = torch.cat(  # [B C K]: the blank, and for history u its next label
            [blank.sum(1)[:, :, None], F.pad(torch.diag_embed(label[:, :, :-1].sum(1)), (0, 0, 0, 1))], 2
        )
        return (
            self._through(self.frames, self.tables[0], grad_a, label_exp_a * (ratios @ label_exp_b), posterior_a,
                          self.visits.sum(2), grad_tables[0]),
            self._through(self.contexts, self.tables[1], grad_b, label_exp_b * (ratios.mT @ label_exp_a), posterior_b,
                          self.visits.sum(1), grad_tables[1]),
        )  # fmt: skip

    def _through(
        self,
        x: Float[Tensor, "B X D"],
        table: Float[Tensor, "V D"],
        grad_scores: Float[Tensor, "B X V"],
        label_p: Float[Tensor, "B X K"],
        posterior: Float[Tensor, "B X K"],
        visits: Float[Tensor, "B X"],
        grad_table: Float[Tensor, "V D"],
    ) -> Tensor:
        """Return the gradient of x in the scores x @ table.T, given expected softmax and posterior."""
        columns = self.columns[:, None, :].expand(-1, x.shape[1], -1)
        grad_scores.scatter_(-1, columns, 0)
        wide = x.to(grad_table.dtype)
        label_rows = table[self.columns].to(grad_table.dtype)  # [B K D]
        difference = label_p * first_occurrences(self.columns)[:, None, :] - (1 - self.smoothing) * posterior
        share = self.smoothing * visits[:, :, None]
        grad_table += wide_product(grad_scores.flatten(0, 1).T, x.flatten(0, 1))
        grad_table -= (wide * share).sum((0, 1)) / len(table)
        grad_table.index_add_(0, self.columns.flatten(), (difference.mT @ wide).flatten(0, 1))
        return wide_product(grad_scores, table) + difference @ label_rows - share * table.to(grad_table.dtype).mean(0)


@compiled_on_gpu
def _shifted_exp(scores: Float[Tensor, "B X V"]) -> tuple[Float[Tensor, "B X 1"], Float[Tensor, "B X V"]]:
    """Return the maximum of each row, and the exponentials of the scores minus the maximum."""
    wide = at_least_float32(scores)
    top = wide.amax(-1, keepdim=True)
    return top, (wide - top).exp().to(scores.dtype)


@compiled_on_gpu
def _grad_scores(exp_scores: Tensor, weights: Tensor) -> Tensor:
    return exp_scores * weights


def wide_product(x: Tensor, y: Tensor) -> Tensor:
    """Multiply matrices; the result is at least fp32."""
    if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16):
        if x.dim() == 3 and y.dim() == 2:
            return torch.mm(x.flatten(0, 1), y, out_dtype=torch.float32).unflatten(0, x.shape[:2])
        return (torch.bmm if x.dim() == 3 else torch.mm)(x, y, out_dtype=torch.float32)
    return at_least_float32(x @ y)


def forward_backward(
    blank: Float[Tensor, "B U C"], label: Float[Tensor, "B U C"], lattice: Lattice
) -> tuple[Float[Tensor, " B"], Posteriors]:
    """Return the negative log-likelihood of each sentence over all alignments, and the posteriors of its cells.

    `blank` and `label` are log-probabilities: of writing nothing, and of writing the next label.
    """
    if blank.is_cuda and blank.dtype == torch.float32:
        from simulmt.model import triton_kernels

        return triton_kernels.transducer_forward_backward(blank, label, *lattice[1:])
    with torch.enable_grad():  # posteriors by automatic differentiation of the forward recursion
        blank, label = blank.detach().requires_grad_(), label.detach().requires_grad_()
        B, U, C = blank.shape
        alpha = torch.full((B, C), -torch.inf, dtype=blank.dtype, device=blank.device)
        alpha = torch.cat([torch.zeros_like(alpha[:, :1]), alpha[:, 1:]], 1)
        for t in range(U):
            advanced = F.pad((alpha + label[:, t])[:, :-1], (1, 0), value=-torch.inf)
            inside = (t < lattice.frame_lengths)[:, None]
            alpha = torch.where(inside, _log_add(alpha + blank[:, t], advanced), alpha)
        likelihood = alpha.gather(1, lattice.label_lengths[:, None].clamp(max=C - 1))[:, 0]
        negative = -likelihood.where(lattice.alignable, 0.0)
        grad_blank, grad_label = torch.autograd.grad(negative.sum(), (blank, label))
    return negative.detach(), Posteriors(-grad_blank, -grad_label)


def _log_add(x: Tensor, y: Tensor) -> Tensor:
    """Compute logaddexp with zero gradient, instead of NaN, where both are minus infinity."""
    impossible = torch.isneginf(x) & torch.isneginf(y)
    return torch.logaddexp(x.masked_fill(impossible, 0.0), y.masked_fill(impossible, 0.0)).masked_fill(
        impossible, -torch.inf
    )
