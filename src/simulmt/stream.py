"""THE runtime: text goes in as it comes, the translation comes out in commits that are never taken back.

    translator = simulmt.load("en-zh")
    stream = translator.stream(delay=3)
    for chunk in source:
        for commit in stream.push(chunk):
            print(commit.text, end="", flush=True)

What a stream writes depends on its text, its delay and the model only: not on the chunks that the text came in, nor on
the streams that were advanced together with it. A stream is `open` until `finish`, then `finished` for good.

Many streams at once: `Translator.push_many`, or, for a scheduler, `Stream.accept` (takes text in, computes nothing),
`Translator.step` (computes a little for every stream that is due, together) and `Stream.take` (what was written).

A call that fails loses nothing: what it took in is still due, and what was written before it failed waits in the stream
for the next call.
"""

from __future__ import annotations

import enum
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from simulmt.config import require
from simulmt.errors import StreamError
from simulmt.runtime.autoregressive import Seq2SeqDecoder
from simulmt.runtime.bundle import Bundle, find
from simulmt.runtime.decoding import CTCDecoder, Sentence, Written
from simulmt.runtime.engine import Caches
from simulmt.runtime.marks import Marks
from simulmt.runtime.segment import ends_sentence
from simulmt.text import Detokenizer, WordSplitter

WHOLE_SENTENCE = sys.maxsize  # the delay of a model that waits for the end
LINES_TOGETHER = 32  # lines of a text that `translate` works on at the same time


@dataclass(frozen=True)
class Lag:
    """Milliseconds from the arrival of a source word to the commit of what it gave rise to, by cause."""

    policy: float  # until the look-ahead that the delay asks for had arrived as well
    queue: float  # until its computation began
    compute: float

    @property
    def total(self) -> float:
        return self.policy + self.queue + self.compute


@dataclass(frozen=True)
class Commit:
    """A piece of translation; the texts of all commits of a stream, joined, are the translation."""

    seq: int  # counts the commits of a stream from 1
    text: str
    source_words: int  # words of the whole stream that had been read for it
    lag: Lag
    sentence: int  # counts the sentences of a stream from 0


class StreamState(enum.Enum):
    OPEN = "open"
    FINISHED = "finished"


class Decoder(Protocol):
    """What a stream asks of a kind of model."""

    caches: Caches

    def open(self, beam: int) -> Sentence:
        """Begin a sentence."""

    def advance(self, sentences: Sequence[Any]) -> list[list[Written]]:
        """Compute something for sentences of this decoder that are due; what each of them wrote."""


class _Passage:
    """A sentence of a stream: what the model sees of it, and where each of its tokens came from."""

    def __init__(self, sentence: Sentence, number: int, detokenizer: Detokenizer, marks: Marks | None) -> None:
        self.sentence = sentence
        self.number = number
        self._detokenizer = detokenizer
        self._marks = marks
        self.has_text = False  # whether something of it was committed
        self.words: list[int] = []  # for each token, the words of the stream read by then
        self.arrived: list[float] = []  # for each token, when its word was complete

    def read(self, tokens: Sequence[int], delay: int, words_read: int, arrived: float) -> None:
        """Read the tokens of a word."""
        self.sentence.read(tokens, delay)
        self._note(len(tokens), words_read, arrived)

    def close(self, delay: int, words_read: int, arrived: float) -> None:
        self.sentence.close(delay)
        self._note(1, words_read, arrived)

    def _note(self, count: int, words_read: int, arrived: float) -> None:
        self.words += [words_read] * count
        self.arrived += [arrived] * count

    def write(self, tokens: Iterable[int], is_last: bool) -> str:
        """The text that tokens append; after the last ones also what has waited for more."""
        text = "".join(map(self._detokenizer.push, tokens))
        if self._marks is not None:
            text = self._marks.push(text)
            if is_last:
                text += self._marks.finish()
        return text

    def lag(self, position: int, trigger: int, started: float, now: float) -> Lag:
        policy = self.arrived[trigger] - self.arrived[position]
        return Lag(policy * 1000, (started - self.arrived[trigger]) * 1000, (now - started) * 1000)


