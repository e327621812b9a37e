"""When a PUBLISH wants to be delivered: `$delayed/{seconds}/{topic}`, and the user properties `delay-ms` and `deliver-at-ms`.

The topic works in all versions of MQTT, the user properties in MQTT 5.0. The properties reach the subscribers too, because a
server must not alter user properties [MQTT-3.3.2-17].
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from penstock.gateway.protocol.properties import Property, PropertyValues
from penstock.gateway.protocol.topics import DELAYED
from penstock.store.errors import LimitExceeded, StoreError, TopicInvalid
from penstock.store.topics import excerpt

DELAY_MS: Final = "delay-ms"
"""User property with a delay in ms from when the node gets the message."""

DELIVER_AT_MS: Final = "deliver-at-ms"
"""User property with an instant, in ms since 1970 UTC. One in the past means at once."""

RECALL_HANDLE: Final = "recall-handle"
"""User property of the PUBACK or PUBREC of a delayed message: the handle by which the message can be cancelled."""

_SECONDS: Final = re.compile(rb"([0-9]{1,4096})(?:\.([0-9]{1,64}))?")
_MS: Final = re.compile(r"[0-9]{1,4096}")
_DIGITS_MAX: Final = 15
"""Digits of a number that is converted. A number with more is longer than any delay that can be configured."""


class DeliveryTimeInvalid(StoreError):
    """Raised when the user properties of a PUBLISH don't say when it is to be delivered."""


def due_of(topic: bytes, values: PropertyValues, now_ms: Callable[[], int], delay_ms_max: int) -> tuple[bytes, int]:
    """Return the topic to which a PUBLISH goes, and when it is due, in ms since 1970; 0 means at once.

    Args:
        topic: of the PUBLISH.
        values: the properties of the PUBLISH.
        now_ms: returns the time, in ms since 1970.
        delay_ms_max: the longest delay allowed, in ms.

    Raises:
        TopicInvalid: the topic begins with `DELAYED`, and what follows are no seconds and a topic.
        DeliveryTimeInvalid: a user property is no time, or the PUBLISH names several times, or it expires before it is due.
        LimitExceeded: the delay is longer than allowed.
    """
    wishes = [pair for pair in values.get(Property.USER_PROPERTY, ()) if pair[0] in (DELAY_MS, DELIVER_AT_MS)]
    if topic.startswith(DELAYED):
        if wishes:
            raise DeliveryTimeInvalid(
                f"the topic begins with $delayed/ and the message has the user property {wishes[0][0]}: use one of them"
            )
        topic, due_ms = parse_delayed(topic, now_ms(), delay_ms_max)
    elif len(wishes) > 1:
        raise DeliveryTimeInvalid(
            f"the message has the user properties {' and '.join(name for name, _ in wishes)}: use one of them, once"
        )
    elif wishes:
        due_ms = _due_of_wish(wishes[0], now_ms(), delay_ms_max)
    else:
        return topic, 0
    expiry_s = values.get(Property.MESSAGE_EXPIRY_S)
    if due_ms and expiry_s is not None and now_ms() + expiry_s * 1000 <= due_ms:
        raise DeliveryTimeInvalid(
            f"the message expires {expiry_s} s after it was published, before it is due: "
            "nobody would get it; use a longer expiry interval, or none"
        )
    return topic, due_ms


def parse_delayed(topic: bytes, now_ms: int, delay_ms_max: int) -> tuple[bytes, int]:
    """Return the topic to which a delayed message goes, and when it is due, in ms since 1970; 0 means at once.

    A fraction of a ms counts as a whole one, so that no message is early.

    Args:
        topic: begins with `DELAYED`.
        now_ms: the time, in ms since 1970.
        delay_ms_max: the longest delay allowed, in ms.

    Raises:
        TopicInvalid: the seconds or the topic are missing, or the seconds are no number from 0 on.
        LimitExceeded: the delay is longer than allowed.
    """
    seconds, slash, name = topic[len(DELAYED) :].partition(b"/")
    if not slash or not name:
        raise TopicInvalid(f"The topic {excerpt(topic)} is not of the form $delayed/SECONDS/TOPIC.")
    found = _SECONDS.fullmatch(seconds)
    if found is None:
        raise TopicInvalid(
            f"The topic {excerpt(topic)} has no seconds after $delayed/: write a decimal number from 0 on, such as 90 or 0.25."
        )
    whole, fraction = found[1].lstrip(b"0") or b"0", found[2] or b""
    if len(whole) <= _DIGITS_MAX:
        delay_ms = int(whole) * 1000 + int(fraction[:3].ljust(3, b"0")) + bool(fraction[3:].strip(b"0"))
        if delay_ms <= delay_ms_max:
            return name, now_ms + delay_ms if delay_ms else 0
    raise LimitExceeded(f"A delay of {seconds[:20].decode()} s is longer than the longest, {delay_ms_max} ms.")


def _due_of_wish(wish: tuple[str, str], now_ms: int, delay_ms_max: int) -> int:
    """Return when a message with a user property is due, in ms since 1970; 0 means at once."""
    name, value = wish
    if _MS.fullmatch(value) is None:
        raise DeliveryTimeInvalid(
            f"the user property {name} is {value[:40]!r}: write whole milliseconds from 0 on, with the digits 0 to 9 only"
        )
    digits = value.lstrip("0") or "0"
    given_ms = int(digits) if len(digits) <= _DIGITS_MAX else None
    if given_ms is not None:
        delay_ms = given_ms - now_ms if name == DELIVER_AT_MS else given_ms
        if delay_ms <= delay_ms_max:
            return now_ms + delay_ms if delay_ms > 0 else 0
    raise LimitExceeded(
        f"The user property {name} is {value[:20]}, which is later than the longest delay allows: "
        f"{delay_ms_max} ms after now ({now_ms})."
    )
