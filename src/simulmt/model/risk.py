"""Minimum-risk training of a transducer, on the inference path.

Maximum likelihood requires the order of the reference, which a simultaneous translator cannot always produce. Here the
model samples a few translations of each sentence and is trained on their n-gram F score against the reference (n = 1 to
4 by default), in which n-grams may match anywhere: short output lowers recall, repetition lowers precision.

The gradient is REINFORCE with reduced variance: each symbol is rewarded for the n-grams that it completes
(`ngram_rewards`), later rewards are discounted, and the baseline is the mean of the other samples at the same frame.

Axis letters: B batch, N samples, U frames, M symbols written, T labels, V vocabulary, D width, R rank of the context.
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
from simulmt.model.frame_decoder import FrameDecoder
from simulmt.model.layers import Batch, check_tokens, compiled_on_gpu
from simulmt.model.output import GradientsInForward, Loss, at_least_float32, autocast_disabled, sentence_chunks
from simulmt.model.transducer import TransducerModel, wide_product
from simulmt.text import BLANK, PAD, SPACE

FRAMES_PER_CHUNK = 4096
FRAMES_PER_SAMPLING_CHUNK = 131_072
BEGIN = -1  # precedes the first symbol; not in the vocabulary


@dataclass(frozen=True)
class RiskConfig:
    """Settings of sampling and rewards."""

    samples: int = 4  # translations sampled per sentence
    discount: float = 0.95  # of rewards, per frame
    order_weights: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)  # weights of n-grams, n = 1, 2, ...
    beta: float = 1.0  # of the F score; above 1, recall counts more than precision
    emphasis: str = ""  # characters whose symbols get emphasis_weight, such as digits
    emphasised_words: tuple[str, ...] = ()  # words that get emphasis_weight, such as "not"; case-insensitive
    emphasis_weight: float = 2.0
    punctuation: str = ""  # characters that count only in n-grams of two or more: a lone full stop matches anywhere
    likelihood_weight: float = 0.0  # of the transducer loss added: sampling alone never finds words of low probability

    def __post_init__(self) -> None:
        require(self.samples >= 2, f"samples must be at least 2, got {self.samples}")
        require(0 <= self.discount <= 1, f"discount must be in 0..1, got {self.discount}")
        require(
            min(self.order_weights, default=-1.0) >= 0 and sum(self.order_weights) > 0,
            f"order_weights must not be negative, and not all 0, got {self.order_weights}",
        )
        require(self.beta > 0, f"beta must be above 0, got {self.beta}")
        require(self.emphasis_weight > 0, f"emphasis_weight must be above 0, got {self.emphasis_weight}")
        require(self.likelihood_weight >= 0, f"likelihood_weight must not be negative, got {self.likelihood_weight}")

    def weights(self, pieces: Sequence[str]) -> Float[Tensor, "2 V"]:
        """Return the weight of each symbol of a vocabulary: by itself, and at the end of a longer n-gram."""
        characters, words = set(self.emphasis), {word.lower() for word in self.emphasised_words}
        emphasised = (bool(characters & set(piece)) or piece.strip(SPACE).lower() in words for piece in pieces)
        weights = torch.tensor([self.emphasis_weight if each else 1.0 for each in emphasised])
        is_mark = torch.tensor([bool(set(self.punctuation) & set(piece)) for piece in pieces])
        return torch.stack([weights.masked_fill(is_mark, 0.0), weights])


DEFAULT = RiskConfig()


def risk_loss(
    model: TransducerModel,
    batch: Batch,
    delay: int = 1,
    config: RiskConfig = DEFAULT,
    weights: Float[Tensor, "2 V"] | None = None,
) -> Loss:
    """Return 1 - F of sampled translations, weighted by the number of labels of each sentence.

    The transducer loss is added with `config.likelihood_weight`.
    """
    source, source_lengths, target, target_lengths = batch
    check_tokens(target, model.target_embedding.num_embeddings, "target")
    frames = model.frames(model.encode(source, source_lengths, delay))
    frame_lengths, lengths = ((each.to(source.device)) for each in (source_lengths * model.mu, target_lengths))
    inside = torch.arange(frames.shape[1], device=source.device) < frame_lengths[:, None]  # [B U]
    if model.decoder is not None:
        model.decoder.eval()  # samples and their probabilities must come from the same distribution: no dropout
    with torch.no_grad():
        symbols = model.write(frames, samples=config.samples, chunk=FRAMES_PER_SAMPLING_CHUNK)
        symbols = symbols.masked_fill(~inside[:, None], BLANK)
        drawn = SampledTranslations.of(symbols)
        orders, beta = config.order_weights, config.beta
        rewards, scores = ngram_rewards(drawn.tokens, drawn.counts, target, lengths, weights, orders, beta)
        advantages = compute_advantages(drawn.at_frames(rewards), config.discount) * inside[:, None]
    risk = ((1 - scores.mean(1)) * lengths).sum()
    if model.decoder is None:
        contexts = _contexts_of_frames(model, drawn)
        sampled = (frames, model.target_embedding.weight, contexts, model.context.table, symbols, advantages)
        total = policy_gradient(*sampled, risk)
    else:
        decoded = _decoded(model, model.decoder, frames, symbols, advantages)
        total = policy_gradient(*decoded, risk, FRAMES_PER_CHUNK * config.samples)
    if config.likelihood_weight > 0:
        total = total + config.likelihood_weight * model.loss_of_frames(frames, batch, smoothing=0.0).total
    return Loss(total, risk, lengths.sum(), torch.zeros_like(lengths[0]))


def _contexts_of_frames(model: TransducerModel, drawn: SampledTranslations) -> Float[Tensor, "B N U R"]:
    contexts = model.context(model.context.histories(drawn.tokens), model.target_embedding.weight)  # [B N M+1 R]
    return contexts.gather(2, drawn.before[..., None].expand(-1, -1, -1, contexts.shape[-1]))


def _decoded(
    model: TransducerModel,
    decoder: FrameDecoder,
    frames: Float[Tensor, "B U D"],
    symbols: Int[Tensor, "B N U"],
    advantages: Float[Tensor, "B N U"],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return arguments of `policy_gradient` with every sample as a sentence of its own, and without a context."""
    embedding, rows = model.target_embedding.weight, symbols.flatten(0, 1)
    decoded = decoder(frames.repeat_interleave(symbols.shape[1], 0), rows, embedding)
    no_context, no_table = decoded.new_zeros(*rows.shape, 1)[:, None], embedding.new_zeros(len(embedding), 1)
    return decoded, embedding, no_context, no_table, rows[:, None], advantages.flatten(0, 1)[:, None]


