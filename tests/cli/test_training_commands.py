from __future__ import annotations

import json
import re
import shutil
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.helpers import WITHOUT_TORCH, assert_refused, call, simulmt, simulmt_after
from simulmt import load
from simulmt.cli import app
from simulmt.data.corpus import read_lines
from simulmt.data.store import Dataset
from simulmt.errors import BundleError
from simulmt.runtime.bundle import SHIPPED, Bundle
from simulmt.text import Tokenizer
from simulmt.train.analysis import bleu
from simulmt.train.systems import SystemConfig, build_model, save_model

CONFIG = """
system = "ctc"
data = "data"
delays = [1, 3]

[model]
width = 16
inner = 32
heads = 2
layers = 1

[training]
batch_tokens = 256
update_tokens = 256
warmup_updates = 2
max_updates = 4
validate_every = 2
"""
SENTENCES = "gul mapes sormul dis lelpos .\n\nbo gutas fe resi tol gul fosbes"


TRAIN = "train config.toml --run run --device cpu --set training.seed=2"
LANGUAGES = "--source-language aa --target-language bb"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Go from synthetic text to a bundle, as in the manual."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "config.toml").write_text(CONFIG, encoding="utf-8")
    files = "--source text/train.source --target text/train.target --dev-source text/dev.source"
    sizes = "--dev-target text/dev.target --source-vocabulary 300 --target-vocabulary 300"
    for command in (
        "synthetic --output text --train 300 --dev 20 --test 5 --reorder 0.5",
        f"prepare --output data {files} {sizes}",
        TRAIN,
        f"export run --data data --output bundle --precision fp32 {LANGUAGES}",
    ):
        with chdir(folder):
            finished = CliRunner().invoke(app, command.split())
        assert finished.exit_code == 0, finished.output
    return folder


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class TestPreparing:
    """Common formats: test sets in XML and .sgm with several references, and translation memories."""

    SIZES = "--source-vocabulary 27 --target-vocabulary 27"

    @pytest.fixture
    def memory(self, tmp_path: Path) -> Path:
        unit = '<tu><tuv xml:lang="{}"><seg>{}</seg></tuv><tuv xml:lang="{}"><seg>{}</seg></tuv></tu>'
        words = ["boat", "river", "bridge", "winter", "barn", "net"]
        units = [unit.format("en-GB", f"the {a} and a {b}", "zz", f"{b} {a} tu") for a in words for b in words]
        path = tmp_path / "memory.tmx"
        path.write_text(f"<tmx>{''.join(units)}</tmx>", encoding="utf-8")
        return path

    @staticmethod
    def wmt(folder: Path) -> Path:
        refs = "".join(
            f'<ref lang="zz" translator="{who}"><seg id="1">{who} boat</seg><seg id="2">{who} net</seg></ref>'
            for who in "AB"
        )
        source = '<src lang="en"><seg id="1">the boat</seg><seg id="2">a net</seg></src>'
        path = folder / "dev.xml"
        path.write_text(f'<dataset id="x"><doc id="d">{source}{refs}</doc></dataset>', encoding="utf-8")
        return path

    def test_a_memory_and_a_test_set_in_xml(
        self, memory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        languages = "--source-language en --target-language zz"
        command = (
            f"prepare --output {tmp_path}/data --tmx {memory} --dev-xml {self.wmt(tmp_path)} {languages} {self.SIZES}"
        )
        finished = call(*command.split(), capture=capsys)
        assert finished.returncode == 0, finished.stderr
        assert "36 of 36 training pairs kept" in finished.stderr
        dataset = Dataset.open(tmp_path / "data")
        assert dataset.dev_references == [["A boat", "A net"], ["B boat", "B net"]]
        assert (tmp_path / "data" / "dev.source").read_text(encoding="utf-8") == "the boat\na net\n"

    @pytest.mark.parametrize("lost", [False, True])
    def test_several_files_of_references(
        self, memory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], lost: bool
    ) -> None:
        source = tmp_path / "dev.en"
        source.write_text("the boat\na net\n", encoding="utf-8")
        (tmp_path / "one.txt").write_text("boat\nnet\n", encoding="utf-8")
        second = '<doc sysid="a"><seg id="1">boat tu</seg><seg id="2">net tu</seg></doc>'
        third = (
            second.replace(" tu", " tus")
            .replace('"a"', '"b"')
            .replace('<seg id="2">net tus</seg>', "" if lost else "x")
        )
        (tmp_path / "more.sgm").write_text(second + third.replace("x", '<seg id="2">net</seg>'), encoding="utf-8")
        files = f"--dev-source {source} --dev-target {tmp_path}/one.txt --dev-target {tmp_path}/more.sgm"
        languages = "--source-language en --target-language zz"
        command = f"prepare --output {tmp_path}/data --tmx {memory} {files} {languages} {self.SIZES}"
        finished = call(*command.split(), capture=capsys)
        if lost:
            assert_refused(finished, 1, "more.sgm: 1 references, but the first set", "has 2")
            assert not (tmp_path / "data").exists()
        else:
            assert finished.returncode == 0, finished.stderr
            expected = [["boat", "net"], ["boat tu", "net tu"], ["boat tus", "net"]]
            assert Dataset.open(tmp_path / "data").dev_references == expected


