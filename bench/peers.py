"""The brokers that the benchmarks measure. Each runs as a process on free ports, and stops at the end of its context.

Their promises differ. Penstock acknowledges after fdatasync. mosquitto keeps messages in memory. nats-server writes messages of
QoS 1 to the files of JetStream, and syncs these every two minutes. Redis syncs every second (`appendfsync everysec`).
beanstalkd with `-f 0` syncs each job before it answers INSERTED, so it promises the same as Penstock.
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
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from bench.trees import THIS, Tree

OURS = "Penstock"

READY_S_MAX = 30.0
"""Seconds that a broker has to become ready before it counts as failed."""

STOP_S_MAX = 30.0
"""Seconds that a broker has to end after SIGTERM."""

PROGRAM_DIRECTORIES = ("/usr/sbin", "/usr/local/sbin", "/opt/homebrew/sbin", str(Path.home() / "go/bin"))
"""Directories where packages and `go install` put programs, which are often not on the PATH of a user."""

MOSQUITTO_CONFIG = """\
listener {port} 127.0.0.1
allow_anonymous true
# Keep messages in memory, which is the default.
persistence false
log_type none
"""

MOSQUITTO_UNBOUNDED = """\
# Remove the limits above which mosquitto drops messages of a slow subscriber: the benchmark compares deliveries, not drops.
# 0 means unlimited.
max_inflight_messages 0
max_queued_messages 0
"""

NATS_CONFIG = """\
listen: "127.0.0.1:{port}"
# MQTT needs a server name, and JetStream for QoS 1 and 2.
server_name: bench
jetstream {{ store_dir: "{directory}" }}
mqtt {{ listen: "127.0.0.1:{mqtt_port}" }}
"""


class NotInstalled(Exception):
    """Raised when a broker is not installed. The message says how to install it."""


class BrokerFailed(Exception):
    """Raised when a broker does not start, or does not end with status 0. The message ends with the broker's stderr."""


@dataclass(frozen=True, slots=True)
class BrokerProcess:
    """A running broker."""

    name: str
    pid: int
    host: str
    port: int
    """Port of its listener. For Penstock it is the port of the MQTT listener."""
    addresses: dict[str, str]
    """Addresses in Penstock's `ready` line, by listener: `{"mqtt": "127.0.0.1:1883", ...}`. Of nats-server, that of its own
    protocol. Empty for other brokers."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a process in KiB."""

    resident: int
    anonymous: int
    """Resident memory that isn't a page of a file. The pages of a mapped log are cache that the kernel can drop."""


def memory_of(pid: int) -> Memory:
    """Return the memory of a process and its children."""
    resident = anonymous = 0
    for each in _with_children(pid):
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{each}/status").read_text().splitlines())
        resident += int(fields["VmRSS"].split()[0])
        anonymous += int(fields["RssAnon"].split()[0])
    return Memory(resident, anonymous)


def processor_s(pid: int) -> float:
    """Return the processor time of a process and its children in seconds, user and system time together."""
    # The number of a process's clock, as clock_getcpuclockid(3) makes it. /proc/PID/stat counts in steps of 10 ms.
    return sum(time.clock_gettime(~each << 3 | 2) for each in _with_children(pid))


def _with_children(pid: int) -> list[int]:
    """Return a process and its children. A node syncs its log in a child process."""
    found = [pid]
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has just ended
            found += map(int, path.read_text().split())
    return found


def path_of(program: str) -> str:
    """Return the path of a broker's program. Its package has the same name.

    Raises:
        NotInstalled: the program does not exist.
    """
    paths = paths_of(program)
    if not paths:
        raise NotInstalled(f"{program} is not installed (apt-get install {program})")
    return paths[0]


def paths_of(program: str) -> list[str]:
    """Return all paths of a broker's program: those on the PATH first."""
    places = (os.get_exec_path(), PROGRAM_DIRECTORIES)
    found = [shutil.which(program, path=directory) for directories in places for directory in directories]
    return list(dict.fromkeys(path for path in found if path is not None))


@contextmanager
def mosquitto(*, bounded: bool = False) -> Iterator[BrokerProcess]:
    """Run mosquitto without its limits on queued messages, or with the default limits if `bounded` is set.

    Raises:
        NotInstalled, BrokerFailed
    """
    path, port = path_of("mosquitto"), _free_port()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        config = Path(name, "mosquitto.conf")
        config.write_text(MOSQUITTO_CONFIG.format(port=port) + ("" if bounded else MOSQUITTO_UNBOUNDED))
        with _server("mosquitto", [path, "-c", str(config)], port, Path(name)) as peer:
            yield peer


@contextmanager
def floor() -> Iterator[BrokerProcess]:
    """Run the server of `bench.floor`, which stores nothing.

    Raises:
        BrokerFailed
    """
    port = _free_port()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        command = [sys.executable, "-m", "bench.floor", str(port)]
        with _server("floor", command, port, Path(name), ends=(-signal.SIGTERM,)) as peer:
            yield peer


