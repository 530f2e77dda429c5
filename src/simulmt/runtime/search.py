"""From scores to symbols: CTC collapse, prefix beam search over it, and beam search over whole translations.

The first two take frames as they come and return the symbols that are now certain, which are never taken back.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from functools import reduce

import numpy as np

from simulmt.runtime.wording import LIKELY, Context, Heard, Scores, Wording
from simulmt.text import BLANK, END, SPECIAL_SYMBOLS

Hypotheses = dict[tuple[int, ...], tuple[float, float]]

NOTHING = Heard()
PATIENCE = 8  # frames for which hypotheses of a beam may disagree before the best one is followed


class Collapse:
    """CTC's many-to-one map, online: a symbol counts if it is no blank and differs from the frame before."""

    def __init__(self, wording: Wording | None = None) -> None:
        self._wording = wording
        self.previous = BLANK  # the symbol of the frame before
        self.context = Context()  # kept for a wording only

    def push(self, symbols: Iterable[int]) -> list[int]:
        """The symbols that these frames write."""
        written = []
        for symbol in symbols:
            if symbol not in (BLANK, self.previous):
                written.append(symbol)
                if self._wording is not None:
                    self.context = self._wording.after(self.context, symbol)
            self.previous = symbol
        return written


class PrefixBeam:
    """CTC prefix beam search that commits what all its hypotheses agree on.

    A hypothesis is the symbols not committed yet, with the log-probability of all alignments that end in a blank and
    of all that end in its last symbol. When the hypotheses have disagreed for `patience` frames, only those that
    begin like the best one survive, so a commit never waits longer than that.
    """

    def __init__(self, size: int, wording: Wording | None = None, patience: float = PATIENCE) -> None:
        self._size = size
        self._wording = wording
        self._patience = patience
        self._last = BLANK  # the last committed symbol
        self._context = Context()  # what is committed means to the next symbol
        self._hypotheses: Hypotheses = {(): (0.0, -math.inf)}
        self._frames_apart = 0

    def push(self, log_probabilities: Scores, heard: Heard = NOTHING) -> list[int]:
        """The symbols that these frames [F V] make certain; `heard` matters to a wording only."""
        written = []
        for frame in log_probabilities:
            self._extend(frame, heard)
            written += self._commit_agreed()
            if self._frames_apart >= self._patience:
                self._follow_best()
                written += self._commit_agreed()
        return written

    def finish(self) -> list[int]:
        """The rest of the best hypothesis, once no frame follows."""
        return list(self._best())

    def _extend(self, frame: Scores, heard: Heard) -> None:
        wanted = self._size if self._wording is None else max(self._size, LIKELY)  # the best may have to pay
        count = min(wanted + 1, len(frame))  # one more, for the blank may be among them
        candidates = [int(symbol) for symbol in np.argpartition(frame, -count)[-count:] if symbol != BLANK]
        grown: Hypotheses = {}
        for hypothesis, (blank, symbol) in self._hypotheses.items():
            last = hypothesis[-1] if hypothesis else self._last
            either = _log_add(blank, symbol)
            repeated = symbol + frame[last] if last != BLANK else -math.inf
            _raise(grown, hypothesis, either + frame[BLANK], repeated)
            context = self._context_of(hypothesis)
            for candidate in candidates:
                # The same symbol again is a second one only if a blank stood between the two.
                before = blank if candidate == last else either
                paid = 0.0 if self._wording is None else self._wording.penalty(candidate, context, heard)
                _raise(grown, (*hypothesis, candidate), -math.inf, before + frame[candidate] - paid)
        ranked = sorted(grown, key=lambda hypothesis: _log_add(*grown[hypothesis]), reverse=True)
        self._hypotheses = {hypothesis: grown[hypothesis] for hypothesis in ranked[: self._size]}

    def _context_of(self, symbols: Iterable[int]) -> Context:
        """The context once these symbols, too, are committed."""
        return self._context if self._wording is None else reduce(self._wording.after, symbols, self._context)

    def _commit_agreed(self) -> list[int]:
        """Commit the beginning that all hypotheses share."""
        columns = zip(*self._hypotheses, strict=False)
        agreed = [column[0] for column in itertools.takewhile(lambda column: len(set(column)) == 1, columns)]
        if agreed:
            self._last = agreed[-1]
            self._context = self._context_of(agreed)
            self._hypotheses = {rest[len(agreed) :]: scores for rest, scores in self._hypotheses.items()}
        undecided = not agreed and len(self._hypotheses) > 1
        self._frames_apart = self._frames_apart + 1 if undecided else 0
        return agreed

    def _follow_best(self) -> None:
        beginning = self._best()[:1]
        self._hypotheses = {h: scores for h, scores in self._hypotheses.items() if h[:1] == beginning}

    def _best(self) -> tuple[int, ...]:
        return max(self._hypotheses, key=lambda hypothesis: _log_add(*self._hypotheses[hypothesis]))


