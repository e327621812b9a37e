"""File descriptors: how many the process may have, and how many of them the store needs.

When the process has none left, opening a file fails with EMFILE (ENFILE where the whole system has none left). That says
nothing about the disk, so the store never takes it for a failed disk: what needed the descriptor waits. Whoever accepts
connections leaves the share of the store free.
"""

from __future__ import annotations

import resource
from typing import Final

INDEX_FILES_MAX: Final = 512
"""Maximum number of files that RocksDB keeps open. Each keeps its bloom filter and its index in memory: about 2.5 MB for a file
of 64 MB. So an index of 1 GB takes 40 MB, and no index more than 1.3 GB. Partitioned filters and indexes would be bounded by
the block cache, but then a lookup would need three cached blocks instead of one."""

INDEX_DIVISOR: Final = 8
"""Where descriptors are few, RocksDB keeps no more files open than the limit divided by this."""

LOG_FILES_MAX: Final = 64
"""Maximum number of sealed segments that stay open. Each costs a descriptor."""

OTHERS: Final = 128
"""Descriptors for all else that is open at a time: listeners, the event loop, threads and polls of gRPC, the
process that syncs, what RocksDB writes, snapshots, the sync mark, directories, a backup, plugins, the log."""

UNLIMITED: Final = 1 << 30
"""The limit that is assumed if the system sets none."""


def descriptor_limit() -> int:
    """Return how many descriptors this process may have (the soft limit of RLIMIT_NOFILE)."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def index_files_max(limit: int) -> int:
    """Return how many files RocksDB may keep open in a process that may have `limit` descriptors."""
    return max(min(INDEX_FILES_MAX, limit // INDEX_DIVISOR), 1)


def store_share(limit: int) -> int:
    """Return how many descriptors the store and the node itself may need in a process that may have `limit`."""
    return index_files_max(limit) + LOG_FILES_MAX + OTHERS
