"""Parse a recipe: a TOML file that lists stages, each one a simulmt command line.

    title = "CTC with and without sorting"

    [values]                           # constants, used as {source} below
    source = "en"

    [settings.student]                 # a training configuration, passed to a stage as a file
    system = "ctc"

    [stages.data]
    run = "prepare --source={given}/train.{source} --target={given}/train.zh ... --output={out}"

    [stages.ctc]
    each.k = [1, 3]                    # expands to two stages, ctc-k1 and ctc-k3
    run = "train {settings.student} --set=data={data} --set=delays=[{k}] --run={out}"

`{out}` is the stage's own directory, the only place it may write to. `{NAME}` is the directory of another stage and
makes that stage a dependency; if both stages are expanded over the same values, it refers to the matching variant.
`{given}/FILE` is a file in the directory passed as --data. `{k}` is replaced by its value, even inside a reference: if
`system` is `ctc`, `{{system}}` is the directory of the stage `ctc`.

`processes = 4` runs a command in four processes. Only translation commands (such as `rewrite distil`) support it,
because one process does not keep a GPU busy.

An argument that refers to an expanded stage without fixing its values is repeated per variant:
`--model=ctc-k{k}={ctc}`. With `extends = "other.toml"` a recipe inherits from another one and overrides parts of it.
"""

from __future__ import annotations

import difflib
import itertools
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from simulmt.config import as_toml, build, override, read_toml, require
from simulmt.errors import ConfigError

OUT, GIVEN, SETTINGS = "out", "given", "settings"  # reserved, cannot name stages
_REFERENCE = re.compile(r"\{([^{}]*)\}")
_GIVEN_FILE = re.compile(r"\{given\}/(.+)")
_NAME = re.compile(r"[a-z0-9][a-z0-9+-]*")

Value = str | int | float
Values = Mapping[str, Value]
_Variant = tuple[str, dict[str, Value]]  # stage name, and its values of `each`


@dataclass(frozen=True)
class _StageTable:
    run: str
    each: dict[str, tuple[Value, ...]] = field(default_factory=dict)
    processes: int = 1

    def __post_init__(self) -> None:
        require(self.processes >= 1, f"processes must be at least 1, got {self.processes}")
        for axis, values in self.each.items():
            require(len(values) > 0, f"each.{axis} must have at least one value")


