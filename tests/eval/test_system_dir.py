from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from simulmt.errors import BundleError
from simulmt.eval.system_dir import write_system_configs
from simulmt.runtime.bundle import Bundle
from simulmt.stream import Translator


def test_there_is_a_file_for_each_delay_and_one_for_the_default(german: Translator, tmp_path: Path) -> None:
    directory = tmp_path / "bundle"
    shutil.copytree(german.bundle.directory, directory)
    paths = write_system_configs(directory)
    assert [path.name for path in paths] == ["main.yaml", "k1.yaml", "k2.yaml", "k3.yaml", "k5.yaml"]
    agent = "agent_class: simulmt.eval.agents.BundleAgent\nmodel: .\n"
    assert paths[0].read_text(encoding="utf-8") == agent
    assert paths[3].read_text(encoding="utf-8") == f"{agent}delay: 3\n"
    Bundle(directory).verify()  # which they are no part of


def test_it_must_be_a_bundle(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="not a complete model bundle"):
        write_system_configs(tmp_path)
