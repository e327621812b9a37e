"""Real MQTT clients behind one interface, so that one test of a feature runs with each client in each of its versions."""

from __future__ import annotations

import asyncio
import importlib
import json
import shutil
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pytest

from penstock.gateway.protocol.properties import Property
from tests.gateway.wire import ANSWER_S_MAX

MQTTJS = Path(__file__).parent / "mqttjs"

Found = dict[Property, Any]

NAMES: dict[Property, str] = {
    Property.PAYLOAD_FORMAT: "PayloadFormatIndicator",
    Property.MESSAGE_EXPIRY_S: "MessageExpiryInterval",
    Property.CONTENT_TYPE: "ContentType",
    Property.RESPONSE_TOPIC: "ResponseTopic",
    Property.CORRELATION_DATA: "CorrelationData",
    Property.SUBSCRIPTION_IDENTIFIER: "SubscriptionIdentifier",
    Property.SESSION_EXPIRY_S: "SessionExpiryInterval",
    Property.ASSIGNED_CLIENT_ID: "AssignedClientIdentifier",
    Property.SERVER_KEEP_ALIVE_S: "ServerKeepAlive",
    Property.AUTHENTICATION_METHOD: "AuthenticationMethod",
    Property.WILL_DELAY_S: "WillDelayInterval",
    Property.RECEIVE_MAXIMUM: "ReceiveMaximum",
    Property.TOPIC_ALIAS_MAXIMUM: "TopicAliasMaximum",
    Property.TOPIC_ALIAS: "TopicAlias",
    Property.USER_PROPERTY: "UserProperty",
    Property.MAXIMUM_PACKET_SIZE: "MaximumPacketSize",
}
"""Names of the properties in paho. MQTT.js starts them with a small letter, and writes `userProperties`."""


class Got(NamedTuple):
    """A message as a client delivers it to the application."""

    topic: str
    body: bytes
    qos: int = 0
    retain: bool = False
    about: Found = {}  # noqa: RUF012 - never changed


@dataclass
class Will:
    topic: str
    body: bytes
    qos: int = 1
    retain: bool = False
    about: Found = field(default_factory=dict)


class Greeting(NamedTuple):
    """Reason code of the CONNACK, or its return code in MQTT 3.1.1."""

    code: int
    session_present: bool | None = None
    """None, as other fields, if the library does not tell."""
    about: Found | None = None


class Driver(Protocol):
    """A client under test."""

    async def connect(
        self,
        port: int,
        client_id: str,
        *,
        clean: bool = True,
        keep_alive_s: int = 60,
        will: Will | None = None,
        username: str | None = None,
        about: Found | None = None,
        ca: Path | None = None,
        scheme: str = "mqtt",
    ) -> Greeting:
        """Connect by the scheme mqtt, mqtts, ws or wss."""

    async def subscribe(self, *filters: tuple[str, int], options: int = 0, about: Found | None = None) -> list[int]:
        """Subscribe to filters with a QoS each, and with options of MQTT 5.0. Return the codes of the SUBACK."""

    async def unsubscribe(self, *filters: str) -> list[int] | None:
        """Unsubscribe. Return the codes of the UNSUBACK, which has none in MQTT 3.1.1."""

    async def publish(
        self, topic: str, body: bytes = b"x", qos: int = 1, *, retain: bool = False, about: Found | None = None
    ) -> int | None:
        """Publish. Return the reason code of the last ack, or None if the library does not tell."""

    async def message(self) -> Got:
        """Return the next message."""

    async def disconnected(self) -> int:
        """Return the reason code of the server's DISCONNECT."""

    async def pinged(self) -> None:
        """Send a PINGREQ; return when the PINGRESP has come."""

    async def drop(self) -> None:
        """End the connection without a DISCONNECT."""

    async def close(self) -> None:
        """Disconnect if connected, and release everything."""


# --- MQTT.js --------------------------------------------------------------------------------------------------------------


