"""POP and delayed messages on a real store, wired as a node wires them, with a clock that the test moves."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import grpc.aio

from penstock.access.bans import Kind
from penstock.access.control import AccessControl
from penstock.access.options import AccessControlOptions, TokenOptions
from penstock.pop.core.core import PopCore
from penstock.pop.core.deliveries import AckOutcome, VisibilityChange
from penstock.pop.core.group import ConsumerGroup
from penstock.pop.core.groups import GroupSnapshot, snapshots
from penstock.pop.core.handle import Handles, load_secret
from penstock.pop.core.pops import PopResult
from penstock.pop.core.sender import Sender, cancel_replaced
from penstock.pop.core.sentids import SentIds
from penstock.pop.core.settings import ConsumerGroupSettings
from penstock.pop.core.transactions import Transactions
from penstock.pop.grpc.groupservicer import GroupServicer
from penstock.pop.grpc.scheduleservicer import ScheduleServicer
from penstock.pop.grpc.servicer import PopServicer
from penstock.pop.grpc.timerservicer import TimerServicer
from penstock.pop.options import PopOptions
from penstock.pop.proto.pop_pb2_grpc import PopServiceStub
from penstock.pop.server import PopServer, Servicers, rocketmq_service
from penstock.store.clock import SteerableClock
from penstock.store.files import SYSTEM_FILES, Files
from penstock.store.options import MIB, HostPort, StoreOptions
from penstock.store.part import Part
from penstock.store.properties import Properties, encode_properties, tag_hash
from penstock.store.queues.lightqueue import Start
from penstock.store.record import decode
from penstock.store.recovery.recovery import Recovery
from penstock.store.space.quotaoptions import QuotaOptions
from penstock.store.store import Platform, Store
from penstock.timer.delayed import DelayedMessages
from penstock.timer.keys import TimerKeys
from penstock.timer.listing import TimerListing
from penstock.timer.options import TimerOptions
from penstock.timer.schedules import Schedules
from penstock.timer.upgrade import upgrade_from_17
from tests.clock import AheadClock, ManualClock

if TYPE_CHECKING:
    from penstock.pop.proto.pop_pb2_grpc import PopServiceAsyncStub
    from penstock.pop.rocketmq.service import MessagingService

GROUP = "billing"
FILTER = "plant/#"
TOPIC = "plant/1/temperature"


class Delivered(NamedTuple):
    """One message as a consumer gets it."""

    handle: str
    position: int
    topic: str
    body: bytes
    attempt: int


class Parts:
    """A store with its parts, without a network and a loop. `settle` does by hand what a loop does by itself.

    Parameters:
        data_dir: empty, or used by an earlier instance.
        clock: by default a clock that only the test moves.
        files: has the data directory.
        more: returns further parts for the store, which recover with the others.
        is_following: Whether the store only loads what its index has, and gets the records of a leader.
        waits_by_default: Whether failed messages wait for the node's default back-off. Most tests look at their next attempt.
    """

    def __init__(
        self,
        data_dir: Path,
        clock: SteerableClock | None = None,
        *,
        pop: PopOptions | None = None,
        timer: TimerOptions | None = None,
        store: StoreOptions | None = None,
        quotas: QuotaOptions | None = None,
        files: Files = SYSTEM_FILES,
        more: Callable[[Store], Iterable[Part]] = lambda _: (),
        waits_by_default: bool = False,
        is_following: bool = False,
    ) -> None:
        pop = pop or PopOptions()
        if not waits_by_default:
            is_default = pop.retry_backoff_ms == PopOptions().retry_backoff_ms
            pop = replace(pop, retry_backoff_ms=() if is_default else pop.retry_backoff_ms, retry_jitter_percent=0)
        self.data_dir = data_dir
        self.clock = clock or ManualClock()
        # A process for the sync takes longer to start than all the rest. tests/store has the tests of it.
        store = replace(store or StoreOptions(segment_bytes=MIB), sync_in="thread")
        self.options = (pop, timer or TimerOptions(), store)
        data_dir.mkdir(exist_ok=True)
        pop_options, timer_options, store_options = self.options
        self.store = Store(
            data_dir, store_options, self.clock, quotas=quotas, platform=Platform(files=files), upgrade=upgrade_from_17
        )
        self.delayed = DelayedMessages(self.store, timer_options)
        self.schedules = Schedules(self.store, timer_options)
        self.timer_keys = TimerKeys(self.store, timer_options)
        self.handles = Handles(load_secret(data_dir, files=files))
        self.core = PopCore(self.store, self.handles, pop_options, timer_options)
        self.groups = self.core.groups
        self.dead_letters = self.core.dead_letters
        self.transactions = Transactions(self.store, pop_options, timer_options)
        self.sent_ids = SentIds(self.store, pop_options)
        self.store.add_part(self.sent_ids)
        self.store.add_part(self.delayed)
        self.store.add_part(self.schedules)
        self.store.add_part(self.timer_keys)
        self.store.add_part(self.transactions)
        self.store.add_part(self.core.part)
        for part in more(self.store):
            self.store.add_part(part)
        self._closed = False
        if is_following:
            self.store.load()
            return
        self.recovery: Recovery = self.store.recover()
        cancel_replaced(self.timer_keys, self.delayed, self.store.space)
        self.settle_queues()

    def advance(self, ms: int) -> None:
        """Advance the clock, and do all work that becomes due."""
        assert isinstance(self.clock, ManualClock)
        self.clock.advance(ms)
        self.settle()

    def settle(self) -> None:
        """Do all work that is due, and commit it."""
        self.store.commit()
        while self.core.fire_due():
            self.store.commit()
        while self.delayed.fire_due() or self.transactions.fire_due() or self.schedules.fire_due():
            self.store.commit()
        self.settle_queues()

    def settle_queues(self) -> None:
        """Fill all queues that must be filled, and commit."""
        self.store.commit()
        while self.store.queues.backfill():
            self.store.commit()
        self.store.commit()

    def publish(self, *bodies: bytes, topic: str = TOPIC, properties: Properties | None = None) -> list[int]:
        """Store messages; return their positions."""
        encoded = encode_properties(properties) if properties else b""
        aux = tag_hash(properties.tag) if properties else 0
        route = self.store.router.route(topic.encode())
        positions = [self.store.append_message(route, body, encoded, 1, aux) for body in bodies]
        self.store.commit()
        return positions

    def create(
        self, name: str = GROUP, topic_filter: str = FILTER, start: Start = "earliest", **settings: Any
    ) -> ConsumerGroup:
        """Create a group with settings; return it when its queue is filled."""
        group = self.groups.create(name, topic_filter, start, ConsumerGroupSettings(**settings))
        self.settle_queues()
        return group

    def group(self, name: str = GROUP, topic_filter: str = FILTER, start: Start = "earliest") -> ConsumerGroup:
        """Return a group whose queue is filled."""
        group = self.core.groups.get_or_create(name, topic_filter, start)
        self.settle_queues()
        return group

    def pop(
        self,
        messages_max: int = 100,
        invisible_ms: int = 10_000,
        *,
        group: str = GROUP,
        topic_filter: str = FILTER,
        attempt_id: str = "",
    ) -> list[Delivered]:
        """Pop visible messages as a consumer does."""
        taken = self.core.popper.pop(self.group(group, topic_filter), messages_max, invisible_ms, attempt_id)
        self.store.commit()
        return self.delivered(taken) if taken else []

    def delivered(self, taken: PopResult) -> list[Delivered]:
        """Return the popped messages that can be read."""
        checkpoint = taken.checkpoint
        handles = self.handles.deliveries(checkpoint.position, checkpoint.pop_ms, checkpoint.group_id, checkpoint.count)
        messages = []
        for handle, entry, data in zip(handles, checkpoint.entries(), taken.records, strict=True):
            if data is not None:
                record = decode(data)
                messages.append(Delivered(handle, entry.position, record.topic.decode(), record.body, entry.attempt))
        return messages

    def snapshots(self, groups: Iterable[ConsumerGroup]) -> list[GroupSnapshot]:
        """Return the snapshots of groups."""
        return snapshots(groups, self.core.checkpoints, self.store)

    def ack(self, *handles: str, group: str = GROUP) -> list[AckOutcome]:
        """Acknowledge; return the outcomes."""
        outcomes = self.core.deliveries.ack(group, list(handles))
        self.store.commit()
        return outcomes

    def change(
        self, handle: str, invisible_ms: int, *, suspend: bool = False, nack: bool = False, group: str = GROUP
    ) -> tuple[AckOutcome, str]:
        """Change the invisible time of one delivery; return outcome and handle."""
        (changed,) = self.core.deliveries.change_invisible(group, [VisibilityChange(handle, invisible_ms, suspend, nack)])
        self.store.commit()
        return changed

    def fail(self, messages_max: int = 100, delay_ms: int = 0, *, group: str = GROUP) -> None:
        """Pop visible messages and return all of them as failed attempts, in one call."""
        messages = self.pop(messages_max, group=group)
        self.core.deliveries.change_invisible(group, [VisibilityChange(each.handle, delay_ms, nack=True) for each in messages])
        self.settle()

    def after_crash(self, name: str, *, keep_index: bool = True) -> Parts:
        """Return the parts of a start from a copy of the files as they are now, which is what a killed process leaves.

        Rows that the index has only in memory are lost. `name` is the name of the new directory beside the old one.
        """
        left = self.data_dir.with_name(name)
        while not _copied_at_rest(self.data_dir, left):
            shutil.rmtree(left)
        self.close()
        if not keep_index:
            shutil.rmtree(left / "index")
        pop, timer, store = self.options
        return Parts(left, self.clock, pop=pop, timer=timer, store=store)

    def damage(self, position: int, size: int) -> None:
        """Overwrite the last bytes of a record in its file."""
        path = max(path for path in (self.data_dir / "commitlog").iterdir() if int(path.stem) <= position)
        descriptor = os.open(path, os.O_WRONLY)
        os.pwrite(descriptor, b"\xff\xfe\xfd", position - int(path.stem) + size - 3)
        os.close(descriptor)

    def close(self) -> None:
        """Close the files. Nothing may run any more."""
        if not self._closed:
            self._closed = True
            self.store.retention.close()
            self.store.index.close()
            self.store.log.close()


class Node(Parts):
    """The parts on a running loop and behind a gRPC listener. `advance` sets its clock ahead of the machine's."""

    def __init__(
        self,
        data_dir: Path,
        *,
        pop: PopOptions | None = None,
        timer: TimerOptions | None = None,
        store: StoreOptions | None = None,
        quotas: QuotaOptions | None = None,
        access: str | Path = "",
        tokens: TokenOptions | None = None,
        audit: str | Path = "",
    ) -> None:
        self.access = AccessControl(
            AccessControlOptions(file=str(access), jwt=tokens or TokenOptions(), audit_file=str(audit)),
            data_dir,
            lambda: self.store.now_ms(),
        )
        store = store or StoreOptions(segment_bytes=16 * MIB)
        self.ahead = AheadClock()
        super().__init__(data_dir, self.ahead, pop=pop, timer=timer, store=store, quotas=quotas)
        self.port = 0
        self.rocketmq: MessagingService | None = None
        self._server: PopServer | None = None

    async def start(self, port: int = 0) -> None:
        """Open the listener."""
        loop = asyncio.get_running_loop()
        self.store.start(loop, _sync_failed)
        self.delayed.start(loop)
        self.schedules.start(loop)
        self.core.start(loop)
        self.transactions.start(loop)
        options = replace(self.options[0], listen=HostPort("127.0.0.1", port))
        core, store, handles, delayed, transactions = self.core, self.store, self.handles, self.delayed, self.transactions
        sender = Sender(store, handles, delayed, self.timer_keys, transactions, self.sent_ids, self.options[0])
        servicer = PopServicer(core, store, handles, delayed, transactions, sender, self.options[0])
        self.rocketmq = rocketmq_service(core, store, handles, sender, delayed, transactions, self.options[0])
        group_servicer = GroupServicer(core, store)
        schedule_servicer = ScheduleServicer(self.schedules, store)
        listing = TimerListing(store, delayed.buckets, self.timer_keys)
        timer_servicer = TimerServicer(delayed, self.timer_keys, listing, sender, handles, store)
        servicers = Servicers(servicer, group_servicer, schedule_servicer, timer_servicer, self.rocketmq)
        self._server = PopServer(servicers, options, self.access)
        self.port = await self._server.start()

    def kick(self, kind: Kind, name: str) -> int:
        """End calls as an operator does; return how many."""
        assert self._server is not None
        return self._server.disconnect(kind, name)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def stop(self) -> None:
        """Stop in order."""
        if self._server is not None:
            await self._server.stop()
        self.core.stop()
        self.delayed.stop()
        self.schedules.stop()
        self.transactions.stop()
        await self.store.close()

    def advance(self, ms: int) -> None:
        """Set the clock ahead by `ms`, and do everything that is due by then."""
        self.ahead.advance(ms)
        for part in (self.core, self.delayed, self.transactions, self.schedules):
            while part.fire_due():
                pass

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return when a condition on the node's state holds. The condition is checked every millisecond."""
        while not condition():  # noqa: ASYNC110 - the node has no events for state that only tests check
            await asyncio.sleep(0.001)


def stub_of(channel: grpc.aio.Channel) -> PopServiceAsyncStub:
    """Return the stub of a channel."""
    return PopServiceStub(channel)


def _copied_at_rest(source: Path, target: Path) -> bool:
    """Copy a live data directory. Return False if RocksDB compacted meanwhile, so that the copy is inconsistent."""

    def files() -> list[tuple[str, int]]:
        return sorted(
            (path.name, path.stat().st_size if "MANIFEST" in path.name else 0) for path in (source / "index").iterdir()
        )

    before = files()
    try:
        shutil.copytree(source, target)
    except shutil.Error:
        return False  # a file was deleted
    return files() == before


def _sync_failed(error: OSError) -> None:
    raise error
