"""Quotas over gRPC: a service that takes more than its share is refused, and others are served."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest

from penstock import (
    AlreadyRecalled,
    BatchFailed,
    Client,
    OutgoingMessage,
    Overloaded,
    Security,
    TooManyQueues,
    TooManyTimers,
    TooManyTransactions,
)
from penstock.store.errors import LimitExceeded
from penstock.store.options import MIB, StoreOptions
from penstock.store.space.accounts import Resource
from penstock.store.space.causer import LOCAL, Causer
from penstock.store.space.quotaoptions import QuotaLimitOptions, QuotaOptions
from tests.pop.wiring import Node, Parts

USERS = ("flooder", "honest")
ACCESS = "".join(
    f'[[principal]]\nname = "{user}"\ntoken_sha256 = "{sha256(user.encode()).hexdigest()}"\n'
    'read = ["#"]\nwrite = ["#"]\nconsume = ["*"]\nadmin = ["*"]\n'
    for user in USERS
)


def node_of(tmp_path: Path, **limits: int) -> Node:
    """Return a node whose users have these limits."""
    (tmp_path / "access.toml").write_text(ACCESS)
    quotas = QuotaOptions(limits=(QuotaLimitOptions(of="user", name="*", **limits),))
    return Node(tmp_path / "data", access=tmp_path / "access.toml", quotas=quotas)


def client_of(node: Node, user: str) -> Client:
    return Client(node.target, security=Security(token=user))


async def test_a_service_has_a_share_of_the_queues(tmp_path: Path) -> None:
    store = StoreOptions(segment_bytes=16 * MIB, queues_max=900)
    (tmp_path / "access.toml").write_text(ACCESS)
    async with Node(tmp_path / "data", access=tmp_path / "access.toml", store=store) as node:
        async with client_of(node, "flooder") as flooder, client_of(node, "honest") as honest:
            with pytest.raises(BatchFailed) as failed:
                await flooder.send_batch([OutgoingMessage(topic=f"flood-{number}", body=b"x") for number in range(1000)])
            assert len(failed.value.errors) == 1000 - 300
            assert isinstance(failed.value.errors[999], TooManyQueues)
            assert "quotas.share_percent" in str(failed.value.errors[999])
            await honest.send_batch([OutgoingMessage(topic=f"honest-{number}", body=b"x") for number in range(100)])
        assert node.store.ledger.held(Resource.QUEUES, Causer.of("flooder", LOCAL)) == 300


async def test_each_service_has_its_groups(tmp_path: Path) -> None:
    async with (
        node_of(tmp_path, groups=2) as node,
        client_of(node, "flooder") as flooder,
        client_of(node, "honest") as honest,
    ):
        await flooder.groups.create("one", "a/#")
        await flooder.pop("a/#", group="two")
        with pytest.raises(Overloaded, match=r"'flooder'.*quotas\.limits"):
            await flooder.groups.create("three", "a/#")
        with pytest.raises(Overloaded, match=r"quotas\.limits"):
            async with flooder.stream("a/#", group="three") as messages:
                await anext(aiter(messages))
        await honest.groups.create("three", "a/#")
        await flooder.groups.delete("one")
        await flooder.groups.create("four", "a/#")


async def test_each_service_has_its_delayed_messages(tmp_path: Path) -> None:
    async with (
        node_of(tmp_path, delayed=1, transactions=1) as node,
        client_of(node, "flooder") as flooder,
        client_of(node, "honest") as honest,
    ):
        await flooder.send("a", b"x", delay=60.0)
        with pytest.raises(TooManyTimers, match=r"quotas\.limits"):
            await flooder.send("a", b"x", delay=60.0)
        await honest.send("a", b"x", delay=60.0)
        half = await flooder.transactions.begin("a", b"x", producer="flooder")
        with pytest.raises(TooManyTransactions, match=r"quotas\.limits"):
            await flooder.transactions.begin("a", b"x", producer="flooder")
        await half.commit()
        await flooder.transactions.begin("a", b"x", producer="flooder")


async def test_each_service_has_its_keys_of_delayed_messages(tmp_path: Path) -> None:
    async with (
        node_of(tmp_path, timer_keys=1) as node,
        client_of(node, "flooder") as flooder,
        client_of(node, "honest") as honest,
    ):
        sent = await flooder.send("a", b"x", delay=60.0, timer_key="one")
        with pytest.raises(TooManyTimers, match=r"'flooder' holds 1 pending messages with a key.*quotas\.limits"):
            await flooder.send("a", b"x", delay=60.0, timer_key="two")
        await flooder.send("a", b"y", delay=60.0, timer_key="one")  # takes the place of the first
        await flooder.timers.reschedule(topic="a", key="one", delay=90.0)
        await honest.send("a", b"x", delay=60.0, timer_key="two")
        with pytest.raises(TooManyTimers, match=r"'honest' holds 1 pending"):
            await honest.send("a", b"x", delay=60.0, timer_key="one")
        with pytest.raises(AlreadyRecalled):
            await flooder.recall(sent.recall_handle)
        await flooder.timers.cancel(topic="a", key="one")
        await flooder.send("a", b"x", delay=60.0, timer_key="two")  # it was the other one's, which has room again
        await honest.send("a", b"x", delay=60.0, timer_key="three")
        assert node.store.ledger.held(Resource.TIMER_KEYS) == 2


async def test_callers_without_an_access_file_are_known_by_their_address(tmp_path: Path) -> None:
    async with Node(tmp_path / "data") as node, Client(node.target) as client:
        await client.send("a", b"x")
        assert node.store.ledger.held(Resource.QUEUES, Causer.of("", LOCAL)) == 1


def test_a_group_that_can_not_be_created_leaves_nothing_behind(tmp_path: Path) -> None:
    quotas = QuotaOptions(limits=(QuotaLimitOptions(of="source", queues=1),))
    parts = Parts(tmp_path / "data", quotas=quotas)
    with pytest.raises(LimitExceeded, match=r"quotas\.limits"):
        parts.core.groups.get_or_create("one", "a/+", causer=Causer.of("", "192.0.2.1"))
    assert list(parts.core.groups) == []
    assert list(parts.store.queues) == []
    assert parts.store.ledger.held(Resource.QUEUES) == parts.store.ledger.held(Resource.GROUPS) == 0
    parts.close()
