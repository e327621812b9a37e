"""The groups: finding, creating and configuring them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import orjson

from penstock.pop.core.group import ConsumerGroup
from penstock.pop.core.names import check_group_name, check_system_filter
from penstock.pop.core.records import GroupRecords
from penstock.pop.core.settings import DEFAULTS, ConsumerGroupSettings
from penstock.pop.core.state import PopState
from penstock.pop.errors import GroupUnknown, Overloaded
from penstock.pop.options import PopOptions
from penstock.store.errors import DiskFull, LimitExceeded, StoreError
from penstock.store.queues.lightqueue import Start
from penstock.store.queues.queues import Queues
from penstock.store.record import Kind
from penstock.store.space.accounts import Resource
from penstock.store.space.causer import NODE, Causer
from penstock.store.space.ledger import Ledger


class Groups:
    """All groups. A group with several filters is one `ConsumerGroup` for each of them.

    Parameters:
        state: has the groups.
        queues: the light queues that groups read.
        records: appends what is decided.
        options: bounds, and whether consumers may create groups.
        ledger: is charged for each group.
    """

    def __init__(self, state: PopState, queues: Queues, records: GroupRecords, options: PopOptions, ledger: Ledger) -> None:
        ledger.limit(Resource.GROUPS, options.groups_max, "raise pop.groups_max")
        self._ledger = ledger
        self._state = state
        self._by_name = state.groups
        self._queues = queues
        self._records = records
        self._options = options
        self.with_id = state.groups_by_id.get
        """Return the group with an id; None if there is none. Pops call it, so it is the method of the dict itself."""

    def __iter__(self) -> Iterator[ConsumerGroup]:
        """Yield all groups."""
        return iter(self._state.groups_by_id.values())

    def get(self, name: str, topic_filter: str) -> ConsumerGroup | None:
        """Return the group `name` on `topic_filter`; None if there is none."""
        return self._by_name.get((name, topic_filter))

    def get_or_create(self, name: str, topic_filter: str, start: Start = "earliest", causer: Causer = NODE) -> ConsumerGroup:
        """Return the group `name` on `topic_filter`; create it if it doesn't exist, to begin at `start`.

        A group that a shared or a lite subscription created becomes permanent: from now on a service counts on it.

        Raises:
            GroupUnknown: it doesn't exist, and `pop.groups_auto_create` is off.
            GroupInvalid: the name is not valid.
            RequestInvalid: the filter is a '$' topic that this group can't consume.
            TopicInvalid: the filter breaks MQTT 5.0, 4.7.
            Overloaded, LimitExceeded: `pop.groups_max` or `store.queues_max` is reached, or the causer may have no more.
        """
        group = self._by_name.get((name, topic_filter))
        if group is not None:
            if group.settings.is_temporary:
                with suppress(DiskFull):  # the next call tries again
                    self.configure(group, replace(group.settings, shared=False, lite_ends_ms=None))
            return group
        self.check_may_create(name, topic_filter)
        return self.create(name, topic_filter, start, DEFAULTS, causer)

    def check_may_create(self, name: str, topic_filter: str) -> None:
        """Raise GroupUnknown if consumers can't create groups because `pop.groups_auto_create` is off."""
        if not self._options.groups_auto_create:
            raise GroupUnknown(
                f"there is no group {name[:80]!r} on {topic_filter[:80]!r}: create it first, or set pop.groups_auto_create"
            )

    def create(
        self, name: str, topic_filter: str, start: Start, settings: ConsumerGroupSettings, causer: Causer = NODE
    ) -> ConsumerGroup:
        """Create a group that doesn't exist. The caller must have checked the settings. The causer is charged for it.

        Raises:
            GroupInvalid, RequestInvalid, TopicInvalid, Overloaded, LimitExceeded: as `get_or_create` raises them.
        """
        check_group_name(name)
        if topic_filter.startswith("$"):
            check_system_filter(name, topic_filter)
        try:
            by = self._ledger.admit(causer, Resource.GROUPS, topic=topic_filter).row()
        except LimitExceeded as error:
            raise Overloaded(str(error)) from error
        group_id = self._state.next_id
        owner = f"group:{group_id}"
        queue = self._queues.declare(topic_filter, owner, start, causer)
        try:
            retry = self._queues.declare(f"$retry/{group_id}", owner, causer=causer)
        except StoreError:
            self._queues.drop(queue, owner)
            raise
        row = {
            "group": name,
            "filter": topic_filter,
            "queue": queue.id,
            "retry": retry.id,
            "cursor": self._queues.offset_of(queue, start),
            "by": by,
        }
        if settings != DEFAULTS:
            row["settings"] = settings.row()
        self._records.append(Kind.GROUP_CREATED, group_id, name, properties=orjson.dumps(row))
        return self._by_name[name, topic_filter]

    def configure(self, group: ConsumerGroup, settings: ConsumerGroupSettings) -> None:
        """Change the settings of a group. The caller must have checked them.

        Raises:
            DiskFull: the disk has no room for the record; nothing is changed.
        """
        self._records.append(Kind.GROUP_CHANGED, group.id, group.name, properties=orjson.dumps({"settings": settings.row()}))
