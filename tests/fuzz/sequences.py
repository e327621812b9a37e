"""Sequences of a client that knows MQTT's states, and breaks its rules at any step.

Hypothesis generates the steps, and a `Player` plays them on a live node. The player keeps what client and node must know of
each other, so it can acknowledge what is due, what is not, twice, or out of order. Each violation must get the reason that
MQTT 5.0 names, as the shared table of packets states it. Beside it a `Witness` sees all messages. Whoever the client is:

    a message that it gets       is of a topic that it may read, and to which it has subscribed
    a message of an ack          is one that it may publish, and comes to the witness; each comes once
    a subscription               is granted if, and only if, the client may have it
    a will                       comes when the client goes without a DISCONNECT, and only then
    answers                      come once each, and those to PUBLISHes in order
"""

from __future__ import annotations

import ssl
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Several
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
from tests.fuzz.callers import EVERYBODY, Caller, contains
from tests.fuzz.inputs import acks, connects, others, publishes, subscribes
from tests.fuzz.wires import TRANSPORTS, Wire
from tests.fuzz.witness import Witness, login, opened, seal
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

TOPICS = (
    "seq/a",
    "seq/a/b",
    "seq/é",
    "$delayed/0/seq/a",
    "seq/" + "x" * 200,
    "seq/own/x",
    "seq/secret/x",
    "$delayed/0/seq/secret/x",
)
FILTERS = (
    "seq/a",
    "seq/+",
    "seq/#",
    "+/a",
    "#",
    "$share/seq/seq/a",
    "$share/seq/seq/own/#",
    "$share/other/seq/secret/#",
    "seq/" + "x" * 200,
    "seq/own/#",
    "seq/secret/x",
    "seq/+/x",
)
CLIENTS = ("seq-1", "seq-2", "")
WILL_TOPICS = ("seq/a", "seq/own/x", "seq/secret/x")

REFUSED_STRANGER = (4, 5, ReasonCode.BAD_USER_NAME_OR_PASSWORD, ReasonCode.NOT_AUTHORIZED)
REFUSED_WILL = (5, ReasonCode.NOT_AUTHORIZED)
DENIED = ReasonCode.NOT_AUTHORIZED
FULL = ReasonCode.QUOTA_EXCEEDED

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


