"""TLS connections served in turns: records cut anywhere, and how each end learns that the other has ended."""

from __future__ import annotations

import asyncio
import gc
import random
import socket
import ssl
import weakref

import pytest

from penstock.gateway.transport.certificates import certificates_of
from penstock.gateway.transport.sockets import HAS_TURNS
from penstock.gateway.transport.tls import Tls
from penstock.gateway.transport.tls_transport import TlsTransport
from penstock.gateway.transport.turns import Turns
from tests.gateway.brokers import StartBroker
from tests.gateway.certificates import Authority
from tests.gateway.packet_cases import connect
from tests.gateway.stage import Recorder, Stage
from tests.gateway.wire import CLEAN
from tests.waiting import until

pytestmark = pytest.mark.skipif(not HAS_TURNS, reason="this system has no epoll, so the loop's own transports serve")

VERSIONS = pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=["1.2", "1.3"])


class Far:
    """The client's end of a connection. It encrypts data first, and sends records when the test says so."""

    def __init__(self, end: socket.socket, context: ssl.SSLContext) -> None:
        self.end = end
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_hostname="localhost")

    async def shake_hands(self, *, holds_last: bool = False) -> None:
        """Do the handshake; with `holds_last`, keep the client's last handshake message for the next `record` call."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                self.tls.do_handshake()
            except ssl.SSLWantReadError:
                await loop.sock_sendall(self.end, self.outgoing.read())
                self.incoming.write(await loop.sock_recv(self.end, 65_536))
            else:
                break
        if not holds_last:
            await loop.sock_sendall(self.end, self.outgoing.read())

    def record(self, data: bytes) -> bytes:
        """Return records of at most 16 KiB that carry the data, after any handshake message that was held back."""
        sent = 0
        while sent < len(data):
            sent += self.tls.write(data[sent:])
        return self.outgoing.read()

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.end, data)

    async def receive(self, size: int) -> bytes:
        """Return `size` bytes, or fewer if the server announces the end of the TLS stream (close_notify).

        Raises:
            ssl.SSLEOFError: the connection ended without that announcement.
        """
        found = bytearray()
        while len(found) < size:
            try:
                data = self.tls.read(size - len(found))
            except ssl.SSLWantReadError:
                more = await asyncio.get_running_loop().sock_recv(self.end, 65_536)
                if more:
                    self.incoming.write(more)
                else:
                    self.incoming.write_eof()
                continue
            if not data:
                break
            found += data
        return bytes(found)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


async def begin(
    stage: Stage, protocol: Recorder, authority: Authority, version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3
) -> Far:
    """Complete a handshake, add the server's end to the sockets, and return the client's end."""
    context = authority.context()
    context.minimum_version = context.maximum_version = version
    near, end = stage.connect()
    far, tls = Far(end, context), Tls(certificates_of(authority.listener("tls"), "tls").content)
    await asyncio.gather(tls.shake_hands(asyncio.get_running_loop(), near, Turns(1)), far.shake_hands())
    stage.sockets.add(near, protocol, tls)
    assert isinstance(protocol.transport, TlsTransport)
    assert protocol.transport.get_extra_info("ssl_object").version() == version.name.replace("_", ".")
    return far


@VERSIONS
async def test_records_cut_anywhere_arrive_whole_and_in_order(
    stage: Stage, authority: Authority, version: ssl.TLSVersion
) -> None:
    protocol = Recorder()
    far = await begin(stage, protocol, authority, version)
    dice = random.Random(1)
    wanted = b"".join(dice.randbytes(dice.choice([1, 64, 1_000, 16_384, 70_000])) for _ in range(200))
    at, sent = 0, bytearray()
    while at < len(wanted):
        size = dice.choice([1, 30, 5_000, 40_000])
        sent += far.record(wanted[at : at + size])
        at += size
    at = 0
    while at < len(sent):
        size = dice.choice([1, 7, 20_000, 300_000])
        await far.send(bytes(sent[at : at + size]))
        await asyncio.sleep(0)
        at += size
    await until(lambda: sum(map(len, protocol.received)) == len(wanted))
    assert b"".join(protocol.received) == wanted
    assert all(protocol.received), "an incomplete record must not reach the protocol"
    assert protocol.said == []


async def test_many_records_of_one_read_reach_the_protocol_together(stage: Stage, authority: Authority) -> None:
    protocol = Recorder()
    far = await begin(stage, protocol, authority)
    await far.send(b"".join(far.record(b"%d," % number) for number in range(100)))
    await until(lambda: bool(protocol.received))
    assert protocol.received == [b"".join(b"%d," % number for number in range(100))]


@pytest.mark.slow
@VERSIONS
async def test_data_that_the_kernel_has_no_room_for_waits_and_is_sent_in_order(
    stage: Stage, authority: Authority, version: ssl.TLSVersion
) -> None:
    protocol = Recorder()
    far = await begin(stage, protocol, authority, version)
    protocol.transport.set_write_buffer_limits(high=100_000)
    pieces = [bytes([number]) * 50_000 for number in range(60)]
    for piece in pieces:
        protocol.transport.write(piece)
    assert protocol.said == ["pause"]
    assert await far.receive(3_000_000) == b"".join(pieces)
    await until(lambda: protocol.said == ["pause", "resume"])


@VERSIONS
async def test_the_end_of_a_tls_stream_is_reported_after_its_last_data(
    stage: Stage, authority: Authority, version: ssl.TLSVersion
) -> None:
    protocol = Recorder()
    far = await begin(stage, protocol, authority, version)
    data = far.record(b"last")
    with pytest.raises(ssl.SSLWantReadError):
        far.tls.unwrap()
    await far.send(data + far.outgoing.read())
    await until(lambda: protocol.said == ["eof", "lost"])
    assert protocol.received == [b"last"]
    assert protocol.error is None


async def test_the_end_of_a_tls_stream_without_data_is_reported(stage: Stage, authority: Authority) -> None:
    protocol = Recorder()
    far = await begin(stage, protocol, authority)
    with pytest.raises(ssl.SSLWantReadError):
        far.tls.unwrap()
    await far.send(far.outgoing.read())
    await until(lambda: protocol.said == ["eof", "lost"])


async def test_a_closed_connection_frees_its_objects_without_the_garbage_collector(stage: Stage, authority: Authority) -> None:
    protocol = Recorder()
    far = await begin(stage, protocol, authority)
    held = weakref.ref(protocol.transport.get_extra_info("ssl_object"))
    gc.disable()
    try:
        far.end.close()
        await until(lambda: protocol.said[-1:] == ["lost"])
        del protocol.transport, protocol.error  # an exception holds the frames that it passed through
        await until(lambda: held() is None)
    finally:
        gc.enable()


async def test_close_sends_buffered_data_and_then_announces_the_end(stage: Stage, authority: Authority) -> None:
    protocol = Recorder()
    far = await begin(stage, protocol, authority)
    protocol.transport.write(b"x" * 1_000_000)
    protocol.transport.close()
    protocol.transport.write(b"y")
    assert await far.receive(2_000_000) == b"x" * 1_000_000
    await until(lambda: protocol.said[-1] == "lost")


async def test_abort_ends_the_connection_without_announcing_it(stage: Stage, authority: Authority) -> None:
    protocol = Recorder()
    far = await begin(stage, protocol, authority)
    protocol.transport.abort()
    with pytest.raises(ssl.SSLEOFError):
        await far.receive(1)


async def test_a_damaged_record_ends_only_its_own_connection(stage: Stage, authority: Authority) -> None:
    protocol, beside = Recorder(), Recorder()
    far, other = await begin(stage, protocol, authority), await begin(stage, beside, authority)
    good, bad = far.record(b"good"), bytearray(far.record(b"bad"))
    bad[-1] ^= 1
    await far.send(good)
    await until(lambda: bool(protocol.received))
    await far.send(bytes(bad))
    await until(lambda: protocol.said == ["lost"])
    assert isinstance(protocol.error, ssl.SSLError)
    assert protocol.received == [b"good"]
    await other.send(other.record(b"x"))
    await until(lambda: beside.received == [b"x"])


@pytest.mark.parametrize("reads", [False, True])
async def test_a_client_that_makes_tls_answer_but_never_reads_is_disconnected(
    stage: Stage, authority: Authority, monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    """Python can't request a TLS key update, so here TLS has an answer ready after each read."""
    protocol = Recorder()
    far = await begin(stage, protocol, authority)
    monkeypatch.setattr(Tls, "due", lambda self: self.encrypt(bytes(1_000)))
    if not reads:
        protocol.transport.write(bytes(20_000_000))
    sent = 0

    def is_heard() -> bool:
        return len(protocol.received) == sent or protocol.said[-1:] == ["lost"]

    for _ in range(100):
        sent += 1
        await far.send(far.record(b"x"))
        await until(is_heard)
        if protocol.said[-1:] == ["lost"]:
            break
        if reads:
            assert len(await far.receive(1_000)) == 1_000
    assert (protocol.said[-1:] == ["lost"]) is not reads
    assert (len(protocol.received) < 20) is not reads


@VERSIONS
async def test_a_connect_may_arrive_together_with_the_end_of_the_handshake(
    start_broker: StartBroker, authority: Authority, version: ssl.TLSVersion
) -> None:
    broker = await start_broker(listeners=(authority.listener("tls"),))
    address = broker.listener("tls").address
    context = authority.context()
    context.minimum_version = context.maximum_version = version
    loop = asyncio.get_running_loop()
    with socket.socket() as end:
        end.setblocking(False)
        await loop.sock_connect(end, (address.host, address.port))
        far = Far(end, context)
        await far.shake_hands(holds_last=True)
        await far.send(far.record(connect(CLEAN, b"eager")))
        assert await far.receive(4) == b"\x20\x02\x00\x00"
