"""The file descriptors that MQTT connections may have, so that they leave enough for the store."""

from __future__ import annotations

import socket
from collections.abc import Callable


class SocketShare:
    """The share of the process's descriptors that MQTT connections may have.

    The kernel gives each socket the lowest free number. So where a new socket has a number above the share, all below it are
    in use, and nothing needs to be counted.

    Parameters:
        below: the first number that no connection may have.
        shed: closes the connection that has waited longest for its CONNECT; returns whether there was one.
    """

    __slots__ = ("_shed", "below")

    def __init__(self, below: int, shed: Callable[[], bool]) -> None:
        self.below = below
        self._shed = shed

    def fit(self, end: socket.socket) -> socket.socket | None:
        """Return an accepted socket with a number within the share; None, with the socket closed, if there is no room.

        A connection that has sent nothing makes way for a new one: a client sends its CONNECT at once, and an idle socket
        doesn't.
        """
        if end.fileno() < self.below:
            return end
        with end:
            if not self._shed():
                return None
            low = end.dup()
        if low.fileno() < self.below:
            return low
        low.close()
        return None
