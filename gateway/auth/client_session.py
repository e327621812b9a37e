"""A client as a plugin sees it."""

from __future__ import annotations

from typing import Any

from amqtt.session import Session

from penstock.gateway.protocol.connect import Connect
from penstock.gateway.transport.peer import Peer


class ClientSession(Session):  # type: ignore[misc] # amqtt ships no types
    """A client as a plugin sees it: the session of amqtt, without its costly queues and state machine."""

    def __init__(self, connect: Connect, client_id: str, peer: Peer) -> None:
        self.client_id = client_id
        self.remote_address = peer.host
        self.remote_port = peer.port
        self.ssl_object = peer.ssl_object
        self.username = connect.username if peer.username is None else peer.username
        # A plugin expects text. A password that is no text becomes one that nobody has.
        self.password = connect.password.decode(errors="surrogateescape") if connect.password is not None else None
        self.clean_session = connect.clean_start
        self.keep_alive = connect.keep_alive_s
        self.is_anonymous = False
        self.attributes: dict[str, Any] = {}
        will = connect.will
        self.will_flag = will is not None
        self.will_topic = will.topic if will else None
        self.will_message = will.body if will else None
        self.will_qos = will.qos if will else None
        self.will_retain = will.retain if will else None

    def __repr__(self) -> str:
        return f"ClientSession({self.client_id!r})"
