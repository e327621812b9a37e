"""EndTransaction, and the node's question to producers for the outcome of a half message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.pop.access.caller import check_sender
from penstock.pop.core.handle import Handles
from penstock.pop.core.transactions import HalfMessage, Transactions
from penstock.pop.rocketmq.answering import status
from penstock.pop.rocketmq.clients import ConnectedClients
from penstock.pop.rocketmq.messages import PRODUCER, message_of
from penstock.pop.rocketmq.status import Code, Refused, end_code
from penstock.pop.rocketmq.stubs import pb, service_pb
from penstock.store.record import decode
from penstock.store.store import Store


class TransactionChecks:
    """Serves EndTransaction, and asks producers on their Telemetry streams.

    The producer of a half message is its topic: the node may ask each client that publishes to the topic.

    Parameters:
        clients: The clients that use the node.
        read: Returns the record of a message, or None if it can't be read.
        handles: Reads and makes the handles of half messages.
        transactions: Half messages that are pending.
        store: Tells when all that was stored is durable.
        check_ms: Time in ms after which the node asks a producer again.
        host: Returns the address of this node, which each message names.
    """

    def __init__(
        self,
        clients: ConnectedClients,
        read: Callable[[int, int], bytes | None],
        handles: Handles,
        transactions: Transactions,
        store: Store,
        check_ms: int,
        host: Callable[[], str],
    ) -> None:
        self._clients = clients
        self._read = read
        self._handles = handles
        self._transactions = transactions
        self._store = store
        self._check_ms = check_ms
        self._host = host

    async def EndTransaction(self, request: Any) -> Any:
        named = self._handles.read_half(request.transaction_id)
        if named is None:
            raise Refused(Code.INVALID_TRANSACTION_ID, "this is not a transaction id from this node")
        if request.resolution == pb.TransactionResolution.TRANSACTION_RESOLUTION_UNSPECIFIED:
            return service_pb.EndTransactionResponse(status=status(detail="the outcome is open, and the node asks again"))
        half = self._transactions.get(named[0])
        if half is not None:
            check_sender(self._store, half.position, half.size)
        commit = request.resolution == pb.TransactionResolution.COMMIT
        ended = self._transactions.end(named[0], commit=commit)
        await self._store.durable()
        return service_pb.EndTransactionResponse(status=status(end_code(ended, commit=commit), ended.value))

    def ask(self, half: HalfMessage) -> bool:
        """Ask a producer for the outcome of a half message; return whether there is a producer to ask."""
        if not half.producer.startswith(PRODUCER):
            return False
        client = self._clients.publisher_of(half.producer.removeprefix(PRODUCER), half.checks)
        data = self._read(half.position, half.size)
        if client is None or client.stream is None or data is None:
            return False
        record = decode(data, position=half.position)
        message = message_of(record, store_host=self._host())
        message.system_properties.orphaned_transaction_recovery_duration.FromMilliseconds(self._check_ms)
        question = service_pb.RecoverOrphanedTransactionCommand(
            message=message, transaction_id=self._handles.half(half.position, record.store_ms)
        )
        client.stream.put(service_pb.TelemetryCommand(status=status(), recover_orphaned_transaction_command=question))
        return True

    def ask_waiting(self, topic: str) -> None:
        """Ask the questions of a topic that wait for a producer, because a producer of the topic has connected."""
        while (client := self._clients.publisher_of(topic, 0)) is not None and client.stream is not None:
            waiting = self._transactions.take_asked(PRODUCER + topic, 1)
            if not waiting or not self.ask(waiting[0]):
                return
