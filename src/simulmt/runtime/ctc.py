"""CTC decoding: score frames in batches, apply decoding rules, collapse repeated symbols.

Axis letters: B rows (sentences), N positions, R tokens read, F frames, V vocabulary, C capacity of a cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

import numpy as np

from simulmt.runtime.bundle import Bundle
from simulmt.runtime.caches import Array, Binding, Caches, GraphRunner
from simulmt.runtime.decoding import Due, SentenceState, Written, batches, last_tokens, log_softmax
from simulmt.runtime.rules import NO_RULES, Context, DecodingRules, SourcePrefix
from simulmt.text import BLANK

POSITIONS = 32  # positions in one call of a graph, over all its rows


class Collapse:
    """Collapse frames incrementally: drop blanks and symbols equal to that of the previous frame."""

    def __init__(self, rules: DecodingRules = NO_RULES) -> None:
        self._rules = rules
        self.previous = BLANK  # symbol of the previous frame
        self.context = Context()  # of the next symbol, for the rules

    def push(self, symbols: Iterable[int]) -> list[int]:
        """Return the symbols that these frames write."""
        written = []
        for symbol in symbols:
            if symbol not in (BLANK, self.previous):
                written.append(symbol)
                self.context = self._rules.extend(self.context, symbol)
            self.previous = symbol
        return written


class CTCSentence(SentenceState):
    """A sentence whose frames are collapsed incrementally."""

    wants_scores = False  # whether `write` is given log-probabilities instead of symbols

    def __init__(self, rules: DecodingRules = NO_RULES, whole_words: bool = False) -> None:
        super().__init__(whole_words)
        self.collapse = Collapse(rules)

    def write(self, frames: Array, due: Due) -> Written:
        """Collapse the symbols [F] of a position."""
        return Written(self.collapse.push(frames.tolist()), due.position, due.trigger)


class CTCDecoder:
    """Advances CTC sentences, in batches: reads tokens and computes the frames of positions that are due."""

    def __init__(self, bundle: Bundle, threads: int) -> None:
        session = bundle.session("ctc", threads)
        self.config = bundle.config
        self.caches = Caches([session])
        self._graph = GraphRunner(session, self.caches)
        self.rules = bundle.rules()

    def open(self, beam: int = 1, reads_on: bool = True) -> CTCSentence:  # noqa: ARG002 - CTC always reads the whole source
        assert beam == 1, "only full-sentence models use beam search"
        return CTCSentence(self.rules, self.config.whole_words)

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
        for sentence, rows in zip(batch, self._frames(binding, batch, due), strict=True):
            sentence.cached = max(sentence.cached, ends[sentence])
            yield sentence, rows

    def _outputs(self, batch: Sequence[CTCSentence]) -> list[str]:
        if batch[0].wants_scores:
            return ["scores"]
        return ["symbols", "scores"] if self.rules.filters else ["symbols"]

    def _frames(
        self, binding: Binding, batch: Sequence[CTCSentence], due: Mapping[CTCSentence, Sequence[Due]]
    ) -> Array:
        """Return the symbols [B N F] of these sentences, or the log-probabilities [B N F V] if they want scores."""
        found = binding.run()
        if "scores" in found:
            found["scores"][..., BLANK] -= binding.inputs["penalty"][..., 0]
        if batch[0].wants_scores:
            return log_softmax(found["scores"])
        symbols = found["symbols"].copy()  # the next batch may reuse the output buffer
        if self.rules.filters:
            for sentence, row, scores in zip(batch, symbols, found["scores"], strict=True):
                prefixes = (SourcePrefix(sentence.tokens[: each.visible]) for each in due[sentence])
                by_frame = [prefix for prefix in prefixes for _ in range(row.shape[1])]
                frames = (row.ravel().tolist(), scores.reshape(row.size, -1), by_frame)
                row.flat = self.rules.choose(*frames, sentence.collapse.previous, sentence.collapse.context)
        return symbols

    def _fill(self, binding: Binding, batch: Sequence[CTCSentence], due: Sequence[Sequence[Due]]) -> None:
        tokens = [[s.tokens[d.position] for d in row] for s, row in zip(batch, due, strict=True)]
        positions = np.array([[d.position for d in row] for row in due])
        binding.place("", np.array(tokens), positions)
        binding.show("read_mask", np.array([[d.visible for d in row] for row in due]))
        binding.show("mask", positions + 1)
        penalties = [[self.config.blank_penalty(d.delay) for d in row] for row in due]
        binding.inputs["penalty"][:, :, 0, 0] = penalties
