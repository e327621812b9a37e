"""Sequences of a client that knows MQTT's states, and breaks its rules at any step.

Hypothesis generates the steps, and a `Player` plays them on a live node. The player keeps what client and node must know of
each other, so it can acknowledge what is due, what is not, twice, or out of order. Each violation must get the reason that
MQTT 5.0 names, as the shared table of packets states it.
"""

from __future__ import annotations

import ssl
from collections import Counter
from collections.abc import Mapping
from random import Random
from typing import Any, NamedTuple

from hypothesis import strategies as st

from penstock.gateway.protocol.encode import encode_acks, encode_publish
from penstock.gateway.protocol.packets import (
    CONNACK,
    DISCONNECT,
    PINGRESP,
    PUBACK,
    PUBCOMP,
    PUBLISH,
    PUBLISH_WITH,
    PUBREC,
    PUBREL,
    SUBACK,
    UNSUBACK,
    Packet,
)
from penstock.gateway.protocol.properties import Property, write_properties
from penstock.gateway.protocol.reasons import REASONS, ReasonCode
from tests.fuzz.inputs import acks, connects, others, publishes, subscribes
from tests.fuzz.wires import TRANSPORTS, Wire
from tests.gateway import packet_cases_5
from tests.gateway.packet_cases import connect, packet, subscribe, unsubscribe
from tests.gateway.packet_cases_5 import Invalid, connect_5, publish_5, subscribe_5, unsubscribe_5
from tests.gateway.wire import BYE, CLEAN, PING

STEPS_MAX = 16

RECEIVE_MAX = 1000
"""Of the node."""

ALIAS_MAX = 64
"""Of the node."""

NOT_FOUND = ReasonCode.PACKET_IDENTIFIER_NOT_FOUND

TOPICS = ("seq/a", "seq/a/b", "seq/é", "$delayed/0/seq/a", "seq/" + "x" * 200)
FILTERS = ("seq/a", "seq/+", "seq/#", "+/a", "$share/seq/seq/a", "seq/" + "x" * 200)
CLIENTS = ("seq-1", "seq-2", "")

_OTHERS: list[Invalid] = [
    Invalid("a second connect", connect_5(CLEAN, b"seq-1"), packet_cases_5.INVALID[0].error, "", ReasonCode.PROTOCOL_ERROR),
    Invalid(
        "an alias above the maximum",
        publish_5(0x30, b"seq/a", 0, write_properties({Property.TOPIC_ALIAS: ALIAS_MAX + 1})),
        packet_cases_5.INVALID[0].error,
        "",
        ReasonCode.TOPIC_ALIAS_INVALID,
    ),
    Invalid(
        "a packet above the maximum",
        b"\x30\xff\xff\xff\x7f",
        packet_cases_5.INVALID[0].error,
        "",
        ReasonCode.PACKET_TOO_LARGE,
    ),
    Invalid(
        "an authentication that nobody began",
        packet(0xF0, b"\x18" + write_properties({Property.AUTHENTICATION_METHOD: "x"})),
        packet_cases_5.INVALID[0].error,
        "",
        ReasonCode.PROTOCOL_ERROR,
    ),
    Invalid(
        "more than the receive maximum",
        b"".join(encode_publish(b"seq/a", b"", 2, packet_id=at, properties=b"\0") for at in range(1, RECEIVE_MAX + 2)),
        packet_cases_5.INVALID[0].error,
        "",
        ReasonCode.RECEIVE_MAXIMUM_EXCEEDED,
    ),
]

VIOLATIONS: dict[str, Invalid] = {
    one.name: one for one in (*packet_cases_5.INVALID, *_OTHERS) if not one.name.startswith("connect")
}
"""What a connected client of MQTT 5.0 may not send, with the reason of the DISCONNECT."""

REFUSED: dict[str, Invalid] = {one.name: one for one in packet_cases_5.INVALID if one.name.startswith("connect")}
"""What a client may not begin with, with the reason of the CONNACK."""


class Step(NamedTuple):
    """One step: what the client does, with arguments that fit it."""

    do: str
    arguments: tuple[Any, ...] = ()


class Sequence(NamedTuple):
    """A client's life: over which transport, in which version, and what it does."""

    transport: str
    is_v5: bool
    steps: list[Step]


def _step(do: str, *arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Step]:
    return st.builds(Step, st.just(do), st.tuples(*arguments))


