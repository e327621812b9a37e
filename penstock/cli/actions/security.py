"""How commands identify themselves to a node over gRPC."""

from __future__ import annotations

import os
from pathlib import Path

from penstock import Security

TOKEN = "PENSTOCK_TOKEN"
"""Environment variable with the token that each gRPC call carries."""

CA_FILE = "PENSTOCK_CA_FILE"
"""Environment variable with the path of the PEM file of root certificates that verify the node's certificate."""


def security_of_environment() -> Security:
    """Return the token and the root certificates that the environment names."""
    ca_file = os.environ.get(CA_FILE)
    return Security(token=os.environ.get(TOKEN, ""), root_certificates=Path(ca_file).read_bytes() if ca_file else None)
