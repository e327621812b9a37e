"""A caller over gRPC that reads nothing: frames of HTTP/2, by hand."""

from __future__ import annotations

import asyncio
import ssl
import struct
from typing import Final

from penstock.pop.proto import pop_pb2 as pb

_HEADERS, _DATA, _SETTINGS, _END_HEADERS, _END_STREAM = 1, 0, 4, 4, 1
_INITIAL_WINDOW_SIZE: Final = 4

Metadata = tuple[tuple[str, str], ...]


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return a frame of HTTP/2 (RFC 9113, 4.1)."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def field(name: bytes, value: bytes) -> bytes:
    """Return a field as a literal without indexing (RFC 7541, 6.2.2)."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


class Unreading:
    """A connection of HTTP/2 whose window lets no byte of a response through.

    Parameters:
        metadata: of each call.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, metadata: Metadata = ()) -> None:
        self.reader = reader
        self.writer = writer
        self._metadata = metadata
        self._stream = 1
        settings = frame(_SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW_SIZE, 0))
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings)

    @classmethod
    async def to(cls, port: int, context: ssl.SSLContext | None = None, metadata: Metadata = ()) -> Unreading:
        """Connect to a port of this machine, with TLS if there is a context."""
        if context is not None:
            context.set_alpn_protocols(["h2"])
        host = "127.0.0.1" if context is None else "localhost"
        return cls(*await asyncio.open_connection(host, port, ssl=context), metadata)

    def pop(self, group: str, topic_filter: str, messages_max: int = 3, wait_ms: int = 0) -> None:
        """Pop messages, and do not read them."""
        request = pb.PopRequest(group=group, filter=topic_filter, messages_max=messages_max, wait_ms=wait_ms)
        self._call("/penstock.pop.v1.PopService/Pop", request.SerializeToString(), _END_STREAM)

    def consume(self, group: str, topic_filter: str, credits: int = 1_000) -> None:
        """Open a stream of messages, and do not read them."""
        opened = pb.ConsumeRequest(open=pb.ConsumeOpen(group=group, filter=topic_filter, credits=credits))
        self._call("/penstock.pop.v1.PopService/Consume", opened.SerializeToString(), 0)

    def _call(self, path: str, request: bytes, flags: int) -> None:
        fields = (
            (b":path", path.encode()),
            (b":authority", b"localhost"),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            *((name.encode(), value.encode()) for name, value in self._metadata),
        )
        # :method POST and :scheme http or https are fields 3, 6 and 7 of the static table.
        is_secure = self.writer.get_extra_info("ssl_object") is not None
        block = (b"\x83\x87" if is_secure else b"\x83\x86") + b"".join(field(*each) for each in fields)
        body = b"\0" + struct.pack(">I", len(request)) + request
        self.writer.write(frame(_HEADERS, _END_HEADERS, self._stream, block) + frame(_DATA, flags, self._stream, body))
        self._stream += 2

    async def ended(self) -> None:
        """Return when the node has closed the connection."""
        try:
            while await self.reader.read(65_536):
                pass
        except ConnectionError:
            pass

    def close(self) -> None:
        """Close the connection."""
        self.writer.close()
