"""The process that syncs a log: `python -I -S syncchild.py SOCKET`. `store.syncing` starts it, and says why.

A request is where in its segment the log ends now; the segment's descriptor comes with the first one that is about it. The
answer is an errno, 0 for none, and how many requests it answers: those that came while a sync was under way are served by one.
The process ends when the other end of the socket does, and after a failure; and for no signal that asks: whoever stops the node
may signal all of its processes, and the node still has something to sync.

It imports nothing of Penstock, so that it starts in a moment and takes little memory.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from contextlib import suppress
from struct import Struct

REQUEST_BYTES = 8
REQUESTS_MAX = 64
"""So many are answered at once, at most."""

ANSWER = Struct(">HH")

WARM_BYTES = 1024 * 1024
WARM_STEP_BYTES = 8 * 1024
"""While it has nothing else to do, the process reads so many bytes behind the end of the log, in such steps. Nothing is there,
so no disk is read. But the pages are in memory then, and the node that writes there needn't wait until the system has found
some: that was two thirds of what its writes took, on a virtual machine (measured). A sync that is asked for waits for one step:
with 64 KiB it was 140 us."""


def main(end: socket.socket) -> None:
    """Serve one node until it is gone."""
    segment = -1
    warm, scratch = 0, bytearray(WARM_STEP_BYTES)
    while True:
        requests, descriptors, _, _ = socket.recv_fds(end, REQUEST_BYTES * REQUESTS_MAX, 1)
        if not requests:
            return
        if descriptors:  # it came with the last of them; the node has synced the segment before
            if segment >= 0:
                os.close(segment)
            segment, warm = descriptors[0], 0
        failure = 0
        try:
            os.fdatasync(segment)
        except OSError as error:
            failure = error.errno or 1
        end.sendall(ANSWER.pack(failure, len(requests) // REQUEST_BYTES))
        if failure:
            return  # the kernel may have dropped what was written, and the next sync would report success
        written = int.from_bytes(requests[-REQUEST_BYTES:], "big")
        warm = max(warm, written)
        while warm < written + WARM_BYTES and not select.select([end], [], [], 0)[0]:
            warm += _read(segment, scratch, warm) or WARM_BYTES


def _read(segment: int, scratch: bytearray, offset: int) -> int:
    """Return how many bytes were read; 0 at the end of the file, and where it can't be read: a sync tells of that."""
    try:
        return os.preadv(segment, [scratch], offset)
    except OSError:
        return 0


if __name__ == "__main__":
    for asked in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(asked, signal.SIG_IGN)
    with suppress(BrokenPipeError, ConnectionResetError):  # the node was killed
        main(socket.socket(fileno=int(sys.argv[1])))