class MqttJs:
    """MQTT.js, in a Node process of its own that follows commands as lines of JSON."""

    untold: frozenset[str] = frozenset()

    def __init__(self, version: int) -> None:
        self.version = version
        self._process: asyncio.subprocess.Process
        self._events: dict[str, asyncio.Queue[dict[str, Any]]] = {
            name: asyncio.Queue() for name in ("answer", "message", "disconnect", "pingresp", "close")
        }
        self._reader: asyncio.Task[None]

    @staticmethod
    def skip_where_missing() -> None:
        if shutil.which("node") is None:
            pytest.skip("Node is not installed")
        if not (MQTTJS / "node_modules" / "mqtt").is_dir():
            pytest.skip("MQTT.js is not installed (npm ci in tests/clients/mqttjs)")

    async def _start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            "node", "client.js", cwd=MQTTJS, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 24
        )
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            found = json.loads(line)
            self._events[found.pop("event")].put_nowait(found)

    async def _do(self, action: str, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"action": action, **arguments}).encode() + b"\n")
        return await self._events["answer"].get()

    async def connect(
        self,
        port: int,
        client_id: str,
        *,
        clean: bool = True,
        keep_alive_s: int = 60,
        will: Will | None = None,
        username: str | None = None,
        about: Found | None = None,
        ca: Path | None = None,
        scheme: str = "mqtt",
    ) -> Greeting:
        await self._start()
        options: dict[str, Any] = {
            "protocolVersion": self.version,
            "clientId": client_id,
            "clean": clean,
            "keepalive": keep_alive_s,
            "properties": _to_js(about or {}),
        }
        if username is not None:
            options |= {"username": username, "password": "secret"}
        if ca is not None:
            options["ca"] = await asyncio.to_thread(ca.read_text)
        if will is not None:
            options["will"] = {"topic": will.topic, "payload": will.body.hex(), "qos": will.qos, "retain": will.retain}
            options["will"] |= {"properties": _to_js(will.about)}
        path = "/mqtt" if scheme.startswith("ws") else ""
        answer = await self._do("connect", url=f"{scheme}://localhost:{port}{path}", options=options)
        return Greeting(answer["code"], answer.get("sessionPresent", False), _from_js(answer.get("properties", {})))

    async def subscribe(self, *filters: tuple[str, int], options: int = 0, about: Found | None = None) -> list[int]:
        more = {"nl": bool(options & 4), "rap": bool(options & 8), "rh": options >> 4} if self.version == 5 else {}
        wished = {name: {"qos": qos} | more for name, qos in filters}
        return list((await self._do("subscribe", filters=wished, properties=_to_js(about or {})))["codes"])

    async def unsubscribe(self, *filters: str) -> list[int]:
        answer = await self._do("unsubscribe", filters=filters)
        return list(answer["codes"]) if self.version == 5 else []

    async def publish(
        self, topic: str, body: bytes = b"x", qos: int = 1, *, retain: bool = False, about: Found | None = None
    ) -> int:
        options = {"qos": qos, "retain": retain} | ({"properties": _to_js(about)} if about else {})
        return int((await self._do("publish", topic=topic, body=body.hex(), options=options))["code"])

    async def message(self) -> Got:
        found = await self._events["message"].get()
        about = _from_js(found["properties"])
        about.pop(Property.TOPIC_ALIAS, None)  # MQTT.js replaced the alias by the topic.
        return Got(found["topic"], bytes.fromhex(found["body"]), found["qos"], found["retain"], about)

    async def disconnected(self) -> int:
        return int((await self._events["disconnect"].get())["code"])

    async def pinged(self) -> None:
        await self._events["pingresp"].get()

    async def drop(self) -> None:
        await self._do("drop")

    async def close(self) -> None:
        assert self._process.stdin is not None
        if self._events["close"].empty():
            await self._do("end")
        self._process.stdin.close()
        await asyncio.wait_for(self._process.wait(), ANSWER_S_MAX)
        await self._reader


def _to_js(found: Found) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    for one, value in found.items():
        name = NAMES[one]
        if one == Property.USER_PROPERTY:
            users: dict[str, list[str]] = {}
            for key, text in value:
                users.setdefault(key, []).append(text)
            shown["userProperties"] = users
        elif one == Property.PAYLOAD_FORMAT:
            shown["payloadFormatIndicator"] = bool(value)
        elif one == Property.SUBSCRIPTION_IDENTIFIER:
            shown["subscriptionIdentifier"] = value[0]
        else:
            shown[name[0].lower() + name[1:]] = value.hex() if isinstance(value, bytes) else value
    return shown


