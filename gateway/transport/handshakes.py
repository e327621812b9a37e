"""Handshakes: bring an accepted socket through PROXY header and TLS to the point where MQTT begins."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable

from penstock.gateway.options import ListenerOptions
from penstock.gateway.transport.admission import Admission, HandshakeCount
from penstock.gateway.transport.peer import Peer
from penstock.gateway.transport.proxy import ProxyHeaderInvalid, client_of, read_header
from penstock.gateway.transport.sockets import Sockets
from penstock.gateway.transport.tls import Tls


class Handshakes:
    """The handshakes of one listener.

    Parameters:
        options: the options of the listener.
        limit_ms: how long PROXY header and TLS handshake may take each, in ms.
        count: the handshakes of all listeners.
        admission: counts the connections and refusals of the listener.
        connect: returns the protocol of a peer with which MQTT begins.
        strike: called for a peer that broke TLS.
    """

    def __init__(
        self,
        options: ListenerOptions,
        limit_ms: int,
        count: HandshakeCount,
        admission: Admission,
        connect: Callable[[Peer], asyncio.Protocol],
        strike: Callable[[Peer], None],
    ) -> None:
        self._options = options
        self._limit_s = limit_ms / 1000
        self._count = count
        self._admission = admission
        self._connect = connect
        self._strike = strike
        self._loop: asyncio.AbstractEventLoop
        self._sockets: Sockets | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, loop: asyncio.AbstractEventLoop, sockets: Sockets | None) -> None:
        """Use this loop. Without `sockets` the loop's own transports serve."""
        self._loop = loop
        self._sockets = sockets

    def begin(self, end: socket.socket, peer: Peer, context: ssl.SSLContext | None) -> None:
        """Begin with an admitted socket. `context` is the TLS context of this moment, or None without TLS."""
        has_handshake = context is not None or bool(self._options.proxy_from)
        if self._sockets is not None and not has_handshake:
            self._add(self._sockets, end, peer)
            return
        self._count.open += has_handshake
        task = self._loop.create_task(self._run(end, peer, context))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def end_all(self) -> None:
        """Close every socket that is still in its handshake."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _add(self, sockets: Sockets, end: socket.socket, peer: Peer, tls: Tls | None = None) -> None:
        """Let MQTT begin on a socket. The client may have closed it already."""
        try:
            sockets.add(end, self._connect(peer), tls)
        except OSError as error:
            end.close()
            self._admission.closed(peer)
            self._admission.note_refusal(peer.host, "handshake_lost", str(error))

    async def _run(self, end: socket.socket, peer: Peer, context: ssl.SSLContext | None) -> None:
        loop, sockets, is_proxied = self._loop, self._sockets, bool(self._options.proxy_from)
        why, error_text, has_alert = "", "", False
        try:
            if is_proxied:
                async with asyncio.timeout(self._limit_s):
                    header = await read_header(loop, end, self._count.turns)
                why = self._admission.admit_client(peer, client_of(header))
            if not why and sockets is not None:
                tls = Tls(context) if context is not None else None
                if tls is not None:
                    async with asyncio.timeout(self._limit_s):
                        await tls.shake_hands(loop, end, self._count.turns)
                self._add(sockets, end, peer, tls)
            elif not why:
                await loop.connect_accepted_socket(
                    lambda: self._connect(peer), end, ssl=context, ssl_handshake_timeout=self._limit_s if context else None
                )
        except asyncio.CancelledError:
            end.close()
            raise
        except ProxyHeaderInvalid as error:
            why, error_text = "proxy_header", str(error)
        except TimeoutError:
            why = "handshake_timeout"
        except (ssl.SSLError, OSError) as error:  # The client broke TLS or has gone.
            has_alert = isinstance(error, ssl.SSLError)
            why, error_text = "tls" if has_alert else "handshake_lost", str(getattr(error, "reason", "") or error)
            if isinstance(error, ssl.SSLCertVerificationError):
                error_text = f"{error_text}: {error.verify_message}"
            if has_alert:
                self._strike(peer)
        finally:
            self._count.open -= context is not None or is_proxied
            if why:
                if has_alert and sockets is not None:
                    sockets.linger(end)
                else:
                    end.close()
                self._admission.closed(peer)
                self._admission.note_refusal(peer.host, why, error_text)
