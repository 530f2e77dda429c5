"""The recipes that ship: every command line is one that simulmt takes, every configuration one that can be trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.helpers import call
from recipe.configurations import training_configurations
from simulmt.recipe.plan import Recipe
from simulmt.train.systems import SystemConfig

FOLDER = Path(__file__).parents[2] / "recipes"
RECIPES = sorted([*FOLDER.glob("*.toml"), *FOLDER.glob("paper/*.toml")])
ABLATION = ("scratch", "no-temperature", "no-noise", "gumbel-softmax")
PAPER = ("paper/en-zh.toml", "paper/de-en.toml")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_every_command_line_parses(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = call("run", path, "--work", tmp_path, "--dry-run", capture=capsys)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("  to do") == len(Recipe.read(path).stages)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_every_training_configuration_builds(path: Path) -> None:
    configs = training_configurations(Recipe.read(path))
    assert {config.system for config in configs.values()} >= {"teacher", "ctc", "ctc+asn"}
    for config in configs.values():
        SystemConfig(config.system, 100, 100, config.model, config.asn, config.delays).network()


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_sorting_starts_from_plain_ctc_of_the_same_delay_and_data(path: Path) -> None:
    recipe = Recipe.read(path)
    configs = training_configurations(recipe)
    started = {name: str(config.init) for name, config in configs.items() if config.init}
    assert started
    for name, model in started.items():
        plain = configs[model.removeprefix("{").removesuffix("}/final")]
        before = "ctc+asn" if configs[name].objective == "bigrams" else "ctc"
        assert (plain.system, plain.delays) == (before, configs[name].delays)
        assert (plain.data, plain.model) == (configs[name].data, configs[name].model)


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
def test_the_papers_own_settings(name: str) -> None:
    recipe = Recipe.read(FOLDER / name)
    configs = training_configurations(recipe)
    assert "--source-vocabulary=32000" in recipe.stages["corpus"].words
    assert {config.training.max_updates for config in configs.values()} == {300_000}
    assert {(config.training.learning_rate, config.training.cooldown) for config in configs.values()} == {(5e-4, 0.0)}
    tokens = {config.system: config.training.update_tokens for config in configs.values()}
    assert tokens == {"teacher": 131_072, "wait-k": 32_768, "ctc": 32_768, "ctc+asn": 32_768}
    seven = ("wait-k", "wait-k-pseudo", "wait-k-reorder", "ctc", "ctc-pseudo", "ctc-reorder", "ctc-asn")
    assert {f"{system}-k{k}" for system in seven for k in (1, 3, 5, 7, 9)} <= configs.keys()


def test_the_toy_recipe_has_what_the_method_is_about() -> None:
    recipe = Recipe.read(FOLDER / "toy.toml")
    configs = training_configurations(recipe)
    assert configs["asn-from-scratch"].training == configs["ctc-k1"].training, "as many updates, or it is no comparison"
    evaluated = [word for word in recipe.stages["scores"].words if word.startswith("--model=")]
    assert len(evaluated) == 7 * 2 + 1
