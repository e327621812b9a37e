"""A command to a device that is sent again with growing delays until the device confirms it.

python examples/device_command.py 127.0.0.1:8081

All tries are delayed messages that the node holds, so no process has to remember them: the service may restart in between. The
confirmation recalls the tries that are left. Each has the number of the command, by which a device knows a repetition.
"""

from __future__ import annotations

import asyncio
import sys

from penstock import AlreadyFired, Client

DELAYS_S = (0.0, 0.3, 0.9, 2.7, 8.1)
"""When the command is sent, in seconds from now."""


async def main(address: str) -> None:
    async with Client(address) as client:
        await client.groups.create("example-device", "device/7/command")
        handles = []
        for delay in DELAYS_S:
            sent = await client.send("device/7/command", b"open", properties={"command": "41"}, delay=delay)
            handles.append(sent.recall_handle)
        tries = 0
        # The device was away for the first two tries.
        async for message in client.consume("device/7/command", group="example-device"):
            tries += 1
            await message.ack()
            if tries == 3:
                print(f"device: {message.body.decode()}, command {message.properties['command']}, try {tries}")
                break
        recalled = 0
        for handle in filter(None, handles):
            try:
                await client.recall(handle)
            except AlreadyFired:
                continue
            recalled += 1
        print(f"confirmed after {tries} tries; recalled: {recalled}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8081"))
