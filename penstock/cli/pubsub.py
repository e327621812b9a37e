"""Small tools to try a node by hand over MQTT: `penstock pub` and `sub`."""

from __future__ import annotations

import logging

from amqtt.client import MQTTClient
from amqtt.errors import ConnectError

from penstock.cli.rows import show, text
from penstock.store.options import HostPort

_CLIENT = {"auto_reconnect": False, "keep_alive": 60, "plugins": {}}


async def publish(address: HostPort, topic: str, body: bytes, *, qos: int, retain: bool, count: int) -> None:
    """Publish `body` to `topic` over MQTT, `count` times. At QoS 1 and 2 it returns when all are acknowledged."""
    client = await _connected(address)
    for _ in range(count):
        await client.publish(topic, body, qos=qos, retain=retain)
    await client.disconnect()


async def subscribe(address: HostPort, topic_filter: str, *, qos: int, count: int, as_json: bool) -> None:
    """Print what comes to `topic_filter` over MQTT; end after `count` messages, if that isn't 0."""
    client = await _connected(address)
    codes = await client.subscribe([(topic_filter, qos)])
    if codes and codes[0] >= 0x80:
        await client.disconnect()
        raise ValueError(f"the node refused the filter {topic_filter!r}: check its wildcards")
    received = 0
    try:
        while not count or received < count:
            message = await client.deliver_message()
            if message is None:
                raise ConnectionError("the node closed the connection")
            show({"topic": message.topic, "body": text(bytes(message.data or b""))}, as_json)
            received += 1
    finally:
        await client.disconnect()


async def _connected(address: HostPort) -> MQTTClient:
    logging.getLogger("amqtt").setLevel(logging.CRITICAL)  # its errors come as exceptions, too
    client = MQTTClient(config=_CLIENT)
    try:
        await client.connect(f"mqtt://{address}/")
    except ConnectError as error:
        raise ConnectionError(f"no MQTT broker answers on {address} ({error}); is `penstock serve` running there?") from error
    return client
