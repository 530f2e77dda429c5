"""Evaluate speech translation on a long recording.

The recording is translated as one stream in simulated real time. The output is resegmented into the reference sentences
by minimum edit distance, as in mWERSegmenter. BLEU and StreamLAAL (Papi et al., 2024) are computed on these segments.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulmt.config import as_table
from simulmt.data.speech_noise import unpunctuated
from simulmt.errors import ConfigError, DataError
from simulmt.eval.latency import lagging, split_units
from simulmt.eval.quality import QualityScorer
from simulmt.eval.run import Job, TestSet
from simulmt.files import peak_memory_mb, write_atomic
from simulmt.runtime.revisions import Word
from simulmt.runtime.stream import Commit, Translator
from simulmt.speech.audio import BLOCK, ESPEAK, RATE, Samples, read_whole, synthesise
from simulmt.speech.live import LiveSpeech, SpeechClock, transcribe
from simulmt.speech.recogniser import Recogniser, open_recogniser
from simulmt.text.words import Unit

PAUSE = 0.6  # seconds of silence between joined sentences
CAUSES = ("recognition", "policy", "queue", "compute")


class Segment(NamedTuple):
    """A sentence of a recording."""

    source: str
    references: tuple[str, ...]
    start: float  # seconds
    duration: float


@dataclass(frozen=True)
class Recording:
    """A recording and its sentences."""

    samples: Samples
    segments: tuple[Segment, ...]

    @property
    def seconds(self) -> float:
        return len(self.samples) / RATE

    def sentences(self) -> Iterator[Samples]:
        """Yield the audio of each sentence, with the pause after it."""
        for segment in self.segments:
            yield self.samples[round(segment.start * RATE) : round((segment.start + segment.duration + PAUSE) * RATE)]

    @staticmethod
    def join(sentences: Sequence[tuple[Samples, str, tuple[str, ...]]]) -> Recording:
        """Join recordings of single sentences, with pauses between them."""
        if not sentences:
            raise DataError("no audio: the test set is empty")
        silence = np.zeros(int(PAUSE * RATE), np.float32)
        parts: list[Samples] = []
        segments = []
        position = 0
        for samples, source, references in sentences:
            segments.append(Segment(source, references, position / RATE, len(samples) / RATE))
            parts += [samples, silence]
            position += len(samples) + len(silence)
        return Recording(np.concatenate(parts), tuple(segments))


@dataclass(frozen=True)
class SpeechScores:
    """Scores of a recogniser with a translation model; lags are in milliseconds."""

    seconds: float
    sentences: int
    word_error_rate: float  # percent
    BLEU: float  # of speech recognised live
    BLEU_whole: float  # of each sentence recognised at once, for comparison
    BLEU_bare: float  # of the source text without case and punctuation
    BLEU_clean: float  # of the source text
    stream_laal: float
    stream_laal_ca: float  # computation-aware
    lag: dict[str, float]  # medians over commits: total and by cause
    lag_p90: float
    recognition_rtf: float  # real-time factor: seconds of computation per second of audio
    translation_rtf: float
    cpu_rtf: float  # of both, in CPU time, which does not depend on other load
    peak_memory_mb: float


class _Written(NamedTuple):
    """A target unit, and when it was written without and with computation time."""

    text: str
    ideal: float
    actual: float


class _Output(NamedTuple):
    """The output for a recording."""

    words: list[Word]
    commits: list[Commit]
    units: list[_Written]
    speech: LiveSpeech
    cpu_seconds: float
    peak_memory_mb: float


def score_speech(
    translator: Translator,
    recogniser: Recogniser,
    recording: Recording,
    delay: int | None,
    unit: Unit,
    report: Callable[[float], None] = lambda _: None,
) -> SpeechScores:
    """Translate a recording in simulated real time and score it; `report` is called with the seconds done."""
    output = _translate_speech(translator, recogniser, recording.samples, delay, unit, report)
    segments = recording.segments
    references = [split_units(segment.references[0], unit) for segment in segments]
    parts = resegment([written.text for written in output.units], references)
    sentences = [[output.units[index] for index in part] for part in parts]
    separator = " " if unit == "word" else ""
    scorer = QualityScorer(list(zip(*(segment.references for segment in segments), strict=True)))
    sources = [segment.source for segment in segments]

    def bleu(translations: Sequence[str]) -> float:
        return scorer.score(translations).scores["BLEU"].value

    def bleu_of_text(texts: Iterable[str]) -> float:
        return bleu([translator.translate(text, delay) for text in texts])

    lengths = [len(reference) for reference in references]
    ideal = [[written.ideal for written in sentence] for sentence in sentences]
    actual = [[written.actual for written in sentence] for sentence in sentences]
    transcript = " ".join(word.text for word in output.words if word.text)
    lags = [commit.lag for commit in output.commits]
    totals = [lag.total for lag in lags] or [0.0]
    return SpeechScores(
        seconds=recording.seconds,
        sentences=len(segments),
        word_error_rate=word_error_rate(transcript, " ".join(sources)),
        BLEU=bleu([separator.join(written.text for written in sentence) for sentence in sentences]),
        BLEU_whole=bleu_of_text(transcribe(recogniser, samples) for samples in recording.sentences()),
        BLEU_bare=bleu_of_text(map(unpunctuated, sources)),
        BLEU_clean=bleu_of_text(sources),
        stream_laal=stream_laal(ideal, segments, lengths),
        stream_laal_ca=stream_laal(actual, segments, lengths),
        lag={
            "total": statistics.median(totals),
            **{cause: statistics.median([getattr(lag, cause) for lag in lags] or [0.0]) for cause in CAUSES},
        },
        lag_p90=float(np.percentile(totals, 90)),
        recognition_rtf=output.speech.recognition_seconds / recording.seconds,
        translation_rtf=output.speech.translation_seconds / recording.seconds,
        cpu_rtf=output.cpu_seconds / recording.seconds,
        peak_memory_mb=output.peak_memory_mb,
    )


def run_speech_jobs(
    jobs: Sequence[Job],
    test_set: TestSet,
    audio: str,
    recogniser: str,
    threads: int,
    output: Path,
    report: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Translate a test set as a live stream of speech; write the scores of each job to OUTPUT/speech.json.

    `audio` is a directory of WAV files, one per sentence in order of name, or espeak-ng.
    """
    bundles = [(system, delay, origin) for system, delay, origin in jobs if not isinstance(origin, Path)]
    if len(bundles) < len(jobs):
        raise ConfigError("--audio: needs --model; a SimulEval log has no audio")
    opened = open_recogniser(recogniser)
    references = zip(*test_set.references, strict=True)
    recording = Recording.join(list(zip(sentence_audio(audio, test_set), test_set.sources, references, strict=True)))
    results = []
    for system, delay, bundle in bundles:
        scores = score_speech(
            Translator(bundle, threads),
            opened,
            recording,
            delay,
            "word" if bundle.target.spaced else "char",
            lambda done: report(f"{done:.0f} of {recording.seconds:.0f} s"),
        )
        results.append({"system": system, "delay": delay, "test_set": test_set.name, **as_table(scores)})
    document = {"recogniser": recogniser, "audio": audio, "files": test_set.files, "results": results}
    write_atomic(output / "speech.json", json.dumps(document, indent=2) + "\n")
    return results


