"""What a member asks of the node around it."""

from __future__ import annotations

import socket
from typing import Protocol

from penstock.cluster.frames import RelayPayload


class Roles(Protocol):
    """The node around a member."""

    def lead(self) -> None:
        """Serve clients: everything before the first record of this epoch is committed."""
        ...

    def restart(self, why: str) -> None:
        """Stop serving clients at once, and begin anew from the data directory: another one leads, or the index is ahead."""
        ...

    def fail(self, error: Exception) -> None:
        """End the node, and keep its data: the logs of two replicas disagree, or this one is damaged."""
        ...

    async def serve(self, client: RelayPayload) -> socket.socket:
        """Return a stream socket at whose other end the client is served. Raises RelayRefused."""
        ...

    @property
    def secret(self) -> bytes:
        """By which the leader signs handles of deliveries."""
        ...

    def secret_changed(self, secret: bytes) -> None:
        """Take the secret of the leader, which all replicas of the shard share. It is kept."""
        ...
