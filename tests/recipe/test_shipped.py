"""Shipped recipes: all command lines parse, and all configurations can be trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli.helpers import call
from recipe.configurations import training_configurations
from simulmt.model.seq2seq import Seq2SeqConfig
from simulmt.recipe.plan import Recipe, Stage
from simulmt.train.systems import SystemConfig

FOLDER = Path(__file__).parents[2] / "recipes"
CLAIMS = sorted(FOLDER.glob("claims/*.toml"))
RECIPES = sorted([*FOLDER.glob("*.toml"), *FOLDER.glob("paper/*.toml"), *CLAIMS])
ABLATION = ("scratch-k3", "no-temperature", "no-noise", "gumbel-softmax")
PAPER = ("paper/en-zh.toml", "paper/de-en.toml")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_every_command_line_parses(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = call("run", path, "--work", tmp_path, "--dry-run", capture=capsys)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("  to do") == len(Recipe.read(path).stages)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_every_training_configuration_builds(path: Path) -> None:
    configs = training_configurations(Recipe.read(path))
    assert configs
    for config in configs.values():
        SystemConfig(config.system, 100, 100, config.model, config.asn, config.delays).network()


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_warmup_does_not_take_most_of_the_updates_before_cooldown(path: Path) -> None:
    for name, config in training_configurations(Recipe.read(path)).items():
        if name.endswith("-start"):
            continue  # another stage continues it
        training = config.training
        assert training.warmup_updates < 0.6 * (1 - training.cooldown) * training.max_updates


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_stages_start_from_a_model_of_the_same_kind_delay_and_vocabularies(path: Path) -> None:
    recipe = Recipe.read(path)
    configs = training_configurations(recipe)
    started = {name: str(config.init) for name, config in configs.items() if config.init}
    assert started
    for name, model in started.items():
        if not model.endswith("}/final"):
            continue  # a bundle: its sizes are checked when it is read, and the data may differ
        first = model.removeprefix("{").removesuffix("}/final")
        plain, config = configs[first], configs[name]
        assert vocabularies(recipe, str(plain.data)) == vocabularies(recipe, str(config.data))
        if config.system == "wait-k" and plain.system == "transducer+asn":  # starts from the encoder only
            assert all(plain.model[size] == config.model[size] for size in ("width", "inner", "heads"))
            assert plain.model["layers"] >= config.model["encoder_layers"]
            continue
        if config.system != "wait-k" or plain.system != "teacher":  # which differ only in their masks
            assert plain.system.removesuffix("+asn") == config.system.removesuffix("+asn")
            assert plain.delays == config.delays
        assert plain.model == {name: size for name, size in config.model.items() if name != "policy_inner"}


def vocabularies(recipe: Recipe, data: str) -> str:
    """Return where the vocabularies of a data stage come from: another stage, or itself."""
    words = recipe.stages[data.strip("{}")].words
    return next((word.removeprefix("--vocabularies=") for word in words if word.startswith("--vocabularies=")), data)


@pytest.mark.parametrize(
    ("name", "tau", "delta"),
    [
        ("en-zh.toml", 0.25, 0.3),
        ("de-en.toml", 0.13, 0.45),
        ("paper/en-zh.toml", 0.25, 0.3),
        ("paper/de-en.toml", 0.13, 0.45),
    ],
)
def test_language_pairs_keep_their_temperature_and_noise(name: str, tau: float, delta: float) -> None:
    configs = training_configurations(Recipe.read(FOLDER / name))
    assert (configs["ctc-asn-k3"].asn.tau, configs["ctc-asn-k3"].asn.delta) == (tau, delta)
    assert [(configs[each].asn.tau, configs[each].asn.delta, configs[each].asn.iterations) for each in ABLATION] == [
        (tau, delta, 16),
        (1.0, delta, 16),
        (tau, 0.0, 16),
        (tau, delta, 0),
    ]


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_networks(name: str) -> None:
    """Appendices C and D of the paper; the placement of the norms is from the authors' code."""
    configs = training_configurations(Recipe.read(FOLDER / name))
    for config in configs.values():
        network = SystemConfig(config.system, 32_000, 32_000, config.model).network()
        sizes = (network.width, network.inner, network.heads, network.dropout)
        assert sizes == (512, 2048, 8, 0.1)
        if isinstance(network, Seq2SeqConfig):
            assert (network.encoder_layers, network.decoder_layers) == (6, 6)
        else:
            assert (network.layers, network.mu, network.whole_words) == (6, 2, False)
    sorters = {stage: config.asn for stage, config in configs.items() if config.system == "ctc+asn"}
    assert {(asn.layers, asn.gamma, asn.norm, asn.query_scale) for asn in sorters.values()} == {(3, 0.5, "post", 1.0)}
    assert {asn.iterations for stage, asn in sorters.items() if stage != "gumbel-softmax"} == {16}


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_training(name: str) -> None:
    """Section 4.2 of the paper; moments, decay, clipping and kept checkpoints are from the authors' code."""
    configs = training_configurations(Recipe.read(FOLDER / name))
    common = {
        "learning_rate": 5e-4,
        "warmup_updates": 4000,
        "cooldown": 0.0,
        "max_updates": 300_000,
        "patience": 25_000,
        "validate_every": 500,
        "smoothing": 0.1,
        "betas": (0.9, 0.98),
        "weight_decay": 1e-4,
        "clip_norm": 10.0,
        "ema_decay": 0.0,
        "max_minutes": 0.0,
    }
    for config in configs.values():
        assert {key: getattr(config.training, key) for key in common} == common
        by_system = (config.training.update_tokens, config.training.keep_best)
        assert by_system == ((131_072, 5) if config.system == "teacher" else (32_768, 1))
        assert config.objective == "likelihood"


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_systems_at_all_delays(name: str) -> None:
    recipe = Recipe.read(FOLDER / name)
    configs = training_configurations(recipe)
    seven = ("wait-k", "wait-k-pseudo", "wait-k-reorder", "ctc", "ctc-pseudo", "ctc-reorder", "ctc-asn")
    delays = (1, 3, 5, 7, 9)
    assert {f"{system}-k{k}" for system in (*seven, "scratch") for k in delays} <= configs.keys()
    for stage, config in configs.items():
        kind = next((kind for kind in ("pseudo", "reorder") if kind in stage), "distilled")
        data = {"pseudo": "pseudo-data", "reorder": "reordered-data", "distilled": "distilled-data"}[kind]
        assert str(config.data) == ("{corpus}" if stage == "teacher" else f"{{{data}}}")
    evaluated = [word for word in recipe.stages["test"].words if word.startswith("--model=")]
    assert len(evaluated) == (7 + 1) * 5 + 6
    stopping = [stage for stage in recipe.stages.values() if "--stop-at-end" in stage.words]
    assert sum(word.startswith("--model=") for stage in stopping for word in stage.words) == 3 * 5


