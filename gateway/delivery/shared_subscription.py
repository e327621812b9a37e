"""What one client gets from a filter that it shares with others. MQTT 5.0, 4.8.2."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from penstock.gateway.delivery.encoding import EncodedBatch, encode_batch, encode_for_client
from penstock.gateway.delivery.subscription import PACKET_BYTES_UNLIMITED, PUMP_ENTRIES, Subscription
from penstock.gateway.sessions.inflight import Slot
from penstock.gateway.sessions.unrecorded import NOT_QUEUED
from penstock.store.queues.lightqueue import ENTRY_BYTES, entries_array

if TYPE_CHECKING:
    from penstock.gateway.delivery.client_subscriptions import ClientSubscriptions
    from penstock.gateway.delivery.share_group import ShareGroup

Refusers = frozenset["SharedSubscription"]
"""Members of a share group that can't take some messages: they may not have them, or the messages are too large for them."""

NO_REFUSERS: Final[Refusers] = frozenset()


class SharedSubscription(Subscription):
    """What one client gets from a filter that it shares with others.

    It is `live` while it waits for its turn in the group. Otherwise it is among the lagging subscriptions of its outlet, and
    waits for its turn again when it has room.

    Parameters:
        subscriber, granted, identifier: as of a `Subscription`.
        topic_filter: with `$share/` and the share name.
        group: the share group.
    """

    __slots__ = ("_undecided", "group")

    is_shared = True

    def __init__(
        self, subscriber: ClientSubscriptions, topic_filter: str, group: ShareGroup, granted: int, identifier: int
    ) -> None:
        super().__init__(subscriber, topic_filter, group.group.queue, granted, identifier)
        self.group = group
        self._undecided: deque[tuple[bytes, list[int], Refusers]] = deque()
        """Messages dealt to it of which the plugins have not yet said whether the client may have them."""

    def matches(self, topic: str) -> bool:
        """Return False: a shared subscription sends for itself, whatever else the session subscribes to."""
        return False

    @property
    def _has_siblings(self) -> bool:
        return False

    def start(self) -> None:
        self.update_is_own()
        self.outlet.lagging[self] = None

    def stop(self) -> None:
        self.live = False
        self.outlet.lagging.pop(self, None)
        self.group.dequeue(self)
        self._give_back()

    def _give_back(self) -> None:
        """Return what is not decided to the group, uncounted, so that other members get it."""
        for _, deliveries, _ in self._undecided:
            self.group.revive(deliveries)
        self._undecided.clear()

    def release(self) -> None:
        self.group.leave(self)

    def fall_behind(self) -> None:
        super().fall_behind()
        self.group.dequeue(self)

    @property
    def room(self) -> int:
        """How many messages it takes now."""
        if not self.outlet.writable or self._undecided:
            return 0
        return min(self.session.inflight.room, PUMP_ENTRIES) if self.qos else PUMP_ENTRIES

    @property
    def packet_bytes_max(self) -> int:
        """The client's maximum packet size, in bytes."""
        return self.outlet.packet_bytes_max or PACKET_BYTES_UNLIMITED

    def pump(self) -> None:
        """Send what the plugins have decided about; wait for a turn in the group if there is room.

        While the plugins give no answer it takes nothing, and gives back what it has.
        """
        permissions = self.outlet.permissions
        if permissions is not None and permissions.is_unanswered:
            self._give_back()
            return
        while self._undecided and self.outlet.writable:
            entries, deliveries, refusers = self._undecided.popleft()
            is_decided = self._decide(*self.group.still_open(entries, deliveries), refusers)
            self.group.flush()
            if not is_decided:
                return
        if not self.live and self.room > 0:
            self.live = True
            self.outlet.lagging.pop(self, None)
            self.group.enqueue(self)

    # --- messages dealt to it ---------------------------------------------------------------------------------------

    def receive(self, entries: bytes, deliveries: list[int], refusers: Refusers) -> None:
        """Send messages that the group has dealt to it, no more than there is `room`.

        Args:
            entries: of a light queue.
            deliveries: the ids of their deliveries, in order.
            refusers: the members that can't take them.
        """
        permissions = self.outlet.permissions
        if permissions is None or permissions.passes_all:
            self._send_all(entries, deliveries, refusers)
        else:
            self._decide(entries, deliveries, refusers)

    def _decide(self, entries: bytes, deliveries: list[int], refusers: Refusers) -> bool:
        """Send what the plugins allow, and offer the rest to others; return False if the plugins must be asked first."""
        admitted, decided = self._admit(entries)
        allowed = set(entries_array(admitted)["position"].tolist())
        positions = entries_array(entries)["position"].tolist()
        yes = [at for at in range(decided) if positions[at] in allowed]
        no = [at for at in range(decided) if positions[at] not in allowed]
        if decided < len(positions):
            self._undecided.appendleft((entries[decided * ENTRY_BYTES :], deliveries[decided:], refusers))
            self.fall_behind()
        if no:
            self.group.offer_others(*select(entries, deliveries, no), refusers | {self})
        room = max(self.session.inflight.room, 0) if self.qos else len(yes)
        if len(yes) > room:  # Other deliveries have used the room up while the plugins decided.
            self.group.revive([deliveries[at] for at in yes[room:]])
        if yes[:room]:
            self._send_all(*select(entries, deliveries, yes[:room]), refusers)
        return decided == len(positions)

    def _send_all(self, entries: bytes, deliveries: list[int], refusers: Refusers) -> None:
        """Send messages, and offer those that are too large for the client to others, as MQTT 5.0, 3.1.2.11.4 allows.

        Deliveries at QoS 0 get no acknowledgement of the client, and are done at once. Messages that have expired meanwhile
        return to the group, whose next pop acknowledges them as expired.
        """
        if self.is_own or self._may_reject:
            store, limit = self.context.store, self.packet_bytes_max
            batch = encode_for_client(
                store,
                entries,
                self._options_alone,
                packet_bytes_max=limit,
                aliases=self.outlet.aliases,
                lasting=self.group.group.redriven,
            )
            if batch.too_large:
                self.group.offer_others(*select(entries, deliveries, batch.too_large), refusers | {self})
                too_large = set(batch.too_large)
                entries, deliveries = select(entries, deliveries, [at for at in range(len(deliveries)) if at not in too_large])
                if not deliveries:
                    return
        else:  # POP has checked the checksums.
            batch = encode_batch(self.context.store, entries, self.options, lasting=self.group.group.redriven)
        if batch.expired:
            expired, positions = set(batch.expired), entries_array(entries)["position"].tolist()
            self.group.revive([delivery for each, delivery in zip(positions, deliveries, strict=True) if each in expired])
            entries, deliveries = select(entries, deliveries, [at for at, each in enumerate(positions) if each not in expired])
        done: list[int] = []
        if len(batch.slots) < len(deliveries):
            deliveries, done = _with_slots(batch, entries, deliveries)
        if self.qos == 2 and self.session.expiry_s:
            deliveries = self._kept_for_client(batch.slots, deliveries)
        slots = [
            Slot(offset, qos, position, size, delivery)
            for (offset, qos, position, size, _), delivery in zip(batch.slots, deliveries, strict=True)
        ]
        if self._send(batch._replace(slots=slots), NOT_QUEUED):
            self.group.acknowledge_later(done)
        else:
            self.group.revive(done + deliveries)
            self.fall_behind()

    def _kept_for_client(self, slots: Sequence[Slot], deliveries: list[int]) -> list[int]:
        """Keep deliveries of QoS 2 for this client as long as its session lasts without it [MQTT-4.8.2-4].

        Return the ids of all deliveries, which are new for those that are kept.
        """
        places = [at for at, slot in enumerate(slots) if slot.qos == 2]
        if not places:
            return deliveries
        fresh = self.group.extend([deliveries[at] for at in places], self.session.expiry_s, self.session.client_id)
        deliveries = list(deliveries)
        for at, delivery in zip(places, fresh, strict=True):
            deliveries[at] = delivery
        return deliveries


def _with_slots(batch: EncodedBatch, entries: bytes, deliveries: list[int]) -> tuple[list[int], list[int]]:
    """Return the deliveries whose packets have a packet id, and the others."""
    slots = iter(batch.slots)
    wanted = next(slots, None)
    waiting, others = [], []
    for position, delivery in zip(entries_array(entries)["position"].tolist(), deliveries, strict=True):
        if wanted is not None and wanted.position == position:
            waiting.append(delivery)
            wanted = next(slots, None)
        else:
            others.append(delivery)
    return waiting, others


def select(entries: bytes, deliveries: list[int], places: Sequence[int]) -> tuple[bytes, list[int]]:
    """Return the messages at some places, as entries and deliveries."""
    return entries_array(entries)[list(places)].tobytes(), [deliveries[at] for at in places]
