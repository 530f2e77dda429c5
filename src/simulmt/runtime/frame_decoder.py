"""Greedy decoding of transducers whose frames run through a decoder: model/frame_decoder.py.

The graph "ctc" computes the frames of positions that are due, for many positions at once; then the graph
"frame_decoder" writes frame by frame, since each needs the last symbol written. Both keep their keys and values in one
slot per sentence.

Axis letters: B rows (sentences), N positions, F frames of a position, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from simulmt.runtime.bundle import Bundle
from simulmt.runtime.caches import Array, Binding, GraphRunner
from simulmt.runtime.decoding import AutoregressiveDecoder, CTCSentence, Due, Written
from simulmt.text import BLANK, START


class FrameSentence(CTCSentence):
    """A sentence that remembers the last symbol it wrote, and whether its last frame wrote none."""

    def __init__(self, whole_words: bool = False) -> None:
        super().__init__(whole_words=whole_words)
        self.last = START
        self.waited = False

    def write(self, frames: Array, due: Due) -> Written:
        """Drop the blanks among the symbols [F] of a position."""
        symbols: list[int] = frames.tolist()
        tokens = [symbol for symbol in symbols if symbol != BLANK]
        self.last = [self.last, *tokens][-1]
        self.waited = symbols[-1] == BLANK
        return Written(tokens, due.position, due.trigger)


class FrameDecoder(AutoregressiveDecoder):
    """Advances sentences: computes frames in one call, then decodes them one by one."""

    positions_per_row = 8  # every frame is a call of its own: more would keep other streams waiting

    def __init__(self, bundle: Bundle, threads: int) -> None:
        session = bundle.session("frame_decoder", threads)
        super().__init__(bundle, threads, [session])
        self.cached_per_token = self.config.mu  # the decoder caches frames
        self._decoder = GraphRunner(session, self.caches)

    def open(self, beam: int = 1, reads_on: bool = True) -> FrameSentence:  # noqa: ARG002 - a transducer always reads the whole source
        assert beam == 1, "only full-sentence models use beam search"
        return FrameSentence(self.config.whole_words)

    def _outputs(self, batch: Sequence[CTCSentence]) -> list[str]:  # noqa: ARG002 - the same for all
        return ["frames"]

    def _frames(
        self, binding: Binding, batch: Sequence[CTCSentence], due: Mapping[CTCSentence, Sequence[Due]]
    ) -> Array:
        """Return the symbols [B N F]. Sentences change only when they `write`, so a failed step can be repeated."""
        frames = binding.run()["frames"]
        B, N, F, _ = frames.shape
        symbols = np.empty((B, N, F), dtype=np.int64)
        sentences = [sentence for sentence in batch if isinstance(sentence, FrameSentence)]
        last = np.array([sentence.last for sentence in sentences])
        waited = np.array([sentence.waited for sentence in sentences])
        step = self._decoder.bind([sentence.slot for sentence in sentences], ["scores"], N=1)
        for n in range(N):
            here = [due[sentence][n] for sentence in sentences]
            first = np.array([[F * each.position] for each in here])
            for frame in range(F):
                step.place("", last[:, None], first + frame)
                step.show("mask", first + frame + 1)
                step.inputs["frames"][:, 0] = frames[:, n, frame]
                step.inputs["waited"][:, 0, 0] = waited
                chosen = self.choose(sentences, here, frame, step.run()["scores"])
                symbols[:, n, frame] = chosen
                waited = chosen == BLANK
                last = np.where(waited, last, chosen)
        return symbols

    def choose(self, batch: Sequence[FrameSentence], due: Sequence[Due], frame: int, scores: Array) -> Array:  # noqa: ARG002 - the frame of the positions, for forced decoding
        """Return the symbols [B] that one frame of each sentence writes, given their scores [B V]."""
        for sentence, each, row in zip(batch, due, scores, strict=True):
            self._adjust(row, sentence, each)
        return scores.argmax(-1)
