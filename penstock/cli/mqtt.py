"""`penstock pub` and `penstock sub`, to try a node by hand over MQTT."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from penstock.cli.arguments import (
    Commands,
    add_body,
    add_command,
    add_json,
    add_node,
    count,
    duration,
    endpoint,
    login,
    read_body,
)
from penstock.cli.output import body_fields, print_line, print_row, text_of

if TYPE_CHECKING:
    from paho.mqtt.client import MQTTMessage
    from paho.mqtt.properties import Properties

    from penstock.cli.endpoint import Endpoint
    from penstock.cli.login import UserPassword
    from penstock.cli.mqttconnection import MqttConnection


def add_to(commands: Commands) -> None:
    """Add the commands."""
    command = add_command(commands, "pub", "Publish a message over MQTT.")
    command.add_argument("topic", help="Topic of the message.")
    add_body(command)
    add_node(command, "mqtt")
    command.add_argument("--qos", type=int, choices=(0, 1, 2), default=1, help="Quality of service (%(default)s).")
    command.add_argument("--retain", action="store_true", help="Have the node retain the message for later subscribers.")
    command.add_argument("--count", type=count, default=1, help="Number of times to publish the message (%(default)s).")
    _add_version(command)
    command.add_argument(
        "--property",
        type=_pair,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="User property of the message; may be repeated. This and the options below need MQTT 5.",
    )
    command.add_argument("--content-type", metavar="TEXT", help="Content type of the message.")
    command.add_argument("--response-topic", metavar="TOPIC", help="Topic on which a reply is expected.")
    command.add_argument("--correlation-data", metavar="TEXT", help="What the reply should repeat.")
    command.add_argument(
        "--expiry", type=duration, metavar="TIME", help="Time after which nobody gets the message any more, such as 10m."
    )
    command.set_defaults(run=_publish)

    command = add_command(commands, "sub", "Subscribe over MQTT and print each message that arrives.")
    command.add_argument("filter", help="Topic filter to subscribe to, such as 'plant/+/temp'.")
    add_node(command, "mqtt")
    command.add_argument("--qos", type=int, choices=(0, 1, 2), default=1, help="Highest quality of service (%(default)s).")
    command.add_argument(
        "--count", type=count, default=0, help="Number of messages after which to end; 0 never ends (%(default)s)."
    )
    _add_version(command)
    add_json(command)
    command.set_defaults(run=_subscribe)


def _add_version(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--mqtt-version",
        choices=("3.1.1", "5"),
        default="5",
        help="Version of MQTT to speak (%(default)s). With 5, the node says why it refuses something.",
    )


def _publish(options: argparse.Namespace) -> int:
    properties = _properties(options)
    user_password = login(options, "mqtt")  # first, since both may be on standard input
    publish(
        endpoint(options, "mqtt"),
        user_password,
        options.topic,
        read_body(options.body),
        version=options.mqtt_version,
        qos=options.qos,
        retain=options.retain,
        count=options.count,
        properties=properties,
    )
    return 0


def _subscribe(options: argparse.Namespace) -> int:
    subscribe(
        endpoint(options, "mqtt"),
        login(options, "mqtt"),
        options.filter,
        version=options.mqtt_version,
        qos=options.qos,
        count=options.count,
        as_json=options.json,
    )
    return 0


def _properties(options: argparse.Namespace) -> Properties | None:
    """Return the properties of a message, or None if there are none. Raises ValueError for MQTT 3.1.1, which has none."""
    from paho.mqtt.properties import Properties

    given = {
        "UserProperty": options.property or None,
        "ContentType": options.content_type,
        "ResponseTopic": options.response_topic,
        "CorrelationData": None if options.correlation_data is None else options.correlation_data.encode(),
        "MessageExpiryInterval": None if options.expiry is None else -(-options.expiry // 1000),
    }
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        return None
    if options.mqtt_version != "5":
        raise ValueError("Messages of MQTT 3.1.1 have no properties: leave --mqtt-version out, or the properties.")
    from paho.mqtt.packettypes import PacketTypes

    properties = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
    for name, value in given.items():
        setattr(properties, name, value)
    return properties


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=VALUE, such as unit=degC.")
    return name, value


def publish(
    node: Endpoint,
    login: UserPassword | None,
    topic: str,
    body: bytes,
    *,
    version: str,
    qos: int,
    retain: bool,
    count: int,
    properties: Properties | None,
) -> None:
    """Publish a message over MQTT `count` times. At QoS 1 and 2, return when all of them are acknowledged.

    Args:
        node, login: see `MqttConnection`.
        topic, body, qos, retain: of the message.
        version: of MQTT, `3.1.1` or `5`.
        count: number of times.
        properties: of the message, with version 5; None for none.

    Raises:
        TopicInvalid: the topic is no name for a message.
        ConnectionError: there is no connection, or it ends early.
        ValueError: the node refuses the message.
    """
    from penstock.cli.mqttconnection import MqttConnection
    from penstock.store.topics import check_topic

    check_topic(topic.encode(errors="surrogateescape"))
    with MqttConnection(node, login, version) as connection:
        for _ in range(count):
            connection.publish(topic, body, qos, retain, properties)
        connection.wait_until_sent()


def subscribe(
    node: Endpoint, login: UserPassword | None, topic_filter: str, *, version: str, qos: int, count: int, as_json: bool
) -> None:
    """Print the messages of `topic_filter` as they arrive over MQTT. End after `count` messages, or never if `count` is 0.

    Raises:
        TopicInvalid: the filter is none.
        ConnectionError: there is no connection at the beginning.
        LoginRefused, ValueError: the node refuses the login or the filter.
    """
    from penstock.store.topics import check_filter

    shared = topic_filter.split("/", 2)
    check_filter(shared[2] if shared[0] == "$share" and len(shared) == 3 else topic_filter)
    for number, (connection, message) in enumerate(_messages(node, login, topic_filter, version, qos), start=1):
        print_row(_row(message, as_json), as_json)
        connection.acknowledge(message)
        if number == count:
            return


def _messages(
    node: Endpoint, login: UserPassword | None, topic_filter: str, version: str, qos: int
) -> Iterator[tuple[MqttConnection, MQTTMessage]]:
    """Yield the messages of a filter, each with its connection. A connection that ends is followed by another one."""
    from penstock.cli.mqttconnection import LoginRefused, MqttConnection

    retry_s = None  # not before the first subscription
    has_failed = False
    while True:
        try:
            with MqttConnection(node, login, version) as connection:
                connection.subscribe(topic_filter, qos)
                retry_s, has_failed = RETRY_S_MIN, False
                for message in connection.messages():
                    yield connection, message
        except ConnectionError as error:
            if retry_s is None or isinstance(error, LoginRefused):
                raise
            if not has_failed:
                print_line(f"penstock sub: {error} Connecting again.", out=sys.stderr)
            has_failed = True
        time.sleep(retry_s)
        retry_s = min(2 * retry_s, RETRY_S_MAX)


RETRY_S_MIN, RETRY_S_MAX = 0.1, 5.0
"""Seconds before a connection follows one that has ended, at first and at most."""


def _row(message: MQTTMessage, as_json: bool) -> dict[str, Any]:
    body = bytes(message.payload)
    row: dict[str, Any] = {"topic": message.topic, **(body_fields(body) if as_json else {"body": text_of(body)})}
    if as_json and message.properties is not None and (found := _shown_properties(message.properties)):
        row["properties"] = found
    return row


def _shown_properties(properties: Properties) -> dict[str, Any]:
    """Return the properties of a message as JSON, by names in lower case. User properties may repeat, so they are pairs."""
    found: dict[str, Any] = {}
    for name, key in PROPERTIES.items():
        value = getattr(properties, name, None)
        if isinstance(value, bytes):
            found |= body_fields(value, key)
        elif value is not None:
            found[key] = value
    return found


PROPERTIES = {
    "PayloadFormatIndicator": "payload_format",
    "MessageExpiryInterval": "expiry_s",
    "ContentType": "content_type",
    "ResponseTopic": "response_topic",
    "CorrelationData": "correlation_data",
    "UserProperty": "user",
}
"""The properties of a PUBLISH that mean something beyond its connection (MQTT 5.0, 3.3.2.3), by the names of the library."""
