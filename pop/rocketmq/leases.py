"""Leases: deliveries that stay invisible while their consumer is alive.

A push consumer asks the node to renew the invisible time of its messages until it has processed them (`auto_renew`). The node
makes such deliveries invisible for hours, and returns them as soon as their client is gone. So no renewal needs a record, a
handle stays valid across restarts of both sides, and a consumer that dies loses its messages to others within seconds. The
attempt id of a checkpoint names the holder of its deliveries, so a restarted node knows the holder as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

from penstock.pop.core.checkpoint import ATTEMPT_ID_BYTES_MAX, Checkpoint
from penstock.pop.core.core import PopCore
from penstock.pop.core.deliveries import VisibilityChange
from penstock.pop.core.handle import Handles
from penstock.pop.rocketmq.clients import ConnectedClient
from penstock.pop.rocketmq.status import Code, Refused
from penstock.store.errors import DiskFull
from penstock.store.options import HOUR_MS

LEASE_MS = 3 * HOUR_MS
"""Longest time for which a delivery is leased. RocketMQ's proxy renews a delivery for as long."""

_MARK = "\x1d"


def lease_id(client_id: str, attempt_id: str) -> str:
    """Return the attempt id of a checkpoint whose deliveries are leased to a client.

    Raises:
        Refused: BAD_REQUEST if both ids together do not fit into a record.
    """
    leased = f"{_MARK}{client_id}{_MARK}{attempt_id}"
    if len(leased.encode()) > ATTEMPT_ID_BYTES_MAX or _MARK in client_id:
        raise Refused(
            Code.BAD_REQUEST,
            f"client id and attempt id may have {ATTEMPT_ID_BYTES_MAX - 2} bytes together, and the client id no U+001D",
        )
    return leased


def holder_of(attempt_id: str) -> str:
    """Return the id of the client that holds the deliveries of a checkpoint with this attempt id, or an empty string."""
    return attempt_id.split(_MARK, 2)[1] if attempt_id.startswith(_MARK) else ""


class Leases:
    """The leased deliveries of a node.

    Parameters:
        core: Has the checkpoints.
        handles: Makes the handles of deliveries.
    """

    def __init__(self, core: PopCore, handles: Handles) -> None:
        self._core = core
        self._checkpoints = core.checkpoints
        self._group_with_id = core.groups.with_id
        self._handles = handles

    def holders(self) -> Iterator[str]:
        """Yield the id of a client for each leased checkpoint."""
        for checkpoint in self._checkpoints.values():
            if holder := holder_of(checkpoint.attempt_id):
                yield holder

    def return_from(self, gone: Mapping[str, ConnectedClient]) -> Iterable[ConnectedClient]:
        """Return the deliveries of clients that are gone.

        Returns:
            The clients of which some deliveries are still out, because the disk has no room for the record.
        """
        unreturned: list[ConnectedClient] = []
        for checkpoint in list(self._checkpoints.values()):
            holder = gone.get(holder_of(checkpoint.attempt_id))
            if holder is None:
                continue
            with suppress(DiskFull):
                self._return(checkpoint, counts=not holder.is_terminated)
            if checkpoint.open:
                unreturned.append(holder)
        return unreturned

    def _return(self, checkpoint: Checkpoint, *, counts: bool) -> None:
        """Return the deliveries of a checkpoint.

        If the client vanished without announcing its end, a message may have killed it: an attempt counts if it is known which.
        """
        if not (counts and checkpoint.blames_one):
            self._core.deliveries.requeue(checkpoint, suspected=counts)
            return
        group = self._group_with_id(checkpoint.group_id)
        assert group is not None  # A group that is deleted has no checkpoints.
        handles = self._handles.deliveries(checkpoint.position, checkpoint.pop_ms, group.id, checkpoint.count)
        self._core.deliveries.change_invisible(
            group.name, [VisibilityChange(handles[index], 0) for index in checkpoint.open_indexes()]
        )
