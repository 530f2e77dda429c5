from __future__ import annotations

import json
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.helpers import lines, unchanged_texts, write
from simulmt.data import transforms
from simulmt.data.store import Dataset
from simulmt.data.transforms import Dropped, Job, Progress, Rewritten, exclusive_lock
from simulmt.errors import ConfigError, DataError, VocabularyError
from simulmt.model.beam import BeamConfig, Sampler, SamplingConfig, beam_search
from simulmt.model.seq2seq import Seq2SeqModel
from simulmt.text import END, Tokenizer
from simulmt.train import rewrite as rewriting
from simulmt.train.rewrite import (
    RecognitionConfig,
    TranslationConfig,
    recognised_corpus,
    rewrite,
    translate_corpus,
)
from simulmt.train.systems import System, SystemConfig, build_model, load_model, save_model

from .helpers import SIZES, fork

CPU = torch.device("cpu")
SEARCH = BeamConfig(beam=2, length_penalty=1.5, max_ratio=0.5, max_extra=4)
DISTIL = TranslationConfig(SEARCH, batch_tokens=200, max_length=90)
PSEUDO = TranslationConfig(SEARCH, delay=2, batch_tokens=200, max_length=90)
GREEDY = BeamConfig(beam=1, length_penalty=0.0, max_ratio=0.5, max_extra=4)
DRAWN = TranslationConfig(GREEDY, batch_tokens=200, max_length=90, sampling=SamplingConfig(temperature=1.0, seed=3))
LINES = [f"line {number}" for number in range(1, 24)]


