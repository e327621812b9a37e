"""Methods of pull consumers, which say from which offset they read, and note by themselves how far they are.

The offsets are those of the light queue of a group's filter. The noted offset of a group is its cursor: the first message that
a pop would hand out. So a group can be pulled or popped, and an operator sees its backlog and resets it as for any other group.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, NamedTuple

from penstock.access.actions import POP
from penstock.pop.access.auditedcall import note_change
from penstock.pop.access.caller import causer_of_call, check_permitted, check_permitted_throughout
from penstock.pop.core.checkpoint import FROM_QUEUE, Entry
from penstock.pop.core.core import PopCore
from penstock.pop.core.deadletters import DEAD_LETTERS
from penstock.pop.core.expression import Expression, compile_expression
from penstock.pop.core.group import ConsumerGroup
from penstock.pop.core.groups import ResetTo
from penstock.pop.core.pops import expires_at_ms_of
from penstock.pop.core.selection import RESPONSE_BYTES
from penstock.pop.errors import GroupUnknown, Overloaded
from penstock.pop.grpc.responsebytes import bytes_of_stream
from penstock.pop.options import PopOptions
from penstock.pop.rocketmq.answering import status
from penstock.pop.rocketmq.messages import message_of
from penstock.pop.rocketmq.names import dead_letters_group, filter_of, group_of, namespace_of
from penstock.pop.rocketmq.receiving import wait_ms_of
from penstock.pop.rocketmq.settings import expression_of
from penstock.pop.rocketmq.status import Code, Refused
from penstock.pop.rocketmq.stubs import pb, service_pb
from penstock.store.queues.lightqueue import ENTRY, ENTRY_BYTES, LightQueue
from penstock.store.record import KIND_AT, Kind, decode, store_ms_of
from penstock.store.store import Store

SCANNED_MAX = 256
"""Maximum number of entries that one pull looks at without a break, if its expression selects few of them."""


class _Pulled(NamedTuple):
    """What a pull found: the messages with their entries, and the offset from which the next pull shall read."""

    messages: list[tuple[Entry, bytes]]
    next_offset: int

    @property
    def size(self) -> int:
        """Bytes of the messages."""
        return sum(len(data) for _, data in self.messages)


class PullConsumers:
    """Serves PullMessage, UpdateOffset, GetOffset and QueryOffset.

    Parameters:
        core: Has the groups.
        store: Has the messages.
        options: Bounds and defaults.
        host: Returns the address of this node, which each message names.
    """

    def __init__(self, core: PopCore, store: Store, options: PopOptions, host: Callable[[], str]) -> None:
        self._core = core
        self._groups = core.groups
        self._store = store
        self._durable: Callable[[], Awaitable[None]] = store.durable
        self._options = options
        self._host = host
        self._waiting = 0

    async def QueryOffset(self, request: Any) -> Any:
        topic_filter = filter_of(request.message_queue.topic)
        check_permitted(POP, topic_filter)
        queue = next((group.queue for group in self._groups if group.filter == topic_filter), None)
        if queue is None:
            raise Refused(
                Code.OFFSET_NOT_FOUND,
                f"no group reads {topic_filter[:80]!r}, so it has no offsets: call GetOffset with a group first",
            )
        policies = pb.QueryOffsetPolicy
        self._store.commit()  # messages that were stored in this turn of the loop get their offsets
        if request.query_offset_policy == policies.BEGINNING:
            offset = queue.first_offset()
        elif request.query_offset_policy == policies.END:
            offset = queue.next_offset
        elif request.query_offset_policy == policies.TIMESTAMP and request.HasField("timestamp"):
            offset = queue.offset_at(request.timestamp.ToMilliseconds(), self._store.copies)
        else:
            raise Refused(
                Code.BAD_REQUEST,
                f"the policy {request.query_offset_policy} is unknown, or has no timestamp: use BEGINNING, END or TIMESTAMP",
            )
        return service_pb.QueryOffsetResponse(status=status(), offset=offset)

    async def GetOffset(self, request: Any) -> Any:
        group = self._group(request)
        await self._durable()
        return service_pb.GetOffsetResponse(status=status(), offset=group.cursor)

    async def UpdateOffset(self, request: Any) -> Any:
        group = self._group(request)
        self._store.commit()
        self._check_offset(group.queue, request.offset)
        before = group.cursor
        if request.offset != before:
            self._core.groups.reset(group.name, group.filter, ResetTo(offset=request.offset))
        if request.offset < before:  # consumers note their progress with the same call, as others acknowledge
            note_change(group=group.name, filter=group.filter, offset=request.offset, before=before)
        await self._durable()
        return service_pb.UpdateOffsetResponse(status=status())

    async def PullMessage(self, request: Any, remaining_s: float | None) -> AsyncGenerator[Any, None]:
        """Yield messages from an offset on. `remaining_s` is the time until the deadline of the call; None if it has none."""
        response = service_pb.PullMessageResponse
        pulled = await self._pull(request, remaining_s)
        await self._durable()
        messages = self._messages(pulled, request.message_queue.topic)
        if messages:
            if (stream_bytes := bytes_of_stream()) is not None:
                stream_bytes.resize(pulled.size)
            yield response(status=status())
        else:
            yield response(status=status(Code.MESSAGE_NOT_FOUND, "there is no message from this offset on now"))
        for message in messages:
            yield response(message=message)
        yield response(next_offset=pulled.next_offset)

    async def _pull(self, request: Any, remaining_s: float | None) -> _Pulled:
        """Return messages from an offset on. Wait for the first one as long as the request says."""
        if request.batch_size <= 0:
            raise Refused(Code.BAD_REQUEST, f"batch_size is {request.batch_size}: ask for at least 1 message")
        group = self._group(request)
        self._store.commit()
        offset = request.offset
        self._check_offset(group.queue, offset)
        if offset < (first := group.queue.first_offset()):
            raise Refused(
                Code.ILLEGAL_OFFSET, f"the messages from offset {offset} on have expired: the first offset is {first} now"
            )
        expression = compile_expression(*expression_of(request.filter_expression))
        count = min(request.batch_size, self._options.messages_max)
        caller, unsynced = causer_of_call(), self._core.unsynced
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + wait_ms_of(request, remaining_s, self._options) / 1000
        arrived = asyncio.Event()

        def wake(_queue: LightQueue, _offset: int, _entries: bytes) -> None:
            arrived.set()

        if self._waiting + self._core.waiting >= self._options.waiters_max:
            raise Overloaded(f"{self._options.waiters_max} pulls and pops wait on this node, the limit: use fewer consumers")
        self._waiting += 1
        group.queue.watchers.append(wake)
        try:
            while True:
                arrived.clear()
                async with unsynced.room(caller):
                    pulled = self._read(group, offset, count, expression)
                    unsynced.add(caller, pulled.size)
                if pulled.messages or loop.time() >= ends_s:
                    return pulled
                if pulled.next_offset > offset:
                    offset = pulled.next_offset
                    await asyncio.sleep(0)  # A filter that selects few messages lets others have their turn.
                    continue
                try:
                    async with asyncio.timeout_at(ends_s):
                        await arrived.wait()
                except TimeoutError:
                    return pulled
        finally:
            group.queue.watchers.remove(wake)
            self._waiting -= 1

    def _read(self, group: ConsumerGroup, offset: int, count: int, expression: Expression | None) -> _Pulled:
        """Return up to `count` messages that match, among the next entries from `offset` on."""
        if group.is_deleted:
            raise GroupUnknown(f"the group {group.name!r} on {group.filter!r} was deleted")
        found: list[tuple[Entry, bytes]] = []
        if group.settings.paused:
            return _Pulled(found, offset)
        room = RESPONSE_BYTES
        first, entries = group.queue.read_from(offset, SCANNED_MAX)
        for at, (position, size, _) in enumerate(ENTRY.iter_unpack(entries)):
            if len(found) == count or (found and size > room):
                return _Pulled(found, first + at)
            data = None if self._store.is_expired(position) else self._core.read(position, size)
            if data is None or data[KIND_AT] != Kind.MESSAGE or self._has_expired(group, data):
                continue
            if all(each is None or each.matches(data) for each in (expression, group.expression)):
                found.append((Entry(position, first + at, size, 1, FROM_QUEUE), data))
                room -= size
        return _Pulled(found, first + len(entries) // ENTRY_BYTES if entries else offset)

    def _has_expired(self, group: ConsumerGroup, data: bytes) -> bool:
        """Return whether the time to live of a message has passed. Dead letters don't expire."""
        expires_ms = expires_at_ms_of(data)
        if not 0 < expires_ms <= self._store.now_ms() or group.filter.startswith(DEAD_LETTERS):
            return False
        return expires_ms <= self._store.now_for(store_ms_of(data))

    def _messages(self, pulled: _Pulled, asked: Any) -> list[Any]:
        namespace, dead_letters_of, store_host = namespace_of(asked), dead_letters_group(asked), self._host()
        return [
            message_of(
                decode(data, position=entry.position, verify=False),
                entry=entry,
                store_host=store_host,
                namespace=namespace,
                dead_letters_of=dead_letters_of,
            )
            for entry, data in pulled.messages
        ]

    def _group(self, request: Any) -> ConsumerGroup:
        """Return the group of a request. Raises Refused, AccessDenied, and what `Groups.get_or_create` raises."""
        name, topic_filter = group_of(request.group), filter_of(request.message_queue.topic)
        check_permitted_throughout(POP, topic_filter)
        return self._groups.get_or_create(name, topic_filter, causer=causer_of_call())

    def _check_offset(self, queue: LightQueue, offset: int) -> None:
        if not 0 <= offset <= queue.next_offset:
            raise Refused(Code.ILLEGAL_OFFSET, f"the offset is {offset}: use 0 to {queue.next_offset}")
