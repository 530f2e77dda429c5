"""A model bundle: one directory with all that translation needs, checked before it is used.

    config.json     what the model is and how to run it (BundleConfig)
    *.onnx          its graphs, each with its *.weights beside it
    source.model    the SentencePiece vocabularies
    target.model
    words.txt       words of the target language, if its word_penalty asks for them
    README.md       the model card
    manifest.json   size and SHA-256 of all these
    *.yaml          for SimulEval, which takes the directory for a system's; made from the rest

Sizes are checked at every load, checksums by `verify`, since reading all the weights would triple the loading time.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from simulmt.config import as_table, build, require
from simulmt.errors import BundleError, ConfigError, VocabularyError
from simulmt.runtime.memory import large_pages
from simulmt.runtime.wording import Wording
from simulmt.text import Tokenizer

# From 1.29 on onnxruntime reports what it runs to its makers, from the moment it is imported; simulmt works offline and
# tells nobody. Whoever wants the reports sets the variable to 0.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
import onnxruntime as untyped_onnxruntime

onnxruntime: Any = untyped_onnxruntime  # it does not declare its names for type checkers
Session = Any  # an onnxruntime.InferenceSession

FORMAT = 4  # raised when an older simulmt could not run a bundle any more
SHIPPED = Path(__file__).parents[1] / "bundles"
FIRST_CHOICE = "en-zh"
CONFIG, MANIFEST, CARD = "config.json", "manifest.json", "README.md"
SOURCE, TARGET, WORDS = "source.model", "target.model", "words.txt"

Kind = Literal["ctc", "wait-k", "full-sentence"]
GRAPHS: Mapping[Kind, tuple[str, ...]] = {
    "ctc": ("ctc",),
    "wait-k": ("encoder", "decoder"),
    "full-sentence": ("encoder", "decoder"),
}


@dataclass(frozen=True)
class BundleConfig:
    """What a bundle says of its model."""

    format: int
    kind: Kind
    source_language: str
    target_language: str
    precision: Literal["fp32", "int8"]
    longest: int  # source pieces in a sentence, its END among them; a longer sentence is cut
    mu: int = 1  # frames a source piece, for CTC
    delays: tuple[int, ...] = ()  # the k it was trained for; none for a full-sentence model
    default_delay: int | None = None
    whole_words: bool = False  # for CTC: a position sees the rest of the last word that was read for it
    blank_penalties: tuple[float, ...] = ()  # for CTC: one for each delay, or none
    repeat_penalty: float = 0.0  # for CTC: what a symbol pays that would write the last one again
    word_penalty: float = 0.0  # for CTC: what a symbol pays that would tear a word
    checks: dict[str, Any] = field(default_factory=dict)  # what export measured against the trained model

    def __post_init__(self) -> None:
        require(self.longest >= 2, f"longest must be at least 2, got {self.longest}")
        require(self.mu >= 1, f"mu must be at least 1, got {self.mu}")
        require(self.kind == "ctc" or not self.whole_words, "whole_words is for ctc only")
        if self.kind == "full-sentence":
            require(not self.delays and self.default_delay is None, "a full-sentence model has no delays")
            return
        require(len(self.delays) > 0 and min(self.delays) >= 1, f"delays must be 1 or more, got {self.delays}")
        require(self.default_delay in self.delays, f"default_delay {self.default_delay} is not among {self.delays}")
        require(
            len(self.blank_penalties) in (0, len(self.delays)),
            f"blank_penalties must be one for each of the {len(self.delays)} delays",
        )

        require(
            all(map(math.isfinite, self.blank_penalties)), f"blank_penalties must be finite: {self.blank_penalties}"
        )
        for name, penalty in (("repeat_penalty", self.repeat_penalty), ("word_penalty", self.word_penalty)):
            require(0 <= penalty < math.inf, f"{name} must be 0 or more, got {penalty}")
            require(self.kind == "ctc" or not penalty, f"{name} is for ctc only")

    def blank_penalty(self, delay: int) -> float:
        """What is taken off the blank's logit at a delay."""
        return self.blank_penalties[self.delays.index(delay)] if self.blank_penalties else 0.0


