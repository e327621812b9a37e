"""A server that does the least that an event loop in Python can: it answers each PUBLISH at QoS 1, and stores nothing.

    python -m bench mqtt --only window,hundred,hundred-single,many-single --beside mosquitto,floor

It is not a broker. No broker with an event loop in Python can exceed its rate on the same machine. If its rate is close to that
of mosquitto, the time of a message is spent in the kernel. It serves rows without subscribers, and packets of up to 16 KiB.
"""

from __future__ import annotations

import select
import socket
import sys

READ_BYTES = 256 * 1024
CONNACK = b"\x20\x02\x00\x00"
PUBLISH = 0x30


def serve(port: int) -> None:
    """Answer on a port of this machine until the process is stopped."""
    listening = socket.create_server(("127.0.0.1", port), backlog=4096)
    epoll = select.epoll()
    epoll.register(listening.fileno(), select.EPOLLIN)
    clients: dict[int, tuple[socket.socket, list[bytes]]] = {}
    while True:
        for number, _ in epoll.poll():
            if number == listening.fileno():
                end, _ = listening.accept()
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                epoll.register(end.fileno(), select.EPOLLIN)
                clients[end.fileno()] = end, []
                continue
            end, rest = clients[number]
            try:
                data = end.recv(READ_BYTES)
            except ConnectionResetError:
                data = b""
            if not data:
                epoll.unregister(number)
                end.close()
                del clients[number]
                continue
            if rest:
                data = rest.pop() + data
            answers, used = answers_to(data)
            if used < len(data):
                rest.append(data[used:])
            if answers:
                end.sendall(answers)


def answers_to(data: bytes) -> tuple[bytes, int]:
    """Return the answers to the whole packets at the beginning of `data`, and the size of these packets in bytes."""
    answers: list[bytes] = []
    at, end = 0, len(data)
    while at + 5 <= end:
        length, start = data[at + 1], at + 2
        if length > 127:
            length = length & 127 | data[start] << 7
            start += 1
        if start + length > end:
            break
        if data[at] & 0xF0 == PUBLISH:
            packet_id = start + 2 + (data[start] << 8 | data[start + 1])
            answers.append(b"\x40\x02" + data[packet_id : packet_id + 2])
        elif data[at] == 0x10:
            answers.append(CONNACK)
        at = start + length
    return b"".join(answers), at


if __name__ == "__main__":
    serve(int(sys.argv[1]))
