"""The auxiliary sorting network (ASN), which sorts encoder states into target order during training.

Paper, section 3.2: Q from decoder layers over H with the target as context; A = Q H^T / sqrt(D);
Z = Sinkhorn^l((A + delta * G) / tau) with Gumbel noise G; the loss is computed on the sorted states Z H.
Inference never imports this module: there Z is the identity.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from simulmt.config import require
from simulmt.model.ctc import CTCModel
from simulmt.model.layers import Batch, DecoderLayer, Loss, NormPlacement, check_tokens, compiled_on_gpu, length_mask
from simulmt.text import END, MASK, PAD


@dataclass(frozen=True)
class ASNConfig:
    """Settings of the sorting network; defaults are the paper's for English to Chinese, except `norm`."""

    layers: int = 3  # M
    iterations: int = 16  # l; 0 replaces Sinkhorn by a softmax over each row
    tau: float = 0.25
    delta: float = 0.3
    gamma: float = 0.5
    norm: NormPlacement = "pre"  # "post" is the authors' choice; "pre" the default of older checkpoints
    query_scale: float = 1.0  # initial gain of the norm that yields Q; below 1, Z starts farther from the identity

    def __post_init__(self) -> None:
        require(self.layers >= 1, f"layers (M) must be at least 1, got {self.layers}")
        require(self.iterations >= 0, f"iterations (l) must not be negative, got {self.iterations}")
        require(self.tau > 0, f"tau must be above 0, got {self.tau}")
        require(self.delta >= 0, f"delta must not be negative, got {self.delta}")
        require(0 <= self.gamma <= 1, f"gamma must be in 0..1, got {self.gamma}")
        require(self.query_scale > 0, f"query_scale must be above 0, got {self.query_scale}")


