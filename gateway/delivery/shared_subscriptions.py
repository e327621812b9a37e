"""Shared subscriptions: `$share/{name}/{filter}`. MQTT 5.0, 4.8.2; clients of MQTT 3.1.1 may use them in the same way.

A shared subscription is the POP group with that name and filter. So devices that share a subscription and services that pop the
same group over gRPC share one load, whichever came first. If there is no such group the node creates one. The group begins with
what comes from then on, and ends with the last session that has the subscription, unless a service uses it by then.

All sessions with one shared subscription are the *members* of a share group (`delivery.share_group`), which is one consumer to
POP. A member's PUBACK or PUBREC is the acknowledgement. A delivery at QoS 0 is acknowledged when it is sent. What becomes of a
delivery that the client does not acknowledge:

- QoS 1: when the connection ends the delivery returns to the group, at once and uncounted, and another member gets the message.
  After `share_ack_timeout_ms` the message is visible again as a new attempt, as after any consumer; a PUBACK that comes later
  still frees the packet id.
- QoS 2: the delivery stays with its client for as long as the session lasts [MQTT-4.8.2-4]. If the session ends, nobody gets
  the message [MQTT-4.8.2-5]. If the client comes back and can't take the message any more, it becomes a dead letter.
- An acknowledgement that refuses the message makes it a dead letter of the group. No other member gets it [MQTT-4.8.2-6].

A member can't take a message that it may not receive, or that is larger than its Maximum Packet Size. Such a message goes to
another member (3.1.2.11.4). If no member can take it, the attempt has failed: the message returns to the group after the
back-off, and is a dead letter after the last attempt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Mapping
from typing import Final

from penstock.gateway.counters import GatewayCounters
from penstock.gateway.delivery.share_filter import group_of_share
from penstock.gateway.delivery.share_group import ShareGroup
from penstock.gateway.delivery.share_settlements import ShareSettlements
from penstock.gateway.protocol.topics import SHARE
from penstock.gateway.sessions.inflight import Slot
from penstock.gateway.sessions.session import Session
from penstock.gateway.sessions.stored_sessions import OWNER
from penstock.pop.core.checkpoint import delivery_of
from penstock.pop.core.core import PopCore
from penstock.pop.core.group import ConsumerGroup
from penstock.pop.core.settings import ConsumerGroupSettings
from penstock.pop.errors import PopError
from penstock.store.errors import DiskFull, LimitExceeded, StoreError
from penstock.store.space.accounts import Resource
from penstock.store.space.causer import NODE, Causer
from penstock.store.space.ledger import Ledger
from penstock.store.space.space import Space

CREATED: Final = ConsumerGroupSettings(shared=True)
"""Settings of a group that the node creates for a shared subscription."""


class SharedUnavailable(StoreError):
    """Raised when shared subscriptions are switched off."""


class SharedSubscriptions:
    """The shared subscriptions of a node.

    Parameters:
        core: of POP.
        space: tells when a full disk has room again.
        ledger: is charged for each group.
        counters: of the gateway.
        is_enabled: whether clients may subscribe (`mqtt.shared_max` is above 0).
        groups_max: filters that may be shared at once (`mqtt.shared_max`).
        ack_timeout_ms: time after which a delivery without an acknowledgement is a new attempt (`mqtt.share_ack_timeout`).
    """

    def __init__(
        self,
        core: PopCore,
        space: Space,
        ledger: Ledger,
        counters: GatewayCounters,
        *,
        is_enabled: bool,
        groups_max: int,
        ack_timeout_ms: int,
    ) -> None:
        self._core = core
        self._checkpoints = core.checkpoints
        self._pop_groups = core.groups
        self._space = space
        self._is_enabled = is_enabled
        ledger.limit(Resource.SHARED, groups_max, "raise mqtt.shared_max")
        self._ledger = ledger
        self._ack_timeout_ms = ack_timeout_ms
        self.settlements = ShareSettlements(core, counters)
        """Settles deliveries."""
        self._loop: asyncio.AbstractEventLoop
        self._groups: dict[tuple[str, str], ShareGroup] = {}
        """The groups that connected clients share, by name and filter."""
        core.groups.on_deleted.append(self._group_deleted)

    def __len__(self) -> int:
        """Return the number of groups that connected clients share."""
        return len(self._groups)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start. Stored sessions have their shared subscriptions again, so groups that none of them has are deleted."""
        self._loop = loop
        self.settlements.start(loop)
        # First of all: what a client has acknowledged must not be gone from its session while it is open in the group.
        self._space.on_relief.insert(0, self._disk_relieved)
        self._delete_all_unused()

    def _disk_relieved(self) -> None:
        self.settlements.settle_owed()
        self._delete_all_unused()

    # --- groups -----------------------------------------------------------------------------------------------------

    def check_enabled(self) -> None:
        """Raise SharedUnavailable if shared subscriptions are switched off."""
        if not self._is_enabled:
            raise SharedUnavailable("Shared subscriptions are switched off. Raise mqtt.shared_max to allow them.")

    def get(self, name: str, topic_filter: str) -> ShareGroup | None:
        """Return the share group of a name and a filter; None if no connected client has it."""
        return self._groups.get((name, topic_filter))

    def group_for(self, shared_filter: str, causer: Causer = NODE) -> ShareGroup:
        """Return the share group of a filter with `$share/`, for a client to become a member of.

        The caller calls `ShareGroup.join` for the new member; or `forget_unused`, if the member can't be added. The causer is
        charged for a group that no connected client has yet.

        Raises:
            TopicInvalid, LimitExceeded, DiskFull: the filter is refused.
        """
        name, topic_filter = group_of_share(shared_filter)
        found = self._groups.get((name, topic_filter))
        if found is None:
            causer = self._ledger.admit(causer, Resource.SHARED, topic=topic_filter)
            found = ShareGroup(self, self._core, self.settlements, self._loop, self._ack_timeout_ms, name, topic_filter, causer)
            self._ledger.hold(causer, Resource.SHARED)
            self._groups[name, topic_filter] = found
        return found

    def find_or_create(self, name: str, topic_filter: str, causer: Causer) -> ConsumerGroup:
        """Return the POP group of a name and a filter; create it if there is none, and charge the causer.

        Raises:
            TopicInvalid, LimitExceeded, DiskFull: the group can't be created.
        """
        group = self._pop_groups.get(name, topic_filter)
        if group is not None:
            return group
        try:
            return self._pop_groups.add(name, topic_filter, "latest", CREATED, causer)
        except PopError as error:
            raise LimitExceeded(str(error)) from error

    def forget_unused(self, group: ShareGroup) -> None:
        """Forget a share group that has no member, and delete its POP group if nobody else needs it."""
        if not group.count:
            del self._groups[group.name, group.filter]
            self._ledger.let_go(group.causer, Resource.SHARED)
            self._delete_if_unused(group.group)

    def _group_deleted(self, group: ConsumerGroup) -> None:
        """Recreate a group that an operator has deleted while clients share it."""
        shared = self._groups.get((group.name, group.filter))
        if shared is not None:
            shared.recreate()

    def _delete_all_unused(self) -> None:
        for group in tuple(self._pop_groups):
            self._delete_if_unused(group)

    def _delete_if_unused(self, group: ConsumerGroup) -> None:
        """Delete a group that was created for a shared subscription, if neither a connected nor a stored session has it."""
        is_unused = (group.name, group.filter) not in self._groups and OWNER not in group.retry.owners
        if group.settings.shared and is_unused and not group.is_deleted:
            self.settlements.flush()  # What came together with the last member's DISCONNECT was acknowledged before the end.
            try:
                self._pop_groups.delete(group.name, group.filter, is_unused=True)
            except DiskFull:
                return  # `_disk_relieved` tries again.

    # --- deliveries -------------------------------------------------------------------------------------------------

    def filter_of(self, delivery: int) -> str | None:
        """Return the filter, with `$share/`, of the subscription of a delivery; None if its group is gone."""
        group = self._group_of(delivery)
        return f"{SHARE}{group.name}/{group.filter}" if group is not None else None

    def redriven_with(self, delivery: int) -> Container[int]:
        """Return the positions of the messages that the group of a delivery has got back from its dead letters."""
        group = self._group_of(delivery)
        return group.redriven if group is not None else ()

    def _group_of(self, delivery: int) -> ConsumerGroup | None:
        checkpoint = self._checkpoints.get(delivery_of(delivery)[0])
        return self._pop_groups.with_id(checkpoint.group_id) if checkpoint is not None else None

    def leave(self, session: Session, *, is_lost: bool) -> None:
        """Give up the deliveries of a client whose connection has ended. Those of QoS 2 stay with its session.

        If the client is lost (it has gone without a word), one of its messages may have ended it: see
        `ShareSettlements.suspect`. If the session ends with the connection, nobody gets those of QoS 2 [MQTT-4.8.2-5].
        """
        inflight = session.inflight.slots
        shared = {packet_id: slot for packet_id, slot in inflight.items() if slot is not None and slot.delivery}
        for packet_id, slot in shared.items():
            if slot.qos == 1:
                del inflight[packet_id]
        self.return_unacknowledged(shared, is_lost=is_lost)
        if not session.expiry_s:
            self.discard(shared, [])

    def return_unacknowledged(self, inflight: Mapping[int, Slot | None], *, is_lost: bool = False) -> None:
        """Return the deliveries of QoS 1 of a client that has gone to their groups. `is_lost` as for `leave`."""
        found = [slot.delivery for slot in inflight.values() if slot is not None and slot.delivery and slot.qos == 1]
        if found and is_lost:
            self.settlements.suspect(found)
        elif found:
            self.settlements.revive(found)

    def return_unrecorded(self, client_id: str, inflight: Mapping[int, Slot | None]) -> None:
        """Return the deliveries of QoS 2 that a killed node kept for a client, and whose packet ids it did not record."""
        known = {slot.delivery for slot in inflight.values() if slot is not None}
        self.settlements.return_unrecorded(client_id, known)

    def discard(self, inflight: Mapping[int, Slot | None], filters: list[str]) -> None:
        """Let nobody have the deliveries of QoS 2 of a session that has ended [MQTT-4.8.2-5].

        Args:
            inflight: what was under way in the session.
            filters: of its subscriptions. Groups that nobody needs any more are deleted.
        """
        found = [slot.delivery for slot in inflight.values() if slot is not None and slot.delivery and slot.qos == 2]
        if found:
            self.settlements.acknowledge(found)
        for topic_filter in filters:
            if topic_filter.startswith(SHARE):
                group = self._pop_groups.get(*group_of_share(topic_filter))
                if group is not None:
                    self._delete_if_unused(group)
