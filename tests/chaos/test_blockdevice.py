"""The disk that the faults of disks are injected into."""

from __future__ import annotations

import pytest

from tests.chaos.blockdevice import IO_IN, READ, WRITE, WRITE_IN_BYTES, Device

pytestmark = pytest.mark.nightly

KIB = 1024
FAILING = (5 * KIB, 9 * KIB)


def request(opcode: int, begin: int, end: int) -> tuple[int, memoryview]:
    """Return a request of the kernel to read or write a range."""
    head = IO_IN.pack(0, begin, end - begin, 0).ljust(WRITE_IN_BYTES, b"\0")
    return opcode, memoryview(head + (b"x" * (end - begin) if opcode == WRITE else b""))


@pytest.fixture
def device() -> Device:
    """A disk with a range that can't be read. It is not mounted."""
    device = Device(-1, 64 * KIB)
    device.command({"do": "fail", "what": "read", "ranges": [list(FAILING)], "times": 100})
    return device


@pytest.mark.parametrize(
    ("begin", "end", "left"),
    [
        (4, 8, [(8, 9)]),
        (8, 12, [(5, 8)]),
        (6, 7, [(5, 6), (7, 9)]),
        (4, 12, []),
        (0, 5, [(5, 9)]),
        (9, 12, [(5, 9)]),
    ],
)
def test_a_write_replaces_exactly_those_sectors_that_it_covers(
    device: Device, begin: int, end: int, left: list[tuple[int, int]]
) -> None:
    device.input_or_output(*request(WRITE, begin * KIB, end * KIB))
    unreadable = []
    for block in range(64):
        try:
            device.input_or_output(*request(READ, block * KIB, (block + 1) * KIB))
        except OSError:
            unreadable.append(block)
    assert unreadable == [block for first, last in left for block in range(first, last)]
