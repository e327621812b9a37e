"""A disk with a page cache, and the files on it: what a kernel promises about them, and what it does not.

The model is as unkind as `penstock.store.files` allows:

- Bytes that were written are in the page cache. `fdatasync`, or the kernel when it likes, writes them back. A power cut keeps
  any subset of the sectors that were not written back.
- Changes of a file's size, and of the names in a directory, are in a journal. A power cut keeps any number of the first ones
  of each file and of each directory that were not synced.
- A failed write-back leaves its pages clean in the cache although the disk lacks them. The file tells that once.
- A killed process loses nothing that it has written. After a boot the cache is empty.
- A sector can become unreadable while nothing of it is in the cache. It is mended when it is written as a whole.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from penstock.backup.copying import Identity
from penstock.store.files import Mode, Usage

SECTOR_BYTES = 512
"""A power cut leaves all of a sector or nothing."""

PAGE_BYTES = 1024
"""Size of a page of the cache. It is smaller than a real one, so that small runs write many pages."""

NUMBER_OF_SECTORS = PAGE_BYTES // SECTOR_BYTES


class ProcessDead(KeyboardInterrupt):
    """Raised by whatever a process does to the world after its end. No event loop or handler of errors keeps it."""


class Inode:
    """A file: what processes see of it, and what is on the disk.

    `cache` has what processes see, and `disk` what a boot would find. Both may be shorter than the file, zeros follow.
    """

    __slots__ = (
        "allocated",
        "bad_sectors",
        "cache",
        "changes",
        "dirty",
        "disk",
        "disk_size",
        "error_is_told",
        "errors",
        "lost",
        "number",
        "resident",
        "size",
        "sizes",
        "written",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.changes = 0
        """Number of changes, in place of the time of the last one."""
        self.cache = bytearray()
        self.size = 0
        self.disk = bytearray()
        self.disk_size = 0
        self.sizes: list[int] = []
        """Sizes that the file got, in order, since they were last on disk."""
        self.dirty: set[int] = set()
        """Pages that were not written back."""
        self.lost: set[int] = set()
        """Pages whose write-back failed: clean in the cache, and not on disk."""
        self.allocated = 0
        """Pages for which the disk has room, a bit for each."""
        self.written = 0
        """Pages that are no holes, a bit for each."""
        self.bad_sectors: set[int] = set()
        self.resident: set[int] = set()
        """Pages in the cache, of a file with bad sectors."""
        self.errors = 0
        """Number of write-backs that have failed."""
        self.error_is_told = True

    def resize(self, size: int) -> None:
        """Set the size that processes see."""
        if size < self.size:
            del self.cache[size:]
            first = -(-size // PAGE_BYTES)
            below = (1 << first) - 1
            self.allocated &= below
            self.written &= below
            for pages in (self.dirty, self.lost):
                if pages:
                    pages.difference_update([page for page in pages if page >= first])
            if size % PAGE_BYTES and self.written >> (first - 1) & 1:
                self.dirty.add(first - 1)
        self.size = size
        self.sizes.append(size)
        self.changes += 1

    def put_sizes_on_disk(self, count: int) -> None:
        """Apply the first `count` changes of size that are not on disk."""
        for size in self.sizes[:count]:
            del self.disk[size:]
            self.disk_size = size
        del self.sizes[:count]

    def put_sector_on_disk(self, sector: int) -> None:
        """Write a sector back, as far as the size on disk reaches."""
        start = sector * SECTOR_BYTES
        self._put_on_disk(start, min(start + SECTOR_BYTES, self.disk_size, self.size))

    def _put_on_disk(self, start: int, stop: int) -> None:
        if start < stop:
            if len(self.disk) < start:
                self.disk.extend(bytes(start - len(self.disk)))
            self.disk[start:stop] = self.cache[start:stop].ljust(stop - start, b"\0")

    def write_back(self, pages: list[int]) -> None:
        """Write pages back, and the size of the file that they need."""
        if self.sizes:
            self.put_sizes_on_disk(len(self.sizes))
        for page in pages:
            self._put_on_disk(page * PAGE_BYTES, min((page + 1) * PAGE_BYTES, self.size))
        self.dirty.difference_update(pages)

    def fail_write_back(self, pages: list[int]) -> None:
        """Fail to write pages back: they are clean from now on, and the disk lacks them."""
        self.put_sizes_on_disk(len(self.sizes))
        self.dirty.difference_update(pages)
        self.lost.update(pages)
        self.errors += 1
        self.error_is_told = False

    def forget_cache(self) -> None:
        """Let processes see what is on disk."""
        self.cache = self.disk.copy()
        self.size = self.disk_size
        self.sizes.clear()
        self.dirty.clear()
        self.lost.clear()
        self.resident.clear()

    def copy(self, number: int) -> Inode:
        """Return another file with what processes see of this one, all of it on disk."""
        copied = Inode(number)
        copied.cache, copied.disk = self.cache.copy(), self.cache.copy()
        copied.size = copied.disk_size = self.size
        copied.allocated, copied.written = self.allocated, self.written
        return copied

    def forget_lost_pages(self) -> None:
        """Let the kernel reclaim the pages whose write-back failed: they show what is on disk again."""
        for page in sorted(self.lost):
            start, stop = page * PAGE_BYTES, min((page + 1) * PAGE_BYTES, self.size)
            if len(self.cache) < start:
                self.cache.extend(bytes(start - len(self.cache)))
            self.cache[start:stop] = self.disk[start:stop].ljust(stop - start, b"\0")
        self.lost.clear()

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes from `start` to `stop`, which is not after the end of the file."""
        data = bytes(self.cache[start:stop])
        return data if len(data) == stop - start else data.ljust(stop - start, b"\0")

    def write(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        """Put bytes into the cache."""
        cache, stop = self.cache, offset + len(data)
        if len(cache) < offset:
            cache.extend(bytes(offset - len(cache)))
        cache[offset:stop] = data
        self.changes += 1
        if stop > self.size:
            self.size = stop
            self.sizes.append(stop)
        first, last = offset // PAGE_BYTES, (stop - 1) // PAGE_BYTES
        self.written |= (2 << last) - (1 << first)
        if first == last:
            self.dirty.add(first)
        else:
            self.dirty.update(range(first, last + 1))
        if self.lost:
            self.lost.difference_update(range(first, last + 1))


class Directory:
    """A directory: the names that processes see, those on disk, and the changes that are not on disk yet."""

    __slots__ = ("_changes", "disk", "names")

    def __init__(self) -> None:
        self.names: dict[str, Node] = {}
        self.disk: dict[str, Node] = {}
        self._changes: list[dict[str, Node | None]] = []

    def change(self, changed: dict[str, Node | None]) -> None:
        """Change names in one step; None deletes a name."""
        self._changes.append(changed)
        _apply(self.names, changed)

    def put_on_disk(self, count: int | None = None) -> None:
        """Put the first `count` changes that are not on disk there; all of them by default."""
        for changed in self._changes[:count]:
            _apply(self.disk, changed)
        del self._changes[:count]

    @property
    def unsynced(self) -> int:
        """Number of changes that are not on disk."""
        return len(self._changes)

    def forget_changes(self) -> None:
        """Let processes see what is on disk."""
        self._changes.clear()
        self.names = dict(self.disk)


Node = Inode | Directory


def _apply(names: dict[str, Node], changed: dict[str, Node | None]) -> None:
    for name, node in changed.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


class Disk:
    """A disk, and the kernel's cache of it.

    Parameters:
        random: decides what a power cut keeps and which pages fail.
    """

    def __init__(self, random: Random) -> None:
        self.random = random
        self.root = Directory()
        self.boots = 1
        self.capacity_pages: int | None = None
        """Pages that files may take; None for no limit."""
        self.failing_write_backs = 0
        """Number of the next write-backs with something to write that fail."""
        self.ignores_bad_sectors = False
        """Whether everything can be read: for the oracle."""
        self._inodes = 0

    # --- what happens to a disk ---------------------------------------------------------------------------------------

    def write_back_some(self) -> None:
        """Write some dirty pages back, as the kernel does when it likes."""
        for inode in self.inodes():
            if inode.dirty and self.random.random() < 0.5:
                pages = [page for page in sorted(inode.dirty) if self.random.random() < 0.5]
                if pages and self._fails():
                    inode.fail_write_back(pages)
                elif pages:
                    inode.write_back(pages)

    def _fails(self) -> bool:
        if not self.failing_write_backs:
            return False
        self.failing_write_backs -= 1
        return True

    def cut_power(self, kept: float | None = None) -> None:
        """Keep what is on disk, and any part of what is not. The machine boots.

        Args:
            kept: share of the sectors not on disk that are kept, about; None lets the seed decide.
        """
        random = self.random
        if kept is None:
            kept = random.choice((0.0, 0.2, 0.5, 0.8, 1.0))
        seen: set[int] = set()
        for directory in list(_directories(self.root)):
            directory.put_on_disk(_some_of(random, directory.unsynced))
        for inode in self.inodes():
            if inode.number not in seen:
                seen.add(inode.number)
                self._cut_power_of(inode, kept)
        self.reboot()

    def _cut_power_of(self, inode: Inode, kept: float) -> None:
        random = self.random
        inode.put_sizes_on_disk(_some_of(random, len(inode.sizes)))
        for page in sorted(inode.dirty):
            for sector in range(page * NUMBER_OF_SECTORS, (page + 1) * NUMBER_OF_SECTORS):
                if random.random() < kept:
                    inode.put_sector_on_disk(sector)

    def shut_down(self) -> None:
        """Write everything back as an orderly end of the machine does, except pages whose write-back failed, and boot."""
        for directory in list(_directories(self.root)):
            directory.put_on_disk()
        for inode in self.inodes():
            inode.write_back(sorted(inode.dirty))
        self.reboot()

    def reboot(self) -> None:
        """Empty the cache: whoever looks finds what is on disk."""
        self.boots += 1
        for directory in list(_directories(self.root, of_disk=True)):
            directory.forget_changes()
        for inode in self.inodes():
            inode.forget_cache()
        self.failing_write_backs = 0

    def drop_clean_pages(self) -> None:
        """Let the kernel reclaim the clean pages of its cache. Pages whose write-back failed show what is on disk again."""
        for inode in self.inodes():
            inode.forget_lost_pages()

    def lose_sector(self, path: Path) -> int | None:
        """Make a sector of a file unreadable, as long as it is not written again; return its number.

        The kernel has no page of it in its cache. Pages that are not on disk stay there, and so does the last one that was
        written, so there may be no such sector.
        """
        directory = self.directory(path.parent)
        inode = directory.names[path.name]
        assert isinstance(inode, Inode)
        pages = [
            page
            for page in range(inode.written.bit_length() - 1)
            if inode.written >> page & 1 and page not in inode.dirty and page not in inode.lost
        ]
        if not pages:
            return None
        sector = self.random.choice(pages) * NUMBER_OF_SECTORS + self.random.randrange(NUMBER_OF_SECTORS)
        inode.bad_sectors.add(sector)
        inode.resident.discard(sector // NUMBER_OF_SECTORS)
        return sector

    # --- what is on it ------------------------------------------------------------------------------------------------

    def inodes(self) -> list[Inode]:
        """Return the files that have a name, in the order of their creation."""
        nodes = (node for directory in _directories(self.root) for node in directory.names.values())
        found = {node.number: node for node in nodes if isinstance(node, Inode)}
        return [found[number] for number in sorted(found)]

    def used_pages(self) -> int:
        """Return the number of pages that files take."""
        return sum(inode.allocated.bit_count() for inode in self.inodes())

    def directory(self, path: Path) -> Directory:
        """Return the directory of a path, which must exist."""
        found = self.root
        for name in _parts(path):
            node = found.names[name]
            assert isinstance(node, Directory), path
            found = node
        return found

    def is_file(self, path: Path) -> bool:
        """Return whether a path whose directory exists is that of a file."""
        return isinstance(self.directory(path.parent).names.get(path.name), Inode)

    @contextmanager
    def all_readable(self) -> Iterator[None]:
        """Let everything be read within the context."""
        self.ignores_bad_sectors = True
        try:
            yield
        finally:
            self.ignores_bad_sectors = False

    def copy_tree(self, old: Path, new: Path) -> None:
        """Copy a directory with everything in it, at once and durably."""
        parent = self.directory(new.parent)
        parent.change({new.name: self._copied(self.directory(old))})
        parent.put_on_disk()

    def _copied(self, directory: Directory) -> Directory:
        copied = Directory()
        for name, node in directory.names.items():
            copied.change({name: self._copied(node) if isinstance(node, Directory) else node.copy(self._next_number())})
        copied.put_on_disk()
        return copied

    def remove_tree(self, path: Path) -> None:
        """Delete a directory with everything in it, at once and durably."""
        parent = self.directory(path.parent)
        parent.change({path.name: None})
        parent.put_on_disk()

    def new_inode(self) -> Inode:
        """Return a new, empty file without a name."""
        return Inode(self._next_number())

    def _next_number(self) -> int:
        self._inodes += 1
        return self._inodes

    def take_room(self, inode: Inode, start: int, stop: int) -> None:
        """Give a file room for the bytes from `start` to `stop`. Raises ENOSPC."""
        pages = (1 << -(-stop // PAGE_BYTES)) - (1 << start // PAGE_BYTES)
        missing = pages & ~inode.allocated
        if missing:
            if self.capacity_pages is not None and self.used_pages() + missing.bit_count() > self.capacity_pages:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            inode.allocated |= pages

    def sync(self, inode: Inode) -> bool:
        """Write a file back; return False if that fails."""
        if inode.dirty and self._fails():
            pages = sorted(inode.dirty)
            failed = [page for page in pages if self.random.random() < 0.7] or pages[-1:]
            inode.write_back([page for page in pages if page not in failed])
            inode.fail_write_back(failed)
        else:
            inode.write_back(sorted(inode.dirty))
        return inode.error_is_told


def _some_of(random: Random, count: int) -> int:
    """Return a number from 0 to `count`; often one of both."""
    return random.choice((0, count, random.randint(0, count))) if count else 0


def _directories(directory: Directory, *, of_disk: bool = False) -> Iterator[Directory]:
    yield directory
    names = directory.disk if of_disk else directory.names
    for name in sorted(names):
        node = names[name]
        if isinstance(node, Directory):
            yield from _directories(node, of_disk=of_disk)


def _names_of(node: Node, directory: Directory) -> int:
    """Return how many names a file or directory has in and below a directory."""
    inside = list(directory.names.values())
    return sum(each is node for each in inside) + sum(_names_of(node, each) for each in inside if isinstance(each, Directory))


def _parts(path: Path) -> tuple[str, ...]:
    return path.parts[1:]


class SimulatedFiles:
    """The files of a disk as one process sees them: a `penstock.backup.copying.CopyFiles`.

    Parameters:
        disk: the disk.
        step: called before each operation, with its name. It raises ProcessDead when the process has ended.
    """

    def __init__(self, disk: Disk, step: Callable[[str], None]) -> None:
        self.disk = disk
        self._step = step

    def open(self, path: Path, mode: Mode = Mode.READ, *, permissions: int = 0o640) -> SimulatedFile:
        self._step("open")
        directory, name = self._parent(path)
        node = directory.names.get(name)
        if isinstance(node, Directory):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if node is None:
            if mode is Mode.READ:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            if self.disk.capacity_pages is not None and self.disk.used_pages() >= self.disk.capacity_pages:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            node = self.disk.new_inode()
            directory.change({name: node})
        elif mode is Mode.NEW and node.size:
            node.resize(0)
        return SimulatedFile(self.disk, node, self._step, is_durable=mode is Mode.DURABLE)

    def names(self, directory: Path) -> list[str]:
        self._step("names")
        node = self._find(directory)
        return sorted(node.names) if isinstance(node, Directory) else []

    def exists(self, path: Path) -> bool:
        self._step("exists")
        return self._find(path) is not None

    def size(self, path: Path) -> int:
        self._step("size")
        node = self._find(path)
        if not isinstance(node, Inode):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return node.size

    def rename(self, old: Path, new: Path) -> None:
        self._step("rename")
        directory, name = self._parent(old)
        target, new_name = self._parent(new)
        node = directory.names.get(name)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(old))
        if directory is target:
            directory.change({name: None, new_name: node})
            return
        target.change({new_name: node})
        target.put_on_disk()  # a journal never has one half of a rename
        directory.change({name: None})

    def link(self, old: Path, new: Path) -> None:
        self._step("link")
        node = self._find(old)
        directory, name = self._parent(new)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(old))
        if name in directory.names:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(new))
        directory.change({name: node})

    def unlink(self, path: Path) -> None:
        self._step("unlink")
        directory, name = self._parent(path)
        if name not in directory.names:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        directory.change({name: None})

    def mkdir(self, path: Path) -> None:
        self._step("mkdir")
        directory = self.disk.root
        for name in _parts(path):
            node = directory.names.get(name)
            if node is None:
                node = Directory()
                directory.change({name: node})
            if not isinstance(node, Directory):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
            directory = node

    def rmtree(self, path: Path) -> None:
        self._step("rmtree")
        directory, name = self._parent(path)
        node = directory.names.get(name)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        if isinstance(node, Directory):  # its files go one by one, so a kill may leave some
            for each in sorted(node.names):
                self._step("rmtree")
                node.change({each: None})
        directory.change({name: None})

    def sync_directory(self, path: Path) -> None:
        self._step("sync_directory")
        node = self._find(path)
        if not isinstance(node, Directory):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        node.put_on_disk()

    def usage(self, path: Path) -> Usage:
        self._step("usage")
        total = 2**40
        if self.disk.capacity_pages is None:
            return Usage(total, total)
        return Usage(max(self.disk.capacity_pages - self.disk.used_pages(), 0) * PAGE_BYTES, total)

    def boot_id(self) -> bytes:
        return f"{self.disk.boots:036d}".encode()

    def links(self, path: Path) -> int:
        self._step("links")
        node = self._find(path)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return _names_of(node, self.disk.root)

    def identity(self, path: Path) -> Identity:
        self._step("identity")
        node = self._find(path)
        if not isinstance(node, Inode):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return Identity(node.size, node.number, node.changes)

    def is_directory(self, path: Path) -> bool:
        self._step("is_directory")
        return isinstance(self._find(path), Directory)

    def clone(self, old: Path, new: Path, permissions: int) -> bool:
        return False  # as on ext4

    def _find(self, path: Path) -> Node | None:
        node: Node = self.disk.root
        for name in _parts(path):
            if not isinstance(node, Directory) or name not in node.names:
                return None
            node = node.names[name]
        return node

    def _parent(self, path: Path) -> tuple[Directory, str]:
        parts = _parts(path)
        directory = self.disk.root
        for name in parts[:-1]:
            node = directory.names.get(name)
            if not isinstance(node, Directory):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            directory = node
        return directory, parts[-1]


class SimulatedFile:
    """An open file: a `penstock.store.files.File`."""

    __slots__ = ("_disk", "_errors_seen", "_is_closed", "_is_durable", "_step", "inode")

    def __init__(self, disk: Disk, inode: Inode, step: Callable[[str], None], *, is_durable: bool) -> None:
        self.inode = inode
        self._disk = disk
        self._step = step
        self._is_durable = is_durable
        self._is_closed = False
        # Linux tells an error to each file that was open, or to the next one that is opened if nobody has heard of it.
        self._errors_seen = inode.errors if inode.error_is_told else inode.errors - 1

    def pread(self, size: int, offset: int, /) -> bytes:
        inode = self.inode
        self._check_open()
        stop = min(offset + size, inode.size)
        if offset >= stop:
            return b""
        if inode.bad_sectors and not self._disk.ignores_bad_sectors:
            self._check_readable(offset, stop)
        return inode.read(offset, stop)

    def pwrite(self, data: bytes | bytearray | memoryview, offset: int, /) -> int:
        self._step("pwrite")
        self._check_open()
        inode, size = self.inode, len(data)
        if not size:
            return 0
        self._disk.take_room(inode, offset, offset + size)
        if inode.bad_sectors:
            self._mend(offset, offset + size)
        inode.write(data, offset)
        if self._is_durable:
            self._sync()
        return size

    def _check_readable(self, start: int, stop: int) -> None:
        inode = self.inode
        for sector in range(start // SECTOR_BYTES, -(-stop // SECTOR_BYTES)):
            if sector in inode.bad_sectors and sector // NUMBER_OF_SECTORS not in inode.resident:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        inode.resident.update(range(start // PAGE_BYTES, -(-stop // PAGE_BYTES)))

    def _mend(self, start: int, stop: int) -> None:
        inode = self.inode
        for at in (start, stop - 1):
            sector = at // SECTOR_BYTES
            is_whole = start <= sector * SECTOR_BYTES and (sector + 1) * SECTOR_BYTES <= stop
            if sector in inode.bad_sectors and not is_whole and sector // NUMBER_OF_SECTORS not in inode.resident:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        inode.bad_sectors.difference_update(range(-(-start // SECTOR_BYTES), stop // SECTOR_BYTES))

    def fdatasync(self) -> None:
        self._step("fdatasync")
        self._check_open()
        self._sync()

    def _sync(self) -> None:
        inode = self.inode
        self._disk.sync(inode)
        if self._errors_seen != inode.errors:
            self._errors_seen = inode.errors
            inode.error_is_told = True
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def truncate(self, size: int, /) -> None:
        self._step("truncate")
        self._check_open()
        if size != self.inode.size:
            self.inode.resize(size)

    def allocate(self, offset: int, length: int, /) -> None:
        self._step("allocate")
        self._check_open()
        self._disk.take_room(self.inode, offset, offset + length)
        if offset + length > self.inode.size:
            self.inode.resize(offset + length)

    def size(self) -> int:
        return self.inode.size

    def data_from(self, offset: int, /) -> tuple[int, int] | None:
        first = offset // PAGE_BYTES
        written = self.inode.written >> first
        if not written:
            return None
        skipped = (written & -written).bit_length() - 1
        following = ~(written >> skipped)
        count = (following & -following).bit_length() - 1
        start = first + skipped
        return max(start * PAGE_BYTES, offset), min((start + count) * PAGE_BYTES, self.inode.size)

    def block_bytes(self) -> int:
        return PAGE_BYTES

    def fileno(self) -> int:
        raise OSError(errno.ENOTSUP, "a simulated file has no descriptor")

    def close(self) -> None:
        self._is_closed = True

    def _check_open(self) -> None:
        if self._is_closed:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
