"""Where one round takes place: a data directory, a node, its clients, and what the faults may do with them."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import orjson

from penstock import PopError
from tests.bounds import write_bounds
from tests.chaos.disk import Disk, SmallDisk
from tests.chaos.launching import Launcher
from tests.chaos.ledger import Ledger
from tests.chaos.load import SEGMENT_BYTES, Load
from tests.chaos.logfiles import Harm
from tests.chaos.nodeprocess import ANEW, FAILED_STATUS, INDEX_STATUS, ServeProcess, Start, run_command
from tests.system.timeofday import TimeOfDay

CONFIG = """
[store]
segment_bytes = {segment_bytes}
retention_bytes = {retention_bytes}
reserve_bytes = {reserve_bytes}
{store}

[mqtt]
share_ack_timeout = "1500ms"
sys_interval = 0

[tables]
enabled = "off"
"""


INDEX_BYTES = 4 << 20
ROOM_S_MAX = 20.0
"""Size of the file system of an index that fills up."""


SMALL, LARGE, LARGEST = (30, 400), (2_000, 9_000), (8_000, 24_000)
"""Bounds of the sizes of MQTT messages, in bytes: with larger ones the log has more segments."""

INDEX_STARTS_MAX = 4
"""Starts that may end with the status for a damaged index, one after the other."""


class Broken(Exception):
    """Raised when the node does what no fault excuses, so that the round can't go on."""


@dataclass
class Outcome:
    """What one fault did."""

    fault: str
    injected: int = 0
    """How often it was injected: see `Fault`."""
    acked: int = 0
    """Messages that the node acknowledged from this fault to the next one, or to the end."""
    refused: int = 0
    """Starts that the node refused in words."""
    repaired: int = 0
    """Runs of `penstock repair` that found damage."""
    excused: int = 0
    """Acknowledged messages that the injected damage destroyed, and that were reported."""
    repeats: int = 0
    """Deliveries at QoS 1 that came again after the fault."""
    unmarked: int = 0
    """How many of the repeats came without DUP."""
    problems: int = 0
    notes: list[str] = field(default_factory=list)


