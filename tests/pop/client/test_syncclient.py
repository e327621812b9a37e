"""The client for threads, against a real node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock import SyncClient, group_settings
from penstock.pop.errors import (
    AlreadyAcked,
)
from penstock.pop.options import PopOptions
from tests.pop.wiring import FILTER, GROUP, TOPIC, Node

OPTIONS = PopOptions(transaction_check_ms=100, transaction_checks_max=1_000)


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    started = Node(tmp_path / "data", pop=OPTIONS)
    await started.start()
    yield started
    await started.stop()


def use_synchronously(target: str) -> list[bytes]:
    """Use a node as a thread of a service does; return the bodies that it saw."""
    with SyncClient(target) as client:
        client.groups.create(GROUP, FILTER, settings=group_settings(attempts_max=2))
        client.send(TOPIC, b"1")
        delayed = client.send(TOPIC, b"never", delay=60.0)
        client.recall(delayed.recall_handle)
        with client.transactions.begin(TOPIC, b"2", producer="orders"):
            assert len(client.transactions.pending("orders")) == 1
        try:
            with client.transactions.begin(TOPIC, b"never", producer="orders"):
                raise KeyError
        except KeyError:
            pass
        seen = []
        for message in client.consume(FILTER, group=GROUP, batch=2):
            seen.append(message.body)
            if message.attempt == 1:
                message.extend(60)
                message.nack()
            elif message.body == b"1":
                message.ack()
            else:
                message.dead_letter()
            if len(seen) == 4:
                break
        assert [letter.topic for letter in client.dead_letters.of_group(GROUP)] == [TOPIC]
        (letter,) = client.dead_letters.of_group(GROUP)
        shown = client.dead_letters.get(GROUP, letter.message_id)
        assert shown is not None
        assert shown.topic == TOPIC
        assert client.dead_letters.purge(GROUP, ["0" * 16]) == 0
        assert client.dead_letters.redrive(GROUP) == 1
        (message,) = client.pop(FILTER, group=GROUP, wait=60.0, attempt_id="x")
        assert message.attempt == 1
        message.suspend()
        (message,) = client.pop(FILTER, group=GROUP, wait=60.0)
        client.ack([message.handle], group=GROUP)
        with pytest.raises(AlreadyAcked):
            message.ack()
        client.send(TOPIC, b"3")
        (message,) = client.pop(FILTER, group=GROUP)
        popped = client.pop(FILTER, group=GROUP, wait=0.02, acks=[message.handle, "x"])
        assert (list(popped), list(popped.refused)) == ([], ["x"])
        assert client.groups.describe(GROUP)[0].in_flight == 0
        client.groups.delete(GROUP)
        return seen


async def test_a_thread_uses_the_client_for_threads(node: Node) -> None:
    seen = await asyncio.to_thread(use_synchronously, node.target)
    assert sorted(seen) == [b"1", b"1", b"2", b"2"]
