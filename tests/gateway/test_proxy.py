"""The PROXY protocol: how the node learns the address of a client, and from whom it accepts it."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.options import ListenerOptions
from penstock.gateway.transport.proxy import V2, ProxyHeaderInvalid, client_of, header_bytes, read_header
from tests.gateway.brokers import StartBroker
from tests.gateway.certificates import Authority
from tests.gateway.packet_cases import connect
from tests.gateway.proxy_headers import FREE, INVALID, LOOPBACK, VALID
from tests.gateway.wire import CLEAN
from tests.waiting import until


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
    assert broker.listener("proxied").admission.refused == {"proxy_header": 1}
    assert broker.listener("proxied").admission.open == 0


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
    broker = await start_broker(connect_timeout_ms=200)  # The client announces a packet and never sends it.
    client = await broker.connect("c", head=VALID["v1 IPv4"][0], accepted=False)
    assert await client.ended() == []
    await until(lambda: not broker.node.gateway.connections)
    assert broker.node.gateway.counters.connections_accepted == 0