def sequences(transport: str = "") -> st.SearchStrategy[Sequence]:
    """Generate sequences over a transport; over all of them without one."""
    number, qos = st.integers(0, 2**16), st.integers(0, 2)

    def mutable(is_v5: bool) -> st.SearchStrategy[bytes]:
        return st.one_of(publishes(is_v5), subscribes(is_v5), acks(is_v5), others(is_v5), connects(is_v5))

    def of(is_v5: bool) -> st.SearchStrategy[list[Step]]:
        wild = st.one_of(
            _step("mutate", mutable(is_v5), number),
            _step("garbage", st.binary(min_size=1, max_size=40)),
            *((_step("violate", st.sampled_from(sorted(VIOLATIONS))),) if is_v5 else ()),
            *((_step("begin_wrong", st.sampled_from(sorted(REFUSED))),) if is_v5 else ()),
        )
        sound = st.one_of(
            _step("subscribe", st.sampled_from(FILTERS), qos, number),
            _step("unsubscribe", st.sampled_from(FILTERS)),
            _step("publish", st.sampled_from(TOPICS), qos, st.booleans(), number),
            _step("publish", st.sampled_from(TOPICS), qos, st.booleans(), number),
            _step("repeat", number),
            _step("release", st.sampled_from(("right", "again", "wrong"))),
            _step("acknowledge", st.sampled_from(("right", "again", "wrong", "other kind", "last first")), number),
            _step("ping"),
            _step("take_over"),
            _step("leave", st.sampled_from(("disconnect", "drop", "reset"))),
            _step("connect", st.sampled_from(CLIENTS), st.booleans(), st.sampled_from((1, 2, 100)), number),
        )
        first = _step("connect", st.sampled_from(CLIENTS), st.booleans(), st.sampled_from((1, 2, 100)), number)
        return st.tuples(first, st.lists(st.one_of(sound, sound, sound, wild), min_size=1, max_size=STEPS_MAX)).map(
            lambda both: [both[0], *both[1]]
        )

    wires = st.sampled_from((transport,) if transport else TRANSPORTS)
    return st.one_of(
        st.builds(Sequence, wires, st.just(True), of(True)),
        st.builds(Sequence, wires, st.just(True), of(True)),
        st.builds(Sequence, wires, st.just(False), of(False)),
    )


