"""A disk with a volatile write cache, in memory: `python -I -S blockdevice.py TARGET BYTES`.

The process mounts itself by FUSE on the file TARGET, which then looks like a disk image of BYTES bytes. A loop device on it is
the block device. It keeps what was flushed apart from what was only written, so that a power cut can keep any subset of the
written blocks, in any version. Writes, reads and flushes can be made to fail.

Commands are lines of JSON on standard input, and each is answered with a line of JSON on standard output:

    {"do": "load", "path": FILE}             take over an image
    {"do": "cut", "seed": S}                 the power fails: from now on every request fails
    {"do": "on"}                             the power is back
    {"do": "fail", "what": "write" or "read", "ranges": [[FROM, TO], ...], "times": N}
    {"do": "fail", "what": "flush", "times": N}
    {"do": "heal"}                           nothing fails any more
    {"do": "count"}                          how many requests have failed since the last "fail" of their kind

It imports nothing of Penstock, and no other process shares its interpreter: whoever waits for the disk may hold a lock.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import random
import select
import struct
import sys

BLOCK = 4096
WRITE_BYTES_MAX = 1 << 20

LOOKUP, FORGET, GETATTR, SETATTR, OPEN, READ, WRITE = 1, 2, 3, 4, 14, 15, 16
STATFS, RELEASE, FSYNC, FLUSH, INIT, INTERRUPT, DESTROY, BATCH_FORGET, FALLOCATE = 17, 18, 20, 25, 26, 36, 38, 42, 43

IN_HEADER = struct.Struct("<IIQQIIIHH")
OUT_HEADER = struct.Struct("<IiQ")
INIT_OUT = struct.Struct("<IIIIHHIIHHI28x")
ATTR = struct.Struct("<QQQQQQIIIIIIIIII")
ATTR_HEAD = struct.Struct("<QII")
OPEN_OUT = struct.Struct("<QII")
IO_IN = struct.Struct("<QQII")
WRITE_IN_BYTES = 40
WRITE_OUT = struct.Struct("<II")
STATFS_OUT = struct.Struct("<QQQQQIIII24x")

PROTOCOL = (7, 31)
MAX_PAGES_FLAG = 1 << 22
BIG_WRITES_FLAG = 1 << 5
DIRECT_IO = 1
FILE_MODE = 0o100600


class Cache:
    """The content of the disk: what is on it for sure, and what may be."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.now = mmap.mmap(-1, size)
        self.flushed = mmap.mmap(-1, size)
        self.versions: dict[int, list[bytes]] = {}
        """Blocks written since the last flush, with each version."""

    def write(self, offset: int, data: bytes) -> None:
        self.now[offset : offset + len(data)] = data
        for block in range(offset // BLOCK, (offset + len(data) - 1) // BLOCK + 1):
            self.versions.setdefault(block, []).append(self.now[block * BLOCK : (block + 1) * BLOCK])

    def flush(self) -> None:
        for block, versions in self.versions.items():
            self.flushed[block * BLOCK : (block + 1) * BLOCK] = versions[-1]
        self.versions.clear()

    def cut(self, seed: str) -> dict[str, int]:
        """Keep of each unflushed block its flushed version or a later one, and forget the rest."""
        chance = random.Random(seed)
        keep = chance.choice((0.0, 0.1, 0.5, 0.9, 1.0))
        blocks = len(self.versions)
        kept = 0
        for block, versions in self.versions.items():
            place = slice(block * BLOCK, (block + 1) * BLOCK)
            if chance.random() < keep:
                self.flushed[place] = versions[-1] if chance.random() < 0.7 else chance.choice(versions)
                kept += 1
            self.now[place] = self.flushed[place]
        self.versions.clear()
        return {"blocks": blocks, "kept": kept}


class Device:
    """Answers the kernel's requests and the commands."""

    def __init__(self, fuse: int, size: int) -> None:
        self.fuse = fuse
        self.cache = Cache(size)
        self.is_on = True
        self.failing: dict[str, list[tuple[int, int]]] = {"write": [], "read": []}
        self.times = {"write": 0, "read": 0, "flush": 0}
        self.failed = {"write": 0, "read": 0, "flush": 0}

    # --- the kernel's side ------------------------------------------------------------------------------------------

    def serve(self) -> None:
        buffer = bytearray(WRITE_BYTES_MAX + 64 * 1024)
        view = memoryview(buffer)
        while True:
            ready, _, _ = select.select([self.fuse, 0], [], [])
            if self.fuse in ready:
                try:
                    got = os.readv(self.fuse, [view])
                except OSError as error:
                    if error.errno == errno.ENODEV:  # unmounted
                        return
                    if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                        continue
                    raise
                self.request(view[:got])
            if 0 in ready:
                line = sys.stdin.buffer.readline()
                if not line:
                    return
                answer = json.dumps(self.command(json.loads(line)))
                sys.stdout.write(answer + "\n")
                sys.stdout.flush()

    def request(self, data: memoryview) -> None:
        _, opcode, unique, *_ = IN_HEADER.unpack_from(data)
        body = data[IN_HEADER.size :]
        if opcode in (FORGET, BATCH_FORGET, INTERRUPT):
            return
        try:
            answer = self.answer(opcode, body)
        except OSError as error:
            os.write(self.fuse, OUT_HEADER.pack(OUT_HEADER.size, -(error.errno or errno.EIO), unique))
            return
        os.writev(self.fuse, [OUT_HEADER.pack(OUT_HEADER.size + len(answer), 0, unique), answer])

    def answer(self, opcode: int, body: memoryview) -> bytes:
        if opcode == INIT:
            flags = struct.unpack_from("<IIII", body)[3] & (MAX_PAGES_FLAG | BIG_WRITES_FLAG)
            pages = WRITE_BYTES_MAX // BLOCK
            return INIT_OUT.pack(*PROTOCOL, 0, flags, 16, 12, WRITE_BYTES_MAX, 1, pages, 0, 0)
        if opcode in (GETATTR, SETATTR):
            size = self.cache.size
            attributes = (1, size, size // 512, 0, 0, 0, 0, 0, 0, FILE_MODE, 1, 0, 0, 0, BLOCK, 0)
            return ATTR_HEAD.pack(3600, 0, 0) + ATTR.pack(*attributes)
        if opcode == OPEN:
            return OPEN_OUT.pack(1, DIRECT_IO, 0)
        if opcode == STATFS:
            return STATFS_OUT.pack(self.cache.size // BLOCK, 0, 0, 1, 0, BLOCK, 255, BLOCK, 0)
        if opcode in (RELEASE, FLUSH, DESTROY):
            return b""
        if opcode in (READ, WRITE, FSYNC):
            return self.input_or_output(opcode, body)
        raise OSError(errno.EOPNOTSUPP if opcode == FALLOCATE else errno.ENOSYS, "")

    def input_or_output(self, opcode: int, body: memoryview) -> bytes:
        if not self.is_on:
            raise OSError(errno.EIO, "")
        if opcode == FSYNC:
            if self.times["flush"]:
                self.times["flush"] -= 1
                self.failed["flush"] += 1
                raise OSError(errno.EIO, "")
            self.cache.flush()
            return b""
        _, offset, size, _ = IO_IN.unpack_from(body)
        if opcode == READ:
            self.check("read", offset, size)
            return self.cache.now[offset : offset + size]
        self.check("write", offset, size)
        self.cache.write(offset, bytes(body[WRITE_IN_BYTES : WRITE_IN_BYTES + size]))
        # A disk replaces an unreadable sector by a spare one when somebody writes to it.
        self.failing["read"] = [left for one in self.failing["read"] for left in _without(one, offset, offset + size)]
        return WRITE_OUT.pack(size, 0)

    def check(self, what: str, offset: int, size: int) -> None:
        if self.times[what] and any(begin < offset + size and offset < end for begin, end in self.failing[what]):
            self.times[what] -= 1
            self.failed[what] += 1
            raise OSError(errno.EIO, "")

    # --- the tests' side --------------------------------------------------------------------------------------------

    def command(self, asked: dict[str, object]) -> dict[str, int]:
        match asked:
            case {"do": "load", "path": str(path)}:
                with open(path, "rb") as file:
                    file.readinto(self.cache.now)
                self.cache.flushed[:] = self.cache.now[:]
                self.cache.versions.clear()
            case {"do": "cut", "seed": str(seed)}:
                self.is_on = False
                return self.cache.cut(seed)
            case {"do": "on"}:
                self.is_on = True
            case {"do": "fail", "what": str(what), "times": int(times), **rest}:
                self.times[what], self.failed[what] = times, 0
                if what != "flush":
                    ranges = rest["ranges"]
                    assert isinstance(ranges, list)
                    self.failing[what] = [(begin, end) for begin, end in ranges]
            case {"do": "heal"}:
                self.times = dict.fromkeys(self.times, 0)
            case {"do": "count"}:
                return dict(self.failed)
            case _:
                raise ValueError(asked)
        return {}


def _without(one: tuple[int, int], begin: int, end: int) -> list[tuple[int, int]]:
    """Return what is left of a range without the bytes from `begin` to `end`. A block of ext4 may be smaller than a page."""
    first, last = one
    return [(low, high) for low, high in ((first, min(last, begin)), (max(first, end), last)) if low < high]


def main() -> None:
    target, size = sys.argv[1], int(sys.argv[2])
    fuse = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={fuse},rootmode={FILE_MODE:o},user_id=0,group_id=0,max_read={WRITE_BYTES_MAX}"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"chaos", target.encode(), b"fuse", 0, options.encode()):
        raise OSError(ctypes.get_errno(), f"mount of {target}: {os.strerror(ctypes.get_errno())}")
    device = Device(fuse, size)
    sys.stdout.write("{}\n")
    sys.stdout.flush()
    device.serve()


if __name__ == "__main__":
    main()
