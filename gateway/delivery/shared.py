"""Shared subscriptions: `$share/{name}/{filter}`. MQTT 5.0, 4.8.2; clients of MQTT 3.1.1 have them just so.

A shared subscription is a POP group: the one with that name and filter. So devices that share a subscription, and services that
pop the same group over gRPC, share one load, whoever came first. Where there is no such group one is made, which begins with
what comes from then on, and ends with the last session that has the subscription; unless by then a service uses it.

All sessions with one shared subscription, its *members*, are one consumer to POP. It takes what is visible under one checkpoint
and deals it out among the members that have room for it, in turn. What a member gets, it has in the order of the queue. Its
PUBACK or PUBREC is the acknowledgement; what goes out at QoS 0 is acknowledged as it is sent. What comes of a message whose
client says nothing:

- QoS 1: when the connection ends it goes back, at once and uncounted, and another member gets it. When `share_ack_timeout_ms`
  is over it comes back as a new attempt, as from any consumer; a PUBACK that comes later still frees the packet id.
- QoS 2: it stays that client's as long as its session lasts [MQTT-4.8.2-4]; and when that ends nobody gets it [MQTT-4.8.2-5].
- An ack that refuses it makes it a dead letter of the group: no other member gets it [MQTT-4.8.2-6].
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Final

import numpy as np
import structlog

from penstock.gateway.delivery.encoding import Slot, Terms, encode_run
from penstock.gateway.delivery.subscription import PUMP_ENTRIES, Subscription, SubscriptionForbidden
from penstock.gateway.protocol.parsers import SHARE
from penstock.gateway.sessions.sessions import OWNER
from penstock.pop.core.admin import GroupAdmin
from penstock.pop.core.checkpoint import delivery_id, delivery_of
from penstock.pop.core.group import ConsumerGroup
from penstock.pop.core.names import check_group_name
from penstock.pop.core.poll import Poll, PopResult
from penstock.pop.core.settings import GroupSettings
from penstock.pop.errors import GroupInvalid, Overloaded, PopError
from penstock.store.errors import DiskFull, LimitExceeded, StoreError, TopicInvalid
from penstock.store.lightqueue import ENTRY_BYTES, ENTRY_DTYPE, entries_array
from penstock.store.record import CHECKPOINT_ENTRY_DTYPE, Kind
from penstock.store.topics import check_filter

if TYPE_CHECKING:
    from penstock.gateway.gateway import Gateway
    from penstock.gateway.sessions.session import Session
    from penstock.gateway.sessions.stored import StoredSubscription

logger = structlog.get_logger("gateway")

TAKE_MAX: Final = 1024
"""Messages that are taken at a time for all members together: about 3 ms of the loop."""

TAKES_MAX: Final = 2
"""How often that is done in one turn of the loop, for one group."""

ASKED_MAX: Final = 16
"""Members of which it is looked up how much room they have, before a take."""

REFUSERS_MAX: Final = 16
"""Members who are offered, one after the other, what the plugins keep from those before them."""

REFUSED_MAX: Final = 64
"""Sets of members from whom messages are kept that others are to be offered."""

RETRY_S: Final = 1.0
"""How soon it is tried again to take, or to make a group, where a limit forbade it."""

MADE: Final = GroupSettings(shared=True)


class SharedUnavailable(StoreError):
    """Raised when shared subscriptions are switched off."""


def split_share(topic_filter: str) -> tuple[str, str]:
    """Return the name and the filter in `$share/{name}/{filter}`.

    Raises:
        TopicInvalid: it breaks MQTT 5.0, 4.8.2, or no POP group can be called like that.
    """
    name, slash, shared = topic_filter.removeprefix(SHARE).partition("/")
    if not name or "+" in name or "#" in name:  # [MQTT-4.8.2-1], [MQTT-4.8.2-2]
        raise TopicInvalid(f"the share name {name[:64]!r} is empty or has a wildcard; use $share/NAME/FILTER [MQTT-4.8.2-2]")
    if not slash or not shared:
        raise TopicInvalid(f"no filter follows the share name {name[:64]!r}; use $share/NAME/FILTER [MQTT-4.8.2-2]")
    if shared.startswith("$"):
        raise TopicInvalid(f"the filter {shared[:64]!r} can't be shared: topics that begin with '$' are the node's own")
    try:
        check_group_name(name)
    except GroupInvalid as error:
        raise TopicInvalid(f"a shared subscription is a POP group: {error}") from error
    return name, check_filter(shared)


class SharedSubscription(Subscription):
    """What one session gets from a filter that it shares with others.

    It is `live` while it waits for its turn; else it is among the lagging of its connection, and waits there again when it has
    room.

    Parameters:
        session, topic_filter, options, identifier: as of a `Subscription`; the filter with `$share/` and the name.
        members: those that it shares with.
    """

    __slots__ = ("_undecided", "members")

    is_shared = True

    def __init__(self, session: Session, topic_filter: str, members: Members, options: int, identifier: int) -> None:
        super().__init__(session, topic_filter, members.group.queue, options, identifier)
        self.members = members
        self._undecided: deque[tuple[bytes, list[int], Refusers]] = deque()
        """Messages that were dealt to it, of which the plugins have not said whether it may have them."""

    def matches(self, topic: str) -> bool:
        """Return False: it sends for itself, whatever else the session subscribes to."""
        return False

    @property
    def _has_siblings(self) -> bool:
        return False

    def join(self) -> None:
        self.connection.lagging[self] = None

    def rest(self) -> None:
        self.live = False
        self.connection.lagging.pop(self, None)
        self.members.withdraw(self)
        for _, deliveries, _ in self._undecided:
            self.members.settle(Kind.POP_REVIVED, deliveries)
        self._undecided.clear()

    def release(self) -> None:
        self.members.shared.left(self.members)

    def lag(self) -> None:
        super().lag()
        self.members.withdraw(self)

    @property
    def room(self) -> int:
        """How many messages it takes now."""
        if not self.connection.writable or self._undecided:
            return 0
        return min(self.session.room, PUMP_ENTRIES) if self.qos else PUMP_ENTRIES

    def pump(self) -> None:
        """Go on where the plugins have answered; wait for a turn where there is room."""
        while self._undecided and self.connection.writable:
            entries, deliveries, refusers = self._undecided.popleft()
            is_decided = self._decide(*self.members.still_open(entries, deliveries), refusers)
            self.members.flush()
            if not is_decided:
                return
        if not self.live and self.room > 0:
            self.live = True
            self.connection.lagging.pop(self, None)
            self.members.wait(self)

    # --- what it is dealt -------------------------------------------------------------------------------------------

    def give(self, entries: bytes, deliveries: list[int], refusers: Refusers) -> None:
        """Send messages, no more than there is `room`.

        Args:
            entries: of a light queue.
            deliveries: their ids, in order.
            refusers: the members who may not have them.
        """
        if self.connection.guard is None:
            self._send_all(entries, deliveries)
        else:
            self._decide(entries, deliveries, refusers)

    def _decide(self, entries: bytes, deliveries: list[int], refusers: Refusers) -> bool:
        """Send what the plugins allow, and let others have what they don't; return False where they must be asked first."""
        admitted, passed = self._admit(entries)
        allowed = set(entries_array(admitted)["position"].tolist())
        positions = entries_array(entries)["position"].tolist()
        yes = [at for at in range(passed) if positions[at] in allowed]
        no = [at for at in range(passed) if positions[at] not in allowed]
        if passed < len(positions):
            self._undecided.appendleft((entries[passed * ENTRY_BYTES :], deliveries[passed:], refusers))
            self.lag()
        if no:
            self.members.refuse(*chosen(entries, deliveries, no), refusers | {self})
        room = max(self.session.room, 0) if self.qos else len(yes)
        if len(yes) > room:  # it was used up while the plugins thought
            self.members.settle(Kind.POP_REVIVED, [deliveries[at] for at in yes[room:]])
        if yes[:room]:
            self._send_all(*chosen(entries, deliveries, yes[:room]))
        return passed == len(positions)

    def _send_all(self, entries: bytes, deliveries: list[int]) -> None:
        """Send messages. Those that wait for no ack are done: of QoS 0, expired, too large for the client [MQTT-3.1.2-25]."""
        if self.is_own or self._may_object:
            run = self._encode(entries, is_retained=False)
        else:  # POP has checked their checksums
            run = encode_run(self.connection.store, entries, self.terms)
        done: list[int] = []
        if len(run.slots) < len(deliveries):
            deliveries, done = _with_slots(run.slots, entries, deliveries)
        if self.qos == 2 and self.session.expiry_s:
            deliveries = self._held(run.slots, deliveries)
        slots = [
            Slot(offset, qos, position, size, delivery)
            for (offset, qos, position, size, _), delivery in zip(run.slots, deliveries, strict=True)
        ]
        if self._send(run._replace(slots=slots)):
            self.members.done(done)
        else:
            self.members.settle(Kind.POP_REVIVED, done + deliveries)
            self.lag()

    def _held(self, slots: list[Slot], deliveries: list[int]) -> list[int]:
        """Let messages of QoS 2 be this client's as long as its session lasts without it [MQTT-4.8.2-4]; return the new ids."""
        places = [at for at, slot in enumerate(slots) if slot.qos == 2]
        if not places:
            return deliveries
        fresh = self.members.hold([deliveries[at] for at in places], self.session.expiry_s)
        deliveries = list(deliveries)
        for at, delivery in zip(places, fresh, strict=True):
            deliveries[at] = delivery
        return deliveries


