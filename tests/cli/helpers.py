"""Run the command line in a process with pipes, or in this process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest

from simulmt.cli import main

COMMAND = (sys.executable, "-m", "simulmt")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100", "PYTHONUTF8": "0", "LC_ALL": "C.UTF-8"}
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None\n"
MAIN = "from simulmt.cli import main; main()"


def simulmt(
    *arguments: str | Path, stdin: bytes | str = b"", cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command and return its output and exit code."""
    return _run([*COMMAND, *arguments], stdin, cwd)


def simulmt_after(program: str, *arguments: str | Path, stdin: bytes | str = b"") -> subprocess.CompletedProcess[str]:
    """Run a command after a program, in the same interpreter."""
    return _run([sys.executable, "-c", program + MAIN, *arguments], stdin, None)


def start(*arguments: str | Path) -> subprocess.Popen[bytes]:
    """Start a command with pipes for input, output and errors."""
    pipe = subprocess.PIPE
    command = [*COMMAND, *arguments]
    # In the background of a shell, pytest and its children would ignore Ctrl-C.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(command, bufsize=0, stdin=pipe, stdout=pipe, stderr=pipe, env=ENVIRONMENT, preexec_fn=heed)


def call(*arguments: str | Path, capture: pytest.CaptureFixture[str]) -> subprocess.CompletedProcess[str]:
    """Run a command in this process, which is faster; restore the signal handlers afterwards."""
    code = exit_code(*arguments)
    return subprocess.CompletedProcess(arguments, code, *capture.readouterr())


def exit_code(*arguments: str | Path) -> int:
    """Run a command in this process and return its exit code, for fixtures, which cannot capture the output."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with patch.object(sys, "argv", ["simulmt", *map(str, arguments)]), pytest.raises(SystemExit) as stop:
            main()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert isinstance(stop.value.code, int)
    return stop.value.code


def _run(command: Sequence[str | Path], stdin: bytes | str, cwd: Path | None) -> subprocess.CompletedProcess[str]:
    data = stdin.encode() if isinstance(stdin, str) else stdin
    done = subprocess.run(command, input=data, capture_output=True, check=False, cwd=cwd, env=ENVIRONMENT, timeout=300)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def assert_refused(done: subprocess.CompletedProcess[str], code: int, *mentioned: str) -> None:
    """Assert that a command failed with this code and a one-line message, and wrote nothing."""
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert done.stderr.startswith("simulmt: ")
    assert done.stderr.count("\n") == 1
    for words in mentioned:
        assert words in done.stderr
