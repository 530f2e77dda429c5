"""Transducer decoding: the symbol of each frame depends on the last symbols written.

Axis letters: B rows (sentences), N positions, F frames, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from simulmt.runtime.bundle import Bundle
from simulmt.runtime.caches import Array, Binding
from simulmt.runtime.ctc import CTCDecoder, CTCSentence
from simulmt.runtime.decoding import Due, Written
from simulmt.runtime.rules import EarlyFullStop
from simulmt.text import BLANK, START

History = tuple[int, ...]  # the last symbols written, newest first


class TransducerSentence(CTCSentence):
    """A sentence that remembers the last symbols it wrote."""

    def __init__(self, symbols: int, whole_words: bool = False) -> None:
        super().__init__(whole_words=whole_words)
        self.history: History = (START,) * symbols
        self.context: tuple[History, Array] | None = None  # the scores [V] that a history adds, once computed

    def write(self, frames: Array, due: Due) -> Written:
        """Return what the symbols [F] of a position write; equal symbols in a row are two."""
        tokens = [symbol for symbol in frames.tolist() if symbol != BLANK]
        for token in tokens:
            self.history = after(self.history, token)
        return Written(tokens, due.position, due.trigger)


class TransducerDecoder(CTCDecoder):
    """Advances transducer sentences: scores frames in one call, then adds the label context frame by frame."""

    def __init__(self, bundle: Bundle, threads: int) -> None:
        super().__init__(bundle, threads)
        self._context = bundle.session("context", threads)
        self._full_stops = EarlyFullStop(bundle.source, bundle.target) if self.config.rules.early_full_stop else None
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

    def _scores(
        self, binding: Binding, batch: Sequence[CTCSentence], due: Mapping[CTCSentence, Sequence[Due]]
    ) -> Array:
        """Return the scores [B N F V] of frames, after the blank penalty and the rule."""
        scores = binding.run()["scores"]
        scores[..., BLANK] -= binding.inputs["penalty"][..., 0]
        if self._full_stops is not None:
            for row, sentence in zip(scores, batch, strict=True):
                for frames, each in zip(row, due[sentence], strict=True):
                    if not self._full_stops.allows(sentence.tokens, each.position):
                        frames[:, self._full_stops.symbols] = -np.inf
        return scores

    def _frames(
        self, binding: Binding, batch: Sequence[CTCSentence], due: Mapping[CTCSentence, Sequence[Due]]
    ) -> Array:
        """Return the symbols [B N F]. Sentences change only when they `write`, so a failed step can be repeated."""
        scores = self._scores(binding, batch, due)
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
        unknown = [row for row in rows if batch[row].context is None or batch[row].context[0] != histories[row]]  # type: ignore[index]
        if unknown:
            found = self.context_scores([histories[row] for row in unknown])
            for row, scores in zip(unknown, found, strict=True):
                batch[row].context = (histories[row], scores)
        for row in rows:
            added[row] = batch[row].context[1]  # type: ignore[index]


def after(history: History, symbol: int) -> History:
    """Return the history after writing a symbol."""
    return (symbol, *history[:-1])
