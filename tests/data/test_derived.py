from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from simulmt.data.derived import Dropped, Job, Progress, Rewritten, write_once, write_pairs
from simulmt.errors import DataError

LINES: list[Rewritten] = [("a", "A"), Dropped("short"), ("b\u2028c", "B"), Dropped("odd", 40), Dropped("short")]


class PowerCutError(Exception):
    pass


def job(folder: Path, overwrite: bool = False, what: str = "test") -> Job:
    return Job(folder / "out", {"what": what}, [folder / "input"], overwrite)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def fail() -> Iterator[Rewritten]:
    yield "a", "A"
    raise PowerCutError


class TestWriting:
    def test_the_files_by_hand(self, tmp_path: Path) -> None:
        told: list[Progress] = []
        record = write_pairs(job(tmp_path), lambda: LINES, told.append)
        assert (tmp_path / "out.source").read_text(encoding="utf-8") == "a\nb\u2028c\n"
        assert (tmp_path / "out.target").read_text(encoding="utf-8") == "A\nB\n"
        assert json.loads((tmp_path / "out.json").read_text(encoding="utf-8")) == record
        assert list(record) == ["identity", "what", "lines", "kept", "left"]
        assert (record["what"], record["lines"], record["kept"]) == ("test", 5, 2)
        assert record["left"] == {"short": [2, 5], "odd": [40]}
        assert sorted(files(tmp_path)) == ["out.json", "out.source", "out.target"]
        assert [progress.lines for progress in told] == [5]

    def test_a_finished_job_is_not_repeated(self, tmp_path: Path) -> None:
        first = write_pairs(job(tmp_path), lambda: LINES)
        assert write_pairs(job(tmp_path), lambda: pytest.fail("done again")) == first

    def test_files_of_other_jobs_are_replaced_only_on_request(self, tmp_path: Path) -> None:
        write_pairs(job(tmp_path, what="other"), lambda: LINES)
        before = files(tmp_path)
        with pytest.raises(DataError, match=r"out\.json: exists.*--overwrite"):
            write_pairs(job(tmp_path), lambda: LINES[:1])
        assert files(tmp_path) == before
        write_pairs(job(tmp_path, overwrite=True), lambda: LINES[:1])
        assert (tmp_path / "out.source").read_text() == "a\n"

    def test_a_failure_leaves_nothing(self, tmp_path: Path) -> None:
        with pytest.raises(PowerCutError):
            write_pairs(job(tmp_path), fail)
        assert files(tmp_path) == {}

    @pytest.mark.parametrize("cut", ["out.json", "out.source", "out.target"])
    def test_a_killed_job_is_repeated(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: str) -> None:
        """A killed job is repeated, whichever file was published last."""
        replace = Path.replace

        def cut_short(self: Path, target: Path) -> Path:
            if target.name == cut:
                raise PowerCutError
            return replace(self, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", cut_short)
            with pytest.raises(PowerCutError):
                write_pairs(job(tmp_path), lambda: LINES)
        write_pairs(job(tmp_path), lambda: LINES)
        assert (tmp_path / "out.target").read_text() == "A\nB\n"


class TestWriteOnce:
    """`write_once` makes a file once, and never touches the file of another command."""

    @staticmethod
    def write_once(folder: Path, text: str, overwrite: bool = False) -> str:
        path = write_once(folder / "out.links", {"text": text}, overwrite, lambda: [f"{text} {time.monotonic_ns()}"])
        return path.read_text(encoding="utf-8")

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_it_is_made_once(self, tmp_path: Path, overwrite: bool) -> None:
        first = self.write_once(tmp_path, "a", overwrite)
        assert first.startswith("a ")
        assert self.write_once(tmp_path, "a", overwrite) == first

    def test_a_file_from_another_text_is_replaced_only_on_request(self, tmp_path: Path) -> None:
        first = self.write_once(tmp_path, "a")
        with pytest.raises(DataError, match=r"out\.links: exists.*--overwrite"):
            self.write_once(tmp_path, "b")
        assert self.write_once(tmp_path, "a") == first
        assert self.write_once(tmp_path, "b", overwrite=True).startswith("b ")

    @pytest.mark.parametrize("record", [None, "", "[]", "{}", "its own"])
    def test_a_file_of_unknown_origin_is_replaced_only_on_request(self, tmp_path: Path, record: str | None) -> None:
        path, beside = tmp_path / "out.links", tmp_path / "out.links.json"
        if record == "its own":
            self.write_once(tmp_path, "a")
        elif record is not None:
            beside.write_text(record, encoding="utf-8")
        path.write_text("gold\n", encoding="utf-8")
        with pytest.raises(DataError, match=r"out\.links: exists.*--overwrite"):
            self.write_once(tmp_path, "a")
        assert path.read_text(encoding="utf-8") == "gold\n"
        assert self.write_once(tmp_path, "a", overwrite=True).startswith("a ")

    def test_a_failure_replaces_nothing(self, tmp_path: Path) -> None:
        def fail() -> list[str]:
            raise PowerCutError

        first = self.write_once(tmp_path, "a")
        with pytest.raises(PowerCutError):
            write_once(tmp_path / "out.links", {"text": "b"}, True, fail)
        assert self.write_once(tmp_path, "a") == first

    @pytest.mark.parametrize("cut", ["out.links.json", "out.links"])
    def test_the_file_of_a_killed_job_is_recognised(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: str
    ) -> None:
        replace = Path.replace

        def cut_short(self: Path, target: Path) -> Path:
            if target.name == cut:
                raise PowerCutError
            return replace(self, target)

        self.write_once(tmp_path, "a")
        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", cut_short)
            with pytest.raises(PowerCutError):
                self.write_once(tmp_path, "b", overwrite=True)
        assert self.write_once(tmp_path, "b").startswith("b ")
