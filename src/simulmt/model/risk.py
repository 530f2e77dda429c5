"""Objectives of a second training stage, on the inference path: minimum risk, and the bigram loss of CTC models.

Maximum likelihood requires the order of the reference, which a simultaneous translator cannot always produce. Here
n-grams may match anywhere, so the order of phrases is free: short output lowers recall, repetition lowers precision.

**Minimum risk** of transducers and wait-k models: the model samples a few translations of each sentence and is trained
on their n-gram F score against the reference (n = 1 to 4 by default). The gradient is REINFORCE with reduced variance:
each symbol is rewarded for the n-grams that it completes (`ngram_rewards`) and for later ones, which are discounted for
transducers; the baseline is the mean of the other samples at the same frame, or for wait-k at the same target position.

**The bigram loss** is 1 - F1 between the bigrams of the reference and the expected bigrams of the model over all
alignments. A bigram (u, v) is written at frames i < j if frame i emits u, frame j emits v, and all frames between emit
the blank:

    E[u v] = sum over i < j of p_i(u) * p_j(v) * product over i < m < j of p_m(blank)

except for u = v at j = i + 1, where CTC merges the two. A start symbol in an extra first frame gives the first token a
bigram as well. Apart from the normalisers, only the probability that frames i and i + 1 emit the same symbol needs the
whole vocabulary. It is summed chunk by chunk, and again for the gradient, so frames x V is never stored.

Axis letters: B batch, N samples, U frames, M symbols written, S source, T labels, C label columns (the blank and the
labels), V vocabulary, D width, R rank of the context.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from simulmt.config import require
from simulmt.model.ctc import Alignments, CTCModel
from simulmt.model.layers import (
    FRAMES_PER_CHUNK,
    Batch,
    GradientsInForward,
    Loss,
    at_least_float32,
    autocast_disabled,
    check_tokens,
    compiled_on_gpu,
    first_occurrences,
    length_mask,
    sentence_chunks,
    softmax_rows,
    without_dropout,
)
from simulmt.model.seq2seq import DecoderState, Seq2SeqModel
from simulmt.model.transducer import TransducerModel, wide_product
from simulmt.text import BLANK, END, PAD, SPACE, SPECIAL_SYMBOLS, START

_FRAMES_PER_GRADIENT_CHUNK = 4096
_FRAMES_PER_SAMPLING_CHUNK = 131_072
_BEGIN = -1  # precedes the first symbol; not in the vocabulary


@dataclass(frozen=True)
class RiskConfig:
    """Settings of sampling and rewards."""

    samples: int = 4  # translations sampled per sentence
    temperature: float = 1.0  # of wait-k samples; below 1 they are closer to the greedy translation
    discount: float = 0.95  # of rewards, per frame of a transducer
    order_weights: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)  # weights of n-grams, n = 1, 2, ...
    beta: float = 1.0  # of the F score; above 1, recall counts more than precision
    emphasis: str = ""  # characters whose symbols get emphasis_weight, such as digits
    emphasised_words: tuple[str, ...] = ()  # words that get emphasis_weight, such as "not"; case-insensitive
    emphasis_weight: float = 2.0
    punctuation: str = ""  # characters that count only in n-grams of two or more: a lone full stop matches anywhere
    likelihood_weight: float = 0.0  # of the negative log-likelihood, added: sampling never finds unlikely words

    def __post_init__(self) -> None:
        require(self.samples >= 2, f"samples must be at least 2, got {self.samples}")
        require(self.temperature > 0, f"temperature must be above 0, got {self.temperature}")
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
    with torch.no_grad():
        symbols = model.write(frames, samples=config.samples, chunk=_FRAMES_PER_SAMPLING_CHUNK)
        symbols = symbols.masked_fill(~inside[:, None], BLANK)
        drawn = SampledTranslations.of(symbols)
        orders, beta = config.order_weights, config.beta
        rewards, scores = ngram_rewards(drawn.tokens, drawn.counts, target, lengths, weights, orders, beta)
        advantages = compute_advantages(drawn.at_frames(rewards), config.discount) * inside[:, None]
    embedding = model.target_embedding.weight
    contexts = model.context(model.context.histories(drawn.tokens), embedding)  # [B N M+1 R]
    contexts = contexts.gather(2, drawn.before[..., None].expand(-1, -1, -1, contexts.shape[-1]))  # [B N U R]
    risk = ((1 - scores.mean(1)) * lengths).sum()
    total = policy_gradient(frames, embedding, contexts, model.context.table, symbols, advantages, risk)
    if config.likelihood_weight > 0:
        total = total + config.likelihood_weight * model.loss_of_frames(frames, batch, smoothing=0.0).total
    return Loss(total, risk, lengths.sum(), torch.zeros_like(lengths[0]))


def wait_k_risk_loss(
    model: Seq2SeqModel,
    batch: Batch,
    delay: int | None = 1,
    config: RiskConfig = DEFAULT,
    weights: Float[Tensor, "2 V"] | None = None,
    rates: Float[Tensor, " B"] | None = None,
) -> Loss:
    """Return `risk_loss` of a wait-k model; `rates` are source tokens read per target token (default: 1).

    Samples, and the gradient, are those of the distribution at `config.temperature`. At temperature 1 almost every
    sample has a wrong word, and the model learns to continue after wrong words.
    """
    source, source_lengths, target, target_lengths = batch
    check_tokens(target, model.target_embedding.num_embeddings, "target")
    mask = length_mask(source_lengths, source.shape[1], source.device)
    H, lengths = model.encoder(source, mask), target_lengths.to(source.device)
    copies = torch.arange(len(source), device=source.device).repeat_interleave(config.samples)
    copied, copied_mask = H[copies], None if mask is None else mask[copies]
    copied_rates = None if rates is None else rates[copies]
    weights = torch.ones(2, model.target_embedding.num_embeddings) if weights is None else weights.clone()
    weights = weights.to(source.device)
    weights[:, END] = 0  # every sample has one, so as a match it would reward short translations
    with without_dropout(model.dropout, *model.layers):  # samples and their probabilities have one distribution
        longest = int(1.25 * target.shape[1]) + 4
        start = model.start(copied.detach(), copied_mask, longest)
        tokens, counts = sample_tokens(model, start, delay, longest, config.temperature, copied_rates)
        drawn, written = (each.unflatten(0, (len(source), config.samples)) for each in (tokens, counts))
        orders, beta = config.order_weights, config.beta
        rewards, scores = ngram_rewards(drawn, written, target, lengths, weights, orders, beta)
        inside = torch.arange(tokens.shape[1], device=source.device) < counts[:, None]  # [BN M]
        # No discount: every token written would postpone the rewards of those after it, and it would pay to omit words.
        advantages = compute_advantages(rewards, 1.0).flatten(0, 1) * inside
        states = model.decode(copied, copied_mask, tokens, delay, copied_rates) / config.temperature
    risk = ((1 - scores.mean(1)) * lengths).sum()
    table = model.target_embedding.weight
    no_context, no_table = states.new_zeros(*tokens.shape, 1)[:, None], table.new_zeros(len(table), 1)
    sampled = (states, table, no_context, no_table, tokens[:, None], advantages[:, None])
    total = policy_gradient(*sampled, risk, _FRAMES_PER_GRADIENT_CHUNK * config.samples)
    if config.likelihood_weight > 0:
        likelihood = model.loss_of_states(H, mask, batch, delay, smoothing=0.0, rates=rates)
        total = total + config.likelihood_weight * likelihood.total
    return Loss(total, risk, lengths.sum(), torch.zeros_like(lengths[0]))


@torch.no_grad()
def sample_tokens(
    model: Seq2SeqModel,
    state: DecoderState,
    delay: int | None,
    longest: int,
    temperature: float = 1.0,
    rates: Float[Tensor, " B"] | None = None,
) -> tuple[Int[Tensor, "B M"], Int[Tensor, " B"]]:
    """Draw a translation of each sentence under the wait-k policy; return its tokens, END included, and their count."""
    keys = state.context[0].keys
    token = torch.full((len(keys), 1), START, device=keys.device)
    ended = torch.zeros_like(token, dtype=torch.bool)
    written = []
    # Layers are compiled for whole sentences; here shapes change at every step.
    with torch.compiler.set_stance("force_eager") if keys.is_cuda else nullcontext():
        for _ in range(longest):
            logits, state = model.step(token, state, delay, rates=rates)
            token = _draw(logits / temperature)[:, None].masked_fill(ended, PAD)
            written.append(token)
            ended = ended | (token == END)
            if len(written) % 8 == 0 and bool(ended.all()):  # asking at every step would stall the GPU
                break
    tokens = torch.cat(written, 1)
    return tokens, (tokens != PAD).sum(1)


@compiled_on_gpu
def _draw(logits: Float[Tensor, "B V"]) -> Int[Tensor, " B"]:
    """Draw an allowed symbol (Gumbel-max trick)."""
    scores = at_least_float32(logits)
    symbols = torch.arange(scores.shape[-1], device=scores.device)
    scores = scores.masked_fill((symbols < len(SPECIAL_SYMBOLS)) & (symbols != END), -torch.inf)
    return (scores - torch.log(-torch.log(torch.rand_like(scores).clamp(1e-20, 1 - 1e-7)))).argmax(-1)


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
    """Return the change in F due to each symbol, times the number of labels, and F, the weighted mean over n.

    F = (1 + beta²) matched / total, with total = written + beta² labels; an n-gram has the weight of its last symbol. A
    symbol adds (1 + beta²) / total if it completes an n-gram that matches the reference (clipped counts), and costs
    F / total in any case.
    """
    written = torch.arange(tokens.shape[2], device=tokens.device) < counts[..., None]  # [B N M]
    labelled = torch.arange(target.shape[1], device=target.device) < lengths[:, None]  # [B T]
    rewards, scores = torch.zeros(tokens.shape, device=tokens.device), torch.zeros(counts.shape, device=tokens.device)
    # A symbol in excess of the reference completes no n-gram. Otherwise it would pay to write a word twice: early, and
    # again where the reference has it.
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
    padded = F.pad(tokens, (n - 1, 0), value=_BEGIN)
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
    chunk: int = _FRAMES_PER_GRADIENT_CHUNK,
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
    emitted = F.pad(log_probs[:, :, 1:].exp() * inside[:, :, None], (1, 0, 1, 0))  # [B U+1 T+1]
    emitted = emitted + F.pad(torch.ones_like(emitted[:, :1, :1]), (0, emitted.shape[2] - 1, 0, emitted.shape[1] - 1))
    log_blank = F.pad(log_probs[:, :, 0].where(inside, 0.0), (1, 0), value=-torch.inf)
    written_at = 1 - log_blank.exp()
    paths = _blank_paths(log_blank)

    before = paths.transpose(1, 2) @ emitted  # [B U+1 T+1]: label t, then only blanks up to this frame
    expected = (before[:, :, :-1] * emitted[:, :, 1:]).sum(1)  # [B T]
    bigrams = torch.stack([F.pad(labels[:, :-1], (1, 0), value=_BEGIN), labels], -1)
    merged = (emitted[:, :-1, :-1] * emitted[:, 1:, 1:]).sum(1) * (bigrams[:, :, 0] == bigrams[:, :, 1])
    first, count = _occurrences(bigrams, alignments.label_lengths)
    matched = ((expected - merged).minimum(count) * first).sum(-1)

    all_pairs = (written_at[:, None, :] @ paths.transpose(1, 2) @ written_at[:, :, None]).flatten()
    return matched, all_pairs - same.sum(1)


def _blank_paths(log_blank: Float[Tensor, "B U"]) -> Float[Tensor, "B U U"]:
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
    and the next emit the same non-blank symbol, [B U].

    With p_i the softmax of frame i and same_i the sum of p_i(v) p_{i+1}(v), the gradient with respect to a logit of
    frame i is

        p_i(v) * (g_i p_{i+1}(v) + g_{i-1} p_{i-1}(v) - s_i),   s_i = g_i same_i + g_{i-1} same_{i-1} + d_i summed

    where g is the gradient with respect to `same`, and d, added in the label columns, that with respect to the
    log-probabilities. As in model/layers.py, the label columns are computed separately, in fp32.
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

            emitted = log_probs.exp() * inside[:, :, None]
            pull = after[:, :, None] * F.pad(emitted[:, 1:], (0, 0, 0, 1)) + before[:, :, None] * _previous(emitted)
            pull = pull * (columns != BLANK)[:, None, :] - shrink[:, :, None]
            grad_labels = emitted * pull * first_occurrences(columns)[:, None, :] + grad_log_probs
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
