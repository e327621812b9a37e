"""A message that agrees with a transaction of a database: the message is stored before it, and committed after it.

If the producer dies in between, the node asks the producer's service for the outcome. This service looks into its database.

    python examples/transaction.py 127.0.0.1:8081
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys

from penstock import Client, PendingTransaction

PRODUCER = "example-orders"


async def main(address: str) -> None:
    database = sqlite3.connect(":memory:", isolation_level=None)
    database.execute("create table orders (id integer primary key)")

    async def decide(transaction: PendingTransaction) -> bool | None:
        """Return the outcome of a transaction that its producer did not end."""
        order = int(transaction.message.properties["order"])
        return database.execute("select 1 from orders where id = ?", (order,)).fetchone() is not None

    async with Client(address) as client:
        answering = asyncio.create_task(client.transactions.answer_checks(PRODUCER, decide))
        for order in range(10):
            try:
                properties = {"order": str(order)}
                async with await client.transactions.begin(
                    "orders/placed", b"%d" % order, producer=PRODUCER, properties=properties
                ):
                    database.execute("insert into orders values (?)", (order,))
                    if order % 3 == 0:
                        database.execute("delete from orders where id = ?", (order,))
                        raise RuntimeError("the payment was refused")
            except RuntimeError:
                pass  # The transaction and its message are rolled back.
        placed = {row[0] for row in database.execute("select id from orders")}
        seen: set[int] = set()
        async for message in client.consume("orders/placed", group="example-shipping"):
            message.ack()
            seen.add(int(message.body))
            if len(seen) == len(placed):
                break
        answering.cancel()
    print(f"orders {sorted(placed)}, messages {sorted(seen)}")
    if seen != placed:
        sys.exit("they do not agree")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8081"))
