"""What an attack finds: the listeners of a node, and the credentials that the attacker has."""

from __future__ import annotations

import json
import ssl
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

HONEST, HONEST_PASSWORD = "honest", "correct-horse"
"""The user of the honest devices."""

MALLORY, MALLORY_PASSWORD = "mallory", "battery-staple"
"""A user that the operator trusts with every topic: the attacker of all rows that need a login."""

HONEST_TOKEN, BILLING_TOKEN = "token-of-honest", "token-of-billing"
"""The token of the honest consumer, and that of the attacker over gRPC, who may read and write `orders/#`."""

HONEST_SUBSCRIBER: Final = "honest-subscriber"
"""Client id of the honest subscriber: everybody may know it."""

JWT_SECRET: Final = "an-attacker-does-not-know-this-secret-of-40-bytes"


@dataclass(frozen=True, slots=True)
class Ground:
    """The addresses of a node on loopback.

    Parameters:
        ports: by the name of the listener: mqtt, tls, ws, wss, proxied (TCP after a PROXY header), pop, admin.
        ca: PEM file of the authority that signed the node's certificate.
    """

    ports: dict[str, int]
    ca: str

    def context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.ca)

    @property
    def roots(self) -> bytes:
        return Path(self.ca).read_bytes()

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> Ground:
        return cls(**json.loads(text))