class Scene:
    """The node of a round, its clients and its ledger.

    Parameters:
        directory: for this round alone.
        random: decides everything that is left to chance.
        launcher: starts nodes and commands, unless the node has a clock of its own.
        store_options: further lines of the section `[store]`.
        on: where the data directory is (`Fault.on`).
        log: what the log must have (`Fault.log`).
        small: keep the load small.
    """

    def __init__(
        self,
        directory: Path,
        random: Random,
        launcher: Launcher = ANEW,
        *,
        store_options: str = "",
        on: str = "directory",
        log: str = "",
        small: bool = False,
    ) -> None:
        self.directory = directory
        self.random = random
        self.ledger = Ledger()
        has_retention = log == "retention" or (not small and random.random() < 0.3)
        retention_bytes = (6 << 20 if log else 3 << 20) if has_retention else 0
        large = has_retention or (not small and random.random() < 0.2)
        body_bytes = LARGEST if log else LARGE if large else SMALL
        self.config = directory / "penstock.toml"
        self.config.write_text(
            CONFIG.format(
                segment_bytes=SEGMENT_BYTES,
                retention_bytes=retention_bytes,
                reserve_bytes=random.choice((0, 8 << 20)) if on in ("tmpfs", "ext4") else 0,
                store=store_options,
            )
        )
        write_bounds(self.config, store__index_flush_ms=random.choice((200, 1_000, 30_000)))
        self.disk = Disk(directory) if on == "disk" else None
        self.ledger.may_lose_power = self.disk is not None
        self.clock = TimeOfDay(directory) if on == "clock" else None
        self.small_disk: SmallDisk | None = None
        self.data_dir = (self.disk.path if self.disk else directory) / "data"
        if on in ("tmpfs", "ext4"):
            self.small_disk = SmallDisk(directory / "disk", on)
            self.data_dir = self.small_disk.path / "data"
        elif on == "index":
            self.small_disk = SmallDisk(self.data_dir / "index", "tmpfs", INDEX_BYTES)
        self._place = self.disk or self.small_disk
        self._owned = launcher.within(self.clock.environment) if self.clock else None
        self.launcher = self._owned or launcher
        self.node = ServeProcess(self.data_dir, self.config, directory / "node.log", self.launcher)
        self.load = Load(self.ledger, random, body_bytes=body_bytes, retention_bytes=retention_bytes)
        self.outcome = Outcome("")
        self.tolerates_index_status = False
        """Whether the node may end at any time with the status for a damaged index, which was injected."""

    async def begin(self) -> None:
        """Start the node and all clients."""
        if self._place is not None:
            await self._place.create()
        self.require_ready(await self.node.start())
        await self.load.prepare(self.node)
        self.load.connect(self.node)

    async def under_load(self, least_s: float = 0.05, most_s: float = 0.5) -> None:
        """Let the clients work for a random time."""
        await asyncio.sleep(self.random.uniform(least_s, most_s))
        self.load.check_tasks()
        if self.tolerates_index_status and not self.node.is_running:
            await self.load.disconnect()
            await self.up_after_index_status()

    def require_ready(self, start: Start) -> None:
        if not start.is_ready:
            raise Broken(f"the node did not start, status {start.status}: {start.said[-800:]}")

    async def down(self) -> None:
        """Kill the node, and end the calls of its clients."""
        await self.node.kill()
        await self.load.disconnect()

    async def require_sync(self) -> None:
        """Check that the node has a process that syncs. A node that has ended because of its index is started again first."""
        if self.tolerates_index_status and not self.node.is_running:
            await self.load.disconnect()
            await self.up_after_index_status()
        if not self.node.sync_pid:
            raise Broken("the node has no process that syncs")

    async def wait_for_room(self) -> None:
        """Wait until the node stores everything again, which it must do soon after its disk has room."""
        try:
            async with asyncio.timeout(ROOM_S_MAX):
                while not await self.load.has_room(self.node):  # noqa: ASYNC110 - of another process
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise Broken(f"the node still refuses messages {ROOM_S_MAX} s after its disk had room again") from None

    async def require_failed(self, why: str) -> None:
        """Wait until the node has ended by itself with the status for a failed disk."""
        try:
            status = await self.node.ended()
        except TimeoutError:
            raise Broken(f"the node still runs after {why}") from None
        if status != FAILED_STATUS and not (self.tolerates_index_status and status == INDEX_STATUS):
            raise Broken(f"the node ended with status {status} in place of {FAILED_STATUS} after {why}")
        await self.load.disconnect()

    async def up(self) -> None:
        """Start the node, which must succeed, audit the log, and let the clients go on."""
        self.require_ready(await self.node.start())
        await self.resume()

    async def up_after_index_status(self) -> None:
        """Start a node that ended because of its index, or that may end so now; audit the log, and let the clients go on."""
        for _ in range(INDEX_STARTS_MAX):
            if self.node.is_started and (status := await self.node.ended()) not in (INDEX_STATUS, -signal.SIGKILL, 0):
                raise Broken(f"the node ended with status {status} because of its index: {self.node.log.read_text()[-800:]}")
            start = await self.node.start()
            if start.status == INDEX_STATUS:
                continue
            self.require_ready(start)
            try:
                await self.load.audit(self.node)
            except (PopError, OSError):
                if not await self._has_damaged_index():
                    raise
                continue
            self.load.connect(self.node)
            return
        raise Broken(f"the node still ends because of its index after {INDEX_STARTS_MAX} starts")

    async def resume(self) -> None:
        """Audit the log of a node that is ready, and let the clients go on."""
        try:
            await self.load.audit(self.node)
        except (PopError, OSError):
            if not await self._has_damaged_index():
                raise
            await self.up_after_index_status()
            return
        self.load.connect(self.node)

    async def _has_damaged_index(self) -> bool:
        """Return whether the node has ended with the status for an index that this round has damaged."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                return self.tolerates_index_status and await self.node.ended() == INDEX_STATUS
        return False

    async def up_or_refuse(self) -> bool:
        """Start the node, which may refuse in words. Return whether it is ready."""
        start = await self.node.start()
        for _ in range(INDEX_STARTS_MAX):
            if start.status != INDEX_STATUS or not self.tolerates_index_status:
                break
            start = await self.node.start()
        if start.is_ready:
            return True
        if not start.is_refusal:
            raise Broken(f"the node neither started nor refused, status {start.status}: {start.said[-800:]}")
        self.outcome.refused += 1
        self.outcome.notes.append(start.said.strip().splitlines()[-1][:300])
        return False

    async def command(self, *arguments: str) -> tuple[int, str]:
        """Run a command of `penstock`; return its exit status and all that it printed."""
        return await run_command(*arguments, launcher=self.launcher)

    async def repair(self) -> dict[str, Any]:
        """Repair the data directory of the stopped node; return what the command found."""
        status, said = await self.command("repair", "--data-dir", str(self.data_dir), "--json")
        if status:
            raise Broken(f"penstock repair ended with status {status}: {said[-800:]}")
        found: dict[str, Any] = orjson.loads(said.strip().splitlines()[-1])
        if found["damages"]:
            self.outcome.repaired += 1
            self.ledger.may_repeat = True
        return found

    async def end(self) -> None:
        """Drain, judge, and stop the node in order."""
        try:
            await self.load.drain(self.node)
        except (PopError, OSError):
            if not await self._has_damaged_index():
                raise
            await self.load.disconnect()
            await self.up_after_index_status()
            await self.load.drain(self.node)
        await self.load.look_up_start(self.node)
        self.ledger.judge(now_ms=2**62)
        await self.load.close()
        status = await self.node.stop()
        if status:
            raise Broken(f"the node ended with status {status} after SIGTERM: {self.node.log.read_text()[-800:]}")

    async def close(self) -> None:
        await self.load.close()
        await self.node.kill()
        if self._owned is not None:
            await self._owned.close()
        if self._place is not None:
            if self.ledger.problems:
                self._keep()
            await self._place.close()

    def _keep(self) -> None:
        """Copy the data directory off a disk that ends with the round."""
        with contextlib.suppress(OSError, shutil.Error):
            shutil.copytree(self.data_dir, self.directory / "data", ignore=shutil.ignore_patterns("*.sock"))

    def excuse_until_repaired(self, harm: Harm) -> None:
        """Expect no more what damage has destroyed, while the node runs with it. The state is whole, as the index has it."""
        self.ledger.excused |= harm.keys

    def excuse(self, harm: Harm) -> None:
        """Expect no more what damage has destroyed, and sessions and groups neither if it has destroyed state."""
        self.outcome.excused += sum(self.ledger.publications[key].is_acked for key in harm.keys)
        self.ledger.excused |= harm.keys
        if harm.is_state:
            self.ledger.lose_state()

    def remove(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
