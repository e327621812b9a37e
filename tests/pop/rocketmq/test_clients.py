"""Who is there, who is gone, and whose the leases are."""

from __future__ import annotations

import pytest

from penstock.pop.rocketmq.clients import COMMANDS_MAX, HUNG_UP_MS_MAX, SILENT_MS_MAX, Clients, Stream, holder_of, lease_id
from penstock.pop.rocketmq.status import Code, Refused


def test_a_client_is_there_while_it_is_heard_of() -> None:
    clients = Clients()
    for at_ms in (0, SILENT_MS_MAX, 2 * SILENT_MS_MAX):
        clients.seen("a", at_ms)
        assert clients.take_gone(at_ms + SILENT_MS_MAX) == {}
    assert list(clients.take_gone(3 * SILENT_MS_MAX + 1)) == ["a"]
    assert len(clients) == 0


def test_one_that_hung_up_has_less_time_and_a_call_saves_it() -> None:
    clients = Clients()
    for name in ("silent", "calls"):
        client = clients.seen(name, 1_000)
        client.stream = Stream()
        clients.hung_up(client, client.stream, 1_000)
        assert client.stream is None
    clients.seen("calls", 1_000 + HUNG_UP_MS_MAX)
    assert list(clients.take_gone(1_001 + HUNG_UP_MS_MAX)) == ["silent"]


def test_a_node_that_did_not_listen_blames_nobody() -> None:
    clients = Clients()
    clients.seen("a", 0)
    clients.forgive(10 * SILENT_MS_MAX)
    assert clients.take_gone(11 * SILENT_MS_MAX) == {}
    assert list(clients.take_gone(11 * SILENT_MS_MAX + 1)) == ["a"]


def test_an_old_stream_that_ends_says_nothing_of_the_new_one() -> None:
    clients = Clients()
    client = clients.seen("a", 0)
    old, client.stream = Stream(), Stream()
    clients.hung_up(client, old, 0)
    assert client.stream is not None
    assert clients.take_gone(HUNG_UP_MS_MAX + 1) == {}


def test_one_that_says_that_it_ends_is_gone_at_once() -> None:
    clients = Clients()
    clients.seen("a", 0).is_done = True
    assert list(clients.take_gone(0)) == ["a"]


def test_a_call_without_a_client_id_is_refused() -> None:
    with pytest.raises(Refused) as refused:
        Clients().seen("", 0)
    assert refused.value.code is Code.CLIENT_ID_REQUIRED


async def test_producers_that_can_be_told_something_are_asked_in_turn() -> None:
    clients = Clients()
    streams = {name: Stream() for name in ("a", "b", "full", "ended")}
    for name, stream in streams.items():
        client = clients.seen(name, 0)
        clients.publishes(client, "orders")
        client.stream = stream
    clients.publishes(clients.seen("none", 0), "orders")
    for _ in range(COMMANDS_MAX):
        streams["full"].put(object())
    streams["ended"].end()
    found = [clients.producer_of("orders", turn) for turn in range(3)]
    assert [client and client.id for client in found] == ["a", "b", "a"]
    assert clients.producer_of("others", 0) is None
    clients.take_gone(SILENT_MS_MAX + 1)
    assert clients.producer_of("orders", 0) is None


def test_a_lease_names_its_holder() -> None:
    assert holder_of(lease_id("vm@1@x", "a-b-c")) == "vm@1@x"
    assert holder_of("an-attempt-of-the-native-api") == holder_of("") == ""
    for client_id in ("x" * 300, "a\x1db"):
        with pytest.raises(Refused) as refused:
            lease_id(client_id, "a")
        assert refused.value.code is Code.BAD_REQUEST
