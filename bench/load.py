"""The load: `mqload.c`, compiled once per version of its source, run once per measurement."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
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
    timeout: int = 60


@dataclass(frozen=True, slots=True)
class Result:
    """What mqload measured. Latencies are from sending to delivery, in us; 0 without subscribers."""

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

    def missing(self, load: Load) -> int:
        """Return how many messages were not sent (QoS > 0: not acknowledged) or not delivered before the end."""
        return self.msgs - (self.acked if load.qos else self.sent) + self.expected - self.delivered


def compile_load() -> Path:
    """Compile mqload if this version of it isn't in the cache yet, and return its path.

    The cache is `$XDG_CACHE_HOME/millrace`, or `~/.cache/millrace`.

    Raises:
        LoadUnavailable: there is no C compiler, or it failed.
    """
    source = SOURCE.read_bytes()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "millrace")
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
    options = [f"{name}={value}" for name, value in asdict(load).items()]
    command = [str(compile_load()), host, str(port), *options]
    try:
        done = subprocess.run(command, capture_output=True, timeout=CONNECT_S_MAX + load.timeout + 30, check=False)
    except subprocess.TimeoutExpired as error:
        raise LoadFailed(f"{' '.join(command)} did not end in {error.timeout:.0f} s") from None
    if done.returncode != 0:
        raise LoadFailed(
            f"{' '.join(command)} ended with status {done.returncode}: {done.stderr.decode(errors='replace').strip()}"
        )
    fields = orjson.loads(done.stdout)
    for quantile, value in fields.pop("latency_us").items():
        fields[f"latency_us_{quantile}"] = value
    return Result(**fields)