def sentence_audio(audio: str, test_set: TestSet) -> Iterator[Samples]:
    """Yield the audio of each sentence, synthesised or from a directory."""
    if audio == ESPEAK:
        yield from map(synthesise, test_set.sources)
        return
    files = sorted(Path(audio).glob("*.wav"))
    if len(files) < len(test_set.sources):
        raise ConfigError(
            f"--audio {audio}: {len(files)} WAV files for {len(test_set.sources)} sentences; expected one per sentence"
        )
    yield from map(read_whole, files[: len(test_set.sources)])


def _translate_speech(
    translator: Translator,
    recogniser: Recogniser,
    samples: Samples,
    delay: int | None,
    unit: Unit,
    report: Callable[[float], None],
) -> _Output:
    translator.clock = clock = SpeechClock()
    words: list[Word] = []
    commits: list[Commit] = []
    characters: list[_Written] = []
    speech = LiveSpeech(translator, recogniser.start(), delay, words.extend)

    def record(written: Sequence[Commit], heard: float) -> None:
        commits.extend(written)
        characters.extend(_Written(character, heard, clock()) for commit in written for character in commit.text)

    began = time.process_time()
    for start in range(0, len(samples), BLOCK):
        block = samples[start : start + BLOCK]
        heard = (start + len(block)) / RATE
        clock.advance_to(heard)
        record(speech.push(block, arrived=heard), heard)
        report(heard)
    record(speech.finish(), len(samples) / RATE)
    cpu_seconds = time.process_time() - began
    return _Output(words, commits, _units(characters, unit), speech, cpu_seconds, peak_memory_mb() or math.nan)


