"""The logins that wait for the plugins: how many may wait, whose turn is next, and how fast they are answered."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from penstock.gateway.auth.held_logins import HeldLogins
from penstock.gateway.auth.login import Login

MEMORY: Final = 0.9
"""Weight of what was measured before, at each new measurement of the rate: it is the rate of the last ten or so."""


class LoginQueue:
    """The logins that wait or are under way. The node's loop adds them, and threads take them.

    It holds no more than can be answered in time, by the rate measured while more wait than can be begun. Until this rate is
    known, or while the threads keep up, `waiting_max` may wait.

    Sources take turns, so a source with a thousand logins holds up one with a single login by one only. When the queue is full,
    a login of the source with the most has to give way. It is held, and waits when there is room, or is refused.

    Parameters:
        patience_s: seconds that a login may wait.
        waiting_max: logins that may wait in any case.
        hold_s: seconds for which a login is held for which there is no room; 0 refuses it at once.
        held_max: logins that are held at a time.
    """

    def __init__(self, patience_s: float, waiting_max: int, hold_s: float = 0, held_max: int = 0) -> None:
        self._patience_s = patience_s
        self._waiting_max = waiting_max
        self._held = HeldLogins(hold_s, held_max)
        self._now_s: Callable[[], float]
        self._threads = 1
        self._lock = threading.Lock()
        self._sources: OrderedDict[str, OrderedDict[Login, None]] = OrderedDict()
        """The waiting logins by source. The source whose turn is next comes first, and of its logins the oldest."""
        self._by_length: dict[int, OrderedDict[str, None]] = {}
        """The sources by the number of their waiting logins."""
        self._longest = 0
        self._overdue: list[Login] = []
        """Logins that a thread has found to have waited for too long."""
        self._running: dict[Login, None] = {}
        self._hungry: dict[Callable[[], None], None] = {}
        """Wakes the threads that have found nothing to do."""
        self._finished_s: float | None = None
        """When a login was finished last, if others have waited ever since."""
        self._finished = 0.0
        self._busy_s = 0.0
        """Logins finished while others waited, and the seconds that they took; both with less weight the older they are."""
        self.waiting = 0
        """The number of logins that wait."""

    def start(self, now_s: Callable[[], float], threads: int) -> None:
        """Use this clock, which returns the monotonic time in seconds, and expect to be emptied by this many threads."""
        self._now_s = now_s
        self._threads = threads

    # --- what the metrics show --------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """The number of logins about which the plugins are asked now."""
        return len(self._running)

    @property
    def held(self) -> int:
        """The number of logins for which there was no room, and that keep their place."""
        return len(self._held)

    @property
    def per_s(self) -> float:
        """The logins that the plugins answer per second when they have enough to do; 0 if it is not known yet."""
        finished, busy_s = self._finished, self._busy_s
        if not busy_s:
            return 0.0
        if self._finished_s is not None:  # None can be finished before now.
            silent_s = self._now_s() - self._finished_s
            if silent_s > busy_s / finished:
                return (finished * MEMORY + 1) / (busy_s * MEMORY + silent_s)
        return finished / busy_s

    @property
    def wait_s(self) -> float:
        """The seconds until all that wait or are held now could be answered; 0 if none waits or the rate is not known.

        A login that comes now is expected to wait as long. It may be refused before, and come again.
        """
        per_s = self.per_s
        return (self.waiting + len(self._held)) / per_s if per_s else 0.0

    @property
    def waiting_max(self) -> int:
        """The number of logins that may wait now."""
        per_s = self.per_s
        return min(max(int(per_s * self._patience_s), self._threads), self._waiting_max) if per_s else self._waiting_max

    # --- the node's loop --------------------------------------------------------------------------------------------

    def add(self, login: Login) -> Login | None:
        """Let a login wait, or hold it. Return one for which there is no room, which may be another, or None."""
        now_s = self._now_s()
        with self._lock:
            gives_way: Login | None = None
            if self.waiting >= self.waiting_max:
                if len(self._sources.get(login.source, ())) + 1 >= self._longest:
                    return None if self._held.add(login, now_s) else login
                gives_way = self._remove_newest()
            login.deadline_s = now_s + self._patience_s
            self._put(login)
            wake = self._hungry.popitem()[0] if self._hungry else None
            refused = gives_way if gives_way is not None and not self._held.add(gives_way, now_s) else None
        if wake is not None:
            wake()
        return refused

    def drop(self, login: Login) -> None:
        """Forget a login, because nobody waits for the answer any more. The plugins are not asked, if they have not been."""
        login.abandon()
        with self._lock:
            self._held.discard(login)
            if login in self._sources.get(login.source, ()):
                self._remove(login)
            self._fill()

    def shed(self) -> list[Login]:
        """Hold the logins that can't be answered in time, by the rate as it is now. Return those for which there is no room."""
        shed: list[Login] = []
        if self.waiting > self.waiting_max:
            with self._lock:
                now_s = self._now_s()
                while self.waiting > self.waiting_max:
                    login = self._remove_newest()
                    if not self._held.add(login, now_s):
                        shed.append(login)
        return shed

    def release(self, count_max: int) -> list[Login]:
        """Remove and return logins that were held for long enough, but no more than a number."""
        with self._lock:
            return self._held.overdue(self._now_s(), count_max)

    def give_way(self) -> Login | None:
        """Remove and return the login that is held longest, to make room for other connections; None if none is held."""
        with self._lock:
            return self._held.pop() if self._held else None

    def expire(self) -> list[Login]:
        """Remove and return the logins that have waited for too long."""
        now_s = self._now_s()
        with self._lock:
            overdue, self._overdue = self._overdue, []
            for waiting in tuple(self._sources.values()):
                while waiting and (first := next(iter(waiting))).deadline_s <= now_s:
                    self._remove(first)
                    overdue.append(first)
        return overdue

    def started_before(self, time_s: float) -> list[Login]:
        """Return the logins about which the plugins were asked before a monotonic time, and that wait for the answer still."""
        with self._lock:
            return [login for login in self._running if login.started_s < time_s and not login.is_done]

    # --- threads ----------------------------------------------------------------------------------------------------

    def take(self, wake: Callable[[], None]) -> Login | None:
        """Return the login whose turn it is; or None, and have `wake` called when there is one."""
        with self._lock:
            self._fill()
            while self._sources:
                source, waiting = next(iter(self._sources.items()))
                login = next(iter(waiting))
                self._remove(login)
                if source in self._sources:
                    self._sources.move_to_end(source)
                self._fill()
                now_s = self._now_s()
                if login.deadline_s <= now_s:
                    self._overdue.append(login)
                    continue
                login.started_s = now_s
                self._running[login] = None
                return login
            self._hungry[wake] = None
            return None

    def finish(self, login: Login) -> None:
        """Note that the plugins have answered, or failed to answer."""
        now_s = self._now_s()
        with self._lock:
            del self._running[login]
            if self._finished_s is not None:
                self._finished = self._finished * MEMORY + 1
                self._busy_s = self._busy_s * MEMORY + min(now_s - self._finished_s, self._patience_s)
            self._finished_s = now_s if self.waiting else None

    # --- the waiting logins, with the lock held ---------------------------------------------------------------------

    def _fill(self) -> None:
        """Let logins that are held wait, if there is room."""
        while self._held and self.waiting < self.waiting_max:
            login = self._held.pop()
            login.deadline_s = self._now_s() + self._patience_s
            self._put(login)

    def _put(self, login: Login) -> None:
        waiting = self._sources.setdefault(login.source, OrderedDict())
        waiting[login] = None
        self.waiting += 1
        self._count(login.source, len(waiting) - 1, len(waiting))

    def _remove(self, login: Login) -> None:
        waiting = self._sources[login.source]
        del waiting[login]
        self.waiting -= 1
        if not waiting:
            del self._sources[login.source]
        if not self.waiting:
            self._finished_s = None
        self._count(login.source, len(waiting) + 1, len(waiting))

    def _remove_newest(self) -> Login:
        """Remove the newest login of the source with the most, and return it."""
        source = next(reversed(self._by_length[self._longest]))
        login = next(reversed(self._sources[source]))
        self._remove(login)
        return login

    def _count(self, source: str, before: int, now: int) -> None:
        if before:
            del self._by_length[before][source]
            if not self._by_length[before]:
                del self._by_length[before]
        if now:
            self._by_length.setdefault(now, OrderedDict())[source] = None
        if now > self._longest or (before == self._longest and before not in self._by_length):
            self._longest = now
