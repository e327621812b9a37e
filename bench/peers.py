"""The brokers that are measured: started as processes on free ports, stopped at the end.

They don't promise the same. Penstock acknowledges after fdatasync. mosquitto keeps messages in memory. nats-server writes MQTT
messages of QoS 1 to JetStream's files and syncs those every two minutes. Redis syncs every second (`appendfsync everysec`).
beanstalkd with `-f 0` syncs each job before it says INSERTED, and so promises what Penstock does.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.trees import THIS, Tree

OURS = "Penstock"

READY_S_MAX = 30.0
"""Seconds until a broker that doesn't say that it is ready counts as failed."""

STOP_S_MAX = 30.0
"""Seconds that a broker has between SIGTERM and its end."""

PROGRAM_DIRECTORIES = ("/usr/sbin", "/usr/local/sbin", "/opt/homebrew/sbin")
"""Where packages put daemons: often not in the PATH of a user."""

MOSQUITTO_CONFIG = """\
listener {port} 127.0.0.1
allow_anonymous true
# In memory, as it runs by default.
persistence false
log_type none
"""

MOSQUITTO_UNBOUNDED = """\
# Without the bounds at which it drops messages for a slow subscriber: what it delivers is to be compared, not what it drops.
# 0 is unlimited.
max_inflight_messages 0
max_queued_messages 0
"""

NATS_CONFIG = """\
listen: "127.0.0.1:{port}"
# MQTT there needs a name, and JetStream for what is more than QoS 0.
server_name: bench
jetstream {{ store_dir: "{directory}" }}
mqtt {{ listen: "127.0.0.1:{mqtt_port}" }}
"""


class NotInstalled(Exception):
    """Raised when a broker is not on this machine. The message says how to get it."""


class PeerFailed(Exception):
    """Raised when a broker did not start, or did not end with status 0. The message ends with what it wrote to stderr."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A broker that runs."""

    name: str
    pid: int
    host: str
    port: int
    """Of its listener; Penstock's is that for MQTT."""
    addresses: dict[str, str]
    """What Penstock's `ready` line names, by listener: `{"mqtt": "127.0.0.1:1883", ...}`."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Of a process, in KiB."""

    resident: int
    anonymous: int
    """Of these, what isn't a page of a file: a log that is mapped is the kernel's cache, and goes when the memory is needed."""


def memory_of(pid: int) -> Memory:
    """Return how much memory a process and its children have now."""
    resident = anonymous = 0
    for each in _with_children(pid):
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{each}/status").read_text().splitlines())
        resident += int(fields["VmRSS"].split()[0])
        anonymous += int(fields["RssAnon"].split()[0])
    return Memory(resident, anonymous)


