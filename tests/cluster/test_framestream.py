"""A connection that is handed to another protocol."""

from __future__ import annotations

import asyncio
import socket

from penstock.cluster.frames import Frame, FrameKind, encode_frame
from penstock.cluster.framestream import FrameStream
from tests.waiting import until


class Taking(asyncio.Protocol):
    """Keeps the bytes that come."""

    def __init__(self) -> None:
        self.got = b""

    def data_received(self, data: bytes) -> None:
        self.got += data


class HandingOver:
    """Hands the connection over with its first frame."""

    def __init__(self, taking: Taking) -> None:
        self.taking = taking
        self.ends = 0

    def received(self, stream: FrameStream, frame: Frame) -> None:
        assert frame.kind is FrameKind.RELAYED
        self.taking.got += stream.hand_over(self.taking)

    def ended(self, _stream: FrameStream) -> None:
        self.ends += 1


async def test_bytes_after_the_frame_that_hands_it_over_are_no_frames() -> None:
    """A server of HTTP/2 speaks first: its bytes come in the same piece as the frame."""
    other, end = socket.socketpair()
    preface = b"\x00\x00\x1e\x04" * 20
    with other:
        taking = Taking()
        receiver = HandingOver(taking)
        stream = FrameStream(receiver, 1, lambda: 0)
        await asyncio.get_running_loop().create_connection(lambda: stream, sock=end)
        other.sendall(encode_frame(FrameKind.RELAYED, 1, 0, 0, 0, b"") + preface)
        await until(lambda: taking.got == preface)
        other.sendall(b"and more")
        await until(lambda: taking.got == preface + b"and more")
        assert (stream.has_ended, receiver.ends) == (True, 0)
        stream.abort()
