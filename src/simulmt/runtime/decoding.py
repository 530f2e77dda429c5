"""Greedy decoding in batches: CTC and transducers, and the sentences and caches shared with simulmt.runtime.seq2seq.

A sentence reads tokens, its positions become due, and each due position writes the symbols of its frames. A CTC model
chooses the symbol of each frame independently and collapses repeated ones; in a transducer, the symbol of a frame
depends on the last symbols written.

The output of a sentence depends on its own tokens and delays only, not on the batch. A failed step advances no
sentence: due positions stay due, and recomputing them writes the same values to the caches.

Graphs run over the key-value caches of many sentences without copying them. A sentence holds a Slot, one row of a Pool,
which is one memory block for the caches of many rows. Before a graph runs, its rows are moved next to each other; as
long as the same sentences advance together, nothing moves again. That part of the pool is bound to the graph, which
writes into it.

Axis letters: B rows (sentences), N positions, R tokens read, F frames, V vocabulary, C capacity of a cache.
"""

from __future__ import annotations

import math
import weakref
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np

from simulmt.runtime.bundle import Bundle, Session
from simulmt.text import BLANK, END, PAD, START

ROWS = 32  # maximum batch size: sentences per call of a graph
POSITIONS = 32  # positions in one call of a graph, over all its rows

_MIN_CAPACITY = 32
_BINDINGS_KEPT = 64  # of one pool
_PAST, _PRESENT, _SLOTS = "past_", "present_", "slots"
_TYPES = {"tensor(int64)": np.int64, "tensor(float)": np.float32}

Array = np.ndarray[Any, np.dtype[Any]]
History = tuple[int, ...]  # the last symbols written, newest first


class Written(NamedTuple):
    """Target tokens, and the source tokens they depend on."""

    tokens: list[int]
    position: int  # the source token they translate
    trigger: int  # the last source token read before they were written


class Due(NamedTuple):
    """A position ready to be computed: a source position for CTC, a target position for wait-k."""

    position: int
    visible: int  # number of source tokens it attends to
    trigger: int  # the last source token read before it was due
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


class Collapse:
    """Collapses frames incrementally: drops blanks and symbols equal to that of the previous frame."""

    def __init__(self) -> None:
        self._previous = BLANK  # symbol of the previous frame

    def push(self, symbols: Iterable[int]) -> list[int]:
        """Return the symbols that these frames write."""
        written = []
        for symbol in symbols:
            if symbol not in (BLANK, self._previous):
                written.append(symbol)
            self._previous = symbol
        return written


class CTCSentence(SentenceState):
    """A sentence whose frames are collapsed incrementally."""

    wants_scores = False  # whether `write` is given log-probabilities instead of symbols

    def __init__(self, whole_words: bool = False) -> None:
        super().__init__(whole_words)
        self._collapse = Collapse()

    def write(self, frames: Array, due: Due) -> Written:
        """Collapse the symbols [F] of a position."""
        return Written(self._collapse.push(frames.tolist()), due.position, due.trigger)


