"""What a recipe says: from a TOML file to stages, each one a command line of simulmt.

    title = "CTC with and without sorting"

    [values]                           # what {source} below stands for
    source = "en"

    [settings.student]                 # a training configuration; a stage gets it as a file in its directory
    system = "ctc"

    [stages.data]
    run = "prepare --source={given}/train.{source} --target={given}/train.zh ... --output={out}"

    [stages.ctc]
    each.k = [1, 3]                    # two stages, ctc-k1 and ctc-k3
    run = "train {settings.student} --set=data={data} --set=delays=[{k}] --run={out}"

A stage owns one directory, `{out}`, and writes nowhere else. `{NAME}` is the directory of another stage, which is
thereby done first; from a stage that repeats over the same values it is the one with the same values. `{given}/FILE` is
a file of the directory that the user names with --data. `{k}` is the value itself, also inside a name: `{{system}}`.

A word that names a repeated stage whose value is left open is said once for each value: `--model=ctc-k{k}={ctc}`.
With `like = "other.toml"` a recipe is another one but for what it says itself.
"""

from __future__ import annotations

import difflib
import itertools
import json
import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from simulmt.config import build, override, read_toml, require
from simulmt.errors import ConfigError

OUT, GIVEN, SETTINGS = "out", "given", "settings"  # in braces, these are no stages
_REFERENCE = re.compile(r"\{([^{}]*)\}")
_GIVEN_FILE = re.compile(r"\{given\}/(.+)")
_NAME = re.compile(r"[a-z0-9][a-z0-9+-]*")
_KEY = re.compile(r"[A-Za-z0-9_-]+")  # what TOML takes without quotation marks

Value = str | int | float
Values = Mapping[str, Value]
_Variant = tuple[str, dict[str, Value]]  # the name and the values of one repetition


