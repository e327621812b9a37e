"""Replies: what a handler returns goes to the topic that its message names.

A request names it as MQTT 5.0 (4.10) does, with a response topic and correlation data, or, from senders that have neither, with
user properties.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import orjson

from penstock.pop.client.client import Client
from penstock.pop.client.message import Message
from penstock.pop.errors import InternalError, NotPermitted, StatusError
from penstock.worker.counts import WorkerCounts

logger = logging.getLogger("penstock.worker")

REPLY_TO = "reply_to"
"""User property of a request without a response topic: the topic to which its reply goes."""

CORRELATION_ID = "correlation_id"
"""User property of a request and of its reply: names the request to its sender."""


class Replies:
    """Sends what handlers return to those who ask for it.

    Parameters:
        client: A client of the node.
        counts: Counts the replies that the node refuses.
    """

    def __init__(self, client: Client, counts: WorkerCounts) -> None:
        self._client = client
        self._counts = counts
        self._warned: set[str] = set()

    async def send(self, messages: Sequence[Message], result: Any, handler: str) -> None:
        """Send the result of a handler, as bytes, text or JSON, if its only message has a response topic or says `reply_to`.

        A reply that the node refuses is dropped. Whoever sent the request chose its topic, so it is no failure of the handler.

        Raises:
            TypeError: The result can't be written as JSON.
            PopError: The node did not answer, or may take the reply later.
        """
        request = messages[0] if len(messages) == 1 else None
        reply_to = (request.response_topic or request.properties.get(REPLY_TO, "")) if request is not None else ""
        if request is None or not reply_to:
            if handler not in self._warned:
                self._warned.add(handler)
                logger.warning(
                    "%s returned %s, and nobody asked for a reply: the result is dropped", handler, type(result).__name__
                )
            return
        body = result if isinstance(result, bytes) else result.encode() if isinstance(result, str) else encoded(result)
        try:
            await self._client.send(
                reply_to,
                body,
                properties={} if request.response_topic else {CORRELATION_ID: request.properties.get(CORRELATION_ID, "")},
                correlation_data=request.correlation_data,
            )
        except (NotPermitted, StatusError) as error:
            drop_refused(error, request.topic, reply_to)
            self._counts.replies_refused += 1


def drop_refused(error: NotPermitted | StatusError, topic: str, reply_to: str) -> None:
    """Log that the node has refused the reply to a message, so that the reply is dropped.

    Args:
        error: Why it was refused. A defect of the node is no refusal, and is raised again.
        topic: Topic of the message.
        reply_to: Topic of the reply.
    """
    if isinstance(error, InternalError):
        raise error
    logger.warning("the reply to a message from %r was refused, and is dropped: %.80r: %s", topic, reply_to, error)


def encoded(result: Any) -> bytes:
    """Return a value as JSON; models of pydantic and structs of msgspec, too. Raises TypeError."""
    return orjson.dumps(result, default=_plain)


def _plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if hasattr(value, "__struct_fields__"):
        return {name: getattr(value, name) for name in value.__struct_fields__}
    raise TypeError(f"a value of the type {type(value).__name__} can't be written as JSON")
