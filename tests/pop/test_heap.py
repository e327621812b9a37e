"""Free memory goes back to the system."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.pop.grpc.responsebytes import trim
from penstock.store.options import MIB

BLOCK = 100_000
"""Bytes of a block that glibc takes from its heap, not from the system."""


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif("CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="the C library is not glibc")
def test_the_blocks_before_one_that_is_kept_go_back() -> None:
    blocks = [bytearray(BLOCK) for _ in range(64 * MIB // BLOCK)]
    kept = blocks[-1]
    del blocks
    before = resident()
    assert trim()
    assert before - resident() > 32 * MIB
    assert len(kept) == BLOCK
