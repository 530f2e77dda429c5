"""Files under their name are whole or absent."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulmt.files import replacing, write_whole


def test_text_and_bytes_are_written_as_they_are_into_folders_that_are_made(tmp_path: Path) -> None:
    write_whole(tmp_path / "new" / "text", "Grüße\n你好\r\n")
    write_whole(tmp_path / "new" / "bytes", b"\x00\xff")
    assert (tmp_path / "new" / "text").read_bytes() == "Grüße\n你好\r\n".encode()
    assert (tmp_path / "new" / "bytes").read_bytes() == b"\x00\xff"
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["bytes", "text"]


def test_what_was_there_stays_until_the_new_file_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_whole(path, "earlier")
    with pytest.raises(RuntimeError):
        _fail_half_way(path)
    assert path.read_text() == "earlier"
    write_whole(path, "later")  # what the failure left is no hindrance
    assert [found.name for found in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "later"


def _fail_half_way(path: Path) -> None:
    with replacing(path) as file:
        file.write(b"half")
        raise RuntimeError
