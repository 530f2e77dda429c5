"""The wheel, installed in an environment with nothing but its requirements."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from simulmt.runtime.stream import Translator

REPOSITORY = Path(__file__).parent.parent
TEXT = "The old bridge.\n\nWe waited. The wind!\n"
# Imported at every start of the environment's interpreter.
OFFLINE = """
import sys

def refuse(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo"):
        raise RuntimeError(f"{event}: nothing here needs the network")

sys.addaudithook(refuse)
"""


@pytest.fixture(scope="module")
def wheel(model: Translator, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel from a copy of the repository with one tiny model."""
    copy = tmp_path_factory.mktemp("copy")
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info", "bundles")
    shutil.copytree(REPOSITORY / "src", copy / "src", ignore=unwanted)
    shutil.copytree(model.bundle.directory, copy / "src" / "simulmt" / "bundles" / "en-de")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, copy)
    run(pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", copy / "dist", copy))
    (built,) = (copy / "dist").iterdir()
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an environment with the wheel and, borrowed from this environment, only its requirements."""
    environment = tmp_path_factory.mktemp("environment")
    run([sys.executable, "-m", "venv", "--without-pip", environment])
    run(pip("--python", environment / "bin" / "python", "install", "--no-deps", "--no-index", wheel))
    (packages,) = environment.glob("lib/python*/site-packages")
    for name in needed_by(requirements_of(wheel)):
        for path in top_level(name):
            (packages / path.name).symlink_to(path)
    (packages / "sitecustomize.py").write_text(OFFLINE, encoding="utf-8")
    return environment


def pip(*arguments: str | Path) -> list[str | Path]:
    return [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]


def run(command: list[str | Path], stdin: str = "") -> str:
    """Return the output of a command, which must succeed; run it outside the repository."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    settings = {**clean, "PYTHONWARNINGS": "error" if command[0] != sys.executable else "ignore", "PYTHONUTF8": "1"}
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, cwd="/", env=settings)
    assert done.returncode == 0, done.stderr
    return done.stdout


def requirements_of(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist") or []


def needed_by(requirements: list[str]) -> set[str]:
    """Return the distributions that pip would install for these requirements, without extras."""
    needed: set[str] = set()
    waiting = list(requirements)
    while waiting:
        requirement = Requirement(waiting.pop())
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and requirement.name not in needed:
            needed.add(requirement.name)
            waiting += distribution(requirement.name).requires or []
    return needed


def top_level(name: str) -> set[Path]:
    """Return the top-level files and folders of a distribution."""
    found = distribution(name)
    parts = {file.parts[0] for file in found.files or [] if file.parts[0] not in ("..", "__pycache__")}
    return {Path(str(found.locate_file(part))) for part in parts}


def test_the_wheel_asks_for_the_runtime_only(wheel: Path) -> None:
    core = [line for line in requirements_of(wheel) if "extra ==" not in line]
    assert sorted(Requirement(line).name for line in core) == ["numpy", "onnxruntime", "rich", "sentencepiece", "typer"]


def test_the_wheel_holds_the_package_and_its_models(wheel: Path, model: Translator) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {path.relative_to(REPOSITORY / "src").as_posix() for path in (REPOSITORY / "src").rglob("*.py")}
    assert modules <= names
    assert "simulmt/py.typed" in names
    assert {f"simulmt/bundles/en-de/{path.name}" for path in model.bundle.directory.iterdir()} <= names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"simulmt"}


def test_the_environment_has_no_training_dependencies(environment: Path) -> None:
    program = "import importlib.util as u; print([n for n in ('torch', 'onnx', 'sacrebleu') if u.find_spec(n)])"
    assert run([environment / "bin" / "python", "-c", program]) == "[]\n"


def test_it_translates_as_a_command(environment: Path, model: Translator) -> None:
    simulmt = environment / "bin" / "simulmt"
    assert run([simulmt, "translate"], TEXT) == model.translate(TEXT, model.config.default_delay)
    assert run([simulmt, "models", "verify", "en-de"]).startswith("en-de: ")
    assert "en-de: en to de" in run([simulmt, "demo", "--fast"])


def test_it_translates_from_python(environment: Path, model: Translator) -> None:
    program = "import simulmt, sys; sys.stdout.write(simulmt.load('en-de').translate(sys.stdin.read()))"
    assert run([environment / "bin" / "python", "-c", program], TEXT) == model.translate(TEXT)


def test_a_command_that_needs_an_extra_says_so(environment: Path) -> None:
    command: list[str | Path] = [environment / "bin" / "simulmt", "train", "config.toml", "--run", "run"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=environment)
    assert done.returncode == 1
    assert done.stderr == "simulmt: simulmt train needs the extra 'train': pip install 'simulmt[train]'\n"
