"""MQTT over WebSocket: packets cut into frames in any way, invalid handshakes and frames, and how connections close."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest
from websockets.client import ClientProtocol
from websockets.frames import OP_BINARY, OP_CLOSE, OP_PONG, Frame
from websockets.typing import Subprotocol
from websockets.uri import parse_uri

from penstock.gateway.protocol.encode import encode_publish
from penstock.gateway.protocol.reasons import ReasonCode
from penstock.store.options import KIB
from tests.clock import AheadClock
from tests.gateway.brokers import StartBroker
from tests.gateway.packet_cases import connect, subscribe
from tests.gateway.websocket_client import CONNACK, WS, WebSocketClient, connected, dial
from tests.gateway.wire import ANSWER_S_MAX, BYE, CLEAN, PING, WILL, Broker, Message
from tests.waiting import until

PONG = b"\xd0\0"


@pytest.fixture
async def broker(start_broker: StartBroker) -> Broker:
    return await start_broker(listeners=(WS,))


@pytest.fixture
def opened() -> Iterator[list[WebSocketClient]]:
    clients: list[WebSocketClient] = []
    yield clients
    for client in clients:
        client.writer.transport.abort()


# --- the handshake ------------------------------------------------------------------------------------------------------


async def test_the_sub_protocol_is_mqtt(broker: Broker) -> None:
    client, response = await dial(broker, protocols=("chat", "mqtt"))
    assert (response.status_code, client.frames.subprotocol) == (101, "mqtt")
    client.writer.transport.abort()


@pytest.mark.parametrize("protocols", [(), ("chat",), ("mqttv3.1",)])
async def test_a_client_that_does_not_offer_the_mqtt_sub_protocol_is_refused(
    broker: Broker, protocols: tuple[str, ...]
) -> None:
    client, response = await dial(broker, protocols=protocols)
    assert response.status_code == 400
    assert await client.events() == []
    await until(lambda: broker.listener("ws").admission.open == 0)


async def test_a_listener_with_a_path_serves_only_that_path(start_broker: StartBroker) -> None:
    broker = await start_broker(listeners=(replace(WS, websocket_path="/mqtt"),))
    for path, status in (("/mqtt", 101), ("/mqtt?token=1", 101), ("/", 404), ("/mqtt/", 404), ("/other", 404)):
        client, response = await dial(broker, path)
        assert response.status_code == status, path
        client.writer.transport.abort()


@pytest.mark.parametrize(("origin", "status"), [(None, 101), ("https://ours.example", 101), ("https://theirs.example", 403)])
async def test_a_listener_with_origins_serves_only_pages_from_these_origins(
    start_broker: StartBroker, origin: str | None, status: int
) -> None:
    broker = await start_broker(listeners=(replace(WS, origins=("https://ours.example",)),))
    client, response = await dial(broker, origin=origin)
    assert response.status_code == status
    client.writer.transport.abort()


async def test_without_origins_only_pages_of_the_listener_itself_are_served(start_broker: StartBroker) -> None:
    broker = await start_broker(listeners=(WS,))
    port = broker.listener("ws").address.port
    for origin, host, status in (
        (None, f"127.0.0.1:{port}", 101),
        (f"http://127.0.0.1:{port}", f"127.0.0.1:{port}", 101),
        (f"http://localhost:{port}", f"LOCALHOST:{port}", 101),
        (f"http://127.0.0.1:{port + 1}", f"127.0.0.1:{port}", 403),
        ("https://theirs.example", f"127.0.0.1:{port}", 403),
        ("null", f"127.0.0.1:{port}", 403),
        (f"http://rebound.example:{port}", f"rebound.example:{port}", 403),  # a name that the page makes mean 127.0.0.1
    ):
        client, response = await dial(broker, origin=origin, host=host)
        assert response.status_code == status, (origin, host)
        client.writer.transport.abort()


async def test_a_listener_may_be_open_to_all_pages(start_broker: StartBroker) -> None:
    broker = await start_broker(listeners=(replace(WS, origins=("*",)),))
    client, response = await dial(broker, origin="https://theirs.example")
    assert response.status_code == 101
    client.writer.transport.abort()


async def test_bytes_that_are_not_an_http_request_are_refused_and_leave_nothing_open(broker: Broker) -> None:
    for data in (
        connect(CLEAN, b"c") + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"POST /mqtt HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /mqtt HTTP/1.1\r\n" + b"X: y\r\n" * 1000 + b"\r\n",
        b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n",
        b"\0" * 20_000,
        b"GET / HTTP/1.1\r\nConnection: \xda\r\nUpgrade: websocket\r\n\r\n",
    ):
        client = await broker.dial("ws")
        await client.send(data)
        async with asyncio.timeout(ANSWER_S_MAX):
            while await client._read():
                pass
        await until(lambda: broker.listener("ws").admission.open == 0)
    assert broker.node.gateway.counters.connections_accepted == 0


@pytest.mark.parametrize(
    "frame", [Frame(OP_BINARY, PING).serialize(mask=False), Frame(OP_CLOSE, b"").serialize(mask=True)], ids=["bare", "close"]
)
async def test_an_invalid_or_close_frame_right_after_the_request_ends_the_connection(broker: Broker, frame: bytes) -> None:
    frames = ClientProtocol(parse_uri("ws://localhost/mqtt"), subprotocols=[Subprotocol("mqtt")])
    frames.send_request(frames.connect())
    client = await broker.dial("ws")
    await client.send(*frames.data_to_send(), frame)
    async with asyncio.timeout(ANSWER_S_MAX):
        assert await client._read() == b""
    await until(lambda: broker.listener("ws").admission.open == 0)


async def test_an_unfinished_handshake_is_ended_after_the_time_limit(start_broker: StartBroker) -> None:
    broker = await start_broker(listeners=(WS,), connect_timeout_ms=100, clock=AheadClock())
    client = await broker.dial("ws")
    await client.send(b"GET /mqtt HTTP/1.1\r\n")
    assert await client.ended() == []


# --- frames and packets -------------------------------------------------------------------------------------------------


async def test_packets_need_not_be_aligned_with_frames(broker: Broker, opened: list[WebSocketClient]) -> None:
    client = await connected(broker, b"c", opened)  # [MQTT-6.0.0-2]
    data = subscribe(1, (b"a", 0)) + PING + encode_publish(b"a", b"x" * 300)
    answers = b"\x90\3\0\1\0" + PONG + encode_publish(b"a", b"x" * 300)
    await client.packets(data, expected=answers)
    await client.packets(*(data[at : at + 1] for at in range(len(data))), expected=answers)


async def test_the_fragments_of_a_message_are_read_as_they_arrive(broker: Broker, opened: list[WebSocketClient]) -> None:
    client = await connected(broker, b"c", opened)
    client.frames.send_binary(PING[:1], fin=False)
    client.frames.send_ping(b"between")
    client.frames.send_continuation(PING[1:] + PING, fin=False)
    await client.packets(expected=PONG * 2)
    client.frames.send_continuation(PING, fin=True)
    await client.packets(expected=PONG)


async def test_a_websocket_ping_is_answered_before_and_after_the_connect(broker: Broker) -> None:
    client, _ = await dial(broker)
    client.frames.send_ping(b"hello")
    await client.send()
    (pong,) = await client.events()
    assert (pong.opcode, pong.data) == (OP_PONG, b"hello")
    await client.packets(connect(CLEAN, b"c"), expected=CONNACK)
    client.writer.transport.abort()


async def test_large_messages_pass_both_ways(broker: Broker, opened: list[WebSocketClient]) -> None:
    client = await connected(broker, b"c", opened)
    message = encode_publish(b"a", bytes(range(256)) * 1000)
    await client.packets(subscribe(1, (b"a", 0)), expected=b"\x90\3\0\1\0")
    await client.packets(message, expected=message)


async def test_a_text_frame_closes_the_connection(broker: Broker, opened: list[WebSocketClient]) -> None:
    client = await connected(broker, b"c", opened)  # [MQTT-6.0.0-1]
    client.frames.send_text(PING)
    await client.send()
    assert await client.close_code() == 1003


async def test_an_unmasked_frame_closes_the_connection(broker: Broker, opened: list[WebSocketClient]) -> None:
    client = await connected(broker, b"c", opened)
    client.writer.write(Frame(OP_BINARY, PING).serialize(mask=False))  # RFC 6455, 5.1
    assert await client.close_code() == 1002


@pytest.mark.parametrize("fragments", [1, 4])
async def test_a_message_that_is_too_large_closes_the_connection(start_broker: StartBroker, fragments: int) -> None:
    broker = await start_broker(listeners=(WS,), packet_bytes_max=KIB)
    client, _ = await dial(broker)
    await client.packets(connect(CLEAN, b"c"), expected=CONNACK)
    client.frames.send_binary(bytes(KIB if fragments > 1 else KIB + 1), fin=fragments == 1)
    for number in range(1, fragments):
        client.frames.send_continuation(b"more", fin=number == fragments - 1)
    await client.send()
    code = await client.close_code()
    assert code == 1009 or (fragments > 1 and broker.closed(ReasonCode.MALFORMED_PACKET) == 1)


async def test_a_disconnect_in_the_same_read_as_the_close_discards_the_will(
    broker: Broker, opened: list[WebSocketClient]
) -> None:
    watcher = await broker.connect("watcher")
    await watcher.subscribe(("#", 1))
    client = await connected(broker, b"c", opened, CLEAN | WILL)
    client.frames.send_binary(encode_publish(b"last", b"words", 1, packet_id=1) + BYE)
    client.frames.send_close(1000)
    await client.send()
    assert await watcher.message() == Message("last", b"words", 1)
    await until(lambda: len(broker.node.gateway.connections) == 1)
    assert await watcher.drained() == []


async def test_a_close_without_a_disconnect_publishes_the_will(broker: Broker, opened: list[WebSocketClient]) -> None:
    watcher = await broker.connect("watcher")
    await watcher.subscribe(("#", 1))
    client = await connected(broker, b"c", opened, CLEAN | WILL)
    client.frames.send_close(1001)
    await client.send()
    assert await watcher.message() == Message("will", b"gone", 0)
    assert await client.close_code() == 1001  # RFC 6455, 5.5.1: a close is answered with the code that it had


async def test_the_server_ends_a_connection_with_a_close_frame(broker: Broker, opened: list[WebSocketClient]) -> None:
    client = await connected(broker, b"c", opened)
    await broker.connect("c")
    events = await client.events()
    assert [event.opcode for event in events] == [OP_CLOSE]
    await client.send()
    assert await client.events() == []
    await until(lambda: broker.listener("ws").admission.open == 0)


async def test_a_client_that_never_answers_a_close_frame_is_disconnected(broker: Broker, opened: list[WebSocketClient]) -> None:
    await connected(broker, b"c", opened)
    await broker.connect("c")
    await until(lambda: broker.listener("ws").admission.open == 0)


@pytest.mark.parametrize("is_wrong", [False, True])
async def test_a_client_that_has_shut_down_its_side_is_closed_without_a_wait(
    broker: Broker, opened: list[WebSocketClient], monkeypatch: pytest.MonkeyPatch, is_wrong: bool
) -> None:
    monkeypatch.setattr("penstock.gateway.connection.outbox.CLOSE_FLUSH_S", 2 * ANSWER_S_MAX)
    client = await connected(broker, b"c", opened)
    if is_wrong:
        client.frames.send_binary(b"\0\0")
        await client.send()
        await until(lambda: broker.closed(ReasonCode.MALFORMED_PACKET) == 1)
    client.writer.write_eof()
    assert await client.close_code() == 1000
    await until(lambda: not broker.node.gateway.connections)


async def test_a_slow_websocket_client_uses_bounded_memory(start_broker: StartBroker, opened: list[WebSocketClient]) -> None:
    broker = await start_broker(listeners=(WS,), send_buffer_bytes=16 * KIB)
    client = await connected(broker, b"slow", opened)
    broker.limit_send_buffer("slow")
    await client.packets(subscribe(1, (b"a", 0)), expected=b"\x90\3\0\1\0")
    publisher = await broker.connect("publisher")
    count, body = 300, b"x" * 4000
    for number in range(count):
        await publisher.publish("a", b"%06d" % number + body, 1)
    assert broker.unsent_bytes("slow") < 600 * KIB
    assert not broker.connection("slow").outbox.writable
    expected = b"".join(encode_publish(b"a", b"%06d" % number + body) for number in range(count))
    await client.packets(expected=expected)
