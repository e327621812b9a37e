"""`penstock pub` and `penstock sub`."""

from __future__ import annotations

import logging

from amqtt.client import MQTTClient
from amqtt.errors import ConnectError

from penstock.cli.actions.output import print_row, text_of
from penstock.store.options import HostPort

_CLIENT = {"auto_reconnect": False, "keep_alive": 60, "plugins": {}}


async def publish(address: HostPort, topic: str, body: bytes, *, qos: int, retain: bool, count: int) -> None:
    """Publish a message over MQTT `count` times. At QoS 1 and 2, return when all of them are acknowledged."""
    client = await _connected(address)
    for _ in range(count):
        await client.publish(topic, body, qos=qos, retain=retain)
    await client.disconnect()


async def subscribe(address: HostPort, topic_filter: str, *, qos: int, count: int, as_json: bool) -> None:
    """Print the messages of `topic_filter` as they arrive over MQTT. End after `count` messages, or never if `count` is 0."""
    client = await _connected(address)
    codes = await client.subscribe([(topic_filter, qos)])
    if codes and codes[0] >= 0x80:
        await client.disconnect()
        raise ValueError(f"The node refused the filter {topic_filter!r}. Check its wildcards.")
    received = 0
    try:
        while not count or received < count:
            message = await client.deliver_message()
            if message is None:
                raise ConnectionError("The node closed the connection.")
            print_row({"topic": message.topic, "body": text_of(bytes(message.data or b""))}, as_json)
            received += 1
    finally:
        await client.disconnect()


async def _connected(address: HostPort) -> MQTTClient:
    logging.getLogger("amqtt").setLevel(logging.CRITICAL)  # amqtt raises its errors as well as logging them
    client = MQTTClient(config=_CLIENT)
    try:
        await client.connect(f"mqtt://{address}/")
    except ConnectError as error:
        raise ConnectionError(f"No MQTT broker answers on {address} ({error}). Is `penstock serve` running there?") from error
    return client
