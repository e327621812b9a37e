"""A poll: a consumer that waits for the first message of its group."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from penstock.pop.core.checkpoint import Checkpoint


class Taken(NamedTuple):
    """What a pop handed out: the checkpoint, and each delivery's record; None if it can't be read, or is settled."""

    checkpoint: Checkpoint
    records: list[bytes | None]


class Poll:
    """One waiting call. Its future gets what was taken for it.

    Parameters:
        messages_max: how many messages it takes at most.
        invisible_ms: for how long they are invisible then.
        attempt_id: of the call, or empty.
    """

    __slots__ = ("attempt_id", "future", "invisible_ms", "messages_max")

    def __init__(self, future: asyncio.Future[Taken], messages_max: int, invisible_ms: int, attempt_id: str = "") -> None:
        self.future = future
        self.messages_max = messages_max
        self.invisible_ms = invisible_ms
        self.attempt_id = attempt_id
