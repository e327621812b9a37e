"""Commands of an operator to a client over its Telemetry stream: thread dump, verification of a message, reconnection.

Also the notice that a lite topic's group was deleted. A client that does not hear of that subscribes again at its next
synchronisation.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any

from penstock.access.actions import POP
from penstock.pop.core.group import ConsumerGroup
from penstock.pop.rocketmq.clients import ConnectedClient, ConnectedClients
from penstock.pop.rocketmq.messages import message_of
from penstock.pop.rocketmq.names import lite_topic_of
from penstock.pop.rocketmq.status import Code, Refused
from penstock.pop.rocketmq.stubs import pb, service_pb
from penstock.store.record import Record

ANSWER_S = 10.0
"""How long the node waits for the answer to a command."""

PENDING_MAX = 64
"""Maximum number of commands that wait for their answers."""


class ClientCommands:
    """Gives commands to clients, and waits for their answers.

    Parameters:
        clients: The clients that use the node.
        now_ms: Returns the current time in ms.
        host: Returns the address of this node, which each message names.
    """

    def __init__(self, clients: ConnectedClients, now_ms: Callable[[], int], host: Callable[[], str]) -> None:
        self._clients = clients
        self._now_ms = now_ms
        self._host = host
        self._pending: dict[tuple[str, str], asyncio.Future[Any]] = {}
        """The answers that are awaited, by client id and nonce."""

    def described(self) -> list[dict[str, Any]]:
        """Return a row for each client, by client id."""
        now_ms = self._now_ms()
        return [
            {
                "client": client.id,
                "type": pb.ClientType.Name(client.client_type).lower() if client.client_type else "",
                "language": client.agent.language.lower() if client.agent is not None else "",
                "version": ".".join(map(str, client.agent.version)) if client.agent is not None else "",
                "listens": client.stream is not None,
                "heard_ms_ago": max(now_ms - client.heard_ms, 0),
            }
            for client in sorted(self._clients, key=lambda each: each.id)
        ]

    async def threads_of(self, client_id: str) -> str:
        """Return what the threads of a client do, as the client describes it.

        Raises:
            Refused: NOT_FOUND if the client is not there or has no open stream; NOT_IMPLEMENTED if it can't tell;
                TOO_MANY_REQUESTS if too many commands wait; PRECONDITION_FAILED if it does not answer in time.
        """
        nonce = secrets.token_hex(8)
        command = service_pb.PrintThreadStackTraceCommand(nonce=nonce)
        answer = await self._ask(
            self._listening(client_id), nonce, service_pb.TelemetryCommand(print_thread_stack_trace_command=command)
        )
        _check(answer)
        return str(answer.thread_stack_trace.thread_stack_trace)

    async def verified(self, client_id: str, record: Record) -> bool:
        """Return whether the listener of a push consumer succeeds with a message. This is no delivery, and changes no group.

        Raises:
            Refused: As `threads_of`, and FORBIDDEN if the client may not read the message.
        """
        client = self._listening(client_id)
        topic = record.topic.decode()
        if client.rights is not None and not client.rights.may(POP, topic):
            raise Refused(Code.FORBIDDEN, f"the client {client_id[:80]!r} may not pop messages of {topic[:80]!r}")
        nonce = secrets.token_hex(8)
        message = message_of(record, store_host=self._host())
        message.system_properties.delivery_attempt = 1
        command = service_pb.VerifyMessageCommand(nonce=nonce, message=message)
        answer = await self._ask(client, nonce, service_pb.TelemetryCommand(verify_message_command=command))
        if answer.status.code == Code.FAILED_TO_CONSUME_MESSAGE:
            return False
        _check(answer)
        return True

    def reconnect(self, client_id: str) -> None:
        """Tell a client to connect again. Raises Refused as `threads_of`."""
        command = service_pb.ReconnectEndpointsCommand(nonce=secrets.token_hex(8))
        self._put(self._listening(client_id), service_pb.TelemetryCommand(reconnect_endpoints_command=command))

    def group_deleted(self, group: ConsumerGroup) -> None:
        """Tell the subscribers of a lite topic that its group was deleted, and forget their subscriptions."""
        for client_id, parent in group.settings.lite:
            client = self._clients.get(client_id)
            if client is None:
                continue
            client.lite.get((group.name, parent), {}).pop(group.filter, None)
            if client.stream is not None and client.stream.has_room:
                notice = service_pb.NotifyUnsubscribeLiteCommand(lite_topic=lite_topic_of(parent, group.filter))
                self._put(client, service_pb.TelemetryCommand(notify_unsubscribe_lite_command=notice))

    def note_answer(self, client: ConnectedClient, command: Any) -> None:
        """Note an answer of a client to a command. Other commands are ignored."""
        # The Node client (1.0.8) that can't verify a message answers with the command instead of a result.
        for name in ("thread_stack_trace", "verify_message_result", "verify_message_command"):
            if command.HasField(name):
                waiting = self._pending.get((client.id, getattr(command, name).nonce))
                if waiting is not None and not waiting.done():
                    waiting.set_result(command)

    def _listening(self, client_id: str) -> ConnectedClient:
        client = self._clients.get(client_id)
        if client is None:
            raise Refused(Code.NOT_FOUND, f"no client {client_id[:80]!r} uses this node: see `penstock rocketmq clients`")
        if client.stream is None or not client.stream.has_room:
            raise Refused(Code.NOT_FOUND, f"the client {client_id[:80]!r} has no open Telemetry stream: try again in a moment")
        return client

    async def _ask(self, client: ConnectedClient, nonce: str, command: Any) -> Any:
        if len(self._pending) >= PENDING_MAX:
            raise Refused(Code.TOO_MANY_REQUESTS, f"{PENDING_MAX} commands wait for answers, the limit: try again later")
        waiting: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[client.id, nonce] = waiting
        try:
            self._put(client, command)
            async with asyncio.timeout(ANSWER_S):
                return await waiting
        except TimeoutError:
            raise Refused(
                Code.PRECONDITION_FAILED,
                f"the client {client.id[:80]!r} gave no answer in {ANSWER_S:.0f} s: it may not know the command, or hang",
            ) from None
        finally:
            del self._pending[client.id, nonce]

    def _put(self, client: ConnectedClient, command: Any) -> None:
        assert client.stream is not None
        command.status.code = Code.OK
        client.stream.put(command)


def _check(answer: Any) -> None:
    """Raise Refused with NOT_IMPLEMENTED if a client did not do what it was told to."""
    code = answer.status.code
    if code != Code.OK:
        name = pb.Code.Name(code) if code in pb.Code.values() else str(code)
        raise Refused(Code.NOT_IMPLEMENTED, f"the client answers {name} {answer.status.message}".rstrip())