def _units(characters: Sequence[_Written], unit: Unit) -> list[_Written]:
    """Group characters into target units; a word is written when its last character is."""
    text = "".join(character.text for character in characters)
    pattern = r"\S+" if unit == "word" else r"\S"
    return [characters[found.end() - 1]._replace(text=found[0]) for found in re.finditer(pattern, text)]


def word_error_rate(hypothesis: str, reference: str) -> float:
    """Return the word error rate in percent, ignoring case and punctuation."""
    words, expected = unpunctuated(hypothesis).split(), unpunctuated(reference).split()
    if not expected:
        raise DataError("word error rate: the reference has no words")
    return 100 * float(_edit_costs(words, expected)[-1, -1]) / len(expected)


def resegment(units: Sequence[str], references: Sequence[Sequence[str]]) -> list[list[int]]:
    """Split an output into reference sentences; return the indices of the units of each sentence.

    Units are assigned by minimum edit distance; an inserted unit goes to the sentence of the unit before it.
    """
    flat = [unit.lower() for reference in references for unit in reference]
    owners = [number for number, reference in enumerate(references) for _ in reference]
    parts: list[list[int]] = [[] for _ in references]
    costs = _edit_costs([unit.lower() for unit in units], flat)
    row, column = len(units), len(flat)
    while row > 0:
        cost = costs[row, column]
        is_pair = column > 0 and costs[row - 1, column - 1] + (units[row - 1].lower() != flat[column - 1]) == cost
        if not is_pair and column > 0 and costs[row, column - 1] + 1 == cost:
            column -= 1
            continue
        row -= 1
        owner = owners[max(0, column - 1)] if owners else 0
        parts[owner].append(row)
        column -= is_pair
    return [part[::-1] for part in parts]


def _edit_costs(hypothesis: Sequence[str], reference: Sequence[str]) -> NDArray[np.int32]:
    """Compute the edit distances of all prefixes; rows are prefixes of the hypothesis."""
    ids = {unit: number for number, unit in enumerate(dict.fromkeys([*hypothesis, *reference]))}
    expected = np.array([ids[unit] for unit in reference], np.int32)
    steps = np.arange(len(reference) + 1, dtype=np.int32)
    costs = np.empty((len(hypothesis) + 1, len(reference) + 1), np.int32)
    costs[0] = steps
    for row, unit in enumerate(hypothesis, start=1):
        before, best = costs[row - 1], costs[row]
        best[0] = row
        np.minimum(before[:-1] + (expected != ids[unit]), before[1:] + 1, out=best[1:])
        best[:] = np.minimum.accumulate(best - steps) + steps  # each step to the right costs one
    return costs


def stream_laal(
    delays: Sequence[Sequence[float]], segments: Sequence[Segment], reference_lengths: Sequence[int]
) -> float:
    """Return StreamLAAL in milliseconds; `delays` holds the times, in seconds, at which units were written.

    Sentences without output are skipped, as in simulstream.
    """
    scores = [
        lagging(
            [round(delay - segment.start, 6) for delay in of_sentence],
            round(segment.duration, 6),
            max(len(of_sentence), length),
        )
        for of_sentence, segment, length in zip(delays, segments, reference_lengths, strict=True)
        if of_sentence
    ]
    return 1000 * statistics.fmean(scores) if scores else float("nan")
