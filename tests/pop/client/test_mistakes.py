"""Mistakes in calls of the client: each has an error that says what is wrong and what to give instead."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from penstock import Client, NodeUnavailable, OutgoingMessage, Security, SyncClient, Worker
from penstock.pop.client import unreached
from tests.pop.wiring import FILTER, GROUP, TOPIC, Node
from tests.waiting import WAIT_S_MAX

WRONG: Any = object()


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"topic": 5}, "topic is 5, but must be text"),
        ({"body": "21.5"}, r"body is '21.5', but must be bytes: encode text to bytes, such as text.encode\(\)"),
        ({"body": {"a": 1}}, "body is {'a': 1}, but must be bytes"),
        ({"body": None}, "body is None: give bytes, or b'' for a message without a body"),
        ({"tag": 5}, "tag is 5, but must be text"),
        ({"delay": "1.5"}, "delay is '1.5': give a number of seconds, or a timedelta"),
        ({"expire_after": True}, "expire_after is True: give a number of seconds"),
        ({"deliver_at_ms": 1.5}, "deliver_at_ms is 1.5, but must be an integer"),
        ({"properties": {"a": 1}}, "the property 'a' is 1: names and values must be text"),
        ({"properties": ["a"]}, r"properties is \['a'\], but must be a mapping of text to text"),
        ({"correlation_data": "x"}, "correlation_data is 'x', but must be bytes"),
    ],
)
async def test_a_field_of_a_message_that_has_the_wrong_type_is_named(
    client: Client, message: dict[str, Any], says: str
) -> None:
    with pytest.raises(TypeError, match=says):
        await client.send(**{"topic": TOPIC, **message})


async def test_a_number_that_is_too_large_is_named(client: Client) -> None:
    with pytest.raises(ValueError, match="deliver_at_ms is 1000000000000000000000, which is too large"):
        await client.send(TOPIC, deliver_at_ms=10**21)


Call = Callable[[Client], Awaitable[object]]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda client: client.send_batch(["a"]), r"one of the messages is 'a': give OutgoingMessage\("),
        (lambda client: client.ack("abc", group=GROUP), r"give a list of them, such as \[message.handle\]"),
        (lambda client: client.ack([5], group=GROUP), "one of the handles is 5: give message.handle"),
        (lambda client: client.dead_letter("abc", group=GROUP), "give a list of them"),
        (lambda client: client.pop(FILTER, group=GROUP, acks="abc"), "give a list of them"),
    ],
)
async def test_what_is_no_message_or_no_handle_is_refused(client: Client, call: Call, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        await call(client)


async def test_acknowledging_a_message_in_place_of_its_handle_does_not_stop_other_acknowledgements(client: Client) -> None:
    await client.send_batch([OutgoingMessage(topic=TOPIC)] * 2)
    first, second = await client.pop(FILTER, group=GROUP, wait=60.0)
    wrong: Any = [first]
    with pytest.raises(TypeError, match=r"give message\.handle"):
        await client.ack(wrong, group=GROUP)
    async with asyncio.timeout(WAIT_S_MAX):
        await client.ack([first.handle], group=GROUP)
        await second.ack()


async def test_a_start_and_an_end_that_do_not_exist_are_named(client: Client) -> None:
    now: Any = "now"
    for call in (client.pop(FILTER, group=GROUP, start=now), client.groups.create(GROUP, FILTER, start=now)):
        with pytest.raises(ValueError, match="start is 'now': give 'earliest', 'latest', or ms since 1970"):
            await call
    for make in (client.consume, client.stream):
        with pytest.raises(ValueError, match="start is 'now'"):
            make(FILTER, group=GROUP, start=now)
    with pytest.raises(ValueError, match="end is 'now': give 'earliest' or 'latest'"):
        await client.groups.reset(GROUP, end=now)
    worker = Worker("127.0.0.1:1")
    with pytest.raises(ValueError, match="start is 'now'"):

        @worker.consumer(FILTER, group=GROUP, start=now)
        async def handle(body: bytes) -> None: ...


async def test_taking_from_a_consumer_that_does_not_receive_yet_is_refused(client: Client) -> None:
    consumer = client.consume(FILTER, group=GROUP)
    with pytest.raises(RuntimeError, match="within `async with consumer`"):
        await consumer.take()


@pytest.mark.parametrize(
    "target",
    ["", "localhost", "127.0.0.1", "http://127.0.0.1:1", "a:99999", "a:0", "a:x", ":8081", "::1:8081", "[::1]", 8081],
)
async def test_a_target_that_is_no_address_is_refused_at_once(target: Any) -> None:
    for make in (Client, SyncClient):
        with pytest.raises((TypeError, ValueError), match=r"target is .*: give HOST:PORT of the node's gRPC listener"):
            make(target)


@pytest.mark.parametrize(
    "target", ["127.0.0.1:8081", "[::1]:8081", "node-1.example.org:8081", "dns:///node:8081", "unix:/run/x.sock"]
)
async def test_targets_that_grpc_knows_are_taken(target: str) -> None:
    await Client(target).aclose()
    SyncClient(target).close()


async def test_a_timeout_and_credentials_that_can_not_be_used_are_refused(node: Node) -> None:
    token: Any = "secret"
    for make in (Client, SyncClient):
        with pytest.raises(ValueError, match="timeout is 0: use more than 0 seconds"):
            make(node.target, timeout=0.0)
        with pytest.raises(TypeError, match=r"security is str: give Security\(token=\.\.\.\)"):
            make(node.target, security=token)


async def test_a_client_whose_node_does_not_answer_says_what_to_check(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unreached, "REACH_S", WAIT_S_MAX)
    for target, security, told in (
        ("127.0.0.1:1", Security(), "nothing listens there: start the node"),
        (node.target, Security(tls=True), "does not speak TLS there"),
    ):
        expected = f"the node at {target} can't be reached: .*: .*{told}"
        async with Client(target, timeout=0.1, security=security, close_timeout=0.1) as client:
            with pytest.raises(NodeUnavailable, match=expected):
                await client.send(TOPIC)
