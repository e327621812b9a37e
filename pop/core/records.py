"""The records of groups: every decision of POP is one, and only applying it changes the state. And counts of what they do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

from penstock.pop.core.deadletters import DEAD_LETTERS, Reason
from penstock.store.histogram import LATENCY_BOUNDS_MS, Histogram
from penstock.store.record import POP_FIXED, Flag, Kind

if TYPE_CHECKING:
    from penstock.pop.core.group import ConsumerGroup
    from penstock.pop.core.poptraces import PopTraces
    from penstock.pop.core.state import PopState
    from penstock.store.store import Store

REFERENCES_MAX = 16_384
"""Maximum number of deliveries that one record ends: 192 KiB fit into any segment, however many deliveries are due at once."""


class PopCounters:
    """Counts of what POP has done since the node started. Plain integers, which `penstock.node.metrics` reads."""

    __slots__ = (
        "acked",
        "dead_lettered",
        "expired",
        "handed_out",
        "refused",
        "revive_late_ms_max",
        "revive_lateness",
        "revived",
        "uncounted",
    )

    def __init__(self) -> None:
        self.handed_out = 0
        self.acked = 0
        self.revived = 0
        self.uncounted = 0
        """Messages that were revived without losing an attempt, because others were out with them: `pop.core.suspicion`."""
        self.dead_lettered = 0
        self.expired = 0
        """Messages that no consumer got because their time to live had passed."""
        self.refused = 0
        """Pops that were refused because too many were waiting."""
        self.revive_late_ms_max = 0
        self.revive_lateness = Histogram(LATENCY_BOUNDS_MS)
        """How long after its deadline a message was revived or dead-lettered."""


class GroupRecords:
    """Appends the records of groups.

    Parameters:
        store: has the log and the light queues.
        state: the state that the records change.
        traces: makes spans of what the records settle; None without tracing.
    """

    def __init__(self, store: Store, state: PopState, traces: PopTraces | None = None) -> None:
        self._store = store
        self._state = state
        self._traces = traces
        self.counters = PopCounters()
        """Counts what the records do."""

    def append(
        self,
        kind: Kind,
        group_id: int,
        name: str,
        body: bytes = b"",
        *,
        deadline_ms: int = 0,
        flags: int = 0,
        properties: bytes = b"",
    ) -> int:
        """Append a record of a group, and return its position."""
        group = self._state.groups.by_id.get(group_id)
        fixed = POP_FIXED.pack(group_id, group.epoch if group else 0, deadline_ms)
        position = self._store.append(kind, fixed, name.encode(), body, properties, flags)
        if self._traces is not None:
            self._traces.appended(kind, name, body, flags, position)
        return position

    def append_references(
        self, kind: Kind, group: ConsumerGroup, references: list[bytes], *, flags: int = 0, properties: bytes = b""
    ) -> None:
        """Append records of a group that end deliveries: as many records as the references need, at least one.

        All records get the properties; of GROUP_OFFSET_RESET only the first.
        """
        for at in range(0, max(len(references), 1), REFERENCES_MAX):
            body = b"".join(references[at : at + REFERENCES_MAX])
            self.append(kind, group.id, group.name, body, flags=flags, properties=properties)
            properties = b"" if kind is Kind.GROUP_OFFSET_RESET else properties

    def append_requeued(self, group: ConsumerGroup, references: list[bytes], level: int = 0) -> None:
        """Make the messages of deliveries visible at once. This doesn't count as an attempt.

        `level` is that of their next pop: see `pop.core.suspicion`.
        """
        self.append_references(Kind.POP_REVIVED, group, references, flags=Flag.SUSPENDED | level)
        self.counters.revived += len(references)

    def append_dead_letters(self, group: ConsumerGroup, references: list[bytes], reason: Reason, detail: str = "") -> None:
        """Put the messages of deliveries into the group's dead letters. `detail` is what their consumer says."""
        self._store.queues.declare(DEAD_LETTERS + group.name, f"group:{group.id}")
        properties = orjson.dumps({"reason": reason.name.lower(), **({"detail": detail} if detail else {})})
        self.append_references(Kind.POP_DEAD_LETTER, group, references, properties=properties)
        self.counters.dead_lettered += len(references)
