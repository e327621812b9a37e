"""The outbox: messages of committed transactions are sent once, whatever is killed in between."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from penstock import Client, OutgoingMessage
from penstock.contrib.sqlalchemy import TransactionalOutbox
from penstock.pop.errors import TooManyTimers
from penstock.pop.options import PopOptions
from penstock.timer.options import TimerOptions
from tests.contrib.outboxwriter import BODIES, TOPIC, write, write_async
from tests.contrib.postgresql import postgresql
from tests.pop.wiring import Node
from tests.waiting import PROCESS_S


@pytest.fixture(scope="module")
def sockets() -> Iterator[str]:
    with postgresql() as directory:
        yield directory


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a database without tables."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/database"
    directory = request.getfixturevalue("sockets")
    name = f"d{abs(hash(str(tmp_path)))}"
    engine = sa.create_engine(f"postgresql+psycopg://postgres@/postgres?host={directory}", isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(sa.text(f"CREATE DATABASE {name}"))
    engine.dispose()
    return f"postgresql+psycopg://postgres@/{name}?host={directory}"


def rows(engine: sa.Engine, outbox: TransactionalOutbox) -> list[str | None]:
    """Return the errors of the rows that are left."""
    with engine.connect() as connection:
        return list(connection.scalars(sa.select(outbox.table.c.error).order_by(outbox.table.c.id)))


async def relayed(client: Client, engine: sa.Engine | AsyncEngine, outbox: TransactionalOutbox) -> list[bytes]:
    """Relay until nothing is left to send; return the bodies of all messages that the node has."""
    while await outbox.relay_once(client, engine):
        pass
    return [message.body for message in await client.pop("orders/#", group="orders", messages_max=100)]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("url", "kind", "point"),
    [
        ("sqlite", "plain", "committed"),
        ("sqlite", "asyncio", "sent"),
        ("postgresql", "plain", "sent"),
        ("postgresql", "asyncio", "committed"),
    ],
    indirect=["url"],
)
async def test_a_kill_between_commit_and_send_or_after_it_doubles_and_loses_nothing(
    tmp_path: Path, url: str, kind: str, point: str
) -> None:
    outbox, engine = TransactionalOutbox(), sa.create_engine(url)
    written = url.replace("sqlite:", "sqlite+aiosqlite:") if kind == "asyncio" else url
    async with Node(tmp_path / "data") as node, Client(node.target) as client:
        writer = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.contrib.outboxwriter", kind, written, node.target, point
        )
        assert await asyncio.wait_for(writer.wait(), PROCESS_S) == -9
        assert rows(engine, outbox) == [None] * len(BODIES)
        assert node.store.messages_stored == (len(BODIES) if point == "sent" else 0)
        assert await relayed(client, engine, outbox) == BODIES
        assert rows(engine, outbox) == []
    engine.dispose()


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("kind", ["plain", "asyncio"])
async def test_a_relay_that_ends_after_it_has_sent_is_repeated_and_doubles_nothing(
    tmp_path: Path, url: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(*_: object) -> None:
        raise InterruptedError

    outbox, plain = TransactionalOutbox(), sa.create_engine(url)
    if kind == "asyncio":
        engine = await write_async(url.replace("sqlite:", "sqlite+aiosqlite:"), outbox)
    else:
        engine = write(url, outbox)
    async with Node(tmp_path / "data") as node, Client(node.target) as client:
        with monkeypatch.context() as patch:
            patch.setattr(outbox, "_settle", end)
            with pytest.raises(InterruptedError):
                await outbox.relay_once(client, engine)
        assert (rows(plain, outbox), node.store.messages_stored) == ([None] * len(BODIES), len(BODIES))
        assert await relayed(client, engine, outbox) == BODIES
        assert rows(plain, outbox) == []
    plain.dispose()
    await (engine.dispose() if kind == "asyncio" else asyncio.to_thread(engine.dispose))


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
async def test_what_the_node_refuses_keeps_its_row_and_the_others_are_sent(tmp_path: Path, url: str) -> None:
    outbox, engine = TransactionalOutbox(table="mail"), sa.create_engine(url)
    outbox.metadata.create_all(engine)
    with engine.begin() as connection:
        for topic, body in ((TOPIC, b"0"), ("orders/#", b"1"), (TOPIC, b"2")):
            connection.execute(outbox.insert(OutgoingMessage(topic=topic, body=body, content_type="text/plain")))
        with pytest.raises(ValueError, match="neither a producer"):
            outbox.insert(OutgoingMessage(topic=TOPIC, producer="orders"))
    async with Node(tmp_path / "data", pop=PopOptions(deduplication_ms=120_000)) as node, Client(node.target) as client:
        assert await relayed(client, engine, outbox) == [b"0", b"2"]
        (error,) = rows(engine, outbox)
        assert str(error).startswith("InvalidTopic: ")
        with engine.begin() as connection:
            mended = {"topic": TOPIC, "error": None, "first_sent_ms": 1}
            connection.execute(sa.update(outbox.table).values(mended))
        assert await relayed(client, engine, outbox) == []
        assert str(rows(engine, outbox)[0]).startswith("DeduplicationWindowPassed: "), "it may have been sent long ago"
        with engine.begin() as connection:
            connection.execute(sa.update(outbox.table).values(error=None, first_sent_ms=None))
        assert await relayed(client, engine, outbox) == [b"1"]
        assert rows(engine, outbox) == []
    engine.dispose()


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
async def test_a_message_for_which_the_node_has_no_room_waits_and_the_others_are_sent(tmp_path: Path, url: str) -> None:
    outbox, engine = TransactionalOutbox(), sa.create_engine(url)
    outbox.metadata.create_all(engine)
    async with Node(tmp_path / "data", timer=TimerOptions(pending_max=1)) as node, Client(node.target) as client:
        first = await client.send("orders/later", b"first", delay=3_600.0)
        with engine.begin() as connection:
            connection.execute(outbox.insert(OutgoingMessage(topic="orders/later", body=b"second", delay=3_600.0)))
            connection.execute(outbox.insert(OutgoingMessage(topic=TOPIC, body=b"now")))
        assert await outbox.relay_once(client, engine) == 1
        with pytest.raises(TooManyTimers):
            await outbox.relay_once(client, engine)
        assert rows(engine, outbox) == [None]
        assert await asyncio.to_thread(_is_unsent, engine, outbox), "an answered refusal is no unknown outcome"
        await client.recall(first.recall_handle)
        assert await outbox.relay_once(client, engine) == 1
        assert rows(engine, outbox) == []
    engine.dispose()


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
async def test_a_relay_waits_for_the_node(tmp_path: Path, url: str) -> None:
    outbox, engine = TransactionalOutbox(), sa.create_engine(url)
    outbox.metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(outbox.insert(OutgoingMessage(topic=TOPIC, body=b"late")))
    node = Node(tmp_path / "data")
    await node.start()
    port = node.port
    await node.stop()
    async with Client(f"127.0.0.1:{port}", timeout=0.2) as client:
        relay = asyncio.create_task(outbox.relay(client, engine, poll_interval=0.01))
        while await asyncio.to_thread(_is_unsent, engine, outbox):  # noqa: ASYNC110 - another program writes that
            await asyncio.sleep(0.01)
        node = Node(tmp_path / "data")
        await node.start(port)
        async with Client(node.target) as other:
            (message,) = await other.pop("orders/#", group="orders", wait=60.0)
        assert message.body == b"late"
        await node.until(lambda: not rows(engine, outbox))
        relay.cancel()
    await node.stop()
    engine.dispose()


def _is_unsent(engine: sa.Engine, outbox: TransactionalOutbox) -> bool:
    with engine.connect() as connection:
        return connection.scalar(sa.select(outbox.table.c.first_sent_ms)) is None