def _with_slots(slots: list[Slot], entries: bytes, deliveries: list[int]) -> tuple[list[int], list[int]]:
    """Return the deliveries that the slots are of, and the others."""
    left = iter(slots)
    wanted = next(left, None)
    waiting, others = [], []
    for position, delivery in zip(entries_array(entries)["position"].tolist(), deliveries, strict=True):
        if wanted is not None and wanted.position == position:
            waiting.append(delivery)
            wanted = next(left, None)
        else:
            others.append(delivery)
    return waiting, others


Refusers = frozenset[SharedSubscription]

NOBODY: Final[Refusers] = frozenset()


class Members:
    """All that have one shared subscription: to POP, one consumer of the group.

    Parameters:
        shared: all of these.
        name, topic_filter: of the group.
        group: what they consume together.
    """

    __slots__ = (
        "_done",
        "_poll",
        "_refused",
        "_retry",
        "_scheduled",
        "_waiting",
        "count",
        "filter",
        "group",
        "name",
        "shared",
    )

    def __init__(self, shared: SharedSubscriptions, name: str, topic_filter: str, group: ConsumerGroup) -> None:
        self.shared = shared
        self.name = name
        self.filter = topic_filter
        self.group = group
        self.count = 0
        """Subscriptions of clients that are connected."""
        self._waiting: OrderedDict[SharedSubscription, None] = OrderedDict()
        """Those that had room when they were last seen; whose turn comes next is first."""
        self._poll: Poll | None = None
        """What waits at the group for a message: one for all members."""
        self._done: list[int] = []
        self._refused: dict[Refusers, tuple[bytearray, list[int]]] = {}
        """What the plugins keep from some members, until others have room for it."""
        self._scheduled = False
        self._retry: asyncio.TimerHandle | None = None

    def wait(self, member: SharedSubscription) -> None:
        """Let a member wait for its turn."""
        self._waiting[member] = None
        self.pump()

    def withdraw(self, member: SharedSubscription) -> None:
        """Let a member wait no more."""
        self._waiting.pop(member, None)
        if not self._waiting:
            self._stop_waiting()

    def end(self) -> None:
        """Give back what is kept. No member is left."""
        if self._retry is not None:
            self._retry.cancel()
        for _, deliveries in self._refused.values():
            self.settle(Kind.POP_REVIVED, deliveries)
        self._refused.clear()

    # --- taking -----------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Take what is visible and deal it out, as far as members have room; wait for more where nothing is."""
        core = self.shared.core
        if self._refused:
            self._offer()
        for _ in range(TAKES_MAX):
            room = self._room()
            if not room:
                return
            if self._poll is not None:
                self._poll.messages_max = room
                return
            if self.group.is_deleted:
                return  # `renew` goes on
            taken = core.pop(self.group, room, self.shared.ack_timeout_ms) if not self.group.polls else None
            if taken is None:
                self._wait(room)
                return
            self._deal_out(taken)
        self._pump_soon()

    def _room(self) -> int:
        """Return how many messages to take: what the first members have room for, and of each of the others one."""
        while self._waiting:
            room = 0
            for member in tuple(islice(self._waiting, ASKED_MAX)):
                its_room = member.room
                room += max(its_room, 0)
                if its_room <= 0:
                    member.lag()
            if room:
                return min(max(room, len(self._waiting)), TAKE_MAX)
        return 0

    def _pump_soon(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self.shared.loop.call_soon(self._pump_on)

    def _pump_on(self) -> None:
        self._scheduled = False
        self.pump()

    def _try_later(self) -> None:
        if self._retry is None:
            self._retry = self.shared.loop.call_later(RETRY_S, self._try_again)

    def _try_again(self) -> None:
        self._retry = None
        if self.group.is_deleted:
            self.renew()
        else:
            self.pump()

    def _wait(self, room: int) -> None:
        poll = Poll(self.shared.loop.create_future(), room, self.shared.ack_timeout_ms)
        try:
            self.shared.core.polls.add(poll, self.group)
        except Overloaded:  # pop.waiters_max: gRPC's polls come and go
            self._try_later()
            return
        self._poll = poll
        poll.future.add_done_callback(self._arrived)

    def _stop_waiting(self) -> None:
        poll, self._poll = self._poll, None
        if poll is not None:
            self.shared.core.polls.remove(poll, self.group)
            if not poll.future.done():
                poll.future.remove_done_callback(self._arrived)

    def _arrived(self, future: asyncio.Future[PopResult]) -> None:
        poll = self._poll
        if poll is not None and poll.future is future:
            self._poll = None
            self.shared.core.polls.remove(poll, self.group)
        if future.exception() is None:
            self._deal_out(future.result())
        self.pump()

    def renew(self) -> None:
        """Get a group in place of one that an operator has deleted: the subscriptions are there still."""
        try:
            self.group = self.shared.group(self.name, self.filter)
        except StoreError as error:
            logger.warning("shared.idle", group=self.name, filter=self.filter[:80], why=str(error))
            self._try_later()
            return
        self._pump_soon()

    # --- dealing ----------------------------------------------------------------------------------------------------

    def _deal_out(self, taken: PopResult) -> None:
        checkpoint = taken.checkpoint
        taken_entries = np.frombuffer(checkpoint.body, dtype=CHECKPOINT_ENTRY_DTYPE)
        entries = np.zeros(len(taken_entries), dtype=ENTRY_DTYPE)
        entries["position"], entries["size"] = taken_entries["position"], taken_entries["size"]
        first = delivery_id(checkpoint.position)
        deliveries = list(range(first, first + len(entries)))
        if None in taken.records:  # settled already: they have expired, or can't be read
            readable = [at for at, data in enumerate(taken.records) if data is not None]
            entries, deliveries = entries[readable], [deliveries[at] for at in readable]
        self.deal(entries.tobytes(), deliveries)
        self.flush()

    def deal(self, entries: bytes, deliveries: list[int]) -> None:
        """Deal messages out: each member that waits gets as many as the others, one after the other, if it has room for them.

        Those who get one more than the others, where it doesn't come out even, are the last to get one more the next time. What
        nobody has room for goes back.
        """
        at, count, waiting = 0, len(deliveries), self._waiting
        while at < count and waiting:
            share, more = divmod(count - at, len(waiting))
            for number, member in enumerate(tuple(islice(waiting, None if share else more))):
                room = member.room
                if room <= 0:
                    member.lag()
                    continue
                if number < more:
                    waiting.move_to_end(member)
                stop = at + min(share + (number < more), room)
                member.give(entries[at * ENTRY_BYTES : stop * ENTRY_BYTES], deliveries[at:stop], NOBODY)
                at = stop
        if at < count:
            self.settle(Kind.POP_REVIVED, deliveries[at:])

    def refuse(self, entries: bytes, deliveries: list[int], refusers: Refusers) -> None:
        """Offer messages to others than those who may not have them.

        Where all may not, or a few have been asked, they stay out until their time is over. Then they are a new attempt, of
        which there is an end: so nothing goes round in circles.
        """
        if len(refusers) >= min(self.count, REFUSERS_MAX):
            return
        kept = self._refused.get(refusers)
        if kept is None:
            if len(self._refused) >= REFUSED_MAX:
                return
            kept = self._refused[refusers] = bytearray(), []
        if len(kept[1]) < TAKE_MAX:
            kept[0].extend(entries)
            kept[1].extend(deliveries)
        self._pump_soon()

    def _offer(self) -> None:
        """Give what some members may not have to others that wait."""
        for refusers in tuple(self._refused):
            while refusers in self._refused:
                asked = islice(self._waiting, REFUSERS_MAX + 1)
                member = next((each for each in asked if each not in refusers and each.room > 0), None)
                if member is None:
                    break
                self._waiting.move_to_end(member)
                entries, deliveries = self._refused[refusers]
                count = member.room
                portion = self.still_open(bytes(entries[: count * ENTRY_BYTES]), deliveries[:count])
                del entries[: count * ENTRY_BYTES], deliveries[:count]
                if not deliveries:
                    del self._refused[refusers]
                member.give(*portion, refusers)
        self.flush()

    def still_open(self, entries: bytes, deliveries: list[int]) -> tuple[bytes, list[int]]:
        """Return those of some messages whose time is not over: others may have the rest by now."""
        is_open = self.shared.core.is_open
        left = [at for at, delivery in enumerate(deliveries) if is_open(delivery)]
        return (entries, deliveries) if len(left) == len(deliveries) else chosen(entries, deliveries, left)

    # --- settling ---------------------------------------------------------------------------------------------------

    def done(self, deliveries: list[int]) -> None:
        """Note what is acknowledged as soon as it is sent; `flush` does it."""
        self._done += deliveries

    def flush(self) -> None:
        """Acknowledge what is done, in one record."""
        done, self._done = self._done, []
        if done:
            self.settle(Kind.POP_ACK, done)

    def settle(self, kind: Kind, deliveries: list[int]) -> None:
        """Settle deliveries: see `PopCore.settle`."""
        self.shared.settle(kind, deliveries)

    def hold(self, deliveries: list[int], expiry_s: int) -> list[int]:
        """Keep deliveries from all others as long as a session may last; return their new ids."""
        try:
            return self.shared.core.extend(self.group, deliveries, self.shared.ack_timeout_ms + expiry_s * 1000)
        except DiskFull:
            return deliveries


def chosen(entries: bytes, deliveries: list[int], places: list[int]) -> tuple[bytes, list[int]]:
    """Return the messages at some places."""
    return entries_array(entries)[places].tobytes(), [deliveries[at] for at in places]


class SharedSubscriptions:
    """The shared subscriptions of a node.

    Parameters:
        gateway: whose sessions have them.
        admin: makes and deletes groups.
        may_share: whether a user may take from a group; None where everybody may.
    """

    def __init__(self, gateway: Gateway, admin: GroupAdmin, may_share: Callable[[str, str], bool] | None = None) -> None:
        self._gateway = gateway
        self._may_share = may_share
        self._admin = admin
        self.core = admin.core
        admin.on_deleted.append(self._deleted)
        self.ack_timeout_ms = gateway.options.share_ack_timeout_ms
        self.loop: asyncio.AbstractEventLoop
        self._members: dict[tuple[str, str], Members] = {}
        self._acked: list[int] = []
        """What was acknowledged in this turn of the loop."""
        self._owed: list[tuple[Kind, list[int]]] = []
        """What the disk had no room to note. What is out is bounded, and so is this."""

    def __len__(self) -> int:
        return len(self._members)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin. All sessions that outlast a restart have their subscriptions again: groups that were made for others end."""
        self.loop = loop
        self._gateway.store.space.on_relief.append(self._relieved)
        self._sweep()

    def _sweep(self) -> None:
        for group in tuple(self.core):
            self._delete_unused(group)

    def _deleted(self, group: ConsumerGroup) -> None:
        members = self._members.get((group.name, group.filter))
        if members is not None:
            members.renew()

    def _relieved(self) -> None:
        owed, self._owed = self._owed, []
        for kind, deliveries in owed:
            self.settle(kind, deliveries)
        self._sweep()

    # --- subscribing ------------------------------------------------------------------------------------------------

    def subscribe(self, session: Session, topic_filter: str, options: int, identifier: int) -> SharedSubscription:
        """Give a session a shared subscription, in place of the one to the same filter that it has; return it, to `begin`.

        Raises:
            SharedUnavailable: they are switched off.
            SubscriptionForbidden: the group is not for this client.
            TopicInvalid, LimitExceeded, DiskFull: the filter is refused.
        """
        if self._gateway.options.shared == "off":
            raise SharedUnavailable("shared subscriptions are switched off: see mqtt.shared")
        members = self._attach(session, topic_filter)
        try:
            if session.lasts:
                retry = members.group.retry
                self._gateway.lifetimes.subscribe(session, topic_filter, options, identifier, None, queue=retry)
        except StoreError:
            self._forget(members)
            raise
        old = session.subscriptions.get(topic_filter)
        subscription = SharedSubscription(session, topic_filter, members, options, identifier)
        if session.stored is not None and session.lasts:
            subscription.stored = session.stored.subscriptions[topic_filter]
            subscription.cursor = subscription.stored.cursor
        if old is not None:
            old.rest()
            subscription.number = old.number
            session.subscriptions[topic_filter] = subscription
        else:
            session.subscribed += 1
            self._gateway.counters.subscriptions += 1
            self._add(session, subscription)
        return subscription

    def take_up(self, session: Session, stored: StoredSubscription) -> None:
        """Give a session a shared subscription that is stored of it."""
        try:
            members = self._attach(session, stored.filter)
        except StoreError as error:
            logger.error("subscription.lost", client=session.client_id, filter=stored.filter[:80], why=str(error))
            return
        subscription = SharedSubscription(session, stored.filter, members, stored.options, stored.identifier)
        subscription.number, subscription.cursor, subscription.stored = stored.number, stored.cursor, stored
        self._add(session, subscription)

    def _add(self, session: Session, subscription: SharedSubscription) -> None:
        session.subscriptions[subscription.filter] = subscription
        subscription.members.count += 1
        self._gateway.counters.subscriptions_shared += 1

    def _attach(self, session: Session, shared_filter: str) -> Members:
        name, topic_filter = split_share(shared_filter)
        if self._may_share is not None and not self._may_share(session.user, name):
            who = f"the user {session.user[:80]!r}" if session.user else "a client whose user name nobody vouches for"
            raise SubscriptionForbidden(f"{who} may not take from the group {name!r}: see pop.access_file")
        members = self._members.get((name, topic_filter))
        if members is None:
            most = self._gateway.options.shared_max
            if len(self._members) >= most:
                raise LimitExceeded(f"{len(self._members)} filters are shared, which is the limit: see mqtt.shared_max")
            members = self._members[name, topic_filter] = Members(self, name, topic_filter, self.group(name, topic_filter))
        return members

    def group(self, name: str, topic_filter: str) -> ConsumerGroup:
        """Return the group of a name and filter; make it where there is none. Raises TopicInvalid, LimitExceeded, DiskFull."""
        group = self.core.state.groups.get((name, topic_filter))
        if group is not None:
            return group
        try:
            return self.core.groups.create(name, topic_filter, "latest", MADE)
        except PopError as error:
            raise LimitExceeded(str(error)) from error

    def _forget(self, members: Members) -> None:
        """Give up a group that no connected client shares, and delete it where that was all it was for."""
        if not members.count:
            del self._members[members.name, members.filter]
            self._delete_unused(members.group)

    def left(self, members: Members) -> None:
        """Note that a client shares a subscription no more, or has left."""
        members.count -= 1
        if not members.count:
            members.end()
        self._forget(members)

    def _delete_unused(self, group: ConsumerGroup) -> None:
        """Delete a group that devices made and none needs: neither one that is connected, nor one whose session lasts."""
        is_unused = (group.name, group.filter) not in self._members and OWNER not in group.retry.owners
        if group.settings.shared and is_unused and not group.is_deleted:
            try:
                self._admin.delete(group.name, group.filter)
            except DiskFull:
                return  # `_relieved` tries again

    # --- deliveries -------------------------------------------------------------------------------------------------

    def acknowledge(self, delivery: int) -> None:
        """Note that a delivery is acknowledged: all of one turn of the loop, whoever's, in one record."""
        if not self._acked:
            self.loop.call_soon(self.flush)
        self._acked.append(delivery)

    def flush(self) -> None:
        """Acknowledge what was noted."""
        if self._acked:
            acked, self._acked = self._acked, []
            self.settle(Kind.POP_ACK, acked)

    def settle(self, kind: Kind, deliveries: Iterable[int]) -> None:
        """Settle deliveries, as `PopCore.settle` does; later, where the disk has no room to note it."""
        deliveries = list(deliveries)
        try:
            settled = self.core.settle(kind, deliveries)
        except DiskFull:
            self._owed.append((kind, deliveries))
            return
        if kind is Kind.POP_REVIVED:
            self._gateway.counters.deliveries_returned += settled

    def away(self, session: Session) -> None:
        """Let others have what a client has not acknowledged whose connection has ended. What is of QoS 2 stays its own.

        If that was its session, nobody gets it [MQTT-4.8.2-5].
        """
        inflight = session.inflight
        shared = {packet_id: slot for packet_id, slot in inflight.items() if slot is not None and slot.delivery}
        for packet_id, slot in shared.items():
            if slot.qos == 1:
                del inflight[packet_id]
        self.lost(shared)
        if not session.expiry_s:
            self.ended(shared, [])

    def lost(self, inflight: Mapping[int, Slot | None]) -> None:
        """Let others have what a client has not acknowledged that left when the node ended without an end."""
        back = [slot.delivery for slot in inflight.values() if slot is not None and slot.delivery and slot.qos == 1]
        if back:
            self.settle(Kind.POP_REVIVED, back)

    def ended(self, inflight: Mapping[int, Slot | None], filters: list[str]) -> None:
        """Let nobody have what a session that ended has left of QoS 2 [MQTT-4.8.2-5]; delete the groups that none needs now."""
        left = [slot.delivery for slot in inflight.values() if slot is not None and slot.delivery and slot.qos == 2]
        if left:
            self.settle(Kind.POP_ACK, left)
        for topic_filter in filters:
            if topic_filter.startswith(SHARE):
                group = self.core.state.groups.get(split_share(topic_filter))
                if group is not None:
                    self._delete_unused(group)

    def terms(self, session: Session, delivery: int) -> Terms | None:
        """Return the terms under which a session gets a delivery; None where it has that subscription no more."""
        checkpoint = self.core.state.checkpoints.get(delivery_of(delivery)[0])
        group = self.core.state.groups_by_id.get(checkpoint.group_id) if checkpoint is not None else None
        subscription = session.subscriptions.get(f"{SHARE}{group.name}/{group.filter}") if group is not None else None
        return subscription.terms if subscription is not None else None
