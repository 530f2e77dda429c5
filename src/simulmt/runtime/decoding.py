"""What decoders share: sentences read tokens, positions become due, and many sentences advance together.

What a sentence writes depends on its own tokens and delays only, never on the company it advances in. A step that fails
has advanced none of its sentences: what was due is still due, and to compute it again fills the caches with the same.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from simulmt.runtime.caches import Array, Slot
from simulmt.text import END, PAD

ROWS = 32  # sentences in one call of a graph


class Written(NamedTuple):
    """Target tokens, with what made them possible."""

    tokens: list[int]
    position: int  # the source token that they stand for
    trigger: int  # the last source token that had been read by then


class Due(NamedTuple):
    """A position whose turn has come: a source position for CTC, a target position for wait-k."""

    position: int
    visible: int  # how many source tokens it looks at
    trigger: int
    delay: int


class Sentence:
    """One source sentence on its way through a model: position t is due once t + delay tokens were read.

    It looks at these, or with `whole_words` also at the rest of the word that the last of them is of.
    """

    def __init__(self, whole_words: bool = False) -> None:
        self._whole_words = whole_words
        self.tokens: list[int] = []
        self._word_ends: list[int] = []  # for each token, how many tokens there were when its word had been read
        self.due: deque[Due] = deque()
        self.slot = Slot()
        self.cached = 0  # how many tokens the slot holds
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
        """Read END; what still waits is due now and looks at the whole sentence."""
        self.read([END], delay)
        self.closed = True
        self._plan_rest(delay)

    def _plan_rest(self, delay: int) -> None:
        while self._planned < len(self.tokens):
            self._plan(len(self.tokens), delay)

    def _plan(self, visible: int, delay: int) -> None:
        self.due.append(Due(self._planned, visible, len(self.tokens) - 1, delay))
        self._planned += 1


S = TypeVar("S", bound=Sentence)


def batches(sentences: Sequence[S], alike: Callable[[S], Hashable], size: int = ROWS) -> Iterator[list[S]]:
    """Sentences that can share a call, in the order of their rows, so that batches of many come again as they are."""
    groups: defaultdict[Hashable, list[S]] = defaultdict(list)
    for sentence in sorted(sentences, key=lambda sentence: sentence.slot.row):
        groups[alike(sentence)].append(sentence)
    for group in groups.values():
        for start in range(0, len(group), size):
            yield group[start : start + size]


def last_tokens(sentences: Sequence[Sentence], ends: Sequence[int], count: int) -> tuple[Array, Array]:
    """The last `count` tokens before each end, and their positions.

    A token read before is read again, to the same effect. Behind a sentence that is shorter than `count` comes padding,
    written where nothing looks until the token that belongs there overwrites it.
    """
    starts = [max(0, end - count) for end in ends]
    tokens = [
        (sentence.tokens[start : start + count] + [PAD] * count)[:count]
        for sentence, start in zip(sentences, starts, strict=True)
    ]
    return np.array(tokens), np.array(starts)[:, None] + np.arange(count)


def log_softmax(scores: Array) -> Array:
    """Log-probabilities along the last axis."""
    shifted = scores - scores.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
