"""The MQTT connection of a command. It ends with an error that says what to do, and waits for nothing without a bound."""

from __future__ import annotations

import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from paho.mqtt.client import Client, MQTTMessage
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode as PahoReason

from penstock.cli.endpoint import MQTT, Endpoint, probe, why_unconnected
from penstock.gateway.protocol.reasons import ReasonCode

CONNECT_S = 10.0
"""Seconds for a connection and for the first answer, as with the commands that speak gRPC."""

ANSWER_S = 30.0
"""Seconds without any acknowledgement after which a command gives up. A node whose disk is slow answers late."""

KEEP_ALIVE_S = 30
"""Seconds after which a connection that carries nothing is tested. One that is dead ends in twice this time."""

IN_FLIGHT_MAX = 100
"""Messages of QoS 1 and 2 that are on their way at a time, or fewer if the node wants fewer."""

PACKET_BYTES_MAX = 268_435_460
"""Maximum size of a packet of MQTT: what the four bytes of its length can state, and a header of five (2.1.4)."""

VERSIONS = {"3.1.1": MQTTProtocolVersion.MQTTv311, "5": MQTTProtocolVersion.MQTTv5}
"""Versions of MQTT, by name."""

REFUSALS: dict[int, str] = {
    ReasonCode.UNSUPPORTED_PROTOCOL_VERSION: "it does not speak this version of MQTT (give another --mqtt-version)",
    ReasonCode.CLIENT_IDENTIFIER_NOT_VALID: "it does not accept the client id",
    ReasonCode.SERVER_UNAVAILABLE: "it is busy or has no room, so try again later",
    ReasonCode.SERVER_BUSY: "it is busy or has no room, so try again later",
    ReasonCode.BAD_USER_NAME_OR_PASSWORD: "the user name or the password is not right",
    ReasonCode.NOT_AUTHORIZED: "it accepts no client without a login (give --user NAME), or this user may not connect",
    ReasonCode.BANNED: "this user, client id or address is banned (see `penstock access bans`)",
}
"""What the reasons of a CONNACK mean."""

_GARBAGE = (ValueError, IndexError, KeyError, TypeError, struct.error)
"""What the library raises about bytes that are not MQTT."""


_PASSING = (ReasonCode.SERVER_UNAVAILABLE, ReasonCode.SERVER_BUSY)
"""Reasons of a CONNACK that another attempt may not get."""


class LoginRefused(ConnectionError):
    """Raised when a node refuses the connection of this user or client, and would refuse it again."""


