"""Commands that are killed while they work on a data directory: `penstock repair` and `penstock backup`."""

from __future__ import annotations

import asyncio
import shutil
import signal
from contextlib import suppress
from typing import ClassVar

from tests.chaos.faults.fault import Fault
from tests.chaos.faults.files import flip, stop_or_kill
from tests.chaos.logfiles import harm_of, records, segments
from tests.chaos.nodeprocess import ServeProcess, spawn_command
from tests.chaos.scene import Broken, Scene
from tests.chaos.services import now_ms

COMMAND_S = 1.0
"""About as long as a command takes."""


async def kill_command(scene: Scene, *arguments: str) -> None:
    """Start a command of `penstock`, and kill it at a random moment."""
    process = await spawn_command(*arguments, launcher=scene.launcher)
    await asyncio.sleep(scene.random.uniform(COMMAND_S / 4, COMMAND_S))
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGKILL)
    await process.wait()


class KillRepair(Fault):
    name = "kill-repair"
    summary = "records are damaged, and penstock repair is killed up to three times before it completes"
    is_last: ClassVar[bool] = True

    async def inject(self, scene: Scene) -> None:
        await stop_or_kill(scene)
        found = list(records(scene.data_dir))
        harmed = scene.random.sample(found[:-1], min(scene.random.randint(1, 5), len(found) - 1))
        for one in harmed:
            path = next(path for path in reversed(segments(scene.data_dir)) if int(path.stem) <= one.position)
            flip(scene, path, one.position - int(path.stem), one.position - int(path.stem) + one.size)
        for _ in range(scene.random.randint(1, 3)):
            await kill_command(scene, "repair", "--data-dir", str(scene.data_dir))
        await scene.repair()
        scene.ledger.may_repeat = True  # a run that was killed may have mended it all
        for one in harmed:
            scene.excuse(harm_of(found, one.position, one.position + 1))
        await scene.up()


class KillBackup(Fault):
    name = "kill-backup"
    summary = "penstock backup is killed under load up to twice, then completes; a node on the restored copy has everything"

    async def inject(self, scene: Scene) -> None:
        backup, restored = scene.directory / "backup", scene.directory / "restored"
        arguments = ["backup", "--data-dir", str(scene.data_dir), str(backup)]
        for _ in range(scene.random.randint(0, 2)):
            await kill_command(scene, *arguments)
        expected = scene.ledger.expected(lambda topic: True, now_ms=now_ms() - 1_000)
        status, said = await scene.command(*arguments)
        if status:
            raise Broken(f"penstock backup ended with status {status}: {said[-800:]}")
        shutil.rmtree(restored, ignore_errors=True)
        status, said = await scene.command("restore", str(backup), str(restored))
        if status:
            raise Broken(f"penstock restore ended with status {status}: {said[-800:]}")
        node = ServeProcess(restored, scene.config, scene.directory / "restored.log", scene.launcher)
        try:
            scene.require_ready(await node.start())
            await scene.load.audit_copy(node, expected)
        finally:
            await node.kill()
