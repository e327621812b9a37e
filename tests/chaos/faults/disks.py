"""Disks that lose power, fail to write, or can't be read. `tests/chaos/blockdevice.py` plays the disk, below a real ext4."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import ClassVar

from tests.chaos.disk import Disk, missing_for_disks
from tests.chaos.faults.fault import Fault
from tests.chaos.logfiles import Found, harm_of, records, segments
from tests.chaos.nodeprocess import FAILED_STATUS
from tests.chaos.scene import Broken, Scene

PAGE = 4096
MANY = 1_000_000
WRITE_S_MAX = 8.0
"""Under load, the node writes a given page of its log within this time, or not before the segment ends."""


class DiskFault(Fault):
    """A fault of the simulated disk."""

    on: ClassVar[str] = "disk"

    @classmethod
    def missing(cls) -> str:
        return missing_for_disks()

    async def inject(self, scene: Scene) -> None:
        assert scene.disk is not None
        await self.harm(scene, scene.disk)

    async def harm(self, scene: Scene, disk: Disk) -> None:
        raise NotImplementedError


async def lose_power(scene: Scene, disk: Disk) -> None:
    """Let the power fail under the node, and boot the machine."""
    scene.outcome.injected += 1
    found = await disk.cut_power(f"{scene.random.random()}")
    scene.outcome.notes.append(f"{found['kept']} of {found['blocks']} unflushed blocks were kept")
    await scene.down()
    await disk.boot()


class PowerCut(DiskFault):
    name = "power-cut"
    summary = "the power fails under load; of the blocks that were not flushed, any subset in any version is on the disk"

    async def harm(self, scene: Scene, disk: Disk) -> None:
        await lose_power(scene, disk)
        await scene.up()


class PowerCutStart(DiskFault):
    name = "power-cut-start"
    summary = "the power fails under load, and again while the node starts, up to three times"

    async def harm(self, scene: Scene, disk: Disk) -> None:
        await lose_power(scene, disk)
        for _ in range(scene.random.randint(1, 3)):
            await scene.node.spawn()
            await asyncio.sleep(scene.random.uniform(0, scene.node.start_s))
            await lose_power(scene, disk)
        await scene.up()


class KillPowerCut(DiskFault):
    name = "kill-power-cut"
    summary = "kill -9 of the node, a start that must not rely on the page cache, and a power cut at once or soon after"

    async def harm(self, scene: Scene, disk: Disk) -> None:
        await scene.down()
        scene.outcome.injected += 1
        await scene.up()
        if scene.random.random() < 0.5:
            await scene.under_load(0.0, 0.3)
        await lose_power(scene, disk)
        await scene.up()


class FailedWrite(DiskFault):
    name = "failed-write"
    summary = "a block of the log can't be written once: status 70; then a start in place, load, and a reboot"

    async def harm(self, scene: Scene, disk: Disk) -> None:
        await scene.require_sync()
        if await self._fail_a_write(scene, disk):
            scene.outcome.injected += 1
            await scene.require_failed("a write that failed")
            await disk.command(do="heal")
            await scene.up()
            await scene.under_load()
        await scene.down()
        await disk.boot()
        await scene.up()

    async def _fail_a_write(self, scene: Scene, disk: Disk) -> bool:
        """Let the next write to some block at the end of the log fail. Return whether one has failed."""
        path = segments(scene.data_dir)[-1]
        data = path.read_bytes()
        end = len(data.rstrip(b"\0")) // PAGE * PAGE + scene.random.randint(0, 4) * PAGE
        ranges = disk.blocks_of(path, end, min(end + 16 * PAGE, len(data))) if end < len(data) else []
        if not ranges:
            scene.outcome.notes.append("the segment was full")
            return False
        if not await scene.load.has_room(scene.node):
            scene.outcome.notes.append("the disk was full of messages")
            return False
        await disk.command(do="fail", what="write", ranges=ranges, times=1)
        deadline = asyncio.get_running_loop().time() + WRITE_S_MAX
        while segments(scene.data_dir)[-1] == path:
            if (await disk.command(do="count"))["write"]:
                return True
            scene.load.check_tasks()
            if asyncio.get_running_loop().time() > deadline:
                scene.outcome.notes.append("nothing was written to the block")
                break
            await asyncio.sleep(0.02)
        else:
            # When a segment is cut, the kernel writes its last page again, which may fail without harm. Later the block may
            # belong to a file that nobody syncs. If acknowledged messages were lost, they are missing after the reboot.
            scene.outcome.notes.append("the segment ended")
        await disk.command(do="heal")
        return False


class FailedFlush(DiskFault):
    name = "failed-flush"
    summary = "the disk fails to flush its cache once: status 70; then a reboot"

    async def harm(self, scene: Scene, disk: Disk) -> None:
        await disk.command(do="fail", what="flush", times=1)
        scene.outcome.injected += 1
        await scene.require_failed("a flush that failed")
        await disk.command(do="heal")
        if scene.random.random() < 0.5 and await scene.up_or_refuse():  # the file system may be read-only by now
            await scene.resume()
            await scene.under_load()
            await scene.down()
        await disk.boot()
        await scene.up()


class Unreadable(DiskFault):
    name = "unreadable"
    summary = "up to four blocks of the log can't be read: the start refuses them or the node goes on without them; then repair"
    is_last: ClassVar[bool] = True

    async def harm(self, scene: Scene, disk: Disk) -> None:
        await scene.down()
        found = list(records(scene.data_dir))
        places = [self._page(scene, found) for _ in range(scene.random.randint(1, 4))]
        await disk.boot()
        ranges = [block for path, offset in places for block in disk.blocks_of(path, offset, offset + PAGE)]
        await disk.command(do="fail", what="read", ranges=ranges, times=MANY)
        scene.outcome.injected += len(set(places))
        harm = harm_of(found, *((int(path.stem) + offset, int(path.stem) + offset + PAGE) for path, offset in places))
        scene.outcome.notes.append(", ".join(f"page {offset} of {path.name}" for path, offset in places))
        is_up = await scene.up_or_refuse()
        if is_up:
            await scene.under_load()
            status = await scene.node.stop() if scene.node.is_running else await scene.node.ended()
            if status not in (0, FAILED_STATUS):
                raise Broken(f"the node ended with status {status} because of a block that it could not read")
            await scene.load.disconnect()
        await scene.repair()
        scene.excuse(harm)
        await scene.up()

    def _page(self, scene: Scene, found: list[Found]) -> tuple[Path, int]:
        """Choose a page of the log that has records."""
        path = scene.random.choice(segments(scene.data_dir))
        base = int(path.stem)
        end = max((one.position + one.size for one in found if one.position < base + path.stat().st_size), default=base) - base
        return path, scene.random.randrange(max(end // PAGE, 1)) * PAGE


class UnreadableIndex(DiskFault):
    name = "unreadable-index"
    summary = "a block of the index can't be read: the node ends with status 71 when it meets it, and the next start rebuilds"

    async def harm(self, scene: Scene, disk: Disk) -> None:
        await scene.down()
        files = [path for path in (scene.data_dir / "index").iterdir() if path.name != "LOCK" and path.stat().st_size]
        path = scene.random.choice(files)
        offset = scene.random.randrange(path.stat().st_size) // PAGE * PAGE
        ranges = disk.blocks_of(path, offset, min(offset + PAGE, path.stat().st_size))
        await disk.boot()
        await disk.command(do="fail", what="read", ranges=ranges, times=MANY)
        scene.outcome.injected += bool(ranges)
        scene.outcome.notes.append(f"page {offset} of {path.name}")
        scene.tolerates_index_status = True
        await scene.up_after_index_status()
        await scene.under_load()
