"""`apache.rocketmq.v2.MessagingService`, composed of the parts that serve its methods.

A response states errors in its status, and the gRPC status stays OK. A call that changes state is answered when the change is
durable.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from typing import Any

from penstock.pop.access.refusals import CallRefused
from penstock.pop.core.core import PopCore
from penstock.pop.core.handle import Handles
from penstock.pop.core.sender import Sender
from penstock.pop.core.transactions import Transactions
from penstock.pop.grpc.calls import Context
from penstock.pop.options import PopOptions
from penstock.pop.rocketmq.answering import Callers, status_of
from penstock.pop.rocketmq.clients import ConnectedClients
from penstock.pop.rocketmq.commands import ClientCommands
from penstock.pop.rocketmq.expressions import Expressions
from penstock.pop.rocketmq.leases import Leases
from penstock.pop.rocketmq.lite import LiteSubscriptions
from penstock.pop.rocketmq.litetopics import LiteTopics
from penstock.pop.rocketmq.presence import Presence
from penstock.pop.rocketmq.pulling import PullConsumers
from penstock.pop.rocketmq.receiving import MessageReceiver
from penstock.pop.rocketmq.routes import Routes, advertised_address
from penstock.pop.rocketmq.sending import MessageSender
from penstock.pop.rocketmq.settling import DeliverySettler
from penstock.pop.rocketmq.stubs import service_pb
from penstock.pop.rocketmq.telemetry import TelemetryStreams
from penstock.pop.rocketmq.transactions import TransactionChecks
from penstock.store.options import HostPort
from penstock.store.store import Store
from penstock.timer.delayed import DelayedMessages


class MessagingService:
    """Serves the protocol.

    Parameters:
        core: Hands out messages.
        store: Tells when a change is durable.
        handles: Makes and reads handles.
        sender: Stores messages.
        delayed: Delayed messages.
        transactions: Half messages.
        options: Bounds, defaults and the address.

    Raises:
        OptionInvalid: `pop.rocketmq_advertise` is not an address.
    """

    def __init__(
        self,
        core: PopCore,
        store: Store,
        handles: Handles,
        sender: Sender,
        delayed: DelayedMessages,
        transactions: Transactions,
        options: PopOptions,
    ) -> None:
        groups = core.groups
        durable, now_ms = store.durable, store.now_ms
        advertised = advertised_address(options.rocketmq_advertise)
        self._advertised = advertised
        self._bound = options.listen

        self.clients = ConnectedClients()
        self._callers = Callers(self.clients, now_ms)
        subscriptions = LiteSubscriptions(groups, self.clients, now_ms, store.now_for, options.lite_idle_ms)
        expressions = Expressions()
        self._presence = Presence(self.clients, Leases(core, handles), subscriptions, expressions, now_ms)
        self._routes = Routes(groups, advertised)
        self._sender = MessageSender(self.clients, sender, delayed, handles, store, options.message_bytes_max)
        self._lite = LiteTopics(subscriptions, core, groups, durable)
        self._receiver = MessageReceiver(core, handles, self._lite, store, options, self._host, expressions)
        self._settler = DeliverySettler(core, durable)
        check_ms = options.transaction_check_ms
        self._checks = TransactionChecks(self.clients, core.read, handles, transactions, store, check_ms, self._host)
        self.commands = ClientCommands(self.clients, now_ms, self._host)
        self._telemetry = TelemetryStreams(self.clients, groups, self._checks, self.commands, options, now_ms)
        self._pulling = PullConsumers(core, store, options, self._host)
        transactions.on_check.append(self._checks.ask)
        core.groups.on_deleted.append(self.commands.group_deleted)

    def start(self, bound: HostPort) -> None:
        """Start to check which clients are there. `bound` is the address of the listener."""
        self._bound = bound
        self._presence.start()

    def stop(self) -> None:
        """Stop checking, and end all Telemetry streams."""
        self._presence.stop()

    def _host(self) -> str:
        """Return the address of this node."""
        return str(self._advertised or self._bound)

    # --- the methods of the service, by the names of its descriptor -------------------------------------------------------

    def QueryRoute(self, request: Any, context: Context) -> Awaitable[Any]:
        return self._routes.QueryRoute(request, self._callers.of(context))

    def QueryAssignment(self, request: Any, context: Context) -> Awaitable[Any]:
        return self._routes.QueryAssignment(request, self._callers.of(context))

    def Heartbeat(self, request: Any, context: Context) -> Awaitable[Any]:
        return self._presence.Heartbeat(request, self._callers.of(context))

    def NotifyClientTermination(self, request: Any, context: Context) -> Awaitable[Any]:
        return self._presence.NotifyClientTermination(self._callers.of(context))

    def SendMessage(self, request: Any, context: Context) -> Awaitable[Any]:
        return self._sender.SendMessage(request, self._callers.of(context))

    def RecallMessage(self, request: Any, context: Context) -> Awaitable[Any]:
        self._callers.of(context)
        return self._sender.RecallMessage(request)

    def EndTransaction(self, request: Any, context: Context) -> Awaitable[Any]:
        self._callers.of(context)
        return self._checks.EndTransaction(request)

    def ReceiveMessage(self, request: Any, context: Context) -> AsyncGenerator[Any, None]:
        return self._receiver.ReceiveMessage(request, self._callers.of(context), context.time_remaining())

    def AckMessage(self, request: Any, context: Context) -> Awaitable[Any]:
        self._callers.of(context)
        return self._settler.AckMessage(request)

    def ForwardMessageToDeadLetterQueue(self, request: Any, context: Context) -> Awaitable[Any]:
        self._callers.of(context)
        return self._settler.ForwardMessageToDeadLetterQueue(request)

    async def ChangeInvisibleDuration(self, request: Any, context: Context) -> Any:
        try:
            self._callers.of(context)
            return await self._settler.ChangeInvisibleDuration(request)
        except Exception as error:  # A client goes on with the handle of the response, so that of an error repeats it.
            response = service_pb.ChangeInvisibleDurationResponse
            refused = response(status=status_of(error), receipt_handle=request.receipt_handle)
            raise CallRefused(response=refused) from error

    def SyncLiteSubscription(self, request: Any, context: Context) -> Awaitable[Any]:
        return self._lite.SyncLiteSubscription(request, self._callers.of(context))

    def Telemetry(self, requests: AsyncIterator[Any], context: Context) -> AsyncGenerator[Any, None]:
        return self._telemetry.Telemetry(requests, self._callers.of(context))

    def UpdateOffset(self, request: Any, context: Context) -> Awaitable[Any]:
        self._callers.of(context)
        return self._pulling.UpdateOffset(request)

    def GetOffset(self, request: Any, context: Context) -> Awaitable[Any]:
        self._callers.of(context)
        return self._pulling.GetOffset(request)

    def QueryOffset(self, request: Any, context: Context) -> Awaitable[Any]:
        self._callers.of(context)
        return self._pulling.QueryOffset(request)

    def PullMessage(self, request: Any, context: Context) -> AsyncGenerator[Any, None]:
        self._callers.of(context)
        return self._pulling.PullMessage(request, context.time_remaining())
