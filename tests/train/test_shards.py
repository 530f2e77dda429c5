from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulmt.data import derived
from simulmt.data.derived import Dropped, Job, Progress, Rewritten, exclusive_lock
from simulmt.errors import ConfigError, DataError
from simulmt.train import shards
from simulmt.train.shards import rewrite

from .helpers import fork

LINES = [f"line {number}" for number in range(1, 24)]


def shout(part: Sequence[str]) -> list[Rewritten]:
    """Every seventh line is left out."""
    return [Dropped("seventh") if int(line.split()[1]) % 7 == 0 else (line, line.upper()) for line in part]


def job(folder: Path, **changes: object) -> Job:
    return Job(folder / "out", {"what": "shout"}, **{"inputs": (), "shard_lines": 5, **changes})  # type: ignore[arg-type]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def expected(tmp_path: Path) -> dict[str, bytes]:
    """What an undisturbed run writes."""
    rewrite(job(tmp_path / "expected"), lambda: LINES, shout)
    return files(tmp_path / "expected")


def test_the_result_by_hand(expected: dict[str, bytes]) -> None:
    kept = [line for line in LINES if line not in ("line 7", "line 14", "line 21")]
    assert expected.keys() == {"out.source", "out.target", "out.json"}
    assert expected["out.source"].decode() == "".join(f"{line}\n" for line in kept)
    assert expected["out.target"].decode() == "".join(f"{line.upper()}\n" for line in kept)
    record = json.loads(expected["out.json"])
    assert (record["what"], record["lines"], record["kept"]) == ("shout", 23, 20)
    assert record["left"] == {"seventh": [7, 14, 21]}


