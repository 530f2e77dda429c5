from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

import pytest

from simulmt.recipe.plan import Recipe, Workspace
from simulmt.recipe.state import (
    BEGUN,
    LOG,
    MISSING,
    RECORD,
    ROOT,
    StageStatus,
    begin,
    code_hash,
    finish,
    is_done,
    is_foreign,
    read_record,
    stage_statuses,
)

CODE = {"prepare": "p1", "train": "t1", "report": "r1"}
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
    "cli/shared.py": "SIZE: int = 3\nLIMIT: int = SIZE\n\ndef other():\n    import simulmt.eval.tables\n",
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


def recipe(seed: int = 1, option: str = "") -> Recipe:
    table = {
        "title": "test",
        "settings": {"student": {"training": {"seed": seed}}},
        "stages": {
            "data": {"run": f"prepare --source={{given}}/train.en {option} --output={{out}}"},
            "ctc": {"run": "train {settings.student} --data={data} --run={out}"},
            "page": {"run": "report {ctc} --output={out}"},
        },
    }
    return Recipe.build(table, "recipe.toml")


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "train.en").write_text("a house\n")
    return Workspace(tmp_path / "work", tmp_path / "given")


def look(
    made: Recipe, workspace: Workspace, code: dict[str, str] | None = None, ignore_code: bool = False
) -> dict[str, StageStatus]:
    return stage_statuses(made, workspace, lambda stage: (code or CODE)[stage.command], ignore_code)


def do(made: Recipe, workspace: Workspace) -> None:
    """Finish every stage; each writes a file."""
    for name, status in look(made, workspace).items():
        begin(workspace.directory(name), status.inputs, can_resume=False)
        (workspace.directory(name) / "result.txt").write_text(name)
        finish(workspace.directory(name), status.inputs, 1.0, 2.0, "today")


def states(statuses: dict[str, StageStatus]) -> dict[str, str]:
    return {name: status.state for name, status in statuses.items()}


def test_a_finished_stage_stays_done(workspace: Workspace) -> None:
    assert set(states(look(recipe(), workspace)).values()) == {"new"}
    do(recipe(), workspace)
    assert set(states(look(recipe(), workspace)).values()) == {"done"}
    record = read_record(workspace.directory("ctc"))
    assert record is not None
    assert record.files == {"result.txt": 3}


def test_a_changed_setting_makes_its_stages_and_their_dependents_stale(workspace: Workspace) -> None:
    do(recipe(), workspace)
    statuses = look(recipe(seed=2), workspace)
    assert states(statuses) == {"data": "done", "ctc": "stale", "page": "stale"}
    assert statuses["ctc"].reasons == ("settings.student.training.seed changed from 1 to 2",)
    assert statuses["page"].reasons == ("ctc has been rebuilt",)


def test_a_changed_command_is_named(workspace: Workspace) -> None:
    do(recipe(), workspace)
    assert look(recipe(option="--max-ratio=3"), workspace)["data"].reasons == ("command changed: --max-ratio=3",)


def test_a_changed_input_file_makes_all_stages_stale(workspace: Workspace) -> None:
    do(recipe(), workspace)
    assert workspace.given is not None
    (workspace.given / "train.en").write_text("a mouse\n")
    statuses = look(recipe(), workspace)
    assert set(states(statuses).values()) == {"stale"}
    assert statuses["data"].reasons == ("train.en has changed",)


def test_changed_code_makes_its_stages_stale_unless_ignored(workspace: Workspace) -> None:
    do(recipe(), workspace)
    newer = {**CODE, "train": "t2"}
    statuses = look(recipe(), workspace, newer)
    assert states(statuses) == {"data": "done", "ctc": "stale", "page": "stale"}
    assert statuses["ctc"].reasons == ("code has changed",)
    assert set(states(look(recipe(), workspace, newer, ignore_code=True)).values()) == {"done"}


def test_a_missing_or_truncated_result_does_not_count(workspace: Workspace) -> None:
    do(recipe(), workspace)
    (workspace.directory("data") / "result.txt").unlink()
    (workspace.directory("ctc") / "result.txt").write_text("c")
    statuses = look(recipe(), workspace)
    assert states(statuses) == {"data": "stale", "ctc": "stale", "page": "done"}
    assert statuses["data"].reasons == ("result.txt is missing or damaged",)


def test_directories_made_elsewhere_count_even_without_the_files_they_were_made_from(
    workspace: Workspace, tmp_path: Path
) -> None:
    do(recipe(), workspace)
    elsewhere = Workspace(tmp_path / "moved", None)
    shutil.copytree(workspace.work, elsewhere.work)
    assert set(states(look(recipe(), elsewhere)).values()) == {"done"}


