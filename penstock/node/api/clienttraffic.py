"""The traffic of each connected client, as rates: by how much its counters have grown between two looks at all clients.

Connections count what they send and receive in any case, so rates cost nothing on the way of a message. The node looks at the
counters only while somebody asks for rates. It keeps those of the last look in arrays, which are small, in the order of the
client ids, in which the next look goes through them.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from time import perf_counter
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

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


FIGURES: Final = len(Rates._fields)

ROOM: Final = 1_024
"""Clients that may connect in the course of a look and be seen. Others are seen by the next one."""

Numbers = NDArray[np.int64]


class BusyClient(NamedTuple):
    """A client with its rates."""

    client_id: str
    connection: Connection
    rates: Rates


IsListed = Callable[[str, Connection], bool]
"""Tells which clients are meant."""


class _Look:
    """What one look has seen of all clients, in rows in the order of their ids. A hundred thousand of them take about 8 MB.

    Its arrays have their size from the beginning: to make large ones larger would hold the loop.

    Parameters:
        began_s: monotonic seconds.
        over_s: seconds since the look before; 0 for the first one, which knows no rates.
        rows_max: clients for which there is room.
    """

    def __init__(self, began_s: float, over_s: float, rows_max: int) -> None:
        self.began_s = began_s
        self.over_s = over_s
        self.rows = 0
        self.client_ids = [""] * rows_max
        self.connected_ms = np.zeros(rows_max, np.int64)
        """When each connection began. The counters of a client that has connected anew have begun anew."""
        self.counts = np.zeros((rows_max, FIGURES), np.int64)
        """In the order of `Rates`."""
        self.rates = np.zeros((rows_max, FIGURES))

    def row_of(self, client_id: str, begin: int = 0) -> int:
        """Return the row of a client, or that which it would have. It is `begin` or a later one."""
        return bisect_left(self.client_ids, client_id, begin, self.rows)

    def has(self, row: int, client_id: str, connected_ms: int) -> bool:
        """Return whether a row is that of a connection, which began at a time."""
        is_client = row < self.rows and self.client_ids[row] == client_id
        return is_client and int(self.connected_ms[row]) == connected_ms

    def rates_in(self, row: int) -> Rates:
        """Return the rates in a row."""
        return Rates(*self.rates[row].tolist())

    def add(self, clients: Mapping[str, Connection], before: _Look, row: int) -> int:
        """Add clients, whose ids come after all that were added, as long as there is room.

        Args:
            clients: in the order of their ids.
            before: the look before this one.
            row: of `before` where these clients begin.

        Returns:
            The row of `before` where the next clients begin.
        """
        begin, end = self.rows, self.rows + len(clients)
        if not clients or end > len(self.client_ids):
            return row
        self.client_ids[begin:end] = clients
        self.connected_ms[begin:end] = [each.connected_ms for each in clients.values()]
        self.counts[begin:end] = [_counts_of(each) for each in clients.values()]
        counted, next_row = before.counts_of(self.client_ids[begin:end], self.connected_ms[begin:end], row)
        if self.over_s:
            self.rates[begin:end] = (self.counts[begin:end] - counted) / self.over_s
        self.rows = end
        return next_row

    def counts_of(self, client_ids: list[str], connected_ms: Numbers, row: int) -> tuple[Numbers, int]:
        """Return the counts of connections, 0 for those that have begun since, and the row after them.

        Args:
            client_ids: in order.
            connected_ms: when each connection began.
            row: at which to begin.
        """
        end = row + len(client_ids)
        if self.client_ids[row:end] == client_ids and np.array_equal(self.connected_ms[row:end], connected_ms):
            return self.counts[row:end], end  # nobody has come or gone, as most often
        counts = np.zeros((len(client_ids), FIGURES), np.int64)
        for number, (client_id, began_ms) in enumerate(zip(client_ids, connected_ms.tolist(), strict=True)):
            row = self.row_of(client_id, row)
            if self.has(row, client_id, began_ms):
                counts[number] = self.counts[row]
                row += 1
        return counts, row


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
        before = self._last or _Look(now_s, 0.0, 0)
        look = _Look(now_s, now_s - before.began_s, len(self._clients) + ROOM)
        row = 0
        async for client_ids in sliced(self._in_order()):
            clients = {client_id: self._clients[client_id] for client_id in client_ids}
            row = look.add({name: each for name, each in clients.items() if each.connected}, before, row)
        self._last = look
        await asyncio.sleep(0)  # what the look before has seen is freed in a turn of its own

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
        async for begin in sliced(range(0, last.rows, LOOKED_AT_ONCE)):
            rates = last.rates[begin : begin + LOOKED_AT_ONCE, column]
            for row in (begin + np.flatnonzero(rates > least)).tolist():
                if (connection := self._listed(last, row, is_listed)) is not None:
                    found.append((-float(rates[row - begin]), row, connection))
            if len(found) > count + 4 * LOOKED_AT_ONCE:  # keep the highest; whoever has less needs no look any more
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
