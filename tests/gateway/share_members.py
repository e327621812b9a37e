"""Members of a shared subscription, and the consumer group behind it."""

from __future__ import annotations

from typing import Any

from penstock.gateway.protocol.packets import PUBLISH, PUBLISH_WITH
from penstock.gateway.protocol.properties import Property
from penstock.pop.core.group import ConsumerGroup
from tests.gateway.wire import Broker, Client, Client5

SHARED = "$share/g/a/#"
LASTS = {Property.SESSION_EXPIRY_S: 600}


async def member(broker: Broker, client_id: str, qos: int = 1, name: str = SHARED, **options: Any) -> Client5:
    """Connect a client, and subscribe it to a shared subscription."""
    client = await broker.connect_5(client_id, **options)
    assert await client.subscribe((name, qos)) == [qos]
    return client


def group_of(broker: Broker, name: str = "g", topic_filter: str = "a/#") -> ConsumerGroup:
    """Return the consumer group of a shared subscription."""
    (group,) = broker.node.pop.groups.find(name, topic_filter)
    return group


async def publish(broker: Broker, *bodies: bytes, topic: str = "a/b", qos: int = 1) -> None:
    """Publish messages from a new client, which awaits the acknowledgement of each before it sends the next."""
    publisher = await broker.connect_5("publisher")
    for body in bodies:
        await publisher.publish(topic, body, qos)
    publisher.reset()


async def bodies(client: Client) -> list[bytes]:
    """Return the bodies of the messages that a client has been sent so far, without acknowledging them."""
    return [message.body for message in await client.messages()]


def packet_ids(packets: list[Any]) -> list[int]:
    """Return the packet ids of the messages among `packets`."""
    return [packet[3] for packet in packets if packet[0] in (PUBLISH, PUBLISH_WITH)]


def expire_deliveries(broker: Broker, ms: int) -> None:
    """Set the node's clock ahead by a little more than `ms`, and revive every delivery whose deadline has passed by then."""
    broker.clock.advance(ms + 1)
    while broker.node.pop.fire_due():
        pass
