"""Evaluation jobs on a test set: bundles at delays, on text or speech, and logs of other systems."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from simulmt.config import as_table
from simulmt.errors import ConfigError
from simulmt.eval.results import check_system_name
from simulmt.eval.run import Evaluation, Evaluator, TestSet
from simulmt.runtime.bundle import Bundle, find
from simulmt.runtime.stream import Translator
from simulmt.speech import synthesis
from simulmt.speech.audio import Samples, read_whole
from simulmt.speech.recogniser import open_recogniser


class BundleJob(NamedTuple):
    """A bundle to score at a delay."""

    system: str
    delay: int | None
    bundle: Bundle


class LogJob(NamedTuple):
    """A log to score."""

    system: str
    delay: int | None
    path: Path


Job = BundleJob | LogJob


def bundle_jobs(models: Sequence[str], delays: Sequence[int]) -> Iterator[BundleJob]:
    """Yield a job for each delay of models given as [NAME=]MODEL; bundles of the same name are one system."""
    systems: defaultdict[str, list[Bundle]] = defaultdict(list)
    for text in models:
        is_named = "=" in text and not Path(text).exists()
        name, path = text.split("=", 1) if is_named else (None, text)
        bundle = Bundle(find(path))
        systems[check_system_name(bundle.name if name is None else name)].append(bundle)
    for system, bundles in systems.items():
        trained = {k for bundle in bundles for k in bundle.config.delays}
        if trained and not trained.issuperset(delays):
            listed = ", ".join(map(str, sorted(trained)))
            raise ConfigError(f"--delay {','.join(map(str, delays))}: {system} was trained for {listed}")
        for bundle in bundles:
            known = bundle.config.delays
            chosen = [k for k in delays or known if k in known] if known else [None]
            yield from (BundleJob(system, k, bundle) for k in chosen)


def check_jobs(jobs: Sequence[Job]) -> None:
    """Raise ConfigError if there are no jobs, or two of the same system at the same delay."""
    if not jobs:
        raise ConfigError("nothing to score: give --model or --log")
    seen = set()
    for job in jobs:
        if job[:2] in seen:
            raise ConfigError(f"system {job.system} is given twice at delay {job.delay}; rename one of them: NAME=...")
        seen.add(job[:2])


def run_jobs(evaluator: Evaluator, jobs: Iterable[Job], threads: int) -> Iterator[Evaluation]:
    """Yield the evaluation of each job; a bundle is loaded once for all its delays."""
    translator: Translator | None = None
    for job in jobs:
        if isinstance(job, LogJob):
            yield evaluator.log(job.system, job.path, job.delay)
            continue
        if translator is None or translator.bundle is not job.bundle:
            translator = Translator(job.bundle, threads)
        yield evaluator.bundle(job.system, translator, job.delay, threads)


def run_speech_jobs(
    jobs: Sequence[Job],
    test_set: TestSet,
    audio: str,
    recogniser: str,
    threads: int,
    report: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Translate a test set as a live stream of speech, and return the scores of each job.

    `audio` is a directory of WAV files, one per sentence in order of name, or espeak-ng.
    """
    from simulmt.eval.speech import Recording, score_speech  # not available on Windows

    bundles = [job for job in jobs if isinstance(job, BundleJob)]
    if len(bundles) < len(jobs):
        raise ConfigError("--audio: needs --model; a SimulEval log has no audio")
    opened = open_recogniser(recogniser)
    references = zip(*test_set.references, strict=True)
    recording = Recording.join(list(zip(read_audio(audio, test_set), test_set.sources, references, strict=True)))
    found = []
    for system, delay, bundle in bundles:
        scores = score_speech(
            Translator(bundle, threads),
            opened,
            recording,
            delay,
            "word" if bundle.target.spaced else "char",
            lambda done: report(f"{done:.0f} of {recording.seconds:.0f} s"),
        )
        found.append({"system": system, "delay": delay, "test_set": test_set.name, **as_table(scores)})
    return found


def read_audio(audio: str, test_set: TestSet) -> Iterator[Samples]:
    """Yield the audio of each sentence, synthesised or from a directory."""
    if audio == synthesis.COMMAND:
        yield from map(synthesis.synthesise, test_set.sources)
        return
    files = sorted(Path(audio).glob("*.wav"))
    if len(files) < len(test_set.sources):
        raise ConfigError(f"--audio {audio}: {len(files)} WAV files for {len(test_set.sources)} sentences")
    yield from map(read_whole, files[: len(test_set.sources)])