class Player:
    """Plays sequences, and raises AssertionError where the node does what it must not.

    Parameters:
        ports: of the node, by the name of the listener.
        context: trusts the node's certificate.
    """

    def __init__(self, ports: Mapping[str, int], context: ssl.SSLContext) -> None:
        self._ports = ports
        self._context = context
        self.counts: Counter[str] = Counter()
        """How often which step was played, and sequences by transport."""
        self._transport, self._is_v5 = "mqtt", True
        self._wire: Wire | None = None
        self._old: list[Wire] = []

    def play(self, sequence: Sequence) -> None:
        """Play a sequence, and end its connections."""
        self._transport, self._is_v5 = sequence.transport, sequence.is_v5
        self.counts[f"sequences over {sequence.transport}"] += 1
        try:
            for step in sequence.steps:
                self.counts[step.do] += 1
                getattr(self, f"_{step.do}")(*step.arguments)
        finally:
            self._end()

    def _end(self) -> None:
        for wire in (*self._old, *((self._wire,) if self._wire is not None else ())):
            wire.close()
        self._old, self._wire = [], None

    def _forget(self) -> None:
        self._next_id = 0
        self._unreleased: list[int] = []
        """Messages at QoS 2 whose PUBREC has come."""
        self._due: list[tuple[int, int]] = []
        """Packet id and QoS of deliveries that wait for an acknowledgement."""
        self._done: list[int] = []
        self._last = b""

    @property
    def _is_connected(self) -> bool:
        return self._wire is not None and self._wire.is_open

    def _dial(self) -> Wire:
        return Wire(self._ports, self._transport, self._context, is_v5=self._is_v5)

    # --- beginnings and ends ------------------------------------------------------------------------------------------

    def _hello(self, client_id: str, is_clean: bool, receive_max: int) -> bytes:
        flags = CLEAN if is_clean or not client_id else 0
        if not self._is_v5:
            return connect(flags, client_id.encode())
        about = {Property.RECEIVE_MAXIMUM: receive_max, Property.SESSION_EXPIRY_S: 1}
        return connect_5(flags, client_id.encode(), about=write_properties(about))

    def _connect(self, client_id: str, is_clean: bool, receive_max: int, _number: int) -> None:
        if self._is_connected:
            self._leave("disconnect")
        self._forget()
        self._begun = (client_id, is_clean, receive_max)
        self._wire = self._dial()
        self._wire.send(self._hello(*self._begun))
        answer = self._wire.receive()
        assert answer, "the node closed the connection in place of a CONNACK"
        assert answer[0] == CONNACK, answer
        assert answer[2][1] == 0, f"a valid CONNECT was refused with 0x{answer[2][1]:02x}"
        self._settle()

    def _leave(self, how: str) -> None:
        if not self._is_connected:
            return
        wire = self._wire
        assert wire is not None
        if how == "disconnect":
            wire.send(BYE)
            while wire.receive():
                pass
            wire.close()
        elif how == "drop":
            wire.close()
        else:
            wire.reset()

    def _take_over(self) -> None:
        """Connect with the same client id: the node must tell the first connection, and close it."""
        if not self._is_connected or not self._begun[0]:
            return
        first = self._wire
        assert first is not None
        self._old.append(first)
        self._connect_again()
        reasons = []
        while found := first.receive():
            if found[0] == DISCONNECT:
                reasons.append(found[2][0])
        assert not self._is_v5 or reasons == [ReasonCode.SESSION_TAKEN_OVER], f"reasons {reasons} for a session taken over"

    def _connect_again(self) -> None:
        self._wire = None
        self._connect(*self._begun, 0)

    def _begin_wrong(self, name: str) -> None:
        """Begin with a CONNECT that is not valid: the CONNACK must have the reason, or the node may close at once."""
        wire = self._dial()
        self._old.append(wire)
        wire.send(REFUSED[name].data)
        answer = wire.receive()
        assert not answer or (answer[0], answer[2][1]) == (CONNACK, REFUSED[name].reason), f"{name}: {answer}"
        assert not answer or not wire.receive(), f"{name}: the node goes on"

    # --- what is right ------------------------------------------------------------------------------------------------

    def _new_id(self) -> int:
        self._next_id = self._next_id % 60_000 + 1
        return self._next_id

    def _subscribe(self, topic_filter: str, qos: int, number: int) -> None:
        if not self._is_connected:
            return
        options = qos
        if self._is_v5:
            options |= (0, 8)[number & 1] | (0, 0x10, 0x20)[number % 3]
            options |= 4 if number & 2 and not topic_filter.startswith("$share") else 0
        one, packet_id = (topic_filter.encode(), options), self._new_id()
        self._send((subscribe_5 if self._is_v5 else subscribe)(packet_id, one))
        answer = self._until(SUBACK, packet_id)
        assert answer[2][-1] in (*range(3), 0x80, 0x97), f"a SUBACK with 0x{answer[2][-1]:02x} for {topic_filter!r}"
        self._settle()

    def _unsubscribe(self, topic_filter: str) -> None:
        if not self._is_connected:
            return
        packet_id = self._new_id()
        self._send((unsubscribe_5 if self._is_v5 else unsubscribe)(packet_id, topic_filter.encode()))
        answer = self._until(UNSUBACK, packet_id)
        assert not self._is_v5 or answer[2][-1] in (0, ReasonCode.NO_SUBSCRIPTION_EXISTED), answer
        self._settle()

    def _publish(self, topic: str, qos: int, retain: bool, number: int) -> None:
        if not self._is_connected or len(self._unreleased) > 20:
            return
        packet_id = self._new_id() if qos else 0
        about = b"\0" if self._is_v5 else b""
        if self._is_v5 and number % 4 == 0:
            about = write_properties({Property.TOPIC_ALIAS: number % ALIAS_MAX + 1, Property.MESSAGE_EXPIRY_S: number % 5})
        body = Random(number).randbytes(number % 300)
        data = encode_publish(topic.encode(), body, qos, retain=retain, packet_id=packet_id, properties=about)
        self._last = data
        self._send(data)
        if qos:
            self._until(PUBACK if qos == 1 else PUBREC, packet_id)
        if qos == 2:
            self._unreleased.append(packet_id)
        self._settle()

    def _repeat(self, _number: int) -> None:
        """Send the last PUBLISH again, as a client after a lost connection may do."""
        if self._is_connected and self._last:
            qos = self._last[0] >> 1 & 3
            self._send(bytes((self._last[0] | (8 if qos else 0),)) + self._last[1:])
            self._settle()

    def _release(self, which: str) -> None:
        if not self._is_connected:
            return
        if which == "right" and self._unreleased:
            packet_id = self._unreleased.pop(0)
            self._send(encode_acks(PUBREL, [packet_id]))
            answer = self._until(PUBCOMP, packet_id)
            assert len(answer) < 3 or answer[2] == 0, f"a PUBCOMP with 0x{answer[2]:02x} for a message that waits for it"
            self._done.append(packet_id)
        elif which != "right":
            packet_id = self._done[-1] if which == "again" and self._done else 65_000
            if packet_id in self._unreleased:
                return
            self._send(encode_acks(PUBREL, [packet_id]))
            answer = self._until(PUBCOMP, packet_id)
            assert not self._is_v5 or answer[2:] == (NOT_FOUND,), f"{answer} for a PUBREL of an unknown packet id"
        self._settle()

    def _acknowledge(self, which: str, number: int) -> None:
        if not self._is_connected:
            return
        if which == "wrong" or not self._due:
            kind = (PUBACK, PUBREC, PUBCOMP)[number % 3]
            self._send(encode_acks(kind, [64_000]))
            if kind == PUBREC:
                answer = self._until(PUBREL, 64_000)
                assert not self._is_v5 or answer[2:] == (NOT_FOUND,), f"{answer} for a PUBREC of an unknown packet id"
        else:
            packet_id, qos = self._due.pop(-1 if which == "last first" else 0)
            kind = PUBACK if (qos == 1) != (which == "other kind") else PUBREC
            self._send(encode_acks(kind, [packet_id]) * (2 if which == "again" else 1))
            if which in ("right", "last first") and qos == 2:
                answer = self._until(PUBREL, packet_id)
                assert len(answer) < 3 or answer[2] == 0, f"a PUBREL with 0x{answer[2]:02x}"
                self._send(encode_acks(PUBCOMP, [packet_id]))
        self._settle()

    def _ping(self) -> None:
        if self._is_connected:
            self._settle()

    # --- what is wrong ------------------------------------------------------------------------------------------------

    def _violate(self, name: str) -> None:
        """Break a rule: the node must close with the reason, and say nothing after that."""
        if not self._is_connected:
            return
        wire = self._wire
        assert wire is not None
        if name == "more than the receive maximum":
            self._connect_again()  # Messages that wait for a PUBREL count, too.
            self._old.append(wire)
            wire = self._wire
            assert wire is not None
        self._send(VIOLATIONS[name].data)
        reasons = []
        while found := wire.receive():
            if found[0] == DISCONNECT:
                reasons.append(found[2][0])
        assert reasons == [VIOLATIONS[name].reason], f"{name}: reasons {reasons} in place of {VIOLATIONS[name].reason!r}"

    def _mutate(self, data: bytes, number: int) -> None:
        """Send a packet of which some bytes are others. Whatever comes of it, a reason must be one that MQTT names."""
        changed = bytearray(data)
        random = Random(number)
        for _ in range(random.randrange(4)):
            changed[random.randrange(len(changed))] = random.randrange(256)
        self._anything(bytes(changed))

    def _garbage(self, data: bytes) -> None:
        self._anything(data)

    def _anything(self, data: bytes) -> None:
        """Send anything, then close the sending side's part of it: the state of the connection is unknown after that."""
        if not self._is_connected:
            return
        wire = self._wire
        assert wire is not None
        wire.send(data + PING * 2 + BYE)
        wire.send(bytes(300) + BYE)  # What was cut short is complete with it, or is malformed.
        reasons = []
        self.counts["bytes of any kind"] += 1
        wire.stop_sending()
        while found := wire.receive():
            if found[0] == DISCONNECT and self._is_v5:
                reasons.append(found[2][0])
        assert all(one in REASONS[DISCONNECT] for one in reasons), reasons
        assert len(reasons) <= 1, reasons

    # --- packets ------------------------------------------------------------------------------------------------------

    def _send(self, data: bytes) -> None:
        assert self._wire is not None
        self._wire.send(data)

    def _note(self, found: Packet) -> None:
        if found[0] in (PUBLISH, PUBLISH_WITH) and found[1] & 6:
            self._due.append((found[3], found[1] >> 1 & 3))

    def _until(self, kind: int, packet_id: int) -> Packet:
        """Return the answer to a packet id, and note deliveries that come before it."""
        assert self._wire is not None
        while found := self._wire.receive():
            self._note(found)
            if found[0] == kind and _id_of(found) == packet_id:
                return found
        raise AssertionError(f"the node closed the connection before the answer of type {kind} to the packet id {packet_id}")

    def _settle(self) -> None:
        """Wait until the node has handled all that was sent. It must not have closed the connection."""
        self._send(PING)
        assert self._wire is not None
        while found := self._wire.receive():
            self._note(found)
            if found[0] == PINGRESP:
                return
            assert found[0] != DISCONNECT, f"the node closed the connection with 0x{found[2][0]:02x} for no reason"
        raise AssertionError("the node closed the connection for no reason")


def _id_of(found: Packet) -> int:
    if found[0] in (SUBACK, UNSUBACK) and len(found) > 2:
        return int.from_bytes(found[2][:2], "big")
    return int(found[1])
