"""Batched beam search over the encoder-decoder, with cached keys and values, under any wait-k policy.

Axis letters: B sentences still open, K beam, V vocabulary, L longest translation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from simulmt.config import require
from simulmt.model.seq2seq import DecoderState, Seq2SeqModel
from simulmt.text import END, PAD, SPECIAL_SYMBOLS, START


@dataclass(frozen=True)
class BeamConfig:
    """How to search; the longest translation of a source of n tokens has max_ratio * n + max_extra tokens."""

    beam: int = 5
    length_penalty: float = 1.0  # a hypothesis scores its log-probability over length ** length_penalty
    max_ratio: float = 1.2
    max_extra: int = 10
    min_length: int = 1  # tokens before END

    def __post_init__(self) -> None:
        require(self.beam >= 1, f"beam must be at least 1, got {self.beam}")
        require(self.length_penalty >= 0, f"length_penalty must not be negative, got {self.length_penalty}")
        require(self.max_ratio >= 0, f"max_ratio must not be negative, got {self.max_ratio}")
        require(self.max_extra >= 1, f"max_extra must be at least 1, got {self.max_extra}")
        require(
            0 <= self.min_length < self.max_extra,
            f"min_length must be in 0..{self.max_extra - 1} (below max_extra), got {self.min_length}",
        )


class Hypothesis(NamedTuple):
    """A finished translation, without END, and its length-normalised score."""

    tokens: list[int]
    score: float


class _Search(NamedTuple):
    """All that is known of the open sentences: K unfinished and up to K finished hypotheses each."""

    sentence: Int[Tensor, " B"]  # which sentence of the batch this row is
    longest: Int[Tensor, " B"]
    open_tokens: Int[Tensor, "B K L"]
    open_scores: Float[Tensor, "B K"]
    done_tokens: Int[Tensor, "B K L"]
    done_scores: Float[Tensor, "B K"]  # length-normalised; -inf where there is none yet

    def keep(self, rows: Int[Tensor, " R"]) -> _Search:
        return _Search(*(field[rows] for field in self))


@torch.no_grad()
def beam_search(
    model: Seq2SeqModel,
    source: Int[Tensor, "B S"],
    source_lengths: Int[Tensor, " B"],
    config: BeamConfig,
    delay: int | None = None,
) -> list[list[Hypothesis]]:
    """The best hypotheses of each sentence, best first; the model must be in eval mode."""
    state = model.encode(source, source_lengths, hypotheses=config.beam)
    search = _start(source_lengths.to(source.device), config)
    results: list[list[Hypothesis]] = [[] for _ in range(source.shape[0])]
    length = 0
    while len(search.sentence):
        previous = (
            search.open_tokens[:, :, length - 1] if length else torch.full_like(search.open_tokens[:, :, 0], START)
        )
        logits, state = model.step(previous.reshape(-1, 1), state, delay)
        search, origin = _extend(search, logits, length, config)
        state = state.reorder(origin)
        length += 1
        search, state = _retire(search, state, length, config, results)
    return results


def _start(source_lengths: Int[Tensor, " B"], config: BeamConfig) -> _Search:
    B, K = len(source_lengths), config.beam
    longest = (config.max_ratio * source_lengths + config.max_extra).long()
    tokens = torch.full((B, K, int(longest.max()) + 1), PAD, device=source_lengths.device)
    scores = torch.full((B, K), -torch.inf, device=source_lengths.device)
    # All K hypotheses begin alike; only the first counts, or the beam would fill with copies.
    first_only = torch.where(torch.arange(K, device=scores.device) == 0, 0.0, scores)
    sentence = torch.arange(B, device=scores.device)
    return _Search(sentence, longest, tokens, first_only, tokens.clone(), scores)


def _extend(
    search: _Search, logits: Float[Tensor, "BK V"], length: int, config: BeamConfig
) -> tuple[_Search, Int[Tensor, " BK"]]:
    """Grow every hypothesis by one token; the search after that and the cache row each new one grew from."""
    B, K = search.open_scores.shape
    log_probs = _allowed(logits.float().log_softmax(-1).view(B, K, -1), search.longest, length, config)
    V = log_probs.shape[-1]
    totals = (search.open_scores[:, :, None] + log_probs).view(B, K * V)
    # Each hypothesis can end in one way only, so 2 K candidates hold at least K that go on.
    scores, flat = totals.topk(min(2 * K, K * V), dim=-1)
    grown = search.open_tokens.gather(1, _wide(flat // V, search.open_tokens))
    grown[:, :, length] = flat % V
    ended = flat % V == END

    # An ending counts only while it is among the best K: otherwise short hypotheses would creep in from below.
    counts = ended & (torch.arange(flat.shape[1], device=flat.device) < K)
    finished = (scores / (length + 1) ** config.length_penalty).masked_fill(~counts, -torch.inf)
    done_scores, best = torch.cat([search.done_scores, finished], 1).topk(K, dim=-1)
    done_tokens = torch.cat([search.done_tokens, grown], 1).gather(1, _wide(best, grown))

    open_scores, kept = scores.masked_fill(ended, -torch.inf).topk(K, dim=-1)
    origin = (flat // V).gather(1, kept) + torch.arange(B, device=flat.device)[:, None] * K
    open_tokens = grown.gather(1, _wide(kept, grown))
    return search._replace(
        open_tokens=open_tokens, open_scores=open_scores, done_tokens=done_tokens, done_scores=done_scores
    ), origin.flatten()


def _allowed(
    log_probs: Float[Tensor, "B K V"], longest: Int[Tensor, " B"], length: int, config: BeamConfig
) -> Float[Tensor, "B K V"]:
    """Forbid special symbols, END before the minimum, and anything but END at the limit."""
    forbidden = torch.zeros_like(log_probs[:1, :1], dtype=torch.bool)
    forbidden[..., : len(SPECIAL_SYMBOLS)] = True
    forbidden[..., END] = length < config.min_length
    at_limit = (longest <= length)[:, None, None]
    is_end = torch.arange(log_probs.shape[-1], device=log_probs.device) == END
    return log_probs.masked_fill(forbidden | (at_limit & ~is_end), -torch.inf)


def _retire(
    search: _Search, state: DecoderState, length: int, config: BeamConfig, results: list[list[Hypothesis]]
) -> tuple[_Search, DecoderState]:
    """Record the sentences with K finished hypotheses or at their limit, and drop them from the batch."""
    settled: Bool[Tensor, " B"] = (search.done_scores[:, -1] > -torch.inf) | (search.longest < length)
    if not bool(settled.any()):
        return search, state
    settled_rows = search.keep(settled.nonzero().flatten())
    fields = (settled_rows.sentence, settled_rows.done_tokens, settled_rows.done_scores)
    for sentence, tokens, scores in zip(*(field.tolist() for field in fields), strict=True):
        results[sentence] = [
            Hypothesis(ids[: ids.index(END)], score)
            for ids, score in zip(tokens, scores, strict=True)
            if score > -math.inf
        ]
    rows = (~settled).nonzero().flatten()
    beams = (rows[:, None] * config.beam + torch.arange(config.beam, device=rows.device)).flatten()
    return search.keep(rows), state.keep(rows, beams)


def _wide(index: Int[Tensor, "B N"], like: Int[Tensor, "B K L"]) -> Int[Tensor, "B N L"]:
    return index[:, :, None].expand(-1, -1, like.shape[-1])
