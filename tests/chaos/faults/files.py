"""Files that are missing, truncated, flipped or swapped, as a bad restore, a bad disk or an operator may leave them.

The node must refuse in words, or go on without losing more than the damage has destroyed. `penstock repair` must find the
damage.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import ClassVar

from penstock.store.syncmark import SyncMark
from tests.chaos.faults.fault import Fault
from tests.chaos.logfiles import Found, Harm, harm_of, records, segments
from tests.chaos.nodeprocess import INDEX_STATUS
from tests.chaos.scene import Broken, Scene

SOCKETS = shutil.ignore_patterns("*.sock")


async def stop_or_kill(scene: Scene) -> None:
    """End the node in order or by kill -9."""
    if scene.random.random() < 0.5:
        await scene.node.stop()
    await scene.down()


def flip(scene: Scene, path: Path, begin: int, end: int) -> int:
    """Change one byte of a range of a file; return its offset."""
    at = scene.random.randrange(begin, end)
    with path.open("r+b") as file:
        file.seek(at)
        old = file.read(1)[0]
        file.seek(at)
        file.write(bytes((old ^ 1 << scene.random.randrange(8),)))
    return at


class Undo:
    """A copy of the data directory from before the damage, which an operator would call a backup."""

    def __init__(self, scene: Scene) -> None:
        self.data_dir = scene.data_dir
        self.copy = scene.directory / "undo"
        shutil.rmtree(self.copy, ignore_errors=True)
        shutil.copytree(self.data_dir, self.copy, ignore=SOCKETS)

    def restore(self) -> None:
        shutil.rmtree(self.data_dir)
        shutil.copytree(self.copy, self.data_dir)


class LogFault(Fault):
    """Damage of the log. `damage` does it, and returns the range of positions that it destroys."""

    is_last: ClassVar[bool] = True

    async def inject(self, scene: Scene) -> None:
        await stop_or_kill(scene)
        undo = Undo(scene)
        found = list(records(scene.data_dir))
        mark = SyncMark(scene.data_dir).read()
        begin, end = self.damage(scene, found)
        harm = harm_of(found, begin, end)
        scene.outcome.notes.append(f"positions {begin} to {end}, {len(harm.keys)} messages")
        await survive(scene, undo, harm, is_tail=begin >= (mark.position if mark else 0))

    def damage(self, scene: Scene, found: list[Found]) -> tuple[int, int]:
        raise NotImplementedError


async def survive(scene: Scene, undo: Undo, harm: Harm, *, is_tail: bool) -> None:
    """Start the node on a damaged log, with the means that the operator has.

    Args:
        is_tail: all damage is above the sync mark of a node that was killed. A start may take it for what the kill has torn.
    """
    is_up = await scene.up_or_refuse()
    if is_up and is_tail:
        scene.excuse(harm)
        scene.ledger.may_repeat = True
        await scene.resume()
        return
    if is_up:  # what was durable is not read again at a start; whoever reads the damage reports it
        scene.excuse_until_repaired(harm)
        await scene.resume()
        await scene.under_load(0.1, 0.4)
        await scene.node.stop()
        await scene.load.disconnect()
        if harm.keys or harm.is_state:
            found = await scene.repair()
            if not found["damages"]:
                raise Broken("penstock repair found no damage where a start had gone on with a damaged log")
            scene.excuse(harm)
    elif scene.random.random() < 0.3:
        undo.restore()
    else:
        status, said = await scene.command("repair", "--data-dir", str(scene.data_dir), "--dry-run")
        if status != 1:
            raise Broken(f"the node refuses its log, and penstock repair --dry-run ended with status {status}: {said[-500:]}")
        status, said = await scene.command("repair", "--data-dir", str(scene.data_dir))
        if status == 0:
            scene.outcome.repaired += 1
            scene.ledger.may_repeat = True
            scene.excuse(harm)
        elif "Traceback" in said:
            raise Broken(f"penstock repair failed with status {status}: {said[-800:]}")
        else:
            scene.outcome.notes.append(said.strip().splitlines()[-1][:300])
            undo.restore()
    await scene.up()


class FlippedLog(LogFault):
    name = "flipped-log"
    summary = "one bit of a record of the log is wrong"

    def damage(self, scene: Scene, found: list[Found]) -> tuple[int, int]:
        one = scene.random.choice(found)
        path = next(path for path in reversed(segments(scene.data_dir)) if int(path.stem) <= one.position)
        flip(scene, path, one.position - int(path.stem), one.position - int(path.stem) + one.size)
        return one.position, one.position + 1


class TruncatedLog(LogFault):
    name = "truncated-log"
    summary = "a segment of the log is cut off"

    def damage(self, scene: Scene, found: list[Found]) -> tuple[int, int]:
        path = scene.random.choice(segments(scene.data_dir))
        base = int(path.stem)
        here = [one for one in found if base <= one.position < base + path.stat().st_size]
        end = here[-1].position + here[-1].size if here else base
        cut = scene.random.randint(0, end - base)
        with path.open("r+b") as file:
            file.truncate(cut)
        return base + cut, end


class MissingSegment(LogFault):
    name = "missing-segment"
    summary = "a segment of the log is missing: the first, one in the middle, or the last"

    def damage(self, scene: Scene, found: list[Found]) -> tuple[int, int]:
        paths = segments(scene.data_dir)
        path = scene.random.choice((paths[0], paths[-1], scene.random.choice(paths)))
        base, size = int(path.stem), path.stat().st_size
        path.unlink()
        ends = [one.position + one.size for one in found if base <= one.position < base + size]
        return base, max(ends, default=base)


class SwappedSegments(LogFault):
    name = "swapped-segments"
    summary = "two segments of the log have each other's names"

    def damage(self, scene: Scene, found: list[Found]) -> tuple[int, int]:
        paths = segments(scene.data_dir)
        if len(paths) < 2:
            scene.outcome.notes.append("there is one segment only")
            return 0, 0
        one, other = sorted(scene.random.sample(paths, 2))
        aside = one.with_suffix(".aside")
        one.rename(aside)
        other.rename(one)
        aside.rename(other)
        return 0, found[-1].position + found[-1].size


class HarmlessFault(Fault):
    """Damage of a file that follows from the log, or that a node can do without: nothing may be lost."""

    async def inject(self, scene: Scene) -> None:
        await stop_or_kill(scene)
        undo = Undo(scene)
        if not self.damage(scene):
            scene.outcome.notes.append("there was no such file")
        if not await self.start(scene):
            undo.restore()
            scene.require_ready(await scene.node.start())
        await scene.resume()

    async def start(self, scene: Scene) -> bool:
        """Start the node, again if it ends because of its index. Return False if it refuses in words."""
        for _ in range(3):
            start = await scene.node.start()
            if start.is_ready:
                return True
            if start.is_refusal:
                scene.outcome.refused += 1
                scene.outcome.notes.append(start.said.strip().splitlines()[-1][:300])
                return False
            if start.status != INDEX_STATUS:
                break
        raise Broken(f"the node neither started nor refused, status {start.status}: {start.said[-800:]}")

    def damage(self, scene: Scene) -> bool:
        """Damage a file. Return False if there is none."""
        raise NotImplementedError


class MissingIndex(HarmlessFault):
    name = "missing-index"
    summary = "the index is missing: it is rebuilt from the log, or from a snapshot and the log"

    def damage(self, scene: Scene) -> bool:
        shutil.rmtree(scene.data_dir / "index")
        return True


class FlippedIndex(HarmlessFault):
    name = "flipped-index"
    summary = "one bit of a file of the index is wrong"

    def damage(self, scene: Scene) -> bool:
        files = [path for path in (scene.data_dir / "index").glob("*.sst") if path.stat().st_size]
        files += [path for path in (scene.data_dir / "index").glob("MANIFEST*") if path.stat().st_size]
        if files:
            path = scene.random.choice(files)
            flip(scene, path, 0, path.stat().st_size)
        return bool(files)

    async def start(self, scene: Scene) -> bool:
        # The block may be read much later, when the node ends with the status for a damaged index.
        scene.tolerates_index_status = True
        return await super().start(scene)


class MissingIndexFile(HarmlessFault):
    name = "missing-index-file"
    summary = "one file of the index is missing"

    def damage(self, scene: Scene) -> bool:
        files = [
            path for path in (scene.data_dir / "index").iterdir() if path.suffix == ".sst" or path.name[:3] in ("MAN", "CUR")
        ]
        if files:
            scene.random.choice(files).unlink()
        return bool(files)


def damage_file(scene: Scene, path: Path, how: str) -> bool:
    """Damage a small file in the way that the name of a fault says."""
    if not path.exists():
        return False
    if how == "missing":
        path.unlink()
    elif how == "truncated":
        with path.open("r+b") as file:
            file.truncate(scene.random.randrange(path.stat().st_size))
    else:
        flip(scene, path, 0, path.stat().st_size)
    return True


class Mark(HarmlessFault):
    """Damage of the sync mark."""

    def damage(self, scene: Scene) -> bool:
        return damage_file(scene, scene.data_dir / "synced", self.name.split("-")[0])


class MissingMark(Mark):
    name = "missing-mark"
    summary = "the sync mark is missing"


class FlippedMark(Mark):
    name = "flipped-mark"
    summary = "one bit of the sync mark is wrong"


class TruncatedMark(Mark):
    name = "truncated-mark"
    summary = "the sync mark is cut off"


class SecretDamage(HarmlessFault):
    """Damage of the secret, which signs handles."""

    def damage(self, scene: Scene) -> bool:
        scene.ledger.may_repeat = True  # handles that are out fit no more, so their messages come again
        return damage_file(scene, scene.data_dir / "secret", self.name.split("-")[0])


class MissingSecret(SecretDamage):
    name = "missing-secret"
    summary = "the secret that signs handles is missing"


class FlippedSecret(SecretDamage):
    name = "flipped-secret"
    summary = "one bit of the secret that signs handles is wrong"


class TruncatedSecret(SecretDamage):
    name = "truncated-secret"
    summary = "the secret that signs handles is cut off"


class SnapshotDamage(HarmlessFault):
    """Damage of a snapshot, together with the index, which then can't be rebuilt if the beginning of the log is gone."""

    def damage(self, scene: Scene) -> bool:
        snapshots = sorted((scene.data_dir / "snapshots").glob("*.snap"))
        if not snapshots:
            return False
        if scene.random.random() < 0.5:
            shutil.rmtree(scene.data_dir / "index")
        return damage_file(scene, snapshots[-1], self.name.split("-")[0])


class MissingSnapshot(SnapshotDamage):
    name = "missing-snapshot"
    summary = "the newest snapshot is missing, in half of the cases together with the index"


class FlippedSnapshot(SnapshotDamage):
    name = "flipped-snapshot"
    summary = "one bit of the newest snapshot is wrong, in half of the cases together with a missing index"


class TruncatedSnapshot(SnapshotDamage):
    name = "truncated-snapshot"
    summary = "the newest snapshot is cut off, in half of the cases together with a missing index"
