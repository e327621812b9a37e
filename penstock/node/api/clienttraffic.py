"""The traffic of each connected client, as rates: by how much its counters have grown between two looks at all clients.

Connections count what they send and receive in any case, so rates cost nothing on the way of a message. The node looks at the
counters only while somebody asks for rates. It keeps those of the last look, in arrays in the order of the client ids: arrays
are small, and unlike a dictionary they grow without holding the loop.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Final, NamedTuple

from penstock.gateway.connection.clients import ClientRegistry
from penstock.gateway.connection.connection import Connection
from penstock.node.api.pages import LOOKED_AT_ONCE, in_slices, sliced

LOOK_S: Final = 1.5
"""Seconds between two looks, over which rates are averages. `penstock top` asks every two, so its second view has rates."""

PAUSE_FACTOR: Final = 19
"""The shortest pause, in times of the look before it. So looks at many clients take a twentieth of the time."""

IDLE_S: Final = 120.0
"""Seconds after the last question until the looks end and everything is forgotten."""


class Rates(NamedTuple):
    """What a client sends (`in`) and gets (`out`) per second."""

    messages_in: float
    messages_out: float
    bytes_in: float
    bytes_out: float


NOTHING: Final = array("q", (0, 0, 0, 0))
"""Counts, as of the look before, of a connection that has begun since."""


class BusyClient(NamedTuple):
    """A client with its rates."""

    client_id: str
    connection: Connection
    rates: Rates


IsListed = Callable[[str, Connection], bool]
"""Tells which clients are meant."""


@dataclass(slots=True)
class _Look:
    """What one look has seen of all clients, in rows in the order of their ids. A hundred thousand of them take about 8 MB."""

    began_s: float
    over_s: float
    """Seconds since the look before; 0 for the first one, which knows no rates."""
    client_ids: list[str] = field(default_factory=list)
    connected_ms: array[int] = field(default_factory=lambda: array("q"))
    """When each connection began. The counters of a client that has connected anew have begun anew."""
    counts: array[int] = field(default_factory=lambda: array("q"))
    """Four of each client, in the order of `Rates`."""
    rates: array[float] = field(default_factory=lambda: array("d"))

    def row_of(self, client_id: str, begin: int = 0) -> int:
        """Return the row of a client, or that which it would have. It is `begin` or a later one."""
        return bisect_left(self.client_ids, client_id, begin)

    def has(self, row: int, client_id: str, connected_ms: int) -> bool:
        """Return whether a row is that of a connection, which began at a time."""
        is_client = row < len(self.client_ids) and self.client_ids[row] == client_id
        return is_client and self.connected_ms[row] == connected_ms

    def rates_in(self, row: int) -> Rates:
        """Return the rates in a row."""
        return Rates(*self.rates[4 * row : 4 * row + 4])

    def add(self, clients: Mapping[str, Connection], before: _Look, begin: int) -> int:
        """Add clients, whose ids come after all that were added; return the row of `before` where the next ones begin.

        Args:
            clients: in the order of their ids.
            before: the look before this one.
            begin: the row of `before` where these clients begin.
        """
        client_ids, connections = list(clients), clients.values()
        connected_ms = array("q", [each.connected_ms for each in connections])
        counts = array("q", [count for each in connections for count in _counts_of(each)])
        next_row = begin + len(client_ids)
        if before.client_ids[begin:next_row] == client_ids and before.connected_ms[begin:next_row] == connected_ms:
            counted = before.counts[4 * begin : 4 * next_row]  # nobody has come or gone, as most often
        else:
            counted, next_row = array("q"), begin
            for client_id, began_ms in zip(client_ids, connected_ms, strict=True):
                row = before.row_of(client_id, next_row)
                is_known = before.has(row, client_id, began_ms)
                counted += before.counts[4 * row : 4 * row + 4] if is_known else NOTHING
                next_row = row + is_known
        seconds = self.over_s or math.inf
        self.client_ids += client_ids
        self.connected_ms += connected_ms
        self.counts += counts
        self.rates.extend([(now - then) / seconds for now, then in zip(counts, counted, strict=True)])
        return next_row


def _counts_of(connection: Connection) -> tuple[int, int, int, int]:
    outbox = connection.outbox
    return connection.messages_in, outbox.messages_out, connection.bytes_in, outbox.bytes_out


class ClientTraffic:
    """The rates of all connected clients.

    Parameters:
        clients: the connected clients.
        now_s: returns monotonic seconds.
    """

    def __init__(self, clients: ClientRegistry, now_s: Callable[[], float]) -> None:
        self._clients = clients
        self._now_s = now_s
        self._asked_s = 0.0
        self._task: asyncio.Task[None] | None = None
        self._last: _Look | None = None

    @property
    def over_s(self) -> float:
        """Seconds over which the rates are averages; 0 while none are known."""
        return self._last.over_s if self._last is not None else 0.0

    def ask(self) -> None:
        """Begin to look at the clients, unless the node does so, and go on for `IDLE_S` from now on."""
        self._asked_s = self._now_s()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._look_on())

    def stop(self) -> None:
        """End the looks."""
        if self._task is not None:
            self._task.cancel()

    async def _look_on(self) -> None:
        try:
            while self._now_s() - self._asked_s <= IDLE_S:
                began_s = perf_counter()
                await self.look()
                await asyncio.sleep(max(LOOK_S, PAUSE_FACTOR * (perf_counter() - began_s)))
        finally:
            self._task = self._last = None

    async def look(self) -> None:
        """Look at all clients, in slices between other work of the loop."""
        now_s = self._now_s()
        before = self._last or _Look(now_s, 0.0)
        look = _Look(now_s, now_s - before.began_s)
        row = 0
        async for client_ids in sliced(self._in_order()):
            clients = {client_id: self._clients[client_id] for client_id in client_ids}
            row = look.add({name: each for name, each in clients.items() if each.connected}, before, row)
        self._last = look

    def _in_order(self) -> Iterator[list[str]]:
        """Yield the client ids in their order, some at a time."""
        start = ""
        while client_ids := self._clients.at_or_after(start, LOOKED_AT_ONCE):
            yield client_ids
            start = client_ids[-1] + "\0"

    def rates_of(self, client_id: str, connection: Connection) -> Rates | None:
        """Return the rates of a client; None if they are not known."""
        last = self._last
        if last is None or not last.over_s:
            return None
        row = last.row_of(client_id)
        return last.rates_in(row) if last.has(row, client_id, connection.connected_ms) else None

    async def busiest(self, figure: str, count: int, is_listed: IsListed) -> list[BusyClient]:
        """Return clients with the highest rates above 0, the highest first, in slices between other work.

        Args:
            figure: a field of `Rates`.
            count: number of clients, at least 1.
            is_listed: tells which clients are meant.
        """
        last, column = self._last, Rates._fields.index(figure)
        if last is None:
            return []
        found: list[tuple[float, int, Connection]] = []
        least = 0.0
        async for begin in sliced(range(0, len(last.client_ids), LOOKED_AT_ONCE)):
            for row, rate in enumerate(last.rates[4 * begin + column : 4 * (begin + LOOKED_AT_ONCE) : 4], begin):
                if rate > least and (connection := self._listed(last, row, is_listed)) is not None:
                    found.append((-rate, row, connection))
            if len(found) > 2 * count + LOOKED_AT_ONCE:  # keep the highest; whoever has less needs no look any more
                found.sort()
                del found[count:]
                least = -found[-1][0]
        found.sort()
        busiest = ((last.client_ids[row], connection, last.rates_in(row)) for _, row, connection in found[:count])
        return await in_slices(BusyClient(*each) for each in busiest)

    def _listed(self, look: _Look, row: int, is_listed: IsListed) -> Connection | None:
        """Return the connection of a row if it is meant and still there."""
        client_id = look.client_ids[row]
        connection = self._clients.get(client_id)
        if connection is None or not (connection.connected and look.has(row, client_id, connection.connected_ms)):
            return None
        return connection if is_listed(client_id, connection) else None
