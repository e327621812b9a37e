"""The PROXY protocol: who the client is, and who may say so."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.options import ListenerOptions
from penstock.gateway.transport.proxy import V2, V2_BYTES_MAX, ProxyHeaderInvalid, client_of, header_bytes, read_header
from penstock.store.options import HostPort
from tests.gateway.certificates import Authority
from tests.gateway.conftest import StartBroker
from tests.gateway.packet_cases import connect
from tests.gateway.wire import CLEAN, until

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
    "v1 unknown": (b"PROXY UNKNOWN\r\n", None),
    "v1 unknown, with addresses": (b"PROXY UNKNOWN ffff::1 ffff::2 1 2\r\n", None),
    "v2 IPv4": (v2(0x21, 0x11, ipv4("203.0.113.7", 56324)), ("203.0.113.7", 56324)),
    "v2 IPv6": (v2(0x21, 0x21, ipv6("2001:db8::7", 9)), ("2001:db8::7", 9)),
    "v2 with more behind the addresses": (v2(0x21, 0x11, ipv4("203.0.113.7", 1) + TLV * 40), ("203.0.113.7", 1)),
    "v2 local": (v2(0x20, 0x00, b""), None),
    "v2 local, with addresses": (v2(0x20, 0x11, ipv4("203.0.113.7", 1)), None),
    "v2 unspecified": (v2(0x21, 0x00, b"anything"), None),
    "v2 Unix": (v2(0x21, 0x31, bytes(216)), None),
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


@pytest.mark.parametrize("name", VALID)
def test_a_header_is_measured_and_read(name: str) -> None:
    header, client = VALID[name]
    assert [header_bytes(header[:length]) or len(header) for length in range(1, len(header) + 1)] == [len(header)] * len(header)
    assert header_bytes(header + b"MQTT follows\r\n") == len(header)
    assert client_of(header) == client


@pytest.mark.parametrize("name", INVALID)
def test_what_is_no_header_is_refused(name: str) -> None:
    data = INVALID[name]

    def read() -> None:
        size = header_bytes(data)
        assert size, "it waits for more"
        client_of(data[:size])

    with pytest.raises(ProxyHeaderInvalid):
        read()


@given(st.sampled_from([b"", b"PROXY ", b"PROXY TCP4 ", V2, V2 + b"\x21\x11"]), st.binary(max_size=120))
def test_any_bytes_are_a_header_or_refused_or_too_few(head: bytes, rest: bytes) -> None:
    data = head + rest
    try:
        size = header_bytes(data)
        if 0 < size <= len(data):
            client_of(data[:size])
    except ProxyHeaderInvalid:
        pass


@pytest.mark.parametrize("name", VALID)
@pytest.mark.parametrize("piece_bytes", [1, 7, 1000])
async def test_exactly_the_header_is_taken_from_the_socket(name: str, piece_bytes: int) -> None:
    header, _ = VALID[name]
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        reading = asyncio.create_task(read_header(asyncio.get_running_loop(), near))
        data = header + b"what follows"
        for at in range(0, len(data), piece_bytes):
            far.send(data[at : at + piece_bytes])
            for _ in range(3):
                await asyncio.sleep(0)
        assert await reading == header
        assert near.recv(100) == b"what follows"


# --- listeners behind a proxy -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VALID)
async def test_the_client_is_whom_the_proxy_names(start_broker: StartBroker, name: str) -> None:
    header, client = VALID[name]
    broker = await start_broker(listeners=(ListenerOptions(name="proxied", listen=FREE, proxy_from=LOOPBACK),))
    await broker.connect("c", listener="proxied", head=header)
    peer = broker.connection("c").peer
    assert (peer.host, peer.port) == client if client is not None else peer.host == "127.0.0.1"


async def test_tls_begins_behind_the_header(start_broker: StartBroker, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    broker = await start_broker(listeners=(authority.listener("tls", proxy_from=LOOPBACK),))
    end = socket.create_connection(("127.0.0.1", broker.listener("tls").address.port))
    with authority.context().wrap_socket(end, server_hostname="localhost", do_handshake_on_connect=False) as secure:

        def talk() -> bytes:
            socket.socket.send(secure, VALID["v2 IPv4"][0])
            secure.do_handshake()
            secure.send(connect(CLEAN, b"c"))
            return secure.recv(100)

        assert await asyncio.to_thread(talk) == b"\x20\2\0\0"
        assert str(broker.connection("c").peer) == "203.0.113.7:56324"


@pytest.mark.parametrize("name", INVALID)
async def test_a_connection_without_a_header_is_closed(start_broker: StartBroker, name: str) -> None:
    broker = await start_broker(listeners=(ListenerOptions(name="proxied", listen=FREE, proxy_from=LOOPBACK),))
    client = await broker.dial("proxied")
    await client.send(INVALID[name])
    assert await client.ended() == []
    assert broker.listener("proxied").refused == {"proxy_header": 1}
    assert broker.listener("proxied").open == 0


async def test_a_header_that_does_not_come_is_not_waited_for(start_broker: StartBroker) -> None:
    listener = ListenerOptions(name="proxied", listen=FREE, proxy_from=LOOPBACK)
    broker = await start_broker(listeners=(listener,), tls_handshake_ms=100)
    client = await broker.dial("proxied")
    await client.send(b"PROXY TCP4 203.0.113.7 ")
    assert await client.ended() == []
    assert broker.listener("proxied").refused == {"handshake_timeout": 1}


async def test_only_proxies_that_are_trusted_may_name_a_client(start_broker: StartBroker) -> None:
    broker = await start_broker(listeners=(ListenerOptions(name="proxied", listen=FREE, proxy_from=("10.0.0.0/8", "::1")),))
    client = await broker.dial("proxied")
    assert await client.ended() == []
    assert broker.listener("proxied").refused == {"untrusted_proxy": 1}


async def test_a_header_is_no_packet_where_no_proxy_stands(start_broker: StartBroker) -> None:
    broker = await start_broker(connect_timeout_ms=200)  # its bytes announce a packet that never comes
    client = await broker.connect("c", head=VALID["v1 IPv4"][0], accepted=False)
    assert await client.ended() == []
    await until(lambda: not broker.node.gateway.connections)
    assert broker.node.gateway.counters.connections_accepted == 0
