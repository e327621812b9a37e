"""Send and consume with the asyncio client.

python examples/native_asyncio.py 127.0.0.1:8081
"""

from __future__ import annotations

import asyncio
import sys

from penstock import Client


async def main(address: str) -> None:
    async with Client(address) as client:
        await asyncio.gather(*(client.send(f"plant/{n % 3}/temperature", b"%d" % n) for n in range(100)))
        received = 0
        async for message in client.consume("plant/+/temperature", group="example-asyncio"):
            message.ack()  # The acknowledgement is on its way. Await it to know that it is durable.
            received += 1
            if received == 100:
                break
        print(f"consumed {received}")
        # A stream has the lowest latency. Acknowledgements go back on it.
        async with client.stream("plant/#", group="example-stream", credits=64) as stream:
            received = 0
            async for streamed in stream:
                streamed.ack()
                received += 1
                if received == 100:
                    break
        print(f"streamed {received}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8081"))