class SampledTranslations(NamedTuple):
    """Sampled translations: their symbols, and the frames that wrote them."""

    tokens: Int[Tensor, "B N M"]  # padded with PAD
    counts: Int[Tensor, "B N"]
    before: Int[Tensor, "B N U"]  # number of symbols written before each frame
    writes: Bool[Tensor, "B N U"]

    @staticmethod
    def of(symbols: Int[Tensor, "B N U"]) -> SampledTranslations:
        writes = symbols != BLANK
        after = writes.cumsum(-1)
        before, counts = after - writes.long(), after[..., -1]
        longest = max(1, int(counts.max()))
        tokens = torch.full((*symbols.shape[:2], longest + 1), PAD, device=symbols.device)
        tokens.scatter_(2, before.where(writes, longest), symbols)  # blanks go to the extra last column
        return SampledTranslations(tokens[..., :longest], counts, before, writes)

    def at_frames(self, values: Float[Tensor, "B N M"]) -> Float[Tensor, "B N U"]:
        """Scatter values of symbols to the frames that wrote them; zero elsewhere."""
        return values.gather(2, self.before.clamp(max=values.shape[2] - 1)) * self.writes


def ngram_rewards(
    tokens: Int[Tensor, "B N M"],
    counts: Int[Tensor, "B N"],
    target: Int[Tensor, "B T"],
    lengths: Int[Tensor, " B"],
    weights: Float[Tensor, "2 V"] | None = None,
    order_weights: Sequence[float] = (1.0, 1.0, 1.0, 1.0),
    beta: float = 1.0,
) -> tuple[Float[Tensor, "B N M"], Float[Tensor, "B N"]]:
    """Return the change of F by each symbol, times the number of labels, and F, the weighted mean over n.

    F = (1 + beta²) matched / total, with total = written + beta² labels; an n-gram has the weight of its last symbol. A
    symbol adds (1 + beta²) / total if it completes an n-gram that matches the reference (clipped counts), and costs
    F / total in any case.
    """
    written = torch.arange(tokens.shape[2], device=tokens.device) < counts[..., None]  # [B N M]
    labelled = torch.arange(target.shape[1], device=target.device) < lengths[:, None]  # [B T]
    rewards, scores = torch.zeros(tokens.shape, device=tokens.device), torch.zeros(counts.shape, device=tokens.device)
    # A symbol in excess of the reference completes no n-gram. Otherwise it pays to write a word twice: early, and again
    # where the reference has it.
    fits = _matched(tokens, written, target, labelled)
    for n, share in enumerate(order_weights, start=1):
        by_symbol = None if weights is None else weights[min(n, len(weights)) - 1]
        weight = written.float() if by_symbol is None else by_symbol[tokens] * written  # [B N M]
        label_weight = labelled.float() if by_symbol is None else by_symbol[target] * labelled  # [B T]
        total = (weight.sum(-1) + beta**2 * label_weight.sum(-1, keepdim=True)).clamp(min=1)  # [B N]
        gains = (1 + beta**2) * fits * _matched(_ngrams(tokens, n), written, _ngrams(target, n), labelled)
        score = (gains * weight).sum(-1) / total
        rewards += share * (gains - score[..., None]) * weight / total[..., None]
        scores += share * score
    return rewards * lengths[:, None, None] / sum(order_weights), scores / sum(order_weights)


