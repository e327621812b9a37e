"""An MQTT 3.1.1 client of the simulation. It remembers its session as a device with a flash would, and repeats what it must."""

from __future__ import annotations

from random import Random

from penstock.gateway.protocol.packets import (
    CONNACK,
    PUBACK,
    PUBCOMP,
    PUBLISH,
    PUBREC,
    PUBREL,
    SUBACK,
)
from tests.gateway.packet_cases import connect, field, packet, subscribe
from tests.simulation.oracle import Consumer, Oracle
from tests.simulation.process import Process, SimulatedTransport
from tests.simulation.sent import Sent, Violation

CLEAN = 0x02
INFLIGHT_MAX = 12

SHARE = "share"
"""Name of the shared subscription."""


class MqttClient:
    """One client.

    Parameters:
        oracle: gets what happens.
        random: decides when the client acknowledges.
        name: its client id.
        clean: whether each connection begins a new session.
        subscriptions: filters and QoS that it subscribes to, one after the other.
        consumer: who is to get the messages, if it is not this client alone: the members of a shared subscription.
    """

    def __init__(
        self,
        oracle: Oracle,
        random: Random,
        name: str,
        *,
        clean: bool,
        subscriptions: tuple[tuple[str, int], ...] = (),
        consumer: Consumer | None = None,
    ) -> None:
        self.name = name
        self.consumer = consumer or Consumer(f"session {name}")
        self.clean = clean
        self.transport: SimulatedTransport | None = None
        self.is_accepted = False
        self.unacked: dict[int, tuple[Sent, int]] = {}
        """What it publishes: the message and the packet that it waits for, by packet id."""
        self.retained: dict[str, bytes] = {}
        """Retained messages that it got on subscribing, by topic."""
        self._oracle = oracle
        self._random = random
        self._left = list(subscriptions)
        self._asked: dict[int, tuple[str, int]] = {}
        self._received: set[int] = set()
        """Packet ids at QoS 2 that are not released yet."""
        self._answers: list[bytes] = []
        self._packet_id = 0
        self._rest = bytearray()
        self._has_session = False

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return self.is_accepted and not (self.unacked or self._left or self._asked or self._answers or self._received)

    # --- the connection -----------------------------------------------------------------------------------------------

    def connect(self, process: Process) -> None:
        """Open a connection."""
        self.disconnect()
        self.transport = process.connect(port=len(self.name))
        self._rest.clear()
        self._answers.clear()
        if self.clean:
            self._forget()
        flags = CLEAN if self.clean else 0
        self.transport.feed(connect(flags, self.name.encode(), keep_alive_s=0))

    def disconnect(self) -> None:
        """Close the connection, if there is one, without a DISCONNECT."""
        self.is_accepted = False
        if self.transport is not None:
            self.transport.leave()
            self.transport = None

    def cut_off(self, *, hears: bool) -> None:
        """The node is gone. With `hears`, what the node had sent still arrives."""
        if hears:
            self.receive(0)
        self.transport = None
        self.is_accepted = False

    def _forget(self) -> None:
        self.unacked.clear()
        self._received.clear()
        self._asked.clear()
        self.consumer.since.clear()

    # --- sending ------------------------------------------------------------------------------------------------------

    def publish(self, message: Sent) -> bool:
        """Publish a message for the first time; return whether the client can."""
        if self.transport is None or not self.is_accepted or len(self.unacked) >= INFLIGHT_MAX:
            return False
        if not message.qos:
            self._send(_publish(message, 0))
            return True
        packet_id = self._next_id()
        self.unacked[packet_id] = (message, PUBACK if message.qos == 1 else PUBREC)
        self._send(_publish(message, packet_id))
        return True

    def subscribe_next(self) -> None:
        """Send the next SUBSCRIBE."""
        if self._left and self.is_accepted:
            packet_id = self._next_id()
            self._asked[packet_id] = self._left.pop(0)
            topic_filter, qos = self._asked[packet_id]
            self._send(subscribe(packet_id, (topic_filter.encode(), qos)))

    def _next_id(self) -> int:
        while True:
            self._packet_id = self._packet_id % 60 + 1  # few ids, so that they come again soon
            if self._packet_id not in self.unacked and self._packet_id not in self._asked:
                return self._packet_id

    def _send(self, data: bytes) -> None:
        if self.transport is not None:
            self.transport.feed(data)

    def answer(self) -> None:
        """Send the acknowledgements that were held back."""
        if self._answers:
            self._send(b"".join(self._answers))
            self._answers.clear()

    # --- receiving ----------------------------------------------------------------------------------------------------

    def receive(self, now_ms: int) -> None:
        """Handle what has arrived."""
        transport = self.transport
        if transport is None:
            return
        if transport.received:
            self._rest += transport.received
            transport.received.clear()
            self._handle_all(now_ms)
        if transport.is_closed and self.transport is transport:
            self.transport = None
            self.is_accepted = False

    def _handle_all(self, now_ms: int) -> None:
        data, at = bytes(self._rest), 0
        while (found := _next_packet(data, at)) is not None:
            head, body, at = found
            self._handle(head, body, now_ms)
        self._rest[:] = data[at:]

    def _handle(self, head: int, body: bytes, now_ms: int) -> None:
        kind = head >> 4
        if kind == CONNACK:
            self._accepted(body)
        elif kind == PUBLISH:
            self._got(head, body, now_ms)
        elif kind == SUBACK:
            self._subscribed(int.from_bytes(body[:2], "big"), body[2])
        elif kind in (PUBACK, PUBREC, PUBCOMP):
            self._acknowledged(kind, int.from_bytes(body[:2], "big"))
        elif kind == PUBREL:
            packet_id = int.from_bytes(body[:2], "big")
            self._received.discard(packet_id)
            self._answers.append(packet(PUBCOMP << 4, body[:2]))

    def _accepted(self, body: bytes) -> None:
        if body[1]:
            return  # refused, as on a full disk
        is_present = bool(body[0] & 1)
        if self._has_session and not is_present and not self._oracle.was_repaired:
            raise Violation(f"the session of {self.name} is gone")
        if not is_present:
            for message, _ in self.unacked.values():
                message.once = False  # the node can't know what the new session has seen
            self._received.clear()
        self.is_accepted = True
        for packet_id, (_, topic) in self._asked.copy().items():
            del topic
            self._left.insert(0, self._asked.pop(packet_id))
        for packet_id, (message, waits_for) in self.unacked.items():
            if waits_for == PUBCOMP:
                self._send(packet(PUBREL << 4 | 2, packet_id.to_bytes(2, "big")))
            else:
                self._send(_publish(message, packet_id, is_repeated=True))

    def _got(self, head: int, body: bytes, now_ms: int) -> None:
        qos, is_retained = head >> 1 & 3, bool(head & 1)
        length = int.from_bytes(body[:2], "big")
        topic, at = body[2 : 2 + length].decode(), 2 + length
        packet_id = 0
        if qos:
            packet_id, at = int.from_bytes(body[at : at + 2], "big"), at + 2
        payload = body[at:]
        if qos == 2:
            self._answers.append(packet(PUBREC << 4, packet_id.to_bytes(2, "big")))
            if packet_id in self._received:
                return
            self._received.add(packet_id)
        elif qos == 1:
            self._answers.append(packet(PUBACK << 4, packet_id.to_bytes(2, "big")))
        message = self._oracle.delivered(self.consumer, payload, topic, now_ms or 2**62)
        if is_retained:
            self.retained[topic] = payload
        elif qos == 2 and message.once and len(message.positions) <= 1 and not message.is_retained:
            self.consumer.exact[message.number] += 1
            count = self.consumer.exact[message.number]
            if count > max(len(self.consumer.since), 1) and not self._oracle.was_repaired:
                raise Violation(f"{message} came {count} times to {self.name} at QoS 2")

    def _subscribed(self, packet_id: int, code: int) -> None:
        asked = self._asked.pop(packet_id, None)
        if asked is None:
            return
        if code == 0x80:
            self._left.append(asked)  # refused, as on a full disk
            return
        if not self.clean:
            self._has_session = True
        if asked[1]:
            self.consumer.since.setdefault(asked[0].removeprefix(f"$share/{SHARE}/"), self._oracle.tick())

    def _acknowledged(self, kind: int, packet_id: int) -> None:
        message, waits_for = self.unacked.get(packet_id, (None, 0))
        if message is None or kind != waits_for:
            return
        self._oracle.acknowledged(message)
        if kind == PUBREC:
            self.unacked[packet_id] = (message, PUBCOMP)
            self._send(packet(PUBREL << 4 | 2, packet_id.to_bytes(2, "big")))
        else:
            del self.unacked[packet_id]


def _publish(message: Sent, packet_id: int, *, is_repeated: bool = False) -> bytes:
    head = PUBLISH << 4 | is_repeated << 3 | message.qos << 1 | message.is_retained
    number = packet_id.to_bytes(2, "big") if message.qos else b""
    return packet(head, field(message.topic.encode()) + number + message.body)


def _next_packet(data: bytes, at: int) -> tuple[int, bytes, int] | None:
    """Return the first byte, the body and the end of the packet at `at`; None if it is not whole."""
    length, shift, start = 0, 0, at + 1
    while start < len(data):
        byte = data[start]
        length |= (byte & 127) << shift
        shift, start = shift + 7, start + 1
        if byte < 128:
            return (data[at], data[start : start + length], start + length) if start + length <= len(data) else None
    return None
