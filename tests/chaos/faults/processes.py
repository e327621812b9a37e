"""Processes that are killed, or stopped and continued."""

from __future__ import annotations

import asyncio
import shutil
import signal
from typing import ClassVar

from tests.chaos.faults.fault import Fault
from tests.chaos.scene import Scene


async def kill_starts(scene: Scene) -> None:
    """Start the node up to four times, and kill it at a random moment of each start."""
    for _ in range(scene.random.randint(1, 4)):
        await scene.node.spawn()
        await asyncio.sleep(scene.random.uniform(0, scene.node.start_s))
        scene.outcome.injected += scene.node.is_running
        await scene.node.kill()


class KillNode(Fault):
    name = "kill-node"
    summary = "kill -9 of the node under load"

    async def inject(self, scene: Scene) -> None:
        await scene.down()
        scene.outcome.injected += 1
        await scene.up()


class KillStart(Fault):
    name = "kill-start"
    summary = "kill -9 of the node under load, and again while it starts, up to four times"

    async def inject(self, scene: Scene) -> None:
        await scene.down()
        scene.outcome.injected += 1
        await kill_starts(scene)
        await scene.up()


class KillRebuild(Fault):
    name = "kill-rebuild"
    summary = "kill -9 of the node while it rebuilds its index, up to four times"

    async def inject(self, scene: Scene) -> None:
        await scene.down()
        scene.outcome.injected += 1
        shutil.rmtree(scene.data_dir / "index")
        await kill_starts(scene)
        await scene.up()


class KillSync(Fault):
    name = "kill-sync"
    summary = "kill -9 of the process that syncs: the node must end with status 70"

    async def inject(self, scene: Scene) -> None:
        await scene.require_sync()
        scene.node.signal_sync(signal.SIGKILL)
        scene.outcome.injected += 1
        await scene.require_failed("the end of the process that syncs")
        await scene.up()


class StopNode(Fault):
    name = "stop-node"
    summary = "SIGSTOP of the node, and SIGCONT up to a second later"
    per_round: ClassVar[int] = 15

    async def inject(self, scene: Scene) -> None:
        scene.node.signal(signal.SIGSTOP)
        scene.outcome.injected += 1
        await scene.under_load(0.05, 1.0)
        scene.node.signal(signal.SIGCONT)
        await scene.under_load()


class StopSync(Fault):
    name = "stop-sync"
    summary = "SIGSTOP of the process that syncs; then SIGCONT, or kill -9 of the node"

    async def inject(self, scene: Scene) -> None:
        await scene.require_sync()
        scene.node.signal_sync(signal.SIGSTOP)
        scene.outcome.injected += 1
        await scene.under_load(0.05, 0.8)
        if scene.random.random() < 0.5:
            await scene.down()
            await scene.up()
        else:
            scene.node.signal_sync(signal.SIGCONT)
            await scene.under_load()
