"""Documents name modules and files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
ROOT = REPOSITORY / "src" / "simulmt"
DOCUMENTS = sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")])
MADE_BY_THE_READER = {"recipes/small.toml", "recipes/more.toml"}  # of docs/train-your-own.md
FILE = re.compile(r"\b(?:src|tests|benchmarks|recipes|configs|docs|deploy)/[\w./-]+\.(?:py|toml|md|png|yaml|conf)\b")
LINK = re.compile(r"\]\((?!http)([^)#]+)[^)]*\)")


def tree() -> dict[str, set[str]]:
    """Return the modules and folders that the tree in ARCHITECTURE.md lists, by package."""
    text = (REPOSITORY / "ARCHITECTURE.md").read_text(encoding="utf-8")
    block = re.sub(r"\([^)]*\)", "", text.partition("src/simulmt/\n")[2].partition("\ntests/")[0])
    packages = re.findall(r"^  ([a-z/]+)/ (.*(?:\n   .*)*)", block, re.MULTILINE)
    names = {package: [name.strip() for name in re.split("[,;:]", listed)] for package, listed in packages}
    return {package: {name.rstrip("/") for name in listed if " " not in name} for package, listed in names.items()}


def test_the_tree_in_the_architecture_is_the_tree_on_disk() -> None:
    listed = tree()
    modules = [path.relative_to(ROOT) for path in ROOT.glob("*/**/[!_]*.py")]
    assert {path.parent.as_posix() for path in modules} == listed.keys() - {"bundles"}
    assert [str(path) for path in modules if path.stem not in listed[path.parent.as_posix()]] == []
    named = [ROOT / package / name for package in listed.keys() - {"bundles"} for name in listed[package]]
    assert [str(path) for path in named if not path.is_dir() and not path.with_suffix(".py").exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_a_document_names_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    named = {name for name in FILE.findall(text) if not (REPOSITORY / name).exists()}
    linked = {name for name in LINK.findall(text) if not (document.parent / name).exists()}
    assert named | linked <= MADE_BY_THE_READER
