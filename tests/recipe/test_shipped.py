"""Shipped recipes: all command lines parse, and all configurations can be trained."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli.helpers import call
from recipe.configurations import training_configurations
from simulmt.model.asn import ASNConfig
from simulmt.model.ctc import CTCConfig
from simulmt.model.seq2seq import Seq2SeqConfig
from simulmt.recipe.plan import Recipe, Stage
from simulmt.train.systems import LowDelayConfig, SystemConfig, TrainingConfig

FOLDER = Path(__file__).parents[2] / "recipes"
CLAIMS = sorted(FOLDER.glob("claims/*.toml"))
RECIPES = sorted([*FOLDER.glob("*.toml"), *FOLDER.glob("paper/*.toml"), *CLAIMS])
ABLATION: dict[str, dict[str, Any]] = {
    "scratch-k3": {},
    "no-temperature": {"tau": 1.0},
    "no-noise": {"delta": 0.0},
    "gumbel-softmax": {"iterations": 0},
}
PAPER = ("paper/en-zh.toml", "paper/de-en.toml")
DELAYS = (1, 3, 5, 7, 9)


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


@pytest.mark.parametrize(("name", "tau", "delta"), [("en-zh.toml", 0.25, 0.3), ("de-en.toml", 0.13, 0.45)])
def test_language_pairs_keep_their_temperature_and_noise(name: str, tau: float, delta: float) -> None:
    configs = training_configurations(Recipe.read(FOLDER / name))
    default = configs["ctc-asn-k3"].asn
    assert (default.tau, default.delta, default.iterations) == (tau, delta, 16)
    for stage, change in ABLATION.items():
        assert configs[stage].asn == replace(default, **change)


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_networks(name: str) -> None:
    """Appendix C of the paper."""
    configs = training_configurations(Recipe.read(FOLDER / name))
    base: dict[str, Any] = {"width": 512, "inner": 2048, "heads": 8, "dropout": 0.1}
    encoder = CTCConfig(9, 9, **base, layers=6, mu=2, whole_words=False, look_ahead_layer=0)
    both: dict[str, Any] = {**base, "encoder_layers": 6, "decoder_layers": 6, "policy_inner": 0}
    for config in configs.values():
        network = SystemConfig(config.system, 9, 9, config.model).network()
        translator = Seq2SeqConfig(9, 9, causal=config.system == "wait-k", **both)
        assert network == (encoder if config.system in ("ctc", "ctc+asn") else translator)


@pytest.mark.parametrize(("name", "tau", "delta"), [(PAPER[0], 0.25, 0.3), (PAPER[1], 0.13, 0.45)])
def test_the_papers_sorting_networks(name: str, tau: float, delta: float) -> None:
    """Appendix D of the paper; the placement of the norms is from the authors' code."""
    sorter = ASNConfig(layers=3, iterations=16, tau=tau, delta=delta, gamma=0.5, norm="post", query_scale=1.0)
    for stage, config in training_configurations(Recipe.read(FOLDER / name)).items():
        if config.system == "ctc+asn":
            assert config.asn == replace(sorter, **ABLATION.get(stage, {}))


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_training(name: str) -> None:
    """Section 4.2 of the paper; betas, decay, clipping and kept checkpoints are from the authors' code."""
    for config in training_configurations(Recipe.read(FOLDER / name)).values():
        is_teacher = config.system == "teacher"
        assert config.training == TrainingConfig(
            batch_tokens=config.training.batch_tokens,  # of one forward pass
            update_tokens=131_072 if is_teacher else 32_768,
            learning_rate=5e-4,
            warmup_updates=4000,
            cooldown=0.0,
            betas=(0.9, 0.999),
            weight_decay=1e-4,
            clip_norm=10.0,
            smoothing=0.1,
            max_updates=300_000,
            validate_every=500,
            patience=25_000,
            keep_best=5 if is_teacher else 1,
            ema_decay=0.0,
            seed=1,
            precision="auto",
            max_minutes=0.0,
        )
        assert (config.objective, config.reading, config.low_delay) == ("likelihood", "steady", LowDelayConfig())


@pytest.mark.parametrize("name", PAPER)
def test_sorting_starts_from_ctc_of_the_same_delay_and_the_ablation_from_scratch(name: str) -> None:
    configs = training_configurations(Recipe.read(FOLDER / name))
    starts = {stage: str(config.init) for stage, config in configs.items() if config.init}
    assert starts == {f"ctc-asn-{each}": f"{{ctc-{each}}}/final" for each in (*(f"k{k}" for k in DELAYS), "all")}
    assert [configs[stage].delays for stage in ABLATION] == [(3,)] * 4


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_systems_at_all_delays(name: str) -> None:
    recipe = Recipe.read(FOLDER / name)
    configs = training_configurations(recipe)
    seven = ("wait-k", "wait-k-pseudo", "wait-k-reorder", "ctc", "ctc-pseudo", "ctc-reorder", "ctc-asn")
    assert {f"{system}-k{k}" for system in (*seven, "scratch") for k in DELAYS} <= configs.keys()
    for stage, config in configs.items():
        kind = next((kind for kind in ("pseudo", "reorder") if kind in stage), "distilled")
        data = {"pseudo": "pseudo-data", "reorder": "reordered-data", "distilled": "distilled-data"}[kind]
        assert str(config.data) == ("{corpus}" if stage == "teacher" else f"{{{data}}}")
    evaluated = [word for word in recipe.stages["test"].words if word.startswith("--model=")]
    assert len(evaluated) == (7 + 1) * 5 + 6
    stopping = [stage for stage in recipe.stages.values() if "--stop-at-end" in stage.words]
    stopping_models = Counter(model.split("=")[0] for stage in stopping for model in _values(stage, "--model"))
    assert stopping_models == dict.fromkeys(("wait-k-stopping", "wait-k-pseudo-stopping", "wait-k-reorder-stopping"), 5)
    assert {"comparison-wait-k", "comparison-ctc", "comparison-scratch"} <= recipe.stages.keys()
    for reporting in (stage for stage in recipe.stages.values() if stage.command in ("compare", "plot", "report")):
        assert {"test", "second-test", *(stage.name for stage in stopping)} <= {*reporting.needs}


