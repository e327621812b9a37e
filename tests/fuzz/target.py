"""A live node under attack, and a well-behaved client that it must serve meanwhile."""

from __future__ import annotations

import json
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from penstock.gateway.protocol.decode import decode
from penstock.gateway.protocol.encode import encode_acks, encode_publish
from penstock.gateway.protocol.fixed_header import FROM_SERVER_5
from penstock.gateway.protocol.packets import CONNACK, PUBACK, PUBLISH, PUBLISH_WITH, SUBACK, Packet
from penstock.store.options import KIB, MIB
from tests.fuzz.callers import CALLERS, EVERYBODY, KEEPER, Caller
from tests.fuzz.calls import Calls, CallSequence
from tests.fuzz.codec import check_answers
from tests.fuzz.inputs import Attack
from tests.fuzz.node import CERTIFICATES
from tests.fuzz.sequences import Player, Sequence
from tests.fuzz.witness import login
from tests.gateway.packet_cases_5 import connect_5, subscribe_5
from tests.gateway.wire import CLEAN

ROOT = Path(__file__).parents[2]

DEADLINE_S = 10.0
"""How long one input may take, in seconds. Inputs take milliseconds, so only a hang takes this long."""

GROWTH_KIB_MAX = 32 * KIB
"""By how much the node's own memory may grow between a quarter and the end of a run, because its caches still fill."""

SETTLED_S_MAX = 20.0
"""How long the node may keep resources of clients that have gone: a session lasts a second, and closing takes one."""


DESCRIPTORS_MORE_MAX = 16
"""The number of open files may vary by this, because those of segments and index come and go."""


class Hang(Exception):
    """Raised when an input takes longer than `DEADLINE_S`."""


