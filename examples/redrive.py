"""Dead letters: messages that fail are set aside with a reason. An operator looks at them, and sends them back after a repair.

python examples/redrive.py 127.0.0.1:8081
"""

from __future__ import annotations

import asyncio
import sys

from penstock import Client, DeadLetterReason, group_settings

GROUP = "example-parser"


async def main(address: str) -> None:
    async with Client(address) as client:
        await client.groups.create(GROUP, "raw/readings", settings=group_settings(attempts_max=2, backoff=()))
        for body in (b"21.5", b"twenty", b"19.0"):
            await client.send("raw/readings", body)
        while messages := await client.pop("raw/readings", group=GROUP, wait=0.5):
            for message in messages:
                try:
                    float(message.body)
                except ValueError:
                    await message.nack()  # After its second failure the message is a dead letter.
                else:
                    await message.ack()
        for letter in await client.dead_letters.of_group(GROUP):
            print(f"dead: {letter.topic} after {letter.attempts} attempts, {DeadLetterReason.Name(letter.reason).lower()}")
        # The parser was repaired in the meantime.
        print(f"sent back: {await client.dead_letters.redrive(GROUP)}")
        for message in await client.pop("raw/readings", group=GROUP, wait=2.0):
            print(f"processed: {message.body.decode()}, attempt {message.attempt}")
            await message.ack()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8081"))
