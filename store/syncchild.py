"""The process that syncs a log: `python -I -S syncchild.py SOCKET`. `store.syncing` starts it and explains why.

A request holds the offset at which the log ends now in its segment. The first request for a segment carries the segment's
descriptor. An answer holds an errno (0 for success) and the number of requests that it answers: one sync serves all requests
that came while the one before it ran. The process ends when the other end of the socket is closed, and after a failure. It
ignores SIGINT, SIGTERM and SIGHUP, because an operator may send those to all processes of the node while the node still has
records to sync.

It imports nothing of Penstock, so that it starts quickly and takes little memory.
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
"""Maximum number of requests that one answer serves."""

ANSWER = Struct(">HH")

WARM_BYTES = 1024 * 1024
WARM_STEP_BYTES = 8 * 1024
"""While it is idle, the process reads `WARM_BYTES` after the end of the log, in steps of `WARM_STEP_BYTES`. The file has a hole
there, so no disk is read, but the pages are in memory afterwards, and the node's writes need not wait for the system to
find free pages (see `python -m bench store --only synced`). The steps are small because a requested sync waits for the
current step."""


def main(end: socket.socket) -> None:
    """Serve one node until it has ended."""
    segment = -1
    warm, scratch = 0, bytearray(WARM_STEP_BYTES)
    while True:
        requests, descriptors, _, _ = socket.recv_fds(end, REQUEST_BYTES * REQUESTS_MAX, 1)
        if not requests:
            return
        if descriptors:  # it came with the last request; the node itself has synced the segment before
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
            return  # the kernel may have dropped written data, and the next sync would report success
        written = int.from_bytes(requests[-REQUEST_BYTES:], "big")
        warm = max(warm, written)
        while warm < written + WARM_BYTES and not select.select([end], [], [], 0)[0]:
            warm += _read(segment, scratch, warm) or WARM_BYTES


def _read(segment: int, scratch: bytearray, offset: int) -> int:
    """Return how many bytes were read; 0 at the end of the file and on errors, which the next sync reports."""
    try:
        return os.preadv(segment, [scratch], offset)
    except OSError:
        return 0


if __name__ == "__main__":
    for asked in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(asked, signal.SIG_IGN)
    with suppress(BrokenPipeError, ConnectionResetError):  # the node was killed
        main(socket.socket(fileno=int(sys.argv[1])))
