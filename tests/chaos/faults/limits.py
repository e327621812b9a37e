"""What runs out: disk space and descriptors."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from socket import create_connection
from typing import ClassVar

from tests.chaos.disk import SmallDisk, missing_for_disks, missing_for_mounts
from tests.chaos.faults.fault import Fault
from tests.chaos.nodeprocess import FAILED_STATUS
from tests.chaos.scene import Broken, Scene

DESCRIPTORS = 1_024
IDLE = 1_500
FILLER_BYTES = 1 << 20


@contextmanager
def filled(disk: SmallDisk, but: int) -> Iterator[None]:
    """Fill a file system up to `but` bytes while the context lasts."""
    filler = disk.path / "filler"
    with filler.open("wb", buffering=0) as file:
        while (free := disk.free_bytes() - but) > 0:
            try:
                file.write(bytes(min(free, FILLER_BYTES)))
            except OSError:
                break
    try:
        yield
    finally:
        filler.unlink()


class FullDisk(Fault):
    """The disk fills up under load, in half of the cases a kill and a start follow, and then there is room again."""

    per_round: ClassVar[int] = 6

    @classmethod
    def missing(cls) -> str:
        return missing_for_mounts()

    async def inject(self, scene: Scene) -> None:
        assert scene.small_disk is not None
        must_start = False
        with filled(scene.small_disk, scene.random.choice((0, 4096, 1 << 20, 5 << 20))):
            scene.outcome.injected += 1
            await scene.under_load(0.3, 1.2)
            if not scene.node.is_running:
                raise Broken(f"the node has ended on a full disk: {scene.node.log.read_text()[-800:]}")
            if scene.random.random() < 0.5:
                await scene.down()
                must_start = not await scene.up_or_refuse()
                if not must_start:
                    scene.load.connect(scene.node)
                    await scene.under_load(0.3, 0.6)
        if must_start:
            await scene.up()
        await scene.wait_for_room()


class FullTmpfs(FullDisk):
    name = "full-tmpfs"
    summary = "a tmpfs with log and index is full for some seconds"
    on: ClassVar[str] = "tmpfs"


class FullExt4(FullDisk):
    name = "full-ext4"
    summary = "an ext4 with log and index is full for some seconds"
    on: ClassVar[str] = "ext4"

    @classmethod
    def missing(cls) -> str:
        return missing_for_disks()


class FullIndex(Fault):
    name = "full-index"
    summary = "a file system with the index alone is full for some seconds: the node waits, or ends with status 70"
    on: ClassVar[str] = "index"
    per_round: ClassVar[int] = 6

    @classmethod
    def missing(cls) -> str:
        return missing_for_mounts()

    async def inject(self, scene: Scene) -> None:
        assert scene.small_disk is not None
        with filled(scene.small_disk, scene.random.choice((0, 4096, 65_536))):
            scene.outcome.injected += 1
            await scene.under_load(0.6, 2.0)
        if not scene.node.is_running:
            status = await scene.node.ended()
            if status != FAILED_STATUS:
                raise Broken(f"the node ended with status {status} because its index had no room")
            await scene.load.disconnect()
            scene.outcome.notes.append("status 70")
            await scene.up()
        await scene.wait_for_room()


class Descriptors(Fault):
    name = "descriptors"
    summary = "a limit of 1,024 descriptors and 1,500 connections that send nothing"
    per_round: ClassVar[int] = 3

    async def inject(self, scene: Scene) -> None:
        await scene.down()
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        scene.node.descriptors = DESCRIPTORS, DESCRIPTORS if scene.random.random() < 0.5 else hard
        await scene.up()
        with ExitStack() as sockets:
            for _ in range(IDLE):
                sockets.enter_context(create_connection(("127.0.0.1", scene.node.port("mqtt")), 5))
            scene.outcome.injected += 1
            await scene.under_load(0.5, 1.5)
            if not scene.node.is_running:
                raise Broken(f"the node has ended for want of descriptors: {scene.node.log.read_text()[-800:]}")
        scene.node.descriptors = None
        await scene.under_load()
