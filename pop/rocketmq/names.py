"""Names of the protocol, and the topics, filters and groups that they mean.

Clients accept only names of the form `[%a-zA-Z0-9_-]+`, so topics and filters are percent-encoded. Names of groups are
percent-encoded where they need to be.

    sensors%2F%2B%2Ftemp   the filter sensors/+/temp
    %24dlq%2Fbilling       the dead letters of the group billing; RocketMQ's own name for them, %DLQ%billing, works too
    parent, lite topic x   the topic parent/x; the lite topic * means all lite topics of the parent
    a in the namespace n   the topic n/a; the group g there is n:g
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import quote, unquote_to_bytes

from penstock.pop.core.deadletters import DEAD_LETTERS
from penstock.pop.core.group import check_group_name
from penstock.pop.rocketmq.status import Code, Refused
from penstock.store import topics
from penstock.store.errors import TopicInvalid
from penstock.store.record import TOPIC_BYTES_MAX

DEAD_LETTERS_THERE = "%DLQ%"
"""RocketMQ's prefix of the topic of a group's dead letters. It can't be a percent-encoded name: `%DL` is not an encoding."""

ENCODED_BYTES_MAX = 3 * TOPIC_BYTES_MAX

LITE_TOPIC_CHARS_MAX = 255
"""Maximum length of a lite topic's name. Clients get it in their settings."""

LITE_ALL = "*"

NAMESPACE_END = ":"
"""Stands between a namespace and the name of a group in it."""

NAMESPACE_CHARS_MAX = 100

_NAMESPACE = re.compile(rf"[A-Za-z0-9._-]{{1,{NAMESPACE_CHARS_MAX}}}")

_ENCODED = re.compile(r"(?:[^%]|%[0-9A-Fa-f]{2})*")


def encode(name: str) -> str:
    """Return the name of a topic, filter or group as clients accept it."""
    # Both characters are unreserved in a URL, but not allowed in a name of the protocol.
    return quote(name, safe="").replace(".", "%2E").replace("~", "%7E")


def filter_of(resource: Any) -> str:
    """Return the MQTT topic or filter that a `Resource` names. It may have wildcards, and may start with `$dlq/`.

    Raises:
        Refused: ILLEGAL_TOPIC.
    """
    name: str = resource.name
    namespace = namespace_of(resource)
    if name.startswith(DEAD_LETTERS_THERE):
        return DEAD_LETTERS + _group_in(namespace, name.removeprefix(DEAD_LETTERS_THERE))
    topic = _decoded(name, Code.ILLEGAL_TOPIC)
    if namespace and topic.startswith(DEAD_LETTERS):
        return DEAD_LETTERS + _group_in(namespace, encode(topic.removeprefix(DEAD_LETTERS)))
    if namespace and topic.startswith("$"):
        raise Refused(Code.ILLEGAL_TOPIC, f"{topic[:80]!r} is a topic of the node: leave the namespace {namespace!r} out")
    try:
        return topics.check_filter(f"{namespace}/{topic}" if namespace and topic else topic)
    except TopicInvalid as error:
        raise Refused(Code.ILLEGAL_TOPIC, str(error)) from error


def group_of(resource: Any) -> str:
    """Return the name of the group that a `Resource` names.

    Raises:
        Refused, GroupInvalid: The name is not valid for a group.
    """
    return check_group_name(_group_in(namespace_of(resource), resource.name))


def namespace_of(resource: Any) -> str:
    """Return the namespace of a `Resource`, or an empty string.

    Raises:
        Refused: BAD_REQUEST if the namespace has characters that no level of a topic, or no group's name, may have.
    """
    namespace: str = resource.resource_namespace
    if namespace and not _NAMESPACE.fullmatch(namespace):
        raise Refused(
            Code.BAD_REQUEST,
            f"the namespace {namespace[:64]!r} is invalid: use up to {NAMESPACE_CHARS_MAX} of A-Za-z0-9._-",
        )
    return namespace


def dead_letters_group(resource: Any) -> str:
    """Return the encoded name of the group whose dead letters a `Resource` names, without its namespace; or an empty string."""
    topic_filter = filter_of(resource)
    if not topic_filter.startswith(DEAD_LETTERS):
        return ""
    return encode(topic_filter.removeprefix(DEAD_LETTERS).removeprefix(f"{resource.resource_namespace}{NAMESPACE_END}"))


def outside(topic: str, namespace: str) -> str:
    """Return the name of a topic within its namespace. This is the inverse of what `filter_of` adds."""
    return topic.removeprefix(f"{namespace}/") if namespace else topic


def _group_in(namespace: str, name: str) -> str:
    group = _decoded(name, Code.ILLEGAL_CONSUMER_GROUP)
    return f"{namespace}{NAMESPACE_END}{group}" if namespace and group else group


def lite_filter_of(parent: str, lite_topic: str) -> str:
    """Return the filter of a lite topic of the topic `parent`. The lite topic `*` means all lite topics of the parent.

    Raises:
        Refused: ILLEGAL_LITE_TOPIC, or ILLEGAL_TOPIC if the parent has wildcards or starts with `$`.
    """
    if topics.is_wildcard(parent) or parent.startswith("$"):
        raise Refused(
            Code.ILLEGAL_TOPIC,
            f"{parent[:80]!r} can't have lite topics: name a topic without wildcards that does not start with '$'",
        )
    if lite_topic == LITE_ALL:
        return f"{parent}/#"
    if not lite_topic or len(lite_topic) > LITE_TOPIC_CHARS_MAX:
        raise Refused(
            Code.ILLEGAL_LITE_TOPIC, f"the lite topic's name has {len(lite_topic)} characters: use 1 to {LITE_TOPIC_CHARS_MAX}"
        )
    try:
        return topics.check_topic(f"{parent}/{lite_topic}".encode())
    except TopicInvalid as error:
        raise Refused(Code.ILLEGAL_LITE_TOPIC, str(error)) from error


def lite_topic_of(parent: str, topic: str) -> str:
    """Return the lite topic of a message's topic below its parent. This is the inverse of `lite_filter_of`."""
    return topic[len(parent) + 1 :]


def topic_of_message(message: Any) -> str:
    """Return the MQTT topic of a message from a client. The store checks whether clients may publish to it.

    Raises:
        Refused: As `filter_of` and `lite_filter_of`.
    """
    topic = filter_of(message.topic)
    lite_topic = message.system_properties.lite_topic
    if not lite_topic:
        return topic
    if lite_topic == LITE_ALL:
        raise Refused(
            Code.ILLEGAL_LITE_TOPIC, "a message can't go to the lite topic '*': only a subscription can name all lite topics"
        )
    return lite_filter_of(topic, lite_topic)


def _decoded(name: str, code: Code) -> str:
    if len(name) > ENCODED_BYTES_MAX or not _ENCODED.fullmatch(name):
        raise Refused(
            code,
            f"the name {name[:64]!r} is too long, or has a '%' without two hexadecimal digits: percent-encode it",
        )
    try:
        return unquote_to_bytes(name).decode()
    except UnicodeDecodeError as error:
        raise Refused(code, f"the name {name[:64]!r} does not decode to UTF-8: percent-encode its UTF-8 bytes") from error
