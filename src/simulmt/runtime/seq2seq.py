"""Encoder-decoder decoding: wait-k, which writes while reading, and full-sentence, which writes at the end.

Axis letters: B rows (sentences), N positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from simulmt.runtime.bundle import Bundle
from simulmt.runtime.decoding import (
    ROWS,
    Array,
    Caches,
    Due,
    GraphRunner,
    SentenceState,
    Slot,
    Written,
    batches,
    last_tokens,
    log_softmax,
)
from simulmt.text import END, SPECIAL_SYMBOLS, START

ENCODED = 512  # maximum positions per encoder call, over all rows
NEVER = 1e9  # penalty larger than any score


class Row(NamedTuple):
    """A partial translation to be extended by one token."""

    slot: Slot
    last: int
    due: Due
    waited: int = 0  # words, because the prediction was not stable


class Seq2SeqSentence(SentenceState):
    """A sentence whose positions are target tokens; after the end of the source, they are due until END is written.

    A token that is not stable yet is predicted again after one more word. If the model predicts END before the source
    is read, it reads on as well: where translations are shorter than their sources, wait-k models learn to end early
    and would lose the rest. With `reads_on` False the translation ends there, as in the paper.

    With `by_word` predictions see whole words, so that each sees a word more than the one before. Otherwise, as in the
    paper, they see any number of tokens, and the next one sees a token more.

    With a `beam` above 1, beam search runs once the whole sentence has been read.
    """

    def __init__(self, beam: int, reads_on: bool = True, by_word: bool = False) -> None:
        super().__init__(whole_words=by_word)
        self.beam = beam
        self.reads_on = reads_on
        self.last = START
        self.waited = 0  # words that the next token has waited for
        self._ended = False
        self._needed = 0  # source tokens to read first

    @property
    def is_due(self) -> bool:
        if self.beam > 1 or self.closed:  # a beam search needs the whole sentence
            return self.closed and not self._ended
        return not self._ended and bool(self.due) and self._needed <= len(self.tokens)

    @property
    def longest(self) -> int:
        """Maximum length of the translation in tokens."""
        return max_target_length(len(self.tokens))

    def next_due(self) -> Due:
        """Return the first due position; it stays due until something is written."""
        if not self.due:
            self._plan(len(self.tokens), delay=0)
        due = self.due[0]
        needed = len(self.tokens) if self.beam > 1 else self._needed
        if due.visible < needed:
            visible = self._word_ends[needed - 1] if self._whole_words else needed
            due = due._replace(visible=visible, trigger=max(due.trigger, visible - 1))
            self.due[0] = due
        return due

    def write(self, tokens: list[int], is_stable: bool = True) -> Written:
        """Append the next target token, if it is stable, or, with a beam, the whole translation."""
        due = self.due[0]
        written = Written(tokens, min(due.position, len(self.tokens) - 1), due.trigger)
        is_complete = self.closed and due.visible == len(self.tokens)
        if not is_complete and (not is_stable or (tokens == [END] and self.reads_on)):
            self._needed = due.visible + 1
            self.waited = 0 if tokens == [END] else self.waited + 1
            return written._replace(tokens=[])
        self.due.popleft()
        self.waited = 0
        if self.beam > 1:
            self._ended = True
        else:
            (self.last,) = tokens
            self._ended = self.last == END or (self.closed and due.position + 1 == self.longest)
        return written

    def _plan_rest(self, delay: int) -> None:
        """Do nothing: the target length is unknown, so `next_due` plans one token at a time."""


class Seq2SeqDecoder:
    """Advances each sentence by a target token or, with a beam, by the whole translation."""

    def __init__(self, bundle: Bundle, threads: int) -> None:
        encoder, decoder = bundle.session("encoder", threads), bundle.session("decoder", threads)
        self.config = bundle.config
        self._is_causal = bundle.config.kind == "wait-k"
        self.caches = Caches([encoder, decoder])
        self._encoder = GraphRunner(encoder, self.caches)
        self._decoder = GraphRunner(decoder, self.caches)

    def open(self, beam: int = 1, reads_on: bool = True) -> Seq2SeqSentence:
        return Seq2SeqSentence(beam, reads_on, by_word=self.config.has_policy)

    def advance(self, sentences: Sequence[Seq2SeqSentence]) -> list[list[Written]]:
        """Compute a step for sentences that are due; return what each wrote."""
        due = {sentence: sentence.next_due() for sentence in sentences}
        for sentence in sentences:
            self.caches.reserve(sentence.slot, max(due[sentence].visible, due[sentence].position + 1))
        self.read({sentence: due[sentence].visible for sentence in sentences})
        found: dict[Seq2SeqSentence, tuple[list[int], bool]] = {}
        for batch in batches([sentence for sentence in sentences if sentence.beam == 1], lambda s: s.slot.pool):
            rows = [Row(sentence.slot, sentence.last, due[sentence], sentence.waited) for sentence in batch]
            for sentence, (symbol, is_stable) in zip(batch, self._next(rows), strict=True):
                found[sentence] = [symbol], is_stable
        for sentence in sentences:
            if sentence.beam > 1:
                found[sentence] = self._search(sentence, due[sentence]), True
        return [[sentence.write(*found[sentence])] for sentence in sentences]

    def _next(self, rows: Sequence[Row]) -> list[tuple[int, bool]]:
        """Return the next token of each row, and whether it is stable enough to be written."""
        if not self.config.has_policy:
            return [(symbol, True) for symbol in self.predict(rows, "symbols")["symbols"].tolist()]
        found = self.predict(rows, "symbols", "stability")
        thresholds = [self._threshold(row) for row in rows]
        return list(zip(found["symbols"].tolist(), (found["stability"] >= thresholds).tolist(), strict=True))

    def _threshold(self, row: Row) -> float:
        """Return the minimum stability of the next token of a row, which falls to zero over the maximum wait."""
        delay = row.due.delay
        if not delay:  # after the end of the sentence everything is written
            return 0.0
        return self.config.stability(delay) * max(0.0, 1 - row.waited / self.config.max_wait(delay))

    def read(self, ends: dict[Seq2SeqSentence, int]) -> None:
        """Encode the source tokens before each end that are not cached yet; the slots must be reserved."""
        behind = {sentence: end - sentence.cached for sentence, end in ends.items() if end > sentence.cached}
        size = max(1, ENCODED // max(behind.values(), default=1))
        for batch in batches(list(behind), lambda sentence: sentence.slot.pool, min(ROWS, size)):
            N = max(behind[sentence] for sentence in batch)
            binding = self._encoder.bind([sentence.slot for sentence in batch], N=N)
            batch.sort(key=lambda sentence: sentence.slot.row)
            seen = np.array([ends[sentence] for sentence in batch])
            tokens, positions = last_tokens(batch, seen.tolist(), N)
            binding.place("", tokens, positions)
            binding.show("mask", positions + 1 if self._is_causal else np.repeat(seen[:, None], N, axis=1))
            binding.run()
            for sentence in batch:
                sentence.cached = ends[sentence]

    def predict(self, rows: Sequence[Row], *outputs: str) -> dict[str, Array]:
        """Return predictions after the last token of each row: `symbols` [B], `scores` [B V] or `stability` [B]."""
        binding = self._decoder.bind([row.slot for row in rows], outputs, N=1)
        order = np.argsort([row.slot.row for row in rows])
        positions = np.array([[rows[index].due.position] for index in order])
        binding.place("", np.array([[rows[index].last] for index in order]), positions)
        binding.show("mask", positions + 1)
        binding.show("context_mask", np.array([[rows[index].due.visible] for index in order]))
        binding.inputs["penalty"][:, :, 0, 0] = np.where(positions == 0, NEVER, 0)  # no empty translations
        found = binding.run()
        return {output: found[output][:, 0, 0][np.argsort(order)] for output in outputs}

    def _search(self, sentence: Seq2SeqSentence, due: Due) -> list[int]:
        """Return the best translation of a complete sentence by beam search."""
        search = BeamSearch(sentence.beam, sentence.longest)
        slots = [sentence.slot, *(Slot() for _ in range(sentence.beam - 1))]
        for slot in slots:
            self.caches.reserve(slot, max(len(sentence.tokens), sentence.longest + 1))
        while not search.is_done:
            position = len(search.open[0])
            lasts = [hypothesis[-1] if hypothesis else START for hypothesis in search.open]
            here = due._replace(position=position)
            rows = [Row(slot, last, here) for slot, last in zip(slots, lasts, strict=False)]
            origins = search.extend(log_softmax(self.predict(rows, "scores")["scores"]))
            self.caches.rearrange(slots, origins)
        return search.best


class BeamSearch:
    """The hypotheses of a beam search; scores are divided by the length.

    Special symbols are never chosen, nor is END at the first position; at the maximum length only END is.
    """

    def __init__(self, size: int, longest: int) -> None:
        self._size = size
        self._longest = longest
        self.open: list[list[int]] = [[]]  # unfinished hypotheses, best first
        self._scores = np.zeros(1)
        self._done: list[tuple[float, list[int]]] = []  # best first

    def extend(self, log_probabilities: Array) -> list[int]:
        """Extend every open hypothesis [H V] by a token; return the index of the parent of each new one."""
        length = len(self.open[0])
        V = log_probabilities.shape[-1]
        totals = (self._scores[:, None] + self._allowed(log_probabilities, length)).ravel()
        # Each hypothesis has one END candidate, so twice the beam holds enough unfinished ones.
        ranked = np.argsort(-totals, kind="stable")[: 2 * self._size]
        grown = [(totals[index], int(index) // V, int(index) % V) for index in ranked if totals[index] > -math.inf]
        # END counts only among the best; otherwise low-ranked short hypotheses would finish.
        for score, origin, token in grown[: self._size]:
            if token == END:
                self._done.append((score / (length + 1), self.open[origin]))
        self._done = sorted(self._done, key=lambda done: -done[0])[: self._size]
        unfinished = [candidate for candidate in grown if candidate[2] != END][: self._size]
        self.open = [[*self.open[origin], token] for _, origin, token in unfinished]
        self._scores = np.array([score for score, _, _ in unfinished])
        return [origin for _, origin, _ in unfinished]

    @property
    def is_done(self) -> bool:
        """Whether there are enough finished hypotheses, or no open ones."""
        return len(self._done) == self._size or not self.open

    @property
    def best(self) -> list[int]:
        return self._done[0][1]

    def _allowed(self, log_probabilities: Array, length: int) -> Array:
        allowed = np.array(log_probabilities, dtype=np.float64)
        end = allowed[:, END].copy()
        allowed[:, : len(SPECIAL_SYMBOLS)] = -math.inf
        if length >= self._longest:
            allowed[:] = -math.inf
        if length > 0:
            allowed[:, END] = end
        return allowed


def max_target_length(source_tokens: int) -> int:
    """Return the maximum length of a translation in tokens."""
    return int(1.2 * source_tokens) + 10
