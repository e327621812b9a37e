"""Where a node's time goes while a benchmark measures: samples of its event loop's thread, by function.

py-spy takes them from outside, so the node is started as ever; it only pauses for each sample. A function's own time is with
what it calls in C: the encoding of a packet, a write to a socket, a write to the log. Threads that sync are left out: they
hold no lock of Python's while they do.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

SAMPLES_PER_S = 200
END_S_MAX = 30
LINES = 20


def profiler_path() -> str | None:
    """Return where py-spy is: on the path, or beside this Python."""
    return shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))


@contextmanager
def profiled(pid: int, to: Path) -> Iterator[None]:
    """Sample a process into a file until the context ends. Without py-spy, or leave to look into it, there is no file."""
    path = profiler_path()
    if path is None:
        yield
        return
    command = [path, "record", "--pid", str(pid), "--rate", str(SAMPLES_PER_S), "--format", "raw", "--function", "--threads"]
    with subprocess.Popen(
        [*command, "--duration", "86400", "--output", str(to)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            yield
        finally:
            process.send_signal(signal.SIGINT)  # upon which it writes the file
            process.wait(END_S_MAX)


def shares_of(stacks: Iterable[str]) -> list[tuple[float, str]]:
    """Return each function's share in % of the main thread's samples, without those of functions that it calls; greatest first.

    Args:
        stacks: lines `THREAD;FUNCTION;...;FUNCTION SAMPLES`, the innermost function last.
    """
    own: Counter[str] = Counter()
    for stack in stacks:
        frames, _, samples = stack.rpartition(" ")
        names = frames.split(";")
        if any("MainThread" in name for name in names):
            own[names[-1]] += int(samples)
    whole = own.total()
    return [(samples / whole * 100, name) for name, samples in own.most_common()]


def told(profile: Path) -> list[str]:
    """Return the lines to print of a profile."""
    if not profile.exists():
        return ["  no profile: py-spy is not installed (pip install py-spy), or may not look into the node"]
    return [f"  {share:5.1f} %  {name}" for share, name in shares_of(profile.read_text().splitlines())[:LINES]]
