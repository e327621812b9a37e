"""What administrative calls return, and settings of groups.

A class with durations shows a message of the protocol with its durations in seconds. The others are messages of the protocol,
whose fields pop.proto documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from google.protobuf.message import Message as ProtobufMessage

from penstock.pop.client.backoff import Backoff, Exponential
from penstock.pop.client.durations import Duration, milliseconds
from penstock.pop.client.outgoing import OutgoingMessage, decoded_message
from penstock.pop.proto import pop_pb2 as pb
from penstock.pop.proto.pop_pb2 import DeadLetter, Timer, TimerCounts
from penstock.pop.proto.pop_pb2 import ListTimersResponse as TimersPage
from penstock.pop.proto.pop_pb2 import Reason as DeadLetterReason

__all__ = [
    "DeadLetter",
    "DeadLetterReason",
    "GroupDescription",
    "GroupSettings",
    "MissedPolicy",
    "PendingTransaction",
    "ScheduleDescription",
    "ScheduleSettings",
    "Timer",
    "TimerCounts",
    "TimersPage",
]

R = TypeVar("R", bound=ProtobufMessage)

MissedPolicy = Literal["skip", "once", "all", "latest"]
"""What becomes of occurrences that were missed: `skip` sends nothing, `once` one message for all of them with the time of the
first, `all` a message for each, and `latest` one with the time of the last."""

MISSED: dict[MissedPolicy, pb.Missed.ValueType] = {"skip": pb.SKIP, "once": pb.ONCE, "all": pb.ALL, "latest": pb.LAST}
"""The policies, as the protocol has them."""

_POLICIES = {number: policy for policy, number in MISSED.items()}


@dataclass(slots=True, kw_only=True)
class GroupSettings:
    """Settings of a group: those to create or update it with, from `group_settings`, or those that a description has.

    Parameters:
        attempts_max: As for `group_settings`, like all but the last two. None: the setting is not given.
        backoff: Durations in seconds or as timedeltas; in a description, in seconds.
        invisible: In seconds or as a timedelta; in a description, in seconds.
        in_flight_max: See `attempts_max`.
        fifo: See `attempts_max`.
        tags: See `attempts_max`.
        sql: See `attempts_max`.
        paused: See `attempts_max`.
        backoff_of_node: The group has no back-off of its own. In an update: it uses the node's option again.
        shared: In a description: a shared subscription of MQTT created the group, and the group ends with it.

    Raises:
        ValueError: Both `tags` and `sql` are given.
        TypeError, ValueError: `invisible` or a wait of `backoff` is no duration.
    """

    attempts_max: int | None = None
    backoff: Backoff | None = None
    invisible: Duration | None = None
    in_flight_max: int | None = None
    fifo: bool | None = None
    tags: str | None = None
    sql: str | None = None
    paused: bool | None = None
    backoff_of_node: bool = False
    shared: bool = False

    def __post_init__(self) -> None:
        if self.tags is not None and self.sql is not None:
            raise ValueError("a group filters by tags or by sql, not by both")
        self.encoded()

    def encoded(self) -> pb.GroupSettings:
        """Return the settings as the protocol has them."""
        settings = pb.GroupSettings(
            attempts_max=self.attempts_max,
            backoff=_encoded_backoff(self.backoff) if self.backoff is not None else None,
            invisible_ms=milliseconds(self.invisible, "invisible") if self.invisible is not None else None,
            in_flight_max=self.in_flight_max,
            fifo=self.fifo,
            paused=self.paused,
            backoff_of_node=self.backoff_of_node,
            shared=self.shared,
        )
        if self.tags is not None:
            settings.expression, settings.expression_type = self.tags, pb.TAG
        elif self.sql is not None:
            settings.expression, settings.expression_type = self.sql, pb.SQL
        return settings

    @classmethod
    def decoded(cls, settings: pb.GroupSettings) -> GroupSettings:
        """Return settings of the protocol."""
        is_sql = settings.expression_type == pb.SQL
        return cls(
            attempts_max=settings.attempts_max if settings.HasField("attempts_max") else None,
            backoff=_decoded_backoff(settings.backoff) if settings.HasField("backoff") else None,
            invisible=settings.invisible_ms / 1000 if settings.HasField("invisible_ms") else None,
            in_flight_max=settings.in_flight_max if settings.HasField("in_flight_max") else None,
            fifo=settings.fifo if settings.HasField("fifo") else None,
            tags=settings.expression if settings.HasField("expression") and not is_sql else None,
            sql=settings.expression if settings.HasField("expression") and is_sql else None,
            paused=settings.paused if settings.HasField("paused") else None,
            backoff_of_node=settings.backoff_of_node,
            shared=settings.shared,
        )


def _encoded_backoff(backoff: Backoff) -> pb.Backoff:
    """Return a back-off as the protocol has it. Raises as `milliseconds`."""
    if isinstance(backoff, Exponential):
        min_ms, max_ms = milliseconds(backoff.min, "min"), milliseconds(backoff.max, "max")
        return pb.Backoff(exponential=pb.Exponential(min_ms=min_ms, max_ms=max_ms, factor=backoff.factor))
    return pb.Backoff(list_ms=[milliseconds(wait, "a wait of backoff") for wait in backoff])


def _decoded_backoff(backoff: pb.Backoff) -> Backoff:
    """Return a back-off of the protocol, in seconds."""
    if backoff.HasField("exponential"):
        rule = backoff.exponential
        return Exponential(rule.min_ms / 1000, rule.max_ms / 1000, rule.factor or 2.0)
    return tuple(wait_ms / 1000 for wait_ms in backoff.list_ms)


class _Result(Generic[R]):
    """A message of the protocol that a call has returned.

    Parameters:
        received: The message.
    """

    __slots__ = ("_received",)

    def __init__(self, received: R) -> None:
        self._received: R = received

    def __repr__(self) -> str:
        names = (name for kind in type(self).__mro__ for name, member in vars(kind).items() if isinstance(member, property))
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and isinstance(other, _Result) and bool(other._received == self._received)

    __hash__ = None  # type: ignore[assignment]  # like the message


def received_of(result: _Result[R]) -> R:
    """Return a result as the protocol has it, with integers of milliseconds."""
    return result._received


class GroupDescription(_Result[pb.GroupDescription]):
    """Settings and backlog of a group."""

    __slots__ = ()

    @property
    def group(self) -> str:
        """Name of the group."""
        return self._received.group

    @property
    def filter(self) -> str:
        """Topic filter of the group."""
        return self._received.filter

    @property
    def settings(self) -> GroupSettings:
        """The settings that apply, with the node's options where nothing was set for the group."""
        return GroupSettings.decoded(self._received.settings)

    @property
    def visible(self) -> int:
        """Messages that a pop could get; an upper bound if the group has a filter on delivery."""
        return self._received.visible

    @property
    def retries(self) -> int:
        """How many visible messages are retries."""
        return self._received.retries

    @property
    def in_flight(self) -> int:
        """Messages that were handed out, and are neither acknowledged nor back."""
        return self._received.in_flight

    @property
    def delayed(self) -> int:
        """How many messages in flight wait for a delay or their back-off: no consumer has them."""
        return self._received.delayed

    @property
    def parked(self) -> int:
        """Messages that wait for their message group."""
        return self._received.parked

    @property
    def dead(self) -> int:
        """Dead letters."""
        return self._received.dead

    @property
    def waiting(self) -> int:
        """Pops that wait for messages."""
        return self._received.waiting

    @property
    def oldest(self) -> float | None:
        """Age of the oldest message that was not handed out, in seconds; None if there is none."""
        return self._received.oldest_ms / 1000 if self._received.HasField("oldest_ms") else None

    @property
    def oldest_in_flight(self) -> float | None:
        """Age of the oldest open delivery, in seconds; None if there is none."""
        return self._received.oldest_in_flight_ms / 1000 if self._received.HasField("oldest_in_flight_ms") else None