class Stream:
    """One live translation; `Translator.stream` makes it."""

    def __init__(self, translator: Translator, delay: int, beam: int) -> None:
        self._translator = translator
        self._delay = delay
        self._beam = beam
        self._state = StreamState.OPEN
        self._splitter = WordSplitter()
        self._passages: deque[_Passage] = deque()  # the first is translated, the last is read
        self._words = 0
        self._sentences = 0
        self._commits = 0
        self._untaken: list[Commit] = []

    @property
    def state(self) -> StreamState:
        return self._state

    @property
    def delay(self) -> int | None:
        """k, or None for a model that waits for the end of the sentence."""
        return None if self._delay == WHOLE_SENTENCE else self._delay

    @property
    def sentences_finished(self) -> int:
        """How many sentences were read to their end and translated."""
        return self._sentences - len(self._passages)

    @property
    def is_due(self) -> bool:
        """Whether the text accepted so far leaves something to compute."""
        return bool(self._passages) and self.current.is_due

    @property
    def current(self) -> Sentence:
        """The sentence that is being translated, of a stream that is due."""
        return self._passages[0].sentence

    def push(self, text: str) -> list[Commit]:
        """Take in any chunk of text, be it characters, words or pages; what can now be written.

        A word is read once it is complete, that is, when white space or an ideograph follows it. A line break is
        white space like any other; where it ends a sentence, call `end_sentence`.

        If this or `end_sentence` fails while it computes, the text is taken in all the same: go on with the text that
        follows, or with `push("")`, and what is left comes with that.
        """
        self.accept(text)
        return self._translator.drain([self])[0]

    def end_sentence(self) -> list[Commit]:
        """The sentence is over, even without a full stop; the rest of its translation."""
        self.accept_end()
        return self._translator.drain([self])[0]

    def finish(self) -> list[Commit]:
        """The text is over; the rest of the translation. Nothing may be pushed after this.

        If it fails while it computes, call it again for what is left.
        """
        self.accept_finish()
        return self._translator.drain([self])[0]

    def set_delay(self, delay: int) -> None:
        """Change the delay; it counts from the next source word on."""
        self._require_open("set_delay")
        self._delay = self._translator.checked_delay(delay)

    def accept(self, text: str, arrived: float | None = None) -> None:
        """`push` without computing; `arrived` is when the text came in, by the translator's clock."""
        self._require_open("push")
        arrived = self._translator.clock() if arrived is None else arrived
        for word in self._splitter.push(text):
            self._read_word(word, arrived)

    def accept_end(self, arrived: float | None = None) -> None:
        """`end_sentence` without computing."""
        self._require_open("end_sentence")
        arrived = self._translator.clock() if arrived is None else arrived
        for word in self._splitter.flush():
            self._read_word(word, arrived)
        self._close(arrived)

    def accept_finish(self, arrived: float | None = None) -> None:
        """`finish` without computing."""
        if self._state is StreamState.FINISHED and (self.is_due or self._untaken):
            return  # it was called before, and failed
        self._require_open("finish")
        self.accept_end(arrived)
        self._state = StreamState.FINISHED

    def take(self) -> list[Commit]:
        """What was written and not taken yet."""
        taken, self._untaken = self._untaken, []
        return taken

    def _require_open(self, call: str) -> None:
        if self._state is not StreamState.OPEN:
            raise StreamError(f"{call}: this stream is finished; open another with Translator.stream()")

    def _read_word(self, word: str, arrived: float) -> None:
        config = self._translator.config
        pieces = self._translator.bundle.source.encode_word(word)
        room = config.longest - 1  # END comes on top
        read = len(self._passages[-1].words) if self._is_reading() else 0
        if read + len(pieces) > room:
            self._close(arrived)
        self._words += 1
        while pieces:
            passage = self._open_passage()
            free = room - len(passage.words)
            for tokens in self._translator.bundle.source.part_words(pieces[:free]):
                passage.read(tokens, self._delay, self._words, arrived)
            if len(passage.words) == room:
                self._close(arrived)
            pieces = pieces[free:]
        if ends_sentence(word, config.source_language, is_first=read == 0):
            self._close(arrived)

    def _is_reading(self) -> bool:
        return bool(self._passages) and not self._passages[-1].sentence.closed

    def _open_passage(self) -> _Passage:
        """The sentence that is being read, or a new one."""
        if not self._is_reading():
            sentence = self._translator.decoder.open(self._beam)
            detokenizer = Detokenizer(self._translator.bundle.target)
            marks = Marks() if self._translator.config.repeat_penalty else None
            self._passages.append(_Passage(sentence, self._sentences, detokenizer, marks))
            self._sentences += 1
        return self._passages[-1]

    def _close(self, arrived: float) -> None:
        if self._is_reading():
            self._passages[-1].close(self._delay, self._words, arrived)
        self._drop_finished()

    def _drop_finished(self) -> None:
        while self._passages and self._passages[0].sentence.is_over:
            self._passages.popleft()

    def commit(self, written: Sequence[Written], started: float, now: float) -> None:
        """Turn what `current` wrote, in a step that took from `started` to `now`, into commits for `take`."""
        for number, (tokens, position, trigger) in enumerate(written, start=1):
            passage = self._passages[0]
            text = passage.write(tokens, is_last=passage.sentence.is_over and number == len(written))
            if text:
                is_parted = self._commits > 0 and not passage.has_text and self._translator.bundle.target.spaced
                passage.has_text = True
                self._commits += 1
                lag = passage.lag(position, trigger, started, now)
                text = f" {text}" if is_parted else text
                self._untaken.append(Commit(self._commits, text, passage.words[trigger], lag, passage.number))
        self._drop_finished()