def test_missing_files_are_reported(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "work", tmp_path / "given")
    status = look(recipe(), workspace)["data"]
    assert (status.state, status.inputs.given) == ("new", {"train.en": MISSING})
    assert workspace.missing_inputs(status.stage) == ["train.en"]


def test_inputs_are_missing_whatever_a_record_says(workspace: Workspace) -> None:
    do(recipe(), workspace)
    stage = recipe().stages["data"]
    assert workspace.missing_inputs(stage) == []
    assert Workspace(workspace.work).missing_inputs(stage) == ["train.en"]


def test_an_unfinished_stage_never_counts_and_resumes_only_if_it_can(workspace: Workspace) -> None:
    for name, status in look(recipe(), workspace).items():
        begin(workspace.directory(name), status.inputs, can_resume=True)
        (workspace.directory(name) / "half.txt").write_text("half")
    statuses = look(recipe(), workspace)
    assert set(states(statuses).values()) == {"begun"}
    for name, status in statuses.items():
        begin(workspace.directory(name), status.inputs, can_resume=name == "ctc")
    left = {name for name in statuses if (workspace.directory(name) / "half.txt").exists()}
    assert left == {"ctc"}


def test_an_unfinished_stage_with_other_settings_is_discarded(workspace: Workspace) -> None:
    begin(workspace.directory("ctc"), look(recipe(), workspace)["ctc"].inputs, can_resume=True)
    (workspace.directory("ctc") / "half.txt").write_text("half")
    other = look(recipe(seed=2), workspace)["ctc"]
    assert other.state == "new"
    begin(workspace.directory("ctc"), other.inputs, can_resume=True)
    assert sorted(path.name for path in workspace.directory("ctc").iterdir()) == [BEGUN, "settings.student.toml"]
    assert [path.name for path in workspace.work.iterdir()] == ["ctc"]


def test_a_result_is_kept_until_the_one_that_replaces_it_is_done(workspace: Workspace) -> None:
    do(recipe(), workspace)
    directory, kept = workspace.directory("ctc"), workspace.work / ".ctc.old" / "result.txt"
    for seed in (2, 3):  # the second after a failure of the first
        inputs = look(recipe(seed), workspace)["ctc"].inputs
        begin(directory, inputs, can_resume=True)
        assert kept.read_text() == "ctc"
    finish(directory, inputs, 1.0, 1.0, "today")
    assert not kept.parent.exists()


def test_a_stage_reads_the_settings_of_its_record(workspace: Workspace) -> None:
    """Even if another runner works on it with other settings, or an older version began it without any."""
    directory, inputs = workspace.directory("ctc"), look(recipe(seed=5), workspace)["ctc"].inputs
    begin(directory, inputs, can_resume=True)
    path = Path(workspace.command_line(recipe().stages["ctc"])[1])
    assert path.parent == directory
    path.unlink()
    begin(directory, inputs, can_resume=True)
    assert tomllib.loads(path.read_text()) == inputs.settings["student"] == {"training": {"seed": 5}}


def test_foreign_directories_are_recognised(workspace: Workspace) -> None:
    directory, inputs = workspace.directory("ctc"), look(recipe(), workspace)["ctc"].inputs
    assert not is_foreign(directory)
    directory.mkdir(parents=True)
    assert not is_foreign(directory)
    (directory / "thesis.txt").write_text("mine")
    assert is_foreign(directory)
    (directory / "thesis.txt").unlink()
    (workspace.work / "file").write_text("mine")
    assert is_foreign(workspace.work / "file")
    begin(directory, inputs, can_resume=True)
    assert not is_foreign(directory)
    finish(directory, inputs, 1.0, 1.0, "today")
    assert not is_foreign(directory)
    assert is_done(directory, inputs)


def test_settings_and_logs_are_not_part_of_the_result(workspace: Workspace) -> None:
    directory, inputs = workspace.directory("ctc"), look(recipe(), workspace)["ctc"].inputs
    begin(directory, inputs, can_resume=True)
    for name in (LOG, "model.json"):
        (directory / name).write_text(name)
    finish(directory, inputs, 1.0, 1.0, "today")
    assert sorted(path.name for path in directory.iterdir()) == ["model.json", "settings.student.toml", RECORD, LOG]
    record = read_record(directory)
    assert record is not None
    assert list(record.files) == ["model.json"]
    (directory / LOG).unlink()
    assert look(recipe(), workspace)["ctc"].state == "done"


