"""Processes that are killed, or stopped and continued."""

from __future__ import annotations

import asyncio
import signal

from tests.chaos.faults.fault import Fault
from tests.chaos.scene import Broken, Scene

START_S = 1.2
"""About as long as a start takes."""


class KillNode(Fault):
    name = "kill-node"
    summary = "kill -9 of the node under load"

    async def inject(self, scene: Scene) -> None:
        await scene.down()
        await scene.up()


class KillStart(Fault):
    name = "kill-start"
    summary = "kill -9 of the node under load, and again while it starts, up to four times"

    async def inject(self, scene: Scene) -> None:
        await scene.down()
        for _ in range(scene.random.randint(1, 4)):
            await scene.node.spawn()
            await asyncio.sleep(scene.random.uniform(START_S / 4, START_S))
            await scene.node.kill()
        await scene.up()


class KillSync(Fault):
    name = "kill-sync"
    summary = "kill -9 of the process that syncs: the node must end with status 70"

    async def inject(self, scene: Scene) -> None:
        if not scene.node.sync_pid:
            raise Broken("the node has no process that syncs")
        scene.node.signal_sync(signal.SIGKILL)
        await scene.require_failed("the end of the process that syncs")
        await scene.up()


class StopNode(Fault):
    name = "stop-node"
    summary = "SIGSTOP of the node, and SIGCONT up to two seconds later"

    async def inject(self, scene: Scene) -> None:
        scene.node.signal(signal.SIGSTOP)
        await scene.under_load(0.1, 2.0)
        scene.node.signal(signal.SIGCONT)
        await scene.under_load()


class StopSync(Fault):
    name = "stop-sync"
    summary = "SIGSTOP of the process that syncs; then SIGCONT, or kill -9 of the node"

    async def inject(self, scene: Scene) -> None:
        scene.node.signal_sync(signal.SIGSTOP)
        await scene.under_load(0.1, 1.0)
        if scene.random.random() < 0.5:
            await scene.down()
            await scene.up()
        else:
            scene.node.signal_sync(signal.SIGCONT)
            await scene.under_load()