def save_random(system: System, dataset: Dataset, directory: Path, seed: int = 5, std: float = 0.4) -> Path:
    layers = {"layers": 1} if system == "ctc" else {"encoder_layers": 1, "decoder_layers": 1}
    vocabularies = dataset.source_tokenizer.size, dataset.target_tokenizer.size
    config = SystemConfig(system, *vocabularies, {**SIZES, **layers})
    torch.manual_seed(seed)
    model = build_model(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=std)
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
    """Write sentences, among them an empty one and one that is too long."""
    lines = (data.parent / "text" / "train.source").read_text(encoding="utf-8").splitlines()[:24]
    lines[3], lines[15] = " \u3000", " ".join(lines)
    return write(tmp_path / "text.source", lines)


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

    def test_it_resumes_after_a_kill(self, teacher: Path, data: Path, source: Path, tmp_path: Path) -> None:
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

    def test_no_model_is_loaded_for_an_existing_result(
        self, teacher: Path, data: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = translate_corpus(teacher, data, source, tmp_path / "out", DISTIL, CPU)
        (tmp_path / "out.shards").mkdir()  # killed before this last step
        monkeypatch.setattr(rewriting, "load_model_or_bundle", lambda _: pytest.fail("the model was loaded"))
        assert translate_corpus(teacher, data, source, tmp_path / "out", DISTIL, CPU) == first
        assert not (tmp_path / "out.shards").exists()

    def test_a_translation_without_text_is_left_out(
        self, teacher: Path, data: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        nothing = Dataset.open(data).target_tokenizer.pieces.index("▁")
        monkeypatch.setattr(rewriting.CorpusTranslator, "_translate", lambda _, s, __: [[[nothing]]] * len(s))
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
        made = translate_corpus(teacher, data, source, tmp_path / "back", DISTIL, CPU, back=True)
        assert lines(tmp_path / "back.source") == [f"<bt> {line}" for line in lines(tmp_path / "ahead.target")]
        assert lines(tmp_path / "back.target") == lines(tmp_path / "ahead.source")
        assert made["rewrite"] == "backtranslate"
        assert made["left"] == {"empty": [4], "too_long": [16]}

    def test_samples_depend_on_the_seed_alone(
        self, teacher: Path, data: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(rewriting.SHARD_LINES, "cpu", 5)
        other = replace(DRAWN, sampling=SamplingConfig(seed=4))
        greedy = replace(DRAWN, sampling=None)
        for name, config in (("a", DRAWN), ("b", DRAWN), ("other", other), ("greedy", greedy)):
            translate_corpus(teacher, data, source, tmp_path / name, config, CPU, back=True)
        drawn = {name: lines(tmp_path / f"{name}.source") for name in ("a", "b", "other", "greedy")}
        assert drawn["a"] == drawn["b"]
        assert len({tuple(each) for each in drawn.values()}) == 3
        assert record(tmp_path / "a")["settings"]["sampling"] == {"temperature": 1.0, "top_k": 0, "seed": 3}

    def test_samples_resume_after_a_kill(self, teacher: Path, data: Path, source: Path, tmp_path: Path) -> None:
        draw_in_shards(teacher, data, source, tmp_path / "whole")
        killed = fork(draw_in_shards, teacher, data, source, tmp_path / "killed")
        until = time.monotonic() + 60
        while not list(tmp_path.glob("killed.shards/*/*.json")) and killed.is_alive() and time.monotonic() < until:
            time.sleep(0.005)
        killed.kill()
        killed.join()
        draw_in_shards(teacher, data, source, tmp_path / "killed")
        assert results(tmp_path / "killed") == results(tmp_path / "whole")

    def test_sampling_refuses_a_beam(self) -> None:
        with pytest.raises(ConfigError, match="sampling needs a beam of 1, got 2"):
            TranslationConfig(SEARCH, sampling=SamplingConfig())
        with pytest.raises(ConfigError, match="temperature must be above 0"):
            SamplingConfig(temperature=0)
        with pytest.raises(ConfigError, match="top_k must not be negative"):
            SamplingConfig(top_k=-1)


def draw_in_shards(teacher: Path, data: Path, source: Path, prefix: Path) -> None:
    torch.set_num_threads(1)
    rewriting.SHARD_LINES["cpu"] = 5
    translate_corpus(teacher, data, source, prefix, DRAWN, CPU, back=True)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (SamplingConfig(1.0), [0.2, 0.3, 0.5]),
        (SamplingConfig(0.5), [0.04 / 0.38, 0.09 / 0.38, 0.25 / 0.38]),
        (SamplingConfig(1.0, top_k=2), [0.0, 0.375, 0.625]),
    ],
)
def test_samples_follow_the_softmax(config: SamplingConfig, expected: list[float]) -> None:
    """Symbols that are never written, such as the blank, do not count among the most likely ones."""
    logits = torch.tensor([9.0, 9.0, 9.0, math.log(0.2), 9.0, 9.0, math.log(0.3), math.log(0.5)]).expand(20_000, -1)
    drawn = Sampler(config, torch.Generator().manual_seed(1))(logits)[:, [END, 6, 7]].argmax(-1)
    shares = torch.bincount(drawn, minlength=3) / len(logits)
    assert shares.tolist() == pytest.approx(expected, abs=0.015)


@pytest.mark.parametrize("overwrite", [False, True])
class TestOwnInputs:
    """No command replaces its own inputs."""

    @pytest.fixture(autouse=True)
    def texts(self, tmp_path: Path) -> Iterator[None]:
        with unchanged_texts(tmp_path, "mine.source", "mine.target"):
            yield

    @pytest.mark.parametrize("read", ["mine.source", "model.json"])
    def test_translation_refuses_to_overwrite_its_input(
        self, tmp_path: Path, teacher: Path, data: Path, monkeypatch: pytest.MonkeyPatch, read: str, overwrite: bool
    ) -> None:
        monkeypatch.setattr(rewriting, "load_model_or_bundle", lambda _: pytest.fail("the model was loaded"))
        prefix = tmp_path / "mine" if read == "mine.source" else teacher / "model"
        with pytest.raises(ConfigError, match=f"would replace its own input .*{read}"):
            translate_corpus(teacher, data, tmp_path / "mine.source", prefix, DISTIL, CPU, overwrite)
        assert (teacher / "model.json").exists()


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
    with pytest.raises(ConfigError, match=r"min_similarity must be in 0..1"):
        RecognitionConfig(min_similarity=2)


def shout(part: Sequence[str]) -> list[Rewritten]:
    """Upper-case lines; drop every seventh."""
    return [Dropped("seventh") if int(line.split()[1]) % 7 == 0 else (line, line.upper()) for line in part]


def job(folder: Path, **changes: object) -> Job:
    return Job(folder / "out", {"what": "shout"}, **{"inputs": (), "shard_lines": 5, **changes})  # type: ignore[arg-type]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def expected(tmp_path: Path) -> dict[str, bytes]:
    """Return the files of an uninterrupted run."""
    rewrite(job(tmp_path / "expected"), lambda: LINES, shout)
    return files(tmp_path / "expected")


def test_the_result_by_hand(expected: dict[str, bytes]) -> None:
    kept = [line for line in LINES if line not in ("line 7", "line 14", "line 21")]
    assert expected.keys() == {"out.source", "out.target", "out.json"}
    assert expected["out.source"].decode() == "".join(f"{line}\n" for line in kept)
    assert expected["out.target"].decode() == "".join(f"{line.upper()}\n" for line in kept)
    record = json.loads(expected["out.json"])
    assert (record["what"], record["lines"], record["kept"]) == ("shout", 23, 20)
    assert record["left"] == {"seventh": [7, 14, 21]}


@settings(deadline=None, max_examples=5)
@given(sizes=st.lists(st.integers(1, 30), min_size=2, max_size=2))
def test_the_text_does_not_depend_on_the_shards(sizes: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    folders = [tmp_path_factory.mktemp("size") for _ in sizes]
    for folder, size in zip(folders, sizes, strict=True):
        record = rewrite(job(folder, shard_lines=size), lambda: LINES, shout)
        assert record["left"] == {"seventh": [7, 14, 21]}
    for name in ("out.source", "out.target"):
        assert files(folders[0])[name] == files(folders[1])[name]


def test_an_existing_result_is_not_made_again(tmp_path: Path, expected: dict[str, bytes]) -> None:
    def never(_: object) -> list[Rewritten]:
        raise AssertionError

    first = rewrite(job(tmp_path / "new"), lambda: LINES, shout)
    assert rewrite(job(tmp_path / "new"), lambda: LINES, never) == first
    assert rewrite(job(tmp_path / "new", overwrite=True), lambda: LINES, never) == first
    assert files(tmp_path / "new") == expected


class PowerCutError(Exception):
    pass


@settings(deadline=None, max_examples=8)
@given(cuts=st.lists(st.integers(0, 4), max_size=4))
def test_interrupted_work_goes_on_and_gives_the_same_bytes(
    cuts: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, whole = tmp_path_factory.mktemp("cut"), tmp_path_factory.mktemp("whole")
    rewrite(job(whole), lambda: LINES, shout)
    made: list[str] = []
    for cut in [*cuts, 99]:
        left = cut

        def work(part: Sequence[str]) -> list[Rewritten]:
            nonlocal left
            if left == 0:
                raise PowerCutError
            left -= 1
            made.append(part[0])
            return shout(part)

        try:
            rewrite(job(folder), lambda: LINES, work)
        except PowerCutError:
            assert not (folder / "out.json").exists()
    assert sorted(made) == sorted(LINES[::5])  # every shard once, whatever happened
    assert files(folder) == files(whole)


def slow(part: Sequence[str]) -> list[Rewritten]:
    time.sleep(0.02)
    return shout(part)


def run_slowly(folder: Path) -> None:
    rewrite(job(folder, shard_lines=2), lambda: LINES, slow)


def run_with_the_others(folder: Path, log: Path, together: Barrier) -> None:
    """Run a job, waiting in the first shard until all processes are in one."""
    begun = False

    def work(part: Sequence[str]) -> list[Rewritten]:
        nonlocal begun
        if not begun:
            together.wait()
        begun = True
        with log.open("a") as file:
            file.write(f"{part[0]}\n")
        return shout(part)

    rewrite(job(folder, shard_lines=1), lambda: LINES, work)


def finish(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * len(processes)


@pytest.mark.parametrize("processes", [1, 3])
def test_killed_processes_cost_nothing_but_their_shard(tmp_path: Path, processes: int) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    rewrite(job(whole, shard_lines=2), lambda: LINES, shout)
    for delay in (0.05, 0.12, 0.2):
        started = [fork(run_slowly, folder) for _ in range(processes)]
        time.sleep(delay)
        for process in started:
            process.kill()
            process.join()
    finish([fork(run_slowly, folder) for _ in range(processes)])
    assert files(folder) == files(whole)


def test_processes_share_the_shards(tmp_path: Path) -> None:
    log = tmp_path / "log"
    together = multiprocessing.get_context("forkserver").Barrier(3, timeout=60)
    finish([fork(run_with_the_others, tmp_path / "shared", log, together) for _ in range(3)])
    assert sorted(log.read_text().splitlines()) == sorted(LINES)


def unfinished(folder: Path, **changes: object) -> None:
    def lines() -> Iterator[str]:
        yield from LINES[:12]
        raise PowerCutError

    with pytest.raises(PowerCutError):
        rewrite(job(folder, **changes), lines, shout)


def with_existing_target(folder: Path) -> None:
    folder.mkdir()
    (folder / "out.target").write_text("somebody's text\n", encoding="utf-8")


@pytest.mark.parametrize(
    ("before", "named"),
    [
        (lambda folder: rewrite(job(folder, shard_lines=4), lambda: LINES, shout), "out.json"),
        (lambda folder: unfinished(folder, shard_lines=4), "out.shards"),
        (with_existing_target, "out.target"),
    ],
)
def test_other_results_are_replaced_only_with_overwrite(
    tmp_path: Path, expected: dict[str, bytes], before: Callable[[Path], object], named: str
) -> None:
    folder = tmp_path / "used"
    before(folder)
    kept = sorted(folder.rglob("*"))
    with pytest.raises(DataError, match=rf"{named}.*--overwrite"):
        rewrite(job(folder), lambda: LINES, shout)
    assert sorted(folder.rglob("*")) == kept
    rewrite(job(folder, overwrite=True), lambda: LINES, shout)
    assert files(folder) == expected


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["out.source", "out.target", "out.json", "out.shards/text", "link"])
def test_an_input_is_never_replaced(tmp_path: Path, name: str, overwrite: bool) -> None:
    (tmp_path / "out.shards").mkdir()
    (tmp_path / "link").symlink_to("out.source")
    (tmp_path / name).write_text("mine", encoding="utf-8")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(
        ConfigError, match=rf"^--output .*/out: would replace its own input .*/{name}; choose another prefix$"
    ):
        job(tmp_path, inputs=[tmp_path / "elsewhere", tmp_path / name], overwrite=overwrite)
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / name).read_text(encoding="utf-8") == "mine"


def test_inputs_next_to_the_output_are_allowed(tmp_path: Path) -> None:
    for name in ("out", "out.source.gz", "source", "other.source"):
        (tmp_path / name).touch()
    made = rewrite(job(tmp_path, inputs=[*tmp_path.iterdir()]), lambda: LINES, shout)
    assert made["kept"] == 20


@pytest.mark.parametrize("method", ["open", "is_dir"])
def test_another_process_finishes_while_a_lock_is_being_made(
    tmp_path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The folder is deleted between mkdir and open, or after mkdir has found it."""
    unfinished(tmp_path / "new")
    folder, original = tmp_path / "new" / "out.shards" / job(tmp_path).identity, getattr(Path, method)

    def too_late(self: Path, *arguments: Any, **options: Any) -> Any:
        if self == folder or (self.suffix == ".lock" and self.parent == folder):
            monkeypatch.setattr(Path, method, original)
            rewrite(job(tmp_path / "new"), lambda: LINES, shout)
            assert not folder.exists()
        return original(self, *arguments, **options)

    monkeypatch.setattr(Path, method, too_late)
    rewrite(job(tmp_path / "new"), lambda: LINES, lambda _: pytest.fail("what is done was done again"))
    assert getattr(Path, method) is original
    assert files(tmp_path / "new") == expected


def test_a_file_in_place_of_the_shards_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "out.shards").mkdir()
    (tmp_path / "out.shards" / job(tmp_path).identity).touch()
    with pytest.raises(DataError, match="out: cannot be written"):
        rewrite(job(tmp_path), lambda: LINES, shout)


def run_over_others(folders: Sequence[Path], together: Barrier) -> None:
    for folder in folders:
        together.wait()
        rewrite(job(folder, overwrite=True), lambda: LINES, shout)


def test_processes_replace_together(tmp_path: Path, expected: dict[str, bytes]) -> None:
    """Each replaces the result of another job, but not the shards of this one."""
    folders = [tmp_path / str(number) for number in range(20)]
    for folder in folders:
        rewrite(job(folder, shard_lines=4), lambda: LINES, shout)
    together = multiprocessing.get_context("forkserver").Barrier(4, timeout=60)
    finish([fork(run_over_others, folders, together) for _ in range(4)])
    assert all(files(folder) == expected for folder in folders)


def test_a_result_finished_meanwhile_is_accepted(
    tmp_path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process finishes the job just after this one has checked."""
    look = transforms.finished_record

    def look_too_early(looked: Job) -> dict[str, Any] | None:
        monkeypatch.setattr(rewriting, "finished_record", look)
        before = look(looked)
        rewrite(looked, lambda: LINES, shout)
        return before

    monkeypatch.setattr(rewriting, "finished_record", look_too_early)
    rewrite(job(tmp_path / "new"), lambda: LINES, shout)
    assert files(tmp_path / "new") == expected


def count_alone(prefix: Path, counter: Path) -> None:
    for _ in range(40):
        with exclusive_lock(prefix):
            count = int(counter.read_text())
            time.sleep(0.0005)
            counter.write_text(str(count + 1))


def test_the_exclusive_lock_excludes_others_and_leaves_no_file(tmp_path: Path) -> None:
    counter = tmp_path / "counter"
    counter.write_text("0")
    (tmp_path / ".out.lock").touch()  # left by a killed process
    finish([fork(count_alone, tmp_path / "out", counter) for _ in range(4)])
    assert files(tmp_path) == {"counter": b"160"}


def test_a_dropped_line_may_have_another_number(tmp_path: Path) -> None:
    record = rewrite(job(tmp_path), lambda: LINES, lambda part: [Dropped("odd", 2 * int(line[5:])) for line in part])
    assert record["left"] == {"odd": list(range(2, 47, 2))}


def test_a_merge_that_was_cut_short_is_done_again(
    tmp_path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after one of the two files was renamed."""
    replace = Path.replace

    def cut(self: Path, target: Path) -> Path:
        if target.name == "out.target":
            raise PowerCutError
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", cut)
        with pytest.raises(PowerCutError):
            rewrite(job(tmp_path / "cut"), lambda: LINES, shout)
    rewrite(job(tmp_path / "cut"), lambda: LINES, shout)
    assert {name: data for name, data in files(tmp_path / "cut").items() if not name.startswith(".")} == expected


def test_progress_counts_lines_and_speed(tmp_path: Path) -> None:
    told: list[Progress] = []
    unfinished(tmp_path)
    rewrite(job(tmp_path), lambda: LINES, shout, told.append)
    assert [progress.lines for progress in told] == [15, 20, 23]
    assert all(progress.sentences_per_second > 0 for progress in told)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(DataError, match="file/out: cannot be written"):
        rewrite(job(tmp_path / "file"), lambda: LINES, shout)