@pytest.mark.parametrize(
    ("name", "test_set", "files", "development"),
    [
        ("paper/en-zh.toml", "cwmt", ("cwmt2008", "cwmt2009", "cwmt2011"), ("newsdev2018.en", "newsdev2018.zh")),
        ("paper/de-en.toml", "newstest2015", ("newstest2015",), ("newstest2013.de", "newstest2013.en")),
    ],
)
def test_the_papers_test_sets(name: str, test_set: str, files: tuple[str, ...], development: tuple[str, str]) -> None:
    """The three years of CWMT are one test set with three references."""
    stages = Recipe.read(FOLDER / name).stages
    source, *references = ("en", "zh0", "zh1", "zh2") if test_set == "cwmt" else ("de", "en")
    pooled = [stage for stage in stages.values() if stage.family == "pooled"]
    for stage, reference in zip(pooled, references, strict=True):
        given = {option: [f"{{given}}/{each}.{side}" for each in files] for option, side in
                 (("--source", source), ("--target", reference))}  # fmt: skip
        assert {option: _values(stage, option) for option in given} == given
    first, *_ = places = [f"{{{stage.name}}}/test" for stage in pooled]
    targets = [f"{place}.target" for place in places]
    tests = [stage for stage in stages.values() if stage.command == "evaluate" and stage.name != "second-test"]
    for stage in (*tests, *(stage for stage in stages.values() if stage.command == "analyse")):
        assert (_values(stage, "--source"), _values(stage, "--reference")) == ([f"{first}.source"], targets)
        assert _values(stage, "--test-set") == [test_set]
    assert [(_values(stage, "--runs"), _values(stage, "--threads")) for stage in tests] == [(["3"], ["2"])] * len(tests)
    anticipation = stages["anticipation"]
    assert _values(anticipation, "--source") + _values(anticipation, "--target") == [f"{first}.source", targets[0]]
    sides = [
        _values(stages["corpus"], option)[0].removeprefix("{given}/") for option in ("--dev-source", "--dev-target")
    ]
    assert (*sides,) == development


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_text_and_bundles(name: str) -> None:
    stages = Recipe.read(FOLDER / name).stages
    assert (
        _values(stages["corpus"], "--source-vocabulary")
        == _values(stages["corpus"], "--target-vocabulary")
        == ["32000"]
    )
    assert ("--uncased-target" in stages["corpus"].words) == (name == "paper/de-en.toml")
    assert (_values(stages["distilled"], "--beam"), _values(stages["distilled"], "--length-penalty")) == (
        ["5"],
        ["1.5"],
    )
    pseudo = stages["pseudo"]
    assert pseudo.words[2] == "{wait-k-k9}"
    assert [_values(pseudo, option) for option in ("--delay", "--beam", "--length-penalty")] == [["9"], ["5"], ["1.0"]]
    exports = [stage for stage in stages.values() if stage.command == "export"]
    assert [_values(stage, "--precision") for stage in exports] == [["fp32"]] * len(exports)
    assert all(not _values(stage, "--blank-penalty") and "--tune-penalty" not in stage.words for stage in exports)


