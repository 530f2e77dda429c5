from __future__ import annotations

import gzip
import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from simulmt.data.dataset import Dataset
from simulmt.data.speech_noise import unpunctuated
from simulmt.errors import ConfigError, DataError, VocabularyError
from simulmt.model.beam import BeamConfig, beam_search
from simulmt.model.sampling import Sampler, SamplingConfig
from simulmt.model.seq2seq import Seq2SeqModel
from simulmt.text import END, Tokenizer
from simulmt.train import rewrite as rewriting
from simulmt.train.rewrite import (
    JoinedSet,
    RecognitionConfig,
    SpeechConfig,
    TranslationConfig,
    WeighingConfig,
    backtranslate_corpus,
    join_corpora,
    recognised_corpus,
    reorder_corpus,
    speech_corpus,
    translate_corpus,
    weigh_corpus,
)
from simulmt.train.systems import System, SystemConfig, build_model, load_model, save_model

from .helpers import SIZES, fork

CPU = torch.device("cpu")
SEARCH = BeamConfig(beam=2, length_penalty=1.5, max_ratio=0.5, max_extra=4)
DISTIL = TranslationConfig(SEARCH, batch_tokens=200, max_length=90)
PSEUDO = TranslationConfig(SEARCH, delay=2, batch_tokens=200, max_length=90)
GREEDY = BeamConfig(beam=1, length_penalty=0.0, max_ratio=0.5, max_extra=4)
DRAWN = TranslationConfig(GREEDY, batch_tokens=200, max_length=90, sampling=SamplingConfig(temperature=1.0, seed=3))


def save_random(system: System, dataset: Dataset, directory: Path) -> Path:
    layers = {"layers": 1} if system == "ctc" else {"encoder_layers": 1, "decoder_layers": 1}
    vocabularies = dataset.source_tokenizer.size, dataset.target_tokenizer.size
    config = SystemConfig(system, *vocabularies, {**SIZES, **layers})
    torch.manual_seed(5)
    model = build_model(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4)
    save_model(model, config, directory, {})
    return directory


