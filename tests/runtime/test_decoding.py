"""A failed step advances no sentence: repeated, together or alone, it gives the same result, so nothing is lost."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import groupby
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulmt.runtime.bundle import Kind
from simulmt.runtime.caches import Array, Binding
from simulmt.runtime.decoding import Collapse
from simulmt.runtime.stream import Commit, Stream, Translator
from simulmt.text import BLANK, Tokenizer
from tiny_models import AGREEMENTS, CONFIDENCES, facts, trained, translator

KINDS: tuple[Kind, ...] = ("ctc", "transducer", "wait-k", "full-sentence")
POLICY = "policy"  # a wait-k model that reads on until predictions agree
SYSTEMS = (*KINDS, POLICY)
SPOKEN = [
    "the old bridge over the river was closed. nobody knows why",
    "河 and 大! the wind is getting colder",
    9 * "the driver was waiting behind the barn in the cold wind ",
    "we",
]


@pytest.fixture(scope="module")
def translators(
    source_tokenizer: Tokenizer, target_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Translator]:
    folder = tmp_path_factory.mktemp("bundles")
    networks = {kind: trained(kind, source_tokenizer, target_tokenizer) for kind in KINDS}
    made: dict[str, Translator] = {kind: translator(networks[kind], kind, "fp32", folder) for kind in KINDS}
    policy = {"agreements": AGREEMENTS, "confidences": CONFIDENCES}
    made[POLICY] = translator(networks["wait-k"], "wait-k", "fp32", folder, POLICY, **policy)
    return made


@contextmanager
def faults(seed: int, share: float) -> Iterator[None]:
    """Make a share of all graph runs fail, half of them after writing to the caches."""
    dice, run = random.Random(seed), Binding.run

    def faulty(binding: Binding) -> dict[str, Array]:
        (what,) = dice.choices(["works", "fails before", "fails behind"], [1 - share, share / 2, share / 2])
        found = run(binding) if what != "fails before" else {}
        if what != "works":
            raise RuntimeError("a fault of the engine")
        return found

    with patch.object(Binding, "run", faulty):
        yield


def share_for(system: str) -> float:
    return 0.03 if system == "full-sentence" else 0.3  # a beam search is many runs in one step


def opened(model: Translator, system: str) -> list[Stream]:
    delays = (None,) if system == "full-sentence" else (1, 2, 3, 5)
    beams = (1, 3) if system == "full-sentence" else (1,)
    return [model.stream(delays[n % len(delays)], beams[n % len(beams)]) for n in range(len(SPOKEN))]


def drain(model: Translator, streams: list[Stream], seed: int) -> list[list[Commit]]:
    """Advance streams until none is due, retrying failures; return the commits of each."""
    dice, commits = random.Random(seed), [list[Commit]() for _ in streams]
    while due := [stream for stream in streams if stream.is_due]:
        some = dice.sample(due, dice.randint(1, len(due)))
        try:
            model.step(some)
        except RuntimeError:
            continue
        for stream in some:
            commits[streams.index(stream)] += stream.take()
    return commits


def finish(stream: Stream) -> list[Commit]:
    """Finish a stream, retrying failures."""
    while True:
        with suppress(RuntimeError):
            return stream.finish()


@pytest.mark.parametrize("system", SYSTEMS)
@given(seed=st.integers(0, 1_000))
@settings(max_examples=8, deadline=None)
def test_a_failed_step_can_be_repeated(translators: dict[str, Translator], system: str, seed: int) -> None:
    model = translators[system]
    found, alone = opened(model, system), opened(model, system)
    for stream, text in zip(found, SPOKEN, strict=True):
        stream.accept(text)
        stream.accept_finish()
    with faults(seed, share_for(system)):
        commits = drain(model, found, seed)
    for stream, text, written in zip(alone, SPOKEN, commits, strict=True):
        assert facts(written) == facts(stream.push(text) + stream.finish())


@pytest.mark.parametrize("system", SYSTEMS)
@given(seed=st.integers(0, 1_000))
@settings(max_examples=8, deadline=None)
def test_a_call_that_fails_loses_nothing(translators: dict[str, Translator], system: str, seed: int) -> None:
    model = translators[system]
    found, alone, commits = opened(model, system), opened(model, system), [list[Commit]() for _ in SPOKEN]
    with faults(seed, share_for(system)):
        for part in (slice(20), slice(20, 40), slice(40, None)):
            chunks = [(stream, text[part]) for stream, text in zip(found, SPOKEN, strict=True)]
            with suppress(RuntimeError):
                for written, news in zip(commits, model.push_many(chunks), strict=True):
                    written += news
        for stream, written in zip(found, commits, strict=True):
            with suppress(RuntimeError):
                written += stream.push("")
            written += finish(stream)
    for stream, text, written in zip(alone, SPOKEN, commits, strict=True):
        assert facts(written) == facts(stream.push(text) + stream.finish())


@pytest.mark.parametrize(
    ("frames", "written"),
    [
        ([7, 7, 7], [7]),
        ([7, BLANK, 7], [7, 7]),
        ([BLANK, BLANK, 6, BLANK, 7, 7, 6], [6, 7, 6]),
        ([BLANK], []),
        ([], []),
    ],
)
def test_collapse(frames: list[int], written: list[int]) -> None:
    assert Collapse().push(frames) == written


@given(st.lists(st.integers(BLANK, 7)), st.lists(st.integers(0, 5)))
def test_incremental_collapse_equals_collapse(frames: list[int], cuts: list[int]) -> None:
    collapse, written, rest = Collapse(), list[int](), frames
    for cut in cuts:
        written += collapse.push(rest[:cut])
        rest = rest[cut:]
    written += collapse.push(rest)
    assert written == [symbol for symbol, _ in groupby(frames) if symbol != BLANK]
