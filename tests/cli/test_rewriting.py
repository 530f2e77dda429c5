from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from inspect import signature
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.helpers import WITHOUT_TORCH, assert_refused, call, simulmt, simulmt_after
from simulmt.cli import app
from simulmt.cli.rewriting import distil, pseudo
from simulmt.data.corpus import ParallelFiles
from simulmt.data.store import prepare_dataset
from simulmt.data.synthetic import write_corpus
from simulmt.text import VocabularySpec
from simulmt.train.systems import System, SystemConfig, build_model, save_model

SIZES = {"width": 16, "inner": 32, "heads": 2, "encoder_layers": 1, "decoder_layers": 1}
SHORT = "--max-ratio 0 --max-extra 5 --device cpu"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare a small corpus, its data directory, two untrained models, and a teacher from target to source."""
    folder = tmp_path_factory.mktemp("rewriting")
    write_corpus(folder / "text", reorder=0.8, train=80, dev=5, test=5)
    files, dev = (
        ParallelFiles(folder / "text" / f"{n}.source", folder / "text" / f"{n}.target") for n in ("train", "dev")
    )
    prepare_dataset(folder / "data", [files], dev, VocabularySpec(150), VocabularySpec(150))
    systems: tuple[System, System] = ("teacher", "wait-k")
    for system in systems:
        config = SystemConfig(system, 150, 150, SIZES, delays=(1,) if system == "teacher" else (9,))
        save_model(build_model(config), config, folder / system / "final", {})
    back, back_dev = (ParallelFiles(each.target, each.source) for each in (files, dev))
    prepare_dataset(folder / "back-data", [back], back_dev, VocabularySpec(140), VocabularySpec(150))
    config = SystemConfig("teacher", 140, 150, SIZES)
    save_model(build_model(config), config, folder / "back" / "final", {})
    return folder


@pytest.fixture(autouse=True)
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def lines(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(
    ("command", "beam", "penalty", "delay"), [("distil teacher", 5, 1.5, None), ("pseudo wait-k", 1, 1.0, 9)]
)
def test_translating(
    capsys: pytest.CaptureFixture[str], command: str, beam: int, penalty: float, delay: int | None
) -> None:
    output = f"made/{command.split()[0]}"
    arguments = f"rewrite {command} --data data --source text/train.source --output {output} {SHORT}"
    done = call(*arguments.split(), capture=capsys)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith(f"{output}: 80 of 80 pairs; dropped: none; ")
    assert done.stderr.endswith(" sentences/s\n")
    assert lines(f"{output}.source") == lines("text/train.source")
    assert len(lines(f"{output}.target")) == 80
    record = json.loads(Path(f"{output}.json").read_text(encoding="utf-8"))
    search = {"beam": beam, "length_penalty": penalty, "max_ratio": 0.0, "max_extra": 5, "min_length": 1}
    assert record["settings"] == {
        "search": {**search, "reads_on": delay is not None},
        "delay": delay,
        "batch_tokens": 2048,
        "max_length": 1024,
        "device": "cpu",
    }
    again = call(*arguments.split(), capture=capsys)
    assert (again.returncode, again.stderr) == (0, f"{output}: 80 of 80 pairs; dropped: none\n")


def test_the_defaults_of_translation_are_the_papers() -> None:
    """Those of the authors' scripts, except that pseudo references are greedy, the output of a live stream."""
    defaults = {
        command: {name: parameter.default for name, parameter in signature(command).parameters.items()}
        for command in (distil, pseudo)
    }
    longest = {"max_ratio": 1.2, "max_extra": 10}
    assert defaults[distil].items() >= {"beam": 5, "length_penalty": 1.5, **longest}.items()
    assert defaults[pseudo].items() >= {"delay": 9, "beam": 1, "length_penalty": 1.0, **longest}.items()


def test_translating_back(capsys: pytest.CaptureFixture[str]) -> None:
    text = "--data data --target text/train.target --output made/back --temperature 0.8 --top-k 10"
    done = call(*f"rewrite backtranslate teacher {text} {SHORT}".split(), capture=capsys)
    assert done.returncode == 0, done.stderr
    record = json.loads(Path("made/back.json").read_text(encoding="utf-8"))
    made, all_targets = lines("made/back.target"), lines("text/train.target")
    # The teacher is untrained: a translation may be empty.
    assert 0 < record["kept"] == len(made) == len(lines("made/back.source"))
    assert record["lines"] == len(all_targets)
    assert set(made) <= set(all_targets)
    assert all(line.startswith("<bt> ") for line in lines("made/back.source"))
    settings = record["settings"]
    assert settings["sampling"] == {"temperature": 0.8, "top_k": 10, "seed": 1}
    assert settings["search"]["beam"] == 1


