"""The clients that use the node: when the node last heard from each, its Telemetry stream, its topics and its lite topics."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from typing import Any

from penstock.access.actions import SEND
from penstock.access.policy import AccessPolicy
from penstock.access.rights import Rights
from penstock.pop.rocketmq.agents import Agent
from penstock.pop.rocketmq.status import Code, Refused

CLIENTS_MAX = 100_000

SILENT_MS_MAX = 30_000
"""A client is gone if the node heard nothing from it for this long. Most official clients send a heartbeat every 10 s."""

SILENT_RUST_MS_MAX = 90_000
"""The same limit for the Rust client, whose heartbeats (5.0.0) are 30 s apart. It opens its Telemetry stream only once, so the
node could not ask a client about transactions any more after taking it for gone."""

DISCONNECTED_MS_MAX = 15_000
"""The same limit for a client whose Telemetry stream broke. It leaves time for one heartbeat on another connection."""

COMMANDS_MAX = 256
"""Maximum number of commands that wait to be written to one client. Further commands go to another client, or wait."""

PUBLISHED_MAX = 1_000
"""Maximum number of topics for which the node remembers one client as a producer."""


class TelemetryStream:
    """The commands for an open Telemetry stream."""

    __slots__ = ("commands", "ended", "wake")

    def __init__(self) -> None:
        self.commands: deque[Any] = deque()
        self.wake = asyncio.Event()
        self.ended = False

    @property
    def has_room(self) -> bool:
        """Whether the stream is open and accepts another command."""
        return not self.ended and len(self.commands) < COMMANDS_MAX

    def put(self, command: Any) -> None:
        """Queue a command for the stream's writer."""
        self.commands.append(command)
        self.wake.set()

    def end(self) -> None:
        """Let the writer write the queued commands, and end the stream."""
        self.ended = True
        self.wake.set()


class ConnectedClient:
    """One client. Only its lite topics must survive a restart, and these are also in the settings of groups.

    Parameters:
        client_id: Id of the client, as the client states it. With access control the principal's name is in front.
        heard_ms: When the node last heard from the client.
    """

    __slots__ = ("agent", "client_type", "heard_ms", "id", "is_terminated", "lite", "published", "rights", "stream", "turn")

    def __init__(self, client_id: str, heard_ms: int) -> None:
        self.id = client_id
        self.agent: Agent | None = None
        """The client's library; None before the first call, which a restored client has not made yet."""
        self.rights: Rights | None = None
        """What the client that made the last call may do; None where access is not restricted."""
        self.heard_ms = heard_ms
        self.client_type = 0
        """Type from the client's heartbeats and settings; 0 before the first of them."""
        self.is_terminated = False
        """Whether the client announced its end."""
        self.stream: TelemetryStream | None = None
        self.published: dict[str, None] = {}
        self.lite: dict[tuple[str, str], dict[str, None]] = {}
        """Filters of the client's lite topics, by group and parent topic. `LiteSubscriptions` keeps them."""
        self.turn = 0
        """Rotates the lite topics of a poll, so that no lite topic starves."""

    @property
    def silent_ms_max(self) -> int:
        """How long the client may be silent."""
        is_rust = self.agent is not None and self.agent.language == "RUST"
        return SILENT_RUST_MS_MAX if is_rust else SILENT_MS_MAX

    def can_be_asked(self, topic: str) -> bool:
        """Return whether the node may ask the client about half messages of a topic now. The question shows the message."""
        return self.stream is not None and self.stream.has_room and (self.rights is None or self.rights.may(SEND, topic))


class ConnectedClients:
    """All clients that use the node. Times are in ms, and the caller passes the current time."""

    def __init__(self) -> None:
        self._clients: dict[str, ConnectedClient] = {}
        self._publishers: dict[str, dict[str, ConnectedClient]] = {}
        """Clients by topic and client id."""

    def __len__(self) -> int:
        return len(self._clients)

    def __iter__(self) -> Iterator[ConnectedClient]:
        return iter(self._clients.values())

    def get(self, client_id: str) -> ConnectedClient | None:
        """Return the client with an id, or None if there is none."""
        return self._clients.get(client_id)

    def heard_from(self, client_id: str, now_ms: int) -> ConnectedClient:
        """Note that a client called, and return it. The first call adds the client.

        Raises:
            Refused: CLIENT_ID_REQUIRED if the id is empty, TOO_MANY_REQUESTS if there are `CLIENTS_MAX` clients.
        """
        client = self._clients.get(client_id)
        if client is not None:
            client.heard_ms = now_ms
            return client
        if not client_id:
            raise Refused(Code.CLIENT_ID_REQUIRED, "the metadata of the call has no x-mq-client-id: add the client's id")
        if len(self._clients) >= CLIENTS_MAX:
            raise Refused(Code.TOO_MANY_REQUESTS, f"{CLIENTS_MAX} clients use this node, which is the limit: try again later")
        client = self._clients[client_id] = ConnectedClient(client_id, now_ms)
        return client

    def stream_ended(self, client: ConnectedClient, stream: TelemetryStream, now_ms: int) -> None:
        """Note the end of a Telemetry stream. If the client does not call again soon, it is gone."""
        if client.stream is stream:
            client.stream = None
            client.heard_ms = min(client.heard_ms, now_ms - client.silent_ms_max + DISCONNECTED_MS_MAX)

    def excuse(self, ms: int) -> None:
        """Give all clients `ms` more time, because the node did not listen for as long."""
        for client in self._clients.values():
            client.heard_ms += ms

    def renew_rights(self, policy: AccessPolicy) -> None:
        """Let all clients go by other rules from now on."""
        for client in self._clients.values():
            if client.rights is not None:
                client.rights = policy.rights_of(client.rights.stated)

    def add_publisher(self, client: ConnectedClient, topic: str) -> None:
        """Note that the node may ask a client about half messages of a topic."""
        if topic not in client.published and len(client.published) < PUBLISHED_MAX:
            client.published[topic] = None
            self._publishers.setdefault(topic, {})[client.id] = client

    def publisher_of(self, topic: str, turn: int) -> ConnectedClient | None:
        """Return a client that publishes to a topic and accepts a command now. Each `turn` gives another one."""
        able = [client for client in self._publishers.get(topic, {}).values() if client.can_be_asked(topic)]
        return able[turn % len(able)] if able else None

    def remove_gone(self, now_ms: int) -> dict[str, ConnectedClient]:
        """Remove the clients that announced their end or were silent for too long; return them by id."""
        gone = {
            client.id: client
            for client in self._clients.values()
            if client.is_terminated or now_ms - client.heard_ms > client.silent_ms_max
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
        """End all Telemetry streams, because the node stops."""
        for client in self._clients.values():
            if client.stream is not None:
                client.stream.end()
