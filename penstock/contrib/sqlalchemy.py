"""An outbox for SQLAlchemy: messages are written in a transaction of the database, and sent exactly once after its commit.

The messages are rows of a table. A service adds them in the transaction that they belong to, so they exist if and only if it is
committed. A relay sends the rows and deletes them. If it dies between the two, the next one sends the same rows again, with the
same deduplication ids, and the node answers with the messages that it has.

Deduplication ids were chosen over transactions of the node. A half message needs the node when the database writes, and is
rolled back when nobody answers the node's questions for long. A row waits for as long as it must.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

import sqlalchemy as sa
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session, registry

from penstock.pop.client.client import Client
from penstock.pop.client.durations import Duration, seconds
from penstock.pop.client.outgoing import OutgoingMessage
from penstock.pop.client.retrydelays import RetryDelays
from penstock.pop.errors import BatchFailed, NodeUnavailable, Overloaded, PopError, TooManyQueues, TooManyTimers

logger = logging.getLogger("penstock.outbox")

A = TypeVar("A")

BATCH_MAX = 1_000
"""Maximum number of rows that one step of a relay sends."""

BATCH_BYTES_MAX = 4 * 1024 * 1024
"""Size of the bodies after which a step sends no further row, in bytes."""

LATE_S = 60.0
"""Added to the age of a row that is sent again, in seconds: for the calls of the relay before, and for clocks that differ."""

_FULL = (TooManyQueues, TooManyTimers)
"""Refusals that end when somebody makes room on the node. Their rows wait."""

_OWN_COLUMNS = ("topic", "body", "deduplication_id", "deduplication_age", "producer")
"""Fields of a message that are not in the column `details`."""


class ClaimedRow(NamedTuple):
    """A row that a relay sends now."""

    row_id: int
    message: OutgoingMessage
    age: float
    """How long ago it was sent first, at the most, in seconds, when it was claimed; 0 if it never was."""


class TransactionalOutbox:
    """The outbox of one database.

        outbox = TransactionalOutbox(Base.metadata)

        with Session(engine) as session:
            session.add(order)
            outbox.add(session, OutgoingMessage(topic="orders/7", body=b"placed"))
            session.commit()

    The table has to be created like others: by `metadata.create_all` or by a migration.

    Parameters:
        metadata: Where the table is declared; by default a `MetaData` of its own.
        table: Name of the table.
    """

    def __init__(self, metadata: sa.MetaData | None = None, *, table: str = "penstock_outbox") -> None:
        self.metadata = metadata if metadata is not None else sa.MetaData()
        """Declares the table."""
        self.table = sa.Table(
            table,
            self.metadata,
            sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
            sa.Column("deduplication_id", sa.String(256), nullable=False),
            sa.Column("topic", sa.Text, nullable=False),
            sa.Column("body", sa.LargeBinary, nullable=False),
            sa.Column("details", sa.Text, nullable=False),
            sa.Column("first_sent_ms", sa.BigInteger),
            sa.Column("error", sa.Text),
        )
        """The table. `first_sent_ms` is when a relay sent the row first, in ms since 1970, and `error` is why the node refused
        it. A row with an error is not sent again until somebody sets both to NULL."""
        self._row = type("OutboxRow", (), {})
        registry(metadata=self.metadata).map_imperatively(self._row, self.table)

    def add(self, session: Session | AsyncSession, message: OutgoingMessage) -> None:
        """Write a message in the transaction of a session. It is sent after the commit, and never without one.

        Raises:
            ValueError: As `insert`.
        """
        row = self._row()
        for name, value in _values(message).items():
            setattr(row, name, value)
        session.add(row)

    def insert(self, message: OutgoingMessage) -> sa.Insert:
        """Return the statement that writes a message, for a connection without a session.

        Raises:
            ValueError: The message has a `producer` or a `deduplication_age`.
        """
        return sa.insert(self.table).values(_values(message))

    async def relay(self, client: Client, engine: sa.Engine | AsyncEngine, *, poll_interval: Duration = 0.5) -> None:
        """Send the messages of committed transactions, in the order of their rows, until the task is cancelled.

        One relay of a table is enough, and keeps the order. A second one costs calls; it doubles no message that both send
        within the node's `pop.deduplication`. While the node or the database is away, the relay waits for it. A message for
        which the node has no room waits, too, and those after it are sent meanwhile. A message that the node refuses for
        another reason keeps its row, with the error, and is logged; those after it are sent.

        Args:
            client: A client of the node.
            engine: Engine of the database.
            poll_interval: How long to wait when there is nothing to send, in seconds or as a timedelta.
        """
        poll_interval_s = seconds(poll_interval, "poll_interval")
        delays = RetryDelays()
        while True:
            try:
                sent = await self.relay_once(client, engine)
            except (NodeUnavailable, Overloaded, OperationalError, InterfaceError, *_FULL) as error:
                wait_s = delays.next_s()
                logger.warning("the outbox waits for %.2f s: %s", wait_s, error)
                await asyncio.sleep(wait_s)
                continue
            delays.reset()
            if not sent:
                await asyncio.sleep(poll_interval_s)

    async def relay_once(self, client: Client, engine: sa.Engine | AsyncEngine) -> int:
        """Send the next messages in one call; return how many the node took or refused, 0 if there are none.

        Raises:
            NodeUnavailable, Overloaded: The call failed. The rows stay.
            TooManyQueues, TooManyTimers: The node has no room for any of them. The rows stay.
            sqlalchemy.exc.DBAPIError: The database failed.
        """
        began_s, began_time_s = time.monotonic(), time.time()
        claimed = await _in_transaction(engine, self._claim)
        if not claimed:
            return 0
        errors = await _send(client, claimed, lambda: _elapsed_s(began_s, began_time_s))
        sent = [row.row_id for row in claimed if row.row_id not in errors]
        refused = {row_id: error for row_id, error in errors.items() if not isinstance(error, _FULL)}
        waiting = [row for row in claimed if row.row_id in errors and row.row_id not in refused]
        # The node has answered the only try of a fresh row, so it does not have the message.
        unsent = [row.row_id for row in waiting if not row.age]
        for row_id, error in refused.items():
            logger.error("row %d of %s is not sent: %s", row_id, self.table.name, error)
        await _in_transaction(engine, lambda connection: self._settle(connection, sent, refused, unsent))
        if len(waiting) == len(claimed):
            raise errors[waiting[0].row_id]
        return len(claimed) - len(waiting)

    def _claim(self, connection: sa.Connection) -> list[ClaimedRow]:
        """Return the next rows, and note in the database that they are sent from now on."""
        table, column = self.table, self.table.c
        ids: list[int] = []
        size = 0
        waiting = sa.select(column.id, sa.func.length(column.body)).where(column.error.is_(None)).order_by(column.id)
        for row_id, body_bytes in connection.execute(waiting.limit(BATCH_MAX)):
            size += body_bytes
            if ids and size > BATCH_BYTES_MAX:
                break
            ids.append(row_id)
        if not ids:
            return []
        now_ms = time.time_ns() // 1_000_000
        mark = sa.update(table).where(column.id.in_(ids), column.first_sent_ms.is_(None)).values(first_sent_ms=now_ms)
        fresh = set(connection.scalars(mark.returning(column.id)))
        found = connection.execute(
            sa.select(column.id, column.deduplication_id, column.topic, column.body, column.details, column.first_sent_ms)
            .where(column.id.in_(ids))
            .order_by(column.id)
        )
        return [
            ClaimedRow(
                row_id,
                OutgoingMessage(topic=topic, body=body, deduplication_id=deduplication_id, **_decoded(details)),
                0.0 if row_id in fresh else max(now_ms - first_sent_ms, 0) / 1000 + LATE_S,
            )
            for row_id, deduplication_id, topic, body, details, first_sent_ms in found
        ]

    def _settle(
        self, connection: sa.Connection, sent: Sequence[int], refused: Mapping[int, PopError], unsent: Sequence[int]
    ) -> None:
        """Delete the rows that the node has, note why it refused others, and that some are as if they had not been sent."""
        if unsent:
            connection.execute(sa.update(self.table).where(self.table.c.id.in_(unsent)).values(first_sent_ms=None))
        if sent:
            connection.execute(sa.delete(self.table).where(self.table.c.id.in_(sent)))
        for row_id, error in refused.items():
            why = f"{type(error).__name__}: {error}"
            connection.execute(sa.update(self.table).where(self.table.c.id == row_id).values(error=why))


async def _send(client: Client, claimed: list[ClaimedRow], elapsed_s: Callable[[], float]) -> dict[int, PopError]:
    """Send rows in one call; return the errors of those that the node refused."""
    late_s = elapsed_s()
    messages = [replace(row.message, deduplication_age=row.age + late_s) for row in claimed]
    try:
        await client.send_batch(messages)
    except BatchFailed as error:
        return {claimed[place].row_id: each for place, each in error.errors.items()}
    return {}


def _elapsed_s(began_s: float, began_time_s: float) -> float:
    """Return how long ago something began, by the clock that says the longer time: one may have stopped or been set back."""
    return max(time.monotonic() - began_s, time.time() - began_time_s, 0.0)


def _values(message: OutgoingMessage) -> dict[str, Any]:
    if message.producer or message.deduplication_age:
        raise ValueError("a message of an outbox has neither a producer nor a deduplication_age: leave them empty")
    details: dict[str, Any] = {}
    for field in fields(message):
        value = getattr(message, field.name)
        if field.name not in _OWN_COLUMNS and value:
            details[field.name] = _plain(field.name, value)
    if "properties" in details:
        details["properties"] = dict(details["properties"])
    return {
        "deduplication_id": message.deduplication_id or f"outbox {uuid4().hex}",
        "topic": message.topic,
        "body": message.body,
        "details": json.dumps(details),
    }


def _plain(name: str, value: Any) -> Any:
    """Return the value of a field in a form that JSON has. A duration is a number of seconds."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return seconds(value, name) if isinstance(value, timedelta) else value


def _decoded(details: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(details)
    if "correlation_data" in values:
        values["correlation_data"] = base64.b64decode(values["correlation_data"])
    return values


async def _in_transaction(engine: sa.Engine | AsyncEngine, work: Callable[[sa.Connection], A]) -> A:
    """Return what a function does in a transaction of its own. With a synchronous engine it runs in a thread."""
    if isinstance(engine, AsyncEngine):
        async with engine.begin() as connection:
            return await connection.run_sync(work)

    def run() -> A:
        with engine.begin() as connection:
            return work(connection)

    return await asyncio.to_thread(run)