@dataclass(frozen=True)
class _RecipeTable:
    title: str
    stages: dict[str, _StageTable]
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """One command line, with unresolved references in braces, so that it is the same on every machine."""

    name: str
    family: str  # name in the recipe, shared by all variants
    words: tuple[str, ...]
    processes: int = 1  # processes that share the work; does not change the result

    @property
    def command(self) -> str:
        return self.words[0]

    @property
    def references(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for word in self.words for name in _REFERENCE.findall(word)))

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the stages this one depends on."""
        return tuple(name for name in self.references if name not in (OUT, GIVEN) and not _is_settings(name))

    @property
    def settings(self) -> tuple[str, ...]:
        """Names of the configurations passed to the command."""
        return tuple(name.partition(".")[2] for name in self.references if _is_settings(name))

    @property
    def given(self) -> tuple[str, ...]:
        """Input files, relative to the --data directory."""
        return tuple(match[1] for word in self.words if (match := _GIVEN_FILE.search(word)))


@dataclass(frozen=True)
class Recipe:
    """A parsed recipe, its stages in topological order."""

    title: str
    stages: dict[str, Stage]
    settings: dict[str, dict[str, Any]]

    @staticmethod
    def read(path: Path, assignments: Iterable[str] = ()) -> Recipe:
        """Read a recipe and apply `section.key=value` overrides; raise ConfigError if it is invalid."""
        table = _read(path, ())
        changed = override(table, assignments)
        recipe = Recipe.build(changed, str(path))
        _check_values(table.get("values", {}), changed.get("values", {}), str(path))
        return recipe

    @staticmethod
    def build(table: Mapping[str, Any], where: str) -> Recipe:
        """Build a recipe from a parsed TOML table; `where` names it in error messages."""
        recipe = build(_RecipeTable, table, where)
        try:
            stages = _sort(_expand(recipe.stages, recipe.values))
            _check_settings(recipe.settings, stages.values())
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        return Recipe(recipe.title, stages, recipe.settings)

    def matching(self, patterns: Sequence[str]) -> list[Stage]:
        """Return the stages with these names or families; all stages if `patterns` is empty."""
        known = {*self.stages, *(stage.family for stage in self.stages.values())}
        for pattern in patterns:
            if pattern not in known:
                raise ConfigError(f"--only {pattern}: unknown stage{_nearest(pattern, known)}")
        chosen = (stage for stage in self.stages.values() if {stage.name, stage.family} & {*patterns})
        return list(chosen) if patterns else list(self.stages.values())


@dataclass(frozen=True)
class Workspace:
    """Directories of a recipe on this machine."""

    work: Path
    given: Path | None = None

    def directory(self, stage: str) -> Path:
        return self.work / stage

    def missing_inputs(self, stage: Stage) -> list[str]:
        """Return the input files of a stage that do not exist."""
        return [name for name in stage.given if self.find_input(name) is None]

    def find_input(self, name: str) -> Path | None:
        """Return the path of an input file, or None if it does not exist."""
        path = None if self.given is None else self.given / name
        return path if path is not None and path.is_file() else None

    def command_line(self, stage: Stage) -> list[str]:
        """Return the stage's command line with all references replaced by paths."""

        def path_of(match: re.Match[str]) -> str:
            name = match[1]
            if name == OUT:
                return str(self.directory(stage.name))
            if name == GIVEN:
                return str(self.given or "DATA")
            if _is_settings(name):
                return str(settings_file(self.directory(stage.name), name.partition(".")[2]))
            return str(self.directory(name))

        return [_REFERENCE.sub(path_of, word) for word in stage.words]


def settings_file(directory: Path, name: str) -> Path:
    """Return the path of a configuration that is passed to a stage."""
    return directory / f"{SETTINGS}.{name}.toml"


def _read(path: Path, children: tuple[Path, ...]) -> dict[str, Any]:
    """Read a recipe and merge it into the one it inherits from."""
    table = read_toml(path)
    if "extends" not in table:
        return table
    if path in children:
        raise ConfigError(f"{path}: inherits from itself")
    return _merge(_read(path.parent / str(table.pop("extends")), (*children, path)), table)


def _merge(base: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    both = {
        key: _merge(base[key], table[key])
        for key in base.keys() & table.keys()
        if isinstance(base[key], Mapping) and isinstance(table[key], Mapping)
    }
    return {**base, **table, **both}


def _check_values(own: Values, changed: Values, where: str) -> None:
    """Raise ConfigError if an override has a value that the recipe does not have; stages would ignore it."""
    for name in changed:
        if name not in own:
            raise ConfigError(f"--set values.{name}: {where} has no such value{_nearest(name, own)}")


def _expand(tables: Mapping[str, _StageTable], constants: Values) -> list[Stage]:
    variants = {family: list(_variants(family, table)) for family, table in tables.items()}
    names = [name for each in variants.values() for name, _ in each]
    if duplicates := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"stages.{min(duplicates)}: duplicate stage name; rename one of them")
    axes = {axis for table in tables.values() for axis in table.each} | constants.keys()
    if ambiguous := axes & {*names, *tables, OUT, GIVEN}:
        raise ConfigError(f"'{min(ambiguous)}' names both a value and a directory; rename the value")
    stages = []
    for family, each in variants.items():
        words = _words(family, tables[family].run)
        for name, own in each:
            values = {**constants, **own}
            resolved = [each for word in words for each in _resolve(word, values, variants, f"stages.{family}")]
            stages.append(Stage(name, family, tuple(resolved), tables[family].processes))
    return stages


