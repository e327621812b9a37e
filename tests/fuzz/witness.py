"""A client that sees all messages of the sequences, and says which of them must not have come, or are missing.

A message of the sequences names its publisher and its topic in its body, so whoever gets it can tell whether it may be there.
"""

from __future__ import annotations

import socket
from collections import Counter, deque

from penstock.gateway.protocol.decode import decode
from penstock.gateway.protocol.encode import encode_acks, encode_publish
from penstock.gateway.protocol.fixed_header import FROM_SERVER_5
from penstock.gateway.protocol.packets import CONNACK, PUBACK, PUBLISH, PUBLISH_WITH, SUBACK, Packet
from penstock.store.options import KIB, MIB
from tests.fuzz.callers import Caller
from tests.gateway.packet_cases_5 import connect_5, subscribe_5
from tests.gateway.wire import CLEAN

SEAL = b"of the fuzzer\0"
WAIT_S = 10.0
USER, PASSWORD = 0x80, 0x40
SEEN_MAX = 100_000
TOPICS = "seq/#"


def seal(publisher: str, topic: str, number: int, rest: bytes = b"") -> bytes:
    """Return a body that says who publishes it, where, and as which of its messages."""
    topic = topic.removeprefix("$delayed/0/")
    return SEAL + b"\0".join((publisher.encode(), topic.encode(), b"%d" % number, rest))


def opened(body: bytes) -> tuple[str, str, int] | None:
    """Return publisher, topic and number of a body; None if it has no seal."""
    if not body.startswith(SEAL):
        return None
    publisher, topic, number, _ = body.removeprefix(SEAL).split(b"\0", 3)
    return publisher.decode(), topic.decode(), int(number)


def login(caller: Caller) -> tuple[int, tuple[bytes, ...]]:
    """Return the flags of a caller's CONNECT, and the fields that they announce."""
    if not caller.name:
        return 0, ()
    return USER | PASSWORD, (caller.name.encode(), caller.password.encode())


class Witness:
    """Subscribes to all topics of the sequences.

    Parameters:
        port: of the node.
        keeper: may read all of these topics.
        callers: who publishes, by name.
    """

    def __init__(self, port: int, keeper: Caller, callers: dict[str, Caller]) -> None:
        self._callers = callers
        self._keeper = keeper
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
        self._packets: deque[Packet] = deque()
        self._rest = b""
        self._sent = 0
        self._came: Counter[bytes] = Counter()
        """How often a body came, of the last sequence."""
        self._never: dict[bytes, str] = {}
        """Bodies that must not come, with the reason."""
        flags, fields = login(keeper)
        hello = connect_5(CLEAN | flags, b"keeper-witness" if keeper.name else b"witness", *fields, keep_alive_s=0)
        self._socket.sendall(hello + subscribe_5(1, (TOPICS.encode(), 1)))
        assert [self._next()[0] for _ in range(2)] == [CONNACK, SUBACK]

    def _next(self) -> Packet:
        while not self._packets:
            data = self._socket.recv(64 * KIB)
            assert data, "the node has closed the connection of the witness"
            packets, used = decode(self._rest + data, 64 * MIB, FROM_SERVER_5)
            self._rest = (self._rest + data)[used:]
            self._packets.extend(packets)
        return self._packets.popleft()

    def begin(self) -> None:
        """Begin a sequence."""
        self._came.clear()
        while len(self._never) > SEEN_MAX:
            del self._never[next(iter(self._never))]

    def publish(self, topics: tuple[str, ...]) -> None:
        """Publish to some topics, for those who may read them, and those who may not."""
        for topic in topics:
            self._sent += 1
            self._publish(topic, seal(self._keeper.name, topic, self._sent, b"witness"), retain=bool(self._sent % 3 == 0))

    def _publish(self, topic: str, body: bytes, *, retain: bool = False) -> None:
        packet_id = self._sent % 60_000 + 1
        self._socket.sendall(encode_publish(topic.encode(), body, 1, retain=retain, packet_id=packet_id, properties=b"\0"))
        while (found := self._next())[:2] != (PUBACK, packet_id):
            self._note(found)
        assert len(found) < 3 or found[2] < 0x80, f"{found} for a message of the witness to {topic!r}"

    def never(self, body: bytes, why: str) -> None:
        """State that a message must not come. `caught_up` checks that it has not."""
        self._never[body] = why
        assert not self._came[body], f"{body!r} came, {why}"

    def wait_for(self, body: bytes) -> None:
        """Return when a message has come. The socket has a time limit."""
        while not self._came[body]:
            self._note(self._next())

    def caught_up(self) -> None:
        """Read all messages that the node stored before now."""
        self._sent += 1
        body = seal(self._keeper.name, "seq/mark", self._sent, b"witness")
        self._publish("seq/mark", body)
        self.wait_for(body)

    def came(self, body: bytes) -> int:
        """Return how often a message came in this sequence."""
        return self._came[body]

    def _note(self, found: Packet) -> None:
        if found[0] == PUBACK:
            return  # of a sequence that failed meanwhile
        assert found[0] in (PUBLISH, PUBLISH_WITH), found
        topic, body = found[2].decode(), found[4]
        if found[1] & 6:
            self._socket.sendall(encode_acks(PUBACK, [found[3]]))
        sealed = opened(body)
        if sealed is not None:
            publisher, stated, _ = sealed
            assert stated == topic, f"a message to {stated!r} came as one of {topic!r}"
            assert self._callers[publisher].may_write(topic), f"{publisher!r} published to {topic!r}"
        assert body not in self._never, f"{body!r} came, {self._never[body]}"
        self._came[body] += 1

    def close(self) -> None:
        self._socket.close()
