"""One gmqtt client that does what the lines on stdin say, and answers each with one line.

The first argument names the version of MQTT: gmqtt-3 or gmqtt-5. `tests/clients/mqtt_processes.py` drives this, and says what
the lines mean.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import gmqtt
from gmqtt.mqtt.constants import MQTTv50, MQTTv311
from gmqtt.storage import PersistentStorage

WAIT_S = 20
BODY_MAX = 1_000
IS_V5 = sys.argv[1].endswith("5")


class Driver:
    """Follows commands."""

    def __init__(self) -> None:
        self._client: Any = None
        self._unacked = PersistentStorage()
        self._messages: asyncio.Queue[str] = asyncio.Queue()
        self._granted: asyncio.Queue[int] = asyncio.Queue()
        self._acked = 0
        self._streaming: asyncio.Task[None] | None = None

    def _got(self, _: object, topic: str, body: bytes, qos: int, about: dict[str, Any]) -> int:
        shown = f"#{len(body)}" if len(body) > BODY_MAX else body.decode()
        self._messages.put_nowait(f"{topic or '-'} {qos} {int(about['retain'])} {shown}")
        return 0

    async def connect(self, port: str, client_id: str, clean: str, will: str) -> int:
        message = gmqtt.Message(will, "gone", qos=1) if will != "-" else None
        about = {"session_expiry_interval": 60} if IS_V5 and clean == "0" else {}
        self._client = gmqtt.Client(
            client_id, clean_session=clean == "1", will_message=message, persistent_storage=self._unacked, **about
        )
        self._client.set_config({"reconnect_delay": 0.1})
        greeted: asyncio.Queue[int] = asyncio.Queue()
        self._client.on_connect = lambda _, flags, code, about: greeted.put_nowait(flags & 1)
        self._client.on_message = self._got
        self._client.on_subscribe = lambda _, mid, codes, about: self._granted.put_nowait(codes[0])
        await self._client.connect("127.0.0.1", int(port), version=MQTTv50 if IS_V5 else MQTTv311)
        return await greeted.get()

    async def subscribe(self, topic_filter: str, qos: str) -> int:
        self._client.subscribe(topic_filter, qos=int(qos))
        return await self._granted.get()

    async def publish(self, topic: str, qos: str, retain: str, body: str) -> str:
        self._client.publish(topic, body, qos=int(qos), retain=retain == "1")
        await self._unacked.wait_empty()
        return ""

    async def blob(self, topic: str, size: str) -> str:
        self._client.publish(topic, bytes(int(size)), qos=1)
        await self._unacked.wait_empty()
        return ""

    async def next(self) -> str:
        return await self._messages.get()

    async def waiting(self) -> int:
        return self._messages.qsize()

    async def acked(self) -> int:
        return self._acked

    async def stream(self, topic: str, count: str) -> str:
        self._streaming = asyncio.create_task(self._stream(topic, int(count)))
        return ""

    async def _stream(self, topic: str, count: int) -> None:
        while self._acked < count:
            self._client.publish(topic, str(self._acked), qos=1)
            await self._unacked.wait_empty()  # across lost connections: the client sends it again
            self._acked += 1

    async def end(self) -> str:
        await self._client.disconnect()
        return ""


async def follow() -> None:
    driver = Driver()
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        action, *words = line.decode().rstrip("\n").split(" ")
        try:
            answer = f"ok {await asyncio.wait_for(getattr(driver, action)(*words), WAIT_S)}"
        except Exception as error:  # the test that reads it fails with it
            answer = f"error {type(error).__name__}: {error}"
        print(answer, flush=True)


asyncio.run(follow())
