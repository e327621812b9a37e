"""Clients that use the node, clients that are gone, and holders of leases."""

from __future__ import annotations

import pytest

from penstock.pop.rocketmq.agents import Agent
from penstock.pop.rocketmq.clients import (
    COMMANDS_MAX,
    DISCONNECTED_MS_MAX,
    SILENT_MS_MAX,
    SILENT_RUST_MS_MAX,
    ConnectedClients,
    TelemetryStream,
)
from penstock.pop.rocketmq.leases import holder_of, lease_id
from penstock.pop.rocketmq.status import Code, Refused


def test_a_client_is_there_while_the_node_hears_from_it() -> None:
    clients = ConnectedClients()
    for at_ms in (0, SILENT_MS_MAX, 2 * SILENT_MS_MAX):
        clients.heard_from("a", at_ms)
        assert clients.remove_gone(at_ms + SILENT_MS_MAX) == {}
    assert list(clients.remove_gone(3 * SILENT_MS_MAX + 1)) == ["a"]
    assert len(clients) == 0


def test_a_client_whose_stream_broke_has_less_time_and_a_call_keeps_it() -> None:
    clients = ConnectedClients()
    for name in ("silent", "calls"):
        client = clients.heard_from(name, 1_000)
        client.stream = TelemetryStream()
        clients.stream_ended(client, client.stream, 1_000)
        assert client.stream is None
    clients.heard_from("calls", 1_000 + DISCONNECTED_MS_MAX)
    assert list(clients.remove_gone(1_001 + DISCONNECTED_MS_MAX)) == ["silent"]


def test_a_rust_client_has_time_for_its_rare_heartbeats() -> None:
    clients = ConnectedClients()
    client = clients.heard_from("rust", 0)
    client.agent = Agent.of("RUST", "5.0.0")
    client.stream = TelemetryStream()
    assert clients.remove_gone(SILENT_RUST_MS_MAX) == {}
    clients.stream_ended(client, client.stream, SILENT_RUST_MS_MAX)
    assert clients.remove_gone(SILENT_RUST_MS_MAX) == {}
    assert list(clients.remove_gone(SILENT_RUST_MS_MAX + DISCONNECTED_MS_MAX + 1)) == ["rust"]


def test_time_in_which_the_node_did_not_listen_does_not_count() -> None:
    clients = ConnectedClients()
    clients.heard_from("a", 0)
    clients.excuse(10 * SILENT_MS_MAX)
    assert clients.remove_gone(11 * SILENT_MS_MAX) == {}
    assert list(clients.remove_gone(11 * SILENT_MS_MAX + 1)) == ["a"]


def test_the_end_of_an_old_stream_does_not_concern_the_new_one() -> None:
    clients = ConnectedClients()
    client = clients.heard_from("a", 0)
    old, client.stream = TelemetryStream(), TelemetryStream()
    clients.stream_ended(client, old, 0)
    assert client.stream is not None
    assert clients.remove_gone(DISCONNECTED_MS_MAX + 1) == {}


def test_a_client_that_announces_its_end_is_gone_at_once() -> None:
    clients = ConnectedClients()
    clients.heard_from("a", 0).is_terminated = True
    assert list(clients.remove_gone(0)) == ["a"]


def test_a_call_without_a_client_id_is_refused() -> None:
    with pytest.raises(Refused) as refused:
        ConnectedClients().heard_from("", 0)
    assert refused.value.code is Code.CLIENT_ID_REQUIRED


async def test_producers_with_room_on_their_streams_are_asked_in_turn() -> None:
    clients = ConnectedClients()
    streams = {name: TelemetryStream() for name in ("a", "b", "full", "ended")}
    for name, stream in streams.items():
        client = clients.heard_from(name, 0)
        clients.add_publisher(client, "orders")
        client.stream = stream
    clients.add_publisher(clients.heard_from("none", 0), "orders")
    for _ in range(COMMANDS_MAX):
        streams["full"].put(object())
    streams["ended"].end()
    found = [clients.publisher_of("orders", turn) for turn in range(3)]
    assert [client and client.id for client in found] == ["a", "b", "a"]
    assert clients.publisher_of("others", 0) is None
    clients.remove_gone(SILENT_MS_MAX + 1)
    assert clients.publisher_of("orders", 0) is None


def test_a_lease_names_its_holder() -> None:
    assert holder_of(lease_id("vm@1@x", "a-b-c")) == "vm@1@x"
    assert holder_of("an-attempt-of-the-native-api") == holder_of("") == ""
    for client_id in ("x" * 300, "a\x1db"):
        with pytest.raises(Refused) as refused:
            lease_id(client_id, "a")
        assert refused.value.code is Code.BAD_REQUEST
