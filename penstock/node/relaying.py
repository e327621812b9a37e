"""A follower's listeners for clients: it relays the connections that they take to the leader.

So a client may connect to any node of a cluster. The bytes pass as they are, those of TLS too, over a connection of its own to
the leader's listener for replicas. That is authenticated, so the leader believes the address of the client that it is told.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Final

import structlog

from penstock.cluster.errors import RelayRefused
from penstock.cluster.frames import POP_LISTENER, Frame, FrameKind, RelayPayload
from penstock.cluster.framestream import FrameStream
from penstock.cluster.member import Leader, Member
from penstock.cluster.splice import End, splice
from penstock.gateway.logbook import Logbook
from penstock.gateway.options import GatewayOptions, ListenerOptions
from penstock.gateway.transport.admission import Admission, HandshakeCount
from penstock.gateway.transport.descriptors import SocketShare
from penstock.gateway.transport.listener import Listener
from penstock.gateway.transport.peer import Peer
from penstock.gateway.transport.sources import Sources
from penstock.pop.options import PopOptions
from penstock.store.options import KIB, HostPort

logger = structlog.get_logger("node")

FIRST_BYTES_S: Final = 10.0
"""Time within which a client must send its first bytes. Every protocol that is served here lets the client begin."""
FIRST_BYTES_MAX: Final = 64 * KIB
HOLD_S: Final = 5.0
"""How long a client waits until a leader serves it. Then its connection is closed."""
DIAL_S: Final = 1.0
"""After this time a connection to the leader that is not made is given up."""
RETRY_S: Final = 0.02
DIALS_MAX: Final = 8
"""Connections to the leader that are made at a time. The others wait, as the leader takes few whose ends it does not know."""
LOOK_S: Final = 0.2
"""Interval at which the connections to a former leader are ended. It may be paused, and then does not end them itself."""

TLS_HANDSHAKE: Final = 0x16
"""First byte of a TLS handshake (RFC 8446, 5.1)."""


class _Dialling:
    """Takes the leader's answer to RELAY."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        """The first bytes for the client, when the leader serves it."""
        self.end = End()

    def received(self, stream: FrameStream, frame: Frame) -> None:
        if self.answer.done():
            return
        if frame.kind is FrameKind.RELAYED:
            self.answer.set_result(stream.hand_over(self.end))
        else:
            why = frame.payload.decode(errors="replace") if frame.kind is FrameKind.REFUSED else f"it sent {frame.kind.name}"
            self.answer.set_exception(RelayRefused(why))

    def ended(self, _stream: FrameStream) -> None:
        if not self.answer.done():
            self.answer.set_exception(RelayRefused("the connection has ended"))


