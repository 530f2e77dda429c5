"""Common parts of the decoders: sentences read tokens, positions become due, and sentences advance in batches.

The output of a sentence depends on its own tokens and delays only, not on the batch. A failed step advances no
sentence: due positions stay due, and recomputing them writes the same values to the caches.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from simulmt.runtime.caches import Array, Slot
from simulmt.text import END, PAD

ROWS = 32  # maximum batch size: sentences per call of a graph


class Written(NamedTuple):
    """Target tokens, and the source tokens they depend on."""

    tokens: list[int]
    position: int  # the source token they translate
    trigger: int  # the last source token read before they were written


class Due(NamedTuple):
    """A position ready to be computed: a source position for CTC, a target position for wait-k."""

    position: int
    visible: int  # number of source tokens it attends to
    trigger: int
    delay: int


class SentenceState:
    """The decoding state of a source sentence: position t is due once t + delay tokens have been read.

    It attends to these and, with `whole_words`, to the rest of the last word.
    """

    def __init__(self, whole_words: bool = False) -> None:
        self._whole_words = whole_words
        self.tokens: list[int] = []
        self._word_ends: list[int] = []  # for each token, the number of tokens up to the end of its word
        self.due: deque[Due] = deque()
        self.slot = Slot()
        self.cached = 0  # number of tokens in the cache
        self.closed = False
        self._planned = 0

    @property
    def is_due(self) -> bool:
        """Whether there is something to compute."""
        return bool(self.due)

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be read or written."""
        return self.closed and not self.is_due

    def read(self, word: Sequence[int], delay: int) -> None:
        """Read the tokens of a word."""
        self.tokens += word
        self._word_ends += [len(self.tokens)] * len(word)
        while (needed := self._planned + delay) <= len(self.tokens):
            self._plan(self._word_ends[needed - 1] if self._whole_words else needed, delay)

    def close(self, delay: int) -> None:
        """Read END; all remaining positions become due and attend to the whole sentence."""
        self.read([END], delay)
        self.closed = True
        self._plan_rest(delay)

    def _plan_rest(self, delay: int) -> None:
        while self._planned < len(self.tokens):
            self._plan(len(self.tokens), delay)

    def _plan(self, visible: int, delay: int) -> None:
        self.due.append(Due(self._planned, visible, len(self.tokens) - 1, delay))
        self._planned += 1


S = TypeVar("S", bound=SentenceState)


def batches(sentences: Sequence[S], key: Callable[[S], Hashable], size: int = ROWS) -> Iterator[list[S]]:
    """Group sentences with equal keys into batches, ordered by cache row, so that batches recur unchanged."""
    groups: defaultdict[Hashable, list[S]] = defaultdict(list)
    for sentence in sorted(sentences, key=lambda sentence: sentence.slot.row):
        groups[key(sentence)].append(sentence)
    for group in groups.values():
        for start in range(0, len(group), size):
            yield group[start : start + size]


def last_tokens(sentences: Sequence[SentenceState], ends: Sequence[int], count: int) -> tuple[Array, Array]:
    """Return the last `count` tokens before each end, and their positions.

    Tokens may be read again: this writes the same values to the cache. Shorter sentences are padded; the cache entries
    of padding are masked until they are overwritten.
    """
    starts = [max(0, end - count) for end in ends]
    tokens = [
        (sentence.tokens[start : start + count] + [PAD] * count)[:count]
        for sentence, start in zip(sentences, starts, strict=True)
    ]
    return np.array(tokens), np.array(starts)[:, None] + np.arange(count)


def log_softmax(scores: Array) -> Array:
    """Return log-probabilities along the last axis."""
    shifted = scores - scores.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
