"""A service with an outbox that is killed: `python -m tests.contrib.outboxwriter URL TARGET POINT`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from penstock import Client, OutgoingMessage
from penstock.contrib.sqlalchemy import TransactionalOutbox

TOPIC = "orders/placed"
BODIES = [b"%d" % number for number in range(5)]


def die(*_: Any) -> Any:
    """End this process as `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)


def write(url: str, outbox: TransactionalOutbox) -> sa.Engine:
    """Write messages in a transaction that is committed, and one in a transaction that is not."""
    engine = sa.create_engine(url)
    outbox.metadata.create_all(engine)
    with Session(engine) as session:
        for body in BODIES[:-1]:
            outbox.add(session, OutgoingMessage(topic=TOPIC, body=body, properties={"of": "sync"}))
        session.execute(outbox.insert(OutgoingMessage(topic=TOPIC, body=BODIES[-1], correlation_data=b"\0")))
        session.commit()
        outbox.add(session, OutgoingMessage(topic=TOPIC, body=b"rolled back"))
        session.flush()
        session.rollback()
    return engine


async def write_async(url: str, outbox: TransactionalOutbox) -> Any:
    """Do what `write` does, with an asyncio session."""
    engine = create_async_engine(url)
    async with engine.begin() as connection:
        await connection.run_sync(outbox.metadata.create_all)
    async with AsyncSession(engine) as session:
        for body in BODIES:
            outbox.add(session, OutgoingMessage(topic=TOPIC, body=body, tag="placed"))
        await session.commit()
        outbox.add(session, OutgoingMessage(topic=TOPIC, body=b"rolled back"))
        await session.flush()
        await session.rollback()
    return engine


async def main(kind: str, url: str, target: str, point: str) -> None:
    """Write messages, relay them, and die at a point: after the commit, or after the node has taken the messages."""
    outbox = TransactionalOutbox()
    engine = await write_async(url, outbox) if kind == "asyncio" else write(url, outbox)
    if point == "committed":
        die()
    setattr(outbox, "_settle", die)  # noqa: B010 - the types of a method do not allow it
    async with Client(target) as client:
        await outbox.relay(client, engine)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
