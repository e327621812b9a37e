"""The memory of what the plugins have decided about topics, for all clients."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.gateway.options import AccessOptions

if TYPE_CHECKING:
    from penstock.gateway.auth.permissions import Permissions


class Decisions:
    """Bounds the decisions that are kept for all clients, in number and in age.

    Parameters:
        options: the options of access control.
    """

    def __init__(self, options: AccessOptions) -> None:
        self._options = options
        self._now_s: Callable[[], float]
        self._fresh: deque[tuple[float, Permissions]] = deque()
        """The clients with decisions, and when these expire."""
        self.kept = 0
        """The number of decisions kept for all clients."""
        self.per_client_max = options.decisions_per_client_max
        """The maximum number of decisions kept for one client."""

    def start(self, now_s: Callable[[], float]) -> None:
        """Use this clock: it returns the monotonic time in seconds."""
        self._now_s = now_s

    def make_room(self, count: int) -> None:
        """Forget the oldest decisions until there is room for `count` new ones."""
        while self.kept + count > self._options.decisions_max and self._fresh:
            self._forget_oldest()

    def add(self, client: Permissions, count: int) -> None:
        """Count `count` decisions that are kept for a client from now on."""
        if not client.is_fresh:
            client.is_fresh = True
            self._fresh.append((self._now_s() + self._options.decision_ms / 1000, client))
        client.kept += count
        self.kept += count

    def add_one(self, client: Permissions) -> None:
        """Make room for a decision, and count it as kept for a client from now on."""
        if self.kept >= self._options.decisions_max:
            self.make_room(1)
        if client.is_fresh:
            client.kept += 1
            self.kept += 1
        else:
            self.add(client, 1)

    def remove(self, client: Permissions) -> None:
        """Stop counting the decisions of a client."""
        self.kept -= client.kept
        client.kept = 0

    def expire(self) -> None:
        """Forget the decisions that have expired."""
        now_s = self._now_s()
        while self._fresh and self._fresh[0][0] <= now_s:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        _, client = self._fresh.popleft()
        client.is_fresh = False
        client.forget()