@pytest.mark.parametrize(
    ("name", "test_set", "files"),
    [
        ("paper/en-zh.toml", "cwmt", ("cwmt2008", "cwmt2009", "cwmt2011")),
        ("paper/de-en.toml", "newstest2015", ("newstest2015",)),
    ],
)
def test_the_papers_test_sets(name: str, test_set: str, files: tuple[str, ...]) -> None:
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
    assert not any(_values(stage, "--limit") for stage in stages.values())
    assert _sides(stages["anticipation"]) == ([f"{first}.source"], targets[:1])
    oracle = [
        (stage.words[1], _values(stage, "--blank-penalty")) for stage in stages.values() if stage.family == "oracle"
    ]
    assert oracle == [(f"{{ctc-asn-k{k}}}", []) for k in DELAYS]


@pytest.mark.parametrize(
    ("name", "source", "target"),
    [
        ("paper/en-zh.toml", "newsdev2018.en", "newsdev2018.zh"),
        ("paper/de-en.toml", "newstest2013.de", "newstest2013.en"),
    ],
)
def test_the_papers_development_sets(name: str, source: str, target: str) -> None:
    stages = Recipe.read(FOLDER / name).stages
    development = [f"{{given}}/{source}"], [f"{{given}}/{target}"]
    for stage in stages.values():
        if stage.command == "prepare":
            assert (_values(stage, "--dev-source"), _values(stage, "--dev-target")) == development
    scored = stages["second-test"]
    assert (_values(scored, "--source"), _values(scored, "--reference")) == development
    assert _sides(stages["anticipation-development"]) == development
    aligned = stages["anticipation"]  # eflomal learns from both sets
    assert (_values(aligned, "--more-source"), _values(aligned, "--more-target")) == development


@pytest.mark.parametrize(
    ("name", "source", "target"), [("paper/en-zh.toml", "en", "zh"), ("paper/de-en.toml", "de", "en")]
)
def test_the_papers_training_text(name: str, source: str, target: str) -> None:
    """Teachers learn from the corpus; pseudo references are added to the distilled text, which is also reordered."""
    stages = Recipe.read(FOLDER / name).stages
    corpus = [f"{{given}}/train.{source}.xz"], [f"{{given}}/train.{target}.xz"]
    assert _sides(stages["corpus"]) == corpus
    assert _sides(stages["distilled"]) == _sides(stages["pseudo"]) == (corpus[0], [])
    assert _sides(stages["reordered"]) == (["{distilled}/train.source"], ["{distilled}/train.target"])
    assert ("--segment-chinese" in stages["reordered"].words) == (target == "zh")
    for kind, *texts in (("distilled", "distilled"), ("pseudo", "distilled", "pseudo"), ("reordered", "reordered")):
        data = stages[f"{kind}-data"]
        assert _sides(data) == tuple([f"{{{text}}}/train.{side}" for text in texts] for side in ("source", "target"))
        assert _values(data, "--vocabularies") == ["{corpus}"]


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
    for name, change in ABLATION.items():
        if name != "scratch-k3":
            assert configs[name] == replace(default, asn=replace(default.asn, **change))
    assert configs["ctc-asn-pre"].asn == replace(configs["ctc-asn"].asn, norm="pre")
    assert configs["ctc-asn"].asn == scratch.asn == default.asn


def _values(stage: Stage, option: str) -> list[str]:
    """Return the values of an option in the words of a stage."""
    return [word.partition("=")[2] for word in stage.words if word.startswith(f"{option}=")]


def _sides(stage: Stage) -> tuple[list[str], list[str]]:
    """Return the source and target files of a stage."""
    return _values(stage, "--source"), _values(stage, "--target")


def test_the_toy_recipe_covers_the_method() -> None:
    recipe = Recipe.read(FOLDER / "toy.toml")
    configs = training_configurations(recipe)
    assert configs["asn-from-scratch"].training == configs["ctc-k1"].training, "as many updates, or it is no comparison"
    evaluated = [word for word in recipe.stages["scores"].words if word.startswith("--model=")]
    assert len(evaluated) == 7 * 2 + 1
