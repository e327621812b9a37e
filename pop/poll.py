"""A poll: a consumer that waits for the first message of its group."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from pop.checkpoint import Checkpoint


class Taken(NamedTuple):
    """What a pop handed out: the checkpoint, and the record of each delivery. None for a record that can't be read."""

    checkpoint: Checkpoint
    records: list[bytes | None]


class Poll:
    """One waiting call. Its future gets what was taken for it.

    Parameters:
        messages_max: how many messages it takes at most.
        invisible_ms: for how long they are invisible then.
    """

    __slots__ = ("future", "invisible_ms", "messages_max")

    def __init__(self, future: asyncio.Future[Taken], messages_max: int, invisible_ms: int) -> None:
        self.future = future
        self.messages_max = messages_max
        self.invisible_ms = invisible_ms
