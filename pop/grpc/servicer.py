"""The servicer of `penstock.pop.v1.PopService`, which pop.proto defines.

One response carries a whole batch, because a stream item for each message would cost more than everything else together. A
call that changes something is answered when the change is durable. A call that can't be served at all fails with a gRPC
status. If one message or handle of a batch is wrong, it has its own `Status`, and the others are served.
"""

from __future__ import annotations

from penstock.pop.core.core import PopCore
from penstock.pop.core.handle import Handles
from penstock.pop.core.sender import Sender
from penstock.pop.core.transactions import Transactions
from penstock.pop.grpc.acks import AckMethods
from penstock.pop.grpc.consume import ConsumeMethods
from penstock.pop.grpc.pops import PopMethods
from penstock.pop.grpc.recalls import RecallMethods
from penstock.pop.grpc.responses import PopResponses
from penstock.pop.grpc.sends import SendMethods
from penstock.pop.grpc.transactions import TransactionMethods
from penstock.pop.options import PopOptions
from penstock.store.store import Store
from penstock.timer.delayed import DelayedMessages


class PopServicer:
    """Has the methods of the service as attributes. They return messages of pop.proto, or the bytes of such messages.

    Parameters:
        core: groups, checkpoints and acknowledgements.
        store: has the messages.
        handles: makes and reads handles.
        delayed: delayed messages.
        transactions: half messages.
        sender: stores messages.
        options: bounds and defaults.
    """

    def __init__(
        self,
        core: PopCore,
        store: Store,
        handles: Handles,
        delayed: DelayedMessages,
        transactions: Transactions,
        sender: Sender,
        options: PopOptions,
    ) -> None:
        self.unsynced = core.unsynced
        """Room for messages that were handed out and wait for the sync of their checkpoint."""
        responses = PopResponses(core.dead_letters, handles)
        self.Send = SendMethods(store, sender, options.message_bytes_max).Send
        self.Pop = PopMethods(core, core.groups, store, responses, options).Pop
        self.Consume = ConsumeMethods(core, store, handles, responses, options).Consume
        acks = AckMethods(core, store)
        self.Ack = acks.Ack
        self.DeadLetter = acks.DeadLetter
        self.ChangeInvisible = acks.ChangeInvisible
        self.Recall = RecallMethods(delayed, handles, store).Recall
        calls = TransactionMethods(transactions, handles, store, core.read, options.wait_ms_max)
        self.EndTransactions = calls.EndTransactions
        self.PollTransactions = calls.PollTransactions
        self.ListTransactions = calls.ListTransactions
