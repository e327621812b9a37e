"""Order by message group: one message of each account is in flight at a time, and many accounts proceed in parallel.

python examples/fifo.py 127.0.0.1:8081
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections import defaultdict

from penstock import Client, Consumer, group_settings

ACCOUNTS = 5
BOOKINGS = 8


async def main(address: str) -> None:
    seen: dict[str, list[int]] = defaultdict(list)

    async def work(consumer: Consumer) -> None:
        async for message in consumer:
            if random.random() < 0.2:
                await message.nack()  # The message comes again before the next one of its account.
                continue
            await asyncio.sleep(random.random() / 100)
            seen[message.message_group].append(int(message.body))
            await message.ack()
            if sum(map(len, seen.values())) == ACCOUNTS * BOOKINGS:
                return

    async with Client(address) as client:
        await client.groups.create("example-ledger", "bank/bookings", settings=group_settings(fifo=True, backoff=()))
        for number in range(BOOKINGS):
            for account in range(ACCOUNTS):
                await client.send("bank/bookings", b"%d" % number, message_group=f"account {account}")
        async with client.consume("bank/bookings", group="example-ledger", batch=4, prefetch=4, wait=0.5) as consumer:
            workers = [asyncio.create_task(work(consumer)) for _ in range(4)]
            await asyncio.wait(workers, return_when=asyncio.FIRST_COMPLETED)
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
    in_order = all(bookings == list(range(BOOKINGS)) for bookings in seen.values())
    print(f"{len(seen)} accounts, {'all' if in_order else 'NOT all'} in order")
    if not in_order:
        sys.exit(1)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8081"))
