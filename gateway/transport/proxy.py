"""The PROXY protocol, versions 1 and 2: the header in which a proxy states the address of its client.

`header_bytes` and `client_of` do no input or output. `read_header` takes exactly the header from a socket and leaves the bytes
after it, so that TLS, WebSocket or MQTT begin on that socket as on any other.

Source: haproxy.org/download/3.0/doc/proxy-protocol.txt, sections 2.1 and 2.2.
"""

from __future__ import annotations

import asyncio
import socket
from ipaddress import IPv4Address, IPv6Address, ip_address
from struct import Struct
from typing import Final

from penstock.gateway.transport.turns import Turns
from penstock.store.space.causer import plain_address
from penstock.store.topics import excerpt

V1: Final = b"PROXY "
V1_BYTES_MAX: Final = 107
"""The size of the longest header of version 1, with its CR LF (2.1)."""

V2: Final = b"\r\n\r\n\0\r\nQUIT\n"
V2_BYTES_MAX: Final = 4096
"""The size of the longest header of version 2 accepted. The format allows 65,551 bytes; real proxies need a few hundred."""

_V2_HEAD: Final = Struct(">12sBBH")
_LOCAL, _PROXIED = 0x20, 0x21
_TCP4, _TCP6 = 0x11, 0x21
_PORTS = Struct(">HH")


class ProxyHeaderInvalid(ConnectionError):
    """Raised when a connection does not begin with a valid header of the PROXY protocol."""


def header_bytes(data: bytes) -> int:
    """Return the size of the header at the beginning of `data`; 0 if too few bytes have come to tell.

    Raises:
        ProxyHeaderInvalid: `data` begins with no header, or the header is too long.
    """
    if data[:1] == V1[:1]:
        end = data.find(b"\n", 0, V1_BYTES_MAX)
        if not data.startswith(V1[: len(data)]) or (end < 0 and len(data) >= V1_BYTES_MAX):
            raise ProxyHeaderInvalid(f"The connection begins with {excerpt(data, 16)} instead of a PROXY header.")
        return end + 1
    if not data.startswith(V2[: len(data)]):
        raise ProxyHeaderInvalid(f"The connection begins with {excerpt(data, 16)} instead of a PROXY header.")
    if len(data) < _V2_HEAD.size:
        return 0
    size = int(_V2_HEAD.size + _V2_HEAD.unpack_from(data)[3])
    if size > V2_BYTES_MAX:
        raise ProxyHeaderInvalid(f"A PROXY header announces {size} bytes. Send {V2_BYTES_MAX} at most.")
    return size


UNKNOWN: Final = ("", 0)
"""The client of a header that a proxy sends for somebody whose address it does not state."""


def client_of(header: bytes) -> tuple[str, int] | None:
    """Return the address and port of the client that a complete header states; `UNKNOWN` if it states none.

    The result is None if the proxy speaks for itself, for example to see whether the listener answers.

    Raises:
        ProxyHeaderInvalid: the header is not valid.
    """
    return _client_v1(header) if header.startswith(V1) else _client_v2(header)


def _client_v1(header: bytes) -> tuple[str, int] | None:
    words = header.removesuffix(b"\r\n").split(b" ")
    if header.endswith(b"\r\n") and words[1:2] == [b"UNKNOWN"]:
        return UNKNOWN
    try:
        _, family, source, _, port, _ = (word.decode("ascii") for word in words)
        address = {"TCP4": IPv4Address, "TCP6": IPv6Address}[family](source)
        if not (header.endswith(b"\r\n") and port.isdigit() and int(port) < 65_536):
            raise ValueError(port)
    except (ValueError, KeyError) as error:
        raise ProxyHeaderInvalid(f"A PROXY header of version 1 can't be parsed: {excerpt(header, V1_BYTES_MAX)}.") from error
    return plain_address(str(address)), int(port)


def _client_v2(header: bytes) -> tuple[str, int] | None:
    _, command, family, size = _V2_HEAD.unpack_from(header)
    if command == _LOCAL:
        return None
    if command != _PROXIED:
        raise ProxyHeaderInvalid(f"A PROXY header of version 2 has the version and command {command:#04x}. Use 0x20 or 0x21.")
    address_bytes = {_TCP4: 4, _TCP6: 16}.get(family)
    if address_bytes is None:
        return UNKNOWN  # A Unix socket, a datagram, or unknown: "the receiver should ignore address information" (2.2).
    if size < 2 * address_bytes + _PORTS.size:
        raise ProxyHeaderInvalid(f"A PROXY header of version 2 has {size} bytes of addresses, too few for its family.")
    start = _V2_HEAD.size
    address = ip_address(header[start : start + address_bytes])
    return plain_address(str(address)), int(_PORTS.unpack_from(header, start + 2 * address_bytes)[0])


async def read_header(loop: asyncio.AbstractEventLoop, end: socket.socket, turns: Turns) -> bytes:
    """Return the header from a non-blocking socket, and leave the bytes after it in the socket.

    The function peeks before it takes. While the header is incomplete, all bytes in the socket belong to it, so they are taken
    at once. Then only new bytes wake the loop.

    Raises:
        ProxyHeaderInvalid: the client sent something else, or closed the connection.
    """
    header = b""
    while True:
        await _readable(loop, end)
        await turns.wait()
        try:
            ahead = end.recv(V2_BYTES_MAX, socket.MSG_PEEK)
        except BlockingIOError:
            continue
        if not ahead:
            raise ProxyHeaderInvalid("The connection ended before its PROXY header.")
        size = header_bytes(header + ahead)
        header += end.recv(min(size - len(header), len(ahead)) if size else len(ahead))
        if size and len(header) == size:
            return header


async def _readable(loop: asyncio.AbstractEventLoop, end: socket.socket) -> None:
    ready: asyncio.Future[None] = loop.create_future()

    def tell() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(end, tell)
    try:
        await ready
    finally:
        loop.remove_reader(end)