class SortingNetwork(nn.Module):
    """Predict a near-permutation matrix Z from the states H and the target."""

    def __init__(
        self,
        width: int,
        inner: int,
        heads: int,
        layers: int,
        dropout: float,
        iterations: int,
        tau: float,
        delta: float,
        gamma: float,
        norm: NormPlacement = "pre",
        query_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.iterations, self.tau, self.delta, self.gamma = iterations, tau, delta, gamma
        self.layers: Sequence[DecoderLayer] = nn.ModuleList(  # type: ignore[assignment]
            DecoderLayer(width, inner, heads, dropout, norm) for _ in range(layers)
        )
        self.final_norm = nn.LayerNorm(width)
        nn.init.constant_(self.final_norm.weight, query_scale)

    def mask_tokens(self, target: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
        """During training, replace a fraction gamma of each sentence's tokens with MASK, but never END or padding."""
        if not self.training:
            return target
        maskable = (target != PAD) & (target != END)
        scores = torch.rand(target.shape, device=target.device).masked_fill(~maskable, 2.0)
        ranks = scores.argsort(-1).argsort(-1)
        count = (self.gamma * maskable.sum(-1, keepdim=True)).round()
        return target.masked_fill((ranks < count) & maskable, MASK)

    def forward(
        self,
        H: Float[Tensor, "B S D"],
        source_mask: Bool[Tensor, "B S"] | None,
        context: Float[Tensor, "B T D"],
        target_mask: Bool[Tensor, "B T"] | None,
    ) -> Float[Tensor, "B S S"]:
        """Return Z in fp32: row r holds the weights of the states that make up output position r."""
        source_attention = None if source_mask is None else source_mask[:, None, None, :]
        target_attention = None if target_mask is None else target_mask[:, None, None, :]
        Q = H
        for layer in self.layers:
            Q, _ = layer(Q, layer.cross_attention.project(context), target_attention, source_attention)
        A = scaled_scores(self.final_norm(Q), H)
        if self.training and self.delta > 0:
            gumbel = -torch.empty_like(A).exponential_().log()
            A = A + self.delta * gumbel
        return sinkhorn(exclude_padding(A / self.tau, source_mask), self.iterations)


class SortedCTCModel(nn.Module):
    """CTC+ASN: a translator trained on sorted states. Inference uses only `translator`.

    The translator provides its encoder, its target embedding, and `loss_of_states`, which may be any left-to-right loss
    over states.
    """

    def __init__(self, translator: CTCModel, sorter: SortingNetwork) -> None:
        super().__init__()
        self.translator = translator
        self.sorter = sorter

    @staticmethod
    def build(translator: CTCModel, config: ASNConfig) -> SortedCTCModel:
        layer = translator.encoder.layers[0]
        sorter = SortingNetwork(
            width=translator.target_embedding.embedding_dim,
            inner=layer.feed_forward.expand.out_features,
            heads=layer.attention.heads,
            dropout=layer.dropout.p,
            **asdict(config),
        )
        return SortedCTCModel(translator, sorter)

    def loss(self, batch: Batch, delay: int = 1, smoothing: float = 0.1) -> Loss:
        """Return the translator's loss of the sorted states."""
        H, Z = self.sort(batch, delay)
        return self.translator.loss_of_states(Z.to(H.dtype) @ H, batch, smoothing)

    def sort(self, batch: Batch, delay: int = 1) -> tuple[Float[Tensor, "B S D"], Float[Tensor, "B S S"]]:
        """Return the states in source order and the matrix Z that sorts them."""
        source, source_lengths, target, target_lengths = batch
        embedding = self.translator.target_embedding
        check_tokens(source, self.translator.encoder.embedding.num_embeddings, "source")
        check_tokens(target, embedding.num_embeddings, "target")
        source_mask = length_mask(source_lengths, source.shape[1], source.device)
        target_mask = length_mask(target_lengths, target.shape[1], target.device)
        H = self.translator.encoder(source, source_mask, delay)
        context = embedding.embed(self.sorter.mask_tokens(target))
        return H, self.sorter(H, source_mask, context, target_mask)


class SortingStatistics(NamedTuple):
    """Distance of Z from the identity, averaged over source positions."""

    diagonal: float  # weight on the diagonal; 1 for the identity
    displacement: float  # distance |i - j| between input and output position, weighted by Z; 0 for the identity

    @staticmethod
    def of(batches: Iterable[tuple[Float[Tensor, "B N N"], Int[Tensor, " B"]]]) -> SortingStatistics:
        """Measure batches of (Z, source lengths); padding does not count."""
        diagonal = displacement = positions = 0.0
        for Z, lengths in batches:
            index = torch.arange(Z.shape[-1], device=Z.device)
            Z = Z.detach() * (index < lengths.to(Z.device)[:, None])[:, :, None]  # zero the rows of padding
            diagonal += float(Z.diagonal(dim1=1, dim2=2).sum())
            displacement += float((Z * (index[:, None] - index).abs()).sum())
            positions += float(lengths.sum())
        return SortingStatistics(diagonal / max(positions, 1.0), displacement / max(positions, 1.0))


def scaled_scores(Q: Float[Tensor, "B S D"], H: Float[Tensor, "B S D"]) -> Float[Tensor, "B S S"]:
    """Return Q H^T / sqrt(D), in fp32 even under autocast, because bf16 rounding divided by tau would change Z."""
    with torch.autocast(Q.device.type, enabled=False):
        return Q.float() @ H.float().transpose(1, 2) / math.sqrt(H.shape[-1])


def exclude_padding(scores: Float[Tensor, "B N N"], mask: Bool[Tensor, "B N"] | None) -> Float[Tensor, "B N N"]:
    """Mask cells that pair padding with a token; padding positions map to themselves."""
    if mask is None:
        return scores
    diagonal = torch.eye(scores.shape[-1], dtype=torch.bool, device=scores.device)
    allowed = (mask[:, :, None] & mask[:, None, :]) | (diagonal & ~mask[:, :, None])
    return scores.masked_fill(~allowed, -torch.inf)


def sinkhorn(X: Float[Tensor, "B N N"], iterations: int) -> Float[Tensor, "B N N"]:
    """Normalise rows, then columns, of exp(X) `iterations` times; 0 is a row softmax.

    Gradients are exact through all iterations, but only X is saved: the iterations update two dual vectors, with
    Z = exp(X + f + g), which backward recomputes.
    """
    if iterations == 0:
        return X.softmax(-1)
    return _Sinkhorn.apply(X, iterations)  # type: ignore[no-untyped-call]


@compiled_on_gpu
def _dual_vectors(X: Tensor, iterations: int) -> list[tuple[Tensor, Tensor]]:
    """Return the dual vectors (f, g), [B N 1] and [B 1 N], after 0, 1, ... iterations."""
    f, g = torch.zeros_like(X[:, :, :1]), torch.zeros_like(X[:, :1, :])
    steps = [(f, g)]
    for _ in range(iterations):
        f = -(X + g).logsumexp(2, keepdim=True)
        g = -(X + f).logsumexp(1, keepdim=True)
        steps.append((f, g))
    return steps


@compiled_on_gpu
def _sinkhorn_backward(X: Tensor, steps: list[tuple[Tensor, Tensor]], grad_Z: Tensor) -> Tensor:
    """Backpropagate through all iterations; return the gradient of X."""
    f, g = steps[-1]
    grad_X = grad_Z * (X + f + g).exp()
    grad_f, grad_g = grad_X.sum(2, keepdim=True), grad_X.sum(1, keepdim=True)
    for (_, g_before), (f, g) in zip(reversed(steps[:-1]), reversed(steps[1:]), strict=True):
        # g = -logsumexp over rows of X + f, whose softmax is exp(X + f + g); then f likewise from g_before.
        through_g = -grad_g * (X + f + g).exp()
        grad_f = grad_f + through_g.sum(2, keepdim=True)
        through_f = -grad_f * (X + f + g_before).exp()
        grad_X = grad_X + through_g + through_f
        grad_f, grad_g = torch.zeros_like(grad_f), through_f.sum(1, keepdim=True)
    return grad_X


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, X: Tensor, iterations: int) -> Tensor:
        ctx.save_for_backward(X)
        ctx.iterations = iterations
        f, g = _dual_vectors(X, iterations)[-1]
        return (X + f + g).exp()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (X,) = ctx.saved_tensors
        return _sinkhorn_backward(X, _dual_vectors(X, ctx.iterations), gradients[0]), None