Answered = Callable[[Packet], None]
Asked = tuple[bytes, tuple[int, int], Answered]
"""A packet, the type and packet id of its answer, and what checks the answer."""


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
        filters = st.lists(st.sampled_from(FILTERS), min_size=1, max_size=4, unique=True).map(tuple)
        subscribe = _step("subscribe", filters, qos, number)
        unsubscribe = _step("unsubscribe", filters)
        publish = _step("publish", st.sampled_from(TOPICS), qos, st.booleans(), number)
        asking = st.one_of(publish, publish, publish, subscribe, unsubscribe, _step("ping"))
        sound = st.one_of(
            subscribe,
            unsubscribe,
            publish,
            publish,
            _step("pipeline", st.lists(asking, min_size=2, max_size=8)),
            _step("others", st.lists(st.sampled_from(TOPICS), min_size=1, max_size=4).map(tuple)),
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
        callers: who connects, each time one of them.
        keeper: may read and publish all that the sequences are about.
    """

    def __init__(
        self,
        ports: Mapping[str, int],
        context: ssl.SSLContext,
        callers: Several[Caller] = (EVERYBODY,),
        keeper: Caller = EVERYBODY,
    ) -> None:
        self._ports = ports
        self._context = context
        self._callers = callers
        self._by_name = {caller.name: caller for caller in (*callers, keeper) if caller.is_known}
        self._witness = Witness(ports["mqtt"], keeper, self._by_name)
        self.counts: Counter[str] = Counter()
        """How often which step was played, and sequences by transport."""
        self._transport, self._is_v5 = "mqtt", True
        self._wire: Wire | None = None
        self._old: list[Wire] = []
        self._next_id = 0
        self._bodies = 0
        self._filters: dict[str, set[str]] = {}
        """The filters to which clients have subscribed, by client id."""

    def play(self, sequence: Sequence) -> None:
        """Play a sequence, and end its connections."""
        self._transport, self._is_v5 = sequence.transport, sequence.is_v5
        self.counts[f"sequences over {sequence.transport}"] += 1
        self._witness.begin()
        self._will = b""
        self._sends: Counter[bytes] = Counter()
        """How often the node may store a message, by body."""
        self._stored: set[bytes] = set()
        """The bodies of messages that the node has acknowledged."""
        try:
            for step in sequence.steps:
                self.counts[step.do] += 1
                getattr(self, f"_{step.do}")(*step.arguments)
            if self._is_connected:
                self._leave("drop")
        finally:
            self._end()
        self._witness.caught_up()
        for body in self._stored:
            assert self._witness.came(body), f"{body!r} was acknowledged, and is missing"
        for body, times in self._sends.items():
            assert self._witness.came(body) <= times, (
                f"{body!r} was sent {times} times, and came {self._witness.came(body)} times"
            )

    def close(self) -> None:
        self._witness.close()

    def _end(self) -> None:
        for wire in (*self._old, *((self._wire,) if self._wire is not None else ())):
            wire.close()
        self._old, self._wire = [], None

    def _forget(self) -> None:
        self._unreleased: list[int] = []
        """Messages at QoS 2 whose PUBREC has come."""
        self._due: list[tuple[int, int]] = []
        """Packet id and QoS of deliveries that wait for an acknowledgement."""
        self._done: list[int] = []
        self._last = b""
        self._last_body = b""
        self._odd_acks = 0
        """Acknowledgements that were not due, by which the node may have taken another delivery for acknowledged."""

    @property
    def _is_connected(self) -> bool:
        return self._wire is not None and self._wire.is_open

    def _dial(self) -> Wire:
        return Wire(self._ports, self._transport, self._context, is_v5=self._is_v5)

    # --- beginnings and ends ------------------------------------------------------------------------------------------

    def _hello(self, client_id: str, is_clean: bool, receive_max: int, number: int) -> bytes:
        flags, fields = login(self._caller)
        flags |= CLEAN if is_clean or not client_id else 0
        if self._will:
            _, topic, _ = opened(self._will) or ("", "", 0)
            flags |= 4 | number % 3 << 3 | (0x20 if number & 1 else 0)
            fields = (topic.encode(), self._will, *fields)
        if not self._is_v5:
            return connect(flags, client_id.encode(), *fields)
        about = {Property.RECEIVE_MAXIMUM: receive_max, Property.SESSION_EXPIRY_S: 1}
        will = write_properties({Property.MESSAGE_EXPIRY_S: 600}) if self._will and number & 2 else b"\0"
        return connect_5(flags, client_id.encode(), *fields, about=write_properties(about), will=will)

    def _connect(self, client_id: str, is_clean: bool, receive_max: int, number: int) -> None:
        if self._is_connected:
            self._leave("disconnect")
        self._forget()
        self._begun = (client_id, is_clean, receive_max, number)
        caller = self._caller = self._callers[number % len(self._callers)]
        self._receive_max = receive_max if self._is_v5 else RECEIVE_MAX
        client_id = f"{caller.name}-{client_id}" if caller.name and client_id else client_id
        will_topic = WILL_TOPICS[number // 64 % 3] if number // 256 % 2 else ""
        self._bodies += 1
        self._will = seal(caller.name, will_topic, self._bodies) if will_topic else b""
        self._client = client_id
        self._wire = self._dial()
        self._wire.send(self._hello(client_id, is_clean, receive_max, number))
        answer = self._wire.receive()
        assert answer, "the node closed the connection in place of a CONNACK"
        assert answer[0] == CONNACK, answer
        is_present, reason = answer[2][:2]
        if is_present:
            self._filters.setdefault(client_id, {"#"})  # its session is of a sequence before, and may have asked for anything
        elif reason == 0:  # A CONNECT that is refused ends no session.
            self._filters[client_id] = set()
        may_have_will = not will_topic or caller.may_write(will_topic)
        if caller.is_known and may_have_will:
            assert reason == 0, f"a valid CONNECT of {caller.name!r} was refused with 0x{reason:02x}"
            self._settle()
            return
        refusal = REFUSED_WILL if caller.is_known else REFUSED_STRANGER
        assert reason in refusal, (
            f"a CONNECT of {caller.name!r} got 0x{reason:02x}: its password or will is not one that it may have"
        )
        if self._will:
            self._witness.never(self._will, "its client was refused")
        self._will = b""
        assert not self._wire.receive(), "the node goes on after it has refused a CONNECT"
        self._wire.close()

    def _leave(self, how: str) -> None:
        if not self._is_connected:
            return
        wire = self._wire
        assert wire is not None
        if how == "disconnect":
            wire.send(BYE)
            while found := wire.receive():
                self._judge_delivery(found)
            wire.close()
            if self._will:
                self._witness.never(self._will, "its client has left with a DISCONNECT")
            self._will = b""
        elif how == "drop":
            wire.close()
        else:
            wire.reset()
        self._will_comes()

    def _will_comes(self) -> None:
        """Wait for the will of a client that has gone without a DISCONNECT."""
        will, self._will = self._will, b""
        if will:
            self.counts["wills"] += 1
            self._witness.wait_for(will)

    def _take_over(self) -> None:
        """Connect with the same client id: the node must tell the first connection, and close it."""
        if not self._is_connected or not self._begun[0]:
            return
        first, will = self._wire, self._will
        filters = set(self._filters.get(self._client, ()))
        assert first is not None
        self._old.append(first)
        self._connect_again()
        reasons = []
        while found := first.receive():
            self._judge_delivery(found, filters)
            if found[0] == DISCONNECT:
                reasons.append(found[2][0])
        if will:
            self._witness.wait_for(will)
        assert not self._is_v5 or reasons == [ReasonCode.SESSION_TAKEN_OVER], f"reasons {reasons} for a session taken over"

    def _connect_again(self) -> None:
        self._wire = None
        self._connect(*self._begun)

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

    def _subscribe(self, *arguments: Any) -> None:
        self._pipeline([Step("subscribe", arguments)])

    def _unsubscribe(self, *arguments: Any) -> None:
        self._pipeline([Step("unsubscribe", arguments)])

    def _publish(self, *arguments: Any) -> None:
        self._pipeline([Step("publish", arguments)])

    def _pipeline(self, steps: list[Step]) -> None:
        """Send packets in one write, and check that each gets its answer, once; those to PUBLISHes in their order."""
        if not self._is_connected or len(self._unreleased) > 20:
            return
        asked = [asking for step in steps if (asking := getattr(self, f"_ask_{step.do}")(*step.arguments)) is not None]
        waiting = {key: check for _, key, check in asked if key[0]}
        self._send(b"".join(data for data, _, _ in asked))
        wire = self._wire
        assert wire is not None
        while waiting:
            found = wire.receive()
            assert found, f"the node closed the connection before the answers {sorted(waiting)}"
            self._note(found)
            assert found[0] != DISCONNECT, f"the node closed the connection with 0x{found[2][0]:02x} for no reason"
            key = (found[0], _id_of(found)) if found[0] in (PUBACK, PUBREC, SUBACK, UNSUBACK) else (0, 0)
            if key not in waiting:
                continue
            if key[0] in (PUBACK, PUBREC):
                first = next(one for one in waiting if one[0] == key[0])
                assert key == first, f"the answer {key} came before {first}"  # [MQTT-4.6.0-2] [MQTT-4.6.0-3]
            waiting.pop(key)(found)
        self._settle()

    def _ask_ping(self) -> Asked:
        return PING, (0, 0), lambda _: None

    def _ask_subscribe(self, topic_filters: tuple[str, ...], qos: int, number: int) -> Asked:
        several, packet_id = [], self._new_id()
        for at, topic_filter in enumerate(topic_filters):
            options = qos
            if self._is_v5:
                options |= (0, 8)[number >> at & 1] | (0, 0x10, 0x20)[(number + at) % 3]
                options |= 4 if number >> at & 2 and not topic_filter.startswith("$share") else 0
            several.append((topic_filter.encode(), options))
            self._filters.setdefault(self._client, set()).add(
                topic_filter.split("/", 2)[2] if "$share" in topic_filter else topic_filter
            )

        def check(answer: Packet) -> None:
            reasons = answer[2][-len(topic_filters) :] if self._is_v5 else answer[2][2:]
            assert len(reasons) == len(topic_filters), f"{answer} for {topic_filters}"
            for topic_filter, reason in zip(topic_filters, reasons, strict=True):
                may = self._caller.may_subscribe(topic_filter)
                fitting = (*range(qos + 1), 0x80, FULL) if may else (0x80, DENIED)
                assert reason in fitting, f"a SUBACK with 0x{reason:02x} for {topic_filter!r} of {self._caller.name!r}"
                assert may is False or reason != 0x80 or not self._is_v5, f"{topic_filter!r} was refused for no reason"
                self.counts["granted" if reason < 0x80 else "not granted"] += 1

        return (subscribe_5 if self._is_v5 else subscribe)(packet_id, *several), (SUBACK, packet_id), check

    def _ask_unsubscribe(self, topic_filters: tuple[str, ...]) -> Asked:
        packet_id = self._new_id()

        def check(answer: Packet) -> None:
            if self._is_v5:
                reasons = answer[2][-len(topic_filters) :]
                assert all(one in (0, ReasonCode.NO_SUBSCRIPTION_EXISTED) for one in reasons), answer

        encoded = (topic_filter.encode() for topic_filter in topic_filters)
        return (unsubscribe_5 if self._is_v5 else unsubscribe)(packet_id, *encoded), (UNSUBACK, packet_id), check

    def _ask_publish(self, topic: str, qos: int, retain: bool, number: int) -> Asked:
        packet_id = self._new_id() if qos else 0
        about, expires = b"\0" if self._is_v5 else b"", False
        if self._is_v5 and number % 4 == 0:
            expires = True
            about = write_properties({Property.TOPIC_ALIAS: number % ALIAS_MAX + 1, Property.MESSAGE_EXPIRY_S: number % 5})
        self._bodies += 1
        target = topic.removeprefix("$delayed/0/")
        body = seal(self._caller.name, topic, self._bodies, Random(number).randbytes(number % 300))
        data = encode_publish(topic.encode(), body, qos, retain=retain, packet_id=packet_id, properties=about)
        self._last, self._last_body = data, body
        self._sends[body] += 1
        may = self._caller.may_write(target)
        if not may:
            self._witness.never(body, f"{self._caller.name!r} may not publish it")

        def check(answer: Packet) -> None:
            reason = answer[2] if len(answer) > 2 and self._is_v5 else 0
            fitting = reason < 0x80 or reason == FULL if may else not self._is_v5 or reason == DENIED
            assert fitting, f"0x{reason:02x} for a message of {self._caller.name!r} to {topic!r}"
            if reason >= 0x80:
                return
            if qos == 2:
                self._unreleased.append(packet_id)
            if may and not expires and target == topic:
                self._stored.add(body)

        return data, (PUBACK if qos == 1 else PUBREC if qos == 2 else 0, packet_id), check

    def _others(self, topics: tuple[str, ...]) -> None:
        """Let somebody else publish to some topics, whether the client may read them or not."""
        self._witness.publish(topics)
        if self._is_connected:
            self._settle()

    def _repeat(self, _number: int) -> None:
        """Send the last PUBLISH again, as a client after a lost connection may do."""
        if not self._is_connected or not self._last:
            return
        qos = self._last[0] >> 1 & 3
        packet_id = self._next_id
        is_new = qos < 2 or packet_id not in self._unreleased
        self._sends[self._last_body] += is_new
        self._send(bytes((self._last[0] | (8 if qos else 0),)) + self._last[1:])
        if qos == 2 and packet_id in self._done:
            answer = self._until(PUBREC, packet_id)
            if len(answer) < 3 or answer[2] < 0x80:
                self._done.remove(packet_id)
                self._unreleased.append(packet_id)
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
            self._odd_acks += 1
            self._send(encode_acks(kind, [64_000]))
            if kind == PUBREC:
                answer = self._until(PUBREL, 64_000)
                assert not self._is_v5 or answer[2:] == (NOT_FOUND,), f"{answer} for a PUBREC of an unknown packet id"
        else:
            packet_id, qos = self._due.pop(-1 if which == "last first" else 0)
            kind = PUBACK if (qos == 1) != (which == "other kind") else PUBREC
            self._odd_acks += which in ("again", "other kind")
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
            if not self._caller.may_write("seq/a"):
                return  # A message that is refused does not count.
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
        self._will_comes()

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
        self._filters[self._client] = {"#", "$SYS/#"}  # It may have subscribed to anything.
        self._will = b""  # It may have left with a DISCONNECT, or not.
        wire.send(data + PING * 2 + BYE)
        wire.send(bytes(300) + BYE)  # What was cut short is complete with it, or is malformed.
        reasons = []
        self.counts["bytes of any kind"] += 1
        wire.stop_sending()
        while found := wire.receive():
            self._judge_delivery(found)
            if found[0] == DISCONNECT and self._is_v5:
                reasons.append(found[2][0])
        assert all(one in REASONS[DISCONNECT] for one in reasons), reasons
        assert len(reasons) <= 1, reasons

    # --- packets ------------------------------------------------------------------------------------------------------

    def _send(self, data: bytes) -> None:
        assert self._wire is not None
        self._wire.send(data)

    def _note(self, found: Packet) -> None:
        self._judge_delivery(found)
        if found[0] in (PUBLISH, PUBLISH_WITH) and found[1] & 6:
            due = (found[3], found[1] >> 1 & 3)
            if not self._odd_acks:
                assert due[0] not in [packet_id for packet_id, _ in self._due], f"the packet id {due[0]} is in use"
                assert len(self._due) < self._receive_max, f"more than {self._receive_max} deliveries wait for an ack"
            self._due.append(due)

    def _judge_delivery(self, found: Packet, filters: set[str] | None = None) -> None:
        """Check that a message may come to a client."""
        if found[0] not in (PUBLISH, PUBLISH_WITH):
            return
        caller, topic = self._caller, found[2].decode()
        assert caller.may_receive(topic), f"{caller.name!r} received a message of {topic!r}"
        asked = filters if filters is not None else self._filters.get(self._client, set())
        assert any(contains(one, topic) for one in asked), f"a message of {topic!r} for {asked}"
        sealed = opened(found[4])
        if sealed is not None:
            publisher, stated, _ = sealed
            assert stated == topic, f"a message to {stated!r} came as one of {topic!r}"
            assert self._by_name[publisher].may_write(topic), f"{publisher!r} published to {topic!r}"
        self.counts["deliveries"] += 1

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
