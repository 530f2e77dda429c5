from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from simulmt.recipe.code import ROOT, code_hash

FILES = {
    "__init__.py": "from simulmt.unrelated import thing\n__version__ = '1'\n",
    "cli/__init__.py": "",
    "cli/data.py": """
from simulmt import __version__
from simulmt.cli.shared import LIMIT, other
from simulmt.errors import Error

def learn():
    from simulmt.train import loop
    return _helper(LIMIT)

def look():
    from simulmt.eval.report import page
    return other

def _helper(limit):
    from simulmt.train.batches import plan
    raise Error
""",
    "cli/shared.py": "LIMIT = 3\n\ndef other():\n    import simulmt.eval.tables\n",
    "errors.py": "class Error(Exception): ...\n",
    "unrelated.py": "thing = 1\n",
    "train/__init__.py": "",
    "train/loop.py": "import torch\nfrom simulmt.model import net as network\n",
    "train/batches.py": "plan = 1\n",
    "train/words.tsv": "one 1\n",
    "model/__init__.py": "",
    "model/net.py": "def forward():\n    from simulmt.model.layers import Layer\n",
    "model/layers.py": "Layer = 1\n",
    "eval/__init__.py": "",
    "eval/report.py": "page = 1\n",
    "eval/tables.py": "rows = 1\n",
}


def package(directory: Path, **edits: tuple[str, str]) -> Path:
    """The package above with a text replaced in some files."""
    root = directory / "_".join(["with", *edits]).replace("/", "-") / "simulmt"
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text.replace(*edits.get(name, ("", ""))))
    return root


@pytest.mark.parametrize(
    ("name", "before", "after", "counts"),
    [
        ("train/loop.py", "torch", "numpy", True),
        ("train/batches.py", "1", "2", True),  # through a helper
        ("train/words.tsv", "1", "2", True),  # which a module next to it may read
        ("model/layers.py", "1", "2", True),  # through two modules, and inside a function
        ("errors.py", "...", "pass", True),  # imported at the top, used by a helper
        ("cli/data.py", "raise Error", "raise Error from None", True),
        ("cli/shared.py", "3", "4", True),
        ("cli/data.py", "return other", "return other()", False),  # another command
        ("cli/shared.py", "tables", "report", False),
        ("eval/report.py", "1", "2", False),
        ("unrelated.py", "1", "2", False),
        ("__init__.py", "1", "2", False),
    ],
)
def test_only_what_a_command_comes_to_import_counts(
    name: str, before: str, after: str, counts: bool, tmp_path: Path
) -> None:
    plain = code_hash("simulmt.cli.data", "learn", package(tmp_path))
    edited = code_hash("simulmt.cli.data", "learn", package(tmp_path, **{name: (before, after)}))
    assert (edited != plain) == counts


@pytest.mark.parametrize(
    ("before", "after", "counts"),
    [
        ("plan = 1", '"""Words about it."""\n\n# why\nplan = (  # because\n    1\n)', False),
        ("plan = 1", "plan = '# why'", True),
        ("def learn():", "def learn():\n    'It learns.'", False),
        ("def _helper(limit):", "# why\ndef _helper(limit):\n    'It helps.'", False),
        ("def _helper(limit):", "def _helper(limit):\n    limit = 'It helps.'", True),
        ("(Exception): ...", "(Exception):\n    'A fault.'\n    ...", False),
        ("(Exception): ...", "(Exception):\n    ...\n    'No docstring.'", True),
    ],
)
def test_words_about_code_do_not_count(before: str, after: str, counts: bool, tmp_path: Path) -> None:
    plain = code_hash("simulmt.cli.data", "learn", package(tmp_path))
    (name,) = (name for name, text in FILES.items() if before in text)
    edited = code_hash("simulmt.cli.data", "learn", package(tmp_path, **{name: (before, after)}))
    assert (edited != plain) == counts


def test_where_the_package_is_does_not_count(tmp_path: Path) -> None:
    copy = shutil.copytree(ROOT, tmp_path / "elsewhere" / "simulmt")
    command = ("simulmt.cli.training", "train")
    assert code_hash(*command, copy) == code_hash(*command)


def test_a_change_to_the_report_leaves_trained_models_alone(tmp_path: Path) -> None:
    copy = shutil.copytree(ROOT, tmp_path / "simulmt")
    (copy / "eval" / "report" / "report.html.jinja").write_text("another")
    assert code_hash("simulmt.cli.training", "train", copy) == code_hash("simulmt.cli.training", "train")
    assert code_hash("simulmt.cli.figures", "report", copy) != code_hash("simulmt.cli.figures", "report")
