"""Replicas with real stores and connections: what is acknowledged, who takes over, and what a replica that comes back does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import pytest

from penstock.cluster.frames import Frame, FrameKind, FrameReader, HelloPayload, encode_frame
from penstock.store.epochs import EpochTable
from tests.cluster.members import CLUSTER, ReplicaSet, replica_set
from tests.waiting import until


async def published(found: ReplicaSet, first: int, count: int) -> list[str]:
    """Publish at the leader, and return the bodies when all are acknowledged."""
    leader, acknowledged = await found.leader(), list[str]()
    wanted = [f"{number}" for number in range(first, first + count)]
    for body in wanted:
        leader.publish(body, acknowledged)
    await until(lambda: acknowledged == wanted)
    return acknowledged


async def test_what_is_acknowledged_is_on_all_members(tmp_path: Path) -> None:
    async with replica_set(tmp_path) as found:
        await found.in_sync(3)
        sent = await published(found, 0, 2_000)
        assert len(found.followers) == 2
        for follower in found.followers:
            assert follower.bodies() == sent, "nothing is acknowledged before all members have it"
        leader = await found.leader()
        await until(lambda: all(each.store.applied == leader.store.log.end for each in found.followers))
        for follower in found.followers:
            assert follower.store.log.segments() == leader.store.log.segments()
            assert follower.secret == leader.secret


async def test_another_member_takes_over_from_a_leader_that_is_killed(tmp_path: Path) -> None:
    async with replica_set(tmp_path) as found:
        await found.in_sync(3)
        sent = await published(found, 0, 500)
        for turn in range(3):
            dead = await found.leader()
            unanswered: list[str] = []
            for number in range(50):
                dead.publish(f"late{turn}.{number}", unanswered)
            await dead.kill()
            sent += unanswered
            leader = await found.leader()
            assert leader is not dead
            assert [body for body in leader.bodies() if body in set(sent)] == sent
            sent += await published(found, 1_000 * (turn + 1), 200)
            await dead.start()
            await found.in_sync(3)
        logs = [each.bodies() for each in found.replicas]
        assert logs[0] == logs[1] == logs[2]
        assert set(sent) <= set(logs[0])


async def test_a_leader_without_enough_members_acknowledges_nothing(tmp_path: Path) -> None:
    async with replica_set(tmp_path) as found:
        await found.in_sync(3)
        leader = await found.leader()
        for follower in found.followers:
            await follower.kill()
        acknowledged: list[str] = []
        leader.publish("alone", acknowledged)
        await until(lambda: leader.store.durable_position == leader.store.log.end)
        await until(lambda: len(found.shard.key.members) == 2)
        assert (acknowledged, leader.store.committed_position < leader.store.log.end) == ([], True)
        back = next(each for each in found.replicas if not each.is_up and each.replica in found.shard.key.members)
        await back.start()
        await until(lambda: acknowledged == ["alone"])


async def test_a_member_that_is_away_leaves_the_set_and_catches_up_later(tmp_path: Path) -> None:
    async with replica_set(tmp_path) as found:
        await found.in_sync(3)
        away = found.followers[0]
        await away.kill()
        sent = await published(found, 0, 3_000)
        await until(lambda: len(found.shard.key.members) == 2)
        assert away.replica not in found.shard.key.members
        await away.start()
        await found.in_sync(3)
        assert away.bodies() == sent


async def test_two_replicas_go_on_with_one_of_them_where_one_is_enough(tmp_path: Path) -> None:
    async with replica_set(tmp_path, 2, 1) as found:
        await found.in_sync(2)
        sent = await published(found, 0, 100)
        dead = await found.leader()
        await dead.kill()
        sent += await published(found, 100, 100)
        await dead.start()
        await found.in_sync(2)
        assert dead.bodies() == sent


async def test_the_set_goes_on_without_the_coordinator(tmp_path: Path) -> None:
    async with replica_set(tmp_path) as found:
        await found.in_sync(3)
        found.shard.is_up = False
        sent = await published(found, 0, 1_000)
        assert all(follower.bodies() == sent for follower in found.followers)
        found.shard.is_up = True


async def test_a_planned_hand_over_loses_nothing(tmp_path: Path) -> None:
    async with replica_set(tmp_path) as found:
        await found.in_sync(3)
        sent = await published(found, 0, 100)
        leader = await found.leader()
        successor = found.followers[0]
        leader.member.hand_over(successor.replica)
        await until(lambda: found.shard.key.leader == successor.replica)
        sent += await published(found, 100, 100)
        await found.in_sync(3)
        assert successor.bodies() == sent
        assert len(leader.restarts) == 1


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [1, 2])
async def test_nothing_acknowledged_is_lost_while_replicas_are_killed_again_and_again(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    async with replica_set(tmp_path) as found:
        acknowledged: list[str] = []
        number = 0
        for _ in range(15):
            ends_s = asyncio.get_running_loop().time() + random.uniform(0.05, 0.6)
            while asyncio.get_running_loop().time() < ends_s:
                for leader in found.leaders:
                    for _ in range(random.randint(1, 20)):
                        leader.publish(f"{number}", acknowledged)
                        number += 1
                await asyncio.sleep(random.uniform(0, 0.01))
            victim = random.choice(found.replicas)
            if victim.is_up:
                await victim.kill()
            if random.random() < 0.8 or not any(each.is_up for each in found.replicas):
                for each in found.replicas:
                    if not each.is_up:
                        await each.start()
        for each in found.replicas:
            if not each.is_up:
                await each.start()
        await found.in_sync(3)
        logs = [each.bodies() for each in found.replicas]
        assert logs[0] == logs[1] == logs[2]
        assert len(set(logs[0])) == len(logs[0])
        assert set(acknowledged) <= set(logs[0])
        assert len(acknowledged) > 100


# --- what strangers send --------------------------------------------------------------------------------------------


async def said(found: ReplicaSet, *sent: bytes) -> list[Frame]:
    """Send bytes to the leader's listener, and return what it answers until it ends the connection."""
    leader = await found.leader()
    reader, writer = await asyncio.open_connection(leader.address.host, leader.address.port)
    for each in sent:
        writer.write(each)
    frames = FrameReader()
    answer = list(frames.feed(await asyncio.wait_for(reader.read(), 20)))
    writer.close()
    return answer


