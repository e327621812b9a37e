"""Methods that send messages, and recall them."""

from __future__ import annotations

from typing import Any

from penstock.pop.access.auditedcall import note_change, note_failed
from penstock.pop.access.caller import causer_of_call, check_sender
from penstock.pop.core.handle import Handles
from penstock.pop.core.sender import Sender, message_id
from penstock.pop.rocketmq.answering import status, status_of
from penstock.pop.rocketmq.clients import ConnectedClient, ConnectedClients
from penstock.pop.rocketmq.messages import id_of, properties_of, topic_and_body_of
from penstock.pop.rocketmq.status import RECALL_CODES, Code, Refused, overall_code
from penstock.pop.rocketmq.stubs import service_pb
from penstock.store.properties import decode_properties
from penstock.store.record import decode
from penstock.store.store import Store
from penstock.timer.delayed import DelayedMessages

MESSAGES_PER_SEND_MAX = 1_000


class MessageSender:
    """Serves SendMessage and RecallMessage.

    Parameters:
        clients: Remembers which clients publish half messages of a topic.
        sender: Stores messages.
        delayed: Delayed messages.
        handles: Reads recall handles.
        store: Tells when all that was stored is durable.
        message_bytes_max: Maximum size of a body in bytes.
    """

    def __init__(
        self,
        clients: ConnectedClients,
        sender: Sender,
        delayed: DelayedMessages,
        handles: Handles,
        store: Store,
        message_bytes_max: int,
    ) -> None:
        self._clients = clients
        self._sender = sender
        self._delayed = delayed
        self._handles = handles
        self._store = store
        self._message_bytes_max = message_bytes_max

    async def SendMessage(self, request: Any, client: ConnectedClient) -> Any:
        if not 0 < len(request.messages) <= MESSAGES_PER_SEND_MAX:
            raise Refused(
                Code.BAD_REQUEST,
                f"a call sends 1 to {MESSAGES_PER_SEND_MAX} messages, not {len(request.messages)}",
            )
        entries = [self._send(message, client) for message in request.messages]
        await self._store.durable()
        codes = [Code(entry.status.code) for entry in entries]
        detail = next((entry.status.message for entry in entries if entry.status.code != Code.OK), "")
        return service_pb.SendMessageResponse(status=status(overall_code(codes), detail), entries=entries)

    def _send(self, message: Any, client: ConnectedClient) -> Any:
        try:
            topic, body = topic_and_body_of(message, self._message_bytes_max)
            properties = properties_of(message, topic, self._store.now_ms())
            stored = self._sender.store(topic.encode(), body, properties, causer_of_call())
        except Exception as error:  # One message of a batch fails alone.
            return service_pb.SendResultEntry(status=status_of(error))
        if properties.producer:
            self._clients.add_publisher(client, topic)
        return service_pb.SendResultEntry(
            status=status(),
            message_id=id_of(stored.position, properties),
            transaction_id=stored.transaction_handle,
            offset=stored.position,
            recall_handle=stored.recall_handle,
        )

    async def RecallMessage(self, request: Any) -> Any:
        named = self._handles.read_recall(request.recall_handle)
        if named is None:
            raise Refused(Code.INVALID_RECEIPT_HANDLE, "this is not a recall handle from this node")
        size = self._delayed.size(named[0])
        check_sender(self._store, named[0], size)
        recalled = self._id(named[0], size)
        code, detail = RECALL_CODES[self._delayed.recall(*named)]
        if code is Code.OK:
            note_change(message=recalled)
        else:
            note_failed(detail)
        await self._store.durable()
        return service_pb.RecallMessageResponse(status=status(code, detail), message_id=recalled if code is Code.OK else "")

    def _id(self, position: int, size: int | None) -> str:
        """Return the id of a delayed message."""
        if size is None:
            return ""
        self._store.commit()  # The message may have been stored in this turn.
        data = self._store.read_intact(position, size)
        if data is None:
            return message_id(position)
        return id_of(position, decode_properties(decode(data, position=position, verify=False).properties))
