"""The process that syncs a log: `python -I -S syncchild.py SOCKET`. `store.log.syncing` starts it and explains why.

A request holds the offset at which the log ends now in its segment. The first request for a segment carries the segment's
descriptor. An answer holds an errno (0 for success) and the number of requests that it answers: one sync serves all requests
that came while the one before it ran. The process ends when the other end of the socket is closed, and after a failure.

It imports nothing of Penstock, so that it starts quickly and takes little memory. For the same reason it imports `_socket`, on
which `socket` is built: `socket`, `signal` and `struct` import other modules, and more than half of the start would go into
those.
"""

from __future__ import annotations

import _socket
import os
import select
import sys

REQUEST_BYTES = 8
REQUESTS_MAX = 64
"""Maximum number of requests that one answer serves."""

NUMBER_BYTES = 2
ANSWER_BYTES = 2 * NUMBER_BYTES

DESCRIPTOR_BYTES = 4
"""Size of a C int on every platform that Penstock runs on."""

WARM_BYTES = 1024 * 1024
WARM_STEP_BYTES = 8 * 1024
"""While it is idle, the process reads `WARM_BYTES` after the end of the log, in steps of `WARM_STEP_BYTES`. The file has a hole
there, so no disk is read, but the pages are in memory afterwards, and the node's writes need not wait for the system to
find free pages (see `python -m bench store --only synced`). The steps are small because a requested sync waits for the
current step."""


def main(end: _socket.socket) -> None:
    """Serve one node until it has ended."""
    segment = -1
    warm, scratch = 0, bytearray(WARM_STEP_BYTES)
    while True:
        requests, ancillary, _, _ = end.recvmsg(REQUEST_BYTES * REQUESTS_MAX, _socket.CMSG_LEN(DESCRIPTOR_BYTES))
        if not requests:
            return
        if ancillary:  # a descriptor came with the last request; the node itself has synced the segment before
            if segment >= 0:
                os.close(segment)
            segment, warm = int.from_bytes(ancillary[0][2], sys.byteorder), 0
        failure = 0
        try:
            os.fdatasync(segment)
        except OSError as error:
            failure = error.errno or 1
        served = len(requests) // REQUEST_BYTES
        end.sendall(failure.to_bytes(NUMBER_BYTES, "big") + served.to_bytes(NUMBER_BYTES, "big"))
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
    try:  # noqa: SIM105 - contextlib imports other modules
        main(_socket.socket(fileno=int(sys.argv[1])))
    except (BrokenPipeError, ConnectionResetError):
        pass  # the node was killed
