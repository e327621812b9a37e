"""Third-party clients over every transport: paho-mqtt, and mosquitto's clients where they are installed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.gateway.options import ListenerOptions
from tests.gateway.brokers import StartBroker
from tests.gateway.certificates import Authority
from tests.gateway.other_clients import run_mosquitto
from tests.gateway.wire import ANSWER_S_MAX, FREE, Broker, Message

BODY = bytes(range(256)) * 100


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def listener(kind: str, authority: Authority, socket: Path) -> ListenerOptions:
    match kind:
        case "tls" | "wss":
            return authority.listener("l", kind)
        case "mtls":
            return authority.listener("l", "tls", client_certificates="required", username_from="cn")
        case "unix":
            return ListenerOptions(name="l", kind="unix", socket=str(socket))
        case _:
            return ListenerOptions(name="l", kind="ws", listen=FREE)


# --- paho-mqtt ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tls", "mtls", "ws", "wss", "unix"])
async def test_paho_publishes_and_receives(start_broker: StartBroker, authority: Authority, tmp_path: Path, kind: str) -> None:
    mqtt = pytest.importorskip("paho.mqtt.client")
    broker = await start_broker(listeners=(listener(kind, authority, tmp_path / "s"),))
    transport = {"ws": "websockets", "wss": "websockets", "unix": "unix"}.get(kind, "tcp")
    client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, "paho", transport=transport)
    if kind in ("tls", "wss"):
        client.tls_set_context(authority.context())
    if kind == "mtls":
        client.tls_set_context(authority.context(authority.issue_client(common_name="device-7")))
    loop = asyncio.get_running_loop()
    found: asyncio.Queue[Any] = asyncio.Queue()

    def tell(item: object) -> None:
        loop.call_soon_threadsafe(found.put_nowait, item)

    client.on_connect = lambda *_: client.subscribe("a/#", 2)
    client.on_subscribe = lambda *_: client.publish("a/b", BODY, 2)
    client.on_message = lambda _, __, message: tell(Message(message.topic, message.payload, message.qos))
    address = broker.listener("l").address
    where = str(tmp_path / "s") if kind == "unix" else "localhost"
    client.connect_async(where, address.port or 1)
    client.loop_start()
    try:
        async with asyncio.timeout(ANSWER_S_MAX):
            assert await found.get() == Message("a/b", BODY, 2)
        if kind == "mtls":
            assert broker.connection("paho").peer.username == "device-7"
    finally:
        await asyncio.to_thread(client.disconnect)
        await asyncio.to_thread(client.loop_stop)


# --- mosquitto's clients ------------------------------------------------------------------------------------------------


def tls_flags(broker: Broker, authority: Authority) -> list[str]:
    return ["-h", "localhost", "-p", str(broker.listener("l").address.port), "--cafile", str(authority.file)]


def mtls_flags(broker: Broker, authority: Authority) -> list[str]:
    certificate, key = authority.issue_client(common_name="device-8")
    return [*tls_flags(broker, authority), "--cert", str(certificate), "--key", str(key)]


def unix_flags(broker: Broker, authority: Authority) -> list[str]:
    return ["--unix", broker.listener("l").options.socket]


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "flags"), [("tls", tls_flags), ("mtls", mtls_flags), ("unix", unix_flags)])
async def test_mosquittos_clients_publish_and_receive(
    start_broker: StartBroker,
    authority: Authority,
    tmp_path: Path,
    kind: str,
    flags: Callable[[Broker, Authority], list[str]],
) -> None:
    broker = await start_broker(listeners=(listener(kind, authority, tmp_path / "s"),))
    where = flags(broker, authority)
    await run_mosquitto("mosquitto_pub", *where, "-t", "a/b", "-m", "hello", "-q", "1", "-r")
    assert await run_mosquitto("mosquitto_sub", *where, "-t", "a/#", "-C", "1", "-W", "20", "-v") == b"a/b hello\n"
