"""A listening socket from a supervisor, as systemd passes them (`sd_listen_fds`).

The supervisor keeps the socket open while the node restarts. Clients that connect meanwhile wait for the node, instead of being
refused and waiting for longer and longer before they try again.
"""

from __future__ import annotations

import os
import socket
from typing import Final

from penstock.store.options import HostPort, OptionInvalid

FIRST: Final = 3
"""Descriptor of the first socket."""

POP: Final = "pop"
"""Name of the one socket that a node takes: that of the gRPC listener."""


def inherited_listener() -> socket.socket | None:
    """Return the socket for the gRPC listener that the supervisor of this process has passed; None if it passed none.

    Raises:
        OptionInvalid: The supervisor passes other sockets, or one that does not listen.
    """
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return None
    count, names = os.environ.get("LISTEN_FDS", ""), os.environ.get("LISTEN_FDNAMES", "")
    if count != "1" or names != POP:
        raise OptionInvalid("LISTEN_FDNAMES", names, f"{POP}, for one socket (FileDescriptorName={POP} of systemd)")
    try:
        listener = socket.socket(fileno=FIRST)
        listens = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise OptionInvalid("LISTEN_FDS", count, f"the number of sockets from descriptor {FIRST} on ({error})") from error
    if not listens:
        raise OptionInvalid("LISTEN_FDS", count, "sockets that listen (ListenStream= and Accept=no of systemd)")
    if listener.family not in (socket.AF_INET, socket.AF_INET6):
        raise OptionInvalid("LISTEN_FDS", count, "sockets of TCP (an address with a port in ListenStream= of systemd)")
    listener.set_inheritable(False)
    return listener


def address_of_listener(listener: socket.socket) -> HostPort:
    """Return the address on which a TCP socket listens."""
    host, port = listener.getsockname()[:2]
    return HostPort(host, port)
