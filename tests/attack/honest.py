"""The honest clients beside an attack: publisher and subscriber at QoS 1 over TLS, POP consumer, a device that comes again."""

from __future__ import annotations

import asyncio
import struct
import time
from contextlib import suppress
from dataclasses import dataclass, field
from secrets import token_bytes

from penstock import Client, Security
from penstock.gateway.protocol.decode import decode
from penstock.gateway.protocol.encode import encode_acks, encode_publish
from penstock.gateway.protocol.fixed_header import FROM_SERVER_5
from penstock.gateway.protocol.packets import CONNACK, PUBACK, PUBLISH, PUBLISH_WITH, SUBACK, Packet
from penstock.store.options import KIB, MIB
from tests.attack.bystander import Bystander
from tests.attack.ground import HONEST, HONEST_PASSWORD, HONEST_SUBSCRIBER, HONEST_TOKEN, Ground
from tests.gateway.packet_cases_5 import connect_5, subscribe_5
from tests.gateway.wire import CLEAN

RATE_PER_S = 50
"""Messages that the honest publisher sends in a second."""

LOGIN_EVERY_S = 0.5

LOGIN_S_MAX = 10.0
"""A device that is not in after this time counts as locked out."""

DRAIN_S_MAX = 30.0

USER_AND_PASSWORD = 0xC0

TOPIC = b"honest/reading"


@dataclass(slots=True)
class Window:
    """What the honest clients saw in some windows of time; all in seconds."""

    acked_s: list[float] = field(default_factory=list)
    delivered_s: list[float] = field(default_factory=list)
    popped_s: list[float] = field(default_factory=list)
    logins_s: list[float] = field(default_factory=list)
    lags_s: list[float] = field(default_factory=list)
    """How late the honest clients' own timers fired, which is no doing of the node."""
    disk_s: list[float] = field(default_factory=list)
    """How long somebody else waited for the disk when the publisher published: see `tests.attack.bystander`."""
    written_bytes: int = 0
    """What the node wrote."""