@contextmanager
def deadline(seconds: float = DEADLINE_S) -> Iterator[None]:
    """Raise Hang in code that runs for too long. Use it on the main thread only."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise Hang(f"an input takes longer than {seconds:g} s")

    began_s = time.monotonic()
    before = signal.signal(signal.SIGALRM, ring)
    others_s, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if others_s:  # The test has a deadline of its own.
            signal.setitimer(signal.ITIMER_REAL, max(others_s - (time.monotonic() - began_s), 0.001))


class Honest:
    """A well-behaved client of MQTT 5.0."""

    def __init__(self, port: int, caller: Caller) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)
        self._packets: deque[Packet] = deque()
        self._rest = b""
        self._sent = 0
        flags, fields = login(caller)
        hello = connect_5(CLEAN | flags, b"honest", *fields, keep_alive_s=0)
        self._socket.sendall(hello + subscribe_5(1, (b"honest/#", 1)))
        assert [self._next()[0] for _ in range(2)] == [CONNACK, SUBACK]

    def _next(self) -> Packet:
        while not self._packets:
            data = self._socket.recv(64 * KIB)
            assert data, "the node has closed the connection of the well-behaved client"
            packets, used = decode(self._rest + data, 64 * MIB, FROM_SERVER_5)
            self._rest = (self._rest + data)[used:]
            self._packets.extend(packets)
        return self._packets.popleft()

    def is_served(self) -> None:
        """Publish at QoS 1; return when the message is acknowledged and delivered back."""
        self._sent += 1
        body = b"%d" % self._sent
        self._socket.sendall(encode_publish(b"honest/x", body, 1, packet_id=1, properties=b"\0"))
        missing = {PUBACK, PUBLISH}
        while missing:
            found = self._next()
            if found[0] == PUBACK:
                assert found == (PUBACK, 1), found
                missing.discard(PUBACK)
            else:
                assert found[0] in (PUBLISH, PUBLISH_WITH), found
                assert found[4] == body, f"{body!r} is due, and {found} came: it is out of order or a duplicate"
                missing.discard(PUBLISH)
                self._socket.sendall(encode_acks(PUBACK, [found[3]]))

    def close(self) -> None:
        self._socket.close()


class Target:
    """The process of the node, the attacks on it, and its use of resources.

    Parameters:
        is_secured: it has access control, and `CALLERS` call. Otherwise everybody may do everything.
    """

    def __init__(self, *, is_secured: bool = False) -> None:
        callers, keeper = (CALLERS, KEEPER) if is_secured else ((EVERYBODY,), EVERYBODY)
        self._directory = tempfile.TemporaryDirectory(prefix="penstock-fuzz-")
        self._log = Path(self._directory.name, "log")
        mode = ["secured"] if is_secured else []
        command = [sys.executable, "-m", "tests.fuzz.node", str(Path(self._directory.name, "data")), *mode]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, bufsize=1
            )
        with deadline(60):
            self._ports: dict[str, int] = self._answer()
        self.pid = self._process.pid
        self.context = ssl.create_default_context(cafile=Path(self._directory.name, CERTIFICATES, "ca.pem"))
        self.player = Player(self._ports, self.context, callers, keeper)
        self.calls = Calls(self._ports["pop"], callers, keeper)
        self.inputs = self.connections = self._log_at = 0
        self.slowest_s = 0.0
        self.samples: list[tuple[float, int]] = []
        """The time and the node's anonymous memory in KiB, sampled once a second."""
        self._honest = Honest(self._ports["mqtt"], keeper)
        self._first = self.check("state")
        """The resources that the node holds for the well-behaved client."""

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise AssertionError(f"the node has ended with {self._process.wait()}: {self._log.read_text()[-4000:]}")
        if not line.startswith("{"):
            raise AssertionError(f"the node logged an error: {line.strip()}")
        return json.loads(line)

    def check(self, ask: str = "") -> dict[str, Any]:
        """Raise AssertionError if the node has an unhandled exception; with `ask` "state" return its resources."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{ask}\n")
        answer: dict[str, Any] = self._answer()
        if answer["failures"]:
            raise AssertionError(f"in the node: {answer['failures']}")
        self._check_log()
        return answer

    def _check_log(self) -> None:
        """Raise AssertionError if the node has logged an exception since the last look."""
        with self._log.open("rb") as log:
            log.seek(self._log_at)
            said = log.read()
        self._log_at += len(said)
        if b"Traceback" in said:
            raise AssertionError(f"the node logged: {said[-4000:].decode(errors='replace')}")

    def attack(self, attack: Attack) -> None:
        """Run an attack. The node must then have answered and closed the connections, and serve the well-behaved client."""
        self._run(lambda: self._attack(attack))
        self.connections += len(attack.streams)

    def play(self, sequence: Sequence) -> None:
        """Play a sequence of a client that knows the protocol, and check what the node answers, and that it serves others."""
        self._run(lambda: self.player.play(sequence))

    def call(self, sequence: CallSequence) -> None:
        """Play a sequence of calls over gRPC, and check the statuses, and that the node serves others."""
        self._run(lambda: self.calls.play(sequence))

    def _run(self, work: Callable[[], None]) -> None:
        began_s = time.monotonic()
        with deadline():
            work()
            self._honest.is_served()
            self.check()
        now_s = time.monotonic()
        self.inputs += 1
        self.slowest_s = max(self.slowest_s, now_s - began_s)
        if not self.samples or now_s - self.samples[-1][0] >= 1:
            self.samples.append((now_s, self.check("state")["anonymous_kib"]))

    def _attack(self, attack: Attack) -> None:
        ends = [self.dial(attack.listener) for _ in attack.streams]
        waiting = [deque(pieces) for pieces in attack.streams]
        while any(waiting):
            for end, pieces in zip(ends, waiting, strict=True):
                if pieces:
                    try:
                        end.sendall(pieces.popleft())
                    except ConnectionError:
                        pieces.clear()  # The node may close the connection at any time.
        for end in ends:
            if attack.is_reset:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            else:
                answers = _until_closed(end)
                if attack.listener == "mqtt":
                    check_answers(answers)
            end.close()

    def dial(self, listener: str) -> socket.socket:
        """Open a connection to one of the node's listeners."""
        return socket.create_connection(("127.0.0.1", self._ports[listener]))

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> dict[str, Any]:
        """End the run, check that no resources leaked, and return the last state of the node."""
        with deadline(SETTLED_S_MAX + DEADLINE_S):
            self.calls.clean()
            until_s = time.monotonic() + SETTLED_S_MAX
            while True:
                state = self.check("state")
                held = {name: count for name, count in state["held"].items() if count > self._first["held"][name]}
                if not held or time.monotonic() > until_s:
                    break
                time.sleep(0.05)
        assert held == {}, f"the node holds more than the clients that are connected: {held}"
        more = state["descriptors"] - self._first["descriptors"]
        assert more <= DESCRIPTORS_MORE_MAX, f"{more} more sockets or files are open than at the start"
        grown_kib = self.grown_kib(state["anonymous_kib"])
        assert grown_kib <= GROWTH_KIB_MAX, f"the node's memory grew by {grown_kib} KiB: {self.samples}"
        self._honest.close()
        self.player.close()
        self.calls.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(DEADLINE_S) == 0
        return state

    def grown_kib(self, last_kib: int) -> int:
        """Return the growth of the node's memory since a quarter of the run."""
        return last_kib - self.samples[len(self.samples) // 4][1] if self.samples else 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._process.poll() is None:
            self.kill()
        self._directory.cleanup()


def _until_closed(end: socket.socket) -> bytes:
    """Shut down our side, and return all bytes that the node sends until it closes."""
    answers = b""
    with suppress(ConnectionError, OSError):
        end.shutdown(socket.SHUT_WR)
        while data := end.recv(64 * KIB):
            answers += data
    return answers
