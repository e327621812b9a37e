"""The shares of a node's file descriptors: the store comes first, then gRPC and the admin listener; MQTT gets the others.

A supervisor such as systemd may pass a listening socket (`sd_listen_fds`). It keeps the socket open while the node restarts.
Clients that connect meanwhile wait for the node, instead of being refused and waiting for longer and longer before they try
again."""

from __future__ import annotations

import os
import resource
import socket
from typing import Final, NamedTuple

import structlog

from penstock.node.errors import DescriptorsTooFew
from penstock.store.descriptors import descriptor_limit, store_share
from penstock.store.options import HostPort, OptionInvalid

logger = structlog.get_logger("node")

LIMIT_MIN: Final = 512
"""The least number of descriptors with which a node starts."""

POP_DIVISOR: Final = 8
"""Where descriptors are few, gRPC gets no more connections than the limit divided by this."""

ADMIN_CONNECTIONS_MAX: Final = 32
"""Maximum number of connections of the admin listener: probes, and a few that read metrics."""


class DescriptorShares(NamedTuple):
    """Who may have how many descriptors."""

    limit: int
    """All that the process may have."""
    store: int
    """Those of the store and of the node itself."""
    pop: int
    """Connections of gRPC."""
    admin: int
    """Connections of the admin listener."""

    @property
    def mqtt(self) -> int:
        """The first descriptor that no MQTT connection may have. As the kernel gives the lowest free number, the others have
        all from this one on, even if MQTT has all below."""
        return self.limit - self.store - self.pop - self.admin


def shares_of(limit: int, pop_connections_max: int) -> DescriptorShares:
    """Return the shares of a process that may have `limit` descriptors.

    Raises:
        DescriptorsTooFew: the limit is less than a node needs.
    """
    if limit < LIMIT_MIN:
        raise DescriptorsTooFew(
            f"This process may have {limit} file descriptors, but a node needs at least {LIMIT_MIN}, and one more for each "
            "connection. Raise the hard limit (`ulimit -Hn`, LimitNOFILE= of systemd, `--ulimit nofile=` of a container)."
        )
    return DescriptorShares(limit, store_share(limit), min(pop_connections_max, limit // POP_DIVISOR), ADMIN_CONNECTIONS_MAX)


def log_shares(shares: DescriptorShares, mqtt_connections_max: int) -> None:
    """Log the shares, as a warning if MQTT can't have as many connections as its options allow."""
    if shares.mqtt < mqtt_connections_max:
        logger.warning(
            "descriptors.few",
            limit=shares.limit,
            mqtt=shares.mqtt,
            why=f"fewer than mqtt.connections_max ({mqtt_connections_max}); further connections are closed at once; raise "
            "the hard limit (`ulimit -Hn`, LimitNOFILE=), or lower the option",
        )
    else:
        logger.info("descriptors.shares", **shares._asdict(), mqtt=shares.mqtt)


def raise_descriptor_limit() -> None:
    """Raise the soft limit of this process to its hard limit, and log both. The usual soft limit of 1,024 is for select(2)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    why = ""
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:  # some systems allow less than the hard limit that they state
            why = str(error)
    log = logger.warning if why else logger.info
    log("descriptors.limit", before=soft, now=descriptor_limit(), hard=hard, **({"why": why} if why else {}))


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
