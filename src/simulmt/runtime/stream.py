"""Live translation: text in, append-only commits out.

    translator = simulmt.load("en-zh")
    stream = translator.stream(delay=3)
    for chunk in source:
        for commit in stream.push(chunk):
            print(commit.text, end="", flush=True)

Output depends only on the text, the delay and the model, not on how the text was split into chunks or which streams
were batched together. A stream is `open` until `finish`, then `finished`.

To advance many streams in one batch use `Translator.push_many` or, in a scheduler, `Stream.accept` (buffer text),
`Translator.step` (compute a little for every stream that is due) and `Stream.take` (collect the output).

A call that fails loses nothing: accepted text is still due, and output is returned by the next call.
"""

from __future__ import annotations

import enum
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from simulmt.config import require
from simulmt.errors import StreamError
from simulmt.runtime.bundle import Bundle, Kind, find
from simulmt.runtime.decoding import Caches, CTCDecoder, SentenceState, TransducerDecoder, Written
from simulmt.runtime.seq2seq import Seq2SeqDecoder
from simulmt.text import Detokenizer, WordSplitter
from simulmt.text.words import ends_clause, ends_sentence

WHOLE_SENTENCE = sys.maxsize  # delay of a full-sentence model
MAX_UNDO = 20  # sentences
MAX_UNPUNCTUATED = 64  # source tokens without punctuation before a sentence is ended; models lose track of longer ones
LINES_PER_BATCH = 32  # lines that `translate` processes at once


@dataclass(frozen=True)
class Lag:
    """Milliseconds from a source word to its commit, by cause."""

    policy: float  # until the look-ahead required by the delay had arrived
    queue: float  # until its computation began
    compute: float
    recognition: float = 0.0  # from the end of the spoken word until its text arrived; 0 for text

    @property
    def total(self) -> float:
        return self.recognition + self.policy + self.queue + self.compute


@dataclass(frozen=True)
class Commit:
    """A piece of output; the joined texts of all commits are the translation."""

    seq: int  # counts the commits of a stream from 1
    text: str
    source_words: int  # words of the stream read before it was written
    lag: Lag
    sentence: int  # counts the sentences of a stream from 0


class Undone(NamedTuple):
    """A sentence that was undone."""

    sentence: int
    source: str


class StreamState(enum.Enum):
    OPEN = "open"
    FINISHED = "finished"


class Decoder(Protocol):
    """Interface of the decoders, one for each kind of model."""

    caches: Caches

    def open(self, beam: int = 1, reads_on: bool = True) -> SentenceState:
        """Begin a sentence."""

    def advance(self, sentences: Sequence[Any]) -> list[list[Written]]:
        """Compute a step for sentences that are due; return what each wrote."""


DECODERS: Mapping[Kind, Callable[[Bundle, int], Decoder]] = {
    "ctc": CTCDecoder,
    "transducer": TransducerDecoder,
    "wait-k": Seq2SeqDecoder,
    "full-sentence": Seq2SeqDecoder,
}


class _StreamSentence:
    """A sentence of a stream, with the source word and arrival time of each token."""

    def __init__(self, sentence: SentenceState, number: int, detokenizer: Detokenizer) -> None:
        self.sentence = sentence
        self.number = number
        self._detokenizer = detokenizer
        self.has_text = False  # whether any of it was committed
        self.words_read: list[int] = []  # for each token, how many words of the stream had been read
        self.arrived: list[float] = []  # for each token, when its word was complete
        self.recognition: list[float] = []  # for each token, the recognition time of its word

    def read(self, tokens: Sequence[int], delay: int, words_read: int, arrived: float, recognition: float) -> None:
        """Read the tokens of a word."""
        self.sentence.read(tokens, delay)
        self._append(len(tokens), words_read, arrived, recognition)

    def close(self, delay: int, words_read: int, arrived: float) -> None:
        self.sentence.close(delay)
        self._append(1, words_read, arrived, 0.0)

    def _append(self, count: int, words_read: int, arrived: float, recognition: float) -> None:
        self.words_read += [words_read] * count
        self.arrived += [arrived] * count
        self.recognition += [recognition] * count

    def write(self, tokens: Iterable[int]) -> str:
        """Return the text that tokens append."""
        return "".join(map(self._detokenizer.push, tokens))

    def lag(self, position: int, trigger: int, started: float, now: float) -> Lag:
        policy = self.arrived[trigger] - self.arrived[position]
        queue, compute = started - self.arrived[trigger], now - started
        return Lag(policy * 1000, queue * 1000, compute * 1000, self.recognition[position] * 1000)