def _from_js(shown: dict[str, Any]) -> Found:
    found: Found = {}
    for one, name in NAMES.items():
        value = shown.get("userProperties" if one == Property.USER_PROPERTY else name[0].lower() + name[1:])
        if value is None:
            continue
        if one == Property.USER_PROPERTY:
            value = [(key, text) for key, texts in value.items() for text in (texts if isinstance(texts, list) else [texts])]
        elif one == Property.PAYLOAD_FORMAT:
            value = int(value)
        elif one == Property.CORRELATION_DATA:
            value = bytes.fromhex(value)
        elif one == Property.SUBSCRIPTION_IDENTIFIER:
            value = value if isinstance(value, list) else [value]
        found[one] = value
    return found


# --- paho-mqtt ------------------------------------------------------------------------------------------------------------


class Paho:
    """paho-mqtt. Its network loop runs on a thread of its own."""

    untold: frozenset[str] = frozenset()

    def __init__(self, version: int) -> None:
        self.version = version
        self._loop = asyncio.get_running_loop()
        self._events: dict[str, asyncio.Queue[Any]] = {
            name: asyncio.Queue()
            for name in ("connect", "subscribe", "unsubscribe", "publish", "message", "disconnect", "ping")
        }
        self._topics: dict[int, str] = {}
        self._is_over = False

    @staticmethod
    def skip_where_missing() -> None:
        pytest.importorskip("paho.mqtt.client", reason="paho-mqtt is not installed")

    def _tell(self, name: str, item: object) -> None:
        self._loop.call_soon_threadsafe(self._events[name].put_nowait, item)

    async def connect(
        self,
        port: int,
        client_id: str,
        *,
        clean: bool = True,
        keep_alive_s: int = 60,
        will: Will | None = None,
        username: str | None = None,
        about: Found | None = None,
        ca: Path | None = None,
        scheme: str = "mqtt",
    ) -> Greeting:
        mqtt = _paho("client")
        is_5 = self.version == 5
        transport: Any = "websockets" if scheme.startswith("ws") else "tcp"
        sessions = {} if is_5 else {"clean_session": clean}
        protocol = mqtt.MQTTv5 if is_5 else mqtt.MQTTv311
        self.client: Any = mqtt.Client(
            mqtt.CallbackAPIVersion.VERSION2,
            client_id,
            protocol=protocol,
            transport=transport,
            reconnect_on_failure=False,
            **sessions,
        )
        client = self.client
        client.on_connect = lambda _, __, flags, reason, found: self._tell("connect", (flags, reason, found))
        client.on_subscribe = lambda _, __, ___, reasons, ____: self._tell("subscribe", reasons)
        client.on_unsubscribe = lambda _, __, ___, reasons, ____: self._tell("unsubscribe", reasons)
        client.on_publish = lambda _, __, ___, reason, ____: self._tell("publish", reason)
        client.on_message = lambda _, __, message: self._tell("message", message)
        client.on_disconnect = lambda _, __, ___, reason, ____: self._tell("disconnect", reason)
        client.on_log = lambda _, __, ___, line: self._tell("ping", line) if "PINGRESP" in line else None
        if username is not None:
            client.username_pw_set(username, "secret")
        if ca is not None:
            client.tls_set(str(ca))
        if will is not None:
            properties = _to_paho("WILLMESSAGE", will.about) if is_5 else None
            client.will_set(will.topic, will.body, will.qos, will.retain, properties)
        more = {"clean_start": clean, "properties": _to_paho("CONNECT", about or {})} if is_5 else {}
        client.connect_async("localhost", port, keep_alive_s, **more)
        client.loop_start()
        flags, reason, found = await self._events["connect"].get()
        return Greeting(reason.value, flags.session_present, _from_paho(found))

    async def subscribe(self, *filters: tuple[str, int], options: int = 0, about: Found | None = None) -> list[int]:
        if self.version == 5:
            options_of = _paho("subscribeoptions").SubscribeOptions
            more = [(name, options_of(qos, bool(options & 4), bool(options & 8), options >> 4)) for name, qos in filters]
            self.client.subscribe(more, properties=_to_paho("SUBSCRIBE", about or {}))
        else:
            self.client.subscribe(list(filters))
        return [reason.value for reason in await self._events["subscribe"].get()]

    async def unsubscribe(self, *filters: str) -> list[int]:
        self.client.unsubscribe(list(filters))
        return [reason.value for reason in await self._events["unsubscribe"].get()]

    async def publish(
        self, topic: str, body: bytes = b"x", qos: int = 1, *, retain: bool = False, about: Found | None = None
    ) -> int:
        self.client.publish(topic, body, qos, retain, _to_paho("PUBLISH", about) if about else None)
        return int((await self._events["publish"].get()).value)

    async def message(self) -> Got:
        found = await self._events["message"].get()
        about = _from_paho(getattr(found, "properties", None))
        topic = found.topic
        if Property.TOPIC_ALIAS in about:  # paho leaves topic aliases to the application.
            topic = self._topics.setdefault(about.pop(Property.TOPIC_ALIAS), topic)
        return Got(topic, found.payload, found.qos, found.retain, about)

    async def disconnected(self) -> int:
        return int((await self._events["disconnect"].get()).value)

    async def pinged(self) -> None:
        await self._events["ping"].get()

    async def drop(self) -> None:
        self._is_over = True
        self.client.socket().close()
        await asyncio.to_thread(self.client.loop_stop)

    async def close(self) -> None:
        if not self._is_over:
            self.client.disconnect()
            await asyncio.to_thread(self.client.loop_stop)


