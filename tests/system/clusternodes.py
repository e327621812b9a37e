"""Nodes of a cluster as processes, with an etcd."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from tests.cluster.etcdserver import EtcdServers, etcd_servers, free_port
from tests.system.processes import ROOT, STOP_S, run_penstock
from tests.waiting import WAIT_S_MAX

CLUSTER = "test"


class ClusterNode:
    """`penstock serve` with a section [replication], on ports of its own that stay the same."""

    def __init__(self, directory: Path, name: str, etcd: EtcdServers, more: str = "") -> None:
        directory.mkdir(exist_ok=True)
        self.name = name
        self.data_dir = directory / name
        self.config = directory / f"{name}.toml"
        self.log = directory / f"{name}.log"
        self.ports = {each: free_port() for each in ("mqtt", "pop", "admin", "replication")}
        listen = {each: f"127.0.0.1:{port}" for each, port in self.ports.items()}
        self.config.write_text(
            f"data_dir = {json.dumps(str(self.data_dir))}\n"
            f'[mqtt]\nlisten = "{listen["mqtt"]}"\n[pop]\nlisten = "{listen["pop"]}"\n[admin]\nlisten = "{listen["admin"]}"\n'
            f'[replication]\ncluster = "{CLUSTER}"\ncoordinator = {json.dumps(etcd.endpoints)}\n'
            f'listen = "{listen["replication"]}"\n{more}'
        )
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process. It may lead or follow."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "penstock", "serve", "--config", str(self.config)],
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )

    def signal(self, number: signal.Signals) -> None:
        """Send the process a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """End the process with SIGKILL."""
        self.signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait(STOP_S)
        self._process = None

    def stop(self) -> int:
        """End the process with SIGTERM, and return its exit status."""
        self.signal(signal.SIGTERM)
        assert self._process is not None
        status = self._process.wait(STOP_S)
        self._process = None
        return status

    @property
    def is_up(self) -> bool:
        """Whether it was started, and neither killed nor stopped."""
        return self._process is not None

    @property
    def is_running(self) -> bool:
        """Whether the process that was started has not ended."""
        return self._process is not None and self._process.poll() is None

    async def state(self) -> dict[str, Any]:
        """Return what its admin listener says of it; nothing if it does not answer."""
        with suppress(httpx.HTTPError):
            async with httpx.AsyncClient(timeout=1.0) as http:
                answer = await http.get(f"http://127.0.0.1:{self.ports['admin']}/api/v1/state")
                found: dict[str, Any] = answer.json()
                return found
        return {}


class ClusterOfNodes:
    """The nodes of a cluster."""

    def __init__(self, directory: Path, etcd: EtcdServers, count: int, required: int, more: Callable[[str], str]) -> None:
        self.etcd = etcd
        names = [f"node{number}" for number in range(1, count + 1)]
        self.nodes = [ClusterNode(directory, name, etcd, more(name)) for name in names]
        etcd.call("maintenance/status", {})
        created = run_penstock("cluster", "create", "--config", str(self.nodes[0].config), "--required", str(required))
        assert created.returncode == 0, created.stderr
        for node in self.nodes:
            node.start()

    def status(self) -> dict[str, Any]:
        """Return what `penstock cluster status` prints."""
        found = run_penstock("cluster", "status", "--config", str(self.nodes[0].config), "--json")
        assert found.returncode == 0, found.stderr
        status: dict[str, Any] = json.loads(found.stdout)
        return status

    async def leader(self) -> ClusterNode:
        """Return the node that serves clients."""
        async with asyncio.timeout(WAIT_S_MAX):
            while True:
                for node in self.nodes:
                    if node.is_up and (await node.state()).get("ready"):
                        return node
                await asyncio.sleep(0.01)

    async def in_sync(self, count: int) -> None:
        """Return when so many replicas are in sync."""
        async with asyncio.timeout(WAIT_S_MAX):
            while len(await self.members()) != count:  # noqa: ASYNC110 - nodes tell nobody of it
                await asyncio.sleep(0.02)

    async def members(self) -> list[str]:
        """Return the replicas that are in sync, as the leader says."""
        leader = await self.leader()
        members: list[str] = (await leader.state()).get("replication", {}).get("members", [])
        return members

    async def followers(self) -> list[ClusterNode]:
        """Return the nodes that run and do not serve clients."""
        leader = await self.leader()
        return [node for node in self.nodes if node.is_up and node is not leader]

    def logs(self) -> str:
        """Return the logs of all nodes."""
        return "\n".join(f"--- {node.name}\n{node.log.read_text()}" for node in self.nodes if node.log.exists())


@contextmanager
def cluster_of_nodes(
    directory: Path, count: int = 3, required: int = 2, more: Callable[[str], str] = lambda _: ""
) -> Iterator[ClusterOfNodes]:
    """Run a new cluster. Skip where etcd is not installed.

    Args:
        directory: of the test.
        count: of nodes.
        required: see `penstock cluster create`.
        more: returns further lines of a node's configuration by its name. They begin in the section [replication].
    """
    with etcd_servers() as etcd:
        cluster = ClusterOfNodes(directory, etcd, count, required, more)
        try:
            yield cluster
        except BaseException:
            print(cluster.logs())
            raise
        finally:
            for node in cluster.nodes:
                if node.is_up:
                    with suppress(ProcessLookupError):
                        node.signal(signal.SIGCONT)
                    node.kill()
