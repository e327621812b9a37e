"""Listeners: several at once, Unix sockets, and sockets that are refused before MQTT begins."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.gateway.options import AccessOptions, LimitOptions, ListenerOptions
from penstock.gateway.protocol.packets import CONNACK
from penstock.gateway.protocol.properties import Property
from penstock.gateway.protocol.reasons import ConnectCode, ReasonCode
from penstock.gateway.transport.sources import Sources
from penstock.store.options import HostPort
from penstock.store.space.causer import EXEMPT, source_of
from tests.gateway.brokers import StartBroker
from tests.gateway.certificates import Authority
from tests.gateway.packet_cases import connect
from tests.gateway.wire import CLEAN, FREE, PING, Broker, Message
from tests.waiting import until


def unix(path: Path, mode: int = 0o660) -> ListenerOptions:
    return ListenerOptions(name="local", kind="unix", socket=str(path), socket_mode=mode)


async def test_clients_of_all_listeners_share_topics(start_broker: StartBroker, tmp_path: Path) -> None:
    broker = await start_broker(listeners=(unix(tmp_path / "s"), ListenerOptions(name="second", listen=FREE)))
    clients = [await broker.connect(name, listener=name) for name in ("mqtt", "local", "second")]
    for client in clients:
        await client.subscribe(("a", 1))
    await clients[1].publish("a", b"x", 1)
    for client in clients:
        assert await client.message() == Message("a", b"x", 1)


async def test_the_ready_line_names_all_listeners(start_broker: StartBroker, tmp_path: Path) -> None:
    broker = await start_broker(listeners=(ListenerOptions(name="second", listen=FREE), unix(tmp_path / "s")))
    words = dict(word.split("=", 1) for word in broker.node.ready_line().split()[1:])
    assert list(words) == ["mqtt", "pop", "admin", "mqtt.second", "mqtt.local", "data"]
    assert words["mqtt.local"] == str(tmp_path / "s")
    assert words["mqtt.second"] == str(broker.listener("second").address)
    assert broker.node.state()["listen"]["mqtt.second"] == words["mqtt.second"]


async def test_the_plain_listener_can_be_left_out(start_broker: StartBroker) -> None:
    broker = await start_broker(listen="off", listeners=(ListenerOptions(name="only", listen=FREE),))
    assert " mqtt=off " in f" {broker.node.ready_line()} "
    await broker.connect("c", listener="only")


async def test_a_host_with_several_addresses_is_listened_on_at_one_port(start_broker: StartBroker) -> None:
    addresses = {str(found[4][0]) for found in socket.getaddrinfo("localhost", 0, type=socket.SOCK_STREAM)}
    broker = await start_broker(listeners=(ListenerOptions(name="both", listen=HostPort("localhost", 0)),))
    port = broker.listener("both").address.port
    for address in addresses:
        reader, writer = await asyncio.open_connection(address, port)
        writer.write(connect(CLEAN, b"c"))
        assert (await reader.read(4))[0] == CONNACK << 4
        writer.transport.abort()


async def test_an_address_in_use_is_named_and_nothing_stays_open(start_broker: StartBroker, tmp_path: Path) -> None:
    broker = await start_broker()
    taken = HostPort("127.0.0.1", broker.node.mqtt.port)
    path = tmp_path / "s"
    with pytest.raises(OSError, match=rf"can't listen on {taken}: .*in use\. See mqtt\.listeners, second"):
        await start_broker(listeners=(unix(path), ListenerOptions(name="second", listen=taken)))
    assert not path.exists()


# --- Unix sockets -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o600, 0o666])
async def test_a_socket_file_has_its_mode_and_goes_with_the_node(start_broker: StartBroker, tmp_path: Path, mode: int) -> None:
    path = tmp_path / "s"
    broker = await start_broker(listeners=(unix(path, mode),))
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert stat.S_ISSOCK(path.stat().st_mode)
    await broker.node.gateway.stop()
    assert [name for name in os.listdir(tmp_path) if name.endswith("s")] == []


async def test_a_stale_socket_file_is_replaced(start_broker: StartBroker, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    broker = await start_broker(listeners=(unix(path),))
    await broker.connect("c", listener="local")


async def test_a_socket_that_another_process_listens_on_is_left_alone(start_broker: StartBroker, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        inode = path.stat().st_ino
        with pytest.raises(OSError, match="another process listens there") as caught:
            await start_broker(listeners=(unix(path),))
        assert caught.value.errno == errno.EADDRINUSE
        assert path.stat().st_ino == inode


@pytest.mark.parametrize("kind", ["file", "directory", "link"])
async def test_what_is_no_socket_is_never_removed(start_broker: StartBroker, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "s"
    if kind == "file":
        path.write_text("precious")
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="and is no socket"):
        await start_broker(listeners=(unix(path),))
    assert path.is_symlink() or path.exists()


async def test_a_socket_file_that_another_node_took_over_is_left_to_it(start_broker: StartBroker, tmp_path: Path) -> None:
    path = tmp_path / "s"
    broker = await start_broker(listeners=(unix(path),))
    path.unlink()
    path.write_text("another's")
    await broker.node.gateway.stop()
    assert path.read_text() == "another's"


# --- refusals -----------------------------------------------------------------------------------------------------------


async def ends_unanswered(broker: Broker, listener: str = "limited", head: bytes = b"") -> bool:
    """Send a CONNECT; return whether the node closed the socket without an answer."""
    client = await broker.connect("one-more", listener=listener, head=head, accepted=False)
    return await client.receive() == ()


async def test_a_listener_takes_as_many_connections_as_it_may_and_more_when_one_has_gone(start_broker: StartBroker) -> None:
    broker = await start_broker(listeners=(ListenerOptions(name="limited", listen=FREE, connections_max=2),))
    first = await broker.connect("a", listener="limited")
    await broker.connect("b", listener="limited")
    assert await ends_unanswered(broker)
    assert broker.listener("limited").admission.refused == {"listener_connections": 1}
    await broker.connect("elsewhere")
    first.reset()
    await until(lambda: broker.listener("limited").admission.open == 1)
    await broker.connect("c", listener="limited")


class LimitsClock:
    """A clock for the limits of a node. Its monotonic time stands still until the test changes `ms`."""

    def __init__(self, broker: Broker) -> None:
        gateway = broker.node.gateway
        self._clock = gateway.clock
        self.ms = gateway.now_ms()
        gateway.clock = self

    def now_ms(self) -> int:
        return self._clock.now_ms()

    def monotonic_s(self) -> float:
        return (self.ms + 0.5) / 1000  # Half a millisecond more, so that rounding down gives `ms` again.


@pytest.mark.parametrize("kind", ["tcp", "tls"])
async def test_a_listener_takes_so_many_connections_a_second(start_broker: StartBroker, tmp_path: Path, kind: str) -> None:
    authority = Authority(tmp_path / "authority")
    context = authority.context() if kind == "tls" else None
    plain = ListenerOptions(name="limited", listen=FREE)
    limited = replace(authority.listener("limited", "tls") if context else plain, connections_per_s=2)
    broker = await start_broker(listeners=(limited,))
    clock = LimitsClock(broker)
    refused = broker.listener("limited").admission.refused
    for _ in range(2):
        await broker.connect("a", listener="limited", context=context)
    told = 0
    if context is None:
        old = await broker.connect("b", listener="limited", accepted=False)
        assert await old.ended() == [(CONNACK, 0, bytes((0, ConnectCode.SERVER_UNAVAILABLE)))]
        new = await broker.connect_5("b", listener="limited", accepted=False)
        reason, about = await new.connack()
        assert reason == ReasonCode.CONNECTION_RATE_EXCEEDED
        assert "see connections_per_s" in about[Property.REASON_STRING]
        assert await new.ended() == []
        assert set(broker.node.gateway.clients) == {"a"}
        told = 2
    for _ in range(2):
        assert await (await broker.dial("limited")).receive() == ()
    assert refused == {"connection_rate": told + 2}
    clock.ms += 499
    assert await (await broker.dial("limited")).receive() == ()
    clock.ms += 1
    await broker.connect("a", listener="limited", context=context)


async def test_who_is_told_of_the_rate_is_counted_off(start_broker: StartBroker) -> None:
    broker = await start_broker(listeners=(ListenerOptions(name="limited", listen=FREE, connections_per_s=1),))
    LimitsClock(broker)
    await broker.connect("a", listener="limited")
    refused = await broker.connect_5("b", listener="limited", accepted=False)
    assert (await refused.connack())[0] == ReasonCode.CONNECTION_RATE_EXCEEDED
    assert await refused.ended() == []
    await until(lambda: broker.listener("limited").admission.open == 1)
    assert broker.closed(ReasonCode.CONNECTION_RATE_EXCEEDED) == 1


def behind(host: str) -> bytes:
    """Return the PROXY header for a client."""
    return f"PROXY TCP{6 if ':' in host else 4} {host} {host} 1 2\r\n".encode()


PROXIED = ListenerOptions(name="limited", listen=FREE, proxy_from=("127.0.0.1",))

OPEN = AccessOptions(anonymous="always")
"""The clients behind the proxy come from elsewhere and have no password."""


@pytest.mark.parametrize(
    ("first", "same", "other"),
    [("203.0.113.1", "203.0.113.1", "203.0.113.2"), ("2001:db8:0:1::1", "2001:db8:0:1:ffff::9", "2001:db8:0:2::1")],
)
async def test_a_source_has_as_many_connections_as_it_may(start_broker: StartBroker, first: str, same: str, other: str) -> None:
    broker = await start_broker(listeners=(PROXIED,), limits=LimitOptions(source_connections_max=2), access=OPEN)
    client = await broker.connect("a", listener="limited", head=behind(first))
    await broker.connect("b", listener="limited", head=behind(same))
    assert await ends_unanswered(broker, head=behind(first))
    assert broker.listener("limited").admission.refused == {"source_connections": 1}
    await broker.connect("c", listener="limited", head=behind(other))
    client.reset()
    await until(lambda: broker.listener("limited").admission.open == 2)
    await broker.connect("d", listener="limited", head=behind(same))


async def test_a_source_that_errs_too_often_is_held_off_for_a_time(start_broker: StartBroker) -> None:
    limits = LimitOptions(strikes_max=3, hold_off_ms=5000)
    broker = await start_broker(listeners=(PROXIED,), limits=limits, access=OPEN)
    clock = LimitsClock(broker)
    bad = behind("203.0.113.1")
    for _ in range(3):
        client = await broker.dial("limited")
        await client.send(bad, PING)  # The first packet has to be a CONNECT.
        assert await client.ended() == []
    assert broker.closed(ReasonCode.PROTOCOL_ERROR) == 3
    assert broker.node.gateway.traffic.held_off == 1
    assert await ends_unanswered(broker, head=bad)
    assert broker.listener("limited").admission.refused == {"held_off": 1}
    await broker.connect("c", listener="limited", head=behind("203.0.113.2"))
    clock.ms += 4999
    assert await ends_unanswered(broker, head=bad)
    clock.ms += 1
    await broker.connect("d", listener="limited", head=bad)


async def test_this_machine_is_never_held_off(start_broker: StartBroker) -> None:
    broker = await start_broker(limits=LimitOptions(strikes_max=1, source_connections_max=1))
    for _ in range(3):
        client = await broker.dial()
        await client.send(PING)
        assert await client.ended() == []
    await broker.connect("a")
    await broker.connect("b")


@pytest.mark.parametrize(
    ("host", "source"),
    [
        ("", EXEMPT),
        ("127.0.0.1", EXEMPT),
        ("127.9.9.9", EXEMPT),
        ("::1", EXEMPT),
        ("::ffff:127.0.0.1", EXEMPT),
        ("203.0.113.7", "203.0.113.7"),
        ("::ffff:203.0.113.7", "203.0.113.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_an_address_counts_as_a_source(host: str, source: str) -> None:
    assert source_of(host) == source


def test_strikes_are_forgotten_when_their_window_is_over() -> None:
    sources = Sources(LimitOptions(strikes_max=2, strike_window_ms=1000, hold_off_ms=5000))
    assert not sources.strike("a", 0)
    assert not sources.strike("a", 1000)
    assert sources.strike("a", 1999)
    assert sources.refusal("a", 6998) == "held_off"
    assert sources.refusal("a", 6999) == ""


def test_strikes_while_held_off_hold_no_longer_but_count_afterwards() -> None:
    sources = Sources(LimitOptions(strikes_max=2, strike_window_ms=1000, hold_off_ms=5000))
    sources.strike("a", 0)
    assert sources.strike("a", 0)
    assert not any(sources.strike("a", 4000) for _ in range(10))
    assert sources.refusal("a", 5000) == ""
    assert not sources.strike("a", 5000)
    assert sources.strike("a", 5001)


def test_the_table_of_sources_is_bounded_and_forgets_the_oldest() -> None:
    sources = Sources(LimitOptions(strikes_max=2, sources_max=100))
    for number in range(1000):
        sources.strike(f"source-{number}", 0)
    assert len(sources) == 100
    assert sources.strike("source-999", 0)
    assert not sources.strike("source-0", 0)


async def test_a_listener_without_descriptors_rests_and_goes_on(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = await start_broker(listeners=(ListenerOptions(name="second", listen=FREE),))
    listener = broker.listener("second")
    (server,) = listener._servers
    failures = iter(range(2))

    class Exhausted:
        """A socket whose `accept` fails as it does without free descriptors."""

        def accept(self) -> object:
            if next(failures, None) is not None:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return server.accept()

        def fileno(self) -> int:
            return server.fileno()

    exhausted: Any = Exhausted()
    broker.node.gateway.loop.remove_reader(server)
    broker.node.gateway.loop.add_reader(server.fileno(), listener._accept, exhausted)
    await broker.connect("c", listener="second")
    assert next(failures, None) is None