@contextmanager
def nats_server(data_dir: Path, program: str = "") -> Iterator[BrokerProcess]:
    """Run nats-server with JetStream on `data_dir`. The port is that of its MQTT listener. It may be killed.

    Args:
        data_dir: has its files.
        program: path of the program; by default the first one that is found.

    Raises:
        NotInstalled, BrokerFailed
    """
    path, port, own_port = program or path_of("nats-server"), _free_port(), _free_port()
    config = data_dir / "nats.conf"
    config.write_text(NATS_CONFIG.format(port=own_port, mqtt_port=port, directory=data_dir.resolve() / "jetstream"))
    # nats-server ends with status 1 after SIGTERM.
    with _server("nats-server", [path, "-c", str(config)], port, data_dir, ends=(0, 1, -signal.SIGKILL)) as peer:
        yield replace(peer, addresses={"nats": f"127.0.0.1:{own_port}"})


@contextmanager
def redis_server(data_dir: Path) -> Iterator[BrokerProcess]:
    """Run redis-server on `data_dir` with an append-only file, which it syncs once a second. It may be killed.

    Raises:
        NotInstalled, BrokerFailed
    """
    path, port = path_of("redis-server"), _free_port()
    words = f"--port {port} --bind 127.0.0.1 --appendonly yes --appendfsync everysec".split()
    command = [path, *words, "--save", "", "--dir", str(data_dir.resolve()), "--loglevel", "warning"]
    with _server("Redis", command, port, data_dir, ends=(0, -signal.SIGKILL)) as peer:
        yield peer


@contextmanager
def beanstalkd(data_dir: Path) -> Iterator[BrokerProcess]:
    """Run beanstalkd with its binlog in `data_dir`, which it syncs at every write.

    Raises:
        NotInstalled, BrokerFailed
    """
    path, port = path_of("beanstalkd"), _free_port()
    command = [path, "-l", "127.0.0.1", "-p", str(port), "-b", str(data_dir.resolve()), "-f", "0"]
    with _server("beanstalkd", command, port, data_dir, ends=(0, -signal.SIGTERM)) as peer:
        yield peer


@contextmanager
def _server(
    name: str, command: Sequence[str], port: int, directory: Path, ends: Collection[int] = (0,)
) -> Iterator[BrokerProcess]:
    with _process(command, directory, ends) as process:
        _wait_for_port(process, port, directory)
        yield BrokerProcess(name, process.pid, "127.0.0.1", port, {})


@contextmanager
def penstock(data_dir: Path, *options: str, tree: Tree = THIS, crowd: int = 0) -> Iterator[BrokerProcess]:
    """Run a tree's node on `data_dir` with listeners on free ports and more `options` of `penstock serve`. It may be killed.

    With a crowd, it is a node of this tree whose registry has so many clients that are not connected.

    Raises:
        BrokerFailed
    """
    listeners = [word for name in ("mqtt", "pop", "admin") for word in (f"--{name}", "127.0.0.1:0")]
    penstock_command = tree.command if not crowd else [sys.executable, "-m", "bench.crowd", str(crowd)]
    command = [*penstock_command, "serve", "--data-dir", str(data_dir.resolve()), *listeners, *options]
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory,
        _process(command, Path(directory), (0, -signal.SIGKILL), tree) as process,
    ):
        addresses = _read_ready_line(process, Path(directory))
        host, _, port = addresses["mqtt"].rpartition(":")
        yield BrokerProcess(OURS, process.pid, host, int(port), addresses)


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
            raise _failed(process, directory, f"did not end within {STOP_S_MAX:.0f} s of SIGTERM.") from None
        if status not in ends:
            raise _failed(process, directory, f"ended with status {status}.")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        process.stdout.close()


def _failed(process: subprocess.Popen[bytes], directory: Path, what: str) -> BrokerFailed:
    """Return the error for a process, with the last lines of its stderr. `what` completes the sentence."""
    lines = (directory / "stderr").read_text(errors="replace").splitlines()[-20:]
    assert isinstance(process.args, list)
    return BrokerFailed("\n".join([f"{' '.join(process.args)} {what}", *lines]))


def _read_ready_line(process: subprocess.Popen[bytes], directory: Path) -> dict[str, str]:
    """Wait for the line `ready mqtt=HOST:PORT ... data=PATH`, and return its addresses by listener."""
    assert process.stdout is not None
    end_s = time.monotonic() + READY_S_MAX
    read = b""
    while b"\n" not in read:
        is_readable, _, _ = select.select([process.stdout], [], [], max(0.0, end_s - time.monotonic()))
        if not is_readable:
            raise _failed(process, directory, f"was not ready within {READY_S_MAX:.0f} s.")
        part = os.read(process.stdout.fileno(), 4096)
        if not part:
            raise _failed(process, directory, "ended before it was ready.")
        read += part
    line = read.split(b"\n", 1)[0].decode()
    if not line.startswith("ready "):
        raise _failed(process, directory, f"printed {line!r} in place of its ready line.")
    listeners, _, _ = line.removeprefix("ready ").partition(" data=")  # a path may hold spaces, an address may not
    return dict(field.split("=", 1) for field in listeners.split(" "))


def _wait_for_port(process: subprocess.Popen[bytes], port: int, directory: Path) -> None:
    end_s = time.monotonic() + READY_S_MAX
    while time.monotonic() < end_s:
        if process.poll() is not None:
            raise _failed(process, directory, f"ended with status {process.returncode} before it was ready.")
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
        except OSError:
            time.sleep(0.02)  # mosquitto does not report that it listens
        else:
            return
    raise _failed(process, directory, f"was not ready within {READY_S_MAX:.0f} s.")


def _free_port() -> int:
    """Return a port that is free now, for brokers that can't pick a free port themselves."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