def test_hidden_and_ignored_files_are_not_part_of_the_result(workspace: Workspace) -> None:
    directory, inputs = workspace.directory("ctc"), look(recipe(), workspace)["ctc"].inputs
    begin(directory, inputs, can_resume=True)
    for name in ("final/model.json", "final/curves", ".lock", "curves/1.events", "final/.writing/half"):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(name)
    finish(directory, inputs, 1.0, 1.0, "today", {"curves"})
    record = read_record(directory)
    assert record is not None
    assert sorted(record.files) == ["final/curves", "final/model.json"]


def test_an_integer_and_an_equal_float_are_the_same_setting(workspace: Workspace) -> None:
    do(recipe(seed=1), workspace)
    assert set(states(look(recipe(seed=1.0), workspace)).values()) == {"done"}  # type: ignore[arg-type]


def test_unfinished_work_with_other_inputs_is_reported_as_out_of_date(workspace: Workspace) -> None:
    begin(workspace.directory("ctc"), look(recipe(), workspace)["ctc"].inputs, can_resume=True)
    assert look(recipe(), workspace)["ctc"].state == "begun"
    status = look(recipe(seed=2), workspace)["ctc"]
    assert status.state == "new"
    assert status.reasons == ("unfinished work is out of date", "settings.student.training.seed changed from 1 to 2")


def package(directory: Path, **edits: tuple[str, str]) -> Path:
    """Write the package above, with text replaced in some files."""
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
def test_only_code_imported_by_a_command_counts(
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
def test_comments_and_docstrings_do_not_count(before: str, after: str, counts: bool, tmp_path: Path) -> None:
    plain = code_hash("simulmt.cli.data", "learn", package(tmp_path))
    (name,) = (name for name, text in FILES.items() if before in text)
    edited = code_hash("simulmt.cli.data", "learn", package(tmp_path, **{name: (before, after)}))
    assert (edited != plain) == counts


@pytest.mark.parametrize(
    ("code", "counts"),
    [
        ("def learn(other): return other", False),
        ("def learn(*, other=1): return other", False),
        ("def learn(*other): return [other for _ in other]", False),
        ("def learn():\n    other = 1\n    return lambda: other", False),
        ("def learn():\n    for other in 'ab': print(other)", False),
        ("def learn():\n    with open('x') as (other, _): print(other)", False),
        ("def learn():\n    try: ...\n    except Error as other: print(other)", False),
        ("def learn():\n    from simulmt.errors import Error as other\n    return other", False),
        ("def learn():\n    if other := 1: return other", False),
        ("def learn(): return [other for other in 'ab' if other]", False),
        ("def learn(): return (lambda other: other)(1)", False),
        ("def learn():\n    def other(): ...\n    return other()", False),
        ("def learn(limit: other): ...", True),
        ("def learn(limit=other): ...", True),
        ("def learn(other=other): return other", True),
        ("@other\ndef learn(other): ...", True),
        ("def learn(): return [other for other in other]", True),
        ("def learn(): return [[other for other in 'ab'], other]", True),
        ("def learn():\n    def inner(other): ...\n    return other", True),
        ("def learn():\n    class Inner: other = 1\n    return other", True),
        ("def learn():\n    global other\n    other = 1", True),
        ("def learn(limit): return limit.learn(lambda: other())", True),
    ],
)
def test_a_local_name_is_not_that_of_a_member(code: str, counts: bool, tmp_path: Path) -> None:
    hashes = []
    for number in (1, 2):
        root = tmp_path / str(number) / "simulmt"
        (root / "cli").mkdir(parents=True)
        (root / "cli" / "data.py").write_text(f"{code}\n\ndef other(): return {number}\n")
        hashes.append(code_hash("simulmt.cli.data", "learn", root))
    assert (hashes[0] != hashes[1]) == counts


def test_where_the_package_is_does_not_count(tmp_path: Path) -> None:
    copy = shutil.copytree(ROOT, tmp_path / "elsewhere" / "simulmt")
    command = ("simulmt.cli.training", "train")
    assert code_hash(*command, copy) == code_hash(*command)


def test_a_change_to_the_report_leaves_trained_models_alone(tmp_path: Path) -> None:
    copy = shutil.copytree(ROOT, tmp_path / "simulmt")
    (copy / "eval" / "report" / "report.html.jinja").write_text("another")
    assert code_hash("simulmt.cli.training", "train", copy) == code_hash("simulmt.cli.training", "train")
    assert code_hash("simulmt.cli.evaluation", "report", copy) != code_hash("simulmt.cli.evaluation", "report")