class Relaying:
    """The listeners for clients of a node that follows.

    Parameters:
        cluster: name of the cluster.
        member: knows the leader.
        mqtt, pop: the options of the listeners.
        tls: the TLS context for connections to other replicas; None for plain text.
        sources, logbook, share: see `Listener` and `Admission`.
        now_ms: returns the monotonic time in ms.
    """

    def __init__(
        self,
        cluster: str,
        member: Member,
        mqtt: GatewayOptions,
        pop: PopOptions,
        tls: ssl.SSLContext | None,
        sources: Sources,
        logbook: Logbook,
        share: SocketShare | None,
        now_ms: Callable[[], int],
    ) -> None:
        self._cluster = cluster
        self._member = member
        self._tls = tls
        self._now_ms = now_ms
        self._dials = asyncio.Semaphore(DIALS_MAX)
        self._tasks: set[asyncio.Task[None]] = set()
        self._relayed: dict[End, Leader] = {}
        self._looking: asyncio.TimerHandle | None = None
        self._said = ""
        """Why the leader refused a client, as far as the log has it."""
        handshakes = HandshakeCount(mqtt.handshakes_max)
        options = {each.name: each for each in mqtt.all_listeners}
        options[POP_LISTENER] = ListenerOptions(
            name=POP_LISTENER, listen=pop.listen, connections_max=pop.connections_max, connections_per_s=0
        )
        self._listeners: dict[str, Listener] = {}
        for name, each in options.items():
            admission = Admission(each, handshakes, sources, logbook, now_ms)
            self._listeners[name] = Listener(each, mqtt.listen_backlog, admission, self, logbook, share)

    @property
    def relayed(self) -> int:
        """How many connections are relayed."""
        return len(self._relayed)

    def address(self, name: str) -> HostPort:
        """Return the address in use of a listener, once it has started."""
        return self._listeners[name].address

    @property
    def mqtt_listeners(self) -> list[Listener]:
        """The MQTT listeners."""
        return [listener for name, listener in self._listeners.items() if name != POP_LISTENER]

    async def start(self) -> None:
        """Open the listeners. Raises OSError: one can't be opened, and none is."""
        loop = asyncio.get_running_loop()
        try:
            for listener in self._listeners.values():
                await listener.start(loop)
        except BaseException:
            self._close()
            raise
        self._look()

    async def stop(self) -> None:
        """Close the listeners, and end all connections."""
        self._close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        for end in list(self._relayed):
            end.abort()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        for listener in self._listeners.values():
            listener.close()

    def _look(self) -> None:
        """End the connections to a leader that leads no more."""
        self._looking = asyncio.get_running_loop().call_later(LOOK_S, self._look)
        leader = self._member.leader()
        if leader is not None:
            for end, served_by in list(self._relayed.items()):
                if served_by.epoch != leader.epoch:
                    end.abort()

    # --- connections ------------------------------------------------------------------------------------------------

    def begin(self, end: socket.socket, peer: Peer, _context: ssl.SSLContext | None) -> None:
        """Relay a connection that a listener has taken. TLS is between the client and the leader."""
        task = asyncio.get_running_loop().create_task(self._relay(end, peer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _relay(self, socket_: socket.socket, peer: Peer) -> None:
        loop = asyncio.get_running_loop()
        client: End | None = None

        def lost() -> None:
            peer.listener.closed(peer)
            if client is not None:
                self._relayed.pop(client, None)

        try:
            async with asyncio.timeout(FIRST_BYTES_S):
                first = b"" if peer.is_over_rate else await loop.sock_recv(socket_, FIRST_BYTES_MAX)
            if not first:
                return
            leading, leader, answer = await self._dial_leader(peer, begins_tls=first[0] == TLS_HANDSHAKE)
            try:
                _, client = await loop.connect_accepted_socket(lambda: End(lost), socket_)
            except BaseException:
                leading.abort()
                raise
            self._relayed[client] = leader
            leading.write(first)
            client.write(answer)
            splice(client, leading)
        except TimeoutError:
            logger.debug("relay.timeout", listener=peer.listener.name, client=str(peer))
        except OSError as error:
            logger.debug("relay.client_gone", listener=peer.listener.name, client=str(peer), error=repr(error))
        finally:
            if client is None:
                socket_.close()
                peer.listener.closed(peer)

    async def _dial_leader(self, peer: Peer, *, begins_tls: bool) -> tuple[End, Leader, bytes]:
        """Return a connection to the leader on which it serves a client, and the first bytes for the client.

        Raises:
            TimeoutError: no leader has served it within `HOLD_S`.
        """
        async with asyncio.timeout(HOLD_S):
            while True:
                leader = self._member.leader()
                if leader is not None:
                    async with self._dials:
                        try:
                            async with asyncio.timeout(DIAL_S):
                                return await self._dial(leader, peer, begins_tls=begins_tls)
                        except RelayRefused as error:
                            self._tell(leader, str(error))
                        except (OSError, TimeoutError) as error:
                            logger.debug("relay.not_connected", leader=str(leader.address), error=repr(error))
                await asyncio.sleep(RETRY_S)

    def _tell(self, leader: Leader, why: str) -> None:
        if why != self._said:
            self._said = why
            logger.warning("relay.refused", leader=str(leader.address), why=why)

    async def _dial(self, leader: Leader, peer: Peer, *, begins_tls: bool) -> tuple[End, Leader, bytes]:
        dialling = _Dialling()
        stream = FrameStream(dialling, 0, self._now_ms)
        address = leader.address
        await asyncio.get_running_loop().create_connection(lambda: stream, address.host, address.port, ssl=self._tls)
        try:
            payload = RelayPayload(self._cluster, leader.replica, peer.listener.name, peer.host, peer.port, begins_tls)
            stream.send(FrameKind.RELAY, leader.epoch, 0, payload=payload.encoded())
            return dialling.end, leader, await dialling.answer
        except BaseException:
            stream.abort()
            raise
