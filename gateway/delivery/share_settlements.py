"""Settles deliveries of shared subscriptions with POP: acknowledged, returned to the group, failed, or a dead letter."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from hashlib import blake2b
from typing import Final

from penstock.gateway.counters import GatewayCounters
from penstock.pop.core.checkpoint import delivery_of
from penstock.pop.core.core import PopCore
from penstock.pop.core.suspicion import ALONE
from penstock.store.errors import DiskFull
from penstock.store.record import Kind

LOST: Final = "a client of the shared subscription that had only this message was lost before it acknowledged it"
"""Why a message is a dead letter."""


class ShareSettlements:
    """The settlements of a node's shared deliveries. What a full disk has no room for is settled later.

    Parameters:
        core: of POP.
        counters: of the gateway.
    """

    def __init__(self, core: PopCore, counters: GatewayCounters) -> None:
        self._core = core
        self._counters = counters
        self._loop: asyncio.AbstractEventLoop
        self._acked: list[int] = []
        """Deliveries that clients have acknowledged in this turn of the loop."""
        self._owed: list[tuple[Kind, list[int], str, int]] = []
        """What the disk had no room for. Deliveries under way are bounded, and so is this list."""

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to work on a loop."""
        self._loop = loop

    def acknowledge_soon(self, delivery: int) -> None:
        """Acknowledge a delivery at the end of this turn of the loop: all deliveries of a turn take one record."""
        if not self._acked:
            self._loop.call_soon(self.flush)
        self._acked.append(delivery)

    def flush(self) -> None:
        """Acknowledge the deliveries of this turn now."""
        if self._acked:
            acked, self._acked = self._acked, []
            self.acknowledge(acked)

    def acknowledge(self, deliveries: Iterable[int]) -> None:
        """Acknowledge deliveries."""
        self._settle(Kind.POP_ACK, list(deliveries))

    def revive(self, deliveries: Iterable[int]) -> None:
        """Return deliveries to their groups at once and uncounted, so that other members get them."""
        self._settle(Kind.POP_REVIVED, list(deliveries))

    def suspect(self, deliveries: list[int]) -> None:
        """Return the deliveries of a client that has gone without a word: one of them may have ended it.

        They return at once and uncounted, and fewer of them go out together the next time. One that was out alone has failed:
        it waits for its back-off, and after its last attempt it is a dead letter (`pop.core.suspicion`).
        """
        alone = [each for each in deliveries if self._is_alone(each)]
        others = [each for each in deliveries if not self._is_alone(each)]
        if alone:
            self._settle(Kind.POP_INVISIBLE_CHANGED, alone, LOST, suspects=len(deliveries))
        if others:
            self._settle(Kind.POP_REVIVED, others, suspects=len(deliveries))

    def _is_alone(self, delivery: int) -> bool:
        checkpoint = self._core.checkpoints.get(delivery_of(delivery)[0])
        return checkpoint is not None and checkpoint.level == ALONE

    def fail(self, deliveries: Iterable[int], why: str) -> None:
        """End deliveries as failed attempts, because no member could take them.

        They return to their groups after the back-off, and after the last attempt they are dead letters that say why.
        """
        self._settle(Kind.POP_INVISIBLE_CHANGED, list(deliveries), why)

    def dead_letter(self, deliveries: Iterable[int], why: str = "") -> None:
        """Make deliveries dead letters of their groups, so that no member gets them [MQTT-4.8.2-6]."""
        self._settle(Kind.POP_DEAD_LETTER, list(deliveries), why)

    def return_unrecorded(self, client_id: str, known: Collection[int]) -> None:
        """Return to their groups the deliveries that stay with a client and that its session does not know.

        A delivery of QoS 2 is kept for a client before its packet id is recorded, and is sent after that. A node that was
        killed in between has not sent it.

        Args:
            client_id: of the client, which was connected when the node was killed.
            known: the ids of the deliveries that are under way in its stored session.
        """
        unknown = [delivery for delivery in self._core.deliveries.of_keeper(self.keeper_of(client_id)) if delivery not in known]
        if unknown:
            self.revive(unknown)

    @staticmethod
    def keeper_of(client_id: str) -> str:
        """Return what names a client to POP. (A client id may be too long for it.)"""
        return blake2b(client_id.encode(), digest_size=16).hexdigest()

    def settle_owed(self) -> None:
        """Settle what a full disk had no room for."""
        owed, self._owed = self._owed, []
        for kind, deliveries, why, suspects in owed:
            self._settle(kind, deliveries, why, suspects=suspects)

    def _settle(self, kind: Kind, deliveries: list[int], why: str = "", *, suspects: int = 0) -> None:
        has_failed = kind is Kind.POP_INVISIBLE_CHANGED
        try:
            if has_failed:
                settled = self._core.deliveries.fail(deliveries, why)
            else:
                settled = self._core.deliveries.settle(kind, deliveries, why, suspects=suspects)
        except DiskFull:
            self._owed.append((kind, deliveries, why, suspects))
            return
        if has_failed:
            if not suspects:
                self._counters.deliveries_untaken += settled
        elif kind is Kind.POP_REVIVED:
            self._counters.deliveries_returned += settled