def _paho(name: str) -> Any:
    return importlib.import_module(f"paho.mqtt.{name}")


def _to_paho(packet: str, found: Found) -> Any:
    properties = _paho("properties").Properties(getattr(_paho("packettypes").PacketTypes, packet))
    for one, value in found.items():
        setattr(properties, NAMES[one], value[0] if one == Property.SUBSCRIPTION_IDENTIFIER else value)
    return properties


def _from_paho(properties: Any) -> Found:
    return {one: getattr(properties, name) for one, name in NAMES.items() if hasattr(properties, name)}


# --- aiomqtt --------------------------------------------------------------------------------------------------------------


class Aiomqtt:
    """aiomqtt: paho's protocol, on the event loop."""

    untold = frozenset(
        (
            "a_takeover",
            "pings",
            "limits_of_the_server",
            "reasons_in_acks",
            "a_disconnect_of_the_server",
            "topic_aliases_both_ways",
        )
    )
    """Features about which aiomqtt tells nothing. It does not resolve topic aliases of a server."""

    def __init__(self, version: int) -> None:
        self.version = version
        self._topics: dict[int, str] = {}
        self._client: Any = None

    @staticmethod
    def skip_where_missing() -> None:
        pytest.importorskip("aiomqtt", reason="aiomqtt is not installed")

    async def connect(
        self,
        port: int,
        client_id: str,
        *,
        clean: bool = True,
        keep_alive_s: int = 60,
        will: Will | None = None,
        username: str | None = None,
        about: Found | None = None,
        ca: Path | None = None,
        scheme: str = "mqtt",
    ) -> Greeting:
        aiomqtt = importlib.import_module("aiomqtt")
        is_5 = self.version == 5
        options: dict[str, Any] = {"clean_start": clean, "properties": _to_paho("CONNECT", about or {})} if is_5 else {}
        if not is_5:
            options["clean_session"] = clean
        if will is not None:
            properties = _to_paho("WILLMESSAGE", will.about) if is_5 else None
            options["will"] = aiomqtt.Will(will.topic, will.body, will.qos, will.retain, properties)
        if username is not None:
            options |= {"username": username, "password": "secret"}
        if ca is not None:
            options["tls_params"] = aiomqtt.TLSParameters(ca_certs=str(ca))
        if scheme.startswith("ws"):
            options |= {"transport": "websockets", "websocket_path": "/mqtt"}
        protocol = aiomqtt.ProtocolVersion.V5 if is_5 else aiomqtt.ProtocolVersion.V311
        client = aiomqtt.Client("localhost", port, identifier=client_id, protocol=protocol, keepalive=keep_alive_s, **options)
        try:
            await client.__aenter__()
        except aiomqtt.exceptions.MqttConnectError as error:
            return Greeting(getattr(error.rc, "value", error.rc))
        self._client = client
        return Greeting(0)

    async def subscribe(self, *filters: tuple[str, int], options: int = 0, about: Found | None = None) -> list[int]:
        wished: list[tuple[str, Any]] = list(filters)
        if self.version == 5:
            options_of = _paho("subscribeoptions").SubscribeOptions
            wished = [(name, options_of(qos, bool(options & 4), bool(options & 8), options >> 4)) for name, qos in filters]
            codes = await self._client.subscribe(wished, properties=_to_paho("SUBSCRIBE", about or {}))
        else:
            codes = await self._client.subscribe(wished)
        return [getattr(code, "value", code) for code in codes]

    async def unsubscribe(self, *filters: str) -> list[int] | None:
        await self._client.unsubscribe(list(filters))
        return None

    async def publish(
        self, topic: str, body: bytes = b"x", qos: int = 1, *, retain: bool = False, about: Found | None = None
    ) -> int | None:
        await self._client.publish(topic, body, qos, retain, _to_paho("PUBLISH", about) if about else None)
        return None

    async def message(self) -> Got:
        found = await anext(self._client.messages)
        about = _from_paho(found.properties)
        topic = str(found.topic)
        if Property.TOPIC_ALIAS in about:
            topic = self._topics.setdefault(about.pop(Property.TOPIC_ALIAS), topic)
        return Got(topic, found.payload, found.qos, found.retain, about)

    async def disconnected(self) -> int:
        raise NotImplementedError

    async def pinged(self) -> None:
        raise NotImplementedError

    async def drop(self) -> None:
        self._client._client.socket().shutdown(socket.SHUT_RDWR)

    async def close(self) -> None:
        if self._client is not None:
            with suppress(importlib.import_module("aiomqtt").MqttError):  # The connection was dropped, or the node closed it.
                await self._client.__aexit__(None, None, None)


