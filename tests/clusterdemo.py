"""`make cluster`: three nodes and etcd on this machine, to try them out.

`make cluster-demo`: kill the node that leads again and again while a fleet of devices publishes at QoS 1, and compare what was
acknowledged with what a group of consumers gets at the end. The exit status is 1 if anything is missing.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from penstock import Client as PopClient
from penstock.gateway.protocol.encode import encode_publish
from penstock.gateway.protocol.packets import PUBACK
from tests.gateway.packet_cases import connect
from tests.gateway.wire import Client
from tests.system.clusternodes import ClusterNode, ClusterOfNodes, cluster_of_nodes

NODES: Final = 3
PERIOD_S: Final = 0.2
"""Time between two messages of a device, if each is acknowledged at once."""
ANSWER_S: Final = 10.0
"""After this time without an answer a device connects again, elsewhere."""
RETRY_S: Final = 0.2
STEADY_S: Final = 3.0
"""Seconds for which the fleet publishes before each kill, while all replicas are in sync."""
DOWN_S: Final = 2.0
"""Seconds after which a node that was killed starts again."""
AUDIT_S: Final = 60.0
"""After this time without a message the consumers give up."""


@dataclass(slots=True)
class Fleet:
    """What devices know."""

    acked: dict[int, int] = field(default_factory=dict)
    """How many messages of each device were acknowledged. They are numbered from 0, and sent one after the other."""
    last_ack_s: float = 0.0
    gap_s: float = 0.0
    """Longest time without an acknowledgement for any device, since it was last set to 0."""

    @property
    def count(self) -> int:
        """How many messages were acknowledged."""
        return sum(self.acked.values())

    def acknowledged(self, device: int) -> None:
        """Count an acknowledgement."""
        self.acked[device] += 1
        self.look()
        self.last_ack_s = time.monotonic()

    def look(self) -> None:
        """Take the time since the last acknowledgement into account."""
        self.gap_s = max(self.gap_s, time.monotonic() - self.last_ack_s)


async def device(number: int, nodes: list[ClusterNode], fleet: Fleet, chance: random.Random) -> None:
    """Publish one message after the other at any node, and send one again that was not acknowledged, until it is cancelled."""
    fleet.acked[number] = 0
    at = number
    await asyncio.sleep(chance.uniform(0, PERIOD_S))
    while True:
        port = nodes[at % len(nodes)].ports["mqtt"]
        client: Client | None = None
        try:
            async with asyncio.timeout(ANSWER_S):
                client = Client(*await asyncio.open_connection("127.0.0.1", port))
                await client.send(connect(2, b"device-%d" % number))
                is_in = bool(await client.receive())
            while is_in:
                body = b"%d %d" % (number, fleet.acked[number])
                packet_id = 1 + fleet.acked[number] % 1000
                async with asyncio.timeout(ANSWER_S):
                    await client.send(encode_publish(b"fleet/%d" % number, body, 1, packet_id=packet_id))
                    answer = await client.receive()
                if answer != (PUBACK, packet_id):
                    break
                fleet.acknowledged(number)
                await asyncio.sleep(PERIOD_S)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass
        finally:
            if client is not None:
                client.writer.transport.abort()
        at += 1
        await asyncio.sleep(chance.uniform(0, RETRY_S))


async def audit(cluster: ClusterOfNodes, fleet: Fleet, group: str = "audit") -> tuple[int, int]:
    """Read everything as a group of consumers. Return how many acknowledged messages are missing, and how many came twice."""
    missing = {(number, each) for number, count in fleet.acked.items() for each in range(count)}
    seen = set[tuple[int, int]]()
    twice = 0
    leader = await cluster.leader()
    async with PopClient(f"127.0.0.1:{leader.ports['pop']}") as pop:
        ends_s = time.monotonic() + AUDIT_S
        while missing and time.monotonic() < ends_s:
            messages = await pop.pop("fleet/#", group=group, start="earliest", wait=1.0, messages_max=100)
            for message in messages:
                number, each = map(int, message.body.split())
                twice += (number, each) in seen
                seen.add((number, each))
                missing.discard((number, each))
                ends_s = time.monotonic() + AUDIT_S
            await pop.ack([message.handle for message in messages], group=group)
    return len(missing), twice


async def demo(cluster: ClusterOfNodes, devices: int, kills: int, seed: int) -> int:
    """Run the demonstration, and return the exit status."""
    chance = random.Random(seed)
    await cluster.in_sync(NODES)
    fleet = Fleet(last_ack_s=time.monotonic())
    tasks = [asyncio.create_task(device(number, cluster.nodes, fleet, chance)) for number in range(devices)]
    print(f"{devices} devices publish at {NODES} nodes, which have etcd as coordinator. Seed {seed}.\n")
    print(f"{'kill':>4}  {'node':6} {'successor':10} {'without an acknowledgement':>27} {'acknowledged':>13}")
    gaps = []
    for number in range(1, kills + 1):
        await cluster.in_sync(NODES)
        await asyncio.sleep(STEADY_S)
        leader = await cluster.leader()
        fleet.gap_s = 0.0
        leader.kill()
        killed_s = time.monotonic()
        successor = await cluster.leader()
        while fleet.last_ack_s < killed_s + DOWN_S:  # acknowledged again, and for long enough
            await asyncio.sleep(0.05)
            fleet.look()
        gaps.append(fleet.gap_s)
        print(f"{number:>4}  {leader.name:6} {successor.name:10} {fleet.gap_s:>25.2f} s {fleet.count:>13,}", flush=True)
        leader.start()
    for task in tasks:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    for failure in ended:
        if isinstance(failure, Exception):
            raise failure
    missing, twice = await audit(cluster, fleet)
    print(f"\nacknowledged  {fleet.count:,}\nlost          {missing:,}\nsent twice    {twice:,}   (QoS 1 allows it)")
    print(f"longest time without an acknowledgement  {max(gaps, default=0.0):.2f} s")
    return 1 if missing else 0


async def run(cluster: ClusterOfNodes) -> int:
    """Tell where the nodes are, and let them run until it is cancelled."""
    await cluster.in_sync(NODES)
    leader = await cluster.leader()
    for node in cluster.nodes:
        role = "leads" if node is leader else "follows"
        places = "  ".join(f"{name} 127.0.0.1:{node.ports[name]}" for name in ("mqtt", "pop", "admin"))
        print(f"{node.name} {role:8} {places}  log {node.log}")
    print(
        f"\n.venv/bin/penstock cluster status --config {leader.config}\nCtrl-C ends all of it, and deletes the data.",
        flush=True,
    )
    await asyncio.Event().wait()
    return 0


@contextmanager
def start() -> Iterator[ClusterOfNodes]:
    """Run a new cluster in a directory that is deleted afterwards."""
    with (
        tempfile.TemporaryDirectory(prefix="penstock-cluster-") as directory,
        cluster_of_nodes(Path(directory), NODES) as cluster,
    ):
        yield cluster


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clusterdemo", description=__doc__)
    parser.add_argument("--run", action="store_true", help="Only run the nodes, until Ctrl-C.")
    parser.add_argument("--devices", type=int, default=200, help="Devices that publish (200).")
    parser.add_argument("--kills", type=int, default=5, help="How often the leader is killed (5).")
    parser.add_argument("--seed", type=int, default=1, help="Decides when devices begin and come back (1).")
    options = parser.parse_args()
    if shutil.which("etcd") is None:
        print("etcd is not installed: apt-get install etcd-server", file=sys.stderr)
        return 2
    with suppress(KeyboardInterrupt), start() as cluster:
        work = run(cluster) if options.run else demo(cluster, options.devices, options.kills, options.seed)
        return asyncio.run(work)
    return 130


if __name__ == "__main__":
    sys.exit(main())
