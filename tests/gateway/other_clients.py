"""Clients of other projects: mosquitto's command-line tools, and paho-mqtt for Python."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.gateway.wire import ANSWER_S_MAX, Broker
from tests.waiting import until


def command(name: str) -> str:
    """Return the path of one of mosquitto's commands. Skip the test if the command is not installed."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed (apt-get install mosquitto-clients)")
    return path


async def subscribed(broker: Broker, client_id: str) -> None:
    """Wait until a client has a subscription. The client must not end before that."""
    clients = broker.node.gateway.clients
    await until(lambda: client_id in clients and bool(clients[client_id].session.subscriptions))


async def printed(process: asyncio.subprocess.Process) -> list[str]:
    """Wait until a command has ended successfully; return the lines that it printed."""
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode().splitlines()


class Paho:
    """A client of paho-mqtt with MQTT 5.0. Its network loop has a thread of its own, and its callbacks fill a queue each."""

    def __init__(self, module: Any, broker: Broker, client_id: str) -> None:
        self._loop = asyncio.get_running_loop()
        self.answers: dict[str, asyncio.Queue[Any]] = {
            name: asyncio.Queue() for name in ("connect", "subscribe", "unsubscribe", "publish", "message", "disconnect")
        }
        self._broker = broker
        self.client = module.Client(module.CallbackAPIVersion.VERSION2, client_id, protocol=module.MQTTv5)
        self.client.on_connect = lambda _, __, flags, reason, about: self._tell("connect", (flags, reason, about))
        self.client.on_subscribe = lambda _, __, ___, reasons, ____: self._tell("subscribe", reasons)
        self.client.on_unsubscribe = lambda _, __, ___, reasons, ____: self._tell("unsubscribe", reasons)
        self.client.on_publish = lambda _, __, ___, reason, about: self._tell("publish", (reason, about))
        self.client.on_message = lambda _, __, message: self._tell("message", message)
        self.client.on_disconnect = lambda _, __, ___, reason, ____: self._tell("disconnect", reason)

    def _tell(self, name: str, item: object) -> None:
        self._loop.call_soon_threadsafe(self.answers[name].put_nowait, item)

    async def of(self, name: str) -> Any:
        """Return what the next callback of that name was given."""
        return await self.answers[name].get()

    async def connect(self, **options: Any) -> Any:
        """Connect; return flags, reason and properties of the CONNACK."""
        address = self._broker.node.mqtt
        self.client.connect_async(address.host, address.port, **options)
        self.client.loop_start()
        return await self.of("connect")


@asynccontextmanager
async def paho(broker: Broker, client_id: str, **options: Any) -> AsyncIterator[Paho]:
    """Give a connected client, which disconnects at the end. Skip the test if paho-mqtt is not installed."""
    module = pytest.importorskip("paho.mqtt.client", reason="paho-mqtt is not installed")
    client = Paho(module, broker, client_id)
    _, reason, _ = await client.connect(**options)
    assert not reason.is_failure
    yield client
    client.client.disconnect()
    await asyncio.to_thread(client.client.loop_stop)


def properties_of(packet: str, **values: Any) -> Any:
    """Return paho's Properties for a packet of the type `packet`."""
    module = pytest.importorskip("paho.mqtt.properties")
    types = pytest.importorskip("paho.mqtt.packettypes")
    found = module.Properties(getattr(types.PacketTypes, packet))
    for name, value in values.items():
        setattr(found, name, value)
    return found


async def run_mosquitto(tool: str, *arguments: str) -> bytes:
    """Run one of mosquitto's commands until it ends; return its output."""
    if not shutil.which(tool):
        pytest.skip("mosquitto's tools are not installed (apt-get install mosquitto-clients)")
    process = await asyncio.create_subprocess_exec(tool, *arguments, stdout=asyncio.subprocess.PIPE)
    output, _ = await asyncio.wait_for(process.communicate(), ANSWER_S_MAX)
    assert process.returncode == 0
    return output
