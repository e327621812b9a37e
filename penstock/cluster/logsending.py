"""Sends the log of a leader to one follower."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from penstock.cluster.frames import FrameKind
from penstock.cluster.framestream import FrameStream
from penstock.cluster.replicalog import ReplicaLog
from penstock.cluster.shardkey import ReplicaId
from penstock.store.log.block import read_block
from penstock.store.log.commitlog import CommitLog
from penstock.store.options import MIB

WINDOW_BYTES = 8 * MIB
"""Bytes that are sent before the follower has acknowledged any of them."""
BLOCK_BYTES = MIB
"""Bytes that are read from the log at once for a follower that is behind. Other work runs after each."""


class LogSending:
    """The part of a log that goes to one follower.

    Parameters:
        replica: the follower.
        stream: the connection with it.
        log: of the leader.
        epochs: tells the epochs of its records.
        epoch: that the leader leads.
        position: up to where both logs agree; sending begins there.
        committed: returns up to where everything is committed.
    """

    def __init__(
        self,
        replica: ReplicaId,
        stream: FrameStream,
        log: CommitLog,
        epochs: ReplicaLog,
        epoch: int,
        position: int,
        committed: Callable[[], int],
    ) -> None:
        self.replica: Final = replica
        self.stream: Final = stream
        self.sent = position
        """Everything before this position was sent, or the follower had it."""
        self.acked = position
        """Everything before this position is durable there."""
        self._log = log
        self._epochs = epochs
        self._epoch = epoch
        self._committed = committed
        self._is_scheduled = False
        self._told_start = 0

    @property
    def lag_bytes(self) -> int:
        """Bytes of the log that the follower has not acknowledged."""
        return max(self._log.written - self.acked, 0)

    def written(self, position: int, data: bytes) -> None:
        """Send what was just written to the log, if everything before it was sent and the window has room."""
        if position == self.sent and position - self.acked < WINDOW_BYTES:
            self._send(data)
        else:
            self.go_on()

    def acknowledged(self, position: int) -> None:
        """Take up to where the follower's log is durable."""
        self.acked = max(self.acked, position)
        if self.sent < self._log.written:
            self.go_on()

    def go_on(self) -> None:
        """Send a block of what the follower lacks, if the window has room, and go on in the next turn of the loop."""
        if self._is_scheduled or self.stream.has_ended:
            return
        if self.sent < self._log.start:
            why = f"this replica needs the log from {self.sent} on, and it begins at {self._log.start} by now"
            self.stream.refuse(self._epoch, why)
            return
        if self.sent < self._log.written and self.sent - self.acked < WINDOW_BYTES:
            block = read_block(self._log, self.sent, BLOCK_BYTES, self._epoch_end())
            self._send(block.data[: block.end - block.base])
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._next)

    def tell_start(self) -> None:
        """Tell the follower where the log begins, unless it knows. What is still needed of what was before has copies now."""
        if self._log.start > self._told_start:
            self._told_start = self._log.start
            self.stream.send(FrameKind.START, self._epoch, self._log.start, self._log.written)

    def _next(self) -> None:
        self._is_scheduled = False
        self.go_on()

    def _epoch_end(self) -> int:
        """Return where the epoch of the next record ends: a frame has records of one epoch."""
        return next((each.begin for each in self._epochs.epochs if each.begin > self.sent), self._log.written)

    def _send(self, data: bytes) -> None:
        position, stream = self.sent, self.stream
        committed = self._committed()
        if self._log.segment_at(position).base == position:
            stream.send(FrameKind.ROLL, self._epoch, position, committed)
        stream.send(FrameKind.DATA, self._epochs.epochs.at(position), position, committed, payload=data)
        self.sent += len(data)