class TestFromTextToTranslation:
    def test_the_corpus_has_three_parts(self, folder: Path) -> None:
        counts = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in (folder / "text").iterdir()}
        sizes = {"train": 300, "dev": 20, "test": 5}
        assert counts == {f"{part}.{side}": sizes[part] for part in sizes for side in ("source", "target", "links")}

    def test_settings_on_the_command_line_count(self, folder: Path) -> None:
        record = json.loads((folder / "run" / "run.json").read_text(encoding="utf-8"))
        assert record["config"]["training"]["seed"] == 2
        assert record["config"]["training"]["max_updates"] == 4

    def test_vocabularies_can_be_taken_from_other_data(
        self, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        few, data = folder / "text" / "dev", tmp_path / "data"
        files = ("--source", f"{few}.source", "--target", f"{few}.target")
        dev = ("--dev-source", f"{few}.source", "--dev-target", f"{few}.target")
        taken = call("prepare", *files, *dev, "--vocabularies", folder / "data", "--output", data, capture=capsys)
        assert taken.returncode == 0, taken.stderr
        for name in ("source.model", "target.model"):
            assert (data / name).read_bytes() == (folder / "data" / name).read_bytes()
        new = tmp_path / "new"
        refused = call("prepare", *files, *dev, "--vocabularies", tmp_path, "--output", new, capture=capsys)
        assert_refused(refused, 1, "--vocabularies", "source.model")
        assert not new.exists()

    def test_vocabularies_can_be_taken_from_a_bundle(
        self, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        few, bundle = folder / "text" / "dev", SHIPPED / "toy"
        files = ("--source", f"{few}.source", "--target", f"{few}.target")
        dev = ("--dev-source", f"{few}.source", "--dev-target", f"{few}.target")
        for number, name in enumerate(("toy", str(bundle))):
            data = tmp_path / str(number)
            taken = call("prepare", *files, *dev, "--vocabularies", name, "--output", data, capture=capsys)
            assert taken.returncode == 0, taken.stderr
            for side in ("source.model", "target.model"):
                assert (data / side).read_bytes() == (bundle / side).read_bytes()

    @pytest.mark.parametrize(
        ("stores", "options", "mentioned"),
        [
            (["train", "dev"], "--vocabularies other", ["data/train: already exists", "--overwrite"]),
            (["dev"], "--vocabularies other", ["data/dev: already exists", "--overwrite"]),
            (["train"], "", ["data/train: already exists", "--overwrite"]),
            (["train", "dev"], "--vocabularies other --overwrite", ["data/target.model", "--vocabularies", "--output"]),
            ([], "--vocabularies other", ["data/target.model", "--vocabularies", "--output"]),
        ],
    )
    def test_finished_data_keep_their_vocabularies(
        self,
        folder: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        stores: list[str],
        options: str,
        mentioned: list[str],
    ) -> None:
        monkeypatch.chdir(tmp_path)
        shutil.copytree(folder / "data", "data")
        for store in {"train", "dev"} - {*stores}:
            shutil.rmtree(f"data/{store}")
        if not stores:  # the other vocabulary must be found before this one is written
            Path("data/source.model").unlink()
        Path("other").mkdir()
        for name in ("source.model", "target.model"):
            shutil.copyfile(folder / "data" / "source.model", f"other/{name}")
        before = contents(Path("data"))
        text = folder / "text"
        files = ("--source", text / "train.source", "--target", text / "train.target")
        dev = ("--dev-source", text / "dev.source", "--dev-target", text / "dev.target")
        refused = call("prepare", *files, *dev, "--output", "data", *options.split(), capture=capsys)
        assert_refused(refused, 1, *mentioned)
        assert contents(Path("data")) == before

    def test_the_bundle_is_intact_and_described(self, folder: Path) -> None:
        bundle = Bundle(folder / "bundle")
        bundle.verify()
        assert (bundle.config.kind, bundle.config.precision) == ("ctc", "fp32")
        assert (bundle.config.source_language, bundle.config.target_language) == ("aa", "bb")
        assert (bundle.config.delays, bundle.config.default_delay) == ((1, 3), 1)

    def test_it_translates_without_torch(self, folder: Path) -> None:
        finished = simulmt_after(WITHOUT_TORCH, "translate", "--model", folder / "bundle", stdin=SENTENCES)
        assert (finished.returncode, finished.stderr) == (0, "")
        assert finished.stdout == load(folder / "bundle").translate(SENTENCES, 1) + "\n"

    def test_a_finished_run_is_left_alone(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(folder)
        model = Path("run/final/model.safetensors")
        before = model.read_bytes()
        assert call(*TRAIN.split(), capture=capsys).returncode == 0
        assert model.read_bytes() == before

    def test_export_options_are_stored_in_the_bundle(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(folder)
        Path("card.md").write_text("## Data\n\nInvented.\n", encoding="utf-8")
        penalties = "--blank-penalty 0.5 --blank-penalty 1.5"
        options = f"--default-delay 3 {penalties} --longest 40 --dev-sentences 0 --card card.md"
        finished = call(*f"export run/final --data data --output other {LANGUAGES} {options}".split(), capture=capsys)
        assert finished.returncode == 0, finished.stderr
        assert finished.stderr.startswith("other: ctc int8; ")
        config = Bundle(Path("other")).config
        assert (config.source_language, config.target_language, config.precision) == ("aa", "bb", "int8")
        assert (config.default_delay, config.blank_penalties, config.longest) == (3, (0.5, 1.5), 40)
        assert "int8_bleu" not in config.checks
        assert Path("other/README.md").read_text(encoding="utf-8").endswith("## Data\n\nInvented.\n")

    @pytest.mark.parametrize("language", ["de", "zh"])
    def test_the_case_of_the_target_is_folded_on_request(
        self, language: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        text = str(folder / "text")
        sides = f"--source {text}/train.source --target {text}/train.target --dev-source {text}/dev.source"
        sizes = f"--dev-target {text}/dev.target --source-vocabulary 300 --target-vocabulary 300"
        same = {}
        for folding in ("--uncased-target", ""):
            data = tmp_path / f"data{folding}"
            command = f"prepare --output {data} --target-language {language} {folding} {sides} {sizes}"
            prepared = call(*command.split(), capture=capsys)
            assert prepared.returncode == 0, prepared.stderr
            target = Tokenizer.load(data / "target.model")
            word = next(read_lines(folder / "text" / "train.target")).split()[0]
            same[folding] = target.encode(word.upper()) == target.encode(word.lower())
        assert same == {"--uncased-target": True, "": False}

    def test_blank_penalties_are_tuned(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The chosen penalties are those with the best scores reported."""
        monkeypatch.chdir(folder)
        command = f"export run --data data --output tuned --dev-sentences 0 --tune-penalty {LANGUAGES}"
        finished = call(*command.split(), capture=capsys)
        assert finished.returncode == 0, finished.stderr
        shown = [line for line in finished.stderr.splitlines() if line.startswith("k=")]
        chosen = []
        for line in shown:
            scores = dict(re.findall(r"([\d.]+): ([\d.]+)", line))
            chosen.append(min(map(float, scores), key=lambda penalty: (-float(scores[f"{penalty:g}"]), penalty)))
        assert Bundle(Path("tuned")).config.blank_penalties == tuple(chosen)
        assert len(chosen) == 2

    def test_blank_penalties_are_tuned_as_the_bundle_will_translate(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The best score reported is that of the bundle's translations."""
        monkeypatch.chdir(folder)
        command = "export run --data data --output exact --precision fp32 --dev-sentences 0 --tune-penalty"
        finished = call(*f"{command} {LANGUAGES}".split(), capture=capsys)
        assert finished.returncode == 0, finished.stderr
        dataset, translator = Dataset.open(Path("data")), load(Path("exact"))
        for line in (line for line in finished.stderr.splitlines() if line.startswith("k=")):
            delay, best = int(line[2]), max(map(float, re.findall(r": ([\d.]+)", line)))
            sources = (
                dataset.source_tokenizer.decode(dataset.dev.pair(i)[0].tolist()) for i in range(len(dataset.dev))
            )
            texts = [translator.translate(source, delay).strip() for source in sources]
            assert bleu(texts, dataset.dev_references, dataset.target_tokenizer) == pytest.approx(best, abs=0.0051)

    def test_int8_is_checked_on_development_text(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(folder)
        finished = call(*f"export run --data data --output small {LANGUAGES}".split(), capture=capsys)
        assert finished.returncode == 0, finished.stderr
        assert {"int8_agreement", "int8_bleu"} <= Bundle(Path("small")).config.checks.keys()

    def test_development_text_is_checked_as_it_was_written(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A token store holds the source case-folded, unlike the text that users translate."""
        monkeypatch.chdir(folder)
        sources = Path("data/dev.source").read_text(encoding="utf-8").upper().splitlines()
        shutil.copytree("data", "data-upper")
        Path("data-upper/dev.source").write_text("".join(f"{line}\n" for line in sources), encoding="utf-8")
        checked: list[str] = []

        def refuse(*arguments: Any) -> None:
            checked.extend(source for source, _ in arguments[3])
            raise BundleError("enough")

        monkeypatch.setattr("simulmt.train.export._check_bleu", refuse)
        call(*f"export run --data data-upper --output upper --dev-sentences 5 {LANGUAGES}".split(), capture=capsys)
        assert checked == sources[:5]

    def test_the_commands_that_training_prints_work(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(shutil.copytree(folder, tmp_path / "project"))
        printed = call(*TRAIN.split(), capture=capsys).stderr.splitlines()
        export, translate = (line.partition(": simulmt ")[2] for line in printed[-2:])
        assert export.startswith("export run/final --data data --output BUNDLE ")
        for model, output in (("run/final", "BUNDLE"), ("run", "OTHER")):
            words = export.replace("run/final", model).replace("BUNDLE", output).split()
            finished = call(*words, "--precision", "fp32", capture=capsys)
            assert finished.returncode == 0, finished.stderr
        weights = [Path(bundle, "ctc.weights").read_bytes() for bundle in ("BUNDLE", "OTHER")]
        assert weights[0] == weights[1]
        assert call(*translate.split(), "text/test.source", capture=capsys).returncode == 0

    def test_a_teacher_is_exported_without_delays(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(folder)
        data = Dataset.open(Path("data"))
        sizes = {"width": 16, "inner": 32, "heads": 2, "encoder_layers": 1, "decoder_layers": 1}
        config = SystemConfig("teacher", data.source_tokenizer.size, data.target_tokenizer.size, sizes)
        save_model(build_model(config), config, Path("teacher"), {})
        command = f"export teacher --data data --output full --precision fp32 {LANGUAGES}"
        assert call(*command.split(), capture=capsys).returncode == 0
        described = Bundle(Path("full")).config
        assert (described.kind, described.delays, described.default_delay) == ("full-sentence", (), None)

    def test_a_wait_k_model_is_exported_with_the_thresholds_of_its_policy(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(folder)
        data = Dataset.open(Path("data"))
        sizes = {"width": 16, "inner": 32, "heads": 2, "encoder_layers": 1, "decoder_layers": 1}
        vocabularies = data.source_tokenizer.size, data.target_tokenizer.size
        for name, policy in (("plain", 0), ("deciding", 8)):
            config = SystemConfig("wait-k", *vocabularies, sizes | {"policy_inner": policy}, delays=(1, 3))
            save_model(build_model(config), config, Path(name), {})
        options = f"--data data --precision fp32 {LANGUAGES}"
        command = f"export deciding {options} --output patient --stability 0.8 --stability 1 --max-wait 3 --max-wait 0"
        finished = call(*command.split(), capture=capsys)
        assert finished.returncode == 0, finished.stderr
        exported = Bundle(Path("patient")).config
        assert (exported.stabilities, exported.max_waits) == ((0.8, 1.0), (3, 0))
        card = Path("patient/README.md").read_text(encoding="utf-8")
        assert "- policy: stability thresholds 0.8, 1.0\n" in card
        assert "- words over which the threshold falls to zero: 3, 0 (0: it never falls)\n" in card
        for name, thresholds, mentioned in (
            ("deciding", "--stability 0.8", ["1 stabilities", "one for each delay", "1, 3"]),
            ("deciding", "--stability 0.8 --stability 1 --max-wait 2", ["1 max waits", "one for each delay", "1, 3"]),
            ("deciding", "--stability 0.8 --stability 1 --max-wait 2 --max-wait -1", ["--max-wait", "-1"]),
            ("deciding", "", ["a model with a policy needs stabilities (--stability), one for each delay"]),
            ("deciding", "--stability 0.8 --stability 1.2", ["--stability", "from 0 to 1"]),
            ("deciding", "--stability 0.8 --stability -1", ["--stability", "from 0 to 1"]),
            ("plain", "--stability 0.8 --stability 1", ["stabilities need a wait-k model with a policy"]),
        ):
            refused = call(*f"export {name} {options} --output new {thresholds}".split(), capture=capsys)
            assert_refused(refused, 2, *mentioned)
            assert not Path("new").exists()

    @pytest.mark.parametrize(
        ("arguments", "code", "mentioned"),
        [
            ("prepare --output data --tsv t --dev-source d --dev-target d", 1, ["t"]),
            ("export run --data data --output bundle", 1, ["bundle", "exists"]),
            ("export text --data data --output new", 1, ["text", "no trained model"]),
            ("export run --data text --output new", 1, ["--data text", "simulmt prepare"]),
            ("export run --data data --output new --default-delay 2", 2, ["default delay 2", "1, 3"]),
            ("export run --data data --output new --tune-penalty --blank-penalty 1", 2, ["--tune-penalty"]),
            ("export run --data data --output new --blank-penalty 1", 2, ["1 blank penalties", "1, 3"]),
            (
                "export run --data data --output new --stability 0.5 --stability 0.5",
                2,
                ["stabilities need a wait-k model with a policy"],
            ),
            ("export run --data data --output new --card missing.md", 1, ["missing.md"]),
            ("train config.toml --run new --set training.sed=2", 2, ["config.toml", "sed", "seed"]),
            ("train config.toml --run new --set data=nowhere", 1, ["nowhere: no such directory", "simulmt prepare"]),
            ("train config.toml --run new --set data=text", 1, ["text: no source.model", "simulmt prepare"]),
            ("train config.toml --run config.toml", 1, ["config.toml: cannot be written"]),
            ("train config.toml --run new --device gpu", 2, ["gpu"]),
            ("train config.toml --run new --device mps", 2, ["--device mps", "auto, cpu, cuda or cuda:N"]),
        ],
    )
    def test_options_that_do_not_fit_are_refused(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        arguments: str,
        code: int,
        mentioned: list[str],
    ) -> None:
        monkeypatch.chdir(folder)
        languages = LANGUAGES if arguments.startswith("export") else ""
        assert_refused(call(*arguments.split(), *languages.split(), capture=capsys), code, *mentioned)
        assert not (folder / "new").exists() or arguments.startswith("train")


@pytest.mark.parametrize(
    ("arguments", "mentioned"),
    [
        ("synthetic", ["--output"]),
        ("synthetic --output x --reorder 2", ["--reorder"]),
        ("synthetic --output x --train -1", ["--train"]),
        ("synthetic --output x --train many", ["--train"]),
        ("prepare --output x --dev-source d", ["--dev-target", "--dev-xml"]),
        ("prepare --output x --dev-target d", ["--dev-source", "--dev-xml"]),
        (
            "prepare --output x --dev-source d --dev-target d --tmx m --source-language en",
            ["--tmx", "--target-language"],
        ),
        (
            "prepare --output x --tsv t --dev-xml d --dev-source d",
            ["--dev-xml", "cannot be combined with --dev-source"],
        ),
        ("prepare --output x --dev-source d --dev-target d", ["--source", "--tsv"]),
        ("prepare --output x --dev-source d --dev-target d --source s", ["1 --source files but 0 --target files"]),
        ("prepare --output x --dev-source d --dev-target d --tsv t --source-vocabulary 3", ["--source-vocabulary"]),
        ("train --run x", ["CONFIG"]),
        ("train missing.toml", ["--run"]),
        ("train broken.toml --run x", ["broken.toml", "TOML"]),
        ("sweep missing.toml --output x --trials 0", ["--trials"]),
        ("sweep missing.toml --output x --space nonsense", ["nonsense"]),
        ("export run --output x", ["--data"]),
        ("export run --precision int4", ["--precision", "int8"]),
    ],
)
def test_wrong_usage(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    mentioned: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.toml").write_text("system = ", encoding="utf-8")
    assert_refused(call(*arguments.split(), capture=capsys), 2, *mentioned)
    assert [path.name for path in tmp_path.iterdir()] == ["broken.toml"]


@pytest.mark.parametrize(
    ("options", "mentioned"),
    [
        ("", "--source-vocabulary 32000: cannot train 32000 pieces for data/source.model: "),
        ("--source-vocabulary 15", "--target-vocabulary 32000: cannot train 32000 pieces for data/target.model: "),
    ],
)
def test_too_little_text_for_a_vocabulary_names_the_option(
    options: str, mentioned: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("a tea bag\nbad tea\na bad debate\n", encoding="utf-8")
    files = "--source text --target text --dev-source text --dev-target text --output data"
    assert_refused(call("prepare", *files.split(), *options.split(), capture=capsys), 1, mentioned, "to a value <= ")


@pytest.mark.parametrize("command", ["train c --run r", "sweep c --output o", "export r --data d --output o"])
def test_a_missing_extra_is_named(command: str) -> None:
    languages = LANGUAGES if command.startswith("export") else ""
    done = simulmt_after(WITHOUT_TORCH, *command.split(), *languages.split())
    name = command.split()[0]
    assert_refused(done, 1, f"simulmt {name} needs the extra 'train': pip install 'simulmt[train]'")


@pytest.mark.parametrize("command", ["synthetic", "prepare", "train", "sweep"])
def test_every_command_has_help(command: str) -> None:
    shown = CliRunner().invoke(app, [command, "--help"])
    assert shown.exit_code == 0
    assert "Usage: " in shown.stdout


def test_without_a_command_all_are_listed() -> None:
    finished = simulmt()
    assert finished.returncode == 2
    for command in ("translate", "demo", "models", "bench", "synthetic", "prepare", "train", "sweep", "export"):
        assert f" {command} " in finished.stdout
    headings = [line.split()[1] for line in finished.stdout.splitlines() if line.startswith("╭")]
    assert headings == ["Options", "Translate", "Train", "Evaluate"]
    assert finished.stderr == ""


def test_the_version_is_printed() -> None:
    finished = simulmt("--version")
    assert (finished.returncode, finished.stderr) == (0, "")
    assert finished.stdout.startswith("simulmt ")
