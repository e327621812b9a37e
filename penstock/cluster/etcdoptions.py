"""Where etcd is, and how a replica authenticates itself there."""

from __future__ import annotations

from typing import NamedTuple


class EtcdOptions(NamedTuple):
    """Options of the connection to etcd."""

    endpoints: tuple[str, ...]
    """`HOST:PORT` of the client listeners of all members."""
    user: str = ""
    """Name of a user that may read and write the keys of the cluster; empty where etcd has no authentication."""
    password: str = ""
    root_certificates: bytes | None = None
    """PEM of the roots by which etcd's certificates are checked. None: plain text."""
    certificate: bytes | None = None
    """PEM of the replica's certificate, where etcd asks for one."""
    key: bytes | None = None
    """PEM of the certificate's key."""
