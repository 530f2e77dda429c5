from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

import pytest

from simulmt.recipe.plan import Places, Recipe
from simulmt.recipe.state import (
    BEGUN,
    LOG,
    MISSING,
    RECORD,
    Standing,
    begin,
    finish,
    is_done,
    is_foreign,
    read_record,
    survey,
)

CODE = {"prepare": "p1", "train": "t1", "report": "r1"}


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
def places(tmp_path: Path) -> Places:
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "train.en").write_text("a house\n")
    return Places(tmp_path / "work", tmp_path / "given")


def look(
    made: Recipe, places: Places, code: dict[str, str] | None = None, ignore_code: bool = False
) -> dict[str, Standing]:
    return survey(made, places, lambda stage: (code or CODE)[stage.command], ignore_code)


def do(made: Recipe, places: Places) -> None:
    """Do every stage; each leaves a file."""
    for name, standing in look(made, places).items():
        begin(places.directory(name), standing.basis, can_go_on=False)
        (places.directory(name) / "result.txt").write_text(name)
        finish(places.directory(name), standing.basis, 1.0, 2.0, "today")


def states(standings: dict[str, Standing]) -> dict[str, str]:
    return {name: standing.state for name, standing in standings.items()}


def test_what_is_done_stays_done(places: Places) -> None:
    assert set(states(look(recipe(), places)).values()) == {"new"}
    do(recipe(), places)
    assert set(states(look(recipe(), places)).values()) == {"done"}
    record = read_record(places.directory("ctc"))
    assert record is not None
    assert record.files == {"result.txt": 3}


def test_another_setting_makes_stale_what_reads_it_and_all_that_follows(places: Places) -> None:
    do(recipe(), places)
    standings = look(recipe(seed=2), places)
    assert states(standings) == {"data": "done", "ctc": "stale", "page": "stale"}
    assert standings["ctc"].reasons == ("settings.student.training.seed was 1, is 2",)
    assert standings["page"].reasons == ("ctc is made anew",)


def test_another_command_is_named(places: Places) -> None:
    do(recipe(), places)
    assert look(recipe(option="--max-ratio=3"), places)["data"].reasons == ("the command is now --max-ratio=3",)


def test_another_file_of_the_user_makes_all_stale(places: Places) -> None:
    do(recipe(), places)
    assert places.given is not None
    (places.given / "train.en").write_text("a mouse\n")
    standings = look(recipe(), places)
    assert set(states(standings).values()) == {"stale"}
    assert standings["data"].reasons == ("train.en is another file",)


def test_other_code_makes_its_command_stale_unless_it_is_to_be_ignored(places: Places) -> None:
    do(recipe(), places)
    newer = {**CODE, "train": "t2"}
    standings = look(recipe(), places, newer)
    assert states(standings) == {"data": "done", "ctc": "stale", "page": "stale"}
    assert standings["ctc"].reasons == ("the code has changed",)
    assert set(states(look(recipe(), places, newer, ignore_code=True)).values()) == {"done"}


def test_a_result_that_is_gone_or_cut_short_does_not_count(places: Places) -> None:
    do(recipe(), places)
    (places.directory("data") / "result.txt").unlink()
    (places.directory("ctc") / "result.txt").write_text("c")
    standings = look(recipe(), places)
    assert states(standings) == {"data": "stale", "ctc": "stale", "page": "done"}
    assert standings["data"].reasons == ("result.txt is gone or damaged",)


def test_directories_made_elsewhere_count_even_without_the_files_they_were_made_from(
    places: Places, tmp_path: Path
) -> None:
    do(recipe(), places)
    elsewhere = Places(tmp_path / "moved", None)
    shutil.copytree(places.work, elsewhere.work)
    assert set(states(look(recipe(), elsewhere)).values()) == {"done"}


def test_files_that_are_not_there_are_told(tmp_path: Path) -> None:
    places = Places(tmp_path / "work", tmp_path / "given")
    standing = look(recipe(), places)["data"]
    assert (standing.state, standing.basis.given) == ("new", {"train.en": MISSING})
    assert places.not_at_hand(standing.stage) == ["train.en"]


def test_files_are_at_hand_only_where_they_are_whatever_a_record_says(places: Places) -> None:
    do(recipe(), places)
    stage = recipe().stages["data"]
    assert places.not_at_hand(stage) == []
    assert Places(places.work).not_at_hand(stage) == ["train.en"]