class BeamSearch:
    """The bookkeeping of a beam search over token after token, until END; scores are divided by the length.

    Special symbols are never chosen, nor is END at once; at the longest length END is all that is left.
    """

    def __init__(self, size: int, longest: int) -> None:
        self._size = size
        self._longest = longest
        self.open: list[list[int]] = [[]]  # unfinished hypotheses, best first
        self._scores = np.zeros(1)
        self._done: list[tuple[float, list[int]]] = []  # best first

    def extend(self, log_probabilities: Scores) -> list[int]:
        """Grow every open hypothesis [H V] by a token; for each of the new ones, which old one it grew from."""
        length = len(self.open[0])
        V = log_probabilities.shape[-1]
        totals = (self._scores[:, None] + self._allowed(log_probabilities, length)).ravel()
        # Each hypothesis can end in one way only, so twice the beam holds enough that go on.
        ranked = np.argsort(-totals, kind="stable")[: 2 * self._size]
        grown = [(totals[index], int(index) // V, int(index) % V) for index in ranked if totals[index] > -math.inf]
        # An ending counts only while it is among the best: otherwise short hypotheses would creep in from below.
        for score, origin, token in grown[: self._size]:
            if token == END:
                self._done.append((score / (length + 1), self.open[origin]))
        self._done = sorted(self._done, key=lambda done: -done[0])[: self._size]
        going_on = [candidate for candidate in grown if candidate[2] != END][: self._size]
        self.open = [[*self.open[origin], token] for _, origin, token in going_on]
        self._scores = np.array([score for score, _, _ in going_on])
        return [origin for _, origin, _ in going_on]

    @property
    def is_settled(self) -> bool:
        """Whether there are enough finished hypotheses, or none can go on."""
        return len(self._done) == self._size or not self.open

    @property
    def best(self) -> list[int]:
        return self._done[0][1]

    def _allowed(self, log_probabilities: Scores, length: int) -> Scores:
        allowed = np.array(log_probabilities, dtype=np.float64)
        end = allowed[:, END].copy()
        allowed[:, : len(SPECIAL_SYMBOLS)] = -math.inf
        if length >= self._longest:
            allowed[:] = -math.inf
        if length > 0:
            allowed[:, END] = end
        return allowed


def log_softmax(scores: Scores) -> Scores:
    """Log-probabilities along the last axis."""
    shifted = scores - scores.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def _raise(grown: Hypotheses, hypothesis: tuple[int, ...], blank: float, symbol: float) -> None:
    """Add alignments that lead to a hypothesis."""
    before = grown.get(hypothesis, (-math.inf, -math.inf))
    grown[hypothesis] = (_log_add(before[0], blank), _log_add(before[1], symbol))


def _log_add(a: float, b: float) -> float:
    high, low = (a, b) if a > b else (b, a)
    return high if low == -math.inf else high + math.log1p(math.exp(low - high))
