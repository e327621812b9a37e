"""The clients that are there: when each was last heard of, its open Telemetry stream, its lite topics, and its leases.

A push consumer asks the node to renew the invisible time of what it has until it is done (`auto_renew`). Such a delivery is
*leased*: invisible for long, and returned as soon as its client is gone. So nothing is written to renew one, its handle stays
good across a restart of either side, and a consumer that dies gives back what it had in seconds. Whose a lease is stands in the
attempt id of its checkpoint, so a node that was restarted knows as well.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from penstock.pop.core.checkpoint import ATTEMPT_ID_BYTES_MAX
from penstock.pop.rocketmq.status import Code, Refused

CLIENTS_MAX = 100_000

SILENT_MS_MAX = 30_000
"""A client that was not heard of for so long is gone: the official ones send a heartbeat every 10 s."""

HUNG_UP_MS_MAX = 15_000
"""As `SILENT_MS_MAX`, from when its Telemetry stream broke: long enough for one heartbeat on another connection."""

COMMANDS_MAX = 256
"""Commands that wait to be written to one client. What comes then goes to another, or waits."""

PUBLISHED_MAX = 1_000
"""Topics for which one client is remembered as a producer."""

_MARK = "\x1d"


def lease_id(client_id: str, attempt_id: str) -> str:
    """Return the attempt id of a checkpoint whose deliveries are leased to a client.

    Raises:
        Refused: BAD_REQUEST: both together are too long to stand in a record.
    """
    found = f"{_MARK}{client_id}{_MARK}{attempt_id}"
    if len(found.encode()) > ATTEMPT_ID_BYTES_MAX or _MARK in client_id:
        raise Refused(Code.BAD_REQUEST, f"client id and attempt id have more than {ATTEMPT_ID_BYTES_MAX - 2} bytes together")
    return found


def holder_of(attempt_id: str) -> str:
    """Return the client to which the deliveries of a checkpoint with this attempt id are leased; empty where to none."""
    return attempt_id.split(_MARK, 2)[1] if attempt_id.startswith(_MARK) else ""


class Stream:
    """What is to be written to an open Telemetry stream."""

    __slots__ = ("commands", "ended", "wake")

    def __init__(self) -> None:
        self.commands: deque[Any] = deque()
        self.wake = asyncio.Event()
        self.ended = False

    @property
    def has_room(self) -> bool:
        """True where another command may be put."""
        return not self.ended and len(self.commands) < COMMANDS_MAX

    def put(self, command: Any) -> None:
        """Write a command, soon."""
        self.commands.append(command)
        self.wake.set()

    def end(self) -> None:
        """Write what waits, and end."""
        self.ended = True
        self.wake.set()


class Client:
    """One client. What it has subscribed to stands in settings of groups as well; nothing else has to survive.

    Parameters:
        client_id: as it calls itself.
        seen_ms: when it was heard of.
    """

    __slots__ = ("client_type", "id", "is_done", "lite", "published", "seen_ms", "stream", "turn")

    def __init__(self, client_id: str, seen_ms: int) -> None:
        self.id = client_id
        self.seen_ms = seen_ms
        self.client_type = 0
        """As its heartbeats and settings say; 0 where there were none yet."""
        self.is_done = False
        """True when it has said that it ends."""
        self.stream: Stream | None = None
        self.published: dict[str, None] = {}
        self.lite: dict[tuple[str, str], dict[str, None]] = {}
        """Filters of its lite topics, by group and parent: see `pop.rocketmq.lite`."""
        self.turn = 0
        """Rotates its lite topics, so that none starves."""


class Clients:
    """All clients of a node. Times are ms; who calls says what time it is."""

    def __init__(self) -> None:
        self._clients: dict[str, Client] = {}
        self._publishers: dict[str, dict[str, Client]] = {}
        """By topic, then by client id."""

    def __len__(self) -> int:
        return len(self._clients)

    def get(self, client_id: str) -> Client | None:
        """Return a client that is there."""
        return self._clients.get(client_id)

    def seen(self, client_id: str, now_ms: int) -> Client:
        """Return the client that calls; it is there from now on.

        Raises:
            Refused: CLIENT_ID_REQUIRED, or TOO_MANY_REQUESTS at the limit.
        """
        client = self._clients.get(client_id)
        if client is not None:
            client.seen_ms = now_ms
            return client
        if not client_id:
            raise Refused(Code.CLIENT_ID_REQUIRED, "the metadata of a call must have x-mq-client-id")
        if len(self._clients) >= CLIENTS_MAX:
            raise Refused(Code.TOO_MANY_REQUESTS, f"{CLIENTS_MAX} clients are there, which is the limit: try again later")
        client = self._clients[client_id] = Client(client_id, now_ms)
        return client

    def hung_up(self, client: Client, stream: Stream, now_ms: int) -> None:
        """Note that a Telemetry stream has ended: unless its client calls again soon, it is gone."""
        if client.stream is stream:
            client.stream = None
            client.seen_ms = min(client.seen_ms, now_ms - SILENT_MS_MAX + HUNG_UP_MS_MAX)

    def forgive(self, ms: int) -> None:
        """Give all clients `ms` more, in which the node didn't listen."""
        for client in self._clients.values():
            client.seen_ms += ms

    def publishes(self, client: Client, topic: str) -> None:
        """Note that a client may be asked about half messages of a topic."""
        if topic not in client.published and len(client.published) < PUBLISHED_MAX:
            client.published[topic] = None
            self._publishers.setdefault(topic, {})[client.id] = client

    def producer_of(self, topic: str, turn: int) -> Client | None:
        """Return a client that publishes to a topic and can be told something now; another one each `turn`."""
        able = [client for client in self._publishers.get(topic, {}).values() if client.stream and client.stream.has_room]
        return able[turn % len(able)] if able else None

    def take_gone(self, now_ms: int) -> dict[str, Client]:
        """Forget the clients that have ended, or were not heard of for too long; return them by id."""
        gone = {
            client.id: client for client in self._clients.values() if client.is_done or now_ms - client.seen_ms > SILENT_MS_MAX
        }
        for client in gone.values():
            del self._clients[client.id]
            for topic in client.published:
                publishers = self._publishers[topic]
                del publishers[client.id]
                if not publishers:
                    del self._publishers[topic]
        return gone

    def end_streams(self) -> None:
        """End all Telemetry streams: the node stops."""
        for client in self._clients.values():
            if client.stream is not None:
                client.stream.end()
