from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import simulmt
from simulmt.errors import BundleError, ConfigError
from simulmt.runtime.bundle import (
    CONFIG,
    FORMAT,
    MANIFEST,
    Bundle,
    BundleConfig,
    Kind,
    anonymous_blocks,
    find,
    huge_pages,
    shipped_names,
    write_system_configs,
)
from simulmt.text import Tokenizer
from simulmt.train.export import export
from tiny_models import STABILITIES, export_config, trained, translator


@pytest.fixture(scope="module")
def whole(source_tokenizer: Tokenizer, target_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bundle") / "en-de"
    export(trained("ctc", source_tokenizer, target_tokenizer), directory, export_config("ctc", "int8"))
    return directory


@pytest.fixture
def bundle(whole: Path, tmp_path: Path) -> Path:
    """Copy a bundle, so that a test may damage it."""
    return Path(shutil.copytree(whole, tmp_path / "en-de"))


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_whole_bundle_opens_and_is_verified(bundle: Path) -> None:
    opened = Bundle(bundle)
    opened.verify()
    assert (opened.name, opened.config.kind, opened.config.precision) == ("en-de", "ctc", "int8")
    assert opened.session("ctc", threads=1).get_inputs()


@pytest.mark.parametrize(
    "name", ["config.json", "ctc.onnx", "ctc.weights", "source.model", "target.model", "README.md"]
)
def test_a_missing_or_truncated_file_is_named(bundle: Path, name: str) -> None:
    path = bundle / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BundleError, match=rf"{name}: damaged \(\d+ bytes, expected \d+\); copy or export"):
        Bundle(bundle)
    path.unlink()
    with pytest.raises(BundleError, match=rf"{name}: missing; copy or export"):
        Bundle(bundle)


@pytest.mark.parametrize(
    "name", ["config.json", "ctc.onnx", "ctc.weights", "source.model", "target.model", "README.md"]
)
def test_verify_finds_a_single_changed_byte(bundle: Path, name: str) -> None:
    opened = Bundle(bundle)
    content = bytearray((bundle / name).read_bytes())
    content[len(content) // 2] ^= 1
    (bundle / name).write_bytes(content)
    with pytest.raises(BundleError, match=rf"{name}: damaged \(checksum differs\); copy or export"):
        opened.verify()


@pytest.mark.parametrize("name", [CONFIG, MANIFEST])
def test_a_newer_format_asks_for_an_upgrade(bundle: Path, name: str) -> None:
    change(bundle / name, format=FORMAT + 1)
    _trust_sizes(bundle)
    with pytest.raises(BundleError, match=rf"{name}: format {FORMAT + 1}.*pip install --upgrade simulmt"):
        Bundle(bundle)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"format": 1, "files": 3}', '{"format": 1, "files": {"../x": {}}}']
)
def test_a_damaged_manifest_is_named(bundle: Path, content: str) -> None:
    (bundle / MANIFEST).write_text(content)
    with pytest.raises(BundleError, match=r"manifest\.json: "):
        Bundle(bundle)


def test_an_unreadable_file_is_named(bundle: Path) -> None:
    (bundle / MANIFEST).unlink()
    (bundle / MANIFEST).mkdir()
    with pytest.raises(BundleError, match=r"manifest\.json: cannot be read: Is a directory"):
        Bundle(bundle)


def test_an_impossible_file_name_is_not_a_model() -> None:
    with pytest.raises(BundleError, match="x: no such model"):
        find(5000 * "x")


def test_a_directory_without_a_manifest_is_not_a_bundle(bundle: Path) -> None:
    (bundle / MANIFEST).unlink()
    with pytest.raises(BundleError, match="not a complete model bundle"):
        Bundle(bundle)


