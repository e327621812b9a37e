"""An MQTT client for tests that must see each packet, and the node that it talks to."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections import deque
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

from penstock.access.options import AccessControlOptions
from penstock.gateway.connection.connection import Connection
from penstock.gateway.options import GatewayOptions
from penstock.gateway.protocol.decode import decode
from penstock.gateway.protocol.encode import encode_acks, encode_publish
from penstock.gateway.protocol.fixed_header import FROM_SERVER, FROM_SERVER_5
from penstock.gateway.protocol.packets import (
    CONNACK,
    DISCONNECT,
    PINGREQ,
    PINGRESP,
    PUBLISH,
    PUBLISH_WITH,
    SUBACK,
    UNSUBACK,
    Packet,
)
from penstock.gateway.protocol.properties import Property, PropertyValues, parse_properties, read_properties, write_properties
from penstock.gateway.protocol.reasons import ReasonCode
from penstock.gateway.sessions.rows import all_sessions
from penstock.gateway.transport.listener import Listener
from penstock.node.adminoptions import AdminOptions
from penstock.node.config import Config
from penstock.node.node import Node
from penstock.node.tablesoptions import TablesOptions
from penstock.pop.options import PopOptions
from penstock.store.options import KIB, MIB, HostPort, StoreOptions
from penstock.store.queues.queues import ROOT
from penstock.store.record import Kind
from penstock.store.space.quotaoptions import QuotaOptions
from penstock.tracing.options import TracingOptions
from tests.clock import AheadClock, ManualClock
from tests.gateway.packet_cases import connect, packet, subscribe, unsubscribe
from tests.gateway.packet_cases_5 import connect_5, subscribe_5, unsubscribe_5
from tests.store.wiring import copy_left
from tests.waiting import WAIT_S_MAX, until

ANSWER_S_MAX = WAIT_S_MAX
"""Seconds that a test waits for what must happen. Only a failure takes this long."""

PATIENT = {"connect_timeout_ms": 600_000, "tls_handshake_ms": 600_000}
"""Options of a node that waits for clients of a machine that is busy. A test that wants a time-out moves the clock."""

RECEIVE_BUFFER_BYTES = 64 * KIB
"""Size of the kernel's buffers for a client that does not read: small, so that the node soon notices."""

FREE = HostPort("127.0.0.1", 0)
PING = packet(PINGREQ << 4)
BYE = packet(DISCONNECT << 4)

CLEAN = 0x02
WILL, WILL_RETAIN = 0x04, 0x20
"""Flags of a CONNECT."""


class Message(NamedTuple):
    """A message as a subscriber receives it."""

    topic: str
    body: bytes
    qos: int = 0
    retain: bool = False