# --- amqtt ----------------------------------------------------------------------------------------------------------------


class Amqtt:
    """amqtt's MQTTClient, which implements MQTT 3.1.1 by itself."""

    untold = frozenset(("a_takeover", "pings", "an_assigned_client_id"))
    """Features about which amqtt tells nothing. It makes up a client id if it is given none."""

    def __init__(self, version: int) -> None:
        assert version == 4
        self._client: Any = None

    @staticmethod
    def skip_where_missing() -> None:
        pytest.importorskip("amqtt.client", reason="amqtt is not installed")

    async def connect(
        self,
        port: int,
        client_id: str,
        *,
        clean: bool = True,
        keep_alive_s: int = 60,
        will: Will | None = None,
        username: str | None = None,
        about: Found | None = None,
        ca: Path | None = None,
        scheme: str = "mqtt",
    ) -> Greeting:
        config: dict[str, Any] = {"auto_reconnect": False, "keep_alive": keep_alive_s}
        if will is not None:
            config["will"] = {"topic": will.topic, "message": will.body.decode(), "qos": will.qos, "retain": will.retain}
        client = importlib.import_module("amqtt.client").MQTTClient(client_id, config=config)
        user = f"{username}:secret@" if username is not None else ""
        url = f"{scheme}://{user}localhost:{port}/mqtt"
        try:
            code = await client.connect(url, cleansession=clean, cafile=str(ca) if ca is not None else None)
        except importlib.import_module("amqtt.errors").ConnectError as error:
            return Greeting(error.return_code)
        self._client = client
        return Greeting(code)

    async def subscribe(self, *filters: tuple[str, int], options: int = 0, about: Found | None = None) -> list[int]:
        return list(await self._client.subscribe(list(filters)))

    async def unsubscribe(self, *filters: str) -> list[int]:
        await self._client.unsubscribe(list(filters))
        return []

    async def publish(
        self, topic: str, body: bytes = b"x", qos: int = 1, *, retain: bool = False, about: Found | None = None
    ) -> int | None:
        await self._client.publish(topic, body, qos, retain)
        return None

    async def message(self) -> Got:
        found = await self._client.deliver_message()
        return Got(found.topic, bytes(found.data), found.qos, found.publish_packet.retain_flag)

    async def disconnected(self) -> int:
        raise NotImplementedError

    async def pinged(self) -> None:
        raise NotImplementedError

    async def drop(self) -> None:
        await self._client._handler.writer.close()

    async def close(self) -> None:
        if self._client is not None:
            await self._client.disconnect()


DRIVERS: dict[str, type[MqttJs] | type[Paho] | type[Aiomqtt] | type[Amqtt]] = {
    "MQTT.js": MqttJs,
    "paho-mqtt": Paho,
    "aiomqtt": Aiomqtt,
    "amqtt": Amqtt,
}

VERSIONS = {"amqtt": (4,)}
"""Protocol levels of the clients that speak only one version."""
