"""A node on a disk that fails: `python -m tests.system.failing_disk SCENARIO DIRECTORY`, as root, for test_failing_disk.py.

The process has mounts of its own, so that nobody else sees the disk, and the system removes it whatever happens.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from pathlib import Path

from penstock import Client, PopError
from tests.bounds import variable_of
from tests.chaos.campaign import hide_mounts
from tests.chaos.disk import Disk
from tests.chaos.launching import Forks
from tests.chaos.logfiles import segments
from tests.chaos.nodeprocess import ServeProcess, run_command

PAGE = 4096
MANY = 1_000_000
BODY_BYTES = 1500
NUMBER = 400

CONFIG = """[store]
segment_bytes = 4194304
reserve_bytes = 0

[tables]
enabled = "off"
"""


class Scene:
    """A node on a disk, and what it has acknowledged."""

    def __init__(self, directory: Path) -> None:
        (directory / "config.toml").write_text(CONFIG)
        self.disk = Disk(directory)
        self.data_dir = self.disk.path / "data"
        self.forks = Forks(variable_of(store__ballast_bytes=0))
        self.node = ServeProcess(self.data_dir, directory / "config.toml", directory / "log", self.forks)
        self.acked: list[int] = []

    async def up(self) -> None:
        start = await self.node.start()
        assert start.is_ready, start

    async def send(self, count: int) -> None:
        """Send messages one by one, up to the first that fails."""
        first = self.acked[-1] + 100 if self.acked else 0
        async with Client(f"127.0.0.1:{self.node.port('pop')}", timeout=3.0) as client:
            for number in range(first, first + count):
                await client.send("plant/1", b"%d:" % number + bytes(BODY_BYTES))
                self.acked.append(number)

    async def found(self) -> list[int]:
        """Take all messages there are."""
        numbers: list[int] = []
        async with Client(f"127.0.0.1:{self.node.port('pop')}") as client:
            while batch := await client.pop("plant/#", group="new", messages_max=32, wait=0.2):
                numbers += [int(message.body.partition(b":")[0]) for message in batch]
                await client.ack([message.handle for message in batch], group="new")
        return numbers

    async def forget_pages(self) -> None:
        """Unmount and mount the file system: nothing is in memory afterwards."""
        await self.disk.unmount()
        await self.disk.mount()


async def failed_write(scene: Scene) -> None:
    """A block of the log can't be written once. The start after that must not take for durable what is in memory only."""
    await scene.up()
    await scene.send(NUMBER)
    path = segments(scene.data_dir)[-1]
    data = path.read_bytes()
    end = len(data.rstrip(b"\0")) // PAGE * PAGE
    ranges = scene.disk.blocks_of(path, end, end + 64 * PAGE)
    await scene.disk.command(do="fail", what="write", ranges=ranges, times=1)
    with suppress(PopError):  # the node ends meanwhile
        await scene.send(100)
    assert await scene.node.ended() == 70
    assert (await scene.disk.command(do="count"))["write"] == 1
    await scene.disk.command(do="heal")
    await scene.up()
    await scene.send(5)
    await scene.node.kill()
    await scene.forget_pages()
    await scene.up()
    found = await scene.found()
    assert set(scene.acked) <= set(found), sorted(set(scene.acked) - set(found))
    await scene.node.stop()


async def unreadable(scene: Scene) -> None:
    """A block of the log can't be read. The start refuses it, and a repair saves the rest."""
    await scene.up()
    await scene.send(NUMBER)
    assert await scene.node.stop() == 0
    path = segments(scene.data_dir)[-1]
    block = 37 * PAGE  # in the middle of a file, where the system reads many blocks at once
    await scene.forget_pages()
    await scene.disk.command(do="fail", what="read", ranges=scene.disk.blocks_of(path, block, block + PAGE), times=MANY)
    start = await scene.node.start()
    assert start.is_refusal, start
    assert path.name in start.said
    assert "can't be read" in start.said
    status, said = await run_command("repair", "--data-dir", str(scene.data_dir), launcher=scene.forks)
    assert status == 0, said
    assert f"the disk can't read {PAGE} of them" in said, said
    await scene.up()
    lost = sorted(set(scene.acked) - set(await scene.found()))
    assert 1 <= len(lost) <= PAGE // BODY_BYTES + 2, lost
    assert lost == list(range(lost[0], lost[-1] + 1))
    await scene.send(5)
    assert await scene.node.stop() == 0
    assert (await run_command("repair", "--data-dir", str(scene.data_dir), "--dry-run", launcher=scene.forks))[0] == 0


SCENARIOS = {"failed-write": failed_write, "unreadable": unreadable}


async def main(name: str, directory: Path) -> None:
    scene = Scene(directory)
    try:
        await scene.disk.create()
        await SCENARIOS[name](scene)
    finally:
        await scene.node.kill()
        await scene.forks.close()
        await scene.disk.close()


if __name__ == "__main__":
    hide_mounts()
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
