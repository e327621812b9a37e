"""A profile of a node during a benchmark: samples of the event loop's thread, by function.

py-spy takes the samples from outside, so the node runs as usual and only pauses for each sample. The own time of a function
includes the C code that it calls: the encoding of a packet, a write to a socket, a write to the log. Threads that sync are left
out, because they don't hold the interpreter's lock.
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
    """Return the path of py-spy, which is on the PATH or beside this Python, or None."""
    return shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))


@contextmanager
def profiled(pid: int, to: Path) -> Iterator[None]:
    """Sample a process into a file until the context ends. There is no file without py-spy, or without permission."""
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
            process.send_signal(signal.SIGINT)  # then py-spy writes the file
            process.wait(END_S_MAX)


def shares_of(stacks: Iterable[str]) -> list[tuple[float, str]]:
    """Return the share of each function in the main thread's samples, in %, without functions that it calls; greatest first.

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
    """Return the lines to print for a profile."""
    if not profile.exists():
        return ["  There is no profile: py-spy is not installed (pip install py-spy), or has no permission."]
    return [f"  {share:5.1f} %  {name}" for share, name in shares_of(profile.read_text().splitlines())[:LINES]]
