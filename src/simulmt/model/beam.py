"""Batched beam search over the encoder-decoder, with cached keys and values, for full sentences or wait-k.

With a beam of 1, Gumbel noise on the logits turns greedy search into sampling from the model.

All hypotheses of a sentence share one key-value cache; a hypothesis is a mask over it, so that the cache is never
reordered. The host synchronises with the device only every few steps, and then drops finished sentences.

Axis letters: B sentences still open, K beam, V vocabulary, L longest translation with END, C cached positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from simulmt.config import require
from simulmt.model.layers import KeysValues, at_least_float32, compiled_on_gpu
from simulmt.model.seq2seq import DecoderState, DecodingPositions, Seq2SeqModel
from simulmt.text import END, PAD, SPECIAL_SYMBOLS, START

CHECK_EVERY = 4  # steps between host synchronisations
COMPACT_BELOW = 0.75  # remove finished sentences once at most this fraction is unfinished
MASKED = 1e4  # subtracted from masked logits; finite, so that a sentence at its length limit can still end
CHUNK = 128  # vocabulary chunk; searched only if its maximum is large enough


@dataclass(frozen=True)
class BeamConfig:
    """Beam search settings; a source of n tokens gets at most max_ratio * n + max_extra target tokens."""

    beam: int = 5
    length_penalty: float = 1.0  # a hypothesis scores its log-probability over length ** length_penalty
    max_ratio: float = 1.2
    max_extra: int = 10
    min_length: int = 1  # tokens before END
    reads_on: bool = False  # under wait-k, read on instead of ending before the source does

    def __post_init__(self) -> None:
        require(self.beam >= 1, f"beam must be at least 1, got {self.beam}")
        require(
            self.beam == 1 or not self.reads_on,
            "reads_on needs a beam of 1, since all hypotheses of a sentence share its source position",
        )
        require(self.length_penalty >= 0, f"length_penalty must not be negative, got {self.length_penalty}")
        require(self.max_ratio >= 0, f"max_ratio must not be negative, got {self.max_ratio}")
        require(self.max_extra >= 1, f"max_extra must be at least 1, got {self.max_extra}")
        require(
            0 <= self.min_length < self.max_extra,
            f"min_length must be in 0..{self.max_extra - 1} (below max_extra), got {self.min_length}",
        )


@dataclass(frozen=True)
class SamplingConfig:
    """Sampling settings; `top_k` restricts sampling to the k most likely tokens; 0 for all."""

    temperature: float = 1.0
    top_k: int = 0
    seed: int = 1

    def __post_init__(self) -> None:
        require(self.temperature > 0, f"temperature must be above 0, got {self.temperature}")
        require(self.top_k >= 0, f"top_k must not be negative, got {self.top_k}")


@dataclass(frozen=True)
class Sampler:
    """Perturb logits so that their argmax is a sample from their softmax (the Gumbel-max trick)."""

    config: SamplingConfig
    generator: torch.Generator

    def __call__(self, logits: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
        logits = at_least_float32(logits) / self.config.temperature
        if self.config.top_k:
            logits = self._top_k(logits)
        noise = torch.empty_like(logits).exponential_(generator=self.generator)
        return logits - noise.log_()

    def _top_k(self, logits: Tensor) -> Tensor:
        writable = logits.clone()
        writable[:, [symbol for symbol in range(len(SPECIAL_SYMBOLS)) if symbol != END]] = -torch.inf
        least = writable.topk(min(self.config.top_k, logits.shape[1]), dim=-1).values[:, -1:]
        return logits - MASKED * (writable < least)


class Hypothesis(NamedTuple):
    """A finished translation, without END, and its length-normalised score."""

    tokens: list[int]
    score: float


class _Search(NamedTuple):
    """Search state of a batch: K unfinished and up to K finished hypotheses per sentence."""

    sentence: Int[Tensor, " B"]  # index in the batch
    longest: Int[Tensor, " B"]
    open_tokens: Int[Tensor, "B K L"]
    open_scores: Float[Tensor, "B K"]
    visible: Bool[Tensor, "B K C"]  # which cached positions belong to which unfinished hypothesis
    done_tokens: Int[Tensor, "B K L"]
    done_scores: Float[Tensor, "B K"]  # length-normalised; -inf where there is none yet

    def is_done(self, length: int) -> Bool[Tensor, " B"]:
        """Return which sentences have K finished hypotheses or have reached the length limit."""
        return (self.done_scores[:, -1] > -torch.inf) | (self.longest < length)


class _Results(NamedTuple):
    """Finished hypotheses of all sentences, kept on the device until the search is over."""

    tokens: Int[Tensor, "B K L"]
    scores: Float[Tensor, "B K"]

    def record(self, search: _Search) -> None:
        self.tokens[search.sentence] = search.done_tokens
        self.scores[search.sentence] = search.done_scores

    def hypotheses(self, best: int | None) -> list[list[Hypothesis]]:
        each = zip(self.tokens[:, :best].tolist(), self.scores[:, :best].tolist(), strict=True)
        return [
            [Hypothesis(ids[: ids.index(END)], score) for ids, score in zip(*one, strict=True) if score > -math.inf]
            for one in each
        ]


@torch.no_grad()
def beam_search(
    model: Seq2SeqModel,
    source: Int[Tensor, "B S"],
    source_lengths: Int[Tensor, " B"],
    config: BeamConfig,
    delay: int | None = None,
    best: int | None = None,
    sampler: Sampler | None = None,
) -> list[list[Hypothesis]]:
    """Return the `best` hypotheses of each sentence (default: all K), best first; the model must be in eval mode.

    Batches of sentences of similar length are fastest. `source_lengths` is a CPU tensor. With a `sampler` and a beam of
    1, translations are sampled from the model.
    """
    if config.reads_on and delay is not None:
        return _greedy_wait_k(model, source, source_lengths, config, delay)
    search = _start(source_lengths, source.device, at_least_float32(model.target_embedding.weight).dtype, config)
    found = _Results(search.done_tokens.clone(), search.done_scores.clone())
    K, steps = search.done_scores.shape[1], search.done_tokens.shape[2]
    state = model.encode(source, source_lengths, steps * K)
    for length in range(steps):
        new = slice(length * K, (length + 1) * K)
        search.visible[:, :, new] = torch.eye(K, dtype=torch.bool, device=source.device)
        last = search.open_tokens[:, :, length - 1] if length else torch.full_like(search.open_tokens[:, :, 0], START)
        logits, state = model.step(last, state, delay, search.visible[:, :, : new.stop])
        search = _extend(search, logits if sampler is None else sampler(logits), length, config)
        if (length + 1) % CHECK_EVERY == 0:
            rows = (~search.is_done(length + 1)).nonzero().flatten()
            if len(rows) == 0:
                break
            if len(rows) <= COMPACT_BELOW * len(search.sentence):
                found.record(search)
                search, state = _Search(*(field[rows] for field in search)), _keep(state, rows)
    found.record(search)
    return found.hypotheses(best)


class _GreedyState(NamedTuple):
    """State of sentences decoded greedily, each at its own pace."""

    sentence: Int[Tensor, " B"]  # index in the batch
    source: Int[Tensor, " B"]  # length in tokens
    seen: Int[Tensor, " B"]  # tokens read so far
    written: Int[Tensor, " B"]
    longest: Int[Tensor, " B"]
    last: Int[Tensor, " B"]
    score: Float[Tensor, " B"]
    ended: Bool[Tensor, " B"]
    visible: Bool[Tensor, "B 1 C"]  # which cached positions belong to the translation


def _greedy_wait_k(
    model: Seq2SeqModel, source: Int[Tensor, "B S"], source_lengths: Int[Tensor, " B"], config: BeamConfig, delay: int
) -> list[list[Hypothesis]]:
    """Decode greedily under wait-k; if END is predicted before the source is read, read a token instead.

    In each step every sentence writes or reads one token, so they are at different positions. The cache position of
    a rejected END stays masked.
    """
    dtype = at_least_float32(model.target_embedding.weight).dtype
    longest, lengths = _limits(source_lengths, config), source_lengths.to(source.device, non_blocking=True)
    found = _Results(
        torch.full((len(lengths), 1, int(longest.max()) + 1), PAD, device=source.device),
        torch.full((len(lengths), 1), -torch.inf, device=source.device, dtype=dtype),
    )
    steps = found.tokens.shape[2] + source.shape[1]
    state = model.encode(source, source_lengths, steps)
    rows = _GreedyState(
        sentence=torch.arange(len(lengths), device=source.device),
        source=lengths,
        seen=torch.zeros_like(lengths),
        written=torch.zeros_like(lengths),
        longest=longest.to(source.device, non_blocking=True),
        last=torch.full_like(lengths, START),
        score=torch.zeros_like(lengths, dtype=dtype),
        ended=torch.zeros_like(lengths, dtype=torch.bool),
        visible=torch.zeros(len(lengths), 1, steps, dtype=torch.bool, device=source.device),
    )
    for step in range(steps):
        rows.visible[:, :, step] = True
        rows = rows._replace(seen=rows.seen.maximum(rows.written + delay).minimum(rows.source))
        positions, visible = DecodingPositions(rows.written, rows.seen), rows.visible[:, :, : step + 1]
        logits, state = model.step(rows.last[:, None], state, None, visible, positions)
        token, reads = _next(rows, logits, config)
        found.tokens[rows.sentence, 0, rows.written] = token  # overwrite a rejected END
        rows.visible[:, 0, step] = ~reads
        rows = _advance(rows, logits, token, reads)
        if (step + 1) % CHECK_EVERY == 0 or step + 1 == steps:
            found.scores[rows.sentence, 0] = rows.score / (rows.written + 1) ** config.length_penalty
            unfinished = (~rows.ended).nonzero().flatten()
            if len(unfinished) == 0:
                break
            if len(unfinished) <= COMPACT_BELOW * len(rows.sentence):
                rows, state = _GreedyState(*(field[unfinished] for field in rows)), _keep(state, unfinished)
    return found.hypotheses(best=1)


def _next(
    rows: _GreedyState, logits: Float[Tensor, "B V"], config: BeamConfig
) -> tuple[Int[Tensor, " B"], Bool[Tensor, " B"]]:
    """Return the best token of each sentence, and which sentences read on instead of ending early."""
    value, word = logits[:, len(SPECIAL_SYMBOLS) :].max(-1)
    full = rows.written >= rows.longest
    ends = rows.ended | full | ((logits[:, END] > value) & (rows.written >= config.min_length))
    reads = ends & ~rows.ended & ~full & (rows.seen < rows.source)
    return torch.where(ends, END, word + len(SPECIAL_SYMBOLS)), reads


def _advance(
    rows: _GreedyState, logits: Float[Tensor, "B V"], token: Int[Tensor, " B"], reads: Bool[Tensor, " B"]
) -> _GreedyState:
    logits = at_least_float32(logits)
    log_probs = logits.gather(1, token[:, None])[:, 0] - logits.logsumexp(-1)
    return rows._replace(
        seen=rows.seen + reads,
        written=rows.written + (token != END),
        last=torch.where(reads, rows.last, token),
        score=rows.score + log_probs.masked_fill(reads | rows.ended, 0.0),
        ended=(token == END) & ~reads,
    )


def _limits(lengths: Int[Tensor, " B"], config: BeamConfig) -> Int[Tensor, " B"]:
    return (config.max_ratio * lengths + config.max_extra).long()


def _start(lengths: Int[Tensor, " B"], device: torch.device, dtype: torch.dtype, config: BeamConfig) -> _Search:
    longest = _limits(lengths, config)
    B, K, steps = len(longest), config.beam, int(longest.max()) + 1
    tokens = torch.full((B, K, steps), PAD, device=device)
    scores = torch.full((B, K), -torch.inf, device=device, dtype=dtype)
    # All K hypotheses start equal: mask all but the first, or the beam would fill with copies.
    first_only = torch.where(torch.arange(K, device=device) == 0, 0.0, scores)
    visible = torch.zeros(B, K, steps * K, dtype=torch.bool, device=device)
    sentence, longest = torch.arange(B, device=device), longest.to(device, non_blocking=True)
    return _Search(sentence, longest, tokens, first_only, visible, tokens.clone(), scores)


def _extend(search: _Search, logits: Float[Tensor, "BK V"], length: int, config: BeamConfig) -> _Search:
    """Extend every hypothesis by one token."""
    K = config.beam
    scores, tokens = _candidates(search, logits, length, config)
    choices = tokens.shape[-1]
    # Each hypothesis has one END candidate, so at least K of the best 2 K are unfinished.
    scores, flat = scores.flatten(1).topk(min(2 * K, K * choices), dim=-1)
    parent, token = flat // choices, tokens.flatten(1).gather(1, flat)
    grown = search.open_tokens.gather(1, _wide(parent, search.open_tokens))
    grown[:, :, length] = token
    ended = token == END

    # END counts only among the best K; otherwise low-ranked short hypotheses would finish.
    counts = ended & (torch.arange(flat.shape[1], device=flat.device) < K) & ~search.is_done(length)[:, None]
    finished = (scores / (length + 1) ** config.length_penalty).masked_fill(~counts, -torch.inf)
    done_scores, best = torch.cat([search.done_scores, finished], 1).topk(K, dim=-1)
    done_tokens = torch.cat([search.done_tokens, grown], 1).gather(1, _wide(best, grown))

    open_scores, kept = scores.masked_fill(ended, -torch.inf).topk(K, dim=-1)
    return search._replace(
        open_tokens=grown.gather(1, _wide(kept, grown)),
        open_scores=open_scores,
        visible=search.visible.gather(1, _wide(parent.gather(1, kept), search.visible)),
        done_tokens=done_tokens,
        done_scores=done_scores,
    )


def _candidates(
    search: _Search, logits: Float[Tensor, "BK V"], length: int, config: BeamConfig
) -> tuple[Float[Tensor, "B K N"], Int[Tensor, "B K N"]]:
    """Return the best continuations of each hypothesis, END last, and the resulting scores."""
    first_word = len(SPECIAL_SYMBOLS)
    normaliser, chunk_maxima = _normaliser_and_maxima(logits, first_word)
    words, ids = _best_words(logits[:, first_word:], chunk_maxima, config.beam)
    # At the length limit only END is allowed; before the minimum it is not.
    words = words.masked_fill((search.longest <= length).repeat_interleave(config.beam)[:, None], -torch.inf)
    end = logits[:, END:][:, :1] if length >= config.min_length else torch.full_like(logits[:, :1], -torch.inf)
    log_probs = at_least_float32(torch.cat([words, end], 1)) - normaliser[:, None]
    tokens = torch.cat([ids + first_word, torch.full_like(ids[:, :1], END)], 1)
    shape = *search.open_scores.shape, -1
    return search.open_scores[:, :, None] + log_probs.view(shape), tokens.view(shape)


@compiled_on_gpu
def _normaliser_and_maxima(
    logits: Float[Tensor, "N V"], first_word: int
) -> tuple[Float[Tensor, " N"], Float[Tensor, "N chunks"]]:
    """Return the log-normaliser of each row and the maximum of each chunk of logits, in one pass."""
    return at_least_float32(logits).logsumexp(-1), _whole_chunks(logits[:, first_word:]).amax(-1)


def _best_words(
    words: Float[Tensor, "N W"], chunk_maxima: Float[Tensor, "N chunks"], count: int
) -> tuple[Tensor, Int[Tensor, "N count"]]:
    """Return the n largest logits and their indices; they lie in the n chunks with the largest maxima."""
    chunks = chunk_maxima.topk(min(count, chunk_maxima.shape[1]), dim=-1).indices  # [N n]
    inside = torch.arange(CHUNK, device=words.device)
    rest = torch.arange(chunk_maxima.shape[1] * CHUNK, words.shape[1], device=words.device)
    where = (chunks[:, :, None] * CHUNK + inside).flatten(1)
    where = torch.cat([where, rest.expand(len(words), -1)], 1)  # [N n * CHUNK + rest]
    values, index = words.gather(1, where).topk(min(count, words.shape[1]), dim=-1)
    return values, where.gather(1, index)


def _whole_chunks(words: Float[Tensor, "N W"]) -> Float[Tensor, "N chunks CHUNK"]:
    chunks = words.shape[1] // CHUNK
    return words[:, : chunks * CHUNK].unflatten(1, (chunks, CHUNK))


def _keep(state: DecoderState, rows: Int[Tensor, " R"]) -> DecoderState:
    """Select the state of some sentences."""
    context = tuple(KeysValues(keys[rows], values[rows]) for keys, values in state.context)
    past = tuple(buffer.select(rows) for buffer in state.past)
    return DecoderState(context, past, None if state.source_mask is None else state.source_mask[rows])


def _wide(index: Int[Tensor, "B N"], like: Tensor) -> Int[Tensor, "B N X"]:
    return index[:, :, None].expand(-1, -1, like.shape[-1])
