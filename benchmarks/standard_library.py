"""Locks, XML and TOML output with the standard library, compared with third-party packages.

    pip install --target PEERS filelock defusedxml tomli-w
    PYTHONPATH=PEERS python benchmarks/standard_library.py [--units 400000] [--rounds 10]

Lock: median time from a release until a waiting thread has the lock. XML: CPU time and added peak memory of reading
the units of a TMX file, and time until a file of nested entities is refused. TOML: time and lines of a training
configuration. Packages that are not installed are skipped.
"""

from __future__ import annotations

import argparse
import importlib
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

from simulmt.config import as_table, as_toml
from simulmt.data.corpus import read_elements
from simulmt.errors import DataError
from simulmt.files import lock
from simulmt.train.systems import TrainingConfig

UNIT = """<tu tuid="{0}"><tuv xml:lang="de"><seg>Der {0}. Satz ist <bpt i="1"/>so lang<ept i="1"/> wie die anderen \
und steht in einer Zeile.</seg></tuv>
<tuv xml:lang="en"><seg>Sentence {0} is <bpt i="1"/>as long<ept i="1"/> as the others and takes one line.</seg></tuv>\
</tu>
"""
NESTING = 9  # levels of ten entities each
HELD_SECONDS = 0.2, 0.3  # at random, since filelock polls at fixed intervals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, default=400_000, help="units of the TMX file; the default makes 100 MB")
    parser.add_argument("--rounds", type=int, default=10, help="repetitions of locking and writing")
    arguments = parser.parse_args()
    filelock, defusedxml, tomli_w = map(import_if_installed, ("filelock", "defusedxml.ElementTree", "tomli_w"))
    with tempfile.TemporaryDirectory() as folder:
        measure_locks(Path(folder) / "lock", arguments.rounds, filelock)
        measure_xml(Path(folder), arguments.units, defusedxml)
    measure_toml(arguments.rounds, tomli_w)


def import_if_installed(module: str) -> ModuleType | None:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        print(f"{module.partition('.')[0]} is not installed, skipping it: pip install filelock defusedxml tomli-w")
        return None


def measure_locks(path: Path, rounds: int, filelock: ModuleType | None) -> None:
    @contextmanager
    def flock() -> Iterator[None]:
        with path.open("w") as file:
            lock(file)
            yield

    print(f"lock: handed over after {handover(flock, rounds) * 1e3:.2f} ms (flock)")
    if filelock is not None:
        seconds = handover(lambda: filelock.FileLock(path, thread_local=False), rounds)
        print(f"lock: handed over after {seconds * 1e3:.2f} ms (filelock)")


def handover(take: Callable[[], AbstractContextManager[Any]], rounds: int) -> float:
    """Return the median time from a release until a waiting thread has the lock."""
    times = []
    for _ in range(rounds):
        taken: list[float] = []

        def wait(taken: list[float] = taken) -> None:
            with take():
                taken.append(time.perf_counter())

        waiter = threading.Thread(target=wait)
        with take():
            waiter.start()
            time.sleep(random.uniform(*HELD_SECONDS))
            released = time.perf_counter()
        waiter.join()
        times.append(taken[0] - released)
    return statistics.median(times)


def measure_xml(folder: Path, units: int, defusedxml: ModuleType | None) -> None:
    memory, bomb = folder / "memory.tmx", folder / "bomb.tmx"
    with memory.open("w", encoding="utf-8") as file:
        file.write("<tmx><body>\n")
        file.writelines(UNIT.format(number) for number in range(units))
        file.write("</body></tmx>\n")
    entities = "".join(f'<!ENTITY e{n + 1} "{f"&e{n};" * 10}">' for n in range(NESTING))
    bomb.write_text(f'<!DOCTYPE tmx [<!ENTITY e0 "ha">{entities}]><tmx><tu>&e{NESTING};</tu></tmx>', encoding="utf-8")

    readers: dict[str, Callable[[Path], int]] = {
        "expat and TreeBuilder": lambda path: sum(1 for _ in read_elements(path, "tu")),
        "ElementTree.iterparse": lambda path: count_units(ElementTree.iterparse(path, ("start", "end"))),
    }
    if defusedxml is not None:
        readers["defusedxml.iterparse"] = lambda path: count_units(defusedxml.iterparse(path, ("start", "end")))
    megabytes = memory.stat().st_size / 1e6
    for name, read in readers.items():
        before, started = reset_peak_memory(), time.process_time()
        assert read(memory) == units
        seconds, added = time.process_time() - started, peak_memory() - before
        print(f"XML: {megabytes:.0f} MB in {seconds:.1f} s of CPU with {added / 1e6:.0f} MB of memory ({name})")
    for name, read in readers.items():
        started = time.perf_counter()
        try:
            read(bomb)
        except (DataError, ElementTree.ParseError, ValueError) as error:
            seconds = time.perf_counter() - started
            print(f"XML: nested entities refused after {seconds * 1e3:.1f} ms ({name}): {str(error).split('/')[-1]}")


def count_units(events: Iterator[tuple[str, Any]]) -> int:
    """Count the units of a TMX file, freeing each after it is read."""
    count = 0
    for event, element in events:
        if event == "start" and element.tag == "body":
            body = element
        elif event == "end" and element.tag == "tu":
            count += 1
            body.clear()
    return count


def reset_peak_memory() -> int:
    """Reset the peak resident memory of the process to the current one, and return it in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_memory()


def peak_memory() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def measure_toml(rounds: int, tomli_w: ModuleType | None) -> None:
    table = {"delays": [1, 3, 5, 9], "training": as_table(TrainingConfig())}
    writers = {"as_toml": as_toml} | ({"tomli-w": tomli_w.dumps} if tomli_w is not None else {})
    for name, write in writers.items():
        started = time.perf_counter()
        for _ in range(rounds):
            text = write(table)
        seconds = (time.perf_counter() - started) / rounds
        print(f"TOML: {seconds * 1e6:.0f} µs, {text.count(chr(10))} lines ({name})")


if __name__ == "__main__":
    main()
