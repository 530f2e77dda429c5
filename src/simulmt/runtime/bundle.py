"""Model bundles: directories with everything needed to translate.

    config.json     model description and settings (BundleConfig)
    *.onnx          graphs, each with its *.weights
    source.model    the SentencePiece vocabularies
    target.model
    README.md       the model card
    manifest.json   size and SHA-256 of all files
    *.yaml          SimulEval configurations, generated

Loading checks sizes only; `verify` checks checksums, which would triple the loading time. Weights are moved to huge
pages, which makes translation faster.
"""

from __future__ import annotations

import copy
import ctypes
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from simulmt.config import as_table, build, require
from simulmt.errors import BundleError, ConfigError, VocabularyError
from simulmt.files import cores, sha256
from simulmt.text import Tokenizer

# Disable onnxruntime's telemetry (since 1.29), which starts on import; set the variable to 0 to enable it.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
import onnxruntime as untyped_onnxruntime

onnxruntime: Any = untyped_onnxruntime  # has no type information
Session = Any  # an onnxruntime.InferenceSession

FORMAT = 9  # incremented when older versions can no longer run new bundles
SHIPPED = Path(__file__).parents[1] / "bundles"
DEFAULT_BUNDLE = "en-zh"
SYNTHETIC = "synthetic"  # source language of models trained on `simulmt synthetic`
SIMULEVAL_AGENT = "simulmt.eval.simuleval.BundleAgent"
CONFIG, MANIFEST, CARD = "config.json", "manifest.json", "README.md"
SOURCE, TARGET = "source.model", "target.model"
HUGE_PAGE = 2 * 2**20
MADV_COLLAPSE = 25  # since Linux 6.1: collapse into huge pages now, if available

_RULES = ("rules", "repeat_penalty", "word_penalty")  # decoding rules; the latter two up to format 4
_AGREEMENT = ("agreements", "confidences")  # format 7; no bundle that was shipped had any

Kind = Literal["ctc", "transducer", "wait-k", "full-sentence"]
GRAPHS: Mapping[Kind, tuple[str, ...]] = {
    "ctc": ("ctc",),
    "transducer": ("ctc", "context"),
    "wait-k": ("encoder", "decoder"),
    "full-sentence": ("encoder", "decoder"),
}


@dataclass(frozen=True)
class BundleConfig:
    """Settings of a bundle."""

    format: int
    kind: Kind
    source_language: str
    target_language: str
    precision: Literal["fp32", "int8"]
    longest: int  # maximum source pieces of a sentence, including END
    mu: int = 1  # CTC and transducer: frames per source piece
    delays: tuple[int, ...] = ()  # trained delays; empty for a full-sentence model
    default_delay: int | None = None
    whole_words: bool = False  # CTC and transducer: positions see the rest of the last word read
    blank_penalties: tuple[float, ...] = ()  # CTC and transducer: one per delay, or none
    stabilities: tuple[float, ...] = ()  # wait-k with a policy: minimum stability of a token, one per delay
    max_waits: tuple[int, ...] = ()  # words over which that minimum falls to zero, one per delay; 0: it never falls
    checks: dict[str, Any] = field(default_factory=dict)  # measured by export against the trained model

    def __post_init__(self) -> None:
        require(self.longest >= 2, f"longest must be at least 2, got {self.longest}")
        require(self.mu >= 1, f"mu must be at least 1, got {self.mu}")
        require(self.has_frames or not self.whole_words, "whole_words is for ctc and transducer only")
        self._check_policy()
        if self.kind == "full-sentence":
            require(not self.delays and self.default_delay is None, "a full-sentence model has no delays")
            return
        require(len(self.delays) > 0 and min(self.delays) >= 1, f"delays must be 1 or more, got {self.delays}")
        require(self.default_delay in self.delays, f"default_delay {self.default_delay} is not among {self.delays}")
        require(
            len(self.blank_penalties) in (0, len(self.delays)),
            f"blank_penalties must be one for each of the {len(self.delays)} delays",
        )
        finite = all(map(math.isfinite, self.blank_penalties))
        require(finite, f"blank_penalties must be finite, got {self.blank_penalties}")

    def _check_policy(self) -> None:
        values, waits, count = self.stabilities, self.max_waits, len(self.delays)
        require(self.kind == "wait-k" or not values, f"stabilities are for wait-k, not for {self.kind}")
        require(len(values) in (0, count), f"stabilities must be one for each of the {count} delays")
        require(all(0 <= value <= 1 for value in values), f"stabilities must be in 0..1, got {values}")
        require(bool(values) or not waits, "max_waits are for models with a policy (stabilities)")
        require(len(waits) in (0, count), f"max_waits must be one for each of the {count} delays")
        require(all(wait >= 0 for wait in waits), f"max_waits must not be negative, got {waits}")

    @property
    def has_frames(self) -> bool:
        """Whether the model writes from encoder frames instead of a decoder."""
        return self.kind in ("ctc", "transducer")

    @property
    def largest_delay(self) -> int | None:
        """The best delay for complete text; None for a full-sentence model."""
        return max(self.delays, default=None)

    def blank_penalty(self, delay: int) -> float:
        """Return the penalty on the blank's logit at a delay."""
        return self.blank_penalties[self.delays.index(delay)] if self.blank_penalties else 0.0

    @property
    def has_policy(self) -> bool:
        """Whether the model decides when to write, and sees whole words."""
        return bool(self.stabilities)

    def stability(self, delay: int) -> float:
        """Return the minimum stability of a token at a delay; without a policy, every token is written at once."""
        return self.stabilities[self.delays.index(delay)] if self.stabilities else 0.0

    def max_wait(self, delay: int) -> float:
        """Return the number of words over which the minimum stability of a waiting token falls to zero, at a delay."""
        return (self.max_waits and self.max_waits[self.delays.index(delay)]) or math.inf


