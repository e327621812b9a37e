"""What several tests of the clients ask of a consumer and of a node."""

from __future__ import annotations

from penstock import Client, Message
from tests.pop.wiring import FILTER, GROUP, Node


def in_flight(node: Node) -> int:
    """Return the number of messages in flight, of all groups."""
    return sum(group.in_flight for group in node.core.groups)


async def first_of(client: Client, count: int, **options: int) -> list[Message]:
    """Return the first messages of a consumer, and leave its loop."""
    got: list[Message] = []
    async for message in client.consume(FILTER, group=GROUP, **options):
        got.append(message)
        if len(got) == count:
            break
    return got