class Bundle:
    """An opened bundle; its graphs are loaded by `session`."""

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
            raise BundleError(f"{directory / SOURCE}: a source vocabulary must be learnt with spaced = true")

    def verify(self) -> None:
        """Compare every file with its checksum; the first that differs is an error."""
        for name, entry in self._manifest.items():
            if _sha256(self.directory / name) != entry["sha256"]:
                raise BundleError(f"{self.directory / name}: damaged (checksum differs); {self._cure()}")

    def session(self, graph: str, threads: int) -> Session:
        """Load a graph, to run on so many threads; 0 takes all physical cores."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = min(threads, os.cpu_count() or 1)  # more would hinder each other
        options.inter_op_num_threads = 1
        options.log_severity_level = 4  # what goes wrong is raised
        # The graph is written as it is to run; looking for improvements would only cost loading time.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry("session.force_spinning_stop", "1")  # an idle translator uses no CPU
        path = self.directory / f"{graph}.onnx"
        try:
            with large_pages():
                return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's errors share no base class of their own
            reason = str(error).splitlines()[0]
            raise BundleError(f"{path}: onnxruntime cannot load it ({reason}); {self._cure()}") from None

    def wording(self) -> Wording | None:
        """What symbols pay that would spoil the wording; None if none do."""
        config = self.config
        return Wording.of(
            self.source,
            self.target,
            repeat_penalty=config.repeat_penalty,
            word_penalty=config.word_penalty,
            words=self._words() if config.word_penalty else (),
        )

    def _words(self) -> list[str]:
        path = self.directory / WORDS
        try:
            return path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            raise BundleError(f"{path}: cannot be read as text; {self._cure()}") from None

    def _check_sizes(self) -> None:
        for name, entry in self._manifest.items():
            path = self.directory / name
            if not path.is_file():
                raise BundleError(f"{path}: missing; {self._cure()}")
            if path.stat().st_size != entry["size"]:
                found, expected = path.stat().st_size, entry["size"]
                raise BundleError(f"{path}: damaged ({found} bytes, expected {expected}); {self._cure()}")

    def _check_complete(self) -> None:
        graphs = [f"{graph}.{ending}" for graph in GRAPHS[self.config.kind] for ending in ("onnx", "weights")]
        words = [WORDS] if self.config.word_penalty else []
        for name in (CONFIG, SOURCE, TARGET, *words, *graphs):
            if name not in self._manifest:
                raise BundleError(f"{self.directory / MANIFEST}: does not list {name}; {self._cure()}")

    def _vocabulary(self, name: str) -> Tokenizer:
        try:
            return Tokenizer.load(self.directory / name)
        except VocabularyError as error:
            raise BundleError(f"{error}; {self._cure()}") from None

    def _cure(self) -> str:
        shipped = self.directory.parent == SHIPPED
        return "reinstall simulmt" if shipped else "copy or export the bundle again"


def find(name_or_path: str | Path) -> Path:
    """The directory of a bundle given by the name of a shipped one or by a path."""
    shipped = SHIPPED / str(name_or_path)
    if str(name_or_path) in shipped_names():
        return shipped
    with suppress(OSError):  # for a name that is too long, say
        path = Path(name_or_path)
        if path.is_dir():
            return path
    names = ", ".join(shipped_names()) or "none"
    raise BundleError(f"{name_or_path}: no such model; give the path of a bundle or one that is shipped ({names})")


def shipped_names() -> list[str]:
    """The bundles that came with the package; the one that is meant if none is named comes first."""
    names = (path.parent.name for path in SHIPPED.glob(f"*/{MANIFEST}"))
    return sorted(names, key=lambda name: (name != FIRST_CHOICE, name))


def write_description(directory: Path, config: BundleConfig, card: str) -> None:
    """Complete a bundle whose graphs and vocabularies are written: configuration, card, manifest."""
    _write_json(directory / CONFIG, as_table(config))
    (directory / CARD).write_text(card, encoding="utf-8")
    files = sorted(path for path in directory.iterdir() if path.name != MANIFEST)
    entries = {path.name: {"size": path.stat().st_size, "sha256": _sha256(path)} for path in files}
    _write_json(directory / MANIFEST, {"format": FORMAT, "files": entries})


def _read_manifest(directory: Path) -> dict[str, dict[str, Any]]:
    path = directory / MANIFEST
    table = _read_json(path)
    _check_format(path, table)
    files = table.get("files")
    if not isinstance(files, dict) or not all(map(_is_entry, files.items())):
        raise BundleError(f"{path}: no list of files with size and sha256; copy or export the bundle again")
    return files


def _is_entry(item: tuple[str, Any]) -> bool:
    name, entry = item
    return Path(name).name == name and isinstance(entry, dict) and {"size", "sha256"} <= entry.keys()


def _read_config(path: Path) -> BundleConfig:
    table = _read_json(path)
    _check_format(path, table)
    try:
        return build(BundleConfig, table, str(path))
    except ConfigError as error:
        raise BundleError(f"{error}; copy or export the bundle again") from None


def _check_format(path: Path, table: Mapping[str, Any]) -> None:
    found = table.get("format")
    if not isinstance(found, int):
        raise BundleError(f"{path}: says no format; it is not from a bundle of simulmt")
    if found > FORMAT:
        raise BundleError(
            f"{path}: format {found}, but this simulmt reads up to {FORMAT}: pip install --upgrade simulmt"
        )


def _read_json(path: Path) -> dict[str, Any]:
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
    return table


def _write_json(path: Path, table: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(table, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _sha256(path: Path) -> str:
    import hashlib  # brings a library of megabytes, which translating does not need

    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
