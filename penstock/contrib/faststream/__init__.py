"""A broker for FastStream: its handlers on the messages of groups, with the client and the worker of Penstock below.

    from faststream import FastStream
    from penstock.contrib.faststream import PenstockBroker

    broker = PenstockBroker("127.0.0.1:8081")
    app = FastStream(broker)

    @broker.subscriber("plant/{press}/temperature", group="billing")
    async def bill(celsius: float, press: str = Path()) -> None:
        ...

FastStream has no stable interface for brokers. This package is written for its version 0.7, as its own brokers are.
"""

from __future__ import annotations

from typing import Annotated

from faststream import Context

from penstock.contrib.faststream.broker import PenstockBroker
from penstock.contrib.faststream.command import PenstockResponse
from penstock.contrib.faststream.inmemory import TestPenstockBroker
from penstock.contrib.faststream.registrator import PenstockRouter
from penstock.contrib.faststream.streammessage import PenstockBatch as _Batch
from penstock.contrib.faststream.streammessage import PenstockMessage as _Message

PenstockMessage = Annotated[_Message, Context("message")]
"""Annotate an argument of a handler with this to get the message."""

PenstockBatch = Annotated[_Batch, Context("message")]
"""The same for a handler of batches."""

__all__ = ["PenstockBatch", "PenstockBroker", "PenstockMessage", "PenstockResponse", "PenstockRouter", "TestPenstockBroker"]
