"""The runtime imports nothing that is installed only with an extra."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import simulmt

ROOT = Path(simulmt.__file__).parent
EXTRAS = {"simulmt.model", "simulmt.train", "simulmt.eval", "simulmt.serve"}
NO_EXTRA = ("text", "data", "runtime", "recipe")  # packages that an installation without extras relies on
RUNTIME = sorted(
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
    for path in [*ROOT.glob("[!_]*.py"), *(path for name in NO_EXTRA for path in ROOT.glob(f"{name}/**/[!_]*.py"))]
)
ONLY_IN_EXTRAS = {
    "eflomal",
    "jaxtyping",
    "jinja2",
    "matplotlib",
    "optuna",
    "prometheus_client",
    "sacrebleu",
    "safetensors",
    "scipy",
    "simuleval",
    "starlette",
    "tensorboard",
    "torch",
    "uvicorn",
    "websockets",
}

# Imports one module while it watches what the interpreter opens for writing, starts or connects to.
IMPORT_AND_WATCH = """
import importlib, json, os, sys

deeds = []

def watch(event, arguments):
    if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        deeds.append(f"open {arguments[0]}")
    elif event in ("subprocess.Popen", "socket.connect", "os.mkdir", "os.system"):
        deeds.append(event)

sys.addaudithook(watch)
importlib.import_module(sys.argv[1])
report = {"modules": sorted(sys.modules), "deeds": list(deeds)}
with open(sys.argv[2], "w") as file:
    json.dump(report, file)
"""


def test_the_runtime_modules_include_the_core() -> None:
    some = ("errors", "text.words", "data.corpus", "runtime.stream", "recipe.plan")
    assert {f"simulmt.{name}" for name in some} <= set(RUNTIME)


@pytest.mark.parametrize("module", ["simulmt", *RUNTIME])
def test_importing_the_runtime_stays_small_and_does_no_work(module: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-B", "-c", IMPORT_AND_WATCH, module, str(report)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "", "")
    found = json.loads(report.read_text(encoding="utf-8"))
    assert found["deeds"] == []
    assert set(found["modules"]) & (ONLY_IN_EXTRAS | EXTRAS) == set()
    assert list(tmp_path.iterdir()) == [report]
