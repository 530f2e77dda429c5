"""From the scores of frames to symbols that stay written: CTC collapse, and a prefix beam search over it.

Both take frames as they come and return the symbols that are now certain; what was returned is never taken back.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulmt.text import BLANK

Scores = NDArray[Any]

PATIENCE = 8  # frames for which hypotheses of a beam may disagree before the best one is followed


class Collapse:
    """CTC's many-to-one map, online: a symbol counts if it is no blank and differs from the frame before."""

    def __init__(self) -> None:
        self._previous = BLANK

    def push(self, symbols: Iterable[int]) -> list[int]:
        """The symbols that these frames write."""
        written = []
        for symbol in symbols:
            if symbol not in (BLANK, self._previous):
                written.append(symbol)
            self._previous = symbol
        return written


class PrefixBeam:
    """CTC prefix beam search that commits what all its hypotheses agree on.

    A hypothesis is the tuple of symbols not committed yet, with the log-probability of all alignments that end in a
    blank and of all that end in its last symbol. After PATIENCE frames of disagreement only the hypotheses that begin
    like the best one survive, so a commit never waits longer than that.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._last = BLANK  # the last committed symbol
        self._hypotheses: dict[tuple[int, ...], tuple[float, float]] = {(): (0.0, -math.inf)}
        self._frames_apart = 0

    def push(self, log_probabilities: Scores) -> list[int]:
        """The symbols that the frames [F V] make certain."""
        written = []
        for frame in log_probabilities:
            self._extend(frame)
            written += self._agreed()
            if self._frames_apart >= PATIENCE:
                self._follow_the_best()
                written += self._agreed()
        return written

    def finish(self) -> list[int]:
        """The rest of the best hypothesis."""
        best = self._best()
        self.__init__(self._size)  # type: ignore[misc]
        return list(best)

    def _extend(self, frame: Scores) -> None:
        count = min(self._size + 1, len(frame))  # the blank may be among them, and it is always looked at
        candidates = set(np.argpartition(frame, -count)[-count:].tolist()) - {BLANK}
        grown: dict[tuple[int, ...], tuple[float, float]] = defaultdict(lambda: (-math.inf, -math.inf))
        for hypothesis, (blank, symbol) in self._hypotheses.items():
            last = hypothesis[-1] if hypothesis else self._last
            either = float(np.logaddexp(blank, symbol))
            _raise(grown, hypothesis, either + float(frame[BLANK]), -math.inf)
            if last != BLANK:
                _raise(grown, hypothesis, -math.inf, symbol + float(frame[last]))
            for candidate in candidates:
                # The same symbol again is a new one only if a blank stood between the two.
                before = blank if candidate == last else either
                _raise(grown, (*hypothesis, candidate), -math.inf, before + float(frame[candidate]))
        ranked = sorted(grown.items(), key=lambda item: float(np.logaddexp(*item[1])), reverse=True)
        self._hypotheses = dict(ranked[: self._size])

    def _agreed(self) -> list[int]:
        """Commit the beginning that all hypotheses share."""
        hypotheses = list(self._hypotheses)
        shared = 0
        while all(len(h) > shared and h[shared] == hypotheses[0][shared] for h in hypotheses):
            shared += 1
        committed = hypotheses[0][:shared]
        if committed:
            self._last = committed[-1]
            self._hypotheses = {h[shared:]: score for h, score in self._hypotheses.items()}
        self._frames_apart = 0 if committed or not any(self._hypotheses) else self._frames_apart + 1
        return list(committed)

    def _follow_the_best(self) -> None:
        ...

    def _best(self) -> tuple[int, ...]:
        return max(self._hypotheses, key=lambda h: float(np.logaddexp(*self._hypotheses[h])))
