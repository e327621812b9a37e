"""The logins for which the queue has no room yet: they keep their place, and are told late that the server is busy."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from penstock.gateway.auth.login import Login

CONNECT_BYTES_MAX: Final = 4096
"""Bytes of the largest CONNECT whose login is held. A larger one is refused at once, so that all together have a bound."""


class HeldLogins:
    """Logins in the order in which they came. The owner has the lock.

    A client that is refused at once comes again at once, or soon. A fleet that is refused so costs the node more than its
    passwords: so a refusal comes late, and none if there is room before.

    Parameters:
        hold_s: seconds for which a login is held.
        count_max: logins that are held at a time.
    """

    def __init__(self, hold_s: float, count_max: int) -> None:
        self._hold_s = hold_s
        self._count_max = count_max if hold_s else 0
        self._logins: OrderedDict[Login, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._logins)

    def add(self, login: Login, now_s: float) -> bool:
        """Hold a login. Return False if there is no room for it."""
        if len(self._logins) >= self._count_max or login.connect.size > CONNECT_BYTES_MAX:
            return False
        login.deadline_s = now_s + self._hold_s
        self._logins[login] = None
        return True

    def discard(self, login: Login) -> None:
        """Hold a login no longer, if it is held."""
        self._logins.pop(login, None)

    def pop(self) -> Login:
        """Remove and return the one that came first."""
        return self._logins.popitem(last=False)[0]

    def overdue(self, now_s: float, count_max: int) -> list[Login]:
        """Remove and return those that were held for long enough, but no more than a number."""
        found: list[Login] = []
        while self._logins and len(found) < count_max and next(iter(self._logins)).deadline_s <= now_s:
            found.append(self.pop())
        return found
