"""The properties of a message, which are JSON in its record."""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import Any, NamedTuple

import orjson

from penstock.store.record import checksum


class Properties(NamedTuple):
    """The properties of a message.

    `user` is a list of pairs because MQTT 5.0 (3.3.2.3.7) lets a name appear more than once and keeps their order.
    """

    user: list[tuple[str, str]] = []  # noqa: RUF012 - never mutated: a NamedTuple default
    tag: str = ""
    message_group: str = ""
    deliver_at_ms: int = 0
    expires_at_ms: int = 0
    """When the message expires, in ms since 1970; 0 means never."""
    payload_format: int | None = None
    """As the publisher set it: 1 for UTF-8, 0 for any bytes."""
    content_type: str | None = None
    response_topic: str | None = None
    correlation_data: bytes | None = None
    publisher: str = ""
    """Client id of the publisher, if one of its own subscriptions must not get the message (MQTT 5.0, no local)."""
    producer: str = ""
    """For half of a transaction: the producer to ask for the outcome."""
    keys: list[str] = []  # noqa: RUF012 - never mutated: a NamedTuple default
    """Business keys, such as the number of an order, by which operators search for messages."""
    born_host: str = ""
    """Host on which the message was created, as its producer says."""
    born_ms: int = 0
    """When the message was created, in ms since 1970 by its producer's clock; 0 if unknown."""
    session: str = ""
    """With `Flag.SESSION`: the client id of the session that the message changes."""
    packet_id: int = 0
    """With `Flag.SESSION`: the packet id with which the message was received; 0 for a will."""
    by: list[str] = []  # noqa: RUF012 - never mutated: a NamedTuple default
    """Who is charged for the message, if it is retained, delayed or half of a transaction: see `Causer.row`."""
    sender_id: str = ""
    """Id that the sender gave to the message. A sender that tries again uses the same id."""
    check_after_ms: int = 0
    """For half of a transaction: when its producer is asked first, in ms after it was stored; 0 for the node's interval."""
    priority: int = 0
    """Messages of one pop come in descending order of this number, where the protocol has priorities."""
    deduplication_id: str = ""
    """With `Flag.IDENTIFIED`: the id by which the node knows the message again if its sender repeats it."""
    timer_key: str = ""
    """For a delayed message: its key. One message of a topic and key is pending at a time."""
    replaces: int | None = None
    """For a delayed message: the position of the pending one that it replaces, which is cancelled by it."""
    schedule: list[int] = []  # noqa: RUF012 - never mutated: a NamedTuple default
    """With `Flag.SCHEDULED`: the id of the schedule, the time of this occurrence and of the next one (0 if there is none), and
    whether the message counts against the schedule's `count`."""


NO_PROPERTIES = Properties()


def encode_properties(properties: Properties) -> bytes:
    """Return the JSON of `properties`; empty bytes if there are none, as in most messages."""
    if properties == NO_PROPERTIES:
        return b""
    fields: dict[str, Any] = {
        name: value
        for name, value, default in zip(Properties._fields, properties, NO_PROPERTIES, strict=True)
        if value != default
    }
    if properties.correlation_data is not None:
        fields["correlation_data"] = b64encode(properties.correlation_data).decode()
    return orjson.dumps(fields)


def decode_properties(data: bytes) -> Properties:
    """Return the properties in `data`: the inverse of `encode_properties`. Unknown names are dropped."""
    if not data:
        return NO_PROPERTIES
    fields: dict[str, Any] = orjson.loads(data)
    correlation_data = fields.get("correlation_data")
    return Properties(
        [(name, value) for name, value in fields.get("user", ())],
        fields.get("tag", ""),
        fields.get("message_group", ""),
        fields.get("deliver_at_ms", 0),
        fields.get("expires_at_ms", 0),
        fields.get("payload_format"),
        fields.get("content_type"),
        fields.get("response_topic"),
        None if correlation_data is None else b64decode(correlation_data),
        fields.get("publisher", ""),
        fields.get("producer", ""),
        fields.get("keys", []),
        fields.get("born_host", ""),
        fields.get("born_ms", 0),
        fields.get("session", ""),
        fields.get("packet_id", 0),
        fields.get("by", []),
        fields.get("sender_id", ""),
        fields.get("check_after_ms", 0),
        fields.get("priority", 0),
        fields.get("deduplication_id", ""),
        fields.get("timer_key", ""),
        fields.get("replaces"),
        fields.get("schedule", []),
    )


def message_group_of(data: bytes) -> str:
    """Return the message group in `data`, or an empty string, without decoding the other properties."""
    return str(orjson.loads(data).get("message_group", "")) if data else ""


def deduplication_id_of(data: bytes) -> str:
    """Return the deduplication id in `data`, or an empty string, without decoding the other properties."""
    return str(orjson.loads(data).get("deduplication_id", "")) if data else ""


def encode_deduplication_id(deduplication_id: str) -> bytes:
    """Return what `encode_properties` returns for properties with this id and nothing else."""
    return orjson.dumps({"deduplication_id": deduplication_id})


def delay_of(data: bytes) -> tuple[int, str, list[str]]:
    """Return `deliver_at_ms`, `tag` and `by` of the properties in `data`, without decoding the others."""
    fields: dict[str, Any] = orjson.loads(data) if data else {}
    return fields.get("deliver_at_ms", 0), fields.get("tag", ""), fields.get("by", [])


def tag_hash(tag: str) -> int:
    """Return the 32-bit hash of a tag for a light-queue entry; 0 means no tag."""
    return checksum(tag.encode()) if tag else 0
