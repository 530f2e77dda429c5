"""Exit codes: 1 for a missing file or model, 2 for an invalid command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.helpers import assert_refused, call

LANGUAGES = "--source-language aa --target-language bb"
MISSING = [
    "translate missing --model toy",
    "translate there --model missing",
    "demo --text missing --model toy",
    "demo --model missing",
    "bench --text missing --model toy",
    "bench --model missing",
    "models show missing",
    "models verify missing",
    "models path missing",
    "serve --model missing",
    "serve --model toy --api-keys-file missing",
    "prepare --output new --tsv missing --dev-source there --dev-target there",
    "prepare --output new --source missing --target there --dev-source there --dev-target there",
    f"prepare --output new --tmx missing --dev-source there --dev-target there {LANGUAGES}",
    "prepare --output new --tsv there --dev-xml missing",
    "prepare --output new --tsv there --dev-source there --dev-target missing",
    "prepare --output new --tsv there --dev-source there --dev-target there --vocabularies missing",
    "train missing --run new",
    "sweep missing --output new",
    "average missing toy --output new",
    "grow missing --text there --output new",
    "grow toy --text missing --output new",
    f"export missing --data data --output new {LANGUAGES}",
    "run missing",
    "rewrite distil missing --data data --source there --output new",
    "rewrite distil there --data missing --source there --output new",
    "rewrite pseudo missing --data data --source there --output new",
    "rewrite reorder --source missing --target there --output new",
    "rewrite reorder --source there --target there --links missing --output new",
    "rewrite speech --source missing --target there --output new",
    "rewrite numbers --source missing --target there --languages en-zh --output new",
    "rewrite dictionary missing --output new",
    "rewrite lexicon --source missing --target there --output new",
    "rewrite filter --source there --target there --lexicon missing --output new",
    "rewrite join --source missing --target there --output new",
    "evaluate --source missing --reference there --output new --model toy",
    "evaluate --source there --reference missing --output new --model toy",
    "evaluate --source there --reference there --output new --model missing",
    "evaluate --source there --reference there --output new --log system=missing",
    "compare missing",
    "plot missing --output new",
    "report missing --output new --no-align",
    "anticipation --source missing --target there",
    "anticipation --source there --target there --aligner pharaoh:missing",
    "anticipation --source there --target there --gold missing",
    "analyse missing --source there --reference there --output new",
]
WRONG = [
    ("translate --model toy --delay 7", "--delay 7"),
    ("translate --model toy --beam 0", "--beam must be at least 1, got 0"),
    ("translate --model toy --beam 2", "--beam 2: a ctc model writes while it reads"),
    ("serve --model toy --room-keys", "--room-keys needs --api-keys-file"),
    ("synthetic --output new --test -1", "--test"),
    ("prepare --output new --max-length 0", "--max-length"),
    ("prepare --output new --max-ratio 0.5", "--max-ratio"),
    ("sweep there --output new --trials -2", "--trials"),
    ("average toy --output new", "at least two models"),
    ("average toy toy --output new --weight 1", "2 models but 1 --weight"),
    ("average toy toy --output new --weight 1 --weight 0", "--weight 0"),
    ("average toy toy --output there", "--output there: exists"),
    ("grow toy --output new", "nothing to add"),
    ("grow toy --text there --output there", "--output there: exists"),
    ("grow toy --encoder-layers 2 --output new", "--encoder-layers 2: toy has 3 already"),
    (f"export there --data data --output new --longest 1 {LANGUAGES}", "--longest"),
    ("rewrite distil there --data data --source there --output new --beam 0", "--beam"),
    ("rewrite distil there --data data --source there --output new --length-penalty -1", "--length-penalty"),
    ("rewrite distil there --data data --source there --output new --batch-tokens 0", "--batch-tokens"),
    ("rewrite pseudo there --data data --source there --output new --delay 0", "--delay"),
    ("rewrite speech --source there --target there --output new --share 0", "--share 0"),
    ("rewrite numbers --source there --target there --output new --languages en-zh --share 2", "--share 2"),
    ("rewrite numbers --source there --target there --output new --languages english", "--languages english"),
    ("rewrite numbers --source there --target there --output new --languages fr-en", "fr"),
    ("rewrite filter --source there --target there --output new --max-words -1", "--max-words"),
    ("rewrite join --source there --target there --output new --repeat 0", "--repeat"),
    ("evaluate --source there --reference there --output new --model toy --delay 4", "--delay 4"),
    ("evaluate --source there --reference there --output new --words-per-second 0", "--words-per-second"),
    ("serve --model toy --limit streams=-3", "--limit"),
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there").write_text("a file\n", encoding="utf-8")
    Path("data").mkdir()
    for name in ("source.model", "target.model"):
        (Path("data") / name).touch()


@pytest.mark.parametrize("arguments", MISSING)
def test_missing_files_are_a_failure(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(call(*arguments.split(), capture=capsys), 1, "missing")


@pytest.mark.parametrize(("arguments", "option"), WRONG)
def test_wrong_usage_names_the_option(arguments: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(call(*arguments.split(), capture=capsys), 2, option)
    assert not Path("new").exists()
