"""How a CTC model decodes: sentences read tokens, positions become due, and many sentences advance together.

What a sentence writes depends on its own tokens and delays only, never on the company it advances in. A step that fails
has advanced none of its sentences: what was due is still due, and to compute it again fills the caches with the same.

Axis letters: B rows (sentences), N positions, R tokens read, F frames, V vocabulary, C capacity of a cache.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple, TypeVar

import numpy as np

from simulmt.runtime.bundle import Bundle
from simulmt.runtime.engine import Array, Binding, Caches, GraphRunner, Slot
from simulmt.runtime.search import Collapse, PrefixBeam, log_softmax
from simulmt.runtime.wording import Heard, Wording
from simulmt.text import BLANK, END, PAD

ROWS = 32  # sentences in one call of a graph
POSITIONS = 32  # positions in one call of a graph, over all its rows


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


class CTCSentence(Sentence):
    """A sentence whose frames are collapsed as they come, or searched with a prefix beam."""

    def __init__(self, beam: int, wording: Wording | None = None, whole_words: bool = False) -> None:
        super().__init__(whole_words)
        self.search = PrefixBeam(beam, wording) if beam > 1 else None
        self.collapse = Collapse(wording)

    def write(self, frames: Array, due: Due) -> Written:
        """What the frames of a position write: symbols [F], or with a beam their log-probabilities [F V]."""
        if self.search is None:
            return Written(self.collapse.push(frames.tolist()), due.position, due.trigger)
        tokens = self.search.push(frames, Heard(self.tokens[: due.visible]))
        if self.closed and due.position == len(self.tokens) - 1:
            tokens += self.search.finish()
        return Written(tokens, due.position, due.trigger)


class CTCDecoder:
    """Advances CTC sentences: one call reads some tokens and puts some finished positions through the stack."""

    def __init__(self, bundle: Bundle, threads: int) -> None:
        session = bundle.session("ctc", threads)
        self.config = bundle.config
        self.caches = Caches([session])
        self._graph = GraphRunner(session, self.caches)
        self.wording = bundle.wording()

    def open(self, beam: int) -> CTCSentence:
        return CTCSentence(beam, self.wording, self.config.whole_words)

    def advance(self, sentences: Sequence[CTCSentence]) -> list[list[Written]]:
        """Compute something for each of these sentences, all of which are due; what each of them wrote."""
        for sentence in sentences:
            self.caches.reserve(sentence.slot, len(sentence.tokens))
        frames: dict[CTCSentence, Array] = {}
        for batch in batches(sentences, lambda sentence: (sentence.slot.pool, sentence.search is None)):
            frames.update(self._step(batch))
        return [
            [sentence.write(position, sentence.due.popleft()) for position in frames[sentence]]
            for sentence in sentences
        ]

    def _step(self, batch: Sequence[CTCSentence]) -> Iterator[tuple[CTCSentence, Array]]:
        """The frames of the next few positions that are due, the same number of them in each sentence."""
        N = min(max(1, POSITIONS // len(batch)), *(len(sentence.due) for sentence in batch))
        due = {sentence: list(islice(sentence.due, N)) for sentence in batch}
        # The furthest, not the last: when the delay falls, a position sees less than the one before it.
        ends = {sentence: max(each.visible for each in due[sentence]) for sentence in batch}
        R = max(1, *(ends[sentence] - sentence.cached for sentence in batch))
        outputs = self._outputs(batch)
        binding = self._graph.bind([sentence.slot for sentence in batch], outputs, N=N, R=R)
        batch = sorted(batch, key=lambda sentence: sentence.slot.row)
        binding.place("read_", *last_tokens(batch, [ends[sentence] for sentence in batch], R))
        self._fill(binding, batch, [due[sentence] for sentence in batch])
        for sentence, rows in zip(batch, self._frames(binding, batch, due), strict=True):
            sentence.cached = max(sentence.cached, ends[sentence])
            yield sentence, rows

    def _outputs(self, batch: Sequence[CTCSentence]) -> list[str]:
        if batch[0].search is not None:
            return ["scores"]
        return ["symbols"] if self.wording is None else ["symbols", "scores"]

    def _frames(
        self, binding: Binding, batch: Sequence[CTCSentence], due: Mapping[CTCSentence, Sequence[Due]]
    ) -> Array:
        """The symbols [B N F] of these sentences, or with a beam the log-probabilities [B N F V]."""
        found = binding.run()
        if "scores" in found:
            found["scores"][..., BLANK] -= binding.inputs["penalty"][..., 0]
        if batch[0].search is not None:
            return log_softmax(found["scores"])
        symbols = found["symbols"].copy()  # the next batch may be written to the same place
        if self.wording is not None:
            for sentence, row, scores in zip(batch, symbols, found["scores"], strict=True):
                heard = (Heard(sentence.tokens[: each.visible]) for each in due[sentence])
                by_frame = [each for each in heard for _ in range(row.shape[1])]
                frames = (row.ravel().tolist(), scores.reshape(row.size, -1), by_frame)
                row.flat = self.wording.choose(*frames, sentence.collapse.previous, sentence.collapse.context)
        return symbols

    def _fill(self, binding: Binding, batch: Sequence[CTCSentence], due: Sequence[Sequence[Due]]) -> None:
        tokens = [[s.tokens[d.position] for d in row] for s, row in zip(batch, due, strict=True)]
        positions = np.array([[d.position for d in row] for row in due])
        binding.place("", np.array(tokens), positions)
        binding.show("read_mask", np.array([[d.visible for d in row] for row in due]))
        binding.show("mask", positions + 1)
        penalties = [[self.config.blank_penalty(d.delay) for d in row] for row in due]
        binding.inputs["penalty"][:, :, 0, 0] = penalties


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
