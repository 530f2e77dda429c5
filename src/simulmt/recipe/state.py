"""What of a recipe is done: each stage's record, and what has changed since it was written.

A stage that is done has `stage.json` in its directory: what it was made from, and the files that it left. It holds no
path of the machine, so a directory that was made elsewhere counts here too. A stage that was begun has `begun.json`;
the result that it is to replace stays beside it, as `.NAME.old`, until it is done.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from simulmt.config import as_table, build
from simulmt.errors import ConfigError
from simulmt.files import synchronise, write_whole
from simulmt.recipe.plan import Places, Recipe, Stage, as_toml, settings_file

RECORD, BEGUN, LOG = "stage.json", "begun.json", "stage.log"
MISSING = "missing"  # stands for the hash of a file that is not there


@dataclass(frozen=True)
class Basis:
    """All that a stage's result depends on, the same on every machine."""

    command: tuple[str, ...]
    settings: dict[str, Any]  # the configurations that it reads, by name
    given: dict[str, str]  # SHA-256 of the user's files, by name
    needs: dict[str, str]  # fingerprints of other stages, by name
    code: str  # SHA-256 of the source files of the command

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(as_table(self), sort_keys=True).encode()).hexdigest()

    def changes_since(self, earlier: Basis) -> Iterator[str]:
        """What is not as it was, in words."""
        if self.command != earlier.command:
            new = [word for word in self.command if word not in earlier.command] or ["shorter"]
            yield f"the command is now {' '.join(new)}"
        for name, table in self.settings.items():
            yield from _differences(f"settings.{name}", earlier.settings.get(name), table)
        yield from (f"{name} is another file" for name in _changed(self.given, earlier.given))
        if self.command == earlier.command:
            yield from (f"{name} is made anew" for name in _changed(self.needs, earlier.needs))
        if self.code != earlier.code:
            yield "the code has changed"


@dataclass(frozen=True)
class Record:
    """A stage that is done."""

    basis: Basis
    files: dict[str, int]  # sizes of what it left, by path in its directory
    seconds: float
    cpu_seconds: float
    finished: str


@dataclass(frozen=True)
class Standing:
    """Where a stage stands: what it would be made from now, and what there is to do."""

    stage: Stage
    basis: Basis
    state: Literal["done", "stale", "begun", "new"]
    reasons: tuple[str, ...] = ()


def survey(
    recipe: Recipe, places: Places, code_of: Callable[[Stage], str], ignore_code: bool = False
) -> dict[str, Standing]:
    """Where each stage stands; with `ignore_code`, what other versions of the code have made counts as well."""
    standings: dict[str, Standing] = {}
    for stage in recipe.stages.values():
        directory = places.directory(stage.name)
        record = read_record(directory)
        begun = _read(directory / BEGUN, Basis)
        earlier = record.basis if record else begun
        basis = Basis(
            stage.words,
            {name: recipe.settings[name] for name in stage.settings},
            {name: _given_hash(places, name, earlier) for name in stage.given},
            {name: standings[name].basis.fingerprint for name in stage.needs},
            code_of(stage),
        )
        if earlier and (replace(basis, code=earlier.code) if ignore_code else basis) == earlier:
            basis = earlier  # to the letter: 0 and 0.0 are equal, but their fingerprints are not
        standings[stage.name] = _standing(stage, basis, directory, record, begun)
    return standings


def _standing(stage: Stage, basis: Basis, directory: Path, record: Record | None, begun: Basis | None) -> Standing:
    if record is None and begun not in (None, basis):
        return Standing(stage, basis, "new", ("what was begun is of no use", *basis.changes_since(begun)))
    if record is None:
        return Standing(stage, basis, "new" if begun is None else "begun")
    reasons = tuple(_why_stale(directory, basis, record))
    return Standing(stage, basis, "stale" if reasons else "done", reasons)


def _why_stale(directory: Path, basis: Basis, record: Record) -> Iterator[str]:
    yield from basis.changes_since(record.basis)
    yield from (f"{name} is gone or damaged" for name, size in record.files.items() if _size(directory / name) != size)