def processor_s(pid: int) -> float:
    """Return the seconds for which a process and its children had a processor, their calls of the kernel included."""
    ticks = 0
    for each in _with_children(pid):
        # The name, which may hold anything, is in brackets; behind it fields 14 and 15 of proc(5) are the 12th and 13th.
        fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _with_children(pid: int) -> list[int]:
    """Return a process and those that it has started: a node syncs its log in one."""
    children = (path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    return [pid, *(int(child) for found in children for child in found)]


def path_of(program: str) -> str:
    """Return where a broker is. Its package has the same name.

    Raises:
        NotInstalled: it is nowhere.
    """
    path = shutil.which(program) or shutil.which(program, path=os.pathsep.join(PROGRAM_DIRECTORIES))
    if path is None:
        raise NotInstalled(f"{program} is not installed (apt-get install {program})")
    return path


@contextmanager
def mosquitto(*, bounded: bool = False) -> Iterator[Peer]:
    """Run mosquitto; `bounded`: with the bounds that it has by default, at which it drops messages.

    Raises:
        NotInstalled, PeerFailed
    """
    path, port = path_of("mosquitto"), _free_port()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        config = Path(name, "mosquitto.conf")
        config.write_text(MOSQUITTO_CONFIG.format(port=port) + ("" if bounded else MOSQUITTO_UNBOUNDED))
        with _server("mosquitto", [path, "-c", str(config)], port, Path(name)) as peer:
            yield peer


@contextmanager
def floor() -> Iterator[Peer]:
    """Run the server of `bench.floor`, which stores nothing.

    Raises:
        PeerFailed
    """
    port = _free_port()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        command = [sys.executable, "-m", "bench.floor", str(port)]
        with _server("floor", command, port, Path(name), ends=(-signal.SIGTERM,)) as peer:
            yield peer


@contextmanager
def nats_server(data_dir: Path) -> Iterator[Peer]:
    """Run nats-server with JetStream on `data_dir`; the port is that of its MQTT listener.

    Raises:
        NotInstalled, PeerFailed
    """
    path, port = path_of("nats-server"), _free_port()
    config = data_dir / "nats.conf"
    config.write_text(NATS_CONFIG.format(port=_free_port(), mqtt_port=port, directory=data_dir.resolve() / "jetstream"))
    # It ends with status 1 where SIGTERM ended it.
    with _server("nats-server", [path, "-c", str(config)], port, data_dir, ends=(0, 1)) as peer:
        yield peer


@contextmanager
def redis_server(data_dir: Path) -> Iterator[Peer]:
    """Run redis-server on `data_dir` with an append-only file that is synced once a second.

    Raises:
        NotInstalled, PeerFailed
    """
    path, port = path_of("redis-server"), _free_port()
    words = f"--port {port} --bind 127.0.0.1 --appendonly yes --appendfsync everysec".split()
    command = [path, *words, "--save", "", "--dir", str(data_dir.resolve()), "--loglevel", "warning"]
    with _server("Redis", command, port, data_dir) as peer:
        yield peer


@contextmanager
def beanstalkd(data_dir: Path) -> Iterator[Peer]:
    """Run beanstalkd with its binlog in `data_dir`, synced at every write.

    Raises:
        NotInstalled, PeerFailed
    """
    path, port = path_of("beanstalkd"), _free_port()
    command = [path, "-l", "127.0.0.1", "-p", str(port), "-b", str(data_dir.resolve()), "-f", "0"]
    with _server("beanstalkd", command, port, data_dir, ends=(0, -signal.SIGTERM)) as peer:
        yield peer


@contextmanager
def _server(name: str, command: Sequence[str], port: int, directory: Path, ends: Collection[int] = (0,)) -> Iterator[Peer]:
    with _process(command, directory, ends) as process:
        _wait_for_port(process, port, directory)
        yield Peer(name, process.pid, "127.0.0.1", port, {})


@contextmanager
def penstock(data_dir: Path, *options: str, tree: Tree = THIS) -> Iterator[Peer]:
    """Run a tree's node on `data_dir`, its listeners on free ports, with more `options` of `penstock serve`. It may be killed.

    Raises:
        PeerFailed
    """
    listeners = [word for name in ("mqtt", "pop", "admin") for word in (f"--{name}", "127.0.0.1:0")]
    command = [*tree.command, "serve", "--data-dir", str(data_dir.resolve()), *listeners, *options]
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory,
        _process(command, Path(directory), (0, -signal.SIGKILL), tree) as process,
    ):
        addresses = _read_ready_line(process, Path(directory))
        host, _, port = addresses["mqtt"].rpartition(":")
        yield Peer(OURS, process.pid, host, int(port), addresses)


# --- processes --------------------------------------------------------------------------------------------------------


@contextmanager
def _process(
    command: Sequence[str], directory: Path, ends: Collection[int], tree: Tree = THIS
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command of a tree, its stderr in a file of `directory`. End it with SIGTERM; its status must be in `ends`."""
    with (directory / "stderr").open("wb") as stderr:
        process = subprocess.Popen(
            command, cwd=tree.root, env=tree.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr
        )
    assert process.stdout is not None
    try:
        yield process
        process.terminate()
        try:
            status = process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            raise _failed(process, directory, f"did not end within {STOP_S_MAX:.0f} s of SIGTERM") from None
        if status not in ends:
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