@pytest.fixture(scope="module")
def teacher(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random("teacher", dataset, tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="module")
def wait_k(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random("wait-k", dataset, tmp_path_factory.mktemp("wait-k") / "final").parent


@pytest.fixture
def source(data: Path, tmp_path: Path) -> Path:
    """Sentences with, among them, an empty one and one that is too long."""
    lines = (data.parent / "text" / "train.source").read_text(encoding="utf-8").splitlines()[:24]
    lines[3], lines[15] = " \u3000", " ".join(lines)
    return write(tmp_path / "text.source", lines)


def write(path: Path, lines: Sequence[str]) -> Path:
    text = "".join(f"{line}\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def record(prefix: Path) -> dict[str, Any]:
    return dict(json.loads(prefix.with_name(f"{prefix.name}.json").read_text(encoding="utf-8")))


def results(prefix: Path) -> dict[str, bytes]:
    endings = ("source", "target", "json")
    assert {path.name for path in prefix.parent.glob(f"{prefix.name}.*")} == {f"{prefix.name}.{e}" for e in endings}
    return {ending: prefix.with_name(f"{prefix.name}.{ending}").read_bytes() for ending in endings}


class TestTranslation:
    @pytest.mark.parametrize("config", [DISTIL, PSEUDO])
    def test_every_line_is_paired_with_its_best_hypothesis(
        self, config: TranslationConfig, teacher: Path, wait_k: Path, data: Path, source: Path, tmp_path: Path
    ) -> None:
        directory = teacher if config.delay is None else wait_k
        prefix = tmp_path / "sub" / "out"
        made = translate_corpus(directory, data, source, prefix, config, CPU)
        dataset, (model, _) = Dataset.open(data), load_model(directory)
        assert isinstance(model, Seq2SeqModel)
        expected = []
        for number, line in enumerate(lines(source), start=1):
            ids = torch.tensor([[*dataset.source_tokenizer.encode(line), END]])
            if number not in (4, 16):
                (found,) = beam_search(model, ids, torch.tensor([ids.shape[1]]), SEARCH, config.delay)
                expected.append((line, dataset.target_tokenizer.decode(found[0].tokens)))
        sides = (lines(tmp_path / "sub" / f"out.{side}") for side in ("source", "target"))
        assert list(zip(*sides, strict=True)) == expected
        assert len({target for _, target in expected}) > 11
        assert made == record(prefix)
        assert (made["lines"], made["kept"], made["left"]) == (24, 22, {"empty": [4], "too_long": [16]})
        assert made["rewrite"] == ("distil" if config.delay is None else "pseudo")

    def test_shards_and_packing_change_no_bytes(
        self, teacher: Path, data: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        translate_corpus(teacher, data, source, tmp_path / "one", DISTIL, CPU)
        monkeypatch.setitem(rewriting.SHARD_LINES, "cpu", 7)
        translate_corpus(teacher, data, source, tmp_path / "many", DISTIL, CPU)
        packed = write(tmp_path / "text.gz", lines(source))
        translate_corpus(teacher, data, packed, tmp_path / "packed", DISTIL, CPU)
        one, many, unpacked = (results(tmp_path / name) for name in ("one", "many", "packed"))
        for side in ("source", "target"):
            assert one[side] == many[side] == unpacked[side]

    def test_it_goes_on_after_a_kill(self, teacher: Path, data: Path, source: Path, tmp_path: Path) -> None:
        folder = tmp_path / "killed.shards"
        translate_in_shards(teacher, data, source, tmp_path / "whole")
        killed = fork(translate_in_shards, teacher, data, source, tmp_path / "killed")
        until = time.monotonic() + 60
        while not list(folder.glob("*/*.json")) and killed.is_alive() and time.monotonic() < until:
            time.sleep(0.005)
        killed.kill()
        killed.join()
        finished = [fork(translate_in_shards, teacher, data, source, tmp_path / "killed") for _ in range(2)]
        for process in finished:
            process.join()
        assert [process.exitcode for process in finished] == [0, 0]
        assert results(tmp_path / "killed") == results(tmp_path / "whole")

    def test_no_model_is_loaded_for_a_result_that_is_there(
        self, teacher: Path, data: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = translate_corpus(teacher, data, source, tmp_path / "out", DISTIL, CPU)
        (tmp_path / "out.shards").mkdir()  # killed when all was done but this
        monkeypatch.setattr(rewriting, "load_model", lambda _: pytest.fail("the model was loaded"))
        assert translate_corpus(teacher, data, source, tmp_path / "out", DISTIL, CPU) == first
        assert not (tmp_path / "out.shards").exists()

    def test_a_translation_without_text_is_left_out(
        self, teacher: Path, data: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        nothing = Dataset.open(data).target_tokenizer.pieces.index("▁")
        monkeypatch.setattr(rewriting.CorpusTranslator, "_translate", lambda _, sentences: [[nothing]] * len(sentences))
        made = translate_corpus(teacher, data, source, tmp_path / "out", DISTIL, CPU)
        assert made["kept"] == 0
        assert len(made["left"]["no_translation"]) == 22

    def test_another_model_or_setting_is_another_result(
        self, teacher: Path, dataset: Dataset, data: Path, source: Path, tmp_path: Path
    ) -> None:
        translate_corpus(teacher, data, source, tmp_path / "out", DISTIL, CPU)
        before = results(tmp_path / "out")
        wider = TranslationConfig(BeamConfig(beam=3, max_extra=4), batch_tokens=200, max_length=90)
        other = tmp_path / "other"
        save_random("teacher", dataset, other)
        (other / "model.safetensors").write_bytes((teacher / "model.safetensors").read_bytes()[:-4] + b"\0\0\0\0")
        for model, config in ((teacher, wider), (other, DISTIL)):
            with pytest.raises(DataError, match="--overwrite"):
                translate_corpus(model, data, source, tmp_path / "out", config, CPU)
        assert results(tmp_path / "out") == before
        translate_corpus(teacher, data, source, tmp_path / "out", wider, CPU, overwrite=True)
        assert record(tmp_path / "out")["settings"]["search"]["beam"] == 3

    def test_the_wrong_model_is_refused(
        self, teacher: Path, wait_k: Path, dataset: Dataset, data: Path, source: Path, tmp_path: Path
    ) -> None:
        ctc = save_random("ctc", dataset, tmp_path / "ctc")
        for model, config, message in (
            (wait_k, DISTIL, "a wait-k model, but distillation needs a teacher"),
            (teacher, PSEUDO, "a teacher model, but pseudo references need a wait-k model"),
            (ctc, DISTIL, "a ctc model, but distillation"),
        ):
            (tmp_path / "out.target").write_text("somebody's text", encoding="utf-8")
            with pytest.raises(ConfigError, match=message):
                translate_corpus(model, data, source, tmp_path / "out", config, CPU, overwrite=True)
            assert (tmp_path / "out.target").exists()

    def test_other_vocabularies_are_refused(
        self, teacher: Path, data: Path, source: Path, tmp_path: Path, target_tokenizer: Tokenizer
    ) -> None:
        (tmp_path / "source.model").write_bytes((data / "source.model").read_bytes())
        (tmp_path / "target.model").write_bytes(target_tokenizer.model)
        with pytest.raises(VocabularyError, match=r"of \(300, 150\) pieces, but .* trained with \(300, 300\);"):
            translate_corpus(teacher, tmp_path, source, tmp_path / "out", DISTIL, CPU)

    @pytest.mark.parametrize(("setting", "value"), [("delay", 0), ("batch_tokens", 0), ("max_length", 0)])
    def test_bad_settings_are_named(self, setting: str, value: int) -> None:
        with pytest.raises(ConfigError, match=f"must be at least 1, got {value}"):
            TranslationConfig(**{setting: value})  # type: ignore[arg-type]


def translate_in_shards(teacher: Path, data: Path, source: Path, prefix: Path) -> None:
    torch.set_num_threads(1)
    rewriting.SHARD_LINES["cpu"] = 5
    translate_corpus(teacher, data, source, prefix, DISTIL, CPU)


class TestBackTranslation:
    def test_text_is_paired_with_its_tagged_translation(
        self, teacher: Path, data: Path, source: Path, tmp_path: Path
    ) -> None:
        translate_corpus(teacher, data, source, tmp_path / "ahead", DISTIL, CPU)
        made = backtranslate_corpus(teacher, data, source, tmp_path / "back", DISTIL, CPU)
        assert lines(tmp_path / "back.source") == [f"<bt> {line}" for line in lines(tmp_path / "ahead.target")]
        assert lines(tmp_path / "back.target") == lines(tmp_path / "ahead.source")
        assert made["rewrite"] == "backtranslate"
        assert made["left"] == {"empty": [4], "too_long": [16]}

    def test_draws_depend_on_the_seed_alone(
        self, teacher: Path, data: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(rewriting.SHARD_LINES, "cpu", 5)
        other = replace(DRAWN, sampling=SamplingConfig(seed=4))
        greedy = replace(DRAWN, sampling=None)
        for name, config in (("a", DRAWN), ("b", DRAWN), ("other", other), ("greedy", greedy)):
            backtranslate_corpus(teacher, data, source, tmp_path / name, config, CPU)
        drawn = {name: lines(tmp_path / f"{name}.source") for name in ("a", "b", "other", "greedy")}
        assert drawn["a"] == drawn["b"]
        assert len({tuple(each) for each in drawn.values()}) == 3
        assert record(tmp_path / "a")["settings"]["sampling"] == {"temperature": 1.0, "top_k": 0, "seed": 3}

    def test_draws_go_on_after_a_kill(self, teacher: Path, data: Path, source: Path, tmp_path: Path) -> None:
        draw_in_shards(teacher, data, source, tmp_path / "whole")
        killed = fork(draw_in_shards, teacher, data, source, tmp_path / "killed")
        until = time.monotonic() + 60
        while not list(tmp_path.glob("killed.shards/*/*.json")) and killed.is_alive() and time.monotonic() < until:
            time.sleep(0.005)
        killed.kill()
        killed.join()
        draw_in_shards(teacher, data, source, tmp_path / "killed")
        assert results(tmp_path / "killed") == results(tmp_path / "whole")

    def test_a_beam_cannot_draw(self) -> None:
        with pytest.raises(ConfigError, match="sampling needs a beam of 1, got 2"):
            TranslationConfig(SEARCH, sampling=SamplingConfig())
        with pytest.raises(ConfigError, match="temperature must be above 0"):
            SamplingConfig(temperature=0)
        with pytest.raises(ConfigError, match="top_k must not be negative"):
            SamplingConfig(top_k=-1)


def draw_in_shards(teacher: Path, data: Path, source: Path, prefix: Path) -> None:
    torch.set_num_threads(1)
    rewriting.SHARD_LINES["cpu"] = 5
    backtranslate_corpus(teacher, data, source, prefix, DRAWN, CPU)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (SamplingConfig(1.0), [0.2, 0.3, 0.5]),
        (SamplingConfig(0.5), [0.04 / 0.38, 0.09 / 0.38, 0.25 / 0.38]),
        (SamplingConfig(1.0, top_k=2), [0.0, 0.375, 0.625]),
    ],
)
def test_draws_follow_the_softmax(config: SamplingConfig, expected: list[float]) -> None:
    """Symbols that are never written, such as the blank, take no place among the most likely ones."""
    logits = torch.tensor([9.0, 9.0, 9.0, math.log(0.2), 9.0, 9.0, math.log(0.3), math.log(0.5)]).expand(20_000, -1)
    drawn = Sampler(config, torch.Generator().manual_seed(1))(logits)[:, [END, 6, 7]].argmax(-1)
    shares = torch.bincount(drawn, minlength=3) / len(logits)
    assert shares.tolist() == pytest.approx(expected, abs=0.015)


class TestReordering:
    @pytest.mark.parametrize(
        ("source", "target", "links", "expected"),
        [
            # the verb at the end of the German clause comes where English has it
            ("I have seen the boat", "ich habe das Boot gesehen", "0-0 1-1 2-4 3-2 4-3", "ich habe gesehen das Boot"),
            # "not" has no link and stays behind its predecessor, which moves
            ("a b c", "C not A", "2-0 0-2", "A C not"),
            # unaligned at the beginning: stays there; a word with two links waits for the later one
            ("a b c", "oh BC A", "1-1 2-1 0-2", "oh A BC"),
            ("a b", "B A", "", "B A"),
        ],
    )
    def test_words_by_hand(self, tmp_path: Path, source: str, target: str, links: str, expected: str) -> None:
        assert reordered(tmp_path, source, target, links) == expected

    @pytest.mark.parametrize(
        ("target", "links", "unit", "expected"),
        [
            ("船我看见", "1-0 0-1 2-2", "char", "我船看见"),
            ("船 我 看见", "1-0 0-1 2-2", "word", "我船看见"),  # cut into words: those stay whole, spaces go
            ("用 Python 写程序", "2-0 0-1 1-2", "char", "Python 写程序用"),
            ("用Python写程序", "2-0 0-1 1-2", "char", "Python写程序用"),
            ("在 New York，等", "2-0 0-1 0-2 1-3", "char", "New York，等在"),
            ("New 等York", "2-0 0-1 1-2", "char", "等York New"),
        ],
    )
    def test_ideographs_by_hand(self, tmp_path: Path, target: str, links: str, unit: Any, expected: str) -> None:
        assert reordered(tmp_path, "one two three", target, links, unit) == expected

    @settings(deadline=None, max_examples=30)
    @given(
        corpus=st.lists(
            st.tuples(
                st.integers(1, 6),
                st.lists(st.text("abc,.", min_size=1, max_size=3), min_size=1, max_size=6),
                st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5))),
            ),
            min_size=1,
            max_size=4,
        )
    )
    def test_no_word_is_lost_and_what_is_in_order_stays(
        self, corpus: list[tuple[int, list[str], set[tuple[int, int]]]], tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        folder = tmp_path_factory.mktemp("reorder")
        sources = [" ".join(["x"] * words) for words, _, _ in corpus]
        links = [[(i, j) for i, j in sorted(each) if i < words and j < len(target)] for words, target, each in corpus]
        paths = (
            write(folder / "text.source", sources),
            write(folder / "text.target", [" ".join(target) for _, target, _ in corpus]),
            write(folder / "text.links", [" ".join(f"{i}-{j}" for i, j in each) for each in links]),
        )
        reorder_corpus(*paths, folder / "out")
        assert lines(folder / "out.source") == sources
        for (_, target, _), each, line in zip(corpus, links, lines(folder / "out.target"), strict=True):
            assert Counter(line.split(" ")) == Counter(target)
            needed = {j: max(i for i, other in each if other == j) for _, j in each}
            if [needed[j] for j in sorted(needed)] == sorted(needed.values()):
                assert line == " ".join(target)  # nothing to do

    def test_empty_sides_are_left_out_of_both_files(self, tmp_path: Path) -> None:
        paths = (
            write(tmp_path / "text.source", ["a b", "", "a"]),
            write(tmp_path / "text.target", ["B A", "X", " "]),
            write(tmp_path / "text.links", ["0-1 1-0", "", ""]),
        )
        made = reorder_corpus(*paths, tmp_path / "out")
        assert made["left"] == {"empty": [2, 3]}
        assert (lines(tmp_path / "out.source"), lines(tmp_path / "out.target")) == (["a b"], ["A B"])

    @pytest.mark.parametrize(
        ("links", "message"),
        [
            (
                ["0-0", "0-2"],
                r"text\.links:2: links source unit 1 and target unit 3, .* has 2 and 2; is the text token",
            ),
            (["2-0", "0-0"], r"text\.links:1: links source unit 3"),
            (["0-0"], r"text\.links: has fewer lines than .*text\.source"),
            (["0-0", "", ""], r"text\.links: has more lines than .*text\.source"),
            (["0-0", "x"], r"text\.links:2: alignment link 'x'"),
        ],
    )
    def test_links_that_do_not_fit_are_named_by_file_and_line(
        self, tmp_path: Path, links: list[str], message: str
    ) -> None:
        paths = (
            write(tmp_path / "text.source", ["a b", "c d"]),
            write(tmp_path / "text.target", ["A B", "C D"]),
            write(tmp_path / "text.links", links),
        )
        with pytest.raises(DataError, match=message):
            reorder_corpus(*paths, tmp_path / "out")
        assert not (tmp_path / "out.target").exists()


def reordered(folder: Path, source: str, target: str, links: str, unit: Any = "word") -> str:
    paths = write(folder / "source", [source]), write(folder / "target", [target]), write(folder / "links", [links])
    reorder_corpus(*paths, folder / "out", ("word", unit))
    (line,) = lines(folder / "out.target")
    return line


@pytest.mark.parametrize("overwrite", [False, True])
class TestOwnInputs:
    """No rewriting replaces what it reads, whatever is asked for."""

    @pytest.fixture(autouse=True)
    def texts(self, tmp_path: Path) -> Iterator[None]:
        """They are there afterwards as before."""
        for name in ("mine.source", "mine.target", "other.source", "other.target", "other.links"):
            write(tmp_path / name, [] if name == "other.links" else ["a b", "c d"])
        before = sorted(tmp_path.rglob("*"))
        yield
        assert sorted(tmp_path.rglob("*")) == before
        assert lines(tmp_path / "mine.source") == lines(tmp_path / "mine.target") == ["a b", "c d"]

    @pytest.mark.parametrize("read", [0, 1, 2])
    def test_of_reordering(self, tmp_path: Path, read: int, overwrite: bool) -> None:
        paths = [tmp_path / f"other.{name}" for name in ("source", "target", "links")]
        paths[read] = tmp_path / "mine.target"
        source, target, links = paths
        with pytest.raises(ConfigError, match=r"mine: would replace its own input .*mine\.target"):
            reorder_corpus(source, target, links, tmp_path / "mine", overwrite=overwrite)

    @pytest.mark.parametrize("read", [0, 1])
    def test_of_speech_and_joining(self, tmp_path: Path, read: int, overwrite: bool) -> None:
        paths = [tmp_path / "other.source", tmp_path / "other.target"]
        other = JoinedSet(paths[0], paths[1])
        paths[read] = tmp_path / "mine.source"
        with pytest.raises(ConfigError, match=r"mine: would replace its own input .*mine\.source"):
            speech_corpus(paths[0], paths[1], tmp_path / "mine", SpeechConfig(), overwrite)
        with pytest.raises(ConfigError, match=r"mine: would replace its own input .*mine\.source"):
            join_corpora([other, JoinedSet(paths[0], paths[1])], tmp_path / "mine", overwrite)

    @pytest.mark.parametrize("read", ["mine.source", "model.json"])
    def test_of_translation(
        self, tmp_path: Path, teacher: Path, data: Path, monkeypatch: pytest.MonkeyPatch, read: str, overwrite: bool
    ) -> None:
        monkeypatch.setattr(rewriting, "load_model", lambda _: pytest.fail("the model was loaded"))
        prefix = tmp_path / "mine" if read == "mine.source" else teacher / "model"
        with pytest.raises(ConfigError, match=f"would replace its own input .*{read}"):
            translate_corpus(teacher, data, tmp_path / "mine.source", prefix, DISTIL, CPU, overwrite)
        assert (teacher / "model.json").exists()


class TestWeighing:
    @pytest.fixture
    def text(self, tmp_path: Path) -> tuple[Path, Path, Path]:
        """3,000 pairs in turn of three origins."""
        numbers, origins = range(3000), ["news", "law", "chat"] * 1000
        return (
            write(tmp_path / "text.source", [f"s{number}" for number in numbers]),
            write(tmp_path / "text.target", [f"t{number}" for number in numbers]),
            write(tmp_path / "text.labels.gz", origins),
        )

    def test_whole_weights_are_exact_and_the_order_stays(self, text: tuple[Path, Path, Path], tmp_path: Path) -> None:
        weigh_corpus(*text, tmp_path / "out", WeighingConfig({"law": 2, "chat": 0}))
        kept = [number for number in range(3000) for _ in range((1, 2, 0)[number % 3])]
        assert lines(tmp_path / "out.source") == [f"s{number}" for number in kept]
        assert lines(tmp_path / "out.target") == [f"t{number}" for number in kept]

    def test_parts_are_drawn_at_random_and_the_same_again(self, text: tuple[Path, Path, Path], tmp_path: Path) -> None:
        config = WeighingConfig({"law": 1.25}, others=0.5)
        for name, seed in (("a", 1), ("b", 1), ("c", 2)):
            weigh_corpus(*text, tmp_path / name, replace(config, seed=seed))
        taken = Counter(lines(tmp_path / "a.source"))
        counts = [Counter(taken[f"s{number}"] for number in range(first, 3000, 3)) for first in range(3)]
        assert counts[0].keys() == counts[2].keys() == {0, 1}
        assert counts[1].keys() == {1, 2}
        assert all(400 < counts[origin][1] < 600 for origin in (0, 2))
        assert 180 < counts[1][2] < 320
        assert lines(tmp_path / "a.source") == lines(tmp_path / "b.source") != lines(tmp_path / "c.source")
        assert [line[1:] for line in lines(tmp_path / "a.target")] == [
            line[1:] for line in lines(tmp_path / "a.source")
        ]

    def test_what_cannot_be_weighed_is_refused(self, text: tuple[Path, Path, Path], tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"no line says nwes; there are: news \(1,000\), law"):
            weigh_corpus(*text, tmp_path / "out", WeighingConfig({"nwes": 2}))
        with pytest.raises(DataError, match="every label has weight 0"):
            weigh_corpus(*text, tmp_path / "out", WeighingConfig({"law": 0}, others=0))
        for count, word in ((2999, "fewer"), (3001, "more")):
            labels = write(tmp_path / f"{count}.txt", ["news"] * count)
            with pytest.raises(DataError, match=f"{count}.txt: has {word} lines than"):
                weigh_corpus(text[0], text[1], labels, tmp_path / "out", WeighingConfig())
        for weight in (-1.0, math.nan, math.inf):
            with pytest.raises(ConfigError, match=r"a weight must be 0 or more, got .* for law"):
                WeighingConfig({"law": weight})
        assert not list(tmp_path.glob("out*source"))


class TestJoining:
    @pytest.fixture
    def sets(self, tmp_path: Path) -> list[tuple[Path, Path]]:
        """Three pairs, and two."""
        a, A, b, B = (
            write(tmp_path / f"{name}{suffix}", [f"{name} {number}" for number in range(count)])
            for name, suffix, count in (("a", ".txt", 3), ("A", ".gz", 3), ("b", ".txt", 2), ("B", ".txt", 2))
        )
        return [(a, A), (b, B)]

    def test_sets_follow_each_other(self, sets: list[tuple[Path, Path]], tmp_path: Path) -> None:
        made = join_corpora([JoinedSet(*sets[0], limit=2), JoinedSet(*sets[1], repeat=2)], tmp_path / "out")
        assert lines(tmp_path / "out.source") == ["a 0", "a 1", "b 0", "b 1", "b 0", "b 1"]
        assert lines(tmp_path / "out.target") == ["A 0", "A 1", "B 0", "B 1", "B 0", "B 1"]
        assert (made["lines"], made["kept"], made["left"]) == (6, 6, {})

    def test_one_set_as_it_is(self, sets: list[tuple[Path, Path]], tmp_path: Path) -> None:
        join_corpora([JoinedSet(*sets[1])], tmp_path / "out")
        assert (tmp_path / "out.source").read_bytes() == sets[1][0].read_bytes()
        assert (tmp_path / "out.target").read_bytes() == sets[1][1].read_bytes()

    def test_the_other_order_is_another_result(self, sets: list[tuple[Path, Path]], tmp_path: Path) -> None:
        join_corpora([JoinedSet(*sets[0]), JoinedSet(*sets[1])], tmp_path / "out")
        with pytest.raises(DataError, match="--overwrite"):
            join_corpora([JoinedSet(*sets[1]), JoinedSet(*sets[0])], tmp_path / "out")

    def test_what_cannot_be_joined_is_refused(self, sets: list[tuple[Path, Path]], tmp_path: Path) -> None:
        with pytest.raises(DataError, match="has 3 lines but"):
            join_corpora([JoinedSet(sets[0][0], sets[1][1])], tmp_path / "out")
        with pytest.raises(ConfigError, match="nothing to join"):
            join_corpora([], tmp_path / "out")
        with pytest.raises(ConfigError, match="repeat must be at least 1, got 0"):
            JoinedSet(*sets[0], repeat=0)
        with pytest.raises(ConfigError, match="limit must not be negative, got -1"):
            JoinedSet(*sets[0], limit=-1)


@pytest.mark.parametrize(
    ("text", "spoken"),
    [
        ("Well, I don't know... do you?", "well i don't know do you"),
        (
            'He said: "A well-known, 3.5-inch disk (50%) costs $1,000."',
            "he said a well-known 3.5-inch disk 50% costs $1,000",
        ),
        ("At 10:30 - or later -- ‘maybe’.", "at 10:30 or later maybe"),
        ("Größe; naïve_name!", "größe naïve name"),
        ("...", ""),
        ("İstanbul.", "i\u0307stanbul"),
        ("हिन्दी-पाठ, हिन्दी!", "हिन्दी-पाठ हिन्दी"),
        ("Cafe\u0301: q\u0303's", "café q\u0303's"),
        ("葛\U000e0100城。", "葛\U000e0100城"),
    ],
)
def test_speech_has_no_punctuation(text: str, spoken: str) -> None:
    assert unpunctuated(text) == spoken


def test_lines_without_words_are_listed_by_their_place_in_the_file(tmp_path: Path) -> None:
    source = write(tmp_path / "source", ["..." if number % 4 == 0 else "Word." for number in range(1, 201)])
    target = write(tmp_path / "target", ["Wort."] * 200)
    made = speech_corpus(source, target, tmp_path / "out", SpeechConfig(0.5))
    left = made["left"]["empty"]
    assert 10 < len(left) < 40
    assert all(number % 4 == 0 for number in left)
    assert left[-1] > made["lines"]


def test_a_share_of_the_pairs_as_speech(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text("".join(f"Line {number}.\n" for number in range(400)) + "!\n", encoding="utf-8")
    target.write_text("".join(f"Zeile {number}.\n" for number in range(400)) + "!\n", encoding="utf-8")
    record = speech_corpus(source, target, tmp_path / "some", SpeechConfig(0.25))
    spoken = (tmp_path / "some.source").read_text(encoding="utf-8").splitlines()
    kept = (tmp_path / "some.target").read_text(encoding="utf-8").splitlines()
    assert 60 < len(spoken) < 140
    assert [line.replace("line", "Zeile") + "." for line in spoken] == kept
    assert record["kept"] == len(spoken)
    everything = speech_corpus(source, target, tmp_path / "all", SpeechConfig(1.0))
    assert (everything["kept"], everything["left"]) == (400, {"empty": [401]})
    with pytest.raises(ConfigError, match="share"):
        SpeechConfig(0.0)


def test_noise_depends_on_seed_and_line_only(tmp_path: Path) -> None:
    lines = [f"We have read {number} of the books that they wrote, haven't we?" for number in range(200)]
    source, target = write(tmp_path / "source", lines), write(tmp_path / "target", lines)
    half = write(tmp_path / "half", lines[:100])

    def heard(source: Path, target: Path, seed: int) -> list[str]:
        prefix = tmp_path / f"{source.name}-{seed}"
        speech_corpus(source, target, prefix, SpeechConfig(1.0, seed, "en"))
        assert (
            prefix.with_suffix(".target").read_text(encoding="utf-8").splitlines() == lines[: len(heard_lines(prefix))]
        )
        return heard_lines(prefix)

    def heard_lines(prefix: Path) -> list[str]:
        return prefix.with_suffix(".source").read_text(encoding="utf-8").splitlines()

    everything = heard(source, target, 1)
    assert heard(half, half, 1) == everything[:100]
    assert heard(source, target, 2) != everything


def test_pairs_are_spoken_and_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "source", ["It is far.", "Good day to you.", "Nobody hears this."])
    target = write(tmp_path / "target", ["Es ist weit.", "Guten Tag.", "Niemand hört das."])
    heard = {"It is far.": "it is fair", "Good day to you.": "Good day to you.", "Nobody hears this.": "no bottles"}
    monkeypatch.setattr(rewriting, "open_recogniser", lambda _: None)
    monkeypatch.setattr(rewriting, "synthesise", lambda text, _: text)
    monkeypatch.setattr(rewriting, "transcribe", lambda _, text: heard[text])
    record = recognised_corpus(source, target, tmp_path / "out", RecognitionConfig(1.0))
    assert (tmp_path / "out.source").read_text(encoding="utf-8") == "it is fair\nGood day to you.\n"
    assert (tmp_path / "out.target").read_text(encoding="utf-8") == "Es ist weit.\nGuten Tag.\n"
    assert record["left"] == {"misheard": [3]}
    with pytest.raises(ConfigError, match=r"least_alike must be in 0..1"):
        RecognitionConfig(least_alike=2)