@dataclass(frozen=True)
class _StageTable:
    run: str
    each: dict[str, tuple[Value, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
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
    """One command; its words still name what they refer to in braces, so that they are the same on every machine."""

    name: str
    family: str  # the name in the recipe, which all repetitions share
    words: tuple[str, ...]

    @property
    def command(self) -> str:
        return self.words[0]

    @property
    def references(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for word in self.words for name in _REFERENCE.findall(word)))

    @property
    def needs(self) -> tuple[str, ...]:
        """The stages that must be done before."""
        return tuple(name for name in self.references if name not in (OUT, GIVEN) and not _is_settings(name))

    @property
    def settings(self) -> tuple[str, ...]:
        return tuple(name.partition(".")[2] for name in self.references if _is_settings(name))

    @property
    def given(self) -> tuple[str, ...]:
        """The files of the user's that it reads, relative to the directory that is given."""
        return tuple(match[1] for word in self.words if (match := _GIVEN_FILE.search(word)))


@dataclass(frozen=True)
class Recipe:
    """Stages by name, each after all that it needs."""

    title: str
    stages: dict[str, Stage]
    settings: dict[str, dict[str, Any]]

    @staticmethod
    def read(path: Path, assignments: Iterable[str] = ()) -> Recipe:
        """From a file and `section.key=value` assignments on top of it; what it says wrong is a ConfigError."""
        return Recipe.build(override(_read(path, ()), assignments), str(path))

    @staticmethod
    def build(table: Mapping[str, Any], where: str) -> Recipe:
        recipe = build(_RecipeTable, table, where)
        try:
            stages = _in_order(_expand(recipe.stages, recipe.values))
            _check_settings(recipe.settings, stages.values())
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        return Recipe(recipe.title, stages, recipe.settings)

    def matching(self, patterns: Sequence[str]) -> list[Stage]:
        """The stages of these names or families; all if there are no patterns."""
        known = {*self.stages, *(stage.family for stage in self.stages.values())}
        for pattern in patterns:
            if pattern not in known:
                raise ConfigError(f"--only {pattern}: no such stage{_nearest(pattern, known)}")
        chosen = (stage for stage in self.stages.values() if {stage.name, stage.family} & {*patterns})
        return list(chosen) if patterns else list(self.stages.values())


@dataclass(frozen=True)
class Places:
    """Where a recipe's directories are on this machine."""

    work: Path
    given: Path | None = None

    def directory(self, stage: str) -> Path:
        return self.work / stage

    def not_at_hand(self, stage: Stage) -> list[str]:
        """The user's files that the stage reads and that are not there."""
        return [name for name in stage.given if self.given_file(name) is None]

    def given_file(self, name: str) -> Path | None:
        path = None if self.given is None else self.given / name
        return path if path is not None and path.is_file() else None

    def command_line(self, stage: Stage) -> list[str]:
        """The words with real paths in them."""

        def path(match: re.Match[str]) -> str:
            name = match[1]
            if name == OUT:
                return str(self.directory(stage.name))
            if name == GIVEN:
                return str(self.given or "DATA")
            if _is_settings(name):
                return str(settings_file(self.directory(stage.name), name.partition(".")[2]))
            return str(self.directory(name))

        return [_REFERENCE.sub(path, word) for word in stage.words]


def settings_file(directory: Path, name: str) -> Path:
    """Where in its directory a stage finds a configuration."""
    return directory / f"{SETTINGS}.{name}.toml"


def as_toml(table: Mapping[str, Any], section: str = "") -> str:
    """A table of plain values, arrays of them and tables, as TOML; all else is a ConfigError that names the key."""
    text, tables = "", ""
    for key, value in table.items():
        name = f"{section}.{key}" if section else key
        if not _KEY.fullmatch(key):
            raise ConfigError(f"{name}: '{key}' is no key; use letters, digits, - and _")
        if isinstance(value, Mapping):
            tables += f"\n[{name}]\n{as_toml(value, name)}"
        elif not _is_plain(value):
            raise ConfigError(f"{name}: expected text, a finite number, true, false or an array of these, got {value}")
        else:  # JSON spells values as TOML does, but for one character
            spelled = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
            text += f"{key} = {spelled}\n"
    return text + tables


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


def _read(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    """The table of a recipe, laid over the one that it is like."""
    table = read_toml(path)
    if "like" not in table:
        return table
    if path in above:
        raise ConfigError(f"{path}: is like itself")
    return _laid_over(_read(path.parent / str(table.pop("like")), (*above, path)), table)


def _laid_over(base: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    both = {
        key: _laid_over(base[key], table[key])
        for key in base.keys() & table.keys()
        if isinstance(base[key], Mapping) and isinstance(table[key], Mapping)
    }
    return {**base, **table, **both}


def _expand(tables: Mapping[str, _StageTable], constants: Values) -> list[Stage]:
    variants = {family: list(_variants(family, table)) for family, table in tables.items()}
    names = [name for each in variants.values() for name, _ in each]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"stages.{min(twice)}: two stages come to this name; rename one")
    axes = {axis for table in tables.values() for axis in table.each} | constants.keys()
    if both := axes & {*names, *tables, OUT, GIVEN}:
        raise ConfigError(f"'{min(both)}' is the name of a value, but {{{min(both)}}} is a directory; rename the value")
    stages = []
    for family, each in variants.items():
        words = _words(family, tables[family].run)
        for name, own in each:
            values = {**constants, **own}
            spelled = [spelling for word in words for spelling in _spell(word, values, variants, f"stages.{family}")]
            stages.append(Stage(name, family, tuple(spelled)))
    return stages


def _words(family: str, run: str) -> list[str]:
    try:
        words = shlex.split(run)
    except ValueError as error:
        raise ConfigError(f"stages.{family}: run: {error}") from None
    if not words:
        raise ConfigError(f"stages.{family}: run is empty; expected a command of simulmt")
    return words


def _variants(family: str, table: _StageTable) -> Iterator[_Variant]:
    """The name and the values of each repetition: ctc-k3, or, since words speak for themselves, bundle-wait-k."""
    for combination in itertools.product(*table.each.values()):
        values = dict(zip(table.each, combination, strict=True))
        parts = (value if isinstance(value, str) else f"{axis}{value}" for axis, value in values.items())
        name = "-".join((family, *parts))
        if not _NAME.fullmatch(name) or name in (OUT, GIVEN):
            raise ConfigError(f"stages.{family}: '{name}' is no name for a stage; use a-z, 0-9, - and +")
        yield name, values


def _spell(word: str, values: Values, variants: Mapping[str, list[_Variant]], where: str) -> Iterator[str]:
    """The word with all values filled in and all stages named exactly, once for each value left open."""
    for axis, value in values.items():
        word = word.replace(f"{{{axis}}}", str(value))
    exact = {OUT, GIVEN, *(name for each in variants.values() for name, _ in each)}
    inexact = [name for name in _REFERENCE.findall(word) if name not in exact and not _is_settings(name)]
    family = next((name for name in inexact if name in variants), None)
    if family is not None:
        for name, own in _fitting(family, values, variants, where):
            exactly = word.replace(f"{{{family}}}", f"{{{name}}}")
            yield from _spell(exactly, {**values, **own}, variants, where)
    elif inexact:
        raise ConfigError(f"{where}: '{{{inexact[0]}}}' is no stage{_nearest(inexact[0], variants)}")
    elif "{given}" in word and not _GIVEN_FILE.search(word):
        raise ConfigError(f"{where}: {word}: expected {{given}}/FILE, so that it is known which file is read")
    else:
        yield word


def _fitting(family: str, values: Values, variants: Mapping[str, list[_Variant]], where: str) -> list[_Variant]:
    """The repetitions of a stage that have no other values than these."""
    found = [(name, own) for name, own in variants[family] if _agree(own, values)]
    if not found:
        wanted = ", ".join(f"{axis} = {values[axis]}" for axis in variants[family][0][1] if axis in values)
        raise ConfigError(f"{where}: {{{family}}} is not repeated for {wanted}")
    return found


def _is_settings(reference: str) -> bool:
    return reference.startswith(f"{SETTINGS}.")


def _agree(one: Values, other: Values) -> bool:
    return all(one[axis] == other[axis] for axis in one.keys() & other.keys())


def _in_order(stages: Sequence[Stage]) -> dict[str, Stage]:
    """Each stage after what it needs, otherwise as they come."""
    by_name = {stage.name: stage for stage in stages}
    try:
        TopologicalSorter({stage.name: stage.needs for stage in stages}).prepare()
    except CycleError as error:
        raise ConfigError(f"stages need each other in a circle: {' -> '.join(error.args[1])}") from None
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
        raise ConfigError(f"there is no settings.{min(missing)}{_nearest(min(missing), settings)}")
    if unused := settings.keys() - used:
        raise ConfigError(f"settings.{min(unused)} is used by no stage{_nearest(min(unused), used)}")
    as_toml({SETTINGS: settings})  # what cannot be written is found now


def _nearest(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]}?" if close else f"; there are {', '.join(names) or 'none'}"
