"""A replica at work: its core, its store, its connections and the coordinator.

The core decides (`penstock.cluster.replica`). This module tells it what happens, and does what it asks for. It runs on the
event loop of the node.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from penstock.cluster import commands as c
from penstock.cluster.bootstrap import SnapshotReceiving
from penstock.cluster.coordinator import Coordinator, ReplicaStatus
from penstock.cluster.errors import LogsDiverge, StreamBroken
from penstock.cluster.followers import HELLO_MS, Followers
from penstock.cluster.frames import Frame, FrameKind, HelloPayload, WelcomePayload
from penstock.cluster.framestream import FrameStream
from penstock.cluster.replica import Replica, ReplicaRole, Timing
from penstock.cluster.replicalog import ReplicaLog
from penstock.cluster.roles import Roles
from penstock.cluster.shardkey import ReplicaId, ShardKey, name_of
from penstock.store.clock import Clock
from penstock.store.errors import DiskFull, IndexAhead, IndexDamaged, LogCorrupt, PositionUnknown, SnapshotInvalid
from penstock.store.options import HostPort
from penstock.store.record import EPOCH_FIXED, KIND_AT, Kind
from penstock.store.sliced import SlicedJob
from penstock.store.store import Store

logger = logging.getLogger(__name__)

LISTENER = "replication"
"""Name of the address at which followers dial the leader."""

TICK_S = 0.05
"""Interval at which the core looks at the time."""
DIAL_S = 1.0
"""After this time a connection to the leader that is not made is given up."""


def boot_ms() -> int:
    """Return ms since the machine has booted. They go on while the process or a virtual machine is suspended."""
    return time.clock_gettime_ns(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)) // 1_000_000


class Leader(NamedTuple):
    """A replica that leads."""

    replica: ReplicaId
    epoch: int
    address: HostPort
    """Of its listener for replicas."""


class Member:
    """One replica of a shard.

    Parameters:
        replica: its id.
        cluster: name of the cluster, which both ends of a connection must have.
        data_dir: of the store.
        store: after `load`. The caller starts it with `synced` as `on_durable`, and then calls `start`.
        coordinator: has the key of the shard.
        status: what the replica says of itself. The address of its listener is added.
        roles: the node.
        clock: measures slices.
        advertise: where other replicas reach its listener; empty where that is the address of the listener.
        timing: when it tries something.
        tls: TLS for connections that are dialled and for those that are taken; None for plain text.
        now_ms: returns the time that the core is told.

    Raises:
        RecordUnreadable: the disk can't read the end of the log.
    """

    def __init__(
        self,
        replica: ReplicaId,
        cluster: str,
        data_dir: Path,
        store: Store,
        coordinator: Coordinator,
        status: ReplicaStatus,
        roles: Roles,
        clock: Clock,
        *,
        advertise: str = "",
        timing: Timing = Timing(),  # noqa: B008 - it does not change
        tls: tuple[ssl.SSLContext, ssl.SSLContext] | None = None,
        now_ms: Callable[[], int] = boot_ms,
    ) -> None:
        self.id = replica
        self.log = ReplicaLog(store)
        self.core = Replica(replica, self.log, timing)
        self._cluster = cluster
        self._data_dir = data_dir
        self._store = store
        self._coordinator = coordinator
        self._status = status
        self._roles = roles
        self._advertise = advertise
        self._tls = tls
        self._clock = clock
        self.now_ms = now_ms
        self._loop: asyncio.AbstractEventLoop
        self._server: asyncio.Server | None = None
        self._apply_job: SlicedJob | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._ticking: asyncio.TimerHandle | None = None
        self._addresses: dict[ReplicaId, str] = {}
        """Where each replica listens, as far as it was ever known: one whose lease has ended may still lead."""
        self._snapshot: SnapshotReceiving | None = None
        """The snapshot that comes from the leader."""
        self._snapshot_of = 0
        """Number of the connection over which it comes."""
        self._dialled: FrameStream | None = None
        """The connection to the leader. Its number is the core's."""
        self._serves_from: int | None = None
        """Position that must be committed before a leader serves clients; None if it serves, or does not lead."""
        self._is_stopped = False
        self.followers = Followers(self, cluster, data_dir, store, roles)
        """The connections that others have dialled."""

    # --- life -------------------------------------------------------------------------------------------------------

    async def start(self, listen: HostPort) -> HostPort:
        """Listen for followers, and begin. Return the address with its real port. Raises OSError."""
        self._loop = loop = asyncio.get_running_loop()
        self._apply_job = SlicedJob(loop, self._clock, self._apply, pause_s=0)
        tls = self._tls[1] if self._tls is not None else None
        handshake_s = HELLO_MS / 1000 if tls is not None else None
        self._server = await loop.create_server(
            self.followers.take, listen.host, listen.port, ssl=tls, ssl_handshake_timeout=handshake_s
        )
        port: int = self._server.sockets[0].getsockname()[1]
        address = HostPort(listen.host, port)
        reached = self._advertise or str(address)
        self._status = self._status._replace(addresses={**self._status.addresses, LISTENER: reached})
        self._store.log.on_write = self.followers.written
        self._coordinator.start(self, self._status)
        self.do(self.core.start(self.now_ms()))
        self._tick()
        return address

    async def stop(self) -> None:
        """End all connections. The caller closes the store, and the coordinator."""
        self._halt()
        if self._server is not None:
            self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def hand_over(self, successor: ReplicaId) -> None:
        """Resign in favour of a member of the set. The caller takes nothing more, and has waited until all is committed."""
        self.do(self.core.hand_over(self.now_ms(), successor))

    def _halt(self) -> None:
        """Do nothing more: neither send, nor acknowledge, nor commit."""
        self._is_stopped = True
        self._store.log.on_write = None
        if self._ticking is not None:
            self._ticking.cancel()
        if self._apply_job is not None:
            self._apply_job.stop()
        self.followers.end_all()
        if self._dialled is not None:
            self._dialled.abort()
        if self._snapshot is not None:
            self._snapshot.close()

    def _tick(self) -> None:
        self._ticking = self._loop.call_later(TICK_S, self._tick)
        now_ms = self.now_ms()
        self.followers.tick(now_ms)
        self._status = self._status._replace(position=self.log.durable)
        self._coordinator.announce(self._status)
        self.do(self.core.tick(now_ms))

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something in a task, which ends with the member."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def is_serving(self) -> bool:
        """Whether this replica leads, and everything before the first record of its epoch is committed."""
        return self.core.role is ReplicaRole.LEADING and self._serves_from is None and not self._is_stopped

    def leader(self) -> Leader | None:
        """Return the leader that this replica follows; None if it follows none, or does not know its address."""
        core = self.core
        if core.role is not ReplicaRole.FOLLOWING or core.leader is None or core.leader not in self._addresses:
            return None
        return Leader(core.leader, core.epoch, HostPort.parse(self._addresses[core.leader]))

    # --- the coordinator --------------------------------------------------------------------------------------------

    def key_seen(self, key: ShardKey) -> None:
        """Take a value of the key. One that is absent is passed over: nobody may lead by it."""
        if key.revision:
            self.do(self.core.key_read(self.now_ms(), key))

    def alive_seen(self, alive: Mapping[ReplicaId, ReplicaStatus]) -> None:
        """Take which replicas are alive."""
        for replica, status in alive.items():
            if LISTENER in status.addresses:
                self._addresses[replica] = status.addresses[LISTENER]
        self.do(self.core.alive(self.now_ms(), {replica: status.position for replica, status in alive.items()}))

    def twin_seen(self, status: ReplicaStatus) -> None:
        """Take that another process has this replica's id."""
        logger.error(
            "another node has this replica's id %s, at %s: a data directory was copied; delete the copy, or its file `replica`",
            name_of(self.id),
            dict(status.addresses),
        )

    async def _read(self) -> None:
        key = await self._coordinator.read()
        if key is not None:
            self.key_seen(key)

    async def _swap(self, number: int, key: ShardKey) -> None:
        answer = await self._coordinator.swap(key)
        if answer is not None and answer.key.revision:
            self.do(self.core.answered(self.now_ms(), number, answer.is_swapped, answer.key))

    # --- what the store tells ---------------------------------------------------------------------------------------

    def synced(self) -> None:
        """Take that more of the log is durable."""
        self.do(self.core.synced(self.now_ms()))
        if self._apply_job is not None and self.core.role is ReplicaRole.FOLLOWING:
            self._apply_job.wake()  # a follower that catches up often knows that records are committed before they are durable

    def _apply(self, until_s: float) -> bool:
        if self._is_stopped or self.core.role is ReplicaRole.LEADING:
            return False
        position = min(self.core.committed, self.log.durable)
        try:
            is_done = self._store.apply_to(position, lambda: self._clock.monotonic_s() >= until_s)
        except (LogCorrupt, IndexDamaged, OSError) as error:
            self._fail(error)
            return False
        return not is_done

    def _fail(self, error: Exception) -> None:
        self._halt()
        self._roles.fail(error)

    def _restart(self, why: str) -> None:
        self._halt()
        self._roles.restart(why)

    # --- the leader ---------------------------------------------------------------------------------------------------

    def received(self, stream: FrameStream, frame: Frame) -> None:
        """Take a frame of the leader. Raises StreamBroken."""
        if stream is self._dialled and not self._is_stopped:
            self._received_from_leader(stream, frame)

    def ended(self, stream: FrameStream) -> None:
        """Take that the connection to the leader has ended. One that is not needed any more is passed over."""
        if stream is self._dialled and not self._is_stopped:
            self._dialled = None
            self.do(self.core.link_ended(self.now_ms(), stream.number))

    def _received_from_leader(self, stream: FrameStream, frame: Frame) -> None:
        core, now_ms = self.core, self.now_ms()
        match frame.kind:
            case FrameKind.WELCOME:
                welcome = WelcomePayload.decoded(frame.payload)
                stream.trust()
                self._roles.secret_changed(welcome.secret)
                try:
                    self.do(core.welcomed(now_ms, stream.number, frame.epoch, frame.position))
                except LogsDiverge as error:
                    self._fail(error)
            case FrameKind.DATA | FrameKind.ROLL:
                if core.accepts(stream.number, core.epoch):
                    self._write(frame)
                    self.do(core.heard(now_ms, stream.number, frame.committed))
            case FrameKind.HEARTBEAT:
                self.do([*core.heard(now_ms, stream.number, frame.committed), *core.synced(now_ms)])
            case FrameKind.START:
                self._store.retention.follow(frame.position, frame.committed)
            case FrameKind.SNAPSHOT:
                self._receive_snapshot(stream, frame)
            case FrameKind.RESIGN:
                self.do(core.resigned(now_ms, stream.number, frame.position))
            case FrameKind.REFUSED:
                logger.warning("the leader at %s refuses this replica: %s", stream.peer, frame.payload.decode(errors="replace"))
                self._hang_up(stream.number)
                self.do(core.link_ended(now_ms, stream.number))
            case _:
                raise StreamBroken(f"a frame {frame.kind.name} came from a leader")

    def _write(self, frame: Frame) -> None:
        log = self.log
        if frame.position != log.end:
            raise StreamBroken(f"records of position {frame.position} came, but the log ends at {log.end}")
        try:
            if frame.kind is FrameKind.ROLL:
                self._store.begin_segment()
                return
            if frame.epoch > log.epochs.last:
                if frame.payload[KIND_AT] != Kind.EPOCH_BEGUN:
                    raise StreamBroken(f"epoch {frame.epoch} does not begin with its own record")
                log.begin(frame.epoch, frame.position)
            self._store.put(frame.position, frame.payload)
        except DiskFull as error:
            raise StreamBroken(f"the records can't be stored: {error}") from error
        except OSError as error:
            self._fail(error)

    # --- what the core asks for -------------------------------------------------------------------------------------

    def do(self, commands: list[c.Command]) -> None:
        """Do what the core asks for, in order, unless the member has stopped meanwhile."""
        for command in commands:
            if self._is_stopped:
                return
            self._do_one(command)

    def _do_one(self, command: c.Command) -> None:
        match command:
            case c.ReadKey():
                self.run(self._read())
            case c.Swap(number, key):
                self.run(self._swap(number, key))
            case c.Dial(link, leader, _):
                self._hang_up(link - 1)
                self.run(self._dial(link, leader))
            case c.Hello(link, epoch):
                self._hello(link, epoch)
            case c.Cut(link, position):
                self._cut(link, position)
            case c.Ack(link, epoch, position):
                if self._dialled is not None and self._dialled.number == link:
                    self._dialled.send(FrameKind.ACK, epoch, position, stamp=self._dialled.stamp)
            case c.HangUp(link):
                self._hang_up(link)
            case c.BeginEpoch(epoch):
                self._begin_epoch(epoch)
            case c.Welcome(peer, link, epoch, position, committed):
                self.followers.welcome(peer, link, epoch, position, committed)
            case c.Refuse(_, link, why):
                self.followers.refuse(link, why)
            case c.Committed(position):
                self._commit(position)
            case c.Resign(successor):
                self.followers.resign(successor)
            case c.StepDown(why):
                self._restart(why)

    async def _dial(self, link: int, leader: ReplicaId) -> None:
        is_refused = False
        try:
            address = HostPort.parse(self._addresses[leader])
            stream = FrameStream(self, link, self.now_ms)
            async with asyncio.timeout(DIAL_S):
                await self._loop.create_connection(lambda: stream, address.host, address.port, ssl=self._tls and self._tls[0])
        except KeyError:
            logger.debug("nobody knows where replica %s listens", name_of(leader))
        except ConnectionRefusedError:
            is_refused = True
        except (OSError, TimeoutError) as error:
            logger.debug("the leader %s can't be reached: %s", name_of(leader), error)
        else:
            if self._is_stopped:
                stream.abort()
                return
            if not stream.has_ended:
                self._dialled = stream
                self.do(self.core.connected(self.now_ms(), link))
                return
        self.do(self.core.link_ended(self.now_ms(), link, is_refused=is_refused))

    def _hang_up(self, link: int) -> None:
        if self._dialled is not None and self._dialled.number <= link:
            self._dialled.abort()
            self._dialled = None

    def _hello(self, link: int, epoch: int) -> None:
        stream, leader = self._dialled, self.core.leader
        if stream is not None and stream.number == link and leader is not None:
            hello = HelloPayload(self._cluster, self.id, leader, self.log.epochs, self._status.version)
            stream.send(FrameKind.HELLO, epoch, self.log.end, payload=hello.encoded())

    def _cut(self, link: int, position: int) -> None:
        if position < self.log.end:
            logger.warning("the log is cut from position %d to %d, where the leader has another one", self.log.end, position)
        try:
            self.log.cut_to(position)
        except IndexAhead as error:
            self._restart(str(error))
        except PositionUnknown as error:
            self._fail(LogsDiverge(f"{error}; this replica must begin anew with an empty directory"))
        except (DiskFull, OSError) as error:
            self._fail(error)
        else:
            self.do(self.core.was_cut(self.now_ms(), link))

    def _begin_epoch(self, epoch: int) -> None:
        store = self._store
        try:
            store.catch_up()
            store.append(Kind.EPOCH_BEGUN, EPOCH_FIXED.pack(epoch, self.id))
            store.commit()
        except (LogCorrupt, IndexDamaged, DiskFull, OSError) as error:
            self._fail(error)
            return
        self._serves_from = store.log.end
        logger.info("replica %s leads epoch %d from position %d", name_of(self.id), epoch, store.log.end)
        self.do(self.core.epoch_begun(self.now_ms()))

    def _receive_snapshot(self, stream: FrameStream, frame: Frame) -> None:
        key = self.core.key
        if key is None or self.id in key.members:
            self._fail(LogsDiverge("the leader's log begins after the end of this one, though this replica is in sync"))
            return
        try:
            if self._snapshot is None or self._snapshot_of != stream.number:
                logger.warning("this replica begins anew: the leader's log begins at position %d", frame.position)
                self._snapshot_of = stream.number
                self._snapshot = SnapshotReceiving(self._data_dir, frame.position, frame.committed)
            count = self._snapshot.add(frame.position, frame.payload)
            stream.send(FrameKind.ACK, frame.epoch, count, stamp=frame.stamp)
            if self._snapshot.is_whole:
                self._snapshot.finish()
                self._restart(f"it has got the leader's snapshot at position {frame.position}")
        except (OSError, SnapshotInvalid) as error:
            self._snapshot = None
            raise StreamBroken(f"the leader's snapshot can't be taken: {error}") from error

    def _commit(self, position: int) -> None:
        self._store.commit_to(position)
        if self.core.role is ReplicaRole.LEADING:
            if self._serves_from is not None and position >= self._serves_from:
                self._serves_from = None
                self._roles.lead()
        elif self._apply_job is not None:
            self._apply_job.wake()