def _ngrams(tokens: Int[Tensor, "*B M"], n: int) -> Int[Tensor, "*B M"]:
    """Return a hash of the n-gram that ends at each symbol."""
    padded = F.pad(tokens, (n - 1, 0), value=BEGIN)
    ids = torch.zeros_like(tokens)
    for shift in range(n):
        ids = ids * 1_000_003 + padded[..., shift : shift + tokens.shape[-1]] + 2
    return ids


def _matched(
    drawn: Int[Tensor, "B N M"], written: Bool[Tensor, "B N M"], reference: Tensor, labelled: Bool[Tensor, "B T"]
) -> Float[Tensor, "B N M"]:
    """Return 1 where a written n-gram matches the reference, with clipped counts."""
    available = ((drawn[..., None] == reference[:, None, None, :]) & labelled[:, None, None, :]).sum(-1)
    earlier = (drawn[..., :, None] == drawn[..., None, :]).tril(-1).sum(-1)
    return ((earlier < available) & written).float()


def compute_advantages(rewards: Float[Tensor, "B N U"], discount: float) -> Float[Tensor, "B N U"]:
    """Return the discounted return of each frame, minus the mean over the other samples."""
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
    """Return `risk`, with the gradient of -advantages * log p(symbols), without storing frames x V of all sentences."""
    with autocast_disabled(frames, contexts) as (frames, contexts):
        return _PolicyGradient.apply(  # type: ignore[no-untyped-call]
            frames, table, contexts, context_table, symbols, advantages, risk, chunk
        )


class _PolicyGradient(GradientsInForward):
    """The gradient of the scores of a frame is advantage * (p - onehot(sampled symbol))."""

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
        chunk: int,
    ) -> Tensor:
        wide = torch.promote_types(frames.dtype, torch.float32)
        advantages = advantages.to(wide)
        half, context_half = table.to(frames.dtype), context_table.to(frames.dtype)
        grad_frames, grad_contexts = torch.empty_like(frames), torch.empty_like(contexts)
        grad_table, grad_context_table = (torch.zeros_like(each, dtype=wide) for each in (table, context_table))
        for rows in sentence_chunks(frames, chunk):
            x, c, chosen = frames[rows], contexts[rows], symbols[rows]
            others, difference = _grad_scores(x @ half.T, c @ context_half.T, chosen, advantages[rows])
            summed = others.sum(1)  # [B U V]
            d = difference[..., None]
            grad_frames[rows] = wide_product(summed, half) + (d * half[chosen]).sum(1)
            grad_contexts[rows] = wide_product(others.flatten(0, 2), context_half).view_as(c) + d * context_half[chosen]
            grad_table += wide_product(summed.flatten(0, 1).T, x.flatten(0, 1))
            grad_context_table += wide_product(others.flatten(0, 2).T, c.flatten(0, 2))
            grad_table.index_add_(0, chosen.flatten(), (d * x[:, None]).flatten(0, 2))
            grad_context_table.index_add_(0, chosen.flatten(), (d * c).flatten(0, 2))
        ctx.save_for_backward(
            grad_frames, grad_table.to(table.dtype), grad_contexts, grad_context_table.to(table.dtype)
        )
        return risk.clone()


@compiled_on_gpu
def _grad_scores(
    a: Float[Tensor, "B U V"], b: Float[Tensor, "B N U V"], chosen: Int[Tensor, "B N U"], advantages: Tensor
) -> tuple[Float[Tensor, "B N U V"], Float[Tensor, "B N U"]]:
    """Return the gradient of the scores of symbols that were not sampled, and in fp32 of those that were."""
    scores = at_least_float32(a)[:, None] + at_least_float32(b)
    p = (scores - scores.logsumexp(-1, keepdim=True)).exp()
    is_chosen = torch.arange(a.shape[-1], device=a.device) == chosen[..., None]
    others = torch.where(is_chosen, 0.0, p * advantages[..., None]).to(a.dtype)
    return others, advantages * ((p * is_chosen).sum(-1) - 1)
