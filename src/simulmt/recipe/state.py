"""Track which stages of a recipe are up to date.

The directory of a finished stage holds `stage.json`: its inputs by hash, and the files it produced. The record contains
no paths of the machine, so a stage run elsewhere can be copied here. A stage in progress has `begun.json`; the result
it will replace is kept as `.NAME.old` until it is finished.

Inputs include the source code of the command (`code_hash`), found by parsing imports without executing them. Command
handlers import lazily, so in modules of `cli` only code reachable from the handler counts. Other modules count as a
whole, with the data files next to them and everything they import; comments, docstrings and formatting do not. So
editing the report does not make a trained model stale.
"""

from __future__ import annotations

import ast
import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from simulmt.config import as_table, as_toml, build
from simulmt.errors import ConfigError, DataError
from simulmt.files import atomic_directory, fsync, sha256, write_atomic
from simulmt.recipe.plan import Recipe, Stage, Workspace, settings_file

RECORD, BEGUN, LOG = "stage.json", "begun.json", "stage.log"
MISSING = "missing"  # in place of the hash of a missing file
LABELS = {"done": "done", "new": "to do", "begun": "unfinished", "stale": "out of date"}
ROOT = Path(__file__).parents[1]
PACKAGE = ROOT.name
COMMANDS = f"{PACKAGE}.cli"
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler, ast.MatchAs, ast.MatchStar)


@dataclass(frozen=True)
class Inputs:
    """Everything the result of a stage depends on, independent of the machine."""

    command: tuple[str, ...]
    settings: dict[str, Any]  # configurations, by name
    given: dict[str, str]  # SHA-256 of input files, by name
    needs: dict[str, str]  # fingerprints of the stages it depends on, by name
    code: str  # SHA-256 of the source code of the command

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(as_table(self), sort_keys=True).encode()).hexdigest()

    def changes_since(self, earlier: Inputs) -> Iterator[str]:
        """Describe each change since `earlier`."""
        if self.command != earlier.command:
            added = [word for word in self.command if word not in earlier.command]
            yield f"command changed: {' '.join(added) or 'shorter'}"
        for name, table in self.settings.items():
            yield from _differences(f"settings.{name}", earlier.settings.get(name), table)
        yield from (f"{name} has changed" for name in _changed(self.given, earlier.given))
        if self.command == earlier.command:
            yield from (f"{name} has been rebuilt" for name in _changed(self.needs, earlier.needs))
        if self.code != earlier.code:
            yield "code has changed"


@dataclass(frozen=True)
class Record:
    """Record of a finished stage."""

    inputs: Inputs
    files: dict[str, int]  # sizes of its output files, by relative path
    seconds: float
    cpu_seconds: float
    finished: str


@dataclass(frozen=True)
class StageStatus:
    """State of a stage with its current inputs, and the reasons if it is not up to date."""

    stage: Stage
    inputs: Inputs
    state: Literal["done", "stale", "begun", "new"]
    reasons: tuple[str, ...] = ()

    @property
    def description(self) -> str:
        return ": ".join(filter(None, (LABELS[self.state], "; ".join(self.reasons))))


def stage_statuses(
    recipe: Recipe, workspace: Workspace, code_of: Callable[[Stage], str], ignore_code: bool = False
) -> dict[str, StageStatus]:
    """Return the status of every stage; with `ignore_code`, changes to the code do not count."""
    statuses: dict[str, StageStatus] = {}
    for stage in recipe.stages.values():
        directory = workspace.directory(stage.name)
        record = read_record(directory)
        begun = _read(directory / BEGUN, Inputs)
        earlier = record.inputs if record else begun
        inputs = Inputs(
            stage.words,
            {name: recipe.settings[name] for name in stage.settings},
            {name: _given_hash(workspace, name, earlier) for name in stage.given},
            {name: statuses[name].inputs.fingerprint for name in stage.needs},
            code_of(stage),
        )
        if earlier and (replace(inputs, code=earlier.code) if ignore_code else inputs) == earlier:
            inputs = earlier  # 0 == 0.0, but their fingerprints differ: keep the recorded values
        statuses[stage.name] = _status(stage, inputs, directory, record, begun)
    return statuses


