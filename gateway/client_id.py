"""Client ids that the server assigns."""

from __future__ import annotations

import secrets


def assign_client_id() -> str:
    """Return a new client id for a client that sent none [MQTT-3.1.3-6]."""
    return f"auto-{secrets.token_hex(8)}"
