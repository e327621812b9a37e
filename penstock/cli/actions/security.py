"""How commands identify themselves to a node over gRPC."""

from __future__ import annotations

import os

from penstock import Security
from penstock.cli.actions.endpoint import Endpoint

TOKEN = "PENSTOCK_TOKEN"
"""Environment variable with the token that each gRPC call carries."""


def security_of(node: Endpoint) -> Security:
    """Return the token of the environment, and the certificates of an endpoint.

    Raises:
        ValueError, OSError: as `Endpoint.context` raises them.
    """
    token = os.environ.get(TOKEN, "")
    if not node.has_tls:
        return Security(token=token)
    node.context()  # gRPC says nothing about files that it can't use
    roots, certificate, key = (
        file.read_bytes() if file is not None else None for file in (node.ca_file, node.certificate, node.key)
    )
    return Security(token=token, tls=True, root_certificates=roots, certificate=certificate, key=key)