def _status(stage: Stage, inputs: Inputs, directory: Path, record: Record | None, begun: Inputs | None) -> StageStatus:
    if record is None and begun not in (None, inputs):
        return StageStatus(stage, inputs, "new", ("unfinished work is out of date", *inputs.changes_since(begun)))
    if record is None:
        return StageStatus(stage, inputs, "new" if begun is None else "begun")
    reasons = tuple(_why_stale(directory, inputs, record))
    return StageStatus(stage, inputs, "stale" if reasons else "done", reasons)


def _why_stale(directory: Path, inputs: Inputs, record: Record) -> Iterator[str]:
    yield from inputs.changes_since(record.inputs)
    for name, size in record.files.items():
        path = directory / name
        if not path.is_file() or path.stat().st_size != size:
            yield f"{name} is missing or damaged"


def check_runnable(todo: Sequence[StageStatus], statuses: Mapping[str, StageStatus], workspace: Workspace) -> None:
    """Raise an error if a stage cannot run: a missing input or dependency, or other files in its directory."""
    for directory in (workspace.directory(status.stage.name) for status in todo):
        if is_foreign(directory):
            raise ConfigError(
                f"--work {workspace.work}: {directory} was not written by a recipe; move it or use another directory"
            )
    names = {status.stage.name for status in todo}
    for status in todo:
        if missing := workspace.missing_inputs(status.stage):
            if workspace.given is None:
                raise ConfigError(f"{status.stage.name} reads {missing[0]}: pass its directory with --data")
            raise DataError(f"--data {workspace.given}: {missing[0]} not found, which stage {status.stage.name} reads")
        for need in status.stage.needs:
            if statuses[need].state != "done" and need not in names:
                raise ConfigError(f"--only {status.stage.name}: needs {need}, which is {statuses[need].description}")


def is_done(directory: Path, inputs: Inputs) -> bool:
    """Return whether the directory holds an intact result for these inputs."""
    record = read_record(directory)
    return record is not None and not any(_why_stale(directory, inputs, record))


def is_foreign(directory: Path) -> bool:
    """Return whether a directory holds files that no stage wrote."""
    if directory.is_file():
        return True
    names = {path.name for path in directory.iterdir()} if directory.exists() else set()
    return bool(names) and not names & {RECORD, BEGUN}


def begin(directory: Path, inputs: Inputs, can_resume: bool) -> None:
    """Prepare the directory of a stage, keeping unfinished work only if the command can resume it."""
    if not (can_resume and _read(directory / BEGUN, Inputs) == inputs):
        # Start with an empty directory, so that old and new files never mix; a finished result is kept aside.
        aside = _aside(directory) if (directory / RECORD).exists() else None
        with atomic_directory(directory, f".{directory.name}.unfinished", aside) as new:
            _write(new / BEGUN, inputs)
    for name, table in inputs.settings.items():
        settings_file(directory, name).write_text(as_toml(table), encoding="utf-8")


def _aside(directory: Path) -> Path:
    """Return where the previous result of a stage is kept until it is replaced."""
    return directory.with_name(f".{directory.name}.old")


def finish(
    directory: Path, inputs: Inputs, seconds: float, cpu_seconds: float, finished: str, ignored: Set[str] = frozenset()
) -> None:
    """Write the record of a finished stage and delete the result it replaces.

    Hidden files, and files and directories named in `ignored`, are not part of the result.
    """
    own = {RECORD, BEGUN, LOG, *(settings_file(directory, name).name for name in inputs.settings)}
    names = sorted(path.relative_to(directory) for path in directory.rglob("*") if path.is_file())
    results = [name for name in names if name.name not in own and not _is_ignored(name, ignored)]
    sizes = {name.as_posix(): (directory / name).stat().st_size for name in results}
    for name in results:
        fsync(directory / name)
    _write(directory / RECORD, Record(inputs, sizes, round(seconds, 1), round(cpu_seconds, 1), finished))
    (directory / BEGUN).unlink()
    shutil.rmtree(_aside(directory), ignore_errors=True)


