"""Encoder-decoder for the full-sentence teacher and the wait-k baseline.

They differ only in two masks: the teacher's encoder is bidirectional and its decoder sees the whole source; the wait-k
encoder is causal, and decoder step t (from 0) sees source tokens before t + k.

With proportional reading, a wait-k model is trained as if it read r source tokens for every target token, with r = S/T,
but at least 1, for each sentence: step t sees source tokens before r * t + k. Where translations are shorter than their
sources, the last tokens would otherwise be learned without the end of the source, and the model would learn to omit it.

A wait-k model may have a read/write policy: a small network that predicts, from the decoder state, how *stable* the
next token is. Stability is the overlap of two distributions of this token, sum over v of min(p(v), q(v)): p given the
source read so far, q given the whole source. It is trained last, with all other weights frozen (`policy_loss`). At
inference the model reads on while the stability is below a threshold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from simulmt.config import require
from simulmt.model.layers import (
    FRAMES_PER_CHUNK,
    Batch,
    DecoderLayer,
    Embedding,
    Encoder,
    KeysValues,
    KeyValueBuffer,
    Loss,
    at_least_float32,
    check_delay,
    check_sizes,
    check_tokens,
    compiled_on_gpu,
    length_mask,
    look_ahead_mask,
    project_and_loss,
    without_dropout,
)
from simulmt.text import START


@dataclass(frozen=True)
class Seq2SeqConfig:
    """Sizes of the encoder-decoder; defaults are the paper's. `causal` makes it a wait-k model."""

    source_vocabulary: int
    target_vocabulary: int
    causal: bool = False
    width: int = 512
    inner: int = 2048
    heads: int = 8
    encoder_layers: int = 6
    decoder_layers: int = 6
    dropout: float = 0.1
    policy_inner: int = 0  # hidden width of the read/write policy; 0 for none

    def __post_init__(self) -> None:
        require(self.encoder_layers >= 1, f"encoder_layers must be at least 1, got {self.encoder_layers}")
        require(self.decoder_layers >= 1, f"decoder_layers must be at least 1, got {self.decoder_layers}")
        require(self.policy_inner >= 0, f"policy_inner must not be negative, got {self.policy_inner}")
        require(self.causal or not self.policy_inner, "policy_inner is for wait-k models")
        check_sizes(self.width, self.heads, self.dropout)


