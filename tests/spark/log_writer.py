"""Writes logs record by record with `store.record.encode`, for tests that must know every byte."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from penstock.store import record
from penstock.store.bodies import CHANGE_ENTRY, CHECKPOINT_ENTRY, REFERENCE, backoff_code
from penstock.store.record import POP_FIXED, Kind, Record

Reference = tuple[int, int]
"""Position of the checkpoint, index in it."""


@dataclass
class LogWriter:
    """A log under construction, in memory until `save`. `now_ms` is the store time of the next record."""

    now_ms: int = 1_000
    start: int = 0
    segments: list[bytearray] = field(default_factory=lambda: [bytearray()])

    @property
    def end(self) -> int:
        return self.start + sum(map(len, self.segments))

    def roll(self) -> None:
        """Begin a new segment."""
        self.segments.append(bytearray())

    def add(
        self, kind: Kind, topic: str = "", body: bytes = b"", *, fixed: bytes = b"", properties: bytes = b"", flags: int = 0
    ) -> int:
        position = self.end
        self.segments[-1] += record.encode(
            kind, topic.encode(), body, store_ms=self.now_ms, fixed=fixed, properties=properties, flags=flags
        )
        return position

    def message(self, topic: str, body: bytes = b"21.5", flags: int = 1) -> int:
        return self.add(Kind.MESSAGE, topic, body, flags=flags)

    def group(self, group_id: int, name: str, filter_: str) -> int:
        properties = json.dumps({"group": name, "filter": filter_}).encode()
        return self.add(Kind.GROUP_CREATED, name, fixed=POP_FIXED.pack(group_id, 1, 0), properties=properties)

    def change_settings(self, group_id: int, name: str, **settings: object) -> int:
        properties = json.dumps({"settings": settings}).encode()
        return self.add(Kind.GROUP_CHANGED, name, fixed=POP_FIXED.pack(group_id, 1, 0), properties=properties)

    def checkpoint(
        self, group_id: int, name: str, messages: list[int], *, deadline_ms: int, attempt: int = 1, backoff_ms: int = 0
    ) -> int:
        code = backoff_code(backoff_ms)
        body = b"".join(
            CHECKPOINT_ENTRY.pack(message, offset, 64, attempt, attempt > 1, code) for offset, message in enumerate(messages)
        )
        return self.add(Kind.POP_CHECKPOINT, name, body, fixed=POP_FIXED.pack(group_id, 1, deadline_ms))

    def settle(self, kind: Kind, group_id: int, name: str, references: list[Reference], flags: int = 0) -> int:
        body = b"".join(REFERENCE.pack(*reference) for reference in references)
        properties = b'{"cursor": 0}' if kind == Kind.GROUP_OFFSET_RESET else b""
        return self.add(kind, name, body, fixed=POP_FIXED.pack(group_id, 1, 0), properties=properties, flags=flags)

    def ack(self, group_id: int, name: str, references: list[Reference]) -> int:
        return self.settle(Kind.POP_ACK, group_id, name, references)

    def change(
        self,
        group_id: int,
        name: str,
        references: list[tuple[Reference, int]],
        *,
        deadline_ms: int,
        attempt: int = 1,
        flags: int = 0,
    ) -> int:
        """Change the invisible time of deliveries. Each comes with the position of its message. See `Flag` for `flags`."""
        body = b"".join(
            CHANGE_ENTRY.pack(*reference, message, 0, 64, attempt, attempt > 1, 0) for reference, message in references
        )
        return self.add(Kind.POP_INVISIBLE_CHANGED, name, body, fixed=POP_FIXED.pack(group_id, 1, deadline_ms), flags=flags)

    def save(self, data_dir: Path, *, hole_bytes: int = 0, torn: bytes = b"") -> Path:
        """Write the segments, then `torn` and a hole after the last one, and return the folder of the segments."""
        directory = data_dir / "commitlog"
        directory.mkdir(parents=True)
        base = self.start
        for segment in self.segments:
            path = directory / f"{base:020d}.log"
            path.write_bytes(segment)
            base += len(segment)
        with path.open("ab") as file:
            file.write(torn)
            file.truncate(file.tell() + hole_bytes)
        return directory

    def records(self) -> Iterator[Record]:
        """Yield all records, decoded one by one."""
        base = self.start
        for segment in self.segments:
            offset = 0
            while offset < len(segment):
                each = record.decode(bytes(segment), offset, position=base + offset)
                yield each
                offset += each.size
            base += len(segment)