def _is_ignored(name: Path, ignored: Set[str]) -> bool:
    return name.parts[0] in ignored or any(part.startswith(".") for part in name.parts)


def read_record(directory: Path) -> Record | None:
    """Return the record of a finished stage, or None if there is none that this version can read."""
    return _read(directory / RECORD, Record)


def _read(path: Path, kind: type[Any]) -> Any:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        if "basis" in table:  # the former name
            table["inputs"] = table.pop("basis")
        return build(kind, table, str(path))
    except (OSError, ValueError, ConfigError):
        return None


def _write(path: Path, content: Inputs | Record) -> None:
    write_atomic(path, json.dumps(as_table(content), indent=1, ensure_ascii=False) + "\n")


def _given_hash(workspace: Workspace, name: str, earlier: Inputs | None) -> str:
    """Return the hash of an input file, or the recorded one if the stage was run elsewhere and the file is not here."""
    if path := workspace.find_input(name):
        status = path.stat()
        return _sha256(path, status.st_mtime_ns, status.st_size)
    return earlier.given.get(name, MISSING) if earlier else MISSING


@cache
def _sha256(path: Path, _modified: int, _size: int) -> str:
    return sha256(path)


def _changed(now: dict[str, str], before: dict[str, str]) -> list[str]:
    return [name for name, value in now.items() if before.get(name) != value]


def _differences(name: str, before: Any, now: Any) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in dict.fromkeys([*before, *now]):
            yield from _differences(f"{name}.{key}", before.get(key), now.get(key))
    elif before != now:
        yield f"{name} changed from {before} to {now}"


@cache
def code_hash(module: str, handler: str, root: Path = ROOT) -> str:
    """Hash a command handler and all modules it imports, directly or not."""
    parts = dict[str, str]()
    queue = [(module, handler)]
    while queue:
        name, member = queue.pop()
        is_whole = not name.startswith(COMMANDS)
        key = name if is_whole else f"{name}:{member}"
        if key not in parts:
            parts[key], imports = _module_code(name, root) if is_whole else _member_code(name, member, root)
            queue += imports
    digest = hashlib.sha256()
    for key, code in sorted(parts.items()):
        digest.update(f"{key} {code}\n".encode())
    return digest.hexdigest()


@cache
def _module_code(module: str, root: Path) -> tuple[str, list[tuple[str, str]]]:
    """Return the code of a module, with hashes of the data files next to it, such as templates, and its imports."""
    path, tree = _parse_module(module, root)
    files = sorted(file for file in path.parent.iterdir() if file.is_file() and file.suffix not in (".py", ".pyc"))
    hashes = "".join(f" {file.name} {sha256(file)}" for file in files)
    return _serialise(tree) + hashes, list(_imports(tree, root))


def _member_code(module: str, member: str, root: Path) -> tuple[str, list[tuple[str, str]]]:
    """Return the code of a member and of the members of its module that it uses, and their imports."""
    _, tree = _parse_module(module, root)
    members = {name: node for statement in tree.body for name, node in _members(statement)}
    reached = set[str]()
    queue = [member]
    while queue:
        name = queue.pop()
        if name in members and name not in reached:
            reached.add(name)
            queue += _references(members[name])
    nodes = [members[name] for name in members if name in reached]
    return _serialise(nodes), [found for node in nodes for found in _imports(node, root)]