class Bundle:
    """An opened bundle; `session` loads its graphs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.name = directory.resolve().name
        self._manifest = _read_manifest(directory)
        self._check_sizes()
        self.config = _read_config(directory / CONFIG)
        self._check_complete()
        self.source = self._vocabulary(SOURCE)
        self.target = self._vocabulary(TARGET)
        if not self.source.spaced:
            raise BundleError(f"{directory / SOURCE}: a source vocabulary must be trained with spaced = true")

    def verify(self) -> None:
        """Raise BundleError if a file does not match its checksum."""
        for name, entry in self._manifest.items():
            if sha256(self.directory / name) != entry["sha256"]:
                raise BundleError(f"{self.directory / name}: damaged (checksum differs); {self._hint()}")

    def session(self, graph: str, threads: int) -> Session:
        """Load a graph; `threads` 0 uses OMP_NUM_THREADS, if set, or all physical cores."""
        options = onnxruntime.SessionOptions()
        threads = threads or _threads_from_environment()
        options.intra_op_num_threads = min(threads, cores())  # more threads than cores are slower
        options.inter_op_num_threads = 1
        options.log_severity_level = 4  # errors are raised as exceptions
        # The graph is already optimal; optimising it would only slow down loading.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry("session.force_spinning_stop", "1")  # an idle translator uses no CPU
        path = self.directory / f"{graph}.onnx"
        try:
            with huge_pages():
                return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's errors have no common base class
            reason = str(error).splitlines()[0]
            raise BundleError(f"{path}: onnxruntime cannot load it ({reason}); {self._hint()}") from None

    def with_policy(self, stability: float, max_wait: int = 0) -> Bundle:
        """Return this bundle with one threshold and one maximum wait for all delays."""
        require(self.config.has_policy, f"{self.name}: has no policy")
        count = len(self.config.delays)
        changed = copy.copy(self)
        changed.config = replace(self.config, stabilities=(stability,) * count, max_waits=(max_wait,) * count)
        return changed

    def _check_sizes(self) -> None:
        for name, entry in self._manifest.items():
            path = self.directory / name
            if not path.is_file():
                raise BundleError(f"{path}: missing; {self._hint()}")
            if (size := path.stat().st_size) != entry["size"]:
                raise BundleError(f"{path}: damaged ({size} bytes, expected {entry['size']}); {self._hint()}")

    def _check_complete(self) -> None:
        graphs = [f"{graph}.{ending}" for graph in GRAPHS[self.config.kind] for ending in ("onnx", "weights")]
        for name in (CONFIG, SOURCE, TARGET, *graphs):
            if name not in self._manifest:
                raise BundleError(f"{self.directory / MANIFEST}: does not list {name}; {self._hint()}")

    def _vocabulary(self, name: str) -> Tokenizer:
        try:
            return Tokenizer.load(self.directory / name)
        except VocabularyError as error:
            raise BundleError(f"{error}; {self._hint()}") from None

    def _hint(self) -> str:
        shipped = self.directory.parent == SHIPPED
        return "reinstall simulmt" if shipped else "copy or export the bundle again"


def _threads_from_environment() -> int:
    """Return OMP_NUM_THREADS, which onnxruntime itself ignores, or 0; it may be a list, one number per nested level."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() else 0


