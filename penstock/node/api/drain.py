"""The drain of the node over the admin API."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated

import msgspec

from penstock.node.api.operation import ApiCall, ApiRole, Operation
from penstock.node.draining import Drain, DrainState

GRACE_MS_MAX = 24 * 3600 * 1000


class DrainRequest(msgspec.Struct, forbid_unknown_fields=True):
    """How the node is to drain."""

    grace_ms: Annotated[int, msgspec.Meta(ge=0, le=GRACE_MS_MAX, description="The longest time that it may take.")] = 30_000


class DrainShown(msgspec.Struct):
    """How far the drain is."""

    state: Annotated[str, msgspec.Meta(description="serving, draining or drained.")]
    clients: Annotated[int, msgspec.Meta(description="MQTT clients that are connected.")]
    checkpoints: Annotated[int, msgspec.Meta(description="Batches of messages that consumers have not settled.")]


class DrainOperations:
    """Serves the drain.

    Parameters:
        drain: of the node.
        stop_after: drains the node within some seconds, and stops it then.
    """

    def __init__(self, drain: Drain, stop_after: Callable[[float], None]) -> None:
        self._drain = drain
        self._stop_after = stop_after

    def operations(self) -> Iterator[Operation]:
        """Yield the operations."""
        yield Operation("showDrain", "GET", "/drain", ApiRole.VIEWER, "Say whether the node drains.", self.show, DrainShown)
        yield Operation(
            "drain",
            "POST",
            "/drain",
            ApiRole.ADMIN,
            "Refuse new clients, send the others away, let consumers finish, then stop the node. A drain under way goes on.",
            self.begin,
            DrainShown,
            body=DrainRequest,
        )

    async def show(self, _call: ApiCall) -> DrainShown:
        """Say how far the drain is."""
        return DrainShown(self._drain.state, self._drain.clients, self._drain.deliveries)

    async def begin(self, call: ApiCall) -> DrainShown:
        """Begin to drain."""
        asked: DrainRequest = call.body
        call.noted["grace_ms"] = asked.grace_ms
        if self._drain.state is DrainState.SERVING:  # else the drain under way goes on, with its own time
            self._stop_after(asked.grace_ms / 1000)
        return await self.show(call)