def _references(node: ast.AST) -> set[str]:
    """Return the names that code takes from its module: not those it binds itself, such as parameters."""
    if isinstance(node, ast.Name):
        return {node.id} if isinstance(node.ctx, ast.Load) else set()
    if isinstance(node, ast.Global):
        return set(node.names)
    outer, inner = _scopes(node)
    own = [each for part in inner for each in _same_scope(part)]
    shared = {name for each in own if isinstance(each, ast.Global) for name in each.names}
    bound = {name for each in own for name in _bound(each)} - shared
    return _all_references(outer) | (_all_references(inner) - bound)


def _all_references(nodes: Iterable[ast.AST]) -> set[str]:
    return {name for node in nodes for name in _references(node)}


def _scopes(node: ast.AST) -> tuple[list[ast.AST], list[ast.AST]]:
    """Return the parts of a node that belong to the surrounding scope, and those that form a scope of their own."""
    parts = list(ast.iter_child_nodes(node))
    if isinstance(node, _FUNCTIONS):
        parameters = [part for part in ast.iter_child_nodes(node.args) if isinstance(part, ast.arg)]
        body = node.body if isinstance(node.body, list) else [node.body]
        return [part for part in parts if part not in body], [*(ast.arg(each.arg) for each in parameters), *body]
    if isinstance(node, _COMPREHENSIONS):
        first, *others = node.generators
        results = [part for part in parts if not isinstance(part, ast.comprehension)]
        return [first.iter], [first.target, *first.ifs, *others, *results]
    return parts, []


def _same_scope(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and the nodes below it, except those in a scope of their own."""
    yield node
    if not isinstance(node, (*_FUNCTIONS, *_COMPREHENSIONS, ast.ClassDef)):
        for part in ast.iter_child_nodes(node):
            yield from _same_scope(part)


def _bound(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node, without those below it, binds."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.alias):
        yield node.asname or node.name.partition(".")[0]
    elif isinstance(node, _NAMED) and node.name:
        yield node.name


def _serialise(part: object) -> str:
    """Serialise an AST without docstrings; unlike `ast.dump`, the same in every version of Python."""
    if isinstance(part, list):
        return f"[{','.join(map(_serialise, part))}]"
    if not isinstance(part, ast.AST):
        return repr(part)
    fields = dict(ast.iter_fields(part))
    if isinstance(part, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        fields["body"] = part.body[ast.get_docstring(part, clean=False) is not None :]
    # Skip empty fields: newer versions of Python add some.
    parts = (f"{name}={_serialise(value)}" for name, value in fields.items() if value not in (None, []))
    return f"{type(part).__name__}({','.join(parts)})"


def _members(statement: ast.stmt) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the names a top-level statement defines, each with its defining node."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name, statement
    elif isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        yield from ((target.id, statement) for target in targets if isinstance(target, ast.Name))
    elif isinstance(statement, ast.ImportFrom):
        for alias in statement.names:
            yield alias.asname or alias.name, ast.ImportFrom(statement.module, [alias], statement.level)


def _imports(node: ast.AST, root: Path) -> Iterator[tuple[str, str]]:
    """Yield modules of this package imported anywhere below a node, each with the imported member."""
    for statement in ast.walk(node):
        if isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            for alias in statement.names:
                below = f"{statement.module}.{alias.name}"
                if _module_path(below, root):
                    yield below, ""
                # The top-level package only re-exports.
                elif statement.module != PACKAGE and _module_path(statement.module, root):
                    yield statement.module, alias.name
        elif isinstance(statement, ast.Import):
            yield from ((alias.name, "") for alias in statement.names if _module_path(alias.name, root))


@cache
def _parse_module(module: str, root: Path) -> tuple[Path, ast.Module]:
    path = _module_path(module, root)
    assert path is not None, f"{module} not found"
    return path, ast.parse(path.read_bytes())


@cache
def _module_path(module: str, root: Path) -> Path | None:
    """Return the file of a module of this package, or None for any other module."""
    package, *names = module.split(".")
    below = root.joinpath(*names)
    candidates = (below / "__init__.py", below.with_suffix(".py"))
    return next((path for path in candidates if path.is_file()), None) if package == PACKAGE else None
