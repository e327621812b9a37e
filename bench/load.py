"""The load: `mqload.c`, compiled once per version of its source, run once per measurement."""

from __future__ import annotations

import hashlib
import os
import select
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

SOURCE = Path(__file__).with_name("mqload.c")

CONNECT_S_MAX = 60
"""Seconds that mqload waits for its connections, besides those of the load itself."""


class LoadUnavailable(Exception):
    """Raised when the load generator can't be compiled. The message says what is missing."""


class LoadFailed(Exception):
    """Raised when the load generator ended with an error: the broker refused or closed a connection."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of a broker. The names are mqload's options, which its source explains."""

    pubs: int = 1
    subs: int = 0
    msgs: int = 100_000
    qos: int = 0
    subqos: int = 0
    size: int = 64
    window: int = 1_000
    chunk: int = 100
    topics: int = 1
    own: int = 0
    stalled: int = 0
    others: int = 0
    rate: int = 0
    skip: int = 0
    hold: int = 0
    timeout: int = 60


@dataclass(frozen=True, slots=True)
class Result:
    """What mqload measured. Latencies are from sending to delivery, and to PUBACK, in us; 0 where there were none."""

    msgs: int
    sent: int
    acked: int
    delivered: int
    expected: int
    connect_s: float
    publish_per_s: float
    deliver_per_s: float
    latency_us_p50: float
    latency_us_p99: float
    latency_us_max: float
    ack_us_p50: float
    ack_us_p99: float
    ack_us_max: float
    broker_s: float = 0
    """Seconds for which the broker had a processor meanwhile: set by who knows its process."""

    def missing(self, load: Load) -> int:
        """Return how many messages were not sent (QoS > 0: not acknowledged) or not delivered before the end."""
        return self.msgs - (self.acked if load.qos else self.sent) + self.expected - self.delivered


def compile_load() -> Path:
    """Compile mqload if this version of it isn't in the cache yet, and return its path.

    The cache is `$XDG_CACHE_HOME/penstock`, or `~/.cache/penstock`.

    Raises:
        LoadUnavailable: there is no C compiler, or it failed.
    """
    source = SOURCE.read_bytes()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "penstock")
    binary = cache / f"mqload-{hashlib.sha256(source).hexdigest()[:16]}"
    if binary.exists():
        return binary
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise LoadUnavailable("the load generator is written in C, and there is no C compiler (apt-get install gcc libc6-dev)")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as directory:
        made = Path(directory, "mqload")
        compiled = subprocess.run([compiler, "-O2", "-o", made, SOURCE], capture_output=True, text=True, check=False)
        if compiled.returncode != 0:
            raise LoadUnavailable(f"{compiler} could not compile {SOURCE} (it needs Linux's epoll):\n{compiled.stderr}")
        made.replace(binary)  # at once: another run may be looking for it
    return binary


def run_load(host: str, port: int, load: Load) -> Result:
    """Put `load` on the broker at `host` (an IPv4 address) and return what was measured.

    Raises:
        LoadUnavailable, LoadFailed
    """
    with start_load(host, port, load) as running:
        return running.result()


class RunningLoad:
    """A load that is under way. `start_load` makes it."""

    def __init__(self, process: subprocess.Popen[bytes], load: Load) -> None:
        self._process = process
        self._timeout_s = CONNECT_S_MAX + load.timeout + 30

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def result(self) -> Result:
        """Wait for what was measured: the end of the load, or where it holds its connections, that they are accepted.

        Raises:
            LoadFailed
        """
        assert self._process.stdout is not None
        is_readable, _, _ = select.select([self._process.stdout], [], [], self._timeout_s)
        line = self._process.stdout.readline() if is_readable else b""
        if not line:
            self._process.kill()
            _, errors = self._process.communicate()
            what = f"status {self._process.returncode}" if is_readable else f"nothing in {self._timeout_s} s"
            assert isinstance(self._process.args, list)
            raise LoadFailed(f"{' '.join(self._process.args)} ended with {what}: {errors.decode(errors='replace').strip()}")
        fields = orjson.loads(line)
        for name in ("latency_us", "ack_us"):
            for quantile, value in fields.pop(name).items():
                fields[f"{name}_{quantile}"] = value
        return Result(**fields)


@contextmanager
def start_load(host: str, port: int, load: Load) -> Iterator[RunningLoad]:
    """Begin a load; at the end of the context it is over.

    Raises:
        LoadUnavailable
    """
    options = [f"{name}={value}" for name, value in asdict(load).items()]
    command = [str(compile_load()), host, str(port), *options]
    # A load that holds its connections ends with its standard input.
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            yield RunningLoad(process, load)
        except BaseException:
            process.kill()
            raise
