"""Orders that time out: a delayed message closes an order, unless the payment comes first and recalls it.

python examples/order_timeout.py 127.0.0.1:8081

The recall is exact. Either it succeeds and the order will never be closed, or it raises AlreadyFired: then the message is on
its way, and the payment came too late. So an order is either paid or closed, and never both.
"""

from __future__ import annotations

import asyncio
import sys

from penstock import AlreadyFired, Client

TIMEOUT_S = 1.5


async def main(address: str) -> None:
    async with Client(address) as client:
        handles: dict[str, str] = {}
        for order in ("1", "2", "3"):
            sent = await client.send(f"orders/{order}/timeout", order.encode(), delay=TIMEOUT_S)
            handles[order] = sent.recall_handle
        await pay(client, "2", handles)
        closed = []
        async for message in client.consume("orders/+/timeout", group="example-orders"):
            closed.append(message.body.decode())
            await message.ack()
            if len(closed) == 2:
                break
        print(f"closed: {', '.join(sorted(closed))}")
        await pay(client, "3", handles)


async def pay(client: Client, order: str, handles: dict[str, str]) -> None:
    """Take the payment for an order, if it is still open."""
    try:
        await client.recall(handles[order])
    except AlreadyFired:
        print(f"order {order}: the payment came too late")
    else:
        print(f"order {order}: paid")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8081"))