def hello(found: ReplicaSet, *, cluster: str = CLUSTER, replica: int = 9, to: int = 0, epoch: int = 0) -> bytes:
    key = found.shard.key
    payload = HelloPayload(cluster, replica, to or key.leader or 0, EpochTable(), "0").encoded()
    return encode_frame(FrameKind.HELLO, epoch or key.epoch, 0, payload=payload) + payload


async def test_who_is_no_replica_of_this_shard_is_told_why(tmp_path: Path) -> None:
    async with replica_set(tmp_path) as found:
        leader = await found.leader()
        for sent, why in (
            (hello(found, cluster="other"), b"cluster 'test', not of 'other'"),
            (hello(found, to=77), b"this is replica"),
            (hello(found, replica=leader.replica), b"a data directory was copied"),
            (hello(found, epoch=99), b"leads no epoch 99"),
        ):
            (answer,) = await said(found, sent)
            assert answer.kind is FrameKind.REFUSED
            assert why in answer.payload


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: replica\r\n\r\n" + bytes(200),
        encode_frame(FrameKind.ACK, 1, 5),
        encode_frame(FrameKind.DATA, 1, 5),
        encode_frame(FrameKind.HELLO, 1, 5, payload=b"{}") + b"{}",
        encode_frame(FrameKind.HELLO, 1, 5, payload=bytes(100)) + bytes(99) + b"x",
        encode_frame(FrameKind.HELLO, 1, 5, payload=bytes(70_000)),
        encode_frame(99, 1, 5),  # type: ignore[arg-type]
    ],
)
async def test_a_stranger_s_bytes_end_its_connection_and_nothing_else(tmp_path: Path, sent: bytes) -> None:
    async with replica_set(tmp_path, 1, 1) as found:
        assert await said(found, sent) == []
        await published(found, 0, 10)


async def test_a_follower_that_asks_twice_has_one_connection(tmp_path: Path) -> None:
    async with replica_set(tmp_path, 1, 1) as found:
        leader = await found.leader()
        await published(found, 0, 10)
        first, writer = await asyncio.open_connection(leader.address.host, leader.address.port)
        writer.write(hello(found))
        welcome = await first.read(1_000)
        assert next(iter(FrameReader().feed(welcome))).kind is FrameKind.WELCOME
        _, other = await asyncio.open_connection(leader.address.host, leader.address.port)
        other.write(hello(found))
        await asyncio.wait_for(first.read(), 20)
        writer.close()
        other.close()
