"""Which of simulmt's source files a command depends on, as one hash: found by reading imports, never by running them.

Commands import what they need inside their handlers, so of a module of commands only what the handler reaches counts;
any other module counts whole, with all that it imports. A change to the report does not make a trained model stale,
nor does one to a comment, a docstring or the layout of the lines.
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
    """The hash of the handler of a command and of every module that it comes to import."""
    parts = dict[str, str]()
    queue = [(module, handler)]
    while queue:
        name, member = queue.pop()
        is_whole = not name.startswith(COMMANDS)
        key = name if is_whole else f"{name}:{member}"
        if key not in parts:
            parts[key], imports = _whole(name, root) if is_whole else _reached(name, member, root)
            queue += imports
    digest = hashlib.sha256()
    for key, meaning in sorted(parts.items()):
        digest.update(f"{key} {meaning}\n".encode())
    return digest.hexdigest()


def _whole(module: str, root: Path) -> tuple[str, list[tuple[str, str]]]:
    tree = _parsed(module, root)
    return _meaning(tree), list(_imports(tree, root))


def _reached(module: str, member: str, root: Path) -> tuple[str, list[tuple[str, str]]]:
    """The meaning of a member of a module with all other members that it uses, and what these import."""
    tree = _parsed(module, root)
    members = {name: node for statement in tree.body for name, node in _members(statement)}
    reached = set[str]()
    queue = [member]
    while queue:
        name = queue.pop()
        if name in members and name not in reached:
            reached.add(name)
            queue += [node.id for node in ast.walk(members[name]) if isinstance(node, ast.Name)]
    nodes = [members[name] for name in members if name in reached]
    return _meaning(nodes), [found for node in nodes for found in _imports(node, root)]


def _meaning(part: object) -> str:
    """What Python reads, without docstrings; unlike `ast.dump`, in the same words for each version of Python."""
    if isinstance(part, list):
        return f"[{','.join(map(_meaning, part))}]"
    if not isinstance(part, ast.AST):
        return repr(part)
    fields = dict(ast.iter_fields(part))
    if isinstance(part, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        fields["body"] = part.body[ast.get_docstring(part, clean=False) is not None :]
    # What is left empty is left out, since newer versions know fields that older ones do not.
    said = (f"{name}={_meaning(value)}" for name, value in fields.items() if value not in (None, []))
    return f"{type(part).__name__}({','.join(said)})"


def _members(statement: ast.stmt) -> Iterator[tuple[str, ast.stmt]]:
    """The names that a statement at the top of a module defines, each with the part that defines it."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        yield statement.name, statement
    elif isinstance(statement, ast.Assign):
        yield from ((target.id, statement) for target in statement.targets if isinstance(target, ast.Name))
    elif isinstance(statement, ast.ImportFrom):
        for alias in statement.names:
            yield alias.asname or alias.name, ast.ImportFrom(statement.module, [alias], statement.level)


def _imports(node: ast.AST, root: Path) -> Iterator[tuple[str, str]]:
    """Modules of the package that are imported anywhere below the node, each with the member that is wanted of it."""
    for statement in ast.walk(node):
        if isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            for alias in statement.names:
                below = f"{statement.module}.{alias.name}"
                if _file(below, root):
                    yield below, ""
                # The package itself only passes on what other modules define.
                elif statement.module != PACKAGE and _file(statement.module, root):
                    yield statement.module, alias.name
        elif isinstance(statement, ast.Import):
            yield from ((alias.name, "") for alias in statement.names if _file(alias.name, root))


@cache
def _parsed(module: str, root: Path) -> ast.Module:
    path = _file(module, root)
    assert path is not None, f"{module} is not there"
    return ast.parse(path.read_bytes())


@cache
def _file(module: str, root: Path) -> Path | None:
    """Where a module of the package is; None for modules of others."""
    package, *names = module.split(".")
    below = root.joinpath(*names)
    candidates = (below / "__init__.py", below.with_suffix(".py"))
    return next((path for path in candidates if path.is_file()), None) if package == PACKAGE else None