@pytest.mark.parametrize("path", CLAIMS, ids=lambda path: path.name)
def test_compared_systems_differ_only_in_what_is_compared(path: Path) -> None:
    configs = training_configurations(Recipe.read(path))
    start, ctc, scratch = configs["ctc-start"].training, configs["ctc"], configs["scratch"]
    assert start.max_updates + ctc.training.max_updates == scratch.training.max_updates
    for name in ("ctc", "ctc-asn", "ctc-asn-pre", "ctc-reorder", "ctc-pseudo"):
        assert (str(configs[name].init), configs[name].training) == ("{ctc-start}/final", ctc.training)
    for name in ("wait-k", "wait-k-reorder", "wait-k-pseudo"):
        assert (str(configs[name].init), configs[name].training) == ("{wait-k-start}/final", configs["wait-k"].training)
    assert configs["scratch-pre"] == replace(scratch, asn=replace(scratch.asn, norm="pre"))
    default = configs["default"]
    assert default.delays == (3,)
    changes: dict[str, dict[str, Any]] = {
        "no-temperature": {"tau": 1.0},
        "no-noise": {"delta": 0.0},
        "gumbel-softmax": {"iterations": 0},
    }
    for name, change in changes.items():
        assert configs[name] == replace(default, asn=replace(default.asn, **change))
    assert configs["ctc-asn-pre"].asn == replace(configs["ctc-asn"].asn, norm="pre")
    assert configs["ctc-asn"].asn == scratch.asn == default.asn


def _values(stage: Stage, option: str) -> list[str]:
    """Return the values of an option in the words of a stage."""
    return [word.partition("=")[2] for word in stage.words if word.startswith(f"{option}=")]


def test_the_toy_recipe_covers_the_method() -> None:
    recipe = Recipe.read(FOLDER / "toy.toml")
    configs = training_configurations(recipe)
    assert configs["asn-from-scratch"].training == configs["ctc-k1"].training, "as many updates, or it is no comparison"
    evaluated = [word for word in recipe.stages["scores"].words if word.startswith("--model=")]
    assert len(evaluated) == 7 * 2 + 1