RERANK = "--data data --reverse back --reverse-data back-data --source text/train.source"


@pytest.mark.parametrize("model", ["teacher", "wait-k"])
def test_reranking(capsys: pytest.CaptureFixture[str], model: str) -> None:
    command = f"rewrite rerank {model} {RERANK} --output made/best-{model} {SHORT}"
    done = call(*command.split(), *["--target", "text/train.target", "--weight", "2"], capture=capsys)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith(f"made/best-{model}: 80 of 80 pairs; dropped: none; ")
    assert lines(f"made/best-{model}.source") == lines("text/train.source")
    record = json.loads(Path(f"made/best-{model}.json").read_text(encoding="utf-8"))
    assert record["settings"] | {"translation": None} == {
        "translation": None,
        "weight": 2.0,
        "min_reverse": None,
        "device": "cpu",
    }
    translation = record["settings"]["translation"]
    assert (translation["search"]["beam"], translation["delay"], translation["batch_tokens"]) == (8, 40, 2048)
    assert not translation["search"]["reads_on"]
    dropped = call(*command.split(), *["--min-reverse=-0.01", "--overwrite"], capture=capsys)
    assert dropped.returncode == 0, dropped.stderr
    assert dropped.stderr.startswith(f"made/best-{model}: 0 of 80 pairs; dropped: 80 unlikely; ")


