"""A node as one simulated process: the real parts, wired as `penstock.node.node` wires them, on a simulated disk.

It has no sockets and no gRPC: connections get their packets from `SimulatedTransport`, and servicers are called directly.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import grpc

from penstock.access.control import AccessControl
from penstock.gateway.connection.connection import Connection
from penstock.gateway.gateway import Gateway, ServedParts
from penstock.gateway.options import GatewayOptions, LimitOptions, ListenerOptions
from penstock.gateway.transport.peer import Peer
from penstock.gateway.transport.token_bucket import TokenBucket
from penstock.node.config import Config
from penstock.node.holding import Holding
from penstock.node.parts import NodeParts
from penstock.pop.access.refusals import CallRefused
from penstock.pop.errors import PopError
from penstock.pop.grpc.scheduleservicer import ScheduleServicer
from penstock.pop.grpc.servicer import PopServicer
from penstock.pop.grpc.timerservicer import TimerServicer
from penstock.store.errors import DiskFull, IndexDamaged, RecordTooLarge, StoreError
from penstock.store.files import FULL, make_directory
from penstock.store.index.index import Batch, Index
from penstock.store.index.rocksdb import Database
from penstock.store.log.commitlog import CommitLog
from penstock.store.log.syncing import Ended
from penstock.store.part import Apply
from penstock.store.record import Kind, Record
from penstock.store.recovery.recovery import Recovery
from penstock.store.space.ballast import release_ballast
from penstock.store.store import Platform
from penstock.timer.listing import TimerListing
from tests.simulation.disk import Disk, ProcessDead, SimulatedFiles
from tests.simulation.orderedmap import Databases
from tests.simulation.virtualtime import LaterExecutor, Time, VirtualLoop

DATA_DIR = Path("/data")

KILLED = -9
FAILED = 70
DAMAGED = 71


class Machine(NamedTuple):
    """What outlives a process."""

    time: Time
    disk: Disk
    databases: Databases
    random: Random
    sync_s: Callable[[], float] | None = None
    """Returns how many seconds a sync takes; None lets the seed decide."""


def mqtt_options(**changed: Any) -> GatewayOptions:
    """Return options of a gateway without listeners."""
    return GatewayOptions(listen="off", limits=LimitOptions(log_lines_per_s=0), sys_interval_s=0, **changed)


def _may_end_a_call(error: BaseException) -> bool:
    """Return whether clients may get an error for what they ask here, all of which is valid: what the node lacks, or lost."""
    if isinstance(error, CallRefused):
        return error.status is not grpc.StatusCode.INVALID_ARGUMENT
    return isinstance(error, (StoreError, PopError, OSError)) and not isinstance(error, RecordTooLarge)


class SimulatedSync:
    """Syncs a log at once or later, as the seed decides: a `penstock.store.log.syncing.Sync`.

    What was written while a sync ran may be covered by it or not.

    Parameters:
        log: is synced.
        loop: runs the syncs.
        ended: called with each result.
        random: decides how long a sync takes.
        sync_s: returns how long a sync takes, if the seed is not to decide it.
    """

    def __init__(
        self,
        log: CommitLog,
        loop: asyncio.AbstractEventLoop,
        ended: Ended,
        random: Random,
        sync_s: Callable[[], float] | None = None,
    ) -> None:
        self._sync_s = sync_s
        self.failure: OSError | None = None
        self._log = log
        self._loop = loop
        self._ended = ended
        self._random = random
        self._asked = 0
        self._is_running = False
        self._done: deque[tuple[OSError | None, int]] = deque()

    def begin(self) -> bool:
        if self.failure is not None:
            return False
        self._asked += 1
        if not self._is_running:
            self._run()
        return True

    def _run(self) -> None:
        self._is_running = True
        served, self._asked = self._asked, 0
        if self._sync_s is not None:
            self._loop.call_later(self._sync_s(), self._sync_and_finish, served)
        elif self._random.random() < 0.5:  # the disk is quick, and the answer is late
            self._sync(served)
            self._loop.call_later(self._seconds(), self._finish)
        else:
            self._loop.call_later(self._seconds(), self._sync_and_finish, served)

    def _seconds(self) -> float:
        return self._random.choice((0.0, 0.0005, 0.002, 0.002, 0.01, 0.4))

    def _sync(self, served: int) -> None:
        try:
            self._log.open_segment.sync_file.fdatasync()
        except OSError as error:  # the log hears of it with the answer, and may begin a segment before
            self.failure = error
        self._done.append((self.failure, served))

    def _sync_and_finish(self, served: int) -> None:
        self._sync(served)
        self._finish()

    def _finish(self) -> None:
        self._is_running = False
        if self.failure is not None:
            self._log.fail(self.failure)
        elif self._asked:
            self._run()
        self.collect()

    def collect(self) -> None:
        # A sync that is under way is not reported before its time, though its result is known here.
        while self._done and (not self._is_running or len(self._done) > 1):
            self._ended(*self._done.popleft())

    def stop(self) -> None:
        if self._asked and self.failure is None and not self._is_running:
            self._run()
        if self._done and self.failure is not None:
            self._log.fail(self.failure)
            self._loop.call_soon(self._ended, self.failure, self._done[-1][1])


class Trigger:
    """A part that lets its process be killed when the next record of a kind was written to the log, before that is durable.

    Parameters:
        process: has the store.
    """

    KINDS = (Kind.TIMER_CANCELLED, Kind.POP_INVISIBLE_CHANGED)

    def __init__(self, process: Process) -> None:
        self.kind: Kind | None = None
        """The kind; None if the process is to go on."""
        self._process = process

    def applies(self) -> Mapping[Kind, Apply]:
        return dict.fromkeys(self.KINDS, self._apply)

    def _apply(self, record: Record) -> None:
        if record.kind == self.kind:
            self.kind = None
            self._process.fuse = 1  # for the operation that writes all records of this turn

    def load(self, index: Index) -> None:
        """Do nothing."""

    def save(self, batch: Batch) -> None:
        """Do nothing."""

    def live(self, before: int) -> Iterator[tuple[int, int]]:
        yield from ()


class SimulatedListener:
    """The listener of all simulated peers: a `penstock.gateway.transport.peer.PeerListener`."""

    def __init__(self) -> None:
        self.options = ListenerOptions(name="simulated")
        self.name = "simulated"
        self.is_local = True
        self.messages = TokenBucket(0)
        self.bytes = TokenBucket(0)
        self.bytes_in = 0
        self.bytes_out = 0

    def closed(self, peer: Peer) -> None:
        """Do nothing: connections are not counted."""


class SimulatedTransport(asyncio.Transport):
    """One end of a connection without a socket. `received` has what the node has sent and the client has not read.

    Parameters:
        process: the node.
        connection: the node's protocol.
    """

    def __init__(self, process: Process, connection: Connection) -> None:
        super().__init__()
        self._process = process
        self._connection = connection
        self._unread: deque[bytes] = deque()
        self._reads = True
        self.received = bytearray()
        self.is_closed = False

    def feed(self, data: bytes) -> None:
        """Give the node bytes from the client, now or when it reads again."""
        self._unread.append(data)
        self._process.loop.call_soon(self._read)

    def _read(self) -> None:
        failure: Exception | None = None
        while self._unread and self._reads and not self.is_closed:
            try:
                self._connection.data_received(self._unread.popleft())
            except Exception as error:  # as `Sockets` does: the connection ends, and if the store has failed, so does the node
                failure = error
                self.close()
        self._process.end_turn()
        if failure is not None:
            raise failure

    def leave(self) -> None:
        """Close the client's end."""
        self._process.loop.call_soon(self._lose)

    def _lose(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._connection.connection_lost(None)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._process.check_alive()
        if not self.is_closed:
            self.received += data

    def pause_reading(self) -> None:
        self._reads = False

    def resume_reading(self) -> None:
        self._reads = True
        if self._unread:
            self._process.loop.call_soon(self._read)

    def is_reading(self) -> bool:
        return self._reads

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Do nothing: clients read at once."""

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self._reads = False
        self._process.loop.call_soon(self._lose)

    abort = close


class Process:
    """A running node.

    Parameters:
        machine: where it runs.
        config: all options; the data directory is `DATA_DIR`.
        fuse: number of operations on files and the index after which the process is killed; None for never.

    Raises:
        ProcessDead: it was killed while it started.
        LogCorrupt, OSError, ValueError: it refuses to start.
    """

    def __init__(self, machine: Machine, config: Config, fuse: int | None = None) -> None:
        self.machine = machine
        self.config = config
        self.fuse = fuse
        self.status: int | None = None
        """Exit status; None while the process runs."""
        self.why = ""
        self.steps = 0
        self.calls = 0
        """Calls of clients that have no answer yet."""
        self.before_unlink: Callable[[], None] = lambda: None
        """Called before the node deletes a file."""
        self.db_flush_error: str = ""
        """Text of the error with which flushes of the index fail."""
        self.files = SimulatedFiles(machine.disk, self.step)
        self.clock = machine.time.clock(machine.disk.boots)
        self.loop = VirtualLoop(machine.time, machine.random)
        self._executor = LaterExecutor(machine.random)
        make_directory(self.files, DATA_DIR)
        recovery = self._recover_in_room() or self._recover_in_room()
        if recovery is None:
            raise IndexDamaged("the index is damaged again after it was rebuilt")
        self.recovery: Recovery = recovery
        self.gateway = Gateway(
            self.store,
            ServedParts(self.retained, self.delayed, self.sessions, self.pop, self._handles),
            config.mqtt,
            AccessControl(config.access, config.data_dir, self.clock.now_ms),
            delay_ms_max=config.timer.delay_ms_max,
        )
        sender = self._parts.sender
        self.servicer = PopServicer(self.pop, self.store, self._handles, self.delayed, self.transactions, sender, config.pop)
        listing = TimerListing(self.store, self.delayed.buckets, self.timer_keys)
        self.timers = TimerServicer(self.delayed, self.timer_keys, listing, sender, self._handles, self.store)
        self.scheduler = ScheduleServicer(self.schedules, self.store)
        self.holding = Holding(self.store, config.data_dir, files=self.files, executor=self._executor)
        self.listener = SimulatedListener()

    def _recover_in_room(self) -> Recovery | None:
        try:
            return self._try_to_recover()
        except (OSError, DiskFull) as error:
            if isinstance(error, OSError) and error.errno not in FULL:
                raise
            if not release_ballast(self.config.data_dir, files=self.files):
                raise
        return self._try_to_recover()

    def _try_to_recover(self) -> Recovery | None:
        try:
            return self._recover()
        except IndexDamaged:
            return None

    def _recover(self) -> Recovery:
        machine = self.machine
        self._parts = parts = NodeParts(
            self.config,
            self.clock,
            platform=Platform(
                self.files,
                self._open_database,
                lambda log, loop, ended: SimulatedSync(log, loop, ended, machine.random, machine.sync_s),
                self._executor,
            ),
        )
        self.store, self.delayed, self.retained = parts.store, parts.delayed, parts.retained
        self.pop, self.transactions, self.sessions = parts.pop, parts.transactions, parts.sessions
        self.schedules, self.timer_keys = parts.schedules, parts.timer_keys
        self._handles = parts.handles
        self.trigger = Trigger(self)
        self.store.add_part(self.trigger)
        return self.store.recover()

    def _open_database(self, path: Path, read_only: bool) -> Database:
        return self.machine.databases.open(self.files, path, self.step)

    # --- life and death -----------------------------------------------------------------------------------------------

    def step(self, name: str) -> None:
        """Count an operation on the disk; end the process where its fuse says."""
        self.check_alive()
        self.steps += 1
        if name == "unlink":
            self.before_unlink()
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse < 0:
                self.die(KILLED, f"killed before {name}")
        if self.db_flush_error and name == "db_flush":
            raise RuntimeError(self.db_flush_error)

    def check_alive(self) -> None:
        """Raise ProcessDead if the process has ended: nothing leaves it any more."""
        if self.status is not None:
            raise ProcessDead

    def die(self, status: int, why: str) -> None:
        """End the process at once."""
        if self.status is None:
            self.status, self.why = status, why
        raise ProcessDead

    def _store_failed(self, error: OSError) -> None:
        self.die(DAMAGED if self.store.is_index_damaged else FAILED, str(error))

    def start(self) -> None:
        """Begin to serve."""
        self._executor.loop = self.loop
        self.loop.call_soon(self._start)

    def _start(self) -> None:
        loop = self.loop.loop
        self._parts.start(loop, self._store_failed)
        self.loop.create_task(self.gateway.start())

    async def stop(self) -> None:
        """Stop in order."""
        await self.holding.stop()
        await self.gateway.stop()
        self._parts.stop()
        self._executor.loop = None
        await self.store.close()
        self.status = 0

    def run_until(self, until_s: float) -> bool:
        """Run until a virtual time; return whether the process is alive then."""
        try:
            self.loop.run_until(until_s)
        except ProcessDead:
            pass
        except Exception:
            if self.status is None:
                raise  # What a dead process raises, in memory that is gone, is nobody's concern.
        return self.status is None

    # --- clients ------------------------------------------------------------------------------------------------------

    def connect(self, port: int) -> SimulatedTransport:
        """Return a new connection to the gateway."""
        connection = self.gateway.connect(Peer(self.listener, "127.0.0.1", port))
        transport = SimulatedTransport(self, connection)
        connection.connection_made(transport)
        return transport

    def end_turn(self) -> None:
        """Do what ends a turn of the sockets."""
        self.gateway.fast_path.flush()
        self.store.end_turn()

    def call(self, work: Any, done: Callable[[Any, Exception | None], None]) -> None:
        """Run a coroutine on the loop; call `done` with its result or with one of the errors that a call may end with."""

        self.calls += 1

        def ended(task: asyncio.Task[Any]) -> None:
            self.calls -= 1
            if self.status is None and not task.cancelled():
                error = task.exception()
                if error is not None and not _may_end_a_call(error):
                    raise error
                assert error is None or isinstance(error, Exception)
                done(None if error is not None else task.result(), error)

        self.loop.create_task(work).add_done_callback(ended)
