"""Settling deliveries by their ids, for consumers inside the node, which have no handles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from penstock.pop.core.checkpoint import INDEX_BITS, INDEX_MASK, delivery_of
from penstock.pop.core.counters import PopCounters
from penstock.pop.core.deadletters import Reason
from penstock.pop.core.group import ConsumerGroup
from penstock.pop.core.records import GroupRecords
from penstock.pop.core.state import PopState
from penstock.pop.core.suspicion import narrowed
from penstock.store.bodies import REFERENCE
from penstock.store.record import CONSUMED, Kind


class Settlement:
    """Settles deliveries: acknowledges, dead-letters or requeues them.

    Parameters:
        state: has the checkpoints.
        records: appends what is decided.
        serve: called with a group whose polls may get messages now.
        now_ms: tells the time, in ms since 1970.
        counters: counts acknowledgements.
    """

    def __init__(
        self,
        state: PopState,
        records: GroupRecords,
        serve: Callable[[ConsumerGroup], None],
        now_ms: Callable[[], int],
        counters: PopCounters,
    ) -> None:
        self._state = state
        self._records = records
        self._serve = serve
        self._now_ms = now_ms
        self._counters = counters

    def settle(self, kind: Kind, deliveries: Iterable[int], detail: str = "", *, suspects: int = 0) -> int:
        """Settle deliveries by their ids (`pop.core.checkpoint.delivery_id`); return how many were still open.

        Args:
            kind: POP_ACK acknowledges them; POP_DEAD_LETTER dead-letters them; POP_REVIVED requeues them: their messages are
                visible at once, which doesn't count as an attempt.
            deliveries: their ids. Deliveries that are over are skipped.
            detail: of dead letters: why they are; up to `DETAIL_BYTES_MAX` bytes.
            suspects: how many messages their consumer had when it was lost, if one of those that are requeued may have ended
                it; then fewer go out together the next time (`pop.core.suspicion`). 0 if none is suspected.

        Raises:
            DiskFull: the disk had no room for all records. Try again with all deliveries.
        """
        now_ms, checkpoints, pack = self._now_ms(), self._state.checkpoints, REFERENCE.pack
        by_group: dict[tuple[int, int], list[bytes]] = {}
        last, open_bits = -1, 0
        references: list[bytes] = []
        for delivery in dict.fromkeys(deliveries):
            position, index = delivery >> INDEX_BITS, delivery & INDEX_MASK
            if position != last:
                last = position
                checkpoint = checkpoints.get(position)
                open_bits = 0
                if checkpoint is not None and now_ms < checkpoint.deadline_ms:
                    open_bits = checkpoint.open
                    level = checkpoint.level if kind is Kind.POP_REVIVED else 0
                    level = narrowed(level, suspects) if suspects else level
                    references = by_group.setdefault((checkpoint.group_id, level), [])
            if open_bits >> index & 1:
                references.append(pack(position, index))
        for (group_id, level), references in by_group.items():
            group = self._state.groups_by_id[group_id]
            if not references:
                continue
            if kind is Kind.POP_DEAD_LETTER:
                self._records.append_dead_letters(group, references, Reason.FORWARDED, detail)
            elif kind is Kind.POP_REVIVED:
                self._records.append_requeued(group, references, level)
                self._counters.uncounted += len(references) if suspects else 0
            else:
                assert kind is Kind.POP_ACK, kind
                for position, count in Counter(REFERENCE.unpack(reference)[0] for reference in references).items():
                    group.latency.add(now_ms - checkpoints[position].pop_ms, count)
                self._records.append_references(kind, group, references, flags=CONSUMED)
                self._counters.acked += len(references)
            self._serve(group)
        return sum(map(len, by_group.values()))

    def is_open(self, delivery: int) -> bool:
        """Return whether a delivery, given by its id, can still be settled."""
        position, index = delivery_of(delivery)
        checkpoint = self._state.checkpoints.get(position)
        return checkpoint is not None and bool(checkpoint.open >> index & 1) and self._now_ms() < checkpoint.deadline_ms
