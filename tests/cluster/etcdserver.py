"""A cluster of etcd for tests."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

HEARTBEAT_MS, ELECTION_MS = 50, 500
"""As documented for a local network. An etcd with these grants leases of 1 s."""
READY_S_MAX = 60.0


def free_port() -> int:
    """Return a port on which nothing listens now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class EtcdMember:
    """A process of etcd."""

    def __init__(self, number: int, directory: Path, scheme: str) -> None:
        self.name = f"m{number}"
        self.client, self.peer = free_port(), free_port()
        self.endpoint = f"127.0.0.1:{self.client}"
        self.url = f"{scheme}://{self.endpoint}"
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._arguments: list[str] = []

    def start(self, arguments: list[str]) -> None:
        """Start the process, with the arguments of the last start if there are none now."""
        self._arguments = arguments or self._arguments
        with (self._directory / f"{self.name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                ["etcd", "--name", self.name, "--data-dir", str(self._directory / self.name), *self._arguments],
                stdout=log,
                stderr=log,
                env={**os.environ, "GOMAXPROCS": "2"},
            )

    def kill(self) -> None:
        """End the process as a power cut does."""
        self.signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait()
        self._process = None

    def signal(self, number: signal.Signals) -> None:
        """Send the process a signal: SIGSTOP pauses it, SIGCONT lets it go on."""
        assert self._process is not None
        self._process.send_signal(number)

    @property
    def is_up(self) -> bool:
        """Whether the process was started and not killed."""
        return self._process is not None


class EtcdServers:
    """Members of a cluster.

    Parameters:
        directory: for data and logs.
        count: number of members.
        files: PEM files for TLS, by etcd's names of options.
    """

    def __init__(self, directory: Path, count: int, files: dict[str, Path] | None = None) -> None:
        scheme = "https" if files else "http"
        self.members = [EtcdMember(number, directory, scheme) for number in range(count)]
        peers = ",".join(f"{each.name}=http://127.0.0.1:{each.peer}" for each in self.members)
        for member in self.members:
            peer = f"http://127.0.0.1:{member.peer}"
            member.start(
                [
                    f"--listen-client-urls={member.url}",
                    f"--advertise-client-urls={member.url}",
                    f"--listen-peer-urls={peer}",
                    f"--initial-advertise-peer-urls={peer}",
                    f"--initial-cluster={peers}",
                    f"--heartbeat-interval={HEARTBEAT_MS}",
                    f"--election-timeout={ELECTION_MS}",
                    "--logger=zap",
                    *(["--client-cert-auth"] if files and "trusted-ca-file" in files else []),
                    *(f"--{name}={path}" for name, path in (files or {}).items()),
                ]
            )

    @property
    def endpoints(self) -> tuple[str, ...]:
        """`HOST:PORT` of all members."""
        return tuple(each.endpoint for each in self.members)

    def call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Call etcd over its JSON gateway, and return the answer. It waits until etcd is ready."""
        ends_s = time.monotonic() + READY_S_MAX
        while True:
            try:
                answer = httpx.post(f"{self.members[0].url}/v3/{path}", json=body, timeout=5.0)
                found: dict[str, Any] = answer.json()
                if answer.status_code == 200:
                    return found
                problem = str(found)
            except (httpx.HTTPError, ValueError) as error:
                problem = repr(error)
            assert time.monotonic() < ends_s, f"etcd is not ready: {problem}"
            time.sleep(0.02)

    def stop(self) -> None:
        """Kill all processes."""
        for member in self.members:
            if member.is_up:
                member.signal(signal.SIGCONT)
                member.kill()


@contextmanager
def etcd_servers(count: int = 1, files: dict[str, Path] | None = None) -> Iterator[EtcdServers]:
    """Run a cluster with data in memory. Skip where etcd is not installed."""
    if shutil.which("etcd") is None:
        pytest.skip("etcd is not installed: apt-get install etcd-server")
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="etcd-", dir=memory) as directory:
        servers = EtcdServers(Path(directory), count, files)
        try:
            yield servers
        finally:
            servers.stop()
