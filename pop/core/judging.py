"""Judging handles: whether a delivery may still be ended by the group that shows its handle."""

from __future__ import annotations

from collections.abc import Callable

from penstock.pop.core.handle import Delivery, Handles
from penstock.pop.core.outcome import AckOutcome
from penstock.pop.core.state import PopState
from penstock.store.bodies import REFERENCE


class Judge:
    """Decides about handles.

    Parameters:
        state: has the checkpoints.
        handles: reads handles.
        now_ms: tells the time, in ms since 1970.
    """

    def __init__(self, state: PopState, handles: Handles, now_ms: Callable[[], int]) -> None:
        self._state = state
        self._handles = handles
        self._now_ms = now_ms

    def outcome(self, name: str, delivery: Delivery | None, named_before: set[tuple[int, int]]) -> AckOutcome:
        """Return OK if the group `name` may still end a delivery, and else why not.

        Args:
            name: of the group.
            delivery: that the handle names; None if the handle is not genuine.
            named_before: checkpoint and index of the deliveries that earlier handles of the same call name.
        """
        if delivery is None:
            return AckOutcome.INVALID_HANDLE
        group = self._state.groups_by_id.get(delivery.group_id)
        if group is None or group.name != name:
            return AckOutcome.INVALID_HANDLE
        position, bit = delivery.checkpoint, 1 << delivery.index
        checkpoint = self._state.checkpoints.get(position) or self._state.closed.get(position)
        if checkpoint is None or checkpoint.pop_ms != delivery.pop_ms:
            return AckOutcome.HANDLE_EXPIRED
        if checkpoint.acked & bit or (position, delivery.index) in named_before:
            return AckOutcome.ALREADY_ACKED
        if checkpoint.replaced & bit:
            return AckOutcome.HANDLE_REPLACED
        if not checkpoint.open & bit or self._now_ms() >= checkpoint.deadline_ms:
            return AckOutcome.HANDLE_EXPIRED
        return AckOutcome.OK

    def outcomes(self, name: str, handles: list[str]) -> tuple[list[AckOutcome], dict[int, list[bytes]]]:
        """Return the outcome of each handle, and by group id the references of the deliveries that may be ended."""
        outcomes = []
        references: dict[int, list[bytes]] = {}
        named: set[tuple[int, int]] = set()
        for delivery in self._handles.read_deliveries(handles):
            outcome = self.outcome(name, delivery, named)
            outcomes.append(outcome)
            if outcome is AckOutcome.OK:
                assert delivery is not None
                named.add((delivery.checkpoint, delivery.index))
                references.setdefault(delivery.group_id, []).append(REFERENCE.pack(delivery.checkpoint, delivery.index))
        return outcomes, references
