"""Files that are missing, truncated, flipped or swapped, as a bad restore, a bad disk or an operator may leave them.

The node must refuse in words, or go on without losing more than the damage has destroyed. `penstock repair` must find the
damage.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import ClassVar

from penstock.pop.core.handle import SECRET
from penstock.store import timekeeping
from penstock.store.log import syncmark
from penstock.store.log.syncmark import SyncMark
from tests.chaos.faults.fault import Fault
from tests.chaos.logfiles import Found, Harm, harm_of, records, segments
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
    """Damage of the log. `damage` does it, and returns the ranges of positions that it destroys, one for each fault."""

    is_last: ClassVar[bool] = True

    async def inject(self, scene: Scene) -> None:
        await stop_or_kill(scene)
        undo = Undo(scene)
        found = list(records(scene.data_dir))
        mark = SyncMark(scene.data_dir).read()
        ranges = self.damage(scene, found)
        if not ranges:
            scene.outcome.notes.append("there was nothing to damage")
        scene.outcome.injected += len(ranges)
        harm = harm_of(found, *ranges)
        places = ", ".join(f"{begin} to {end}" for begin, end in ranges)
        scene.outcome.notes.append(f"positions {places}, {len(harm.keys)} messages")
        durable = mark.position if mark else 0
        await survive(scene, undo, harm, is_tail=all(begin >= durable for begin, _ in ranges))

    def damage(self, scene: Scene, found: list[Found]) -> list[tuple[int, int]]:
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


def flip_records(scene: Scene, found: list[Found], most: int) -> list[tuple[int, int]]:
    """Flip one bit of each of up to `most` records of the log; return a position in each."""
    chosen = scene.random.sample(found, min(scene.random.randint(1, most), len(found)))
    for one in chosen:
        path = next(path for path in reversed(segments(scene.data_dir)) if int(path.stem) <= one.position)
        flip(scene, path, one.position - int(path.stem), one.position - int(path.stem) + one.size)
    return [(one.position, one.position + 1) for one in chosen]


class FlippedLog(LogFault):
    name = "flipped-log"
    summary = "one bit of each of up to five records of the log is wrong"

    def damage(self, scene: Scene, found: list[Found]) -> list[tuple[int, int]]:
        return flip_records(scene, found, 5)


class TruncatedLog(LogFault):
    name = "truncated-log"
    summary = "one or two segments of the log are cut off"
    log: ClassVar[str] = "segments"

    def damage(self, scene: Scene, found: list[Found]) -> list[tuple[int, int]]:
        paths = segments(scene.data_dir)
        return [
            self._cut(scene, path, found) for path in scene.random.sample(paths, min(scene.random.randint(1, 2), len(paths)))
        ]

    def _cut(self, scene: Scene, path: Path, found: list[Found]) -> tuple[int, int]:
        base, end = _extent(path, found)
        cut = scene.random.randint(0, end - base)
        with path.open("r+b") as file:
            file.truncate(cut)
        return base + cut, end


class MissingSegment(LogFault):
    name = "missing-segment"
    summary = "one or two segments of the log are missing, often the first or the last"
    log: ClassVar[str] = "segments"

    def damage(self, scene: Scene, found: list[Found]) -> list[tuple[int, int]]:
        paths = segments(scene.data_dir)
        chosen = {
            scene.random.choice((paths[0], paths[-1], scene.random.choice(paths))) for _ in range(scene.random.randint(1, 2))
        }
        ranges = [_extent(path, found) for path in sorted(chosen)]
        for path in chosen:
            path.unlink()
        return ranges


def _extent(path: Path, found: list[Found]) -> tuple[int, int]:
    """Return where a segment begins and where its last record ends."""
    base, size = int(path.stem), path.stat().st_size
    ends = [one.position + one.size for one in found if base <= one.position < base + size]
    return base, max(ends, default=base)


class SwappedSegments(LogFault):
    name = "swapped-segments"
    summary = "two segments of the log have each other's names"
    log: ClassVar[str] = "segments"

    def damage(self, scene: Scene, found: list[Found]) -> list[tuple[int, int]]:
        return [(0, found[-1].position + found[-1].size)] if swap(scene, segments(scene.data_dir)) else []


def swap(scene: Scene, paths: list[Path]) -> bool:
    """Give two files each other's names. Return False if there is one at most."""
    if len(paths) < 2:
        return False
    one, other = scene.random.sample(paths, 2)
    aside = one.with_suffix(".aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)
    return True


class HarmlessFault(Fault):
    """Damage of a file that follows from the log, or that a node can do without: nothing may be lost."""

    async def inject(self, scene: Scene) -> None:
        await stop_or_kill(scene)
        undo = Undo(scene)
        if self.damage(scene):
            scene.outcome.injected += 1
        else:
            scene.outcome.notes.append("there was no such file")
        if not await scene.up_or_refuse():
            undo.restore()
            if not await scene.up_or_refuse():
                raise Broken(f"the node refuses what it had before the damage: {scene.outcome.notes[-1]}")
        await scene.resume()

    def damage(self, scene: Scene) -> bool:
        """Damage a file. Return False if there is none."""
        raise NotImplementedError


class MissingIndex(HarmlessFault):
    name = "missing-index"
    summary = "the index is missing: it is rebuilt from the log, or from a snapshot and the log"

    def damage(self, scene: Scene) -> bool:
        shutil.rmtree(scene.data_dir / "index")
        return True


class IndexDamage(HarmlessFault):
    """Damage of a file of the index. It may be read much later, when the node ends with the status for a damaged index."""

    def damage(self, scene: Scene) -> bool:
        scene.tolerates_index_status = True
        files = [
            path for path in (scene.data_dir / "index").iterdir() if path.suffix == ".sst" or path.name[:3] in ("MAN", "CUR")
        ]
        return self.damage_one(scene, sorted(path for path in files if path.stat().st_size))

    def damage_one(self, scene: Scene, files: list[Path]) -> bool:
        how = self.name.split("-")[0]
        return bool(files) and damage_file(scene, scene.random.choice(files), how)


class FlippedIndex(IndexDamage):
    name = "flipped-index"
    summary = "one bit of a file of the index is wrong"


class TruncatedIndex(IndexDamage):
    name = "truncated-index"
    summary = "a file of the index is cut off"


class MissingIndexFile(IndexDamage):
    name = "missing-index-file"
    summary = "a file of the index is missing"


class SwappedIndex(IndexDamage):
    name = "swapped-index"
    summary = "two tables of the index have each other's names"

    def damage_one(self, scene: Scene, files: list[Path]) -> bool:
        return swap(scene, [path for path in files if path.suffix == ".sst"])


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


class SmallFileDamage(HarmlessFault):
    """Damage of one small file of the data directory, in the way that the name of the fault says."""

    file: ClassVar[str]
    """Its name."""

    def damage(self, scene: Scene) -> bool:
        if self.file == SECRET:
            scene.ledger.may_repeat = True  # handles that are out fit no more, so their messages come again
        return damage_file(scene, scene.data_dir / self.file, self.name.split("-")[0])


class MissingMark(SmallFileDamage):
    name = "missing-mark"
    summary = "the sync mark is missing"
    file = syncmark.FILE


class FlippedMark(SmallFileDamage):
    name = "flipped-mark"
    summary = "one bit of the sync mark is wrong"
    file = syncmark.FILE


class TruncatedMark(SmallFileDamage):
    name = "truncated-mark"
    summary = "the sync mark is cut off"
    file = syncmark.FILE


class MissingSecret(SmallFileDamage):
    name = "missing-secret"
    summary = "the secret that signs handles is missing"
    file = SECRET


class FlippedSecret(SmallFileDamage):
    name = "flipped-secret"
    summary = "one bit of the secret that signs handles is wrong"
    file = SECRET


class TruncatedSecret(SmallFileDamage):
    name = "truncated-secret"
    summary = "the secret that signs handles is cut off"
    file = SECRET


class MissingClock(SmallFileDamage):
    name = "missing-clock"
    summary = "the file that holds the node's time is missing"
    file = timekeeping.FILE


class FlippedClock(SmallFileDamage):
    name = "flipped-clock"
    summary = "one bit of the file that holds the node's time is wrong"
    file = timekeeping.FILE


class TruncatedClock(SmallFileDamage):
    name = "truncated-clock"
    summary = "the file that holds the node's time is cut off"
    file = timekeeping.FILE


class SnapshotDamage(HarmlessFault):
    """Damage of a snapshot, together with the index, which then can't be rebuilt if the beginning of the log is gone."""

    log: ClassVar[str] = "retention"

    def damage(self, scene: Scene) -> bool:
        snapshots = sorted((scene.data_dir / "snapshots").glob("*.snap"))
        if not self.damage_one(scene, snapshots):
            return False
        if scene.random.random() < 0.5:
            shutil.rmtree(scene.data_dir / "index")
        return True

    def damage_one(self, scene: Scene, snapshots: list[Path]) -> bool:
        return bool(snapshots) and damage_file(scene, snapshots[-1], self.name.split("-")[0])


class MissingSnapshot(SnapshotDamage):
    name = "missing-snapshot"
    summary = "the newest snapshot is missing, in half of the cases together with the index"


class FlippedSnapshot(SnapshotDamage):
    name = "flipped-snapshot"
    summary = "one bit of the newest snapshot is wrong, in half of the cases together with a missing index"


class TruncatedSnapshot(SnapshotDamage):
    name = "truncated-snapshot"
    summary = "the newest snapshot is cut off, in half of the cases together with a missing index"


class SwappedSnapshots(SnapshotDamage):
    name = "swapped-snapshots"
    summary = "two snapshots have each other's names, in half of the cases together with a missing index"

    def damage_one(self, scene: Scene, snapshots: list[Path]) -> bool:
        return swap(scene, snapshots)
