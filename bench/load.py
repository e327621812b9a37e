"""The MQTT load generator `mqload.c`, which is compiled once per version of its source and runs once per measurement."""

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
"""Seconds that mqload may take for its connections, in addition to the load's own timeout."""


class LoadUnavailable(Exception):
    """Raised when the load generator can't be compiled. The message says why."""


class LoadFailed(Exception):
    """Raised when the load generator ends with an error, such as a connection that the broker refuses or closes."""


@dataclass(frozen=True, slots=True)
class Load:
    """A load on a broker. The fields are the options of mqload, which its source explains."""

    pubs: int = 1
    subs: int = 0
    msgs: int = 100_000
    qos: int = 0
    subqos: int = 0
    size: int = 64
    window: int = 1_000
    chunk: int = 100
    topics: int = 1
    delay: int = 0
    own: int = 0
    lasting: int = 0
    login: int = 0
    stalled: int = 0
    others: int = 0
    rate: int = 0
    skip: int = 0
    hold: int = 0
    timeout: int = 60


@dataclass(frozen=True, slots=True)
class Result:
    """Result of mqload. Latencies are in us, from sending to delivery and to PUBACK; 0 means that none was measured."""

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
    """Processor time of the broker during the load, in seconds. The caller, which knows the broker's process, sets it."""

    def missing(self, load: Load) -> int:
        """Return how many messages were not sent (with QoS > 0: not acknowledged) or not delivered before the end."""
        return self.msgs - (self.acked if load.qos else self.sent) + self.expected - self.delivered


def compile_load() -> Path:
    """Compile mqload unless this version is in the cache, and return its path.

    The cache is `$XDG_CACHE_HOME/penstock`, or `~/.cache/penstock`.

    Raises:
        LoadUnavailable: there is no C compiler, or the compiler failed.
    """
    source = SOURCE.read_bytes()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "penstock")
    binary = cache / f"mqload-{hashlib.sha256(source).hexdigest()[:16]}"
    if binary.exists():
        return binary
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise LoadUnavailable("The load generator needs a C compiler (apt-get install gcc libc6-dev).")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as directory:
        made = Path(directory, "mqload")
        compiled = subprocess.run([compiler, "-O2", "-o", made, SOURCE], capture_output=True, text=True, check=False)
        if compiled.returncode != 0:
            raise LoadUnavailable(f"{compiler} can't compile {SOURCE}, which needs epoll of Linux:\n{compiled.stderr}")
        made.replace(binary)  # atomically, because another run may use it
    return binary


def run_load(host: str, port: int, load: Load) -> Result:
    """Put a load on the broker at `host`, an IPv4 address, and return the result.

    Raises:
        LoadUnavailable, LoadFailed
    """
    with start_load(host, port, load) as running:
        return running.result()


class RunningLoad:
    """A load in progress. `start_load` creates it."""

    def __init__(self, process: subprocess.Popen[bytes], load: Load) -> None:
        self._process = process
        self._timeout_s = CONNECT_S_MAX + load.timeout + 30

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def result(self) -> Result:
        """Wait for the result: until the end of the load, or if it holds its connections, until all are accepted.

        Raises:
            LoadFailed
        """
        assert self._process.stdout is not None
        is_readable, _, _ = select.select([self._process.stdout], [], [], self._timeout_s)
        line = self._process.stdout.readline() if is_readable else b""
        if not line:
            self._process.kill()
            _, errors = self._process.communicate()
            what = f"status {self._process.returncode}" if is_readable else f"no result within {self._timeout_s} s"
            assert isinstance(self._process.args, list)
            raise LoadFailed(f"{' '.join(self._process.args)} ended with {what}: {errors.decode(errors='replace').strip()}")
        fields = orjson.loads(line)
        for name in ("latency_us", "ack_us"):
            for quantile, value in fields.pop(name).items():
                fields[f"{name}_{quantile}"] = value
        return Result(**fields)


@contextmanager
def start_load(host: str, port: int, load: Load) -> Iterator[RunningLoad]:
    """Start a load, and end it at the end of the context.

    Raises:
        LoadUnavailable
    """
    options = [f"{name}={value}" for name, value in asdict(load).items()]
    command = [str(compile_load()), host, str(port), *options]
    # A load that holds its connections ends when its standard input is closed.
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            yield RunningLoad(process, load)
        except BaseException:
            process.kill()
            raise