class Policy(nn.Module):
    """Predict the stability of the next token from the decoder state."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.expand, self.contract = nn.Linear(width, inner), nn.Linear(inner, 1)

    def forward(self, states: Float[Tensor, "*B D"]) -> Float[Tensor, " *B"]:
        """Return the logit of the stability."""
        return cast(Tensor, self.contract(F.relu(self.expand(states))))[..., 0]


class DecoderState(NamedTuple):
    """State of a partial translation, with the projected source."""

    context: tuple[KeysValues, ...]  # the source states, per layer
    past: tuple[KeyValueBuffer, ...]  # the target tokens written so far, per layer
    source_mask: Tensor | None  # [B S], True on tokens; None without padding


class DecodingPositions(NamedTuple):
    """Positions of the sentences of a batch, if they differ."""

    written: Int[Tensor, " B"]
    seen: Int[Tensor, " B"]  # visible source tokens


class Seq2SeqModel(nn.Module):
    """Transformer encoder-decoder with a tied output layer."""

    def __init__(
        self,
        encoder: Encoder,
        decoder_layers: Sequence[DecoderLayer],
        target_embedding: Embedding,
        policy: Policy | None = None,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.layers: Sequence[DecoderLayer] = nn.ModuleList(decoder_layers)  # type: ignore[assignment]
        self.final_norm = nn.LayerNorm(target_embedding.embedding_dim)
        self.target_embedding = target_embedding  # tied with the output layer
        self.dropout = nn.Dropout(encoder.dropout.p)
        self.policy = policy

    @staticmethod
    def build(config: Seq2SeqConfig) -> Seq2SeqModel:
        sizes = (config.width, config.inner, config.heads)
        encoder = Encoder(config.source_vocabulary, *sizes, config.encoder_layers, config.dropout, config.causal)
        layers = [DecoderLayer(*sizes, config.dropout) for _ in range(config.decoder_layers)]
        embedding = Embedding(config.target_vocabulary, config.width)
        policy = Policy(config.width, config.policy_inner) if config.policy_inner else None
        return Seq2SeqModel(encoder, layers, embedding, policy)

    def forward(
        self,
        source: Int[Tensor, "B S"],
        source_lengths: Int[Tensor, " B"],
        target: Int[Tensor, "B T"],
        delay: int | None = None,
    ) -> Float[Tensor, "B T V"]:
        """Return the logits of every target token given the previous ones; with `delay`, under wait-k."""
        H, mask = self._source_states(source, source_lengths)
        check_tokens(target, self.target_embedding.num_embeddings, "target")
        return self.decode(H, mask, target, delay) @ self.target_embedding.weight.T

    def loss(
        self, batch: Batch, delay: int | None = None, smoothing: float = 0.1, rates: Float[Tensor, " B"] | None = None
    ) -> Loss:
        """Return the summed cross entropy of a batch; `rates` are source tokens read per target token (default: 1)."""
        H, mask = self._source_states(batch.source, batch.source_lengths)
        check_tokens(batch.target, self.target_embedding.num_embeddings, "target")
        return self.loss_of_states(H, mask, batch, delay, smoothing, rates)

    def loss_of_states(
        self,
        H: Float[Tensor, "B S D"],
        source_mask: Tensor | None,
        batch: Batch,
        delay: int | None,
        smoothing: float,
        rates: Float[Tensor, " B"] | None = None,
    ) -> Loss:
        """Return the loss, given the source states."""
        target, target_lengths = batch.target, batch.target_lengths
        states = self.decode(H, source_mask, target, delay, rates).flatten(0, 1)[:, None]  # [B*T 1 D]
        inside = length_mask(target_lengths, target.shape[1], target.device)
        weights = torch.ones_like(target, dtype=torch.float32) if inside is None else inside.float()
        weights = weights.flatten()[:, None].to(at_least_float32(states).dtype)
        labels = target.flatten()[:, None]

        def align(log_probs: Float[Tensor, "N 1 1"]) -> tuple[Float[Tensor, ""], Float[Tensor, "N 1 1"]]:
            """Return the negative log-likelihood and posterior of frames with one known label each."""
            return -(log_probs[:, :, 0] * weights).sum(), weights[:, :, None]

        total, negative = project_and_loss(states, self.target_embedding.weight, labels, weights, align, smoothing)
        tokens = torch.as_tensor(int(target_lengths.sum()), device=target.device)
        return Loss(total, negative, tokens, torch.zeros_like(tokens))

    @torch.no_grad()
    def scores(self, batch: Batch, source_of: Int[Tensor, " N"], delay: int | None = None) -> Float[Tensor, " N"]:
        """Return the mean log-probability per token of each target, given source `source_of[n]` of the batch.

        Several targets may share a source, which is then encoded only once.
        """
        H, mask = self._source_states(batch.source, batch.source_lengths)
        check_tokens(batch.target, self.target_embedding.num_embeddings, "target")
        states = self.decode(H[source_of], None if mask is None else mask[source_of], batch.target, delay)
        chunks = (x.flatten(0, 1).split(FRAMES_PER_CHUNK) for x in (states, batch.target[:, :, None]))
        table = self.target_embedding.weight.T
        log_probs = [_label_log_probs(part @ table, labels) for part, labels in zip(*chunks, strict=True)]
        lengths = batch.target_lengths.to(H.device, non_blocking=True)
        inside = torch.arange(batch.target.shape[1], device=H.device) < lengths[:, None]
        return torch.cat(log_probs).view_as(inside).where(inside, 0.0).sum(-1) / lengths

    def policy_loss(self, batch: Batch, delay: int, rates: Float[Tensor, " B"] | None = None) -> Loss:
        """Return the summed cross entropy of the predicted stability; only the policy gets gradients."""
        assert self.policy is not None, "a model without a policy"
        states, stability = self.stability(batch, delay, rates)
        losses = F.binary_cross_entropy_with_logits(self.policy(states).float(), stability, reduction="sum")
        tokens = torch.as_tensor(len(states), device=states.device)
        return Loss(losses, losses.detach(), tokens, torch.zeros_like(tokens))

    @torch.no_grad()
    def stability(
        self, batch: Batch, delay: int, rates: Float[Tensor, " B"] | None = None
    ) -> tuple[Float[Tensor, "N D"], Float[Tensor, " N"]]:
        """Return the decoder states of all N target tokens under wait-k, and the stability of each."""
        with without_dropout(self.encoder, self.dropout, *self.layers):
            H, mask = self._source_states(batch.source, batch.source_lengths)
            partial, whole = self.decode(H, mask, batch.target, delay, rates), self.decode(H, mask, batch.target, None)
        inside = length_mask(batch.target_lengths, batch.target.shape[1], H.device)
        states, whole = (x.flatten(0, 1) if inside is None else x[inside] for x in (partial, whole))
        table = self.target_embedding.weight.T
        overlaps = [
            torch.minimum(*(at_least_float32(x @ table).softmax(-1) for x in chunk)).sum(-1)
            for chunk in zip(states.split(FRAMES_PER_CHUNK), whole.split(FRAMES_PER_CHUNK), strict=True)
        ]
        return states, torch.cat(overlaps).clamp(0, 1)

    def _source_states(self, source: Tensor, lengths: Tensor) -> tuple[Float[Tensor, "B S D"], Tensor | None]:
        """Encode whole sentences; return their states and their mask."""
        check_tokens(source, self.encoder.embedding.num_embeddings, "source")
        mask = length_mask(lengths, source.shape[1], source.device)
        return self.encoder(source, mask), mask

    def decode(
        self,
        H: Float[Tensor, "B S D"],
        source_mask: Tensor | None,
        target: Int[Tensor, "B T"],
        delay: int | None,
        rates: Float[Tensor, " B"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """Return the decoder states that predict each target token, given the source states."""
        x = self.dropout(self.target_embedding.embed(F.pad(target[:, :-1], (1, 0), value=START)))
        context_mask = _context_mask(source_mask, target.shape[1], H.shape[1], 0, delay, H.device, rates)
        for layer in self.layers:
            x, _ = layer(x, layer.cross_attention.project(H), context_mask, causal=True)
        return self.final_norm(x)

    def encode(self, source: Int[Tensor, "B S"], source_lengths: Int[Tensor, " B"], positions: int) -> DecoderState:
        """Encode whole sentences; return the initial decoder state, with room for `positions` target tokens."""
        return self.start(*self._source_states(source, source_lengths), positions)

    def start(self, H: Float[Tensor, "B S D"], source_mask: Tensor | None, positions: int) -> DecoderState:
        """Return the initial decoder state, given the source states."""
        context = tuple(layer.cross_attention.project(H) for layer in self.layers)
        return DecoderState(context, tuple(KeyValueBuffer.like(each, positions) for each in context), source_mask)

    def step(
        self,
        token: Int[Tensor, "B K"],
        state: DecoderState,
        delay: int | None = None,
        visible: Bool[Tensor, "B K L"] | None = None,
        positions: DecodingPositions | None = None,
        rates: Float[Tensor, " B"] | None = None,
    ) -> tuple[Float[Tensor, "BK V"], DecoderState]:
        """Feed `token` (START at first); return the logits of the next token and the new state.

        The visible source is given by the wait-k policy of `delay` and `rates`, or by `positions`.

        K hypotheses of a sentence share one cache, K tokens per step; `visible` says which of these L tokens, including
        the new ones, belong to which hypothesis. When a hypothesis continues another, only `visible` changes.
        """
        B, K = token.shape
        S = state.context[0].length
        position: int | Tensor
        if positions is None:
            position = state.past[0].length // K
            mask = _context_mask(state.source_mask, 1, S, position, delay, token.device, rates)
        else:
            position = positions.written.repeat_interleave(K)[:, None]
            mask = (torch.arange(S, device=token.device) < positions.seen[:, None])[:, None, None]
        x = self.target_embedding.embed(token.reshape(-1, 1), position).view(B, K, -1)
        past = []
        for layer, context, before in zip(self.layers, state.context, state.past, strict=True):
            x, own = layer(x, context, mask, None if visible is None else visible[:, None], past=before)
            past.append(own)
        logits = self.final_norm(x).flatten(0, 1) @ self.target_embedding.weight.T
        return logits, state._replace(past=tuple(past))


@compiled_on_gpu
def _label_log_probs(logits: Float[Tensor, "N V"], labels: Int[Tensor, "N 1"]) -> Float[Tensor, "N 1"]:
    wide = at_least_float32(logits)
    return wide.gather(-1, labels) - wide.logsumexp(-1, keepdim=True)


def proportional_rates(batch: Batch) -> Float[Tensor, " B"]:
    """Return the source tokens per target token of each sentence, at least 1."""
    rates = batch.source_lengths.float() / batch.target_lengths.float()
    return rates.clamp(min=1.0).to(batch.source.device, non_blocking=True)


def _context_mask(
    source_mask: Tensor | None,
    queries: int,
    source: int,
    first: int,
    delay: int | None,
    device: torch.device,
    rates: Float[Tensor, " B"] | None = None,
) -> Bool[Tensor, "B 1 T S"] | None:
    """Return a mask for target step t to attend to source tokens before rate * t + k, without padding."""
    padding = None if source_mask is None else source_mask[:, None, None, :]
    if delay is None:
        return padding
    check_delay(delay)
    if rates is None:
        policy = look_ahead_mask(queries, source, first, delay, device)[None, None]
    else:
        t = torch.arange(first, first + queries, device=device)
        seen = (rates[:, None] * t).floor() + delay  # [B T]
        policy = (torch.arange(source, device=device) < seen[:, :, None])[:, None]
    return policy if padding is None else policy & padding
