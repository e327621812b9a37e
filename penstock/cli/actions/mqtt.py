"""`penstock pub` and `penstock sub`."""

from __future__ import annotations

from typing import Any

from paho.mqtt.client import MQTTMessage
from paho.mqtt.properties import Properties

from penstock.cli.actions.endpoint import Endpoint
from penstock.cli.actions.login import UserPassword
from penstock.cli.actions.mqttconnection import MqttConnection
from penstock.cli.actions.output import print_row, text_of
from penstock.store.topics import check_filter, check_topic


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
        ConnectionError: there is no connection, or it ends early.
        ValueError: the node refuses the filter.
    """
    shared = topic_filter.split("/", 2)
    check_filter(shared[2] if shared[0] == "$share" and len(shared) == 3 else topic_filter)
    with MqttConnection(node, login, version) as connection:
        for number, message in enumerate(connection.messages(topic_filter, qos), start=1):
            print_row(_row(message, as_json), as_json)
            connection.acknowledge(message)
            if number == count:
                return


def _row(message: MQTTMessage, as_json: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"topic": message.topic, "body": text_of(bytes(message.payload))}
    if as_json and message.properties is not None and (found := _shown_properties(message.properties)):
        row["properties"] = found
    return row


def _shown_properties(properties: Properties) -> dict[str, Any]:
    """Return the properties of a message as JSON, by names in lower case. User properties may repeat, so they are pairs."""
    found: dict[str, Any] = {}
    for name, key in PROPERTIES.items():
        value = getattr(properties, name, None)
        if value is not None:
            found[key] = text_of(value) if isinstance(value, bytes) else value
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