@settings(deadline=None, max_examples=5)
@given(sizes=st.lists(st.integers(1, 30), min_size=2, max_size=2))
def test_the_text_does_not_depend_on_the_shards(sizes: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    folders = [tmp_path_factory.mktemp("size") for _ in sizes]
    for folder, size in zip(folders, sizes, strict=True):
        record = rewrite(job(folder, shard_lines=size), lambda: LINES, shout)
        assert record["left"] == {"seventh": [7, 14, 21]}
    for name in ("out.source", "out.target"):
        assert files(folders[0])[name] == files(folders[1])[name]


def test_a_result_that_is_there_is_not_made_again(tmp_path: Path, expected: dict[str, bytes]) -> None:
    def never(_: object) -> list[Rewritten]:
        raise AssertionError

    first = rewrite(job(tmp_path / "new"), lambda: LINES, shout)
    assert rewrite(job(tmp_path / "new"), lambda: LINES, never) == first
    assert rewrite(job(tmp_path / "new", overwrite=True), lambda: LINES, never) == first
    assert files(tmp_path / "new") == expected


class PowerCutError(Exception):
    pass


@settings(deadline=None, max_examples=8)
@given(cuts=st.lists(st.integers(0, 4), max_size=4))
def test_interrupted_work_goes_on_and_gives_the_same_bytes(
    cuts: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, whole = tmp_path_factory.mktemp("cut"), tmp_path_factory.mktemp("whole")
    rewrite(job(whole), lambda: LINES, shout)
    made: list[str] = []
    for cut in [*cuts, 99]:
        left = cut

        def work(part: Sequence[str]) -> list[Rewritten]:
            nonlocal left
            if left == 0:
                raise PowerCutError
            left -= 1
            made.append(part[0])
            return shout(part)

        try:
            rewrite(job(folder), lambda: LINES, work)
        except PowerCutError:
            assert not (folder / "out.json").exists()
    assert sorted(made) == sorted(LINES[::5])  # every shard once, whatever happened
    assert files(folder) == files(whole)


def slow(part: Sequence[str]) -> list[Rewritten]:
    time.sleep(0.02)
    return shout(part)


def run_slowly(folder: Path) -> None:
    rewrite(job(folder, shard_lines=2), lambda: LINES, slow)


def run_with_the_others(folder: Path, log: Path, together: Barrier) -> None:
    """Each waits in its first shard until all are in one."""
    begun = False

    def work(part: Sequence[str]) -> list[Rewritten]:
        nonlocal begun
        if not begun:
            together.wait()
        begun = True
        with log.open("a") as file:
            file.write(f"{part[0]}\n")
        return shout(part)

    rewrite(job(folder, shard_lines=1), lambda: LINES, work)


def finish(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * len(processes)


@pytest.mark.parametrize("processes", [1, 3])
def test_killed_processes_cost_nothing_but_their_shard(tmp_path: Path, processes: int) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    rewrite(job(whole, shard_lines=2), lambda: LINES, shout)
    for delay in (0.05, 0.12, 0.2):
        started = [fork(run_slowly, folder) for _ in range(processes)]
        time.sleep(delay)
        for process in started:
            process.kill()
            process.join()
    finish([fork(run_slowly, folder) for _ in range(processes)])
    assert files(folder) == files(whole)


def test_processes_share_the_shards(tmp_path: Path) -> None:
    log = tmp_path / "log"
    together = multiprocessing.get_context("forkserver").Barrier(3, timeout=60)
    finish([fork(run_with_the_others, tmp_path / "shared", log, together) for _ in range(3)])
    assert sorted(log.read_text().splitlines()) == sorted(LINES)


def unfinished(folder: Path, **changes: object) -> None:
    def lines() -> Iterator[str]:
        yield from LINES[:12]
        raise PowerCutError

    with pytest.raises(PowerCutError):
        rewrite(job(folder, **changes), lines, shout)


def with_a_text_of_that_name(folder: Path) -> None:
    folder.mkdir()
    (folder / "out.target").write_text("somebody's text\n", encoding="utf-8")


@pytest.mark.parametrize(
    ("before", "named"),
    [
        (lambda folder: rewrite(job(folder, shard_lines=4), lambda: LINES, shout), "out.json"),
        (lambda folder: unfinished(folder, shard_lines=4), "out.shards"),
        (with_a_text_of_that_name, "out.target"),
    ],
)
def test_what_others_made_is_replaced_on_purpose_only(
    tmp_path: Path, expected: dict[str, bytes], before: Callable[[Path], object], named: str
) -> None:
    folder = tmp_path / "used"
    before(folder)
    kept = sorted(folder.rglob("*"))
    with pytest.raises(DataError, match=rf"{named}.*--overwrite"):
        rewrite(job(folder), lambda: LINES, shout)
    assert sorted(folder.rglob("*")) == kept
    rewrite(job(folder, overwrite=True), lambda: LINES, shout)
    assert files(folder) == expected


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["out.source", "out.target", "out.json", "out.shards/text", "link"])
def test_an_input_is_never_replaced(tmp_path: Path, name: str, overwrite: bool) -> None:
    (tmp_path / "out.shards").mkdir()
    (tmp_path / "link").symlink_to("out.source")
    (tmp_path / name).write_text("mine", encoding="utf-8")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match=rf"^--output .*/out: would replace its own input .*/{name}; choose another$"):
        job(tmp_path, inputs=[tmp_path / "elsewhere", tmp_path / name], overwrite=overwrite)
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / name).read_text(encoding="utf-8") == "mine"


def test_inputs_beside_the_result_do_not_matter(tmp_path: Path) -> None:
    for name in ("out", "out.source.gz", "source", "other.source"):
        (tmp_path / name).touch()
    made = rewrite(job(tmp_path, inputs=[*tmp_path.iterdir()]), lambda: LINES, shout)
    assert made["kept"] == 20