class Translator:
    """A loaded model, from which any number of streams can be opened; it may be shared by threads."""

    def __init__(self, bundle: Bundle, threads: int = 0, clock: Callable[[], float] = time.perf_counter) -> None:
        require(threads >= 0, f"threads must be 0, for all physical cores, or more, got {threads}")
        self.bundle = bundle
        self.config = bundle.config
        self.clock = clock
        self.decoder: Decoder = (CTCDecoder if bundle.config.kind == "ctc" else Seq2SeqDecoder)(bundle, threads)
        self._lock = threading.Lock()

    def stream(self, delay: int | None = None, beam: int = 1) -> Stream:
        """Open a stream; without a delay at the model's own."""
        if beam < 1:
            raise StreamError(f"beam must be at least 1, got {beam}")
        if beam > 1 and self.config.kind == "wait-k":
            raise StreamError(f"beam {beam}: a wait-k model writes token by token and cannot take back; use beam 1")
        return Stream(self, self.checked_delay(delay), beam)

    def translate(self, text: str, delay: int | None = None, beam: int = 1) -> str:
        """Translate a whole text, line by line: every line ends a sentence and gives one line."""
        lines = text.split("\n")
        translated: list[str] = []
        for start in range(0, len(lines), LINES_TOGETHER):
            streams = [self.stream(delay, beam) for _ in lines[start : start + LINES_TOGETHER]]
            for stream, line in zip(streams, lines[start:], strict=False):
                stream.accept(line)
                stream.accept_finish()
            translated += ["".join(commit.text for commit in commits) for commits in self.drain(streams)]
        return "\n".join(translated)

    def push_many(self, chunks: Iterable[tuple[Stream, str]]) -> list[list[Commit]]:
        """Push text into many streams and advance them together; the commits of each."""
        chunks = list(chunks)
        streams = [stream for stream, _ in chunks]
        self._require_own(streams)
        for stream, text in chunks:
            stream.accept(text)
        return self.drain(streams)

    def drain(self, streams: Sequence[Stream]) -> list[list[Commit]]:
        """Advance streams together until none of them is due; the commits of each."""
        while any(stream.is_due for stream in streams):
            self.step(streams)
        return [stream.take() for stream in streams]

    def step(self, streams: Sequence[Stream]) -> None:
        """Compute a little for every stream that is due, in as few calls as possible; each then holds what it wrote."""
        self._require_own(streams)
        with self._lock:
            started = self.clock()
            due = [stream for stream in dict.fromkeys(streams) if stream.is_due]
            written = self.decoder.advance([stream.current for stream in due])
            now = self.clock()
            for stream, news in zip(due, written, strict=True):
                stream.commit(news, started, now)

    def checked_delay(self, delay: int | None) -> int:
        """The delay, if the model was trained for it; its own default for None."""
        if self.config.kind == "full-sentence" and delay is None:
            return WHOLE_SENTENCE
        delay = self.config.default_delay if delay is None else delay
        if delay not in self.config.delays:
            trained = ", ".join(map(str, self.config.delays)) or "whole sentences only"
            raise StreamError(f"delay {delay}: {self.bundle.name} was trained for {trained}")
        return delay

    def _require_own(self, streams: Iterable[Stream]) -> None:
        if any(stream._translator is not self for stream in streams):
            raise StreamError(f"a stream of another translator cannot be advanced by this one ({self.bundle.name})")


def load(name_or_path: str | Path, threads: int = 0) -> Translator:
    """Load a model by the name of a shipped bundle or the path of any; `threads` 0 takes all physical cores."""
    return Translator(Bundle(find(name_or_path)), threads)