class ScheduleSettings(_Result[pb.Schedule]):
    """A schedule, as `ScheduleCalls.create` got it."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """Names the schedule on the node."""
        return self._received.name

    @property
    def topic(self) -> str:
        """Topic of its messages."""
        return self._received.topic

    @property
    def body(self) -> bytes:
        """Body of its messages."""
        return self._received.body

    @property
    def body_is_template(self) -> bool:
        """Whether the node fills in the body."""
        return self._received.body_is_template

    @property
    def properties(self) -> dict[str, str]:
        """User properties, as a new dict."""
        return dict(self._received.properties)

    @property
    def tag(self) -> str:
        """Tag of its messages, or an empty string."""
        return self._received.tag

    @property
    def message_group(self) -> str:
        """Message group of its messages, or an empty string."""
        return self._received.message_group

    @property
    def content_type(self) -> str:
        """Content type of its messages, or an empty string."""
        return self._received.content_type

    @property
    def expire_after(self) -> float:
        """Time in seconds after which nobody gets a message; 0 if it never expires."""
        return self._received.expire_after_ms / 1000

    @property
    def every(self) -> float:
        """Time in seconds between two occurrences; 0 if `cron` or `rrule` is the rule."""
        return self._received.every_ms / 1000

    @property
    def cron(self) -> str:
        """Cron expression, or an empty string."""
        return self._received.cron

    @property
    def rrule(self) -> str:
        """Recurrence rule of RFC 5545, or an empty string."""
        return self._received.rrule

    @property
    def zone(self) -> str:
        """Time zone of `cron` and `rrule`."""
        return self._received.zone

    @property
    def start_ms(self) -> int:
        """Nothing occurs before, in ms since 1970."""
        return self._received.start_ms

    @property
    def end_ms(self) -> int:
        """Nothing occurs after, in ms since 1970; 0 for no end."""
        return self._received.end_ms

    @property
    def count(self) -> int:
        """The schedule ends after so many messages; 0 for no end."""
        return self._received.count

    @property
    def missed(self) -> MissedPolicy:
        """What becomes of occurrences that were missed."""
        return _POLICIES[self._received.missed]

    @property
    def grace(self) -> float:
        """How late an occurrence is at least that counts as missed, in seconds."""
        return self._received.grace_ms / 1000


class ScheduleDescription(_Result[pb.ScheduleDescription]):
    """A schedule, how far it has got, and its next occurrences."""

    __slots__ = ()

    @property
    def schedule(self) -> ScheduleSettings:
        """The schedule."""
        return ScheduleSettings(self._received.schedule)

    @property
    def paused(self) -> bool:
        """Whether it sends nothing until it is resumed."""
        return self._received.paused

    @property
    def next_ms(self) -> int:
        """Time of the next occurrence, in ms since 1970; 0 if the schedule has ended."""
        return self._received.next_ms

    @property
    def sent(self) -> int:
        """Number of messages that it has sent."""
        return self._received.sent

    @property
    def last_ms(self) -> int:
        """Time of the occurrence that was sent last, in ms since 1970; 0 if none was."""
        return self._received.last_ms

    @property
    def error(self) -> str:
        """Why the last occurrence was not sent; empty if it was."""
        return self._received.error

    @property
    def upcoming_ms(self) -> list[int]:
        """Times of the next occurrences, in ms since 1970. `ScheduleCalls.list` leaves them out."""
        return list(self._received.upcoming_ms)


class PendingTransaction(_Result[pb.Transaction]):
    """A transaction whose outcome the node does not know yet."""

    __slots__ = ()

    @property
    def transaction_handle(self) -> str:
        """Names the transaction to the node, for `TransactionCalls.end`."""
        return self._received.transaction_handle

    @property
    def message_id(self) -> str:
        """Position of its message in the log, as 16 hexadecimal digits."""
        return self._received.message_id

    @property
    def producer(self) -> str:
        """Name of the service that decides on it."""
        return self._received.producer

    @property
    def message(self) -> OutgoingMessage:
        """Its message."""
        return decoded_message(self._received.message)

    @property
    def stored_ms(self) -> int:
        """When the node stored the message, in ms since 1970."""
        return self._received.stored_ms

    @property
    def checks(self) -> int:
        """How often the node has asked for the outcome."""
        return self._received.checks

    @property
    def next_check_ms(self) -> int:
        """When the node asks next, in ms since 1970."""
        return self._received.next_check_ms
