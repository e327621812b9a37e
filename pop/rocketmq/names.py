"""Names on the wire and what they mean here. The clients allow `[%a-zA-Z0-9_-]+`, so topics go percent-encoded.

    sensors%2F%2B%2Ftemp   the filter sensors/+/temp
    %24dlq%2Fbilling       the dead letters of the group billing; so does %DLQ%billing, as RocketMQ calls them
    parent, lite topic x   the topic parent/x; the lite topic * is all of the parent's

Names of groups are percent-encoded too, where they need to be.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import quote, unquote_to_bytes

from penstock.pop.core.names import DEAD_LETTERS, check_group_name
from penstock.pop.rocketmq.status import Code, Refused
from penstock.store import topics
from penstock.store.errors import TopicInvalid
from penstock.store.record import TOPIC_BYTES_MAX

DEAD_LETTERS_THERE = "%DLQ%"
"""What RocketMQ puts before a group's name for the topic of its dead letters. No percent-encoding begins like that."""

ENCODED_BYTES_MAX = 3 * TOPIC_BYTES_MAX

LITE_TOPIC_CHARS_MAX = 255
"""Of a lite topic's name. The clients are told."""

LITE_ALL = "*"

_ENCODED = re.compile(r"(?:[^%]|%[0-9A-Fa-f]{2})*")


def encode(name: str) -> str:
    """Return the name of a topic, filter or group as the clients want it."""
    # Unreserved in a URL, but not in a name there.
    return quote(name, safe="").replace(".", "%2E").replace("~", "%7E")


def filter_of(resource: Any) -> str:
    """Return the MQTT topic or filter that a `Resource` names. It may have wildcards, and may begin with `$dlq/`.

    Raises:
        Refused: ILLEGAL_TOPIC, or BAD_REQUEST where there is a namespace.
    """
    name: str = resource.name
    _check_namespace(resource)
    if name.startswith(DEAD_LETTERS_THERE):
        return DEAD_LETTERS + _decoded(name.removeprefix(DEAD_LETTERS_THERE), Code.ILLEGAL_CONSUMER_GROUP)
    topic = _decoded(name, Code.ILLEGAL_TOPIC)
    try:
        return topics.check_filter(topic)
    except TopicInvalid as error:
        raise Refused(Code.ILLEGAL_TOPIC, str(error)) from error


def group_of(resource: Any) -> str:
    """Return the name of the group that a `Resource` names.

    Raises:
        Refused, GroupInvalid: no group may be called like that.
    """
    _check_namespace(resource)
    return check_group_name(_decoded(resource.name, Code.ILLEGAL_CONSUMER_GROUP))


def lite_filter_of(parent: str, lite_topic: str) -> str:
    """Return the filter of a lite topic of the topic `parent`; of all of them where it is `*`.

    Raises:
        Refused: ILLEGAL_LITE_TOPIC, or ILLEGAL_TOPIC where the parent has wildcards or belongs to the node.
    """
    if topics.is_wildcard(parent) or parent.startswith("$"):
        raise Refused(Code.ILLEGAL_TOPIC, f"{parent[:80]!r} can't have lite topics: name a topic without wildcards and '$'")
    if lite_topic == LITE_ALL:
        return f"{parent}/#"
    if not lite_topic or len(lite_topic) > LITE_TOPIC_CHARS_MAX:
        raise Refused(Code.ILLEGAL_LITE_TOPIC, f"a lite topic's name has 1 to {LITE_TOPIC_CHARS_MAX} characters")
    try:
        return topics.check_topic(f"{parent}/{lite_topic}".encode())
    except TopicInvalid as error:
        raise Refused(Code.ILLEGAL_LITE_TOPIC, str(error)) from error


def lite_topic_of(parent: str, topic: str) -> str:
    """Return the lite topic that a message's topic is below its parent: the inverse of `lite_filter_of`."""
    return topic[len(parent) + 1 :]


def topic_of_message(message: Any) -> str:
    """Return the MQTT topic of a message that is sent.

    Raises:
        Refused: as `filter_of` and `lite_filter_of`; whether it may be published to is for the store to say.
    """
    topic = filter_of(message.topic)
    lite_topic = message.system_properties.lite_topic
    if not lite_topic:
        return topic
    if lite_topic == LITE_ALL:
        raise Refused(Code.ILLEGAL_LITE_TOPIC, "a message goes to one lite topic: '*' is for subscriptions")
    return lite_filter_of(topic, lite_topic)


def _decoded(name: str, code: Code) -> str:
    if len(name) > ENCODED_BYTES_MAX or not _ENCODED.fullmatch(name):
        raise Refused(code, f"the name {name[:64]!r} is not percent-encoded: '%' stands before two hexadecimal digits")
    try:
        return unquote_to_bytes(name).decode()
    except UnicodeDecodeError as error:
        raise Refused(code, f"the name {name[:64]!r} is not percent-encoded UTF-8") from error


def _check_namespace(resource: Any) -> None:
    if resource.resource_namespace:
        namespace = resource.resource_namespace[:64]
        raise Refused(Code.BAD_REQUEST, f"this node has no namespaces: leave {namespace!r} out, or put it before the topic")