def test_an_unfinished_stage_never_counts_and_goes_on_only_where_it_can(places: Places) -> None:
    for name, standing in look(recipe(), places).items():
        begin(places.directory(name), standing.basis, can_go_on=True)
        (places.directory(name) / "half.txt").write_text("half")
    standings = look(recipe(), places)
    assert set(states(standings).values()) == {"begun"}
    for name, standing in standings.items():
        begin(places.directory(name), standing.basis, can_go_on=name == "ctc")
    left = {name for name in standings if (places.directory(name) / "half.txt").exists()}
    assert left == {"ctc"}


def test_a_half_made_stage_of_another_configuration_is_thrown_away(places: Places) -> None:
    begin(places.directory("ctc"), look(recipe(), places)["ctc"].basis, can_go_on=True)
    (places.directory("ctc") / "half.txt").write_text("half")
    other = look(recipe(seed=2), places)["ctc"]
    assert other.state == "new"
    begin(places.directory("ctc"), other.basis, can_go_on=True)
    assert sorted(path.name for path in places.directory("ctc").iterdir()) == [BEGUN, "settings.student.toml"]
    assert [path.name for path in places.work.iterdir()] == ["ctc"]


def test_a_result_is_kept_until_the_one_that_replaces_it_is_done(places: Places) -> None:
    do(recipe(), places)
    directory, kept = places.directory("ctc"), places.work / ".ctc.old" / "result.txt"
    for seed in (2, 3):  # the second after a failure of the first
        basis = look(recipe(seed), places)["ctc"].basis
        begin(directory, basis, can_go_on=True)
        assert kept.read_text() == "ctc"
    finish(directory, basis, 1.0, 1.0, "today")
    assert not kept.parent.exists()


def test_a_stage_reads_the_settings_of_its_record(places: Places) -> None:
    """Even if another runner goes about the same work with others, and if a version that wrote none began it."""
    directory, basis = places.directory("ctc"), look(recipe(seed=5), places)["ctc"].basis
    begin(directory, basis, can_go_on=True)
    path = Path(places.command_line(recipe().stages["ctc"])[1])
    assert path.parent == directory
    path.unlink()
    begin(directory, basis, can_go_on=True)
    assert tomllib.loads(path.read_text()) == basis.settings["student"] == {"training": {"seed": 5}}


def test_a_directory_of_somebody_else_is_known(places: Places) -> None:
    directory, basis = places.directory("ctc"), look(recipe(), places)["ctc"].basis
    assert not is_foreign(directory)
    directory.mkdir(parents=True)
    assert not is_foreign(directory)
    (directory / "thesis.txt").write_text("mine")
    assert is_foreign(directory)
    (directory / "thesis.txt").unlink()
    (places.work / "file").write_text("mine")
    assert is_foreign(places.work / "file")
    begin(directory, basis, can_go_on=True)
    assert not is_foreign(directory)
    finish(directory, basis, 1.0, 1.0, "today")
    assert not is_foreign(directory)
    assert is_done(directory, basis)


def test_settings_and_logs_are_no_result(places: Places) -> None:
    directory, basis = places.directory("ctc"), look(recipe(), places)["ctc"].basis
    begin(directory, basis, can_go_on=True)
    for name in (LOG, "model.json"):
        (directory / name).write_text(name)
    finish(directory, basis, 1.0, 1.0, "today")
    assert sorted(path.name for path in directory.iterdir()) == ["model.json", "settings.student.toml", RECORD, LOG]
    record = read_record(directory)
    assert record is not None
    assert list(record.files) == ["model.json"]
    (directory / LOG).unlink()
    assert look(recipe(), places)["ctc"].state == "done"


def test_nothing_depends_on_what_is_hidden_or_lies_beside_the_result(places: Places) -> None:
    directory, basis = places.directory("ctc"), look(recipe(), places)["ctc"].basis
    begin(directory, basis, can_go_on=True)
    for name in ("final/model.json", "final/curves", ".lock", "curves/1.events", "final/.writing/half"):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(name)
    finish(directory, basis, 1.0, 1.0, "today", {"curves"})
    record = read_record(directory)
    assert record is not None
    assert sorted(record.files) == ["final/curves", "final/model.json"]


def test_equal_numbers_are_equal_settings_for_all_stages(places: Places) -> None:
    do(recipe(seed=1), places)
    assert set(states(look(recipe(seed=1.0), places)).values()) == {"done"}  # type: ignore[arg-type]


def test_what_was_begun_otherwise_is_said_to_be_lost(places: Places) -> None:
    begin(places.directory("ctc"), look(recipe(), places)["ctc"].basis, can_go_on=True)
    assert look(recipe(), places)["ctc"].state == "begun"
    standing = look(recipe(seed=2), places)["ctc"]
    assert standing.state == "new"
    assert standing.reasons == ("what was begun is of no use", "settings.student.training.seed was 1, is 2")
