"""Replicas of a shard in one process: real stores, cores and connections, and a coordinator in memory."""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from penstock.cluster.bootstrap import install_snapshot
from penstock.cluster.coordinator import ReplicaStatus
from penstock.cluster.errors import RelayRefused
from penstock.cluster.frames import RelayPayload
from penstock.cluster.member import Member
from penstock.cluster.replica import ReplicaRole, Timing
from penstock.cluster.shardkey import ReplicaId, ShardKey
from penstock.store.clock import SystemClock
from penstock.store.options import KIB, HostPort, StoreOptions
from penstock.store.store import Store
from tests.cluster.memorycoordinator import CoordinatedShard, MemoryCoordinator
from tests.waiting import until

CLUSTER = "test"
OPTIONS = StoreOptions(segment_bytes=64 * KIB, sync_in="thread")
TIMING = Timing(lag_ms=3_000, silence_ms=3_000, resign_ms=6_000, repeat_ms=100, dial_ms=20)
"""Longer than a busy machine takes to let a replica answer, so that none is taken for dead. A kill ends the lease at once."""

COPIES_MAX = 20


class ReplicaProcess:
    """A replica as a process that can be killed: what is not durable is lost then, as in a power cut."""

    def __init__(self, shard: CoordinatedShard, replica: ReplicaId, directory: Path, options: StoreOptions) -> None:
        self.shard, self.replica, self.directory, self.options = shard, replica, directory, options
        self.store: Store
        self.member: Member
        self.is_up = False
        self.is_leading = False
        self.secret = b"secret of %d" % replica
        self.errors: list[Exception] = []
        self.restarts: list[str] = []
        self.address = HostPort("127.0.0.1", 0)
        self.echoes: set[asyncio.Task[None]] = set()

    # --- roles ------------------------------------------------------------------------------------------------------

    def lead(self) -> None:
        self.is_leading = True

    def restart(self, why: str) -> None:
        self.restarts.append(why)
        self.is_leading = False
        asyncio.get_running_loop().create_task(self._again())

    async def _again(self) -> None:
        await self.kill()
        await self.start()

    def fail(self, error: Exception) -> None:
        self.errors.append(error)
        self.is_leading = False

    async def serve(self, client: RelayPayload) -> socket.socket:
        """Serve a client by an echo of its bytes after its address."""
        if client.listener != "plain":
            raise RelayRefused(f"no listener {client.listener}")
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_unix_connection(sock=theirs)
        self.echoes.add(asyncio.get_running_loop().create_task(self._echo(reader, writer, f"{client.host}:{client.port} ")))
        return ours

    @staticmethod
    async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: str) -> None:
        writer.write(head.encode())
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
        writer.close()

    def secret_changed(self, secret: bytes) -> None:
        self.secret = secret

    # --- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the process."""
        self.directory.mkdir(exist_ok=True)
        clock = SystemClock()
        install_snapshot(self.directory)
        self.store = Store(self.directory, self.options, clock)
        self.store.load()
        coordinator = MemoryCoordinator(self.shard, self.replica)
        status = ReplicaStatus({}, "0", 1, 0, f"{id(self)}")
        self.member = Member(self.replica, CLUSTER, self.directory, self.store, coordinator, status, self, clock, timing=TIMING)
        self.store.start(asyncio.get_running_loop(), self.errors.append, self.member.synced)
        self.address = await self.member.start(self.address)
        self.is_up = True

    async def kill(self) -> None:
        """End the process without an orderly end. Its lease ends at once."""
        self.is_up = self.is_leading = False
        await self.member.stop()
        left = self._copied()  # before the end writes anything
        await self.store.close()
        shutil.rmtree(self.directory)
        left.rename(self.directory)
        self.shard.die(self.replica)

    def _copied(self) -> Path:
        """Copy the directory. A snapshot that another process writes may vanish meanwhile; then the copy begins again."""
        left = self.directory.with_suffix(".left")
        for _ in range(COPIES_MAX):
            with suppress(shutil.Error):
                shutil.copytree(self.directory, left)
                return left
            shutil.rmtree(left)
        raise AssertionError(f"{self.directory} changes all the time")

    async def stop(self) -> None:
        """End the process in order."""
        if self.is_up:
            self.is_up = self.is_leading = False
            await self.member.stop()
            await self.store.close()
            self.shard.die(self.replica)

    # --- clients ----------------------------------------------------------------------------------------------------

    def publish(self, body: str, acknowledged: list[str]) -> None:
        """Publish a message, and note it in `acknowledged` when it is committed."""
        self.store.append_message(self.store.router.route(b"plant/1"), body.encode())
        self.store.when_durable(lambda: acknowledged.append(body))

    def bodies(self) -> list[str]:
        """Return the bodies of all messages in the log, in order."""
        return [
            each.body.decode() for each in self.store.log.scan(self.store.log.start) if each.topic == b"plant/1" and each.body
        ]


class ReplicaSet:
    """The replicas of a shard."""

    def __init__(self, directory: Path, count: int, required: int, options: StoreOptions) -> None:
        self.shard = CoordinatedShard(ShardKey(1, 0, None, frozenset(range(1, count + 1)), required))
        self.replicas = [
            ReplicaProcess(self.shard, number, directory / f"replica{number}", options) for number in range(1, count + 1)
        ]

    @property
    def leaders(self) -> list[ReplicaProcess]:
        """Those that serve clients."""
        return [each for each in self.replicas if each.is_leading]

    @property
    def followers(self) -> list[ReplicaProcess]:
        """Those that are up and follow."""
        return [each for each in self.replicas if each.is_up and each.member.core.role is ReplicaRole.FOLLOWING]

    async def leader(self) -> ReplicaProcess:
        """Return the leader that the coordinator names, when it serves clients."""
        await until(lambda: any(each.replica == self.shard.key.leader for each in self.leaders))
        return next(each for each in self.leaders if each.replica == self.shard.key.leader)

    async def in_sync(self, count: int) -> None:
        """Return when the recorded set has so many members, and all have the whole log."""
        await until(lambda: len(self.shard.key.members) == count)
        leader = await self.leader()
        members = [each for each in self.replicas if each.replica in self.shard.key.members]
        await until(lambda: all(each.store.durable_position == leader.store.log.end for each in members))


@asynccontextmanager
async def replica_set(
    directory: Path, count: int = 3, required: int = 2, options: StoreOptions = OPTIONS
) -> AsyncIterator[ReplicaSet]:
    """Run the replicas of a new shard."""
    found = ReplicaSet(directory, count, required, options)
    for each in found.replicas:
        await each.start()
    try:
        yield found
    finally:
        for each in found.replicas:
            await each.stop()
    for each in found.replicas:
        assert each.errors == [], each.replica
