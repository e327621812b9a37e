"""What administrative calls return, and settings of groups: messages of the protocol. pop.proto documents their fields."""

from __future__ import annotations

from penstock.pop.proto.pop_pb2 import DeadLetter, GroupDescription, GroupSettings, ScheduleDescription, Timer, TimerCounts
from penstock.pop.proto.pop_pb2 import ListTimersResponse as TimersPage
from penstock.pop.proto.pop_pb2 import Reason as DeadLetterReason
from penstock.pop.proto.pop_pb2 import Transaction as PendingTransaction

__all__ = [
    "DeadLetter",
    "DeadLetterReason",
    "GroupDescription",
    "GroupSettings",
    "PendingTransaction",
    "ScheduleDescription",
    "Timer",
    "TimerCounts",
    "TimersPage",
]