class CTCDecoder:
    """Advances CTC sentences, in batches: reads tokens and computes the frames of positions that are due."""

    def __init__(self, bundle: Bundle, threads: int) -> None:
        session = bundle.session("ctc", threads)
        self.config = bundle.config
        self.caches = Caches([session])
        self._graph = GraphRunner(session, self.caches)

    def open(self, beam: int = 1, reads_on: bool = True) -> CTCSentence:  # noqa: ARG002 - CTC always reads the whole source
        assert beam == 1, "only full-sentence models use beam search"
        return CTCSentence(self.config.whole_words)

    def advance(self, sentences: Sequence[CTCSentence]) -> list[list[Written]]:
        """Compute the next positions of sentences that are due, and return what each sentence wrote."""
        for sentence in sentences:
            self.caches.reserve(sentence.slot, len(sentence.tokens))
        frames: dict[CTCSentence, Array] = {}
        for batch in batches(sentences, lambda sentence: (sentence.slot.pool, sentence.wants_scores)):
            frames.update(self._step(batch))
        return [
            [sentence.write(position, sentence.due.popleft()) for position in frames[sentence]]
            for sentence in sentences
        ]

    def _step(self, batch: Sequence[CTCSentence]) -> Iterator[tuple[CTCSentence, Array]]:
        """Yield the frames of the next positions that are due, the same number for each sentence."""
        N = min(max(1, POSITIONS // len(batch)), *(len(sentence.due) for sentence in batch))
        due = {sentence: list(islice(sentence.due, N)) for sentence in batch}
        # The maximum, not the last: when the delay is lowered, a position sees less than the previous one.
        ends = {sentence: max(each.visible for each in due[sentence]) for sentence in batch}
        R = max(1, *(ends[sentence] - sentence.cached for sentence in batch))
        outputs = self._outputs(batch)
        binding = self._graph.bind([sentence.slot for sentence in batch], outputs, N=N, R=R)
        batch = sorted(batch, key=lambda sentence: sentence.slot.row)
        tokens, positions = last_tokens(batch, [ends[sentence] for sentence in batch], R)
        binding.place("read_", tokens, positions)
        if "causal_mask" in binding.inputs:
            binding.show("causal_mask", positions + 1)
        self._fill(binding, batch, [due[sentence] for sentence in batch])
        for sentence, rows in zip(batch, self._frames(binding, batch), strict=True):
            sentence.cached = max(sentence.cached, ends[sentence])
            yield sentence, rows

    def _outputs(self, batch: Sequence[CTCSentence]) -> list[str]:
        return ["scores"] if batch[0].wants_scores else ["symbols"]

    def _frames(self, binding: Binding, batch: Sequence[CTCSentence]) -> Array:
        """Return the symbols [B N F] of these sentences, or the log-probabilities [B N F V] if they want scores."""
        if batch[0].wants_scores:
            return log_softmax(self._scores(binding))
        return binding.run()["symbols"].copy()  # the next batch may reuse the output buffer

    def _scores(self, binding: Binding) -> Array:
        """Return the scores [B N F V] of frames, after the blank penalty."""
        scores = binding.run()["scores"]
        scores[..., BLANK] -= binding.inputs["penalty"][..., 0]
        return scores

    def _fill(self, binding: Binding, batch: Sequence[CTCSentence], due: Sequence[Sequence[Due]]) -> None:
        tokens = [[s.tokens[d.position] for d in row] for s, row in zip(batch, due, strict=True)]
        positions = np.array([[d.position for d in row] for row in due])
        binding.place("", np.array(tokens), positions)
        binding.show("read_mask", np.array([[d.visible for d in row] for row in due]))
        binding.show("mask", positions + 1)
        penalties = [[self.config.blank_penalty(d.delay) for d in row] for row in due]
        binding.inputs["penalty"][:, :, 0, 0] = penalties


class TransducerSentence(CTCSentence):
    """A sentence that remembers the last symbols it wrote."""

    def __init__(self, symbols: int, whole_words: bool = False) -> None:
        super().__init__(whole_words)
        self.history: History = (START,) * symbols
        self.context: tuple[History, Array] = (), np.empty(0)  # a history and the scores [V] that it adds

    def write(self, frames: Array, due: Due) -> Written:
        """Drop the blanks among the symbols [F] of a position; unlike in CTC, repeated symbols are kept."""
        tokens = [symbol for symbol in frames.tolist() if symbol != BLANK]
        for token in tokens:
            self.history = after(self.history, token)
        return Written(tokens, due.position, due.trigger)


class TransducerDecoder(CTCDecoder):
    """Advances transducer sentences: scores frames in one call, then adds the label context frame by frame."""

    def __init__(self, bundle: Bundle, threads: int) -> None:
        super().__init__(bundle, threads)
        self._context = bundle.session("context", threads)
        self.symbols: int = next(each.shape[1] for each in self._context.get_inputs() if each.name == "history")

    def open(self, beam: int = 1, reads_on: bool = True) -> TransducerSentence:  # noqa: ARG002 - a transducer always reads the whole source
        assert beam == 1, "only full-sentence models use beam search"
        return TransducerSentence(self.symbols, self.config.whole_words)

    def context_scores(self, histories: Sequence[History]) -> Array:
        """Return the scores [B V] that these histories add to those of any frame."""
        (scores,) = self._context.run(["scores"], {"history": np.array(histories, dtype=np.int64)})
        return scores

    def _outputs(self, batch: Sequence[CTCSentence]) -> list[str]:  # noqa: ARG002 - the same for all
        return ["scores"]

    def _frames(self, binding: Binding, batch: Sequence[CTCSentence]) -> Array:
        """Return the symbols [B N F]. Sentences change only when they `write`, so a failed step can be repeated."""
        scores = self._scores(binding)
        B, N, F, V = scores.shape
        symbols = np.empty((B, N, F), dtype=np.int64)
        sentences = [sentence for sentence in batch if isinstance(sentence, TransducerSentence)]
        histories, added = [sentence.history for sentence in sentences], np.empty((B, V), dtype=np.float32)
        changed = list(range(B))
        for position, frame in np.ndindex(N, F):
            self._add_contexts(sentences, histories, changed, added)
            chosen = (scores[:, position, frame] + added).argmax(-1)
            symbols[:, position, frame] = chosen
            changed = np.flatnonzero(chosen != BLANK).tolist()
            for row in changed:
                histories[row] = after(histories[row], int(chosen[row]))
        return symbols

    def _add_contexts(
        self, batch: Sequence[TransducerSentence], histories: Sequence[History], rows: Sequence[int], added: Array
    ) -> None:
        """Set `added` to the context scores of these rows; each sentence caches the scores of one history."""
        unknown = [row for row in rows if batch[row].context[0] != histories[row]]
        if unknown:
            found = self.context_scores([histories[row] for row in unknown])
            for row, scores in zip(unknown, found, strict=True):
                batch[row].context = (histories[row], scores)
        for row in rows:
            added[row] = batch[row].context[1]


def after(history: History, symbol: int) -> History:
    """Return the history after writing a symbol."""
    return (symbol, *history[:-1])


class Slot:
    """A row of caches, placed by `Caches.reserve`; freed when the Slot is garbage-collected."""

    def __init__(self) -> None:
        self.pool: Pool | None = None
        self.row = -1


class Pool:
    """Caches of one capacity in one block, [caches rows 1 heads C D/heads]."""

    def __init__(self, caches: int, heads: int, capacity: int, head_width: int) -> None:
        self.capacity = capacity
        # Zeros, not uninitialised memory: a masked NaN would still give NaN, since NaN * 0 = NaN.
        self.block: Array = np.zeros((caches, 1, 1, heads, capacity, head_width), dtype=np.float32)
        self.bindings: dict[tuple[Any, ...], Binding] = {}  # to this block, by graph, first row and shape
        self._holders: list[weakref.ref[Slot] | None] = [None]

    def take(self, slot: Slot) -> None:
        """Assign a free row to the slot; its contents are undefined."""
        rows = len(self._holders)
        row = next((row for row in range(rows) if self.holder(row) is None), rows)
        if row == rows:
            self._double()
        slot.pool, slot.row = self, row
        self._holders[row] = weakref.ref(slot)

    def _double(self) -> None:
        caches, rows, *shape = self.block.shape
        block = np.zeros((caches, 2 * rows, *shape), dtype=np.float32)  # unused pages take no memory
        block[:, :rows] = self.block
        self.block = block
        self.bindings.clear()
        self._holders += [None] * rows

    def gather(self, slots: Sequence[Slot]) -> int:
        """Move slots next to each other, moving as few as possible; return the first row."""
        rows = sorted(slot.row for slot in slots)
        start = self._best_start(rows)
        inside = range(start, start + len(rows))
        free = sorted(set(inside).difference(rows))
        for slot, row in zip([slot for slot in slots if slot.row not in inside], free, strict=True):
            self._swap(slot, row)
        return start

    def _best_start(self, rows: Sequence[int]) -> int:
        if rows[-1] - rows[0] == len(rows) - 1:
            return rows[0]
        starts = {min(row, len(self._holders) - len(rows)) for row in rows}
        return max(starts, key=lambda start: bisect_left(rows, start + len(rows)) - bisect_left(rows, start))

    def _swap(self, slot: Slot, row: int) -> None:
        other, origin = self.holder(row), slot.row
        if other is None:
            self.block[:, row] = self.block[:, origin]
        else:
            self.block[:, [row, origin]] = self.block[:, [origin, row]]
            other.row = origin
        slot.row = row
        self._holders[row], self._holders[origin] = self._holders[origin], self._holders[row]

    def holder(self, row: int) -> Slot | None:
        """Return the slot that holds a row, or None if it is free."""
        reference = self._holders[row]
        slot = None if reference is None else reference()
        return slot if slot is not None and slot.pool is self else None


class Caches:
    """All pools of a translator, one per capacity."""

    def __init__(self, sessions: Iterable[Session]) -> None:
        shapes = {
            entry.name.removeprefix(_PAST): entry.shape
            for session in sessions
            for entry in session.get_inputs()
            if entry.name.startswith(_PAST)
        }
        self.index = {name: index for index, name in enumerate(shapes)}
        _, _, self.heads, _, self.head_width = next(iter(shapes.values()))
        self.pools: dict[int, Pool] = {}  # by capacity

    def reserve(self, slot: Slot, length: int) -> None:
        """Grow the slot to the given number of positions, keeping its contents."""
        pool, row = slot.pool, slot.row
        if pool is not None and pool.capacity >= length:
            return
        capacity = max(_MIN_CAPACITY, 1 << (length - 1).bit_length())
        if capacity not in self.pools:
            self.pools[capacity] = Pool(len(self.index), self.heads, capacity, self.head_width)
        larger = self.pools[capacity]
        larger.take(slot)
        if pool is not None:
            larger.block[:, slot.row, :, :, : pool.capacity] = pool.block[:, row]

    def rearrange(self, slots: Sequence[Slot], origins: Sequence[int]) -> None:
        """Copy slot origins[i] to slot i; all are in one pool."""
        pool = slots[0].pool
        assert pool is not None, "a slot must be reserved before it is filled"
        rows = [slot.row for slot in slots]
        pool.block[:, rows[: len(origins)]] = pool.block[:, [rows[origin] for origin in origins]]


class OutputBuffer:
    """Output memory shared by all bindings of a graph; valid until the next run."""

    def __init__(self) -> None:
        self._block: Array = np.zeros(0)

    def array(self, entry: Any, sizes: Mapping[str, int]) -> Array:
        shape = _shape(entry, sizes)
        if self._block.size < math.prod(shape):  # existing bindings keep the smaller block alive
            self._block = np.zeros(math.prod(shape), dtype=_TYPES[entry.type])
        return self._block[: math.prod(shape)].reshape(shape)


class Binding:
    """A graph bound to rows of a pool and to its other inputs and outputs."""

    def __init__(
        self,
        session: Session,
        caches: Caches,
        rows: Array,
        sizes: Mapping[str, int],
        buffers: Mapping[str, OutputBuffer],
    ) -> None:
        self._session = session
        self._masks = visibility(sizes["C"])
        self._binding = session.io_binding()
        self._rows = rows  # bound by address, so they must live as long as the binding
        self.inputs: dict[str, Array] = {}
        self.outputs: dict[str, Array] = {}
        for entry in session.get_inputs():
            if entry.name.startswith(_PAST):
                array = rows[caches.index[entry.name.removeprefix(_PAST)]]
            else:
                array = self.inputs[entry.name] = np.zeros(_shape(entry, sizes), dtype=_TYPES[entry.type])
            _bind(self._binding.bind_input, entry.name, array)
            if entry.name.endswith(_SLOTS):  # [B N heads 4]: row, 0, head, position
                array[..., 0] = np.arange(sizes["B"])[:, None, None]
                array[..., 2] = np.arange(caches.heads)
        for entry in session.get_outputs():
            if entry.name.startswith(_PRESENT):
                _bind(self._binding.bind_output, entry.name, rows[caches.index[entry.name.removeprefix(_PRESENT)]])
            elif entry.name in buffers:
                array = self.outputs[entry.name] = buffers[entry.name].array(entry, sizes)
                _bind(self._binding.bind_output, entry.name, array)

    def place(self, prefix: str, tokens: Array, positions: Array) -> None:
        """Set the tokens [B N] at positions [B N]."""
        self.inputs[f"{prefix}tokens"][:] = tokens
        self.inputs[f"{prefix}positions"][:] = positions
        self.inputs[f"{prefix}slots"][..., 3] = positions[:, :, None]

    def show(self, mask: str, visible: Array) -> None:
        """Set how many cached positions each position [B N] attends to."""
        self.inputs[mask][:, :, 0, 0] = self._masks[visible]

    def run(self) -> dict[str, Array]:
        """Run the graph; return its outputs, valid until the next run of any binding."""
        self._session.run_with_iobinding(self._binding)
        return self.outputs


class GraphRunner:
    """Binds a graph to slots, caching the bindings of frequent shapes."""

    def __init__(self, session: Session, caches: Caches) -> None:
        self._session = session
        self._caches = caches
        self._buffers: defaultdict[str, OutputBuffer] = defaultdict(OutputBuffer)

    def bind(self, slots: Sequence[Slot], outputs: Sequence[str] = (), **sizes: int) -> Binding:
        """Bind the graph to slots of one pool; inputs follow the order of their rows."""
        pool = slots[0].pool
        assert pool is not None, "a slot must be reserved before it is bound"
        start = pool.gather(slots)
        sizes = {**sizes, "B": len(slots), "C": pool.capacity}
        key = (self, start, *outputs, *sizes.values())
        if key not in pool.bindings:
            if len(pool.bindings) == _BINDINGS_KEPT:
                pool.bindings.clear()
            rows = pool.block[:, start : start + len(slots)]
            buffers = {name: self._buffers[name] for name in outputs}
            pool.bindings[key] = Binding(self._session, self._caches, rows, sizes, buffers)
        return pool.bindings[key]


@cache
def visibility(capacity: int) -> Array:
    """Return a mask whose row v is 0 on the first v positions and minus infinity elsewhere."""
    shown = np.arange(capacity) < np.arange(capacity + 1)[:, None]
    return np.where(shown, 0, -np.inf).astype(np.float32)


def _shape(entry: Any, sizes: Mapping[str, int]) -> list[int]:
    return [sizes[size] if isinstance(size, str) else size for size in entry.shape]


def _bind(bind: Any, name: str, array: Array) -> None:
    bind(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
