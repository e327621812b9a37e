"""`apache.rocketmq.v2.MessagingService`, composed of the parts that serve its methods.

A response states errors in its status, and the gRPC status stays OK. A call that changes state is answered when the change is
durable.
"""

from __future__ import annotations

from penstock.pop.core.core import PopCore
from penstock.pop.core.handle import Handles
from penstock.pop.core.sender import Sender
from penstock.pop.core.transactions import Transactions
from penstock.pop.options import PopOptions
from penstock.pop.rocketmq.answering import Callers
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
        callers = Callers(self.clients, now_ms)
        subscriptions = LiteSubscriptions(groups, self.clients, now_ms, store.now_for, options.lite_idle_ms)
        expressions = Expressions()
        presence = Presence(callers, self.clients, Leases(core, handles), subscriptions, expressions, now_ms)
        routes = Routes(callers, groups, advertised)
        message_sender = MessageSender(callers, self.clients, sender, delayed, handles, store, options.message_bytes_max)
        lite = LiteTopics(callers, subscriptions, core, groups, durable)
        receiver = MessageReceiver(callers, core, handles, lite, durable, now_ms, options, self._host, expressions)
        settler = DeliverySettler(callers, core, durable)
        check_ms = options.transaction_check_ms
        checks = TransactionChecks(callers, self.clients, core.read, handles, transactions, store, check_ms, self._host)
        self.commands = ClientCommands(self.clients, now_ms, self._host)
        telemetry = TelemetryStreams(callers, self.clients, groups, checks, self.commands, options, now_ms)
        pulling = PullConsumers(callers, core, store, options, self._host)

        transactions.on_check.append(checks.ask)
        core.groups.on_deleted.append(self.commands.group_deleted)
        self._presence = presence
        self.stop = presence.stop
        # The methods of the service, by the names of its descriptor.
        self.QueryRoute = routes.QueryRoute
        self.QueryAssignment = routes.QueryAssignment
        self.Heartbeat = presence.Heartbeat
        self.NotifyClientTermination = presence.NotifyClientTermination
        self.SendMessage = message_sender.SendMessage
        self.RecallMessage = message_sender.RecallMessage
        self.EndTransaction = checks.EndTransaction
        self.ReceiveMessage = receiver.ReceiveMessage
        self.AckMessage = settler.AckMessage
        self.ForwardMessageToDeadLetterQueue = settler.ForwardMessageToDeadLetterQueue
        self.ChangeInvisibleDuration = settler.ChangeInvisibleDuration
        self.SyncLiteSubscription = lite.SyncLiteSubscription
        self.Telemetry = telemetry.Telemetry
        self.UpdateOffset = pulling.UpdateOffset
        self.GetOffset = pulling.GetOffset
        self.QueryOffset = pulling.QueryOffset
        self.PullMessage = pulling.PullMessage

    def start(self, bound: HostPort) -> None:
        """Start to check which clients are there. `bound` is the address of the listener."""
        self._bound = bound
        self._presence.start()

    def _host(self) -> str:
        """Return the address of this node."""
        return str(self._advertised or self._bound)