class Stream:
    """A live translation, opened by `Translator.stream`."""

    def __init__(
        self, translator: Translator, delay: int, beam: int = 1, segment: bool = True, reads_on: bool = True
    ) -> None:
        self._translator = translator
        self._delay = delay
        self._beam = beam
        self._segment = segment
        self._reads_on = reads_on
        self._state = StreamState.OPEN
        self._splitter = WordSplitter()
        self._unfinished: deque[_StreamSentence] = deque()  # the first is being translated, the last is being read
        self._words = 0
        self._sentences = 0
        self._unpunctuated = 0  # tokens of the open sentence since its last punctuation mark
        self._commits = 0
        self._output: list[Commit] = []
        self._recent: deque[tuple[int, list[str]]] = deque(maxlen=MAX_UNDO)  # number and words of sentences

    @property
    def state(self) -> StreamState:
        return self._state

    @property
    def delay(self) -> int | None:
        """The delay k, or None for a full-sentence model."""
        return None if self._delay == WHOLE_SENTENCE else self._delay

    @property
    def sentences_finished(self) -> int:
        """Number of sentences read and translated completely."""
        return self._sentences - len(self._unfinished)

    @property
    def is_due(self) -> bool:
        """Whether there is something to compute for the text accepted so far."""
        return bool(self._unfinished) and self.current.is_due

    @property
    def current(self) -> SentenceState:
        """The sentence being translated; the stream must be due."""
        return self._unfinished[0].sentence

    def push(self, text: str) -> list[Commit]:
        """Push a chunk of text of any size; return the new commits.

        A word is read once it is complete, that is, when whitespace or an ideograph follows. Line breaks are plain
        whitespace; call `end_sentence` where they end a sentence.

        If this or `end_sentence` fails while computing, the text has still been accepted: continue with the text that
        follows, or with `push("")`, to get the rest.
        """
        self.accept(text)
        return self._translator.drain([self])[0]

    def end_sentence(self) -> list[Commit]:
        """End the sentence, even without a full stop; return the rest of its translation."""
        self.accept_end()
        return self._translator.drain([self])[0]

    def finish(self) -> list[Commit]:
        """End the text; return the rest of the translation. Nothing may be pushed afterwards.

        If it fails while computing, call it again to get the rest.
        """
        self.accept_finish()
        return self._translator.drain([self])[0]

    def set_delay(self, delay: int) -> None:
        """Change the delay, from the next source word on."""
        self._require_open("set_delay")
        self._delay = self._translator.checked_delay(delay)

    def accept(self, text: str, arrived: float | None = None, recognition: float = 0.0) -> None:
        """Accept text like `push`, but do not compute.

        `arrived` is the arrival time by the translator's clock, and `recognition` the seconds since its last word was
        spoken.
        """
        self._require_open("push")
        arrived = self._translator.clock() if arrived is None else arrived
        for word in self._splitter.push(text):
            self._read_word(word, arrived, recognition)

    def accept_end(self, arrived: float | None = None) -> None:
        """End the sentence like `end_sentence`, but do not compute."""
        self._require_open("end_sentence")
        arrived = self._translator.clock() if arrived is None else arrived
        for word in self._splitter.flush():
            self._read_word(word, arrived)
        self._close(arrived)

    def accept_finish(self, arrived: float | None = None) -> None:
        """End the text like `finish`, but do not compute."""
        if self._state is StreamState.FINISHED and (self.is_due or self._output):
            return  # an earlier call failed
        self._require_open("finish")
        self.accept_end(arrived)
        self._state = StreamState.FINISHED

    def undo(self) -> Undone | None:
        """Undo the last sentence; return it, or None if there is none.

        An open sentence is dropped. Its commits stay, but a display may strike them out. Nothing may be due, so that
        the result depends on the text only.
        """
        self._require_open("undo")
        if self.is_due:
            raise StreamError("undo: compute what is due first, for example with push('')")
        unread = self._splitter.flush()
        if self._is_reading():
            self._unfinished.pop()
        elif unread:
            self._recent.append((self._sentences, []))
            self._sentences += 1
        if not self._recent:
            return None
        sentence, words = self._recent.pop()
        return Undone(sentence, " ".join(words + unread))

    def take(self) -> list[Commit]:
        """Return the commits written since the last call."""
        taken, self._output = self._output, []
        return taken

    def _require_open(self, call: str) -> None:
        if self._state is not StreamState.OPEN:
            raise StreamError(f"{call}: this stream is finished; open another with Translator.stream()")

    def _read_word(self, word: str, arrived: float, recognition: float = 0.0) -> None:
        config = self._translator.config
        pieces = self._translator.bundle.source.encode_word(word)
        limit = config.longest - 1  # excluding END
        self._words += 1  # before a cut, since this word causes it
        if self._is_reading() and len(self._unfinished[-1].words_read) + len(pieces) > limit:
            self._close(arrived)
        is_first = not self._is_reading()
        self._unpunctuated = len(pieces) if is_first else self._unpunctuated + len(pieces)
        if ends_clause(word):
            self._unpunctuated = 0
        is_known = bool(pieces)  # an emoji, say, begins no sentence
        while pieces:
            unfinished = self._open_sentence()
            free = limit - len(unfinished.words_read)
            for tokens in self._translator.bundle.source.split_to_word_tokens(pieces[:free]):
                unfinished.read(tokens, self._delay, self._words, arrived, recognition)
            if len(unfinished.words_read) == limit:
                self._close(arrived)
            pieces = pieces[free:]
        # Other words are kept for undo, but only in an open sentence and up to its maximum length.
        if self._recent and (is_known or (self._is_reading() and len(self._recent[-1][1]) < config.longest)):
            self._recent[-1][1].append(word)
        is_endless = self._unpunctuated >= MAX_UNPUNCTUATED
        if self._segment and (is_endless or ends_sentence(word, config.source_language, is_first)):
            self._close(arrived)

    def _is_reading(self) -> bool:
        return bool(self._unfinished) and not self._unfinished[-1].sentence.closed

    def _open_sentence(self) -> _StreamSentence:
        """Return the open sentence, or start one."""
        if not self._is_reading():
            sentence = self._translator.decoder.open(self._beam, self._reads_on)
            detokenizer = Detokenizer(self._translator.bundle.target)
            self._unfinished.append(_StreamSentence(sentence, self._sentences, detokenizer))
            self._recent.append((self._sentences, []))
            self._sentences += 1
        return self._unfinished[-1]

    def _close(self, arrived: float) -> None:
        if self._is_reading():
            self._unfinished[-1].close(self._delay, self._words, arrived)
        self._drop_finished()

    def _drop_finished(self) -> None:
        while self._unfinished and self._unfinished[0].sentence.is_over:
            self._unfinished.popleft()

    def commit(self, written: Sequence[Written], started: float, now: float) -> None:
        """Convert what `current` wrote in a step from `started` to `now` to commits for `take`."""
        for tokens, position, trigger in written:
            unfinished = self._unfinished[0]
            text = unfinished.write(tokens)
            if text:
                needs_space = self._commits > 0 and not unfinished.has_text and self._translator.bundle.target.spaced
                unfinished.has_text = True
                self._commits += 1
                lag = unfinished.lag(position, trigger, started, now)
                text = f" {text}" if needs_space else text
                self._output.append(Commit(self._commits, text, unfinished.words_read[trigger], lag, unfinished.number))
        self._drop_finished()


