"""The brokers that are measured: started as processes on free ports, stopped at the end."""

from __future__ import annotations

import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]

READY_S_MAX = 30.0
"""Seconds until a broker that doesn't say that it is ready counts as failed."""

STOP_S_MAX = 30.0
"""Seconds that a broker has between SIGTERM and its end."""

MOSQUITTO_DIRECTORIES = ("/usr/sbin", "/usr/local/sbin", "/opt/homebrew/sbin")
"""Where packages put mosquitto: often not in the PATH of a user."""

MOSQUITTO_CONFIG = """\
listener {port} 127.0.0.1
allow_anonymous true
# In memory, as it runs by default, and without the bounds at which it drops messages for a slow subscriber: what it
# delivers is to be compared, not what it drops. 0 is unlimited.
persistence false
max_inflight_messages 0
max_queued_messages 0
log_type none
"""


class NotInstalled(Exception):
    """Raised when a broker is not on this machine. The message says how to get it."""


class PeerFailed(Exception):
    """Raised when a broker did not start, or did not end with status 0. The message ends with what it wrote to stderr."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A broker that runs."""

    name: str
    version: str
    pid: int
    host: str
    port: int
    """Of its MQTT listener."""
    addresses: dict[str, str]
    """What its `ready` line names, by listener: `{"mqtt": "127.0.0.1:1883", ...}`; for mosquitto, `mqtt` alone."""


def mosquitto_path() -> str:
    """Return where mosquitto is.

    Raises:
        NotInstalled: it is nowhere.
    """
    path = shutil.which("mosquitto") or shutil.which("mosquitto", path=os.pathsep.join(MOSQUITTO_DIRECTORIES))
    if path is None:
        raise NotInstalled("mosquitto is not installed (apt-get install mosquitto, or brew install mosquitto)")
    return path


@contextmanager
def mosquitto() -> Iterator[Peer]:
    """Run mosquitto with `MOSQUITTO_CONFIG` on a free port.

    Raises:
        NotInstalled, PeerFailed
    """
    path = mosquitto_path()
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as directory:
        port = _free_port()
        config = Path(directory, "mosquitto.conf")
        config.write_text(MOSQUITTO_CONFIG.format(port=port))
        with _process([path, "-c", str(config)], Path(directory)) as process:
            _wait_for_port(process, port, Path(directory))
            yield Peer("mosquitto", _mosquitto_version(path), process.pid, "127.0.0.1", port, {"mqtt": f"127.0.0.1:{port}"})


@contextmanager
def millrace(data_dir: Path, *options: str) -> Iterator[Peer]:
    """Run a node on `data_dir` with listeners on free ports, and further `options` of `millrace serve`.

    Raises:
        PeerFailed
    """
    listeners = [word for name in ("mqtt", "pop", "admin") for word in (f"--{name}", "127.0.0.1:0")]
    command = [sys.executable, "-m", "millrace", "serve", "--data-dir", str(data_dir.resolve()), *listeners, *options]
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as directory, _process(command, Path(directory)) as process:
        addresses = _read_ready_line(process, Path(directory))
        host, _, port = addresses["mqtt"].rpartition(":")
        yield Peer("Millrace", _millrace_version(), process.pid, host, int(port), addresses)


# --- processes --------------------------------------------------------------------------------------------------------


@contextmanager
def _process(command: Sequence[str], directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command, its stderr in a file of `directory`; end it with SIGTERM."""
    with (directory / "stderr").open("wb") as stderr:
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr)
    assert process.stdout is not None
    try:
        yield process
        process.terminate()
        try:
            status = process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            raise _failed(process, directory, f"did not end within {STOP_S_MAX:.0f} s of SIGTERM") from None
        if status != 0:
            raise _failed(process, directory, f"ended with status {status}")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        process.stdout.close()


def _failed(process: subprocess.Popen[bytes], directory: Path, what: str) -> PeerFailed:
    """Return the error for a process that did `what`, with the last lines that it wrote."""
    lines = (directory / "stderr").read_text(errors="replace").splitlines()[-20:]
    assert isinstance(process.args, list)
    return PeerFailed("\n".join([f"{' '.join(process.args)} {what}", *lines]))


def _read_ready_line(process: subprocess.Popen[bytes], directory: Path) -> dict[str, str]:
    """Wait for the line `ready mqtt=HOST:PORT ... data=PATH` and return the addresses in it by listener."""
    assert process.stdout is not None
    end_s = time.monotonic() + READY_S_MAX
    read = b""
    while b"\n" not in read:
        is_readable, _, _ = select.select([process.stdout], [], [], max(0.0, end_s - time.monotonic()))
        if not is_readable:
            raise _failed(process, directory, f"was not ready in {READY_S_MAX:.0f} s")
        part = os.read(process.stdout.fileno(), 4096)
        if not part:
            raise _failed(process, directory, "ended before it was ready")
        read += part
    line = read.split(b"\n", 1)[0].decode()
    if not line.startswith("ready "):
        raise _failed(process, directory, f"printed {line!r} where its ready line was expected")
    listeners, _, _ = line.removeprefix("ready ").partition(" data=")  # a path may hold spaces, an address holds none
    return dict(field.split("=", 1) for field in listeners.split(" "))


def _wait_for_port(process: subprocess.Popen[bytes], port: int, directory: Path) -> None:
    end_s = time.monotonic() + READY_S_MAX
    while time.monotonic() < end_s:
        if process.poll() is not None:
            raise _failed(process, directory, f"ended with status {process.returncode} before it was ready")
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
        except OSError:
            time.sleep(0.02)  # nothing else tells that mosquitto listens
        else:
            return
    raise _failed(process, directory, f"was not ready in {READY_S_MAX:.0f} s")


def _free_port() -> int:
    """Return a port that is free now, for a broker that can't pick one itself."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _mosquitto_version(path: str) -> str:
    """Return the version in the first line of its help: "mosquitto version 2.0.11"."""
    shown = subprocess.run([path, "-h"], capture_output=True, text=True, check=False).stdout
    return shown.partition("\n")[0].rpartition(" ")[2]


def _millrace_version() -> str:
    from millrace import __version__

    return __version__
