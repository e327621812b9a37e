"""The messages that wait in a consumer, and how many of them the application will see in time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

M = TypeVar("M")

SHARE = 0.5
"""Part of the invisible time within which the application should see all messages that wait."""

MARGIN = 0.1
"""Last part of the invisible time. The application gets no message then, because it could hardly settle the message in time."""

CHECKS = 20
"""How often a consumer looks for messages to return within one invisible time."""

FORGETS = 0.2
"""Weight of the last handling time where it is shorter than the estimate. Longer ones count at once."""


class UnseenMessages(Generic[M]):
    """Messages that wait until the application takes them. Their invisible time has started.

    The object measures how long the application handles a message. From that follows how many messages may wait: those that
    the application takes within half the invisible time. It names the messages to be returned to the node in time, so that
    they cost no attempt. All times are in seconds of a monotonic clock.

    Parameters:
        held_max: Maximum number of messages that may wait.
        invisible_s: Invisible time; 0 if the node has not told it yet. Then `held_max` alone applies.
        first_max: Maximum number that may wait until the first message was handled; 0 for `held_max`.
    """

    def __init__(self, held_max: int, invisible_s: float, first_max: int = 0) -> None:
        self.invisible_s = invisible_s
        self.takers = 1
        """Number of tasks or threads that take messages."""
        self.returned = 0
        """Number of messages, or runs of messages, that were returned without counting an attempt."""
        self.expired = 0
        """Number of messages whose invisible time ended while they waited. Each has lost an attempt."""
        self._held_max = held_max
        self._first_max = first_max or held_max
        self._waiting: deque[tuple[M, float]] = deque()
        self._handling_s = 0.0
        self._taken_s = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, messages: Iterable[M], now_s: float) -> None:
        """Let messages wait that the node has delivered just now."""
        deadline_s = now_s + self.invisible_s if self.invisible_s else float("inf")
        if not self._waiting:
            self._taken_s = now_s  # Nobody could take a message before.
        self._waiting.extend((message, deadline_s) for message in messages)

    def take(self, now_s: float) -> M | None:
        """Remove and return the next message; None if none waits, or the next one must be returned to the node first."""
        if not self._waiting or not self._is_usable(self._waiting[0][1], now_s):
            return None
        self._taken_s = now_s
        return self._waiting.popleft()[0]

    def handled(self, handling_s: float) -> None:
        """Note how long the application handled a message."""
        self._first_max = self._held_max
        weight = 1.0 if handling_s > self._handling_s else FORGETS
        self._handling_s += weight * (handling_s - self._handling_s)

    def room(self, now_s: float) -> int:
        """Return how many more messages may wait; negative if some should be returned."""
        return self._target(now_s) - len(self._waiting)

    def check_after_s(self) -> float:
        """Return the seconds until the next call of `surplus`."""
        return max(self.invisible_s / CHECKS, 0.01) if self.invisible_s else 1.0

    def surplus(self, now_s: float) -> list[M]:
        """Remove and return the messages that must be returned to the node now.

        These are the messages whose time ends soon, and those that the application will not reach in time. Messages whose time
        has ended already are removed too, and counted.
        """
        found: list[M] = []
        soon_s = now_s + self.check_after_s()
        while self._waiting and not self._is_usable(self._waiting[0][1], soon_s):
            message, deadline_s = self._waiting.popleft()
            if deadline_s > now_s:
                found.append(message)
            else:
                self.expired += 1
        target = self._target(now_s)
        if len(self._waiting) > 2 * target:
            found += [message for message, _ in list(self._waiting)[target:]]
            while len(self._waiting) > target:
                self._waiting.pop()
        self.returned += len(found)
        return found

    def clear(self) -> list[M]:
        """Remove and return all messages, because the consumer closes."""
        left = [message for message, _ in self._waiting]
        self._waiting.clear()
        return left

    def _is_usable(self, deadline_s: float, now_s: float) -> bool:
        if not self.invisible_s:
            return True
        needed_s = max(MARGIN * self.invisible_s, min(self._handling_s, SHARE * self.invisible_s))
        return deadline_s - now_s > needed_s

    def _target(self, now_s: float) -> int:
        """Return how many messages may wait. While the application takes none, it seems to handle one ever longer."""
        if not self.invisible_s:
            return self._first_max
        stalled_s = now_s - self._taken_s if self._waiting else 0.0
        interval_s = max(self._handling_s, stalled_s) / self.takers
        if interval_s * self._held_max <= SHARE * self.invisible_s:
            return self._first_max
        return min(int(SHARE * self.invisible_s / interval_s), self._first_max)
