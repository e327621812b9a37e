"""The PROXY protocol: how the node learns the address of a client, and from whom it accepts it."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.access.subject import Subject
from penstock.gateway.logbook import Logbook
from penstock.gateway.options import AccessOptions, LimitOptions, ListenerOptions
from penstock.gateway.protocol.packets import CONNACK
from penstock.gateway.transport.admission import Admission, HandshakeCount
from penstock.gateway.transport.peer import Peer
from penstock.gateway.transport.proxy import UNKNOWN, V2, ProxyHeaderInvalid, client_of, header_bytes, read_header
from penstock.gateway.transport.sources import Sources
from penstock.gateway.transport.turns import Turns
from tests.gateway.brokers import StartBroker
from tests.gateway.certificates import Authority
from tests.gateway.logins import REFUSED
from tests.gateway.moving_time import pass_time
from tests.gateway.packet_cases import connect
from tests.gateway.proxy_headers import FREE, INVALID, LOOPBACK, VALID, ipv6, v2
from tests.gateway.wire import CLEAN
from tests.waiting import until

PROXIED = ListenerOptions(name="proxied", listen=FREE, proxy_from=LOOPBACK)
OPEN = AccessOptions(anonymous="always")

HERE = (b"PROXY TCP4 127.0.0.1 127.0.0.1 5 1883\r\n", v2(0x21, 0x21, ipv6("::1", 5)))
"""Headers of clients on this machine."""


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
        reading = asyncio.create_task(read_header(asyncio.get_running_loop(), near, Turns(1)))
        data = header + b"what follows"
        for at in range(0, len(data), piece_bytes):
            far.send(data[at : at + piece_bytes])
            for _ in range(3):
                await asyncio.sleep(0)
        assert await reading == header
        assert near.recv(100) == b"what follows"


# --- listeners behind a proxy -------------------------------------------------------------------------------------------


async def test_the_client_is_whom_the_proxy_names(start_broker: StartBroker) -> None:
    broker = await start_broker(listeners=(PROXIED,), access=OPEN)
    for name, (header, client) in VALID.items():
        await broker.connect(name, listener="proxied", head=header)
        peer = broker.connection(name).peer
        if client in (None, UNKNOWN):
            assert peer.host == "127.0.0.1", name
        else:
            assert (peer.host, peer.port) == client, name


async def test_a_client_beyond_this_machine_is_not_local_because_its_proxy_is(start_broker: StartBroker) -> None:
    broker = await start_broker(listeners=(PROXIED,))
    for header, is_taken in (
        *((header, client is None) for header, client in VALID.values()),
        *((each, True) for each in HERE),
    ):
        client = await broker.connect("c", listener="proxied", head=header, accepted=False)
        assert await client.receive() == ((CONNACK, 0, b"\0\0") if is_taken else REFUSED), header


async def test_a_proxy_on_a_unix_socket_may_name_a_client(start_broker: StartBroker, tmp_path: Path) -> None:
    listener = ListenerOptions(name="l", kind="unix", socket=str(tmp_path / "s"), proxy_from=LOOPBACK)
    broker = await start_broker(listeners=(listener,))
    client = await broker.connect("far", listener="l", head=VALID["v2 IPv4"][0], accepted=False)
    assert await client.receive() == REFUSED
    await broker.connect("here", listener="l", head=VALID["v2 local"][0])


async def test_bans_limits_and_strikes_go_by_the_address_that_the_proxy_states(start_broker: StartBroker) -> None:
    limits = LimitOptions(source_connections_max=1)
    broker = await start_broker(listeners=(PROXIED,), access=OPEN, limits=limits)
    first, other = VALID["v2 IPv4"][0], VALID["v2 IPv6"][0]
    await broker.connect("first", listener="proxied", head=first)
    second = await broker.connect("second", listener="proxied", head=VALID["v1 IPv4 inside IPv6"][0], accepted=False)
    assert await second.ended() == []
    assert broker.listener("proxied").admission.refused == {"source_connections": 1}
    await broker.node.access.ban("address", "2001:db8::/32", for_ms=0, why="", by=Subject("test"))
    banned = await broker.connect("other", listener="proxied", head=other, accepted=False)
    assert await banned.receive() == REFUSED


async def test_a_loopback_address_of_another_machine_is_not_exempt_from_limits() -> None:
    admission = Admission(PROXIED, HandshakeCount(1), Sources(LimitOptions()), Logbook(1), lambda: 0)
    peer = Peer(cast(Any, SimpleNamespace(is_local=False)), "198.51.100.1", 1)
    assert admission.admit_client(peer, ("127.0.0.1", 5)) == ""
    assert (peer.source, peer.is_local) == ("198.51.100.1", False)


async def test_tls_begins_behind_the_header(start_broker: StartBroker, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    broker = await start_broker(listeners=(authority.listener("tls", proxy_from=LOOPBACK),), access=OPEN)
    end = socket.create_connection(("127.0.0.1", broker.listener("tls").address.port))
    with authority.context().wrap_socket(end, server_hostname="localhost", do_handshake_on_connect=False) as secure:

        def talk() -> bytes:
            socket.socket.send(secure, VALID["v2 IPv4"][0])
            secure.do_handshake()
            secure.send(connect(CLEAN, b"c"))
            return secure.recv(100)

        assert await asyncio.to_thread(talk) == b"\x20\2\0\0"
        assert str(broker.connection("c").peer) == "203.0.113.7:56324"


async def test_a_connection_without_a_header_is_closed(start_broker: StartBroker) -> None:
    broker = await start_broker(listeners=(PROXIED,))
    for number, (name, data) in enumerate(INVALID.items(), 1):
        client = await broker.dial("proxied")
        await client.send(data)
        assert await client.ended() == [], name
        assert broker.listener("proxied").admission.refused == {"proxy_header": number}, name
        assert broker.listener("proxied").admission.open == 0, name


async def test_a_header_that_does_not_come_is_not_waited_for(start_broker: StartBroker) -> None:
    listener = ListenerOptions(name="proxied", listen=FREE, proxy_from=LOOPBACK)
    broker = await start_broker(listeners=(listener,), tls_handshake_ms=100)
    client = await broker.dial("proxied")
    await client.send(b"PROXY TCP4 203.0.113.7 ")
    assert await client.ended() == []
    assert broker.listener("proxied").admission.refused == {"handshake_timeout": 1}


async def test_only_proxies_that_are_trusted_may_name_a_client(start_broker: StartBroker) -> None:
    broker = await start_broker(listeners=(ListenerOptions(name="proxied", listen=FREE, proxy_from=("10.0.0.0/8", "::1")),))
    client = await broker.dial("proxied")
    assert await client.ended() == []
    assert broker.listener("proxied").admission.refused == {"untrusted_proxy": 1}


async def test_a_header_is_no_packet_where_no_proxy_stands(start_broker: StartBroker) -> None:
    broker = await start_broker()
    client = await broker.connect("c", head=VALID["v1 IPv4"][0], accepted=False)
    await until(lambda: broker.listener("mqtt").bytes_in)
    pass_time(broker.node.gateway, 602)  # The client announces a packet and never sends it.
    assert await client.ended() == []
    await until(lambda: not broker.node.gateway.connections)
    assert broker.node.gateway.counters.connections_accepted == 0
