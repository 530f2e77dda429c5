"""Transducer decoding: the symbol of each frame depends on what was written before.

Axis letters: B rows (sentences), N positions, F frames, V vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from simulmt.runtime.bundle import Bundle
from simulmt.runtime.caches import Array, Binding, Caches, GraphRunner, Slot
from simulmt.runtime.ctc import CTCDecoder, CTCSentence
from simulmt.runtime.decoding import Due, Written
from simulmt.runtime.rules import EarlyFullStop
from simulmt.text import BLANK, PAD, START

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
        self.history = after(self.history, tokens)
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

    def _run(
        self, binding: Binding, batch: Sequence[CTCSentence], due: Mapping[CTCSentence, Sequence[Due]]
    ) -> dict[str, Array]:
        """Compute frames; apply the blank penalty and the rule to their scores [B N F V]."""
        outputs = binding.run()
        scores = outputs["scores"]
        scores[..., BLANK] -= binding.inputs["penalty"][..., 0]
        if self._full_stops is not None:
            for row, sentence in zip(scores, batch, strict=True):
                for frames, each in zip(row, due[sentence], strict=True):
                    if not self._full_stops.allows(sentence.tokens, each.position):
                        frames[:, self._full_stops.symbols] = -np.inf
        return outputs

    def _frames(
        self, binding: Binding, batch: Sequence[CTCSentence], due: Mapping[CTCSentence, Sequence[Due]]
    ) -> Array:
        """Return the symbols [B N F]. Sentences change only when they `write`, so a failed step can be repeated."""
        scores = self._run(binding, batch, due)["scores"]  # [B N F V]
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
                histories[row] = after(histories[row], [int(chosen[row])])
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


class Position(NamedTuple):
    """A source position: the sum of its frames, and the symbols that they wrote."""

    frames: Array  # [D]
    symbols: Array  # [F]


class AttentionSentence(TransducerSentence):
    """A sentence whose label context attends to earlier positions; the last one is not in the cache yet."""

    def __init__(self, symbols: int, last: Position, whole_words: bool = False) -> None:
        super().__init__(symbols, whole_words)
        self.last = last
        self.computed: list[Position] = []  # positions that were computed but not yet written

    def write(self, frames: Array, due: Due) -> Written:
        self.last = self.computed.pop(0)
        return super().write(frames, due)


class AttentionTransducerDecoder(TransducerDecoder):
    """Advances transducer sentences whose label context attends: one call of its graph for each position."""

    def __init__(self, bundle: Bundle, threads: int) -> None:
        super().__init__(bundle, threads)
        self.caches = Caches([self._session, self._context])
        self._graph = GraphRunner(self._session, self.caches)
        self._choose = GraphRunner(self._context, self.caches)
        width = next(each.shape[2] for each in self._context.get_inputs() if each.name == "frames_before")
        self.nothing = Position(np.zeros(width, dtype=np.float32), np.full(self.config.mu, PAD))

    def open(self, beam: int = 1, reads_on: bool = True) -> AttentionSentence:  # noqa: ARG002 - a transducer always reads the whole source
        assert beam == 1, "only full-sentence models use beam search"
        return AttentionSentence(self.symbols, self.nothing, self.config.whole_words)

    def choose(
        self,
        slots: Sequence[Slot],
        positions: Sequence[int],
        scores: Array,
        frames: Array,
        histories: Sequence[History],
        before: Sequence[Position],
        outputs: Sequence[str] = ("symbols",),
    ) -> dict[str, Array]:
        """Choose the symbols [B F] of one position of each row, given the scores [B F V] of its frames [B F D]."""
        binding = self._choose.bind(slots, outputs, N=1)
        at = np.array(positions)[:, None]
        binding.show("mask", at + 1)
        binding.inputs["slots"][..., 3] = at[:, :, None]
        binding.inputs["scores"][:, 0] = scores
        binding.inputs["frames"][:, 0] = frames
        binding.inputs["history"][:] = histories
        binding.inputs["frames_before"][:, 0] = [position.frames for position in before]
        binding.inputs["symbols_before"][:, 0] = [position.symbols for position in before]
        return binding.run()

    def _outputs(self, batch: Sequence[CTCSentence]) -> list[str]:  # noqa: ARG002 - the same for all
        return ["scores", "frames"]

    def _frames(
        self, binding: Binding, batch: Sequence[CTCSentence], due: Mapping[CTCSentence, Sequence[Due]]
    ) -> Array:
        """Return the symbols [B N F]. Sentences change only when they `write`, so a failed step can be repeated."""
        sentences = [sentence for sentence in batch if isinstance(sentence, AttentionSentence)]
        outputs = self._run(binding, batch, due)
        scores, frames = outputs["scores"], outputs["frames"]  # [B N F V], [B N F D]
        symbols = np.empty(scores.shape[:3], dtype=np.int64)
        slots = [sentence.slot for sentence in sentences]
        histories = [sentence.history for sentence in sentences]
        computed = [[sentence.last] for sentence in sentences]
        for n, sums in enumerate(frames.sum(2).swapaxes(0, 1)):  # [B D]
            positions = [due[sentence][n].position for sentence in sentences]
            before = [row[-1] for row in computed]
            found = self.choose(slots, positions, scores[:, n], frames[:, n], histories, before)
            symbols[:, n] = found["symbols"]
            histories = [after(history, row.tolist()) for history, row in zip(histories, symbols[:, n], strict=True)]
            for row, *position in zip(computed, sums, symbols[:, n], strict=True):
                row.append(Position(*position))
        for sentence, (_, *positions_computed) in zip(sentences, computed, strict=True):
            sentence.computed = positions_computed
        return symbols


def transducer_decoder(bundle: Bundle, threads: int) -> TransducerDecoder:
    """Return the decoder for the label context of a bundle."""
    attends = bundle.config.label_context == "attention"
    return (AttentionTransducerDecoder if attends else TransducerDecoder)(bundle, threads)


def after(history: History, symbols: Sequence[int]) -> History:
    """Return the history after the symbols of some frames."""
    for symbol in symbols:
        if symbol != BLANK:
            history = (symbol, *history[:-1])
    return history
