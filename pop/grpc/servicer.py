"""The servicer of `penstock.pop.v1.PopService`, which pop.proto defines.

One response carries a whole batch, because a stream item for each message would cost more than everything else together. A
call that changes something is answered when the change is durable. A call that can't be served at all fails with a gRPC
status. If one message or handle of a batch is wrong, it has its own `Status`, and the others are served.
"""

from __future__ import annotations

from penstock.pop.core.core import PopCore
from penstock.pop.core.sender import Sender
from penstock.pop.core.transactions import Transactions
from penstock.pop.grpc.acks import AckMethods
from penstock.pop.grpc.consume import ConsumeMethods
from penstock.pop.grpc.pops import PopMethods
from penstock.pop.grpc.recalls import RecallMethods
from penstock.pop.grpc.responses import PopResponses
from penstock.pop.grpc.sends import SendMethods
from penstock.pop.grpc.transactions import TransactionMethods
from penstock.timer.delayed import DelayedMessages


class PopServicer:
    """Has the methods of the service as attributes. They return messages of pop.proto, or the bytes of such messages.

    Parameters:
        core: groups, checkpoints and acknowledgements.
        delayed: delayed messages.
        transactions: half messages.
        sender: stores messages.
    """

    def __init__(self, core: PopCore, delayed: DelayedMessages, transactions: Transactions, sender: Sender) -> None:
        responses = PopResponses(core.state, core.handles)
        self.Send = SendMethods(core.store, sender, core.options.message_bytes_max).Send
        self.Pop = PopMethods(core, responses).Pop
        self.Consume = ConsumeMethods(core, responses).Consume
        acks = AckMethods(core)
        self.Ack = acks.Ack
        self.GiveUp = acks.GiveUp
        self.ChangeInvisible = acks.ChangeInvisible
        self.Recall = RecallMethods(delayed, core.handles, core.store).Recall
        calls = TransactionMethods(transactions, core.handles, core.store, core.read, core.options.wait_ms_max)
        self.EndTransactions = calls.EndTransactions
        self.PollTransactions = calls.PollTransactions
        self.ListTransactions = calls.ListTransactions
