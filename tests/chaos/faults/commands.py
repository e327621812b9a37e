"""Commands that are killed while they work on a data directory: `penstock repair` and `penstock backup`."""

from __future__ import annotations

import asyncio
import shutil
import signal
import time
from contextlib import suppress
from typing import ClassVar

from tests.chaos.faults.fault import Fault
from tests.chaos.faults.files import flip_records, stop_or_kill
from tests.chaos.logfiles import harm_of, records
from tests.chaos.nodeprocess import ServeProcess, spawn_command
from tests.chaos.scene import Broken, Scene
from tests.chaos.services import now_ms

TRIES_MAX = 20
"""How often a backup is tried again, 0.1 s later, because the node takes a killed one for running."""

durations: dict[str, float] = {}
"""How long each command took when it was last run to its end, in seconds."""


async def complete(scene: Scene, *arguments: str) -> tuple[int, str]:
    """Run a command of `penstock` to its end; return its exit status and what it printed."""
    begun_s = time.monotonic()
    result = await scene.command(*arguments)
    durations[arguments[0]] = time.monotonic() - begun_s
    return result


async def kill_command(scene: Scene, *arguments: str) -> None:
    """Start a command of `penstock`, and kill it at a random moment."""
    process = await spawn_command(*arguments, launcher=scene.launcher)
    await asyncio.sleep(scene.random.uniform(0, durations.get(arguments[0], 0.3)))
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGKILL)
    scene.outcome.injected += await process.wait() == -signal.SIGKILL


class KillRepair(Fault):
    name = "kill-repair"
    summary = "records are damaged, and penstock repair is killed up to four times before it completes"
    is_last: ClassVar[bool] = True

    async def inject(self, scene: Scene) -> None:
        await stop_or_kill(scene)
        found = list(records(scene.data_dir))
        harm = harm_of(found, *flip_records(scene, found[:-1], 5))
        arguments = ("repair", "--data-dir", str(scene.data_dir))
        for _ in range(scene.random.randint(1, 4)):
            await kill_command(scene, *arguments)
        status, said = await complete(scene, *arguments)
        if status:
            raise Broken(f"penstock repair ended with status {status}: {said[-800:]}")
        scene.outcome.repaired += 1
        scene.ledger.may_repeat = True
        scene.excuse(harm)
        await scene.up()


class KillBackup(Fault):
    name = "kill-backup"
    summary = (
        "penstock backup is killed under load up to three times, then completes; a node on the restored copy has everything"
    )
    per_round: ClassVar[int] = 4

    async def inject(self, scene: Scene) -> None:
        backup, restored = scene.directory / "backup", scene.directory / "restored"
        arguments = ["backup", "--data-dir", str(scene.data_dir), str(backup)]
        for _ in range(scene.random.randint(1, 3)):
            await kill_command(scene, *arguments)
        expected, withheld = scene.ledger.expected(lambda topic: True, now_ms=now_ms() - 1_000), scene.ledger.withheld()
        status, said = await complete(scene, *arguments)
        for _ in range(TRIES_MAX):
            if "its file secret was made anew" in said:  # by an earlier fault of this round
                shutil.rmtree(backup)
            elif "another backup" not in said:  # the node may not have noticed yet that the killed one has ended
                break
            await asyncio.sleep(0.1)
            status, said = await complete(scene, *arguments)
        if status:
            raise Broken(f"penstock backup ended with status {status}: {said[-800:]}")
        shutil.rmtree(restored, ignore_errors=True)
        status, said = await scene.command("restore", str(backup), str(restored))
        if status:
            raise Broken(f"penstock restore ended with status {status}: {said[-800:]}")
        node = ServeProcess(restored, scene.config, scene.directory / "restored.log", scene.launcher)
        try:
            scene.require_ready(await node.start())
            await scene.load.audit_copy(node, expected, withheld)
        finally:
            await node.kill()
