"""All clients that have one shared subscription: to POP, one consumer of the group.

The group takes what is visible under one checkpoint and deals it out among the members that have room, in turn. Each member
gets its messages in the order of the queue.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Final

import numpy as np
import structlog

from penstock.gateway.delivery.share_settlements import ShareSettlements
from penstock.gateway.delivery.shared_subscription import NO_REFUSERS, Refusers, SharedSubscription, select
from penstock.pop.core.checkpoint import delivery_id, delivery_of
from penstock.pop.core.core import PopCore
from penstock.pop.core.polls import Poll
from penstock.pop.core.pops import PopResult
from penstock.pop.errors import Overloaded
from penstock.store.bodies import CHECKPOINT_ENTRY_DTYPE
from penstock.store.errors import DiskFull, StoreError
from penstock.store.queues.lightqueue import ENTRY_BYTES, ENTRY_DTYPE
from penstock.store.record import topic_of
from penstock.store.space.causer import Causer

if TYPE_CHECKING:
    from penstock.gateway.delivery.shared_subscriptions import SharedSubscriptions
    from penstock.gateway.sessions.session import Session

logger = structlog.get_logger("gateway")

TAKE_MAX: Final = 1024
"""Messages that a group takes at a time for all members together. It bounds how long the group occupies the loop."""

TAKES_MAX: Final = 2
"""How often one group takes messages in one turn of the loop."""

ASKED_MAX: Final = 16
"""Members whose room is looked up before messages are taken."""

REFUSERS_MAX: Final = 16
"""Members that are offered a message, one after the other, if those before them can't take it."""

REFUSED_MAX: Final = 64
"""Sets of refusers whose messages are kept for other members."""

UNTAKEN: Final = (
    "no member of the shared subscription could take this message: it exceeds their Maximum Packet Size, or they may not "
    "receive it"
)
"""Why a message is a dead letter."""

UNTAKEN_LOG_S: Final = 60.0
"""Seconds between two log lines of one group about messages that no member could take."""

KEPT_S_MAX: Final = 10.0
"""Seconds that messages wait for room of the members that can take them, before other consumers of the group may get them. It
is less if half of `mqtt.share_ack_timeout` is less, so that the messages return before that time counts as an attempt."""

RETRY_S: Final = 1.0
"""Seconds after which a group tries again to take messages, or to be created, if a limit prevented it."""