def test_an_incomplete_manifest_is_refused(bundle: Path) -> None:
    files = json.loads((bundle / MANIFEST).read_text())["files"]
    del files["ctc.weights"]
    change(bundle / MANIFEST, files=files)
    with pytest.raises(BundleError, match=r"manifest\.json: does not list ctc\.weights"):
        Bundle(bundle)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kind", "magic"),
        ("longest", 1),
        ("spelling", 1),
        ("delays", []),
        ("blank_penalties", [math.nan, 0.0, 0.0, 0.0]),
        ("stabilities", [0.5, 0.5, 0.5, 0.5]),  # it is a CTC bundle
    ],
)
def test_an_impossible_configuration_is_named(bundle: Path, key: str, value: Any) -> None:
    change(bundle / CONFIG, **{key: value})
    _trust_sizes(bundle)
    with pytest.raises(BundleError, match=rf"config\.json: .*{key}.*copy or export"):
        Bundle(bundle)


RULES_OFF = {"repeated_symbol": 0.0, "unknown_word": 0.0, "doubled_punctuation": False, "early_full_stop": False}


@pytest.mark.parametrize("settings", [{"rules": RULES_OFF}, {"rules": {}}, {"repeat_penalty": 0.0, "word_penalty": 0}])
def test_a_bundle_whose_decoding_rules_are_off_loads(bundle: Path, settings: dict[str, Any]) -> None:
    expected = Bundle(bundle).config
    change(bundle / CONFIG, **settings)
    _trust_sizes(bundle)
    assert Bundle(bundle).config == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"rules": {**RULES_OFF, "unknown_word": 30.0}},
        {"rules": {**RULES_OFF, "doubled_punctuation": True}},
        {"rules": {"early_full_stop": True}},
        {"repeat_penalty": 3.0, "word_penalty": 0.0},
        {"repeat_penalty": 0.0, "word_penalty": 2.0},
    ],
)
def test_a_bundle_with_a_decoding_rule_is_refused(bundle: Path, settings: dict[str, Any]) -> None:
    change(bundle / CONFIG, **settings)
    _trust_sizes(bundle)
    with pytest.raises(BundleError) as refused:
        Bundle(bundle)
    reason = "uses decoding rules, which are no longer supported; export the model again"
    assert str(refused.value) == f"{bundle / CONFIG}: {reason}"


def test_a_bundle_of_format_7_without_a_policy_loads(bundle: Path) -> None:
    change(bundle / CONFIG, format=7, agreements=[], confidences=[])
    _trust_sizes(bundle)
    assert not Bundle(bundle).config.has_policy


@pytest.mark.parametrize("kind", ["wait-k", "full-sentence"])
def test_whole_words_are_for_ctc_only(bundle: Path, kind: Kind) -> None:
    change(bundle / CONFIG, whole_words=True)
    _trust_sizes(bundle)
    config = Bundle(bundle).config
    assert config.whole_words
    with pytest.raises(ConfigError, match="whole_words is for ctc and transducer only"):
        replace(config, kind=kind)


@pytest.mark.parametrize("name", ["source.model", "target.model"])
def test_a_damaged_vocabulary_is_named(bundle: Path, name: str) -> None:
    (bundle / name).write_bytes(b"nonsense")
    _trust_sizes(bundle)
    with pytest.raises(BundleError, match=rf"{name}: not a SentencePiece model; copy or export"):
        Bundle(bundle)


def test_a_damaged_graph_is_named(bundle: Path) -> None:
    (bundle / "ctc.onnx").write_bytes(b"nonsense")
    _trust_sizes(bundle)
    with pytest.raises(BundleError, match=r"ctc\.onnx: onnxruntime cannot load it .*copy or export"):
        simulmt.load(bundle)


def test_a_bundle_is_found_by_path_or_shipped_name(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find(bundle) == bundle
    monkeypatch.setattr("simulmt.runtime.bundle.SHIPPED", bundle.parent)
    assert (find("en-de"), shipped_names()) == (bundle, ["en-de"])
    with pytest.raises(BundleError, match=r"en-xx: no such model.*\(en-de\)"):
        find("en-xx")


def test_the_default_bundle_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simulmt.runtime.bundle.SHIPPED", tmp_path)
    for name in ("toy", "en-zh", "de-en"):
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST).touch()
    assert shipped_names() == ["en-zh", "de-en", "toy"]