class Translator:
    """A loaded model; opens any number of streams, and may be shared by threads."""

    def __init__(self, bundle: Bundle, threads: int = 0, clock: Callable[[], float] = time.perf_counter) -> None:
        require(threads >= 0, f"threads must be 0, for all physical cores, or more, got {threads}")
        self.bundle = bundle
        self.config = bundle.config
        self.clock = clock
        self.decoder: Decoder = DECODERS[bundle.config.kind](bundle, threads)
        self._lock = threading.Lock()

    def stream(self, delay: int | None = None, beam: int = 1, segment: bool = True, reads_on: bool = True) -> Stream:
        """Open a stream, by default with the model's own delay.

        A `beam` above 1 runs beam search on whole sentences; it needs a full-sentence model, or a wait-k model at its
        largest delay. With `segment=False` punctuation does not end a sentence; only `end_sentence`, `finish` and the
        model's maximum length do. With `reads_on=False` a wait-k model may end its translation before the source has
        been read.
        """
        delay = self.checked_delay(delay)
        if beam != 1:
            self._check_beam(beam, delay)
        return Stream(self, delay, beam, segment, reads_on)

    def translate(self, text: str, delay: int | None = None, beam: int = 1) -> str:
        """Translate a whole text, line by line: every line ends a sentence and gives one line of output.

        The default delay is the model's largest, which gives the best quality, since the whole text is available.
        Full-sentence and wait-k models take a `beam`.
        """
        if delay is None:
            delay = self.config.largest_delay
        lines = text.split("\n")
        translated: list[str] = []
        for start in range(0, len(lines), LINES_PER_BATCH):
            streams = [self.stream(delay, beam) for _ in lines[start : start + LINES_PER_BATCH]]
            for stream, line in zip(streams, lines[start:], strict=False):
                stream.accept(line)
                stream.accept_finish()
            translated += ["".join(commit.text for commit in commits) for commits in self.drain(streams)]
        return "\n".join(translated)

    def push_many(self, chunks: Iterable[tuple[Stream, str]]) -> list[list[Commit]]:
        """Push text into many streams in one batch; return the commits of each."""
        chunks = list(chunks)
        streams = [stream for stream, _ in chunks]
        self._require_own(streams)
        for stream, text in chunks:
            stream.accept(text)
        return self.drain(streams)

    def drain(self, streams: Sequence[Stream]) -> list[list[Commit]]:
        """Advance streams in batches until none is due; return the commits of each."""
        while any(stream.is_due for stream in streams):
            self.step(streams)
        return [stream.take() for stream in streams]

    def step(self, streams: Sequence[Stream]) -> None:
        """Compute a step for every stream that is due, in as few batches as possible."""
        self._require_own(streams)
        with self._lock:
            started = self.clock()
            due = [stream for stream in dict.fromkeys(streams) if stream.is_due]
            written = self.decoder.advance([stream.current for stream in due])
            now = self.clock()
            for stream, tokens_written in zip(due, written, strict=True):
                stream.commit(tokens_written, started, now)

    def checked_delay(self, delay: int | None) -> int:
        """Return `delay` if the model was trained for it, or the default for None."""
        if self.config.kind == "full-sentence" and delay is None:
            return WHOLE_SENTENCE
        delay = self.config.default_delay if delay is None else delay
        if delay not in self.config.delays:
            trained = ", ".join(map(str, self.config.delays)) or "whole sentences only"
            raise StreamError(f"delay {delay!r}: {self.bundle.name} was trained for {trained}")
        return delay

    def _check_beam(self, beam: int, delay: int) -> None:
        kind, largest = self.config.kind, self.config.largest_delay
        if beam < 1:
            raise StreamError(f"beam must be at least 1, got {beam}")
        if kind not in ("full-sentence", "wait-k"):
            raise StreamError(f"beam {beam}: a {kind} model writes while it reads; use beam 1")
        if kind == "wait-k" and delay != largest:
            raise StreamError(f"beam {beam}: a beam search reads whole sentences; use delay {largest}, or beam 1")

    def _require_own(self, streams: Iterable[Stream]) -> None:
        if any(stream._translator is not self for stream in streams):
            raise StreamError(f"a stream of another translator cannot be advanced by this one ({self.bundle.name})")


def load(name_or_path: str | Path, threads: int = 0) -> Translator:
    """Load a shipped model by name, or a bundle by path; `threads` 0 uses OMP_NUM_THREADS or all cores."""
    return Translator(Bundle(find(name_or_path)), threads)