class ShareGroup:
    """All clients that have one shared subscription.

    Parameters:
        registry: the shared subscriptions of the node.
        core: of POP.
        settlements: settles deliveries.
        loop: of the node.
        ack_timeout_ms: time after which a delivery without an acknowledgement is a new attempt (`mqtt.share_ack_timeout`).
        name: the share name, which is the name of the POP group.
        topic_filter: of the POP group.
        causer: the first member, which is charged for the group.
    """

    __slots__ = (
        "_ack_timeout_ms",
        "_core",
        "_done",
        "_failed",
        "_loop",
        "_members",
        "_next_log_s",
        "_poll",
        "_polls",
        "_refused",
        "_registry",
        "_retry",
        "_return",
        "_scheduled",
        "_settlements",
        "_untaken",
        "_waiting",
        "causer",
        "filter",
        "group",
        "name",
    )

    def __init__(
        self,
        registry: SharedSubscriptions,
        core: PopCore,
        settlements: ShareSettlements,
        loop: asyncio.AbstractEventLoop,
        ack_timeout_ms: int,
        name: str,
        topic_filter: str,
        causer: Causer,
    ) -> None:
        self._registry = registry
        self._core = core
        self._polls = core.polls
        self._settlements = settlements
        self._loop = loop
        self._ack_timeout_ms = ack_timeout_ms
        self.name = name
        self.filter = topic_filter
        self.causer = causer
        self.group = registry.find_or_create(name, topic_filter, causer)
        """The POP group that the members consume."""
        self._members: set[SharedSubscription] = set()
        """Subscriptions of connected clients."""
        self._waiting: OrderedDict[SharedSubscription, None] = OrderedDict()
        """Members that had room when they were last seen. The one whose turn is next comes first."""
        self._poll: Poll | None = None
        """Waits at the POP group for messages: one poll for all members."""
        self._done: list[int] = []
        self._failed: list[int] = []
        """Deliveries that no member could take."""
        self._refused: dict[Refusers, tuple[bytearray, list[int]]] = {}
        """Messages that some members can't take, until others have room for them."""
        self._return: asyncio.TimerHandle | None = None
        """Returns what is in `_refused` to the group before its time has passed."""
        self._untaken = 0
        """Deliveries that no member could take since the last log line about them."""
        self._next_log_s = 0.0
        self._scheduled = False
        self._retry: asyncio.TimerHandle | None = None

    @property
    def count(self) -> int:
        """Number of members."""
        return len(self._members)

    @property
    def sessions(self) -> Iterator[Session]:
        """The sessions of the members."""
        return (member.session for member in self._members)

    def enqueue(self, member: SharedSubscription) -> None:
        """Let a member with room wait for its turn."""
        self._waiting[member] = None
        self.pump()

    def dequeue(self, member: SharedSubscription) -> None:
        """Let a member wait no longer."""
        self._waiting.pop(member, None)
        if not self._waiting:
            self._cancel_poll()

    def join(self, member: SharedSubscription) -> None:
        """Add a member to the group."""
        self._members.add(member)

    def leave(self, member: SharedSubscription) -> None:
        """Take a member out of the group. When the last one leaves, the group gives up what it keeps."""
        self._members.remove(member)
        if not self._members:
            if self._retry is not None:
                self._retry.cancel()
            self._return_refused()
        for refusers in [each for each in self._refused if self._members <= each]:
            self._failed += self._refused.pop(refusers)[1]
        self.flush()
        self._registry.forget_unused(self)

    # --- taking messages --------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Take what is visible and deal it out, as far as members have room. Wait for messages if none is visible."""
        if self._refused:
            self._offer_refused()
        for _ in range(TAKES_MAX):
            room = self._room()
            if not room:
                return
            if self._poll is not None:
                self._poll.messages_max = room
                return
            if self.group.is_deleted:
                return  # `recreate` goes on.
            taken = self._core.popper.pop(self.group, room, self._ack_timeout_ms) if not self.group.polls else None
            if taken is None:
                self._start_poll(room)
                return
            self._deal_taken(taken)
        self._pump_soon()

    def _room(self) -> int:
        """Return how many messages to take: as many as the first members have room for, and one for each other member.

        Together with the messages that are kept for other members, there are no more than `TAKE_MAX`: otherwise a member that
        can take few of them would empty the queue for one that is busy.
        """
        kept = sum(len(deliveries) for _, deliveries in self._refused.values()) if self._refused else 0
        while self._waiting and kept < TAKE_MAX:
            room = 0
            for member in tuple(islice(self._waiting, ASKED_MAX)):
                member_room = member.room
                room += max(member_room, 0)
                if member_room <= 0:
                    member.fall_behind()
            if room:
                return min(max(room, len(self._waiting)), TAKE_MAX - kept)
        return 0

    def _pump_soon(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._pump_scheduled)

    def _pump_scheduled(self) -> None:
        self._scheduled = False
        self.pump()

    def _retry_later(self) -> None:
        if self._retry is None:
            self._retry = self._loop.call_later(RETRY_S, self._retry_now)

    def _retry_now(self) -> None:
        self._retry = None
        if self.group.is_deleted:
            self.recreate()
        else:
            self.pump()

    def _start_poll(self, room: int) -> None:
        poll = Poll(self._loop.create_future(), room, self._ack_timeout_ms)
        try:
            self._polls.add(poll, self.group)
        except Overloaded:  # `PopOptions.waiters_max` polls wait. Those of gRPC clients end after a while.
            self._retry_later()
            return
        self._poll = poll
        poll.future.add_done_callback(self._poll_answered)

    def _cancel_poll(self) -> None:
        poll, self._poll = self._poll, None
        if poll is not None:
            self._polls.remove(poll, self.group)
            if not poll.future.done():
                poll.future.remove_done_callback(self._poll_answered)

    def _poll_answered(self, future: asyncio.Future[PopResult]) -> None:
        poll = self._poll
        if poll is not None and poll.future is future:
            self._poll = None
            self._polls.remove(poll, self.group)
        if future.cancelled():
            return  # the node drains, and hands out nothing more
        if future.exception() is None:
            self._deal_taken(future.result())
        self.pump()

    def recreate(self) -> None:
        """Get a POP group in place of one that an operator has deleted, because the subscriptions still exist."""
        try:
            self.group = self._registry.find_or_create(self.name, self.filter, self.causer)
        except StoreError as error:
            logger.warning("shared.idle", group=self.name, filter=self.filter[:80], why=str(error))
            self._retry_later()
            return
        self._pump_soon()

    # --- dealing messages out ---------------------------------------------------------------------------------------

    def _deal_taken(self, taken: PopResult) -> None:
        checkpoint = taken.checkpoint
        taken_entries = np.frombuffer(checkpoint.body, dtype=CHECKPOINT_ENTRY_DTYPE)
        entries = np.zeros(len(taken_entries), dtype=ENTRY_DTYPE)
        entries["position"], entries["size"] = taken_entries["position"], taken_entries["size"]
        first = delivery_id(checkpoint.position)
        deliveries = list(range(first, first + len(entries)))
        if None in taken.records:  # POP has settled these already: they have expired, or can't be read.
            readable = [at for at, data in enumerate(taken.records) if data is not None]
            entries, deliveries = entries[readable], [deliveries[at] for at in readable]
        self._deal(entries.tobytes(), deliveries)
        self.flush()

    def _deal(self, entries: bytes, deliveries: list[int]) -> None:
        """Deal messages out evenly among the members that wait and have room.

        If the messages don't divide evenly, the members that get one more are the last to get one more the next time. Messages
        for which no member has room return to the group.
        """
        at, count, waiting = 0, len(deliveries), self._waiting
        while at < count and waiting:
            share, more = divmod(count - at, len(waiting))
            for number, member in enumerate(tuple(islice(waiting, None if share else more))):
                room = member.room
                if room <= 0:
                    member.fall_behind()
                    continue
                if number < more:
                    waiting.move_to_end(member)
                stop = at + min(share + (number < more), room)
                member.receive(entries[at * ENTRY_BYTES : stop * ENTRY_BYTES], deliveries[at:stop], NO_REFUSERS)
                at = stop
        if at < count:
            self.revive(deliveries[at:])

    def offer_others(self, entries: bytes, deliveries: list[int], refusers: Refusers) -> None:
        """Offer messages to other members than those that can't take them. The caller calls `flush` afterwards.

        If no member can take them, or `REFUSERS_MAX` members were asked, the attempt has failed, and the number of attempts is
        limited. So no message is passed around for ever. Messages above `REFUSED_MAX` return to the group when their time has
        passed.
        """
        if len(refusers) >= REFUSERS_MAX or self._members <= refusers:
            self._failed += deliveries
            return
        kept = self._refused.get(refusers)
        if kept is None:
            if len(self._refused) >= REFUSED_MAX:
                return
            kept = self._refused[refusers] = bytearray(), []
        kept[0].extend(entries)
        kept[1].extend(deliveries)
        if self._return is None:
            self._return = self._loop.call_later(min(KEPT_S_MAX, self._ack_timeout_ms / 2000), self._return_refused)
        self._pump_soon()

    def _return_refused(self) -> None:
        """Return messages to the group, uncounted, for which those members that could take them have had no room for long."""
        if self._return is not None:
            self._return.cancel()
            self._return = None
        refused, self._refused = self._refused, {}
        if refused:
            self.revive([delivery for _, deliveries in refused.values() for delivery in deliveries])
            self._pump_soon()

    def _offer_refused(self) -> None:
        """Give messages that some members can't take to others that wait: first to one that takes the largest packets."""
        for refusers in tuple(self._refused):
            while refusers in self._refused:
                asked = (each for each in islice(self._waiting, REFUSERS_MAX + 1) if each not in refusers and each.room > 0)
                member = max(asked, key=lambda each: each.packet_bytes_max, default=None)
                if member is None:
                    break
                self._waiting.move_to_end(member)
                entries, deliveries = self._refused[refusers]
                count = member.room
                portion = self.still_open(bytes(entries[: count * ENTRY_BYTES]), deliveries[:count])
                del entries[: count * ENTRY_BYTES], deliveries[:count]
                if not deliveries:
                    del self._refused[refusers]
                member.receive(*portion, refusers)
        self.flush()

    def still_open(self, entries: bytes, deliveries: list[int]) -> tuple[bytes, list[int]]:
        """Return those messages whose invisible time has not passed. Others may have been delivered elsewhere by now."""
        is_open = self._core.deliveries.is_open
        places = [at for at, delivery in enumerate(deliveries) if is_open(delivery)]
        return (entries, deliveries) if len(places) == len(deliveries) else select(entries, deliveries, places)

    # --- settling deliveries ----------------------------------------------------------------------------------------

    def acknowledge_later(self, deliveries: list[int]) -> None:
        """Note deliveries that need no acknowledgement of the client. `flush` acknowledges them."""
        self._done += deliveries

    def flush(self) -> None:
        """Settle what was noted: one record for what is acknowledged, and one for what no member could take."""
        done, self._done = self._done, []
        if done:
            self._settlements.acknowledge(done)
        failed, self._failed = self._failed, []
        if failed:
            self._log_untaken(failed)
            self._settlements.fail(failed, UNTAKEN)

    def _log_untaken(self, deliveries: list[int]) -> None:
        """Log how many messages no member could take, and one of them, unless the group has logged that lately."""
        self._untaken += len(deliveries)
        now_s = self._loop.time()
        if now_s < self._next_log_s:
            return
        messages, topic = self._untaken, self._topic_of(deliveries[0])
        logger.warning(
            "shared.untaken",
            group=self.name,
            filter=self.filter[:80],
            topic=topic,
            messages=messages,
            members=self.count,
            why=UNTAKEN,
        )
        self._untaken = 0
        self._next_log_s = now_s + UNTAKEN_LOG_S

    def _topic_of(self, delivery: int) -> str:
        """Return the topic of an open delivery's message, or its first part; empty if the message is gone."""
        position, index = delivery_of(delivery)
        checkpoint = self._core.checkpoints.get(position)
        entry = checkpoint.entry(index) if checkpoint is not None else None
        record = self._core.read(entry.position, entry.size) if entry is not None else None
        return topic_of(record).decode(errors="replace")[:80] if record is not None else ""

    def revive(self, deliveries: list[int]) -> None:
        """Return deliveries to the group at once and uncounted, so that other members get them."""
        self._settlements.revive(deliveries)

    def extend(self, deliveries: list[int], expiry_s: int, client_id: str) -> list[int]:
        """Keep deliveries invisible to others for as long as the session of a client may last; return their new ids."""
        try:
            return self._core.deliveries.extend(
                self.group, deliveries, self._ack_timeout_ms + expiry_s * 1000, self._settlements.keeper_of(client_id)
            )
        except DiskFull:
            return deliveries