def test_only_the_first_of_several_processes_reports(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    arguments = f"rewrite distil teacher --data data --source text/train.source --output quiet {SHORT}"
    done = call(*arguments.split(), capture=capsys)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert len(lines("quiet.target")) == 80


def test_reordering_by_given_links(capsys: pytest.CaptureFixture[str]) -> None:
    text = "--source text/train.source --target text/train.target"
    done = call(*f"rewrite reorder {text} --links text/train.links --output sorted".split(), capture=capsys)
    assert done.returncode == 0, done.stderr
    changed = [a != b for a, b in zip(lines("sorted.target"), lines("text/train.target"), strict=True)]
    assert sum(changed) > 20
    assert all(
        sorted(a.split()) == sorted(b.split())
        for a, b in zip(lines("sorted.target"), lines("text/train.target"), strict=True)
    )


def test_reordering_by_computed_links(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Links are saved, computed once, and recomputed for other text."""
    from simulmt.data import alignment

    calls = []

    def straight_back(pairs: list[tuple[list[str], list[str]]]) -> list[set[tuple[int, int]]]:
        calls.append(len(pairs))
        return [{(len(source), 1), (1, len(target))} for source, target in pairs]

    monkeypatch.setattr(alignment, "align_with_eflomal", straight_back)
    for name, target in (("a", "B A\nD C\n"), ("b", "河桥\n船港\n")):
        Path(f"{name}.source").write_text("a b\nc d\n", encoding="utf-8")
        Path(f"{name}.target").write_text(target, encoding="utf-8")
    command = "rewrite reorder --source {0}.source --target {0}.target --output turned --overwrite {1}"
    for _ in range(2):
        assert call(*command.format("a", "").split(), capture=capsys).returncode == 0
        assert lines("turned.target") == ["A B", "C D"]
        assert lines("turned.links") == ["0-1 1-0", "0-1 1-0"]
    assert calls == [2]
    assert call(*command.format("b", "--target-unit char").split(), capture=capsys).returncode == 0
    assert lines("turned.target") == ["桥河", "港船"]
    assert calls == [2, 2]


GOLD = "0-0 1-1\n"


@pytest.mark.parametrize(
    ("ending", "option"), [("links", "--target-unit word"), ("words", "--segment-chinese --links l")]
)
def test_files_of_others_are_not_replaced(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, ending: str, option: str
) -> None:
    from simulmt.data import alignment

    monkeypatch.setattr(alignment, "align_with_eflomal", lambda pairs: [{(1, 1)} for _ in pairs])
    monkeypatch.setattr(alignment, "segment_chinese", lambda lines: ([*line] for line in lines))
    for name, text in (("gold.source", "a b\n"), ("gold.target", "河桥\n"), ("l", "0-1 1-0\n")):
        Path(name).write_text(text, encoding="utf-8")
    command = f"rewrite reorder --source gold.source --target gold.target --output {ending}/gold {option}"
    kept = Path(ending, f"gold.{ending}")
    kept.parent.mkdir()
    kept.write_text(GOLD, encoding="utf-8")
    refused = call(*command.split(), capture=capsys)
    assert_refused(refused, 1, f"{kept}: exists", "--overwrite")
    assert kept.read_text(encoding="utf-8") == GOLD
    for again in ("--overwrite", ""):
        done = call(*command.split(), *again.split(), capture=capsys)
        assert done.returncode == 0, done.stderr
        assert kept.read_text(encoding="utf-8") == {"links": "0-0\n", "words": "河 桥\n"}[ending]


def test_cutting_does_not_replace_its_own_input(capsys: pytest.CaptureFixture[str]) -> None:
    Path("cut.words").write_text("河桥\n", encoding="utf-8")
    command = "rewrite reorder --source text/dev.source --target cut.words --output cut --segment-chinese --overwrite"
    assert_refused(call(*command.split(), capture=capsys), 2, "would replace its own input cut.words")
    assert lines("cut.words") == ["河桥"]


def test_processes_that_share_the_work_align_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from simulmt.data import alignment

    calls = []

    def slowly_straight(pairs: list[tuple[list[str], list[str]]]) -> list[set[tuple[int, int]]]:
        calls.append(len(pairs))
        time.sleep(0.2)
        return [{(1, 1)} for _ in pairs]

    monkeypatch.setattr(alignment, "align_with_eflomal", slowly_straight)
    text = ["--source", "text/dev.source", "--target", "text/dev.target"]
    command = ["rewrite", "reorder", *text, "--output", "shared"]
    with ThreadPoolExecutor(3) as pool:  # the lock separates threads as well as processes
        list(pool.map(lambda _: app(command, standalone_mode=False), range(3)))
    assert calls == [5]
    assert len(lines("shared.target")) == 5


def test_the_help_names_every_command() -> None:
    shown = CliRunner().invoke(app, ["rewrite", "--help"]).stdout
    commands = (
        "distil, pseudo, rerank, backtranslate, filter, reorder, speech, recognised, numbers, dictionary, lexicon, "
    )
    assert f"{commands}weigh, join" in " ".join(shown.replace("│", " ").split())


def test_joining(capsys: pytest.CaptureFixture[str]) -> None:
    sets = "--source text/dev.source --target text/dev.target --source text/test.source --target text/test.target"
    command = f"rewrite join {sets} --repeat 2 --repeat 1 --limit 0 --limit 3 --output joined"
    assert call(*command.split(), capture=capsys).returncode == 0
    assert lines("joined.source") == [*lines("text/dev.source") * 2, *lines("text/test.source")[:3]]
    assert lines("joined.target") == [*lines("text/dev.target") * 2, *lines("text/test.target")[:3]]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ("filter", [1, 2]),
        ("join --repeat 2 --limit 2", [1, 2, 1, 2]),
        ("weigh --labels labels --weight b=0", [1, 3]),
        ("reorder --links links", [1, 2, 3]),
        ("speech --share 1", [1, 2, 3]),
    ],
)
def test_text_is_rewritten_without_torch(tmp_path: Path, options: str, kept: list[int]) -> None:
    text = ["That is not much.", "It is 1,000.5 metres.", "He is twenty."]
    (tmp_path / "a.de").write_text("Das ist nicht viel.\nEs sind 1.000,5 Meter.\nEr ist zwölf.\n", encoding="utf-8")
    (tmp_path / "a.en").write_text("".join(f"{line}\n" for line in text), encoding="utf-8")
    (tmp_path / "labels").write_text("a\nb\na\n", encoding="utf-8")
    (tmp_path / "links").write_text("0-0\n" * 3, encoding="utf-8")
    command = f"import os; os.chdir({str(tmp_path)!r})\n"
    arguments = f"rewrite {options} --source a.de --target a.en --output kept".split()
    done = simulmt_after(WITHOUT_TORCH + command, *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(f"kept: {len(kept)} of ")
    assert lines(str(tmp_path / "kept.target")) == [text[number - 1] for number in kept]


def test_replacing_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.en").write_text("We met.\nIt costs 3,000 euros.\nIt took 12 days.\n", encoding="utf-8")
    (tmp_path / "a.zh").write_text("我们见过面。\n要花3000欧元。\n花了12天。\n", encoding="utf-8")
    command = f"import os; os.chdir({str(tmp_path)!r})\n"
    arguments = "--source a.en --target a.zh --languages en-zh --share 1 --output swapped"
    done = simulmt_after(WITHOUT_TORCH + command, "rewrite", "numbers", *arguments.split())
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("swapped: 2 of 2 pairs; dropped: none; ")
    pairs = zip(lines(str(tmp_path / "swapped.source")), lines(str(tmp_path / "swapped.target")), strict=True)
    for (source, target), unit in zip(pairs, ("000", ""), strict=True):
        (new,) = re.findall("[0-9]+", source.replace(",", ""))
        assert re.findall("[0-9]+", target) == [new]
        assert new.endswith(unit)
        assert new not in ("3000", "12")


def test_weighing(capsys: pytest.CaptureFixture[str]) -> None:
    count = len(lines("text/dev.source"))
    Path("labels").write_text("news\n" + "a=b\n" * (count - 1))
    text = "--source text/dev.source --target text/dev.target --labels labels"
    command = f"rewrite weigh {text} --weight news=3 --weight a=b=0 --output weighed"
    assert call(*command.split(), capture=capsys).returncode == 0
    assert lines("weighed.source") == lines("text/dev.source")[:1] * 3
    assert lines("weighed.target") == lines("text/dev.target")[:1] * 3
    for weights, code, mentioned in (
        ("news", 2, "expected LABEL=NUMBER"),
        ("2", 2, "expected LABEL=NUMBER"),
        ("=2", 2, "expected LABEL=NUMBER"),
        ("news=2 --weight news=3", 2, "given more than once for news"),
        ("law=1", 1, "no line has the label law"),
    ):
        arguments = f"{text} --weight {weights} --output other".split()
        failed = call("rewrite", "weigh", *arguments, capture=capsys)
        assert failed.returncode == code
        assert mentioned in failed.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "mentioned"),
    [
        ("distil teacher --data data --source none --output new --device cpu", 1, ["none: no such file"]),
        (
            "distil teacher --data none --source text/dev.source --output new --device cpu",
            1,
            ["--data none", "source.model"],
        ),
        ("distil none --data data --source text/dev.source --output new --device cpu", 1, ["none: no trained model"]),
        ("distil wait-k --data data --source text/dev.source --output new --device cpu", 2, ["needs a teacher"]),
        (
            "backtranslate teacher --data data --target text/dev.target --output new --top-k 5",
            2,
            ["--top-k 5", "--temperature"],
        ),
        (
            "backtranslate teacher --data data --target text/dev.target --output new --temperature 1 --beam 4",
            2,
            ["needs a beam of 1"],
        ),
        ("backtranslate wait-k --data data --target text/dev.target --output new --device cpu", 2, ["needs a teacher"]),
        (
            "filter --source text/dev.source --target text/dev.target --output new --without none",
            1,
            ["none: no such file"],
        ),
        (
            f"rerank teacher {RERANK} --target text/dev.target --output new --device cpu",
            1,
            ["--target text/dev.target: 5 lines, but text/train.source has 80"],
        ),
        (
            f"rerank teacher {RERANK} --reverse wait-k --output new --device cpu",
            2,
            ["wait-k", "--reverse needs a teacher"],
        ),
        (
            f"rerank teacher {RERANK} --reverse-data data --output new --device cpu",
            1,
            ["data: vocabularies of (150, 150)"],
        ),
        (
            f"rerank teacher {RERANK} --reverse teacher --reverse-data data --output new --device cpu",
            2,
            ["--reverse teacher: translates from the source language"],
        ),
        (
            f"rerank teacher {RERANK} --reverse-data none --output new --device cpu",
            1,
            ["--reverse-data none: no source"],
        ),
        (f"rerank teacher {RERANK} --reverse none --output new --device cpu", 1, ["none: no trained model"]),
        (f"rerank teacher {RERANK} --output new --weight -1", 2, ["--weight"]),
        (f"rerank teacher {RERANK} --output new --min-reverse 1", 2, ["--min-reverse"]),
        (f"rerank teacher {RERANK} --output new --delay 0", 2, ["--delay"]),
        ("pseudo teacher --data data --source text/dev.source --output new --device cpu", 2, ["need a wait-k model"]),
        ("pseudo wait-k --data data --source text/dev.source --output new --delay 0 --device cpu", 2, ["--delay"]),
        ("distil teacher --data data --source text/dev.source --output new --beam 0", 2, ["--beam"]),
        ("distil teacher --data data --source text/dev.source --output text/test --device cpu", 1, ["--overwrite"]),
        (
            "distil teacher --data data --source text/dev.source --output new --device mps",
            2,
            ["--device mps", "cuda:N"],
        ),
        (
            "speech --source text/dev.source --target text/dev.target --output text/dev --overwrite",
            2,
            ["--output text/dev: would replace its own input text/dev.source; choose another prefix"],
        ),
        (
            "reorder --source text/dev.source --target text/test.target --output text/test --overwrite",
            2,
            ["--output text/test: would replace its own input text/test.target"],
        ),
        ("distil teacher --data data --source text/dev.source", 2, ["--output"]),
        (
            "reorder --source text/dev.source --target text/dev.target --links text/test.links --output new",
            1,
            ["links:"],
        ),
        ("reorder --source text/dev.source --target text/dev.target --output data/source.model/new", 1, ["be written"]),
        ("filter --source text/dev.source --target text/dev.target --output new --languages de", 2, ["such as de-en"]),
        ("filter --source text/dev.source --target none --output new", 1, ["none: no such file"]),
        ("join --source a --output new", 2, ["--target"]),
        ("join --source a --source b --target c --output new", 2, ["2 --source but 1 --target"]),
        ("join --source a --target c --repeat 1 --repeat 2 --output new", 2, ["1 --source but 2 --repeat"]),
        ("join --source a --target c --repeat 0 --output new", 2, ["--repeat"]),
        ("polish", 2, ["polish"]),
    ],
)
def test_options_that_do_not_fit_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: str, code: int, mentioned: list[str]
) -> None:
    assert_refused(call("rewrite", *arguments.split(), capture=capsys), code, *mentioned)
    assert not list(Path().glob("new.[st]*et"))


@pytest.mark.parametrize(
    "command", ["", "distil", "pseudo", "rerank", "backtranslate", "filter", "reorder", "speech", "join"]
)
def test_every_command_has_help(command: str) -> None:
    shown = CliRunner().invoke(app, ["rewrite", *command.split(), "--help"])
    assert shown.exit_code == 0
    assert "Usage: " in shown.stdout


def test_what_counts_as_overlap_with_a_test_set_is_documented() -> None:
    shown = CliRunner().invoke(app, ["rewrite", "filter", "--help"], env={"COLUMNS": "1000"}).stdout
    assert "a sentence of four or more words, or ten words in a row" in shown


def test_without_a_command_all_are_listed() -> None:
    done = simulmt("rewrite")
    assert done.returncode == 2
    assert all(f" {name} " in done.stdout for name in ("distil", "pseudo", "reorder", "join"))


def test_a_missing_extra_is_named() -> None:
    arguments = "rewrite distil run --data a --source b --output c"
    done = simulmt_after(WITHOUT_TORCH, *arguments.split())
    assert_refused(done, 1, "simulmt rewrite distil needs the extra 'train': pip install 'simulmt[train]'")


def test_chinese_words_stay_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """城市 and 未来 are words; aligned in characters, each would be split by links to its second character."""
    Path("zh.source").write_text("the future of our city\n", encoding="utf-8")
    Path("zh.target").write_text("我们城市的未来\n", encoding="utf-8")
    Path("zh.links").write_text("1-3 2-2 3-0 4-1\n", encoding="utf-8")  # future-未来, of-的, our-我们, city-城市
    inputs = "--source zh.source --target zh.target --links zh.links"
    arguments = f"rewrite reorder {inputs} --output made/zh --segment-chinese"
    assert call(*arguments.split(), capture=capsys).returncode == 0
    assert lines("made/zh.words") == ["我们 城市 的 未来"]
    assert lines("made/zh.target") == ["未来的我们城市"]
