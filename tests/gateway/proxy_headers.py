"""Headers of the PROXY protocol, valid and invalid."""

from __future__ import annotations

import socket

from penstock.gateway.transport.proxy import UNKNOWN, V2, V2_BYTES_MAX
from penstock.store.options import HostPort
from tests.gateway.packet_cases import connect
from tests.gateway.wire import CLEAN

FREE = HostPort("127.0.0.1", 0)
LOOPBACK = ("127.0.0.0/8",)


def v2(command: int, family: int, body: bytes) -> bytes:
    return V2 + bytes((command, family)) + len(body).to_bytes(2, "big") + body


def ipv4(source: str, port: int) -> bytes:
    return socket.inet_aton(source) + socket.inet_aton("192.0.2.1") + port.to_bytes(2, "big") + (1883).to_bytes(2, "big")


def ipv6(source: str, port: int) -> bytes:
    addresses = socket.inet_pton(socket.AF_INET6, source) + socket.inet_pton(socket.AF_INET6, "2001:db8::1")
    return addresses + port.to_bytes(2, "big") + (1883).to_bytes(2, "big")


TLV = b"\x04\0\3abc"
VALID = {
    "v1 IPv4": (b"PROXY TCP4 203.0.113.7 192.0.2.1 56324 1883\r\n", ("203.0.113.7", 56324)),
    "v1 IPv6": (b"PROXY TCP6 2001:db8::7 2001:db8::1 1 65535\r\n", ("2001:db8::7", 1)),
    "v1 unknown": (b"PROXY UNKNOWN\r\n", UNKNOWN),
    "v1 unknown, with addresses": (b"PROXY UNKNOWN ffff::1 ffff::2 1 2\r\n", UNKNOWN),
    "v2 IPv4": (v2(0x21, 0x11, ipv4("203.0.113.7", 56324)), ("203.0.113.7", 56324)),
    "v2 IPv6": (v2(0x21, 0x21, ipv6("2001:db8::7", 9)), ("2001:db8::7", 9)),
    "v1 IPv4 inside IPv6": (b"PROXY TCP6 ::ffff:203.0.113.7 ::1 5 1883\r\n", ("203.0.113.7", 5)),
    "v2 IPv4 inside IPv6": (v2(0x21, 0x21, ipv6("::ffff:203.0.113.7", 5)), ("203.0.113.7", 5)),
    "v2 with more behind the addresses": (v2(0x21, 0x11, ipv4("203.0.113.7", 1) + TLV * 40), ("203.0.113.7", 1)),
    "v2 local": (v2(0x20, 0x00, b""), None),
    "v2 local, with addresses": (v2(0x20, 0x11, ipv4("203.0.113.7", 1)), None),
    "v2 unspecified": (v2(0x21, 0x00, b"anything"), UNKNOWN),
    "v2 Unix": (v2(0x21, 0x31, bytes(216)), UNKNOWN),
}


INVALID = {
    "MQTT": connect(CLEAN, b"direct"),
    "TLS": b"\x16\x03\x01\x02\0\x01",
    "v1 without a family": b"PROXY\r\n",
    "v1 with an unknown family": b"PROXY UDP4 203.0.113.7 192.0.2.1 1 2\r\n",
    "v1 with a name for an address": b"PROXY TCP4 localhost 192.0.2.1 1 2\r\n",
    "v1 with the other family's address": b"PROXY TCP4 2001:db8::7 2001:db8::1 1 2\r\n",
    "v1 with a port too large": b"PROXY TCP4 203.0.113.7 192.0.2.1 65536 2\r\n",
    "v1 with a negative port": b"PROXY TCP4 203.0.113.7 192.0.2.1 -1 2\r\n",
    "v1 without CR": b"PROXY TCP4 203.0.113.7 192.0.2.1 1 2\n",
    "v1 with a word too many": b"PROXY TCP4 203.0.113.7 192.0.2.1 1 2 3\r\n",
    "v1 without an end": b"PROXY TCP6 " + b"f" * 100,
    "v1 that is not ASCII": b"PROXY TCP4 203.0.113.\xff 192.0.2.1 1 2\r\n",
    "v2 with another version": v2(0x11, 0x11, ipv4("203.0.113.7", 1)),
    "v2 with an unknown command": v2(0x22, 0x11, ipv4("203.0.113.7", 1)),
    "v2 too short for IPv4": v2(0x21, 0x11, bytes(11)),
    "v2 too short for IPv6": v2(0x21, 0x21, bytes(35)),
    "v2 too long": v2(0x21, 0x11, bytes(V2_BYTES_MAX)),
}