class MqttConnection:
    """A connection as a clean session, which is open within its context.

    Parameters:
        node: its MQTT listener.
        login: user name and password; None for none.
        version: of MQTT, `3.1.1` or `5`.

    Raises:
        ConnectionError: there is no connection. The text says what prevents it, and what to do.
        LoginRefused: the node refuses it, and would again.
        ValueError, OSError: as `Endpoint.context` raises them.
    """

    def __init__(self, node: Endpoint, login: tuple[str, str] | None, version: str) -> None:
        self._node = node
        self._why_ended: str | None = None
        self._refused: PahoReason | None = None
        self._has_answer = False
        self._suback: list[PahoReason] | None = None
        self._reason_text = ""
        self._messages: deque[MQTTMessage] = deque()
        self._acked_s = 0.0
        self._in_flight_max = IN_FLIGHT_MAX
        self._packet_bytes_max = PACKET_BYTES_MAX
        self._unsent = 0
        client = Client(
            CallbackAPIVersion.VERSION2, "", protocol=VERSIONS[version], reconnect_on_failure=False, manual_ack=True
        )
        client.connect_timeout = CONNECT_S
        client.max_inflight_messages_set(0)  # `publish` counts them: the library can't lower its bound to the node's
        client.max_queued_messages_set(0)
        if login is not None:
            client.username_pw_set(*login)
        if node.has_tls:
            client.tls_set_context(node.context())
        client.on_connect = self._on_connect
        client.on_disconnect = self._on_disconnect
        client.on_subscribe = self._on_subscribe
        client.on_publish = self._on_publish
        client.on_message = lambda _client, _userdata, message: self._messages.append(message)
        self._client = client
        self._connect()

    def _connect(self) -> None:
        try:
            self._client.connect(self._node.address.host, self._node.address.port, KEEP_ALIVE_S)
            if isinstance(end := self._client.socket(), socket.socket):
                # The library closes with unread deliveries. The system then drops what it has not sent yet: the last PUBACK.
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            answered = self._run(lambda: self._has_answer, CONNECT_S)
        except (OSError, *_GARBAGE) as error:
            raise ConnectionError(why_unconnected(self._node, MQTT, error)) from error
        if self._refused is not None:
            why = REFUSALS.get(self._refused.value, str(self._refused).lower()) + self._reason_text
            kind = ConnectionError if self._refused.value in _PASSING else LoginRefused
            raise kind(f"The node on {self._node.address} refused the connection: {why}.")
        if not answered:
            # The library says nothing about an error that came when the connection was open, such as an alert of TLS 1.3.
            raise ConnectionError(why_unconnected(self._node, MQTT, probe(self._node, MQTT) if self._node.has_tls else None))

    def publish(self, topic: str, body: bytes, qos: int, retain: bool, properties: Properties | None) -> None:
        """Send a message, and return while few are open. Raises as `wait_until_sent`, and ValueError if it is too large."""
        size = len(topic.encode()) + len(body)
        if size > self._packet_bytes_max:
            raise ValueError(
                f"Topic and body have {size:,} bytes, and the node on {self._node.address} takes packets of at most "
                f"{self._packet_bytes_max:,}: see its option mqtt.message_bytes_max."
            )
        self.wait_until_sent(self._in_flight_max - 1)
        self._unsent += 1
        self._client.publish(topic, body, qos, retain, properties)

    def wait_until_sent(self, unsent_max: int = 0) -> None:
        """Return when so few messages are not acknowledged, or at QoS 0 not sent.

        Raises:
            ValueError: the node refuses one.
            ConnectionError: the connection ends.
        """
        self._acked_s = time.monotonic()
        while self._unsent > unsent_max and self._refused is None:
            if not self._run(lambda: self._unsent <= unsent_max or self._refused is not None, 1.0):
                self._check_open()
                if time.monotonic() - self._acked_s > ANSWER_S:
                    raise ConnectionError(
                        f"The node on {self._node.address} has acknowledged nothing for {ANSWER_S:.0f} s, and {self._unsent} "
                        "messages are open. It may have stored them. Look at its log, and at the metric "
                        "penstock_mqtt_undurable_bytes."
                    )
        if self._refused is not None:
            if self._refused.value == ReasonCode.PACKET_IDENTIFIER_NOT_FOUND:
                # The library ignores the reason in a PUBREC, and asks for the completion of what was refused.
                raise ValueError("The node refused the message. With --qos 1, this command can say why.")
            raise ValueError(f"The node refused the message: {str(self._refused).lower()}{self._reason_text}.")

    def subscribe(self, topic_filter: str, qos: int) -> None:
        """Subscribe, and return when the node has answered.

        Raises:
            ValueError: the node refuses the filter.
            ConnectionError: the connection ends.
        """
        self._client.subscribe(topic_filter, qos)
        if not self._run(lambda: self._suback is not None, CONNECT_S):
            self._check_open()
            raise ConnectionError(f"The node on {self._node.address} did not answer the subscription in {CONNECT_S:.0f} s.")
        for reason in self._suback or ():
            if reason.is_failure:
                raise ValueError(
                    f"The node refused the filter {topic_filter!r}: {str(reason).lower()}{self._reason_text}. Check whether "
                    "this user may subscribe to it: `penstock access test` explains what the rules say."
                )

    def messages(self) -> Iterator[MQTTMessage]:
        """Yield each message that arrives. The caller acknowledges it with `acknowledge`. Raises ConnectionError at the end."""
        while True:
            while self._messages:
                yield self._messages.popleft()
            if not self._run(lambda: bool(self._messages), 1.0):
                self._check_open()

    def acknowledge(self, message: MQTTMessage) -> None:
        """Tell the node that a message has reached its end. Others return to the group of a shared filter."""
        if message.qos:
            self._client.ack(message.mid, message.qos)

    def _run(self, is_done: Callable[[], bool], within_s: float) -> bool:
        """Process what comes until something is done, and return whether it is. The connection may end meanwhile."""
        deadline_s = time.monotonic() + within_s
        while not is_done():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or self._why_ended is not None:
                return False
            if self._client.loop(left_s) is not MQTTErrorCode.MQTT_ERR_SUCCESS and self._why_ended is None:
                self._why_ended = "lost"
        return True

    def _check_open(self) -> None:
        if self._why_ended is not None:
            raise ConnectionError(f"The node on {self._node.address} closed the connection: {self._why_ended}.")

    def _on_connect(self, _client: Client, _data: Any, _flags: Any, reason: PahoReason, properties: Properties | None) -> None:
        self._has_answer = True
        if reason.is_failure:
            self._refused = reason
            self._reason_text = _text_of(properties)
        elif properties is not None:
            self._in_flight_max = min(getattr(properties, "ReceiveMaximum", IN_FLIGHT_MAX), IN_FLIGHT_MAX)
            self._packet_bytes_max = getattr(properties, "MaximumPacketSize", PACKET_BYTES_MAX)

    def _on_disconnect(
        self, _client: Client, _data: Any, flags: Any, reason: PahoReason, properties: Properties | None
    ) -> None:
        if flags.is_disconnect_packet_from_server:
            self._why_ended = str(reason).lower() + _text_of(properties)
        else:
            self._why_ended = (
                "it gave no reason. With --mqtt-version 5 a node says why" if self._is_old else "it gave no reason; see its log"
            )

    @property
    def _is_old(self) -> bool:
        return self._client.protocol != MQTTProtocolVersion.MQTTv5

    def _on_subscribe(self, _client: Client, _data: Any, _mid: int, reasons: list[PahoReason], properties: Properties) -> None:
        self._suback = reasons
        self._reason_text = _text_of(properties)

    def _on_publish(self, _client: Client, _data: Any, _mid: int, reason: PahoReason, properties: Properties) -> None:
        self._unsent -= 1
        self._acked_s = time.monotonic()
        if reason.is_failure and self._refused is None:
            self._refused = reason
            self._reason_text = _text_of(properties)

    def close(self) -> None:
        """End the session and the connection."""
        if self._why_ended is None:
            self._client.disconnect()
            self._run(lambda: self._why_ended is not None, 1.0)

    def __enter__(self) -> MqttConnection:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _text_of(properties: Properties | None) -> str:
    """Return what a node adds to a reason code, to be put behind its name."""
    text = getattr(properties, "ReasonString", "")
    return f" ({text})" if text else ""
