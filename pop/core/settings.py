"""The settings of a group, with its back-off. A setting that is not made for a group is the node's option.

The records of the group (GROUP_CREATED, GROUP_CHANGED) contain its settings as JSON, without those at their defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from penstock.pop.core.expression import EXPRESSION_BYTES_MAX, ExpressionType, compile_expression
from penstock.pop.errors import RequestInvalid
from penstock.pop.options import PopOptions
from penstock.store.options import DAY_MS

BACKOFF_STEPS_MAX = 64
"""Maximum length of a list of waits. Later attempts wait as long as the last value says."""

BACKOFF_MS_MAX = 30 * DAY_MS
ATTEMPTS_MAX = 65_535
IN_FLIGHT_MAX = 100_000_000

LITE_CLIENTS_MAX = 1_000
"""Maximum number of clients that subscribe to one lite topic. Each record of the settings contains all of them."""


@dataclass(frozen=True, slots=True)
class ExponentialBackoff:
    """A back-off that grows from attempt to attempt.

    Parameters:
        min_ms: wait after the first failed attempt.
        max_ms: longest wait.
        factor: each wait is the one before it times this, 1 to 100.
    """

    min_ms: int
    max_ms: int
    factor: float = 2.0

    def wait_ms(self, attempt: int) -> int:
        """Return how long a message waits after its attempt `attempt`, counted from 1, has failed."""
        try:
            grown = self.min_ms * self.factor ** (attempt - 1)
        except OverflowError:
            return self.max_ms
        return int(min(grown, self.max_ms))


SCRAMBLER = 0x9E37_79B9_7F4A_7C15
"""An odd number of 64 bits whose multiples look random (Knuth, The Art of Computer Programming, 6.4)."""


def jittered_ms(wait_ms: int, jitter: float, seed: int) -> int:
    """Return a wait that is shorter by up to the part `jitter` (0 to 1) of it. The same seed always has the same wait."""
    return wait_ms - int(wait_ms * jitter * ((seed * SCRAMBLER >> 32 & 0xFFFF_FFFF) / 2**32))


Backoff = tuple[int, ...] | ExponentialBackoff
"""Milliseconds from a failed attempt to the next: a list by attempt, or a rule. The last wait of a list holds for all later
attempts; with an empty list the message is visible again at once."""


def backoff_ms(backoff: Backoff, attempt: int) -> int:
    """Return how long a message waits after its attempt `attempt`, counted from 1, has failed."""
    if isinstance(backoff, ExponentialBackoff):
        return backoff.wait_ms(attempt)
    return backoff[min(attempt, len(backoff)) - 1] if backoff else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerGroupSettings:
    """The settings of one group. None stands for the node's option of the same name.

    Parameters:
        attempts_max: how often a message is handed out before it becomes a dead letter, 1 to 65,535.
        backoff: from a failed attempt to the next one. None is the node's `retry_backoff_ms`.
        invisible_ms: invisible time of pops that don't state one.
        in_flight_max: maximum number of messages in flight.
        fifo: at most one message of a message group (or of a topic, for messages without a group) is in flight, and the
            messages of a group are delivered in order.
        expression: which messages the group gets; see `pop.core.expression`. "*" is all of them.
        expression_type: "tag" or "sql".
        expression_of_consumers: the expression is what the group's consumers ask for, so that they may change it. An operator's
            is not.
        paused: pops get nothing. Open deliveries can be acknowledged.
        shared: a shared subscription of MQTT created the group, which ends with the last session that has the subscription.
            Callers can't set this. It is cleared when the group is created by name, or a consumer of POP uses it.
        lite: the RocketMQ clients that have subscribed to the group as a lite topic (`pop.rocketmq.lite`), each with the
            parent topic.
        lite_ends_ms: when the group that a lite subscription created ends, in ms since 1970; 0 while it has subscribers. It is
            cleared as `shared` is.
    """

    attempts_max: int | None = None
    backoff: Backoff | None = None
    invisible_ms: int | None = None
    in_flight_max: int | None = None
    fifo: bool = False
    expression: str = "*"
    expression_type: ExpressionType = "tag"
    expression_of_consumers: bool = False
    paused: bool = False
    shared: bool = False
    lite: tuple[tuple[str, str], ...] = ()
    lite_ends_ms: int | None = None

    @property
    def is_temporary(self) -> bool:
        """True if the group ends by itself when its last subscription ends."""
        return self.shared or self.lite_ends_ms is not None

    def row(self) -> dict[str, Any]:
        """Return the settings that are not at their defaults, as records contain them."""
        row = {name: value for name, default in _DEFAULTS.items() if (value := getattr(self, name)) != default}
        if isinstance(self.backoff, ExponentialBackoff):
            row["backoff"] = {"min_ms": self.backoff.min_ms, "max_ms": self.backoff.max_ms, "factor": self.backoff.factor}
        return row

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> ConsumerGroupSettings:
        """Return the settings that a row describes. Names that this version doesn't know are ignored."""
        values = {name: value for name, value in row.items() if name in _DEFAULTS}
        backoff = values.get("backoff")
        if isinstance(backoff, Mapping):
            values["backoff"] = ExponentialBackoff(**backoff)
        elif backoff is not None:
            values["backoff"] = tuple(backoff)
        values["lite"] = tuple((client_id, parent) for client_id, parent in values.get("lite", ()))
        return cls(**values)


_DEFAULTS: Final[dict[str, Any]] = {field.name: field.default for field in fields(ConsumerGroupSettings)}

DEFAULTS = ConsumerGroupSettings()


def check_settings(settings: ConsumerGroupSettings, options: PopOptions) -> ConsumerGroupSettings:
    """Return `settings` if they are valid.

    Raises:
        RequestInvalid: a number is out of its bounds.
        ExpressionInvalid: the expression is not valid; the message says at which character.
    """
    _check("attempts_max", settings.attempts_max, 1, ATTEMPTS_MAX)
    _check("invisible_ms", settings.invisible_ms, 1, options.invisible_ms_max)
    _check("in_flight_max", settings.in_flight_max, 1, IN_FLIGHT_MAX)
    backoff = settings.backoff
    if isinstance(backoff, ExponentialBackoff):
        _check("backoff.min_ms", backoff.min_ms, 0, BACKOFF_MS_MAX)
        _check("backoff.max_ms", backoff.max_ms, backoff.min_ms, BACKOFF_MS_MAX)
        if not 1.0 <= backoff.factor <= 100.0:
            raise RequestInvalid(f"backoff.factor is {backoff.factor}: use 1 to 100")
    elif backoff is not None:
        _check("backoff's length", len(backoff), 0, BACKOFF_STEPS_MAX)
        for step in backoff:
            _check("a step of backoff", step, 0, BACKOFF_MS_MAX)
    if len(settings.expression.encode()) > EXPRESSION_BYTES_MAX:
        raise RequestInvalid(f"the expression has more than {EXPRESSION_BYTES_MAX} bytes")
    compile_expression(settings.expression, settings.expression_type)
    return settings


def _check(name: str, value: int | None, minimum: int, maximum: int) -> None:
    if value is not None and not minimum <= value <= maximum:
        raise RequestInvalid(f"{name} is {value}: it must be from {minimum} to {maximum}")
