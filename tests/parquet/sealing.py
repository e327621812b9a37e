"""A real log in several sealed segments."""

from __future__ import annotations

from pathlib import Path

from penstock.store.options import KIB, StoreOptions
from tests.pop.wiring import Parts

SEGMENT_BYTES = 16 * KIB
STORE = StoreOptions(segment_bytes=SEGMENT_BYTES)

FILLER_TOPIC = "filler/1"
_FILLER = b"x" * 2000


def bases(data_dir: Path) -> list[int]:
    """Return the positions of the segments."""
    return sorted(int(path.stem) for path in (data_dir / "commitlog").glob("*.log"))


def seal(parts: Parts) -> int:
    """Publish messages that no group gets until the last segment is sealed; return how many."""
    count, before = 0, bases(parts.data_dir)[-1]
    while bases(parts.data_dir)[-1] == before:
        parts.publish(_FILLER, topic=FILLER_TOPIC)
        count += 1
    return count
