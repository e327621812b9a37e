"""On any listener, any bytes: the node lives, closes clients that send invalid bytes, leaks nothing, and serves the others."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from websockets.client import ClientProtocol
from websockets.typing import Subprotocol
from websockets.uri import parse_uri

from penstock.gateway.options import AccessOptions, ListenerOptions
from tests.depth import DEPTH
from tests.fuzz.inputs import cut
from tests.gateway.brokers import StartBroker
from tests.gateway.certificates import Authority
from tests.gateway.packet_cases import INVALID, VALID, connect, subscribe
from tests.gateway.proxy_headers import INVALID as INVALID_HEADERS
from tests.gateway.proxy_headers import LOOPBACK
from tests.gateway.proxy_headers import VALID as VALID_HEADERS
from tests.gateway.scripted_plugins import new_script
from tests.gateway.wire import CLEAN, FREE, Message
from tests.waiting import until

ROUNDS = 2 * DEPTH
"""Rounds of attacks on each kind of listener."""
AT_ONCE = 20

PACKETS = [case.data for case in VALID] + [case.data for case in INVALID]
HELLO = connect(CLEAN, b"fuzz")


def damaged(chance: random.Random, data: bytes) -> bytes:
    """Return a copy of the data with some bytes changed, removed or inserted."""
    found = bytearray(data)
    for _ in range(chance.randrange(5)):
        at = chance.randrange(len(found) + 1)
        match chance.randrange(3):
            case 0:
                found.insert(at, chance.randrange(256))
            case 1:
                del found[at : at + chance.randrange(9)]
            case _:
                found[at : at + 1] = bytes((chance.randrange(256),))
    return bytes(found)


def packets(chance: random.Random) -> bytes:
    return HELLO + b"".join(chance.choices(PACKETS, k=8))


def frames(chance: random.Random) -> bytes:
    """Return the bytes of a WebSocket client: a handshake, and frames of all kinds."""
    client = ClientProtocol(parse_uri("ws://localhost/mqtt"), subprotocols=[Subprotocol("mqtt")])
    client.send_request(client.connect())
    handshake = b"".join(client.data_to_send())
    client.state = type(client.state).OPEN
    data = packets(chance)
    for piece in cut(data, [chance.randrange(1000) for _ in range(4)]):
        if chance.random() < 0.2:
            client.send_ping(b"x" * chance.randrange(100))
        client.send_binary(piece)
    if chance.random() < 0.5:
        client.send_close(1000)
    return handshake + b"".join(client.data_to_send())


def headers(chance: random.Random) -> bytes:
    header = chance.choice([header for header, _ in VALID_HEADERS.values()] + list(INVALID_HEADERS.values()))
    return header + packets(chance)


@pytest.mark.parametrize("kind", ["ws", "proxied", "tls", "wss", "unix", "plugins"])
async def test_damaged_streams_disturb_no_other_client(start_broker: StartBroker, tmp_path: Path, kind: str) -> None:
    authority = Authority(tmp_path / "authority")
    listener = {
        "ws": ListenerOptions(name="l", kind="ws", listen=FREE),
        "proxied": ListenerOptions(name="l", listen=FREE, proxy_from=LOOPBACK),
        "tls": authority.listener("l", "tls"),
        "wss": authority.listener("l", "wss"),
        "unix": ListenerOptions(name="l", kind="unix", socket=str(tmp_path / "s")),
        "plugins": ListenerOptions(name="l", listen=FREE),
    }[kind]
    script = new_script()
    script.topics |= {("publish", "a"): False, ("subscribe", "a/b"): False, ("receive", "a/b"): False}
    plugins: dict[str, Any] = {"tests.gateway.scripted_plugins.Users": {}, "tests.gateway.scripted_plugins.Topics": {}}
    access = AccessOptions(plugins=plugins) if kind == "plugins" else AccessOptions(anonymous="always")
    broker = await start_broker(listeners=(listener,), access=access, queues_max=2000)
    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    good = await broker.connect("good")
    await good.send(subscribe(1, (b"good/#", 1)))
    await good.expect(9)
    context = authority.context() if kind in ("tls", "wss") else None
    make = {"ws": frames, "wss": frames, "proxied": headers}.get(kind, packets)

    async def attack(chance: random.Random) -> None:
        stream = damaged(chance, make(chance))
        try:
            # With TLS the stream inside is intact or damaged. Without TLS the client's bytes damage the TLS handshake itself.
            bad = await broker.dial("l", context if chance.random() < 0.7 else None)
        except (OSError, EOFError):
            return
        try:
            for piece in cut(stream, [chance.randrange(10_000) for _ in range(3)]):
                await bad.send(piece)
                await asyncio.sleep(0)
        except ConnectionError:
            pass  # The node has closed the connection because of the invalid bytes.
        if chance.random() < 0.5 and not bad.writer.is_closing():
            bad.writer.close()
        else:
            bad.reset()

    for number in range(ROUNDS):
        await asyncio.gather(*(attack(random.Random(f"{kind} {number} {each}")) for each in range(AT_ONCE)))
        body = b"%d" % number
        await good.publish("good/x", body, 1)
        while (message := await good.message()).topic != "good/x":
            pass
        assert message == Message("good/x", body, 1)
    for client in broker.clients[1:]:
        client.reset()
    await until(lambda: len(broker.node.gateway.connections) == 1)
    await until(lambda: broker.listener("l").admission.open == 0)
    gateway = broker.node.gateway
    await until(lambda: not gateway.authorizer.questions.waiting)  # plugins answer the questions of clients that have gone, too
    guard = broker.connection("good").permissions
    assert gateway.authorizer.decisions.kept == (guard.kept if guard is not None else 0)
    assert (gateway.listeners.handshakes.open, len(gateway.sources._open)) == (0, 0)
    assert sum(gateway.traffic.connected.values()) == 1
    assert failures == []
