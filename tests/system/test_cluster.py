"""A cluster of three nodes as processes, with etcd: it goes on when one of them is killed, and nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from penstock import Client as PopClient
from penstock.gateway.protocol.encode import encode_publish
from penstock.gateway.protocol.packets import PUBACK
from tests.gateway.packet_cases import connect
from tests.gateway.wire import Client
from tests.system.clusternodes import ClusterNode, ClusterOfNodes, cluster_of_nodes
from tests.system.processes import run_penstock
from tests.waiting import WAIT_S_MAX

pytestmark = pytest.mark.nightly

WINDOW = 50


async def publish(node: ClusterNode, first: int, acked: set[int], until: asyncio.Event) -> int:
    """Publish numbered messages at a node until the connection ends or `until` is set. Return the next number."""
    number = first
    try:
        client = Client(*await asyncio.open_connection("127.0.0.1", node.ports["mqtt"]))
        await client.send(connect(2, b"publisher"))
        assert await client.receive()
        while not until.is_set():
            sent = range(number, number + WINDOW)
            number += WINDOW
            await client.send(*(encode_publish(b"plant/%d" % (n % 7), b"%d" % n, 1, packet_id=1 + n % WINDOW) for n in sent))
            for n in sent:
                packet = await client.receive()
                if not packet:
                    return number
                assert packet == (PUBACK, 1 + n % WINDOW)
                acked.add(n)
    except ConnectionError:
        pass
    return number


async def consumed(cluster: ClusterOfNodes, wanted: set[int]) -> None:
    """Return when a group has got all wanted messages."""
    leader, got = await cluster.leader(), set[int]()
    async with PopClient(f"127.0.0.1:{leader.ports['pop']}") as pop, asyncio.timeout(WAIT_S_MAX):
        while not wanted <= got:
            messages = await pop.pop("plant/#", group="audit", start="earliest", wait=1.0)
            got |= {int(each.body) for each in messages}
            await pop.ack([each.handle for each in messages], group="audit")


async def test_nothing_acknowledged_is_lost_when_leaders_are_killed(tmp_path: Path) -> None:
    with cluster_of_nodes(tmp_path) as cluster:
        await cluster.in_sync(3)
        acked: set[int] = set()
        number = 0
        for _ in range(3):
            leader = await cluster.leader()
            publishing = asyncio.create_task(publish(leader, number, acked, asyncio.Event()))
            await asyncio.sleep(0.5)
            leader.kill()
            number = await publishing
            done = asyncio.Event()
            successor = await cluster.leader()
            assert successor is not leader
            before = len(acked)
            publishing = asyncio.create_task(publish(successor, number, acked, done))
            await asyncio.sleep(0.3)
            done.set()
            number = await publishing
            assert len(acked) > before
            leader.start()
            await cluster.in_sync(3)
        await consumed(cluster, acked)


async def test_a_cluster_is_shown_and_made_once(tmp_path: Path) -> None:
    with cluster_of_nodes(tmp_path) as cluster:
        await cluster.in_sync(3)
        status = cluster.status()
        assert (status["cluster"], status["required"], len(status["members"])) == ("test", 2, 3)
        assert set(status["alive"]) == set(status["members"])
        text = run_penstock("cluster", "status", "--config", str(cluster.nodes[0].config)).stdout
        assert text.count(" yes ") >= 6
        assert text.count("leader") == 1
        follower = (await cluster.followers())[0]
        follower.stop()
        refused = run_penstock("cluster", "create", "--config", str(follower.config))
        assert refused.returncode == 1
        assert "exists already" in refused.stderr


async def test_a_follower_that_stops_and_one_that_starts_again_do_not_disturb(tmp_path: Path) -> None:
    with cluster_of_nodes(tmp_path) as cluster:
        await cluster.in_sync(3)
        leader = await cluster.leader()
        follower = (await cluster.followers())[0]
        acked, done = set[int](), asyncio.Event()
        publishing = asyncio.create_task(publish(leader, 0, acked, done))
        assert follower.stop() == 0
        await asyncio.sleep(1.5)
        follower.start()
        await cluster.in_sync(3)
        done.set()
        await publishing
        assert await cluster.leader() is leader
        await consumed(cluster, acked)


async def test_a_leader_that_is_stopped_hands_over(tmp_path: Path) -> None:
    with cluster_of_nodes(tmp_path) as cluster:
        await cluster.in_sync(3)
        acked: set[int] = set()
        leader = await cluster.leader()
        publishing = asyncio.create_task(publish(leader, 0, acked, asyncio.Event()))
        await asyncio.sleep(0.3)
        assert leader.stop() == 0
        await publishing
        assert "replica.handed_over" in leader.log.read_text()
        assert await cluster.leader() is not leader
        await consumed(cluster, acked)


async def test_a_leader_that_was_paused_follows_the_next_one(tmp_path: Path) -> None:
    with cluster_of_nodes(tmp_path) as cluster:
        await cluster.in_sync(3)
        acked: set[int] = set()
        paused = await cluster.leader()
        publishing = asyncio.create_task(publish(paused, 0, acked, asyncio.Event()))
        await asyncio.sleep(0.3)
        paused.signal(signal.SIGSTOP)
        others = [node for node in cluster.nodes if node is not paused]
        async with asyncio.timeout(60):
            while not any([(await node.state()).get("ready") for node in others]):  # noqa: ASYNC110 - nobody tells of it
                await asyncio.sleep(0.01)
        paused.signal(signal.SIGCONT)
        await publishing
        await cluster.in_sync(3)
        assert paused.is_running, "it has started again in place"
        assert (await paused.state())["replication"]["role"] == "following"
        await consumed(cluster, acked)


async def test_a_replica_that_is_not_in_sync_leads_by_command_alone(tmp_path: Path) -> None:
    with cluster_of_nodes(tmp_path) as cluster:
        await cluster.in_sync(3)
        leader = await cluster.leader()
        behind, other = await cluster.followers()
        acked: set[int] = set()
        await publish_for(leader, 0, acked, 0.3)
        behind.kill()
        await cluster.in_sync(2)
        await publish_for(leader, 100_000, acked, 0.3)
        for node in (other, leader):
            node.kill()
        behind.start()
        name = await until_alone(cluster, behind)

        def promote(*arguments: str) -> subprocess.CompletedProcess[str]:
            return run_penstock("cluster", "promote", "--config", str(behind.config), *arguments)

        for arguments, why in (
            (("--replica", "0" * 16, "--lossy"), "is alive; start its node first"),
            (("--replica", "x", "--lossy"), "16 hexadecimal digits"),
            (("--replica", name), "may lack messages"),
        ):
            refused = promote(*arguments)
            assert (refused.returncode, why in refused.stderr) == (1, True), refused.stderr
        assert not (await behind.state()).get("ready")
        promoted = promote("--replica", name, "--lossy")
        assert promoted.returncode == 0, promoted.stderr
        assert "What replicas had beyond that is lost" in promoted.stdout

        shutil.rmtree(other.data_dir)  # as that of a machine that is lost
        other.start()  # two replicas are required
        assert await cluster.leader() is behind
        await cluster.in_sync(2)
        again: set[int] = set()
        await publish_for(behind, 200_000, again, 0.3)
        assert again
        await consumed(cluster, {each for each in acked if each < 100_000} | again)
        refused = promote("--replica", name, "--lossy")
        assert "leads by itself" in refused.stderr
        leader.start()  # it has what is lost
        await cluster.in_sync(3)
        assert "the log is cut" in leader.log.read_text()


async def test_the_leader_hands_over_to_the_replica_that_an_operator_names(tmp_path: Path) -> None:
    with cluster_of_nodes(tmp_path) as cluster:
        await cluster.in_sync(3)
        leader = await cluster.leader()
        chosen = (await cluster.followers())[1]
        name = (await chosen.state())["replication"]["replica"]
        acked: set[int] = set()
        publishing = asyncio.create_task(publish(leader, 0, acked, asyncio.Event()))
        await asyncio.sleep(0.3)

        def move(node: ClusterNode, *arguments: str) -> subprocess.CompletedProcess[str]:
            return run_penstock("cluster", "move", "--config", str(node.config), *arguments)

        refused = await asyncio.to_thread(move, chosen)
        assert (refused.returncode, "does not lead" in refused.stderr) == (1, True), refused.stderr
        refused = await asyncio.to_thread(move, leader, "--replica", "f" * 16)
        assert (refused.returncode, "in sync and connected" in refused.stderr) == (1, True), refused.stderr
        moved = await asyncio.to_thread(move, leader, "--replica", name)
        assert moved.returncode == 0, moved.stderr
        assert moved.stdout.startswith(f"{name} leads")
        await publishing
        assert await cluster.leader() is chosen
        await cluster.in_sync(3)
        assert leader.is_running
        assert acked
        await consumed(cluster, acked)


async def publish_for(node: ClusterNode, first: int, acked: set[int], seconds: float) -> None:
    done = asyncio.Event()
    publishing = asyncio.create_task(publish(node, first, acked, done))
    await asyncio.sleep(seconds)
    done.set()
    await publishing


async def until_alone(cluster: ClusterOfNodes, node: ClusterNode) -> str:
    """Return the id of a node that is not in sync, once it alone is alive."""
    async with asyncio.timeout(WAIT_S_MAX):
        while True:
            name = (await node.state()).get("replication", {}).get("replica")
            found = cluster.status()
            if list(found["alive"]) == [name]:
                assert name not in found["members"]
                return str(name)
            await asyncio.sleep(0.1)