def is_done(directory: Path, basis: Basis) -> bool:
    """Whether a stage that is made from this is there, whole."""
    record = read_record(directory)
    return record is not None and not any(_why_stale(directory, basis, record))


def is_foreign(directory: Path) -> bool:
    """Whether a directory holds something that no stage has left there."""
    if directory.is_file():
        return True
    names = {path.name for path in directory.iterdir()} if directory.exists() else set()
    return bool(names) and not names & {RECORD, BEGUN}


def begin(directory: Path, basis: Basis, can_go_on: bool) -> None:
    """Make room for a stage: what an unfinished call left is kept only if the command can go on from it."""
    if not (can_go_on and _read(directory / BEGUN, Basis) == basis):
        _make_room(directory, basis)
    for name, table in basis.settings.items():
        settings_file(directory, name).write_text(as_toml(table), encoding="utf-8")


def _make_room(directory: Path, basis: Basis) -> None:
    """Begin afresh; whole directories are moved, so that at no moment there is a mixture of old and new."""
    new = _beside(directory, "new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    _write(new / BEGUN, basis)
    if directory.exists():
        aside = _beside(directory, "old" if (directory / RECORD).exists() else "unfinished")
        shutil.rmtree(aside, ignore_errors=True)
        directory.rename(aside)
    new.rename(directory)
    shutil.rmtree(_beside(directory, "unfinished"), ignore_errors=True)


def _beside(directory: Path, kind: str) -> Path:
    return directory.with_name(f".{directory.name}.{kind}")


def finish(
    directory: Path, basis: Basis, seconds: float, cpu_seconds: float, finished: str, aside: Set[str] = frozenset()
) -> None:
    """Write the record, the last thing that a stage does but for throwing away what it replaces.

    What is called like something in `aside`, and what is hidden, does not count as its result.
    """
    own = {RECORD, BEGUN, LOG, *(settings_file(directory, name).name for name in basis.settings)}
    names = sorted(path.relative_to(directory) for path in directory.rglob("*") if path.is_file())
    results = [name for name in names if name.name not in own and not _is_aside(name, aside)]
    sizes = {name.as_posix(): (directory / name).stat().st_size for name in results}
    for name in results:
        synchronise(directory / name)
    _write(directory / RECORD, Record(basis, sizes, round(seconds, 1), round(cpu_seconds, 1), finished))
    (directory / BEGUN).unlink()
    shutil.rmtree(_beside(directory, "old"), ignore_errors=True)


def _is_aside(name: Path, aside: Set[str]) -> bool:
    return name.parts[0] in aside or any(part.startswith(".") for part in name.parts)


def read_record(directory: Path) -> Record | None:
    """The record of a stage; None if it is not done, or was done by a version that wrote other records."""
    return _read(directory / RECORD, Record)


def _read(path: Path, kind: type[Any]) -> Any:
    try:
        return build(kind, json.loads(path.read_text(encoding="utf-8")), str(path))
    except (OSError, ValueError, ConfigError):
        return None


def _write(path: Path, content: Basis | Record) -> None:
    write_whole(path, json.dumps(as_table(content), indent=1, ensure_ascii=False) + "\n")


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _given_hash(places: Places, name: str, earlier: Basis | None) -> str:
    """The hash of a file of the user's; where it is not at hand, what it was when the stage was made elsewhere."""
    if path := places.given_file(name):
        status = path.stat()
        return _sha256(path, status.st_mtime_ns, status.st_size)
    return earlier.given.get(name, MISSING) if earlier else MISSING


@cache
def _sha256(path: Path, _modified: int, _size: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _changed(now: dict[str, str], before: dict[str, str]) -> list[str]:
    return [name for name, value in now.items() if before.get(name) != value]


def _differences(name: str, before: Any, now: Any) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in dict.fromkeys([*before, *now]):
            yield from _differences(f"{name}.{key}", before.get(key), now.get(key))
    elif before != now:
        yield f"{name} was {before}, is {now}"
