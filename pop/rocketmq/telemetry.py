"""Telemetry: the stream on which a client states its settings, and gets the node's settings and questions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from penstock.pop.core.groups import Groups
from penstock.pop.errors import GroupInvalid
from penstock.pop.options import PopOptions
from penstock.pop.rocketmq.access import publishable
from penstock.pop.rocketmq.answering import status, status_of
from penstock.pop.rocketmq.clients import ConnectedClient, ConnectedClients, TelemetryStream
from penstock.pop.rocketmq.commands import ClientCommands
from penstock.pop.rocketmq.names import filter_of, group_of
from penstock.pop.rocketmq.presence import check_client_type
from penstock.pop.rocketmq.settings import merged
from penstock.pop.rocketmq.status import Refused
from penstock.pop.rocketmq.stubs import service_pb
from penstock.pop.rocketmq.transactions import TransactionChecks

COMMANDS_AT_ONCE = 32
"""Commands of a stream that are read as fast as they come. RocketMQ's clients send one at first, and one every few minutes."""

COMMANDS_PER_S = 1.0
"""Further commands of a stream that are read each second. The client waits for room in the flow control of HTTP/2 meanwhile."""


class TelemetryStreams:
    """Serves Telemetry.

    Parameters:
        clients: The clients that use the node.
        groups: Their settings are those of their consumers.
        checks: Asks producers for the outcome of half messages.
        commands: Waits for answers of clients.
        options: Settings of the node that its clients follow.
        now_ms: Returns the current time in ms.
    """

    def __init__(
        self,
        clients: ConnectedClients,
        groups: Groups,
        checks: TransactionChecks,
        commands: ClientCommands,
        options: PopOptions,
        now_ms: Callable[[], int],
    ) -> None:
        self._clients = clients
        self._groups = groups
        self._checks = checks
        self._commands = commands
        self._options = options
        self._now_ms = now_ms

    async def Telemetry(self, requests: AsyncIterator[Any], client: ConnectedClient) -> AsyncGenerator[Any, None]:
        stream = TelemetryStream()
        if client.stream is not None:
            client.stream.end()
        client.stream = stream
        reader = asyncio.create_task(self._read(requests, client, stream))
        reader.add_done_callback(lambda _: stream.end())
        try:
            while True:
                while stream.commands:
                    yield stream.commands.popleft()
                if stream.ended:
                    break
                await stream.wake.wait()
                stream.wake.clear()
            if reader.done():
                reader.result()
        finally:
            reader.cancel()
            self._clients.stream_ended(client, stream, self._now_ms())

    async def _read(self, requests: AsyncIterator[Any], client: ConnectedClient, stream: TelemetryStream) -> None:
        command = service_pb.TelemetryCommand
        read = 0
        async for request in requests:
            read += 1
            if read > COMMANDS_AT_ONCE:
                await asyncio.sleep(1 / COMMANDS_PER_S)  # who floods the stream waits, and not those who publish
            self._clients.heard_from(client.id, self._now_ms())
            if not request.HasField("settings"):
                self._commands.note_answer(client, request)
                continue
            if not stream.has_room:
                continue
            try:
                stream.put(command(status=status(), settings=self._settings(request.settings, client)))
            except Exception as error:  # The command states each error. `code_of` logs an unforeseen one.
                stream.put(command(status=status_of(error)))
                return

    def _settings(self, settings: Any, client: ConnectedClient) -> Any:
        """Note what a client states about itself; return the settings that it shall follow.

        Invalid names and expressions are accepted: clients do not show why their settings are refused, so the send or the
        receive that uses such a name is refused.
        """
        client.client_type = check_client_type(settings.client_type)
        if not settings.HasField("subscription"):
            for topic in publishable(settings.publishing.topics):
                self._clients.add_publisher(client, topic)
                self._checks.ask_waiting(topic)
            return merged(settings, (), self._options)
        groups = []
        for entry in settings.subscription.subscriptions:
            with suppress(Refused, GroupInvalid):
                group = self._groups.get(group_of(settings.subscription.group), filter_of(entry.topic))
                if group is not None:
                    groups.append(group)
        return merged(settings, groups, self._options)
