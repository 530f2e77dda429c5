"""Minimum-risk training of a transducer, on the very path that inference takes.

The likelihood asks for the reference in its order, which a translator that may not wait cannot always give. Here the
model writes a few translations of each sentence, drawn from its own distribution, and learns from how many n-grams of
the reference each of them has, wherever they stand: the n-gram F score, n = 1 to 4 by default. Short output costs
recall, doubled output precision.

The gradient is REINFORCE with what lowers its variance: every symbol written is rewarded by the n-grams that it
completes (`ngram_rewards`), a choice answers for the rewards soon after it, and the mean of the other draws at the same
frame is the baseline.

Axis letters: B batch, N draws, U frames, M symbols written, T labels, V vocabulary, D width, R rank of the context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from simulmt.config import require
from simulmt.model.kernels import compiled_on_gpu
from simulmt.model.layers import check_tokens, length_mask
from simulmt.model.output import Loss, at_least_float32, own_precision
from simulmt.model.transducer import GradientsInForward, TransducerModel, wide_product
from simulmt.text import BLANK, PAD, SPACE

FRAMES_PER_CHUNK = 4096
FRAMES_PER_DRAW = 131_072
BEGIN = -1  # stands before the first symbol; no symbol of the vocabulary


@dataclass(frozen=True)
class RiskConfig:
    """How translations are drawn and rewarded."""

    samples: int = 4  # translations drawn of each sentence
    discount: float = 0.95  # how much less a choice answers for a reward one frame later
    order_weights: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)  # how much n-grams count, n = 1, 2, ...
    beta: float = 1.0  # of the F score; above 1, what is left out costs more than what is added
    emphasis: str = ""  # characters whose symbols count more, such as digits
    emphasised_words: tuple[str, ...] = ()  # pieces that count more, such as "not", in any case
    emphasis_weight: float = 2.0

    def __post_init__(self) -> None:
        require(self.samples >= 2, f"samples must be at least 2, got {self.samples}")
        require(0 <= self.discount <= 1, f"discount must be in 0..1, got {self.discount}")
        require(
            min(self.order_weights, default=-1.0) >= 0 and sum(self.order_weights) > 0,
            f"order_weights must not be negative, and not all 0, got {self.order_weights}",
        )
        require(self.beta > 0, f"beta must be above 0, got {self.beta}")
        require(self.emphasis_weight > 0, f"emphasis_weight must be above 0, got {self.emphasis_weight}")

    def weights(self, pieces: Sequence[str]) -> Float[Tensor, " V"]:
        """How much each symbol of a vocabulary counts."""
        characters, words = set(self.emphasis), {word.lower() for word in self.emphasised_words}
        emphasised = (bool(characters & set(piece)) or piece.strip(SPACE).lower() in words for piece in pieces)
        return torch.tensor([self.emphasis_weight if each else 1.0 for each in emphasised])


DEFAULT = RiskConfig()


def risk_loss(
    model: TransducerModel,
    source: Int[Tensor, "B S"],
    source_lengths: Int[Tensor, " B"],
    target: Int[Tensor, "B T"],
    target_lengths: Int[Tensor, " B"],
    delay: int = 1,
    config: RiskConfig = DEFAULT,
    weights: Float[Tensor, " V"] | None = None,
) -> Loss:
    """1 - F of the translations that the model draws, weighted by the labels of each sentence."""
    check_tokens(source, model.encoder.embedding.num_embeddings, "source")
    check_tokens(target, model.target_embedding.num_embeddings, "target")
    frames = model.frames(model.encoder(source, length_mask(source_lengths, source.shape[1], source.device), delay))
    frame_lengths, lengths = ((each.to(source.device)) for each in (source_lengths * model.mu, target_lengths))
    inside = torch.arange(frames.shape[1], device=source.device) < frame_lengths[:, None]  # [B U]
    with torch.no_grad():
        symbols = model.write(frames, samples=config.samples, chunk=FRAMES_PER_DRAW)
        symbols = symbols.masked_fill(~inside[:, None], BLANK)
        drawn = Drawn.of(symbols)
        orders, beta = config.order_weights, config.beta
        rewards, scores = ngram_rewards(drawn.tokens, drawn.counts, target, lengths, weights, orders, beta)
        advantages = advantages_of(drawn.by_frame(rewards), config.discount) * inside[:, None]
    embedding = model.target_embedding.weight
    contexts = model.context(model.context.histories(drawn.tokens), embedding)  # [B N M+1 R]
    contexts = contexts.gather(2, drawn.before[..., None].expand(-1, -1, -1, contexts.shape[-1]))
    risk = ((1 - scores.mean(1)) * lengths).sum()
    total = policy_gradient(frames, embedding, contexts, model.context.table, symbols, advantages, risk)
    return Loss(total, risk, lengths.sum(), torch.zeros_like(lengths[0]))


class Drawn(NamedTuple):
    """Translations as the symbols written, and the frames that wrote them."""

    tokens: Int[Tensor, "B N M"]  # PAD behind the last one
    counts: Int[Tensor, "B N"]
    before: Int[Tensor, "B N U"]  # how many symbols were written before each frame
    writes: Bool[Tensor, "B N U"]

    @staticmethod
    def of(symbols: Int[Tensor, "B N U"]) -> Drawn:
        writes = symbols != BLANK
        after = writes.cumsum(-1)
        before, counts = after - writes.long(), after[..., -1]
        longest = max(1, int(counts.max()))
        tokens = torch.full((*symbols.shape[:2], longest + 1), PAD, device=symbols.device)
        tokens.scatter_(2, before.where(writes, longest), symbols)  # what writes nothing goes behind the end
        return Drawn(tokens[..., :longest], counts, before, writes)

    def by_frame(self, values: Float[Tensor, "B N M"]) -> Float[Tensor, "B N U"]:
        """Values of symbols at the frames that wrote them, zero elsewhere."""
        return values.gather(2, self.before.clamp(max=values.shape[2] - 1)) * self.writes


def ngram_rewards(
    tokens: Int[Tensor, "B N M"],
    counts: Int[Tensor, "B N"],
    target: Int[Tensor, "B T"],
    lengths: Int[Tensor, " B"],
    weights: Float[Tensor, " V"] | None = None,
    order_weights: Sequence[float] = (1.0, 1.0, 1.0, 1.0),
    beta: float = 1.0,
) -> tuple[Float[Tensor, "B N M"], Float[Tensor, "B N"]]:
    """What each symbol adds to the F of its translation, times the labels; and that F, the weighted mean over n.

    F = (1 + beta²) matched / total with total = written + beta² labels, where an n-gram counts as much as its last
    symbol weighs. Another symbol adds (1 + beta²) / total to it if it completes an n-gram that the reference has (more
    often than it was written before), and takes F / total in any case.
    """
    written = torch.arange(tokens.shape[2], device=tokens.device) < counts[..., None]  # [B N M]
    labelled = torch.arange(target.shape[1], device=target.device) < lengths[:, None]  # [B T]
    weight = written.float() if weights is None else weights[tokens] * written  # [B N M]
    label_weight = labelled.float() if weights is None else weights[target] * labelled  # [B T]
    total = (weight.sum(-1) + beta**2 * label_weight.sum(-1, keepdim=True)).clamp(min=1)  # [B N]
    rewards, scores = torch.zeros_like(weight), torch.zeros_like(total)
    for n, share in enumerate(order_weights, start=1):
        gains = (1 + beta**2) * _matched(_ngrams(tokens, n), written, _ngrams(target, n), labelled)
        score = (gains * weight).sum(-1) / total
        rewards += share * (gains - score[..., None]) * weight / total[..., None]
        scores += share * score
    return rewards * lengths[:, None, None] / sum(order_weights), scores / sum(order_weights)


def _ngrams(tokens: Int[Tensor, "*B M"], n: int) -> Int[Tensor, "*B M"]:
    """A number for the n-gram that ends at each symbol, equal for equal n-grams."""
    padded = F.pad(tokens, (n - 1, 0), value=BEGIN)
    ids = torch.zeros_like(tokens)
    for shift in range(n):
        ids = ids * 1_000_003 + padded[..., shift : shift + tokens.shape[-1]] + 2
    return ids


def _matched(
    drawn: Int[Tensor, "B N M"], written: Bool[Tensor, "B N M"], reference: Tensor, labelled: Bool[Tensor, "B T"]
) -> Float[Tensor, "B N M"]:
    """One where an n-gram of the reference is written, no more often than the reference has it."""
    available = ((drawn[..., None] == reference[:, None, None, :]) & labelled[:, None, None, :]).sum(-1)
    earlier = (drawn[..., :, None] == drawn[..., None, :]).tril(-1).sum(-1)
    return ((earlier < available) & written).float()


def advantages_of(rewards: Float[Tensor, "B N U"], discount: float) -> Float[Tensor, "B N U"]:
    """How much better what follows each frame is than in the mean of the other draws."""
    U, N = rewards.shape[2], rewards.shape[1]
    distance = torch.arange(U, device=rewards.device)
    distance = distance[:, None] - distance[None, :]  # from a later frame to an earlier one
    decay = torch.where(distance >= 0, discount ** distance.clamp(min=0).float(), 0.0)
    with torch.autocast(rewards.device.type, enabled=False):
        returns = rewards @ decay
    return (returns - returns.mean(1, keepdim=True)) * (N / max(1, N - 1))


def policy_gradient(
    frames: Float[Tensor, "B U D"],
    table: Float[Tensor, "V D"],
    contexts: Float[Tensor, "B N U R"],
    context_table: Float[Tensor, "V R"],
    symbols: Int[Tensor, "B N U"],
    advantages: Float[Tensor, "B N U"],
    risk: Float[Tensor, ""],
    chunk: int = FRAMES_PER_CHUNK,
) -> Tensor:
    """`risk`, with the gradient of -advantages * log p(symbols), never storing frames x V of all sentences."""
    with own_precision(frames, contexts) as (frames, contexts):
        return _PolicyGradient.apply(  # type: ignore[no-untyped-call]
            frames, table, contexts, context_table, symbols, advantages, risk, max(1, chunk // frames.shape[1])
        )


class _PolicyGradient(GradientsInForward):
    """The gradient by the scores of a draw's frame is advantage * (p - 1 at the symbol that was drawn)."""

    @staticmethod
    def forward(
        ctx: Any,
        frames: Tensor,
        table: Tensor,
        contexts: Tensor,
        context_table: Tensor,
        symbols: Tensor,
        advantages: Tensor,
        risk: Tensor,
        sentences: int,
    ) -> Tensor:
        wide = torch.promote_types(frames.dtype, torch.float32)
        advantages = advantages.to(wide)
        half, context_half = table.to(frames.dtype), context_table.to(frames.dtype)
        by_frames, by_contexts = torch.empty_like(frames), torch.empty_like(contexts)
        by_table, by_context_table = (torch.zeros_like(each, dtype=wide) for each in (table, context_table))
        for start in range(0, len(frames), sentences):
            rows = slice(start, start + sentences)
            x, c, chosen = frames[rows], contexts[rows], symbols[rows]
            others, difference = _by_scores(x @ half.T, c @ context_half.T, chosen, advantages[rows])
            summed = others.sum(1)  # [B U V]
            d = difference[..., None]
            by_frames[rows] = wide_product(summed, half) + (d * half[chosen]).sum(1)
            by_contexts[rows] = wide_product(others.flatten(0, 2), context_half).view_as(c) + d * context_half[chosen]
            by_table += wide_product(summed.flatten(0, 1).T, x.flatten(0, 1))
            by_context_table += wide_product(others.flatten(0, 2).T, c.flatten(0, 2))
            by_table.index_add_(0, chosen.flatten(), (d * x[:, None]).flatten(0, 2))
            by_context_table.index_add_(0, chosen.flatten(), (d * c).flatten(0, 2))
        ctx.save_for_backward(by_frames, by_table.to(table.dtype), by_contexts, by_context_table.to(table.dtype))
        return risk.clone()


@compiled_on_gpu
def _by_scores(
    a: Float[Tensor, "B U V"], b: Float[Tensor, "B N U V"], chosen: Int[Tensor, "B N U"], advantages: Tensor
) -> tuple[Float[Tensor, "B N U V"], Float[Tensor, "B N U"]]:
    """The gradient by the scores: of the symbols that were not drawn, and, in fp32, of those that were."""
    scores = at_least_float32(a)[:, None] + at_least_float32(b)
    p = (scores - scores.logsumexp(-1, keepdim=True)).exp()
    is_chosen = torch.arange(a.shape[-1], device=a.device) == chosen[..., None]
    others = torch.where(is_chosen, 0.0, p * advantages[..., None]).to(a.dtype)
    return others, advantages * ((p * is_chosen).sum(-1) - 1)