def test_a_damaged_shipped_bundle_must_be_reinstalled(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simulmt.runtime.bundle.SHIPPED", bundle.parent)
    (bundle / "ctc.weights").unlink()
    with pytest.raises(BundleError, match="reinstall simulmt"):
        Bundle(find("en-de"))


@pytest.mark.parametrize(
    ("threads", "variable", "expected"),
    [(0, None, 0), (0, "1", 1), (0, "2,1", 2), (0, "", 0), (0, "many", 0), (1, "2", 1), (64, "1", 4)],
)
def test_threads_come_from_the_call_or_the_environment(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, threads: int, variable: str | None, expected: int
) -> None:
    monkeypatch.setattr("simulmt.runtime.bundle.cores", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    session = Bundle(bundle).session("ctc", threads)
    assert session.get_session_options().intra_op_num_threads == expected


def test_each_delay_has_its_own_blank_penalty() -> None:
    config = BundleConfig(1, "ctc", "en", "de", "fp32", 9, delays=(1, 3), default_delay=3, blank_penalties=(0.5, 2.0))
    assert (config.blank_penalty(1), config.blank_penalty(3)) == (0.5, 2.0)
    with pytest.raises(ConfigError, match="blank_penalties"):
        BundleConfig(1, "ctc", "en", "de", "fp32", 9, delays=(1, 3), default_delay=3, blank_penalties=(0.5,))


WAIT_K = BundleConfig(1, "wait-k", "en", "de", "fp32", 9, delays=(1, 3), default_delay=3)


def test_each_delay_has_its_own_threshold() -> None:
    config = replace(WAIT_K, stabilities=(0.5, 1.0))
    assert (config.has_policy, config.stability(1), config.stability(3)) == (True, 0.5, 1.0)
    assert (WAIT_K.has_policy, WAIT_K.stability(1), WAIT_K.stability(3)) == (False, 0.0, 0.0)


def test_each_delay_has_its_own_maximum_wait() -> None:
    config = replace(WAIT_K, stabilities=(0.5, 1.0), max_waits=(4, 0))
    assert (config.max_wait(1), config.max_wait(3)) == (4, math.inf)
    assert replace(WAIT_K, stabilities=(0.5, 1.0)).max_wait(1) == math.inf


def test_a_policy_with_a_threshold_of_zero_is_kept() -> None:
    """Unlike a model without a policy, it sees whole words."""
    assert replace(WAIT_K, stabilities=(0.0, 0.0)).has_policy


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stabilities": (0.5,)}, "stabilities must be one for each of the 2 delays"),
        ({"stabilities": (0.5, 0.6, 0.7)}, "stabilities must be one for each of the 2 delays"),
        ({"stabilities": (0.5, -0.1)}, r"stabilities must be in 0\.\.1, got \(0\.5, -0\.1\)"),
        ({"stabilities": (1.2, 0.5)}, r"stabilities must be in 0\.\.1, got \(1\.2, 0\.5\)"),
        ({"stabilities": (math.nan, 0.5)}, r"stabilities must be in 0\.\.1, got \(nan, 0\.5\)"),
        ({"kind": "ctc", "stabilities": (0.5, 0.5)}, "stabilities are for wait-k, not for ctc"),
        ({"max_waits": (3, 3)}, "max_waits are for models with a policy"),
        ({"stabilities": (0.5, 0.5), "max_waits": (3,)}, "max_waits must be one for each of the 2 delays"),
        ({"stabilities": (0.5, 0.5), "max_waits": (3, -1)}, r"max_waits must not be negative, got \(3, -1\)"),
        ({"kind": "transducer", "stabilities": (0.5, 0.5)}, "stabilities are for wait-k, not for transducer"),
        (
            {"kind": "full-sentence", "delays": (), "default_delay": None, "stabilities": (1.0,)},
            "not for full-sentence",
        ),
    ],
)
def test_impossible_thresholds_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(WAIT_K, **changes)