@contextmanager
def huge_pages() -> Iterator[None]:
    """Move memory allocated inside the context to huge pages, if the system supports it.

    With 4 KiB pages a step is 1.1 times slower. numpy requests huge pages on Linux, onnxruntime does not.
    """
    before = _blocks_of_this_process()
    yield
    for start, stop in _blocks_of_this_process().items():
        first, end = -(-start // HUGE_PAGE) * HUGE_PAGE, stop // HUGE_PAGE * HUGE_PAGE
        if first < end and before.get(start) != stop:
            back_with_huge_pages(first, end - first)


def back_with_huge_pages(start: int, size: int) -> int:
    """Move a block, aligned to huge pages, to huge pages; return 0 on success."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return int(madvise(start, size, MADV_COLLAPSE))


def _blocks_of_this_process() -> dict[int, int]:
    with suppress(OSError):  # not on Linux, or not permitted
        return anonymous_blocks(Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace"))
    return {}


def anonymous_blocks(maps: str) -> dict[int, int]:
    """Return the writable anonymous blocks in the lines of /proc/self/maps: the end of each by its start."""
    blocks = {}
    for line in maps.splitlines():
        addresses, permissions, *rest = line.split()
        if permissions.startswith("rw") and len(rest) == 3:  # no path after offset, device and inode
            start, stop = addresses.split("-")
            blocks[int(start, 16)] = int(stop, 16)
    return blocks


def find(name_or_path: str | Path) -> Path:
    """Return the directory of a bundle, given the name of a shipped one or a path."""
    shipped = SHIPPED / str(name_or_path)
    if str(name_or_path) in shipped_names():
        return shipped
    with suppress(OSError):  # such as a name that is too long
        path = Path(name_or_path)
        if path.is_dir():
            return path
    names = ", ".join(shipped_names()) or "none"
    raise BundleError(
        f"{name_or_path}: no such model; give the path of a bundle or the name of a shipped one ({names})"
    )


def shipped_names() -> list[str]:
    """Return the names of the shipped bundles, the default first."""
    names = (path.parent.name for path in SHIPPED.glob(f"*/{MANIFEST}"))
    return sorted(names, key=lambda name: (name != DEFAULT_BUNDLE, name))


def default_names() -> Iterator[str]:
    """Yield the names of the shipped bundles, the default first; synthetic ones only if there are no others."""
    names = shipped_names()
    if not names:
        raise BundleError("no models installed: pass the path of a bundle with --model")
    real = (name for name in names if Bundle(SHIPPED / name).config.source_language != SYNTHETIC)
    first = next(real, None)
    yield from names if first is None else chain([first], real)


def write_description(directory: Path, config: BundleConfig, card: str) -> None:
    """Write configuration, card and manifest of a bundle whose other files exist."""
    _write_json(directory / CONFIG, as_table(config))
    (directory / CARD).write_text(card, encoding="utf-8")
    files = sorted(path for path in directory.iterdir() if path.name != MANIFEST)
    entries = {path.name: {"size": path.stat().st_size, "sha256": sha256(path)} for path in files}
    _write_json(directory / MANIFEST, {"format": FORMAT, "files": entries})


def write_system_configs(directory: Path) -> list[Path]:
    """Write main.yaml and k<delay>.yaml, which make the bundle a SimulEval `--system-dir`.

    SimulEval reads the agent's options from main.yaml, or from the file named by `--system-config`.
    """
    configs = {"main": ""} | {f"k{delay}": f"delay: {delay}\n" for delay in Bundle(directory).config.delays}
    paths = []
    for name, delay in configs.items():
        paths.append(directory / f"{name}.yaml")
        # SimulEval starts the agent inside the directory.
        paths[-1].write_text(f"agent_class: {SIMULEVAL_AGENT}\nmodel: .\n{delay}", encoding="utf-8")
    return paths


def _read_manifest(directory: Path) -> dict[str, dict[str, Any]]:
    path = directory / MANIFEST
    files = _read_table(path).get("files")
    if not isinstance(files, dict) or not all(map(_is_entry, files.items())):
        raise BundleError(f"{path}: no list of files with size and sha256; copy or export the bundle again")
    return files


def _is_entry(item: tuple[str, Any]) -> bool:
    name, entry = item
    return Path(name).name == name and isinstance(entry, dict) and {"size", "sha256"} <= entry.keys()


def _read_config(path: Path) -> BundleConfig:
    try:
        return build(BundleConfig, _updated(_read_table(path), path), str(path))
    except ConfigError as error:
        raise BundleError(f"{error}; copy or export the bundle again") from None


def _updated(table: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Drop settings of older versions that are off; decoding rules that are on raise BundleError."""
    if any(_is_on(table.get(name)) for name in _RULES):
        raise BundleError(f"{path}: uses decoding rules, which are no longer supported; export the model again")
    dropped = [*_RULES, *(name for name in _AGREEMENT if not table.get(name))]
    return {name: value for name, value in table.items() if name not in dropped}


def _is_on(setting: Any) -> bool:
    return any(setting.values()) if isinstance(setting, dict) else bool(setting)


def _read_table(path: Path) -> dict[str, Any]:
    """Read a JSON object with a format version that is not newer than ours."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BundleError(f"{path}: missing; {path.parent} is not a complete model bundle") from None
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError:
        raise BundleError(f"{path}: damaged (not JSON); copy or export the bundle again") from None
    if not isinstance(table, dict):
        raise BundleError(f"{path}: damaged (not a JSON object); copy or export the bundle again")
    version = table.get("format")
    if not isinstance(version, int):
        raise BundleError(f"{path}: no format version; not a simulmt bundle")
    if version > FORMAT:
        raise BundleError(f"{path}: format {version}, but simulmt reads up to {FORMAT}: pip install --upgrade simulmt")
    return table


def _write_json(path: Path, table: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(table, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
