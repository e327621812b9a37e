"""The messages that wait in a consumer, and how many of them the application will see in time."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

M = TypeVar("M")

# The standard library's logger, unlike the node's: the application decides where its messages go.
logger = logging.getLogger("penstock.client")

SHARE = 0.5
"""Part of the invisible time within which the application should see all messages that wait."""

MARGIN = 0.1
"""Last part of the invisible time. The application gets no message then, because it could hardly settle the message in time."""

CHECKS = 20
"""How often a consumer looks for messages to return within one invisible time."""

FAST_S = 0.5
"""More than `held_max` messages wait only if the application takes them all within so many seconds."""

FORGETS = 0.2
"""Weight of the last handling time where it is shorter than the estimate. Longer ones count at once."""


class _Arrival(Generic[M]):
    """Messages that came together, and so have one deadline. Those before `at` have been taken."""

    __slots__ = ("at", "deadline_s", "messages")

    def __init__(self, messages: list[M], deadline_s: float) -> None:
        self.messages = messages
        self.deadline_s = deadline_s
        self.at = 0


class UnseenMessages(Generic[M]):
    """Messages that wait until the application takes them. Their invisible time has started.

    The object measures how long the application handles a message. From that follows how many messages may wait: those that
    the application takes within half the invisible time. It names the messages to be returned to the node in time, so that
    they cost no attempt. All times are in seconds of a monotonic clock.

    Parameters:
        held_max: Maximum number of messages that may wait.
        invisible_s: Invisible time; 0 if the node has not told it yet. Then `held_max` alone applies.
        first_max: Maximum number that may wait until the first message was handled; 0 for `held_max`.
        fast_max: Maximum number that may wait if the application takes them all within `FAST_S`; 0 for `held_max`.
    """

    def __init__(self, held_max: int, invisible_s: float, first_max: int = 0, fast_max: int = 0) -> None:
        self.invisible_s = invisible_s
        self.takers = 1
        """Number of tasks or threads that take messages."""
        self.returned = 0
        """Number of messages, or runs of messages, that were returned without counting an attempt."""
        self.expired = 0
        """Number of messages whose invisible time ended while they waited. Each has lost an attempt."""
        self._held_max = held_max
        self._first_max = first_max
        """0 after the first message was handled."""
        self._fast_max = max(fast_max, held_max)
        self._arrivals: deque[_Arrival[M]] = deque()
        """What waits. None of them is empty."""
        self._count = 0
        self._handling_s = 0.0
        self._taken_s = 0.0

    def __len__(self) -> int:
        return self._count

    def add(self, messages: Iterable[M], now_s: float) -> None:
        """Let messages wait that the node has delivered just now."""
        arrival = _Arrival(list(messages), now_s + self.invisible_s if self.invisible_s else float("inf"))
        if not arrival.messages:
            return
        if not self._count:
            self._taken_s = now_s  # Nobody could take a message before.
        self._arrivals.append(arrival)
        self._count += len(arrival.messages)

    def take(self, now_s: float) -> M | None:
        """Remove and return the next message; None if none waits, or the next one must be returned to the node first."""
        found = self.take_all(now_s, 1)
        return found[0] if found else None

    def take_all(self, now_s: float, count: int) -> list[M]:
        """Remove and return up to `count` messages. None if the next one must be returned to the node first, or none waits."""
        found: list[M] = []
        while self._arrivals and len(found) < count:
            arrival = self._arrivals[0]
            if not self._is_usable(arrival.deadline_s, now_s):
                break
            stop = arrival.at + count - len(found)
            some = arrival.messages[arrival.at : stop]
            if stop < len(arrival.messages):
                arrival.at = stop
            else:
                self._arrivals.popleft()
            found = found + some if found else some
        if found:
            self._taken_s = now_s
            self._count -= len(found)
        return found

    def handled(self, handling_s: float) -> None:
        """Note how long the application handled a message."""
        self._first_max = 0
        weight = 1.0 if handling_s > self._handling_s else FORGETS
        self._handling_s += weight * (handling_s - self._handling_s)

    def room(self, now_s: float) -> int:
        """Return how many more messages may wait; negative if some should be returned."""
        return self._target(now_s) - self._count

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
        while self._arrivals and not self._is_usable(self._arrivals[0].deadline_s, soon_s):
            arrival = self._arrivals.popleft()
            left = arrival.messages[arrival.at :]
            self._count -= len(left)
            if arrival.deadline_s > now_s:
                found += left
            else:
                self.expired += len(left)
        target = self._target(now_s)
        if self._count > 2 * target:
            found += self._cut(self._count - target)
        self.returned += len(found)
        return found

    def _cut(self, count: int) -> list[M]:
        """Remove and return the last `count` messages, in order."""
        parts: list[list[M]] = []
        self._count -= count
        while count:
            arrival = self._arrivals[-1]
            at = max(len(arrival.messages) - count, arrival.at)
            parts.append(arrival.messages[at:])
            del arrival.messages[at:]
            count -= len(parts[-1])
            if at == arrival.at:
                self._arrivals.pop()
        return [message for part in reversed(parts) for message in part]

    def clear(self) -> list[M]:
        """Remove and return all messages, because the consumer closes."""
        return self._cut(self._count)

    def _is_usable(self, deadline_s: float, now_s: float) -> bool:
        left_s, invisible_s = deadline_s - now_s, self.invisible_s
        if left_s > SHARE * invisible_s or not invisible_s:
            return True
        return left_s > max(MARGIN * invisible_s, self._handling_s)

    def _target(self, now_s: float) -> int:
        """Return how many messages may wait. While the application takes none, it seems to handle one ever longer."""
        held_max = self._first_max or (self._fast_max if self.invisible_s else self._held_max)
        stalled_s = now_s - self._taken_s if self._count else 0.0
        interval_s = max(self._handling_s, stalled_s) / self.takers
        if interval_s * held_max > FAST_S and held_max > self._held_max:
            held_max = max(int(FAST_S / interval_s), self._held_max)
        if not self.invisible_s or interval_s * held_max <= SHARE * self.invisible_s:
            return held_max
        return min(int(SHARE * self.invisible_s / interval_s), held_max)


class SurplusWatch(Generic[M]):
    """Returns messages that the loop of an asynchronous consumer will not see in time, while any wait.

    Parameters:
        unseen: the messages that wait.
        group: of the consumer, for the log.
        give_back: returns messages to the node.
    """

    def __init__(self, unseen: UnseenMessages[M], group: str, give_back: Callable[[list[M]], None]) -> None:
        self._unseen = unseen
        self._group = group
        self._give_back = give_back
        self._timer: asyncio.TimerHandle | None = None
        self._has_stopped = False

    def begin(self) -> None:
        """Look for messages to return as long as any wait. Call it when messages have come."""
        if self._timer is None and not self._has_stopped:
            self._timer = asyncio.get_running_loop().call_later(self._unseen.check_after_s(), self._check)

    def stop(self) -> None:
        """Return none any more: the consumer closes."""
        self._has_stopped = True
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        self._timer = None
        if self._unseen:
            self.return_surplus()
            self.begin()

    def return_surplus(self) -> None:
        """Return the messages that the loop will not see in time now."""
        if surplus := take_surplus(self._unseen, self._group, asyncio.get_running_loop().time(), "blocks the event loop"):
            self._give_back(surplus)


def take_surplus(unseen: UnseenMessages[M], group: str, now_s: float, cause: str) -> list[M]:
    """Return what `UnseenMessages.surplus` does, and log it. `cause` says what something does when messages expire unseen."""
    expired = unseen.expired
    surplus = unseen.surplus(now_s)
    if unseen.expired > expired:
        logger.warning(
            "group %s: %d messages expired before the application saw them, which cost each an attempt: something %s for "
            "longer than the invisible time",
            group,
            unseen.expired - expired,
            cause,
        )
    if surplus:
        logger.info("group %s: %d messages went back, because the loop is too slow to see them in time", group, len(surplus))
    return surplus