def percentile(values: list[float], percent: float) -> float:
    """Return a percentile in seconds; 0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else 0.0


class HonestClients:
    """Clients that do what the protocol says, and what they saw.

    Parameters:
        ground: of the node.
        bystander: syncs whenever the publisher publishes.
    """

    def __init__(self, ground: Ground, bystander: Bystander) -> None:
        self._ground = ground
        self._bystander = bystander
        self._context = ground.context()
        self.window: Window | None = None
        """Gets what the clients see from now on; None while nobody wants to know."""
        self.problems: list[str] = []
        self._sent: dict[int, tuple[float, Window | None]] = {}
        self._acked: set[int] = set()
        self._delivered: set[int] = set()
        self._popped: set[int] = set()
        self._ids: dict[int, int] = {}
        self._number = 0
        self._run = token_bytes(8)
        """Is in each message, so that those of another row are known."""
        self._is_publishing = True
        self._tasks: list[asyncio.Task[None]] = []
        self._ready = asyncio.Event()

    async def start(self) -> None:
        """Connect, and wait until a message has made all of its ways."""
        self._bystander.start()
        subscribed = asyncio.Event()
        self._tasks = [
            asyncio.create_task(self._guard("the subscriber", self._subscribe(subscribed))),
            asyncio.create_task(self._guard("the consumer", self._consume())),
        ]
        async with asyncio.timeout(DRAIN_S_MAX):
            await subscribed.wait()
            self._tasks.append(asyncio.create_task(self._guard("the publisher", self._publish())))
            while not (self._acked & self._delivered & self._popped) and not self.problems:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        self._tasks.append(asyncio.create_task(self._guard("the newcomer", self._come_again())))

    @property
    def acked(self) -> int:
        return len(self._acked)

    @property
    def lost(self) -> int:
        """How many acknowledged messages the subscriber or the consumer has not got."""
        return len(self._acked - self._delivered) + len(self._acked - self._popped)

    def _is_something_left(self) -> bool:
        return bool(self.lost) or len(self._acked) < len(self._sent)

    async def finish(self) -> None:
        """Stop publishing, and wait for what is on its way."""
        self._is_publishing = False
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S_MAX):
                while self._is_something_left() and not any(task.done() for task in self._tasks):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.lost:
            self.problems.append(f"{self.lost} of {self.acked} acknowledged messages were lost")

    async def _guard(self, who: str, work: object) -> None:
        try:
            await work  # type: ignore[misc]  # a coroutine
        except Exception as error:  # whatever it is, the row has failed by it
            self.problems.append(f"{who}: {type(error).__name__} {error}")

    # --- MQTT ---------------------------------------------------------------------------------------------------------

    async def _dial(self, client_id: str) -> MqttLink:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self._ground.ports["tls"], ssl=self._context, server_hostname="localhost"
        )
        link = MqttLink(reader, writer)
        link.send(
            connect_5(CLEAN | USER_AND_PASSWORD, client_id.encode(), HONEST.encode(), HONEST_PASSWORD.encode(), keep_alive_s=0)
        )
        answer = await link.next()
        assert answer[0] == CONNACK, answer
        assert answer[2][1] == 0, f"CONNACK with reason 0x{answer[2][1]:02x}"
        return link

    async def _publish(self) -> None:
        link = await self._dial("honest-publisher")
        reading = asyncio.create_task(self._read_acks(link))
        begun_s = time.monotonic()
        sent = 0
        try:
            while not reading.done():
                due_s = begun_s + sent / RATE_PER_S
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                now_s = time.monotonic()
                if self.window is not None:
                    self.window.lags_s.append(now_s - due_s)
                if now_s - due_s > 1:  # This process was held up: it does not catch up with a burst.
                    begun_s, sent = now_s, 0
                sent += 1
                if not self._is_publishing:
                    continue
                self._number += 1
                packet_id = (self._number - 1) % 60_000 + 1
                self._ids[packet_id] = self._number
                self._sent[self._number] = (now_s, self.window)
                body = struct.pack("8sQ", self._run, self._number)
                link.send(encode_publish(TOPIC, body, 1, packet_id=packet_id, properties=b"\0"))
                self._bystander.tick(self.window.disk_s if self.window is not None else [])
            await reading
        finally:
            reading.cancel()
            link.close()

    async def _read_acks(self, link: MqttLink) -> None:
        while True:
            answer = await link.next()
            assert answer[0] == PUBACK, f"{answer} in place of a PUBACK"
            assert len(answer) < 3 or answer[2] < 0x80, f"a PUBACK with reason 0x{answer[2]:02x}"
            number = self._ids[answer[1]]
            self._acked.add(number)
            sent_s, window = self._sent[number]
            if window is not None:
                window.acked_s.append(time.monotonic() - sent_s)

    async def _subscribe(self, subscribed: asyncio.Event) -> None:
        link = await self._dial(HONEST_SUBSCRIBER)
        link.send(subscribe_5(1, (b"honest/#", 1)))
        try:
            while True:
                item = await link.next()
                if item[0] == SUBACK:
                    assert item[2][-1] < 0x80, f"a SUBACK with reason 0x{item[2][-1]:02x}"
                    subscribed.set()
                    continue
                assert item[0] in (PUBLISH, PUBLISH_WITH), item
                if item[3]:
                    link.send(encode_acks(PUBACK, [item[3]]))
                run, number = struct.unpack("8sQ", item[4])
                assert run == self._run, "a message came that nobody sent"
                sent_s, window = self._sent[number]
                if number not in self._delivered and window is not None:
                    window.delivered_s.append(time.monotonic() - sent_s)
                self._delivered.add(number)
        finally:
            link.close()

    async def _come_again(self) -> None:
        """Log in again and again with a password that was verified before, as a device after a lost connection does."""
        count = 0
        while True:
            await asyncio.sleep(LOGIN_EVERY_S)
            count += 1
            begun_s, window = time.monotonic(), self.window
            try:
                async with asyncio.timeout(LOGIN_S_MAX):
                    link = await self._dial(f"honest-newcomer-{count}")
            except (AssertionError, OSError, EOFError, TimeoutError) as error:
                self.problems.append(f"an honest device could not log in: {type(error).__name__} {error}")
                continue
            link.close()
            if window is not None:
                window.logins_s.append(time.monotonic() - begun_s)

    # --- POP ----------------------------------------------------------------------------------------------------------

    async def _consume(self) -> None:
        security = Security(token=HONEST_TOKEN, root_certificates=self._ground.roots)
        async with (
            Client(f"localhost:{self._ground.ports['pop']}", security=security) as client,
            client.stream("honest/#", group="honest") as messages,
        ):
            async for message in messages:
                now_s = time.monotonic()
                run, number = struct.unpack("8sQ", message.body)
                if run != self._run:  # On a node of several rows: its acknowledgement came after the end of the stream.
                    message.ack()
                    continue
                sent_s, window = self._sent[number]
                if number not in self._popped and window is not None:
                    window.popped_s.append(now_s - sent_s)
                self._popped.add(number)
                message.ack()


class MqttLink:
    """One MQTT 5.0 connection, packet by packet."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._packets: list[Packet] = []
        self._rest = b""

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def next(self) -> Packet:
        """Return the next packet. Raises EOFError at the end of the connection."""
        while not self._packets:
            data = await self.reader.read(64 * KIB)
            if not data:
                raise EOFError("the node closed the connection")
            packets, used = decode(self._rest + data, 64 * MIB, FROM_SERVER_5)
            self._rest = (self._rest + data)[used:]
            self._packets = packets[::-1]
        return self._packets.pop()

    def close(self) -> None:
        self.writer.close()