class Client:
    """One MQTT connection, packet by packet. Packets that arrive while a test waits for another one are kept in order."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.side = FROM_SERVER
        self._packets: deque[Packet] = deque()
        self._rest = b""

    # --- packets ------------------------------------------------------------------------------------------------------

    async def send(self, *packets: bytes) -> None:
        """Send packets in one write."""
        self.writer.write(b"".join(packets))
        await self.writer.drain()

    async def receive(self) -> Packet:
        """Return the next packet, or `()` at the end of the connection."""
        async with asyncio.timeout(ANSWER_S_MAX):
            while not self._packets:
                data = await self._read()
                if not data:
                    return ()
                self._rest += data
                packets, used = decode(self._rest, 64 * MIB, self.side)
                self._packets.extend(packets)
                self._rest = self._rest[used:]
        return self._packets.popleft()

    async def _read(self) -> bytes:
        try:
            return await self.reader.read(MIB)
        except ConnectionResetError:  # the server closed before it had read all that this client sent: an end like any other
            return b""

    async def expect(self, kind: int) -> Packet:
        """Return the next packet of type `kind`. Packets that come before it are kept."""
        passed: list[Packet] = []
        while (found := await self.receive()) and found[0] != kind:
            passed.append(found)
        self.unread(passed)
        assert found, f"the connection closed before a packet of type {kind} came, after {passed}"
        return found

    def unread(self, packets: list[Packet]) -> None:
        """Give packets back, in order: `receive` returns them first."""
        self._packets.extendleft(reversed(packets))

    async def drained(self) -> list[Packet]:
        """Return all packets that the server has sent up to now in answer to this client or to others, without PINGRESPs.

        The client sends two pings, one after the other. The server may read the first ping together with a PUBLISH, and it
        delivers the PUBLISH only at the end of that turn of its loop.
        """
        passed: list[Packet] = []
        for _ in range(2):
            await self.send(PING)
            while (found := await self.receive()) and found[0] != PINGRESP:
                passed.append(found)
            assert found, f"the connection closed before the PINGRESP came, after {passed}"
        return passed

    async def ended(self) -> list[Packet]:
        """Wait for the end of the connection; return the packets that come before it."""
        passed: list[Packet] = []
        while found := await self.receive():
            passed.append(found)
        return passed

    # --- requests and messages ----------------------------------------------------------------------------------------

    async def publish(
        self, topic: str, body: bytes = b"", qos: int = 0, *, packet_id: int = 1, retain: bool = False, dup: bool = False
    ) -> None:
        """Publish a message. At QoS 1 and 2, return when the server has completed the exchange."""
        used_id = packet_id if qos else 0
        await self.send(encode_publish(topic.encode(), body, qos, retain=retain, dup=dup, packet_id=used_id))
        if qos:
            assert await self.expect(3 + qos) == (3 + qos, packet_id)  # PUBACK is 4, PUBREC 5
        if qos == 2:
            await self.send(encode_acks(6, [packet_id]))
            assert await self.expect(7) == (7, packet_id)

    async def subscribe(self, *filters: tuple[str, int]) -> list[int]:
        """Subscribe to pairs of filter and QoS; return the codes of the SUBACK."""
        await self.send(subscribe(1, *((name.encode(), qos) for name, qos in filters)))
        body = (await self.expect(SUBACK))[2]
        assert body[:2] == b"\0\1"
        return list(body[2:])

    async def unsubscribe(self, *filters: str) -> None:
        await self.send(unsubscribe(2, *(name.encode() for name in filters)))
        assert await self.expect(UNSUBACK) == (UNSUBACK, 2)

    async def message(self) -> Message:
        """Return the next message; at QoS 1 and 2, acknowledge it."""
        found = await self.receive()
        assert found, "closed in place of a message"
        assert found[0] == PUBLISH, found
        message = message_of(found)
        if message.qos:
            await self.send(encode_acks(3 + message.qos, [found[3]]))
        if message.qos == 2:
            assert await self.expect(6) == (6, found[3])
            await self.send(encode_acks(7, [found[3]]))
        return message

    async def messages(self) -> list[Message]:
        """Return the messages among the packets that `drained` returns, without acknowledging them."""
        return [message_of(found) for found in await self.drained() if found[0] == PUBLISH]

    def reset(self) -> None:
        """End the connection without a DISCONNECT."""
        self.writer.transport.abort()

    def stop_reading(self) -> None:
        self.writer.transport.pause_reading()  # type: ignore[attr-defined]

    def go_on_reading(self) -> None:
        self.writer.transport.resume_reading()  # type: ignore[attr-defined]


class Client5(Client):
    """One connection of MQTT 5.0. `connack` sets `session_present`, and `limits` to the properties of the CONNACK."""

    session_present = False
    limits: PropertyValues

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__(reader, writer)
        self.side = FROM_SERVER_5

    async def connack(self) -> tuple[int, PropertyValues]:
        """Receive the CONNACK; return its reason and its properties."""
        kind, _, body = await self.receive()
        assert kind == CONNACK
        self.session_present = bool(body[0])
        self.limits, at = read_properties(body, 2, CONNACK)
        assert at == len(body)
        return body[1], self.limits

    async def disconnected(self) -> tuple[ReasonCode, list[Packet]]:
        """Wait for the end; return the reason of the DISCONNECT, which must come last, and the packets before it."""
        *passed, last = await self.ended()
        assert last[0] == DISCONNECT, last
        return ReasonCode(last[2][0]), passed

    async def publish_with(
        self,
        topic: str,
        body: bytes,
        found: PropertyValues | None = None,
        qos: int = 0,
        *,
        packet_id: int = 1,
        retain: bool = False,
    ) -> int:
        """Publish with properties. Return the reason with which the server answers, at QoS 0 always 0."""
        properties = write_properties(found or {})
        used_id = packet_id if qos else 0
        await self.send(encode_publish(topic.encode(), body, qos, retain=retain, packet_id=used_id, properties=properties))
        if not qos:
            return 0
        answer = await self.expect(3 + qos)
        assert answer[1] == packet_id
        reason: int = answer[2] if len(answer) > 2 else 0
        if qos == 2 and reason < 0x80:
            await self.send(encode_acks(6, [packet_id]))
            assert await self.expect(7) == (7, packet_id)
        return reason

    async def publish(
        self, topic: str, body: bytes = b"", qos: int = 0, *, packet_id: int = 1, retain: bool = False, dup: bool = False
    ) -> None:
        assert await self.publish_with(topic, body, {}, qos, packet_id=packet_id, retain=retain) == 0

    async def subscribe_with(self, *filters: tuple[str, int], identifier: int = 0) -> list[int]:
        """Subscribe to pairs of filter and options; return the codes of the SUBACK."""
        about = write_properties({Property.SUBSCRIPTION_IDENTIFIER: [identifier]} if identifier else {})
        await self.send(subscribe_5(1, *((name.encode(), options) for name, options in filters), about=about))
        body = (await self.expect(SUBACK))[2]
        assert body[:3] == b"\0\1\0"
        return list(body[3:])

    async def subscribe(self, *filters: tuple[str, int]) -> list[int]:
        return await self.subscribe_with(*filters)

    async def unsubscribe(self, *filters: str) -> None:
        assert await self.unsubscribed(*filters) == [0] * len(filters)

    async def unsubscribed(self, *filters: str) -> list[int]:
        """Unsubscribe; return the codes of the UNSUBACK."""
        await self.send(unsubscribe_5(2, *(name.encode() for name in filters)))
        body = (await self.expect(UNSUBACK))[2]
        assert body[:3] == b"\0\2\0", body
        return list(body[3:])

    async def message_with(self) -> tuple[Message, PropertyValues]:
        """Return the next message with its properties; at QoS 1 and 2, acknowledge it."""
        found = await self.receive()
        assert found, "closed in place of a message"
        assert found[0] in (PUBLISH, PUBLISH_WITH), found
        message = message_of(found)
        if message.qos:
            await self.send(encode_acks(3 + message.qos, [found[3]]))
        if message.qos == 2:
            assert await self.expect(6) == (6, found[3])
            await self.send(encode_acks(7, [found[3]]))
        return message, parse_properties(found[5], PUBLISH) if len(found) > 5 else {}

    async def message(self) -> Message:
        return (await self.message_with())[0]

    async def messages(self) -> list[Message]:
        return [message_of(found) for found in await self.drained() if found[0] in (PUBLISH, PUBLISH_WITH)]

    async def messages_with(self) -> list[tuple[Message, PropertyValues]]:
        """Return the messages among the packets that `drained` returns, with their properties, and acknowledge none."""
        return [
            (message_of(found), parse_properties(found[5], PUBLISH) if len(found) > 5 else {})
            for found in await self.drained()
            if found[0] in (PUBLISH, PUBLISH_WITH)
        ]


def message_of(found: Packet) -> Message:
    _, flags, topic, _, body = found[:5]
    return Message(topic.decode(), body, flags >> 1 & 3, bool(flags & 1))


C = TypeVar("C", bound=Client)


class Broker:
    """A node on a data directory, and the clients of a test.

    Parameters:
        data_dir: directory of the node's store.
        options: options of the sections `[mqtt]` and `[store]`, `access_file` and `control`
            (others) of `[access]`, `admin`, `pop`, `quotas`, `tracing`, `tables`, and `clock`. The default clock runs with the
            machine's; a test can set it ahead.
    """

    def __init__(self, data_dir: Path, options: dict[str, Any]) -> None:
        access_file = options.pop("access_file", "")
        control = options.pop("control", {})
        admin = options.pop("admin", AdminOptions())
        pop = options.pop("pop", PopOptions())
        quotas = options.pop("quotas", QuotaOptions())
        tracing = options.pop("tracing", TracingOptions())
        tables = options.pop("tables", TablesOptions())
        self.clock: AheadClock | ManualClock = options.pop("clock", None) or AheadClock()
        store = {name: options.pop(name) for name in tuple(options) if name in StoreOptions.__slots__}
        self.config = replace(
            Config(),
            data_dir=data_dir,
            mqtt=GatewayOptions(**{"listen": FREE} | PATIENT | options),
            store=replace(StoreOptions(segment_bytes=4 * MIB, sync_in="thread"), **store),
            pop=replace(pop, listen=FREE),
            access=AccessControlOptions(file=access_file, **control),
            admin=replace(admin, listen=FREE),
            quotas=quotas,
            tracing=tracing,
            tables=tables,
        )
        self.clients: list[Client] = []
        self.node = Node(self.config, self.clock)

    async def start(self) -> Self:
        await self.node.start()
        return self

    async def stop(self) -> None:
        for client in self.clients:
            client.reset()
        self.clients.clear()
        await self.node.stop()

    async def restart(self) -> None:
        """Stop the node; start another one on its data directory."""
        await self.stop()
        self.node = Node(self.config, self.clock)
        await self.node.start()

    async def kill(self) -> None:
        """Start another node on the files that this one would leave if it were killed now."""
        left = self.config.data_dir.with_name(f"{self.config.data_dir.name}x")
        copy_left(self.config.data_dir, left)
        await self.stop()
        self.config = replace(self.config, data_dir=left)
        self.node = Node(self.config, self.clock)
        await self.node.start()

    def listener(self, name: str) -> Listener:
        return self.node.gateway.listeners[name]

    async def dial(self, listener: str = "mqtt", context: ssl.SSLContext | None = None) -> Client:
        """Open a socket to a listener, with TLS if there is a context, and send nothing."""
        return await self._dial(Client, listener, context)

    async def dial_5(self, listener: str = "mqtt", context: ssl.SSLContext | None = None) -> Client5:
        """Open a socket as `dial` does, for a client of MQTT 5.0."""
        return await self._dial(Client5, listener, context)

    async def _dial(self, kind: type[C], listener: str, context: ssl.SSLContext | None) -> C:
        options = self.listener(listener).options
        end = socket.socket(socket.AF_UNIX if options.kind == "unix" else socket.AF_INET)
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        address = self.listener(listener).address
        where = options.socket if options.kind == "unix" else (address.host, address.port)
        await asyncio.get_running_loop().sock_connect(end, where)
        name = "localhost" if context is not None else None
        client = kind(*await asyncio.open_connection(sock=end, ssl=context, server_hostname=name))
        self.clients.append(client)
        return client

    async def connect_5(
        self,
        client_id: str,
        *fields: bytes,
        flags: int = CLEAN,
        about: PropertyValues | None = None,
        will: PropertyValues | None = None,
        keep_alive_s: int = 0,
        accepted: bool = True,
        listener: str = "mqtt",
        context: ssl.SSLContext | None = None,
    ) -> Client5:
        """Open a connection of MQTT 5.0.

        `fields` are the fields of the CONNECT that `flags` announce. `about` has its properties, and `will` those of the will.
        """
        client = await self.dial_5(listener, context)
        properties, will_properties = write_properties(about or {}), write_properties(will or {})
        await client.send(
            connect_5(flags, client_id.encode(), *fields, about=properties, will=will_properties, keep_alive_s=keep_alive_s)
        )
        if accepted:
            assert (await client.connack())[0] == 0
        return client

    async def connect(
        self,
        client_id: str,
        *fields: bytes,
        flags: int = CLEAN,
        keep_alive_s: int = 0,
        accepted: bool = True,
        listener: str = "mqtt",
        context: ssl.SSLContext | None = None,
        head: bytes = b"",
    ) -> Client:
        """Open a connection. `fields` are those that `flags` announce; the client sends `head` before the CONNECT."""
        client = await self.dial(listener, context)
        client.writer.write(head)
        await client.send(connect(flags, client_id.encode(), *fields, keep_alive_s=keep_alive_s))
        if accepted:
            assert await client.receive() == (CONNACK, 0, b"\0\0")
        return client

    def connection(self, client_id: str) -> Connection:
        """Return the server's end of a client's connection."""
        return self.node.gateway.clients[client_id]

    def feed(self, client_id: str, data: bytes) -> None:
        """Give a client's connection the bytes of one read, in a turn of its own."""
        self.connection(client_id).data_received(data)
        self.node.gateway.fast_path.flush()

    def away(self) -> list[str]:
        """Return the ids, in order, of clients whose sessions are stored and which are not connected."""
        self.node.store.commit()
        index = self.node.store.index
        return [one.client_id for one in all_sessions(index) if one.client_id not in self.node.gateway.clients]

    def fire_delayed(self) -> None:
        """Let the node send the delayed messages that are due by its clock."""
        while self.node.delayed.fire_due():
            pass
        self.node.store.commit()

    async def decided(self) -> None:
        """Wait until the plugins have answered all questions, and the node has sent the deliveries that waited for the answers.

        A PINGRESP does not show this: deliveries wait for the plugins, but pings do not.
        """
        gateway = self.node.gateway
        questions = gateway.authorizer.questions
        await until(lambda: not questions.waiting and not any(one.outbox.lagging for one in gateway.connections))

    def limit_send_buffer(self, client_id: str) -> None:
        """Let the kernel buffer little of what the node sends to a client that does not read."""
        transport = self.connection(client_id)._transport
        assert transport is not None
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, RECEIVE_BUFFER_BYTES)

    def unsent_bytes(self, client_id: str) -> int:
        """Return how many bytes for a client the node still has to hand to the kernel."""
        transport = self.connection(client_id)._transport
        return transport.get_write_buffer_size() if transport is not None else 0

    def closed(self, reason: ReasonCode) -> int:
        """Return how many connections the node has closed for a reason."""
        return self.node.gateway.counters.closed_by_reason.get(reason, 0)

    def stored(self) -> list[Message]:
        """Return the messages in the log."""
        self.node.store.commit()
        return [
            Message(record.topic.decode(), record.body, record.flags & 3, bool(record.flags & 4))
            for record in self.node.store.log.scan(0)
            if record.kind == Kind.MESSAGE
        ]

    def held_resources(self) -> dict[str, int]:
        """Count what the gateway and the store hold for connections: all counts are 0 when no client is connected."""
        gateway, queues = self.node.gateway, self.node.store.queues
        self.node.store.commit()
        return {
            "connections": len(gateway.connections),
            "clients": len(gateway.clients),
            "sessions": len(gateway.lifecycle.sessions),
            "sessions in memory": len(gateway.lifecycle.sessions._loaded),
            "subscriptions": gateway.counters.subscriptions,
            "fanouts": len(gateway.fanouts),
            "watched": len(gateway.keep_alives),
            "watchers": sum(len(queue.watchers) for queue in queues),
            "queues": sum(queue.owners != {ROOT} for queue in queues),
        }


class HeldSync:
    """Lets no fdatasync of the log begin until the test calls `release` or the block ends."""

    def __init__(self, broker: Broker) -> None:
        self._log = broker.node.store.log
        self._sync = self._log.sync
        self._begun = threading.Event()
        self._allowed = threading.Event()

    def __enter__(self) -> Self:
        def sync() -> None:
            self._begun.set()
            assert self._allowed.wait(ANSWER_S_MAX), "the test did not release the sync in time"
            self._sync()

        self._log.sync = sync  # type: ignore[method-assign]
        return self

    async def begun(self) -> None:
        """Return when a sync is under way. It does not cover what is written from now on."""
        await until(self._begun.is_set)

    def release(self) -> None:
        self._allowed.set()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()
