"""The server ends a connection whose client is still sending: what it sent before must arrive, and nothing is held for long."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import struct
import weakref
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from websockets.client import ClientProtocol
from websockets.frames import OP_BINARY, Frame
from websockets.protocol import State
from websockets.typing import Subprotocol
from websockets.uri import parse_uri

from penstock.gateway.connection.backpressure import PauseReason
from penstock.gateway.options import ListenerOptions
from penstock.gateway.protocol.decode import decode
from penstock.gateway.protocol.fixed_header import FROM_SERVER_5
from penstock.gateway.protocol.packets import DISCONNECT, PUBLISH, Packet
from penstock.gateway.protocol.reasons import ReasonCode
from penstock.gateway.transport import lingering
from penstock.gateway.transport.lingering import Lingering
from penstock.gateway.transport.sockets import HAS_TURNS
from penstock.store.options import KIB, MIB
from tests.gateway.brokers import StartBroker
from tests.gateway.certificates import Authority
from tests.gateway.other_clients import command, subscribed
from tests.gateway.packet_cases_5 import connect_5, subscribe_5
from tests.gateway.wire import ANSWER_S_MAX, BYE, CLEAN, FREE, PING, RECEIVE_BUFFER_BYTES, Broker, Client
from tests.waiting import until

pytestmark = pytest.mark.skipif(not HAS_TURNS, reason="this system has no epoll, so the loop's own transports serve")

COUNT, BODY = 100, bytes(2 * KIB)
"""Deliveries that wait for the client when it is closed: more than the buffer of its kernel takes."""


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def lingers(start_broker: StartBroker) -> Callable[[], Awaitable[tuple[Broker, Client]]]:
    """Give a node, and a client that the node has closed and that has not closed its own side."""

    async def begin() -> tuple[Broker, Client]:
        broker = await start_broker()
        client = await broker.connect("old")
        await broker.connect("old")
        assert await client.ended() == []
        assert len(lingering_of(broker)) == 1
        return broker, client

    return begin


def lingering_of(broker: Broker) -> Lingering:
    sockets = broker.node.gateway.sockets
    assert sockets is not None
    return sockets.lingering


async def publish_many(broker: Broker, count: int = COUNT) -> None:
    """Publish what the client under test has subscribed to; return when its deliveries have been written."""
    publisher = await broker.connect("publisher")
    for number in range(count):
        await publisher.publish("a", b"%06d" % number + BODY)
    await publisher.drained()


# --- what arrives -------------------------------------------------------------------------------------------------------


class Raw:
    """A client that sends and receives when the test says so, and else leaves everything in its kernel.

    Parameters:
        end: a connected socket, with TLS or without.
        host: the host and port that a WebSocket request names; empty without WebSocket.
    """

    def __init__(self, end: socket.socket, host: str) -> None:
        self.end = end
        self.frames: ClientProtocol | None = None
        if host:
            self.frames = ClientProtocol(parse_uri(f"ws://{host}/mqtt"), subprotocols=[Subprotocol("mqtt")], max_size=None)
            self.frames.send_request(self.frames.connect())

    async def send(self, *payloads: bytes) -> None:
        """Send pieces of MQTT, each in a frame of its own over WebSocket."""
        data = b"".join(payloads)
        if self.frames is not None:
            for payload in payloads:
                self.frames.send_binary(payload)
            data = b"".join(self.frames.data_to_send())
        await asyncio.to_thread(self.end.sendall, data)

    async def open(self) -> None:
        """Do the handshake of WebSocket, if this is one."""
        if self.frames is not None:
            await asyncio.to_thread(self.end.sendall, b"".join(self.frames.data_to_send()))
            self.frames.receive_data(await asyncio.to_thread(self.end.recv, KIB))
            assert self.frames.state is State.OPEN

    async def rest(self) -> tuple[list[Packet], int | None]:
        """Read to the end; return the packets, and the code of the close frame if this is a WebSocket.

        Raises:
            ConnectionResetError, ssl.SSLEOFError: the connection ended in another way than it should.
        """
        data = await asyncio.to_thread(self._read_all)
        code = None
        if self.frames is not None:
            self.frames.receive_data(data)
            found = self.frames.events_received()
            data = b"".join(each.data for each in found if isinstance(each, Frame) and each.opcode is OP_BINARY)
            assert self.frames.close_rcvd is not None
            code = self.frames.close_rcvd.code
        return decode(data, MIB, FROM_SERVER_5)[0], code

    def _read_all(self) -> bytes:
        found = bytearray()
        while data := self.end.recv(MIB):
            found += data
        return bytes(found)


@pytest.fixture
def dial(authority: Authority) -> Iterator[Callable[[Broker, str], Raw]]:
    """Give a function that opens a socket to a listener."""
    ends: list[socket.socket] = []

    def begin(broker: Broker, name: str) -> Raw:
        listener = broker.listener(name)
        end = socket.socket(socket.AF_UNIX if name == "unix" else socket.AF_INET)
        ends.append(end)
        end.settimeout(ANSWER_S_MAX)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        end.connect(listener.options.socket if name == "unix" else (listener.address.host, listener.address.port))
        if listener.options.is_tls:
            end = authority.context().wrap_socket(
                end, server_hostname="localhost", suppress_ragged_eofs=False, do_handshake_on_connect=False
            )
            ends.append(end)
        return Raw(end, str(listener.address) if listener.options.is_websocket else "")

    yield begin
    for end in ends:
        end.close()


@pytest.mark.parametrize("kind", ["mqtt", "tls", "unix", "ws", "wss"])
async def test_a_client_that_is_closed_while_it_sends_gets_its_deliveries_and_the_reason(
    start_broker: StartBroker, authority: Authority, tmp_path: Path, dial: Callable[[Broker, str], Raw], kind: str
) -> None:
    more = {
        "tls": authority.listener("tls"),
        "unix": ListenerOptions(name="unix", kind="unix", socket=str(tmp_path / "s")),
        "ws": ListenerOptions(name="ws", kind="ws", listen=FREE),
        "wss": authority.listener("wss", "wss"),
    }
    broker = await start_broker(listeners=(more[kind],) if kind in more else (), send_buffer_bytes=MIB)
    client = await asyncio.to_thread(dial, broker, kind)
    await client.open()
    await client.send(connect_5(CLEAN, b"client"), subscribe_5(1, (b"a", 0)))
    await until(lambda: "client" in broker.node.gateway.clients and broker.connection("client").session.subscriptions)
    await publish_many(broker)
    await client.send(b"\0\0", *[PING * (128 * KIB)] * 4)
    await until(lambda: broker.closed(ReasonCode.MALFORMED_PACKET))
    packets, code = await client.rest()
    assert [int(found[4][:6]) for found in packets if found[0] == PUBLISH] == list(range(COUNT))
    assert (packets[-1][0], packets[-1][2][0]) == (DISCONNECT, ReasonCode.MALFORMED_PACKET)
    assert code == (1000 if kind in ("ws", "wss") else None)


@pytest.mark.nightly
async def test_acks_on_their_way_do_not_destroy_the_deliveries_of_mosquitto_sub(start_broker: StartBroker) -> None:
    broker = await start_broker(send_buffer_bytes=MIB)
    port = str(broker.node.mqtt.port)
    arguments = ["-h", "127.0.0.1", "-p", port, "-i", "sub", "-q", "1", "-t", "a", "-F", "%l", "-C", str(COUNT), "-W", "20"]
    process = await asyncio.create_subprocess_exec(command("mosquitto_sub"), *arguments, stdout=asyncio.subprocess.PIPE)
    await subscribed(broker, "sub")
    process.send_signal(signal.SIGSTOP)
    publisher = await broker.connect("publisher")
    for number in range(COUNT):
        await publisher.publish("a", BODY, 1, packet_id=number + 1)
    broker.connection("sub").close("the test closes it", ReasonCode.SESSION_TAKEN_OVER)
    await until(lambda: len(broker.node.gateway.connections) == 1)
    process.send_signal(signal.SIGCONT)
    async with asyncio.timeout(ANSWER_S_MAX):
        output, _ = await process.communicate()
    assert output.split() == [b"%d" % len(BODY)] * COUNT


async def test_a_tls_alert_is_not_followed_by_a_reset(start_broker: StartBroker, authority: Authority) -> None:
    broker = await start_broker(listeners=(authority.listener("tls"),))
    loop, address = asyncio.get_running_loop(), broker.listener("tls").address
    with socket.socket() as end:
        end.setblocking(False)
        await loop.sock_connect(end, (address.host, address.port))
        record = b"\x16\x03\x01" + struct.pack(">H", 16_000) + bytes(16_000)
        await loop.sock_sendall(end, record * 20)
        await until(lambda: broker.listener("tls").admission.refused.get("tls"))
        found = b""
        while data := await loop.sock_recv(end, KIB):
            found += data
        assert found[0] == 21  # an alert
        await loop.sock_sendall(end, b"more")


async def test_clients_get_their_deliveries_and_hear_why_when_the_node_stops(
    tmp_path: Path, dial: Callable[[Broker, str], Raw]
) -> None:
    broker = await Broker(tmp_path, {"send_buffer_bytes": MIB}).start()
    client = await asyncio.to_thread(dial, broker, "mqtt")
    await client.send(connect_5(CLEAN, b"client"), subscribe_5(1, (b"a", 0)))
    await until(lambda: "client" in broker.node.gateway.clients and broker.connection("client").session.subscriptions)
    await publish_many(broker)
    broker.connection("client").pause_reading(PauseReason.THROTTLED)
    await client.send(PING)
    stopping = asyncio.create_task(broker.stop())
    await until(lambda: not broker.node.gateway.connections)
    packets, _ = await client.rest()
    assert len([found for found in packets if found[0] == PUBLISH]) == COUNT
    assert (packets[-1][0], packets[-1][2][0]) == (DISCONNECT, ReasonCode.SERVER_SHUTTING_DOWN)
    client.end.close()
    await stopping


# --- bounds -------------------------------------------------------------------------------------------------------------


async def test_a_socket_that_lingers_holds_nothing_of_its_connection(start_broker: StartBroker) -> None:
    broker = await start_broker()
    client = await broker.connect_5("old")
    await client.subscribe(("a", 1))
    held = weakref.ref(broker.connection("old"))
    gc.disable()
    try:
        await broker.connect("old")
        await client.disconnected()
        await until(lambda: held() is None)
    finally:
        gc.enable()
    assert len(lingering_of(broker)) == 1
    assert broker.listener("mqtt").admission.open == 1


async def test_a_socket_lingers_until_its_client_closes(lingers: Callable[[], Awaitable[tuple[Broker, Client]]]) -> None:
    broker, client = await lingers()
    await client.send(BYE)
    client.writer.close()
    await until(lambda: not len(lingering_of(broker)))
    assert lingering_of(broker).cut_short == 0


async def test_a_client_that_has_closed_is_not_waited_for(start_broker: StartBroker) -> None:
    broker = await start_broker()
    client = await broker.connect("c")
    await client.send(BYE)
    client.writer.write_eof()
    assert await client.ended() == []
    await until(lambda: not broker.node.gateway.connections)
    await until(lambda: not len(lingering_of(broker)))
    assert lingering_of(broker).cut_short == 0


async def test_a_client_that_never_closes_is_given_a_limited_time(
    lingers: Callable[[], Awaitable[tuple[Broker, Client]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lingering, "LINGER_S", 0.1)
    broker, _ = await lingers()
    await until(lambda: not len(lingering_of(broker)))
    assert lingering_of(broker).cut_short == 1


async def test_a_client_that_goes_on_sending_is_cut_off_after_a_number_of_bytes(
    lingers: Callable[[], Awaitable[tuple[Broker, Client]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lingering, "DISCARDED_BYTES_MAX", MIB)
    broker, client = await lingers()
    client.writer.write(bytes(8 * MIB))
    await until(lambda: lingering_of(broker).cut_short == 1)


async def test_the_socket_that_has_lingered_longest_makes_way_for_another(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lingering, "LINGERING_MAX", 3)
    broker = await start_broker()
    clients = [await broker.connect("c") for _ in range(6)]
    for client in clients[:-1]:
        assert await client.ended() == []
    await until(lambda: lingering_of(broker).cut_short == 2)
    assert len(lingering_of(broker)) == 3


async def test_a_lingering_socket_makes_way_for_a_new_connection_before_an_idle_one_does(
    lingers: Callable[[], Awaitable[tuple[Broker, Client]]],
) -> None:
    broker, _ = await lingers()
    idle = await broker.dial()
    await until(lambda: len(broker.node.gateway.connections) == 2)
    assert broker.node.gateway._shed()
    assert len(lingering_of(broker)) == 0
    assert len(broker.node.gateway.connections) == 2
    assert broker.node.gateway._shed()
    assert await idle.ended() == []
    assert len(lingering_of(broker)) == 0, "a descriptor is needed now, so the socket of the idle connection is closed at once"
    assert not broker.node.gateway._shed()


async def test_a_client_that_reads_only_when_it_has_sent_everything_is_not_deadlocked(start_broker: StartBroker) -> None:
    """The server sends what is left, and the client sends more than the kernel buffers before it reads."""
    broker = await start_broker(send_buffer_bytes=MIB)
    client = await broker.connect("client")
    await client.subscribe(("a", 0))
    client.stop_reading()
    broker.limit_send_buffer("client")
    await publish_many(broker, 400)
    assert broker.unsent_bytes("client")
    await client.send(b"\0\0" + bytes(16 * MIB))
    client.go_on_reading()
    assert len(await client.ended()) == 400