def _words(family: str, run: str) -> list[str]:
    try:
        words = shlex.split(run)
    except ValueError as error:
        raise ConfigError(f"stages.{family}: run: {error}") from None
    if not words:
        raise ConfigError(f"stages.{family}: run is empty; expected a simulmt command")
    return words


def _variants(family: str, table: _StageTable) -> Iterator[_Variant]:
    """Yield name and values of each variant: ctc-k3 for numbers, bundle-wait-k for words."""
    for combination in itertools.product(*table.each.values()):
        values = dict(zip(table.each, combination, strict=True))
        parts = (value if isinstance(value, str) else f"{axis}{value}" for axis, value in values.items())
        name = "-".join((family, *parts))
        if not _NAME.fullmatch(name) or name in (OUT, GIVEN):
            raise ConfigError(f"stages.{family}: invalid stage name '{name}'; use a-z, 0-9, - and +")
        yield name, values


def _resolve(word: str, values: Values, variants: Mapping[str, list[_Variant]], where: str) -> Iterator[str]:
    """Fill in values and replace stage families with their variants, yielding the word once per matching variant."""
    for axis, value in values.items():
        word = word.replace(f"{{{axis}}}", str(value))
    known = {OUT, GIVEN, *(name for each in variants.values() for name, _ in each)}
    unresolved = [name for name in _REFERENCE.findall(word) if name not in known and not _is_settings(name)]
    family = next((name for name in unresolved if name in variants), None)
    if family is not None:
        for name, own in _matching_variants(family, values, variants, where):
            exact = word.replace(f"{{{family}}}", f"{{{name}}}")
            yield from _resolve(exact, {**values, **own}, variants, where)
    elif unresolved:
        raise ConfigError(f"{where}: unknown stage '{{{unresolved[0]}}}'{_nearest(unresolved[0], variants)}")
    elif "{given}" in word and not _GIVEN_FILE.search(word):
        raise ConfigError(f"{where}: {word}: expected {{given}}/FILE; whole directories cannot be tracked")
    else:
        yield word


def _matching_variants(
    family: str, values: Values, variants: Mapping[str, list[_Variant]], where: str
) -> list[_Variant]:
    """Return the variants of a stage whose values do not contradict these."""
    found = [(name, own) for name, own in variants[family] if _agree(own, values)]
    if not found:
        wanted = ", ".join(f"{axis} = {values[axis]}" for axis in variants[family][0][1] if axis in values)
        raise ConfigError(f"{where}: {{{family}}} has no variant with {wanted}")
    return found


def _is_settings(reference: str) -> bool:
    return reference.startswith(f"{SETTINGS}.")


def _agree(one: Values, other: Values) -> bool:
    return all(one[axis] == other[axis] for axis in one.keys() & other.keys())


def _sort(stages: Sequence[Stage]) -> dict[str, Stage]:
    """Sort stages topologically, otherwise keeping their order."""
    by_name = {stage.name: stage for stage in stages}
    try:
        TopologicalSorter({stage.name: stage.needs for stage in stages}).prepare()
    except CycleError as error:
        raise ConfigError(f"circular dependency: {' -> '.join(error.args[1])}") from None
    ordered: dict[str, Stage] = {}

    def add(stage: Stage) -> None:
        if stage.name not in ordered:
            for name in stage.needs:
                add(by_name[name])
            ordered[stage.name] = stage

    for stage in stages:
        add(stage)
    return ordered


def _check_settings(settings: Mapping[str, Any], stages: Iterable[Stage]) -> None:
    used = {name for stage in stages for name in stage.settings}
    if missing := used - settings.keys():
        raise ConfigError(f"missing settings.{min(missing)}{_nearest(min(missing), settings)}")
    if unused := settings.keys() - used:
        raise ConfigError(f"settings.{min(unused)} is not used by any stage{_nearest(min(unused), used)}")
    as_toml({SETTINGS: settings})  # fail now, not when a stage starts


def _nearest(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(names) or 'none'}"
