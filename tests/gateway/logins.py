"""Nodes with amqtt's plugins, and clients that log in to them."""

from __future__ import annotations

from typing import Any

from penstock.gateway.options import AccessOptions
from penstock.gateway.protocol.packets import CONNACK
from penstock.gateway.protocol.reasons import ConnectCode
from tests.gateway.wire import CLEAN, Broker, Client

USER, PASSWORD = 0x80, 0x40
"""Flags of a CONNECT (MQTT 5.0, 3.1.2.8 and 3.1.2.9)."""

SCRIPTED = "tests.gateway.scripted_plugins"
TABOO = "amqtt.plugins.topic_checking.TopicTabooPlugin"
ACL = "amqtt.plugins.topic_checking.TopicAccessControlListPlugin"
ANONYMOUS = "amqtt.plugins.authentication.AnonymousAuthPlugin"
REFUSED = (CONNACK, 0, bytes((0, ConnectCode.NOT_AUTHORIZED)))
BUSY = (CONNACK, 0, bytes((0, ConnectCode.SERVER_UNAVAILABLE)))
BAD_PASSWORD = (CONNACK, 0, bytes((0, ConnectCode.BAD_USER_NAME_OR_PASSWORD)))

PATIENT: dict[str, Any] = {"plugin_timeout_ms": 600_000, "held_ms": 600_000}


def plugins(*names: str, **options: Any) -> AccessOptions:
    """Return options with these plugins, which may take as long as a busy machine needs.

    A name without a dot is that of a class in `scripted_plugins`.
    """
    named: dict[str, Any] = {name if "." in name else f"{SCRIPTED}.{name}": {} for name in names}
    return AccessOptions(plugins=named, **PATIENT | options)


async def login(broker: Broker, client_id: str, username: str = "", password: str = "", **options: Any) -> Client:
    """Send a CONNECT with a user name and a password. The caller receives the CONNACK."""
    fields = [field.encode() for field in (username, password) if field]
    flags = CLEAN | (USER if username else 0) | (PASSWORD if password else 0)
    return await broker.connect(client_id, *fields, flags=flags, accepted=False, **options)
