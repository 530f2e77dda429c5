"""Hash the source code a command depends on, found by parsing imports without executing them.

Command handlers import lazily, so in modules of `cli` only code reachable from the handler is hashed. Other modules are
hashed as a whole, with the data files next to them and everything they import. Comments, docstrings and formatting are
ignored. So editing the report does not make a trained model stale.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT.name
COMMANDS = f"{PACKAGE}.cli"


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
    """Return the code of a module, with hashes of its data files, and its imports."""
    tree = _parse_module(module, root)
    return _serialise(tree) + _data_files(module, root), list(_imports(tree, root))


def _data_files(module: str, root: Path) -> str:
    """Hash the data files next to a module, such as templates, which it may read."""
    path = _module_path(module, root)
    assert path is not None, f"{module} not found"
    files = sorted(file for file in path.parent.iterdir() if file.is_file() and file.suffix not in (".py", ".pyc"))
    return "".join(f" {file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}" for file in files)


def _member_code(module: str, member: str, root: Path) -> tuple[str, list[tuple[str, str]]]:
    """Return the code of a member and of the members of its module that it uses, and their imports."""
    tree = _parse_module(module, root)
    members = {name: node for statement in tree.body for name, node in _members(statement)}
    reached = set[str]()
    queue = [member]
    while queue:
        name = queue.pop()
        if name in members and name not in reached:
            reached.add(name)
            queue += [node.id for node in ast.walk(members[name]) if isinstance(node, ast.Name)]
    nodes = [members[name] for name in members if name in reached]
    return _serialise(nodes), [found for node in nodes for found in _imports(node, root)]


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
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        yield statement.name, statement
    elif isinstance(statement, ast.Assign):
        yield from ((target.id, statement) for target in statement.targets if isinstance(target, ast.Name))
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
def _parse_module(module: str, root: Path) -> ast.Module:
    path = _module_path(module, root)
    assert path is not None, f"{module} not found"
    return ast.parse(path.read_bytes())


@cache
def _module_path(module: str, root: Path) -> Path | None:
    """Return the file of a module of this package, or None for any other module."""
    package, *names = module.split(".")
    below = root.joinpath(*names)
    candidates = (below / "__init__.py", below.with_suffix(".py"))
    return next((path for path in candidates if path.is_file()), None) if package == PACKAGE else None