@pytest.mark.parametrize("method", ["open", "is_dir"])
def test_another_finishes_just_when_a_lock_is_made(
    tmp_path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The folder of the lock goes between mkdir and open, or when mkdir has seen that there is one."""
    unfinished(tmp_path / "new")
    folder, original = tmp_path / "new" / "out.shards" / job(tmp_path).identity, getattr(Path, method)

    def too_late(self: Path, *arguments: Any, **options: Any) -> Any:
        if self == folder or (self.suffix == ".lock" and self.parent == folder):
            monkeypatch.setattr(Path, method, original)
            rewrite(job(tmp_path / "new"), lambda: LINES, shout)
            assert not folder.exists()
        return original(self, *arguments, **options)

    monkeypatch.setattr(Path, method, too_late)
    rewrite(job(tmp_path / "new"), lambda: LINES, lambda _: pytest.fail("what is done was done again"))
    assert getattr(Path, method) is original
    assert files(tmp_path / "new") == expected


def test_a_file_where_the_shards_belong_is_no_reason_to_try_for_ever(tmp_path: Path) -> None:
    (tmp_path / "out.shards").mkdir()
    (tmp_path / "out.shards" / job(tmp_path).identity).touch()
    with pytest.raises(DataError, match="out: cannot be written"):
        rewrite(job(tmp_path), lambda: LINES, shout)


def run_over_others(folders: Sequence[Path], together: Barrier) -> None:
    for folder in folders:
        together.wait()
        rewrite(job(folder, overwrite=True), lambda: LINES, shout)


def test_processes_replace_together(tmp_path: Path, expected: dict[str, bytes]) -> None:
    """Each sees the result of another job, and none takes what its fellows made for that."""
    folders = [tmp_path / str(number) for number in range(20)]
    for folder in folders:
        rewrite(job(folder, shard_lines=4), lambda: LINES, shout)
    together = multiprocessing.get_context("forkserver").Barrier(4, timeout=60)
    finish([fork(run_over_others, folders, together) for _ in range(4)])
    assert all(files(folder) == expected for folder in folders)


def test_a_result_that_comes_meanwhile_is_no_stranger(
    tmp_path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process finishes the job just when this one has seen that it is not."""
    look = derived.finished

    def look_too_early(looked: Job) -> dict[str, Any] | None:
        monkeypatch.setattr(shards, "finished", look)
        before = look(looked)
        rewrite(looked, lambda: LINES, shout)
        return before

    monkeypatch.setattr(shards, "finished", look_too_early)
    rewrite(job(tmp_path / "new"), lambda: LINES, shout)
    assert files(tmp_path / "new") == expected


def count_alone(prefix: Path, counter: Path) -> None:
    for _ in range(40):
        with exclusive_lock(prefix):
            count = int(counter.read_text())
            time.sleep(0.0005)
            counter.write_text(str(count + 1))


def test_only_one_is_alone_and_leaves_nothing_behind(tmp_path: Path) -> None:
    counter = tmp_path / "counter"
    counter.write_text("0")
    (tmp_path / ".out.lock").touch()  # of one who was killed
    finish([fork(count_alone, tmp_path / "out", counter) for _ in range(4)])
    assert files(tmp_path) == {"counter": b"160"}


def test_a_line_left_out_may_have_a_number_of_its_own(tmp_path: Path) -> None:
    record = rewrite(job(tmp_path), lambda: LINES, lambda part: [Dropped("odd", 2 * int(line[5:])) for line in part])
    assert record["left"] == {"odd": list(range(2, 47, 2))}


def test_a_merge_that_was_cut_short_is_done_again(
    tmp_path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed when one of the two files has its name already."""
    replace = Path.replace

    def cut(self: Path, target: Path) -> Path:
        if target.name == "out.target":
            raise PowerCutError
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", cut)
        with pytest.raises(PowerCutError):
            rewrite(job(tmp_path / "cut"), lambda: LINES, shout)
    rewrite(job(tmp_path / "cut"), lambda: LINES, shout)
    assert {name: data for name, data in files(tmp_path / "cut").items() if not name.startswith(".")} == expected


def test_progress_counts_lines_and_speed(tmp_path: Path) -> None:
    told: list[Progress] = []
    unfinished(tmp_path)
    rewrite(job(tmp_path), lambda: LINES, shout, told.append)
    assert [progress.lines for progress in told] == [15, 20, 23]
    assert all(progress.sentences_per_second > 0 for progress in told)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(DataError, match="file/out: cannot be written"):
        rewrite(job(tmp_path / "file"), lambda: LINES, shout)