def test_a_bundle_with_another_threshold(
    source_tokenizer: Tokenizer, target_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    network = trained("wait-k", source_tokenizer, target_tokenizer, policy=True)
    opened = translator(network, "wait-k", "fp32", tmp_path, stabilities=STABILITIES).bundle
    changed = opened.with_policy(0.7, max_wait=2)
    found = {(changed.config.stability(delay), changed.config.max_wait(delay)) for delay in changed.config.delays}
    assert found == {(0.7, 2)}
    assert opened.config.stabilities == STABILITIES  # left as it is
    with pytest.raises(ConfigError, match=r"stabilities must be in 0\.\.1"):
        opened.with_policy(1.5)


def test_a_threshold_is_for_a_policy_only(
    bundle: Path, source_tokenizer: Tokenizer, target_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="en-de: has no policy"):
        Bundle(bundle).with_policy(0.5)
    plain = translator(trained("wait-k", source_tokenizer, target_tokenizer), "wait-k", "fp32", tmp_path, "plain")
    with pytest.raises(ConfigError, match="plain: has no policy"):
        plain.bundle.with_policy(0.5)


def _trust_sizes(bundle: Path) -> None:
    """Update the sizes in the manifest, so that only the contents of the files can be invalid."""
    table = json.loads((bundle / MANIFEST).read_text())
    for name, entry in table["files"].items():
        entry["size"] = (bundle / name).stat().st_size
    (bundle / MANIFEST).write_text(json.dumps(table))


def test_there_is_a_file_for_each_delay_and_one_for_the_default(bundle: Path) -> None:
    delays = Bundle(bundle).config.delays
    paths = write_system_configs(bundle)
    assert [path.name for path in paths] == ["main.yaml", *(f"k{delay}.yaml" for delay in delays)]
    agent = "agent_class: simulmt.eval.simuleval.BundleAgent\nmodel: .\n"
    assert paths[0].read_text(encoding="utf-8") == agent
    assert paths[-1].read_text(encoding="utf-8") == f"{agent}delay: {delays[-1]}\n"
    Bundle(bundle).verify()  # which they are no part of


def test_only_a_bundle_becomes_a_system_directory(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="not a complete model bundle"):
        write_system_configs(tmp_path)


MAPS = """\
55d000000000-55d000100000 rw-p 00000000 00:00 0                          [heap]
7f0000000000-7f0000800000 rw-p 00000000 00:00 0
7f0001000000-7f0001800000 r--p 00000000 08:01 42                         /models/ctc.weights
7f0002000000-7f0002800000 rw-p 00001000 08:01 43                         /lib/lib with spaces.so
7f0003000000-7f0003001000 ---p 00000000 00:00 0
7f0004000000-7f0004100000 rw-s 00000000 00:00 0
"""

# Prints the huge pages, in KiB, of a block taken inside and of one that was there before; or that there are none.
TWO_BLOCKS = """
import ctypes, mmap, sys
from pathlib import Path
from simulmt.runtime.bundle import HUGE_PAGE, back_with_huge_pages, huge_pages

def block():
    taken = mmap.mmap(-1, 9 * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    taken[:] = bytes(range(256)) * (len(taken) // 256)
    return taken

def address(taken):
    return ctypes.addressof(ctypes.c_char.from_buffer(taken))

def large(taken):
    start, total, inside = address(taken), 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0] and not line.split()[0].endswith(":"):
            low, high = (int(end, 16) for end in line.split()[0].split("-"))
            inside = low < start + len(taken) and start < high
        elif inside and line.startswith("AnonHugePages"):
            total += int(line.split()[1])
    return total

trial = block()
first = -(-address(trial) // HUGE_PAGE) * HUGE_PAGE
if back_with_huge_pages(first, HUGE_PAGE) != 0:
    sys.exit("none")
earlier = block()
with huge_pages():
    inside = block()
assert inside[:] == earlier[:]
print(large(inside), large(earlier))
"""


def test_only_writable_anonymous_memory_is_listed() -> None:
    assert anonymous_blocks(MAPS) == {0x7F0000000000: 0x7F0000800000, 0x7F0004000000: 0x7F0004100000}


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_only_memory_allocated_inside_is_moved() -> None:
    done = subprocess.run([sys.executable, "-c", TWO_BLOCKS], capture_output=True, text=True)
    if done.stderr == "none\n":
        pytest.skip("this system has no huge pages to give")
    assert done.returncode == 0, done.stderr
    inside, _earlier = map(int, done.stdout.split())
    assert inside >= 7 * 2048


def test_without_memory_maps_nothing_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise PermissionError

    monkeypatch.setattr(Path, "read_text", refuse)
    with huge_pages():
        pass
