"""Training configurations of the stages of a recipe."""

from __future__ import annotations

from simulmt.config import build, override
from simulmt.recipe.plan import Recipe, Stage
from simulmt.train.systems import RunConfig


def training_configurations(recipe: Recipe) -> dict[str, RunConfig]:
    """Return the configuration of every training stage, with unresolved references to other stages."""
    return {name: _configuration(recipe, stage) for name, stage in recipe.stages.items() if stage.command == "train"}


def _configuration(recipe: Recipe, stage: Stage) -> RunConfig:
    (settings,) = stage.settings
    assignments = [word.removeprefix("--set=") for word in stage.words if word.startswith("--set=")]
    return build(RunConfig, override(recipe.settings[settings], assignments), stage.name)
