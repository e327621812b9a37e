"""Places for a data directory: a plain directory, a simulated disk with ext4, or a small file system that fills up."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import struct
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

DISK_BYTES = 256 << 20
SMALL_BYTES = 128 << 20
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
DEVICE = Path(__file__).with_name("blockdevice.py")

FIEMAP = 0xC020_660B
FIEMAP_HEAD = struct.Struct("<QQIIII")
FIEMAP_EXTENT = struct.Struct("<QQQ16xI12x")
EXTENTS_MAX = 64

TRIES = 20


def missing_for_disks() -> str:
    """Return why this machine can't simulate a disk, or an empty string."""
    if os.geteuid():
        return "only root may mount file systems"
    if not Path("/dev/fuse").exists() or not Path("/dev/loop-control").exists():
        return "the kernel has no FUSE or no loop devices"
    absent = [tool for tool in ("losetup", "mkfs.ext4", "mount", "umount") if shutil.which(tool) is None]
    return f"{', '.join(absent)} is not installed" if absent else ""


def missing_for_mounts() -> str:
    return "only root may mount file systems" if os.geteuid() else ""


class Disk:
    """A simulated disk with ext4 on it, mounted at `path`.

    Parameters:
        directory: for the files of the disk. The process must have mounts of its own (`campaign.hide_mounts`).
    """

    def __init__(self, directory: Path, size: int = DISK_BYTES) -> None:
        self.path = directory / "disk"
        self.size = size
        self._target = directory / "blocks"
        self._image = directory / "image"
        self._boot_id = directory / "boot_id"
        self._process: asyncio.subprocess.Process | None = None
        self._is_mounted = False

    async def create(self) -> None:
        """Make the disk, format and mount it."""
        assert os.readlink("/proc/self/ns/mnt") != os.readlink(f"/proc/{os.getppid()}/ns/mnt"), "mounts would be seen"
        self.path.mkdir()
        self._target.touch()
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-I", "-S", str(DEVICE), str(self._target), str(self.size)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        await self._answer()
        with self._image.open("wb") as image:
            image.truncate(self.size)
        eager = "lazy_itable_init=0,lazy_journal_init=0,nodiscard"
        await _run("mkfs.ext4", "-q", "-F", "-e", "remount-ro", "-E", eager, str(self._image))
        await self.command(do="load", path=str(self._image))
        self._image.unlink()
        await self.boot()

    async def command(self, **asked: Any) -> dict[str, int]:
        """Give the disk a command, which `blockdevice.py` describes."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        return await self._answer()

    async def _answer(self) -> dict[str, int]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        assert line, "the process of the disk has died"
        answer: dict[str, int] = json.loads(line)
        return answer

    async def cut_power(self, seed: str) -> dict[str, int]:
        """Let the power fail. Whoever uses the disk gets errors until `boot`."""
        return await self.command(do="cut", seed=seed)

    async def unmount(self) -> None:
        """Unmount the file system, which nobody may use any more."""
        if self._is_mounted:
            await _run("umount", str(self.path), tries=TRIES)
            self._is_mounted = False

    async def boot(self) -> None:
        """Mount the file system as a machine does that has just booted: with nothing in the page cache, and a new boot id."""
        await self.unmount()
        await self.command(do="on")
        await self.mount()
        self._boot_id.write_text(f"{uuid.uuid4()}\n")
        await _run("umount", str(BOOT_ID), check=False)
        await _run("mount", "--bind", str(self._boot_id), str(BOOT_ID))

    async def mount(self) -> None:
        await _run("mount", "-t", "ext4", "-o", "loop,noatime,nodiscard", str(self._target), str(self.path), tries=TRIES)
        self._is_mounted = True

    def blocks_of(self, path: Path, begin: int, end: int) -> list[list[int]]:
        """Return where a range of a file is on the disk, as pairs of first byte and end."""
        handle = os.open(path, os.O_RDONLY)
        try:
            asked = FIEMAP_HEAD.pack(begin, end - begin, 0, 0, EXTENTS_MAX, 0)
            buffer = bytearray(asked + bytes(FIEMAP_EXTENT.size * EXTENTS_MAX))
            fcntl.ioctl(handle, FIEMAP, buffer)
        finally:
            os.close(handle)
        found = []
        for number in range(FIEMAP_HEAD.unpack_from(buffer)[3]):
            logical, physical, length, _ = FIEMAP_EXTENT.unpack_from(buffer, FIEMAP_HEAD.size + number * FIEMAP_EXTENT.size)
            first, last = max(logical, begin), min(logical + length, end)
            if physical and first < last:
                found.append([physical + first - logical, physical + last - logical])
        return found

    async def close(self) -> None:
        if self._process is None:
            return
        await _run("umount", str(BOOT_ID), check=False)
        if self._process.returncode is None:
            await self.command(do="heal")
            await self.command(do="on")
        await _run("umount", str(self.path), check=False)
        await _run("umount", str(self._target), check=False, tries=TRIES)
        if self._process.returncode is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            await self._process.wait()


class SmallDisk:
    """A file system of a few MiB, which fills up: tmpfs, or ext4 in a file.

    Parameters:
        path: where it is mounted.
        kind: "tmpfs" or "ext4".
    """

    def __init__(self, path: Path, kind: str, size: int = SMALL_BYTES) -> None:
        self.path = path
        self.kind = kind
        self.size = size
        self._image = path.with_name("image")

    async def create(self) -> None:
        assert os.readlink("/proc/self/ns/mnt") != os.readlink(f"/proc/{os.getppid()}/ns/mnt"), "mounts would be seen"
        self.path.mkdir(parents=True)
        if self.kind == "tmpfs":
            await _run("mount", "-t", "tmpfs", "-o", f"size={self.size}", "chaos", str(self.path))
            return
        with self._image.open("wb") as image:
            image.truncate(self.size)
        await _run("mkfs.ext4", "-q", "-F", "-m", "0", "-E", "lazy_itable_init=0,lazy_journal_init=0", str(self._image))
        await _run("mount", "-t", "ext4", "-o", "loop", str(self._image), str(self.path), tries=TRIES)

    def free_bytes(self) -> int:
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    async def close(self) -> None:
        await _run("umount", str(self.path), check=False, tries=TRIES)


async def _run(*command: str, tries: int = 1, check: bool = True) -> None:
    """Run a command of the system. Loop devices and mounts may be busy for a moment, so some commands are tried again."""
    for attempt in range(tries):
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        said, _ = await process.communicate()
        if process.returncode == 0:
            return
        if attempt + 1 < tries:
            await asyncio.sleep(0.1)
    if check:
        raise OSError(f"{' '.join(command)} failed: {said.decode(errors='replace').strip()}")
