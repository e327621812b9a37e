"""Clients whose sessions outlive their connections, and the ends of the node that the sessions must survive."""

from __future__ import annotations

import pytest

from penstock.gateway.protocol.packets import CONNACK
from penstock.gateway.protocol.properties import Property, PropertyValues
from penstock.gateway.sessions.rows import all_sessions
from penstock.gateway.sessions.stored_session import StoredSession
from tests.gateway.packet_cases import connect
from tests.gateway.wire import BYE, Broker, Client
from tests.waiting import until

LASTS: PropertyValues = {Property.SESSION_EXPIRY_S: 60}
"""Properties of a CONNECT whose session outlives its connection by a minute."""


async def resume(broker: Broker, client_id: str, version: int, *, is_present: bool = True) -> Client:
    """Resume a session. `is_present` says what the CONNACK must say of it: no, if the client has to subscribe again."""
    if version == 5:
        client = await broker.connect_5(client_id, flags=0, about=LASTS)
        assert client.session_present == is_present
        return client
    old = await broker.dial()
    await old.send(connect(0, client_id.encode(), keep_alive_s=0))
    assert await old.receive() == (CONNACK, 0, bytes((is_present, 0)))  # [MQTT-3.2.2-3] 3.1.1:[MQTT-3.2.2-2]
    return old


async def begin(broker: Broker, client_id: str, version: int) -> Client:
    """Connect a client with a new session that outlives the connection."""
    if version == 5:
        return await broker.connect_5(client_id, about=LASTS)
    return await broker.connect(client_id, flags=0)


async def leave(client: Client) -> None:
    """End a client's connection with a DISCONNECT, and wait until the server has closed it."""
    await client.send(BYE)
    await client.ended()


both_versions = pytest.mark.parametrize("version", [4, 5])

ENDS = ("stop", "kill")

each_end = pytest.mark.parametrize("end", ENDS)


both_versions_and_ends = pytest.mark.parametrize(("version", "end"), list(zip((4, 5), ENDS, strict=True)))
"""Each version, and each end: the records of a session are the same in both versions."""


async def end_node(broker: Broker, end: str) -> None:
    """Stop or kill the node, and start the next one on its data directory."""
    await (broker.restart() if end == "stop" else broker.kill())


async def recorded(broker: Broker) -> None:
    """Wait until the journal has recorded all changes of sessions."""
    await until(lambda: not broker.node.gateway.journal._unsaved)
    broker.node.store.commit()


def stored(broker: Broker, client_id: str) -> StoredSession:
    """Return the stored session of a client."""
    broker.node.store.commit()
    return {one.client_id: one for one in all_sessions(broker.node.store.index)}[client_id]
