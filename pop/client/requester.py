"""Requests: commands to devices, and questions to services, with the reply as the result."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.pop.client.groups import GroupCalls
from penstock.pop.client.outgoing import OutgoingMessage, SendReceipt
from penstock.pop.client.received import ReceivedMessage
from penstock.pop.client.retrydelays import RetryDelays
from penstock.pop.errors import NodeUnavailable, Overloaded, PopError, RequestTimedOut

if TYPE_CHECKING:
    from penstock.pop.client.consumer import Consumer

logger = logging.getLogger("penstock.client")

INBOXES = "replies"
"""First level of the topics to which replies go. A client gets those to `replies/INBOX`, as the group `replies-INBOX`."""

REPLY_INVISIBLE_S = 5.0
"""Invisible time of replies in seconds. It is short, because a reply that gets lost on its way to the client comes after it."""


class Requester:
    """Sends requests, and gives each caller its reply: `Client.request`.

    A request has a response topic and correlation data, as MQTT 5.0 (4.10) describes. All requests of a client share one inbox,
    a topic with a group. It begins with the first request. The correlation data tells to which request a reply belongs.

    Parameters:
        inbox: Name of the inbox; empty for a new one, which `aclose` deletes.
        groups: Creates and deletes the group of the inbox.
        send: Sends a message.
        consume: Returns the messages of a topic filter and group.
        timeout_s: Timeout of one call in seconds.
    """

    def __init__(
        self,
        inbox: str,
        groups: GroupCalls,
        send: Callable[[OutgoingMessage], Awaitable[SendReceipt]],
        consume: Callable[[str, str], Consumer],
        timeout_s: float,
    ) -> None:
        self._is_own = not inbox
        inbox = inbox or secrets.token_hex(8)
        self.topic = f"{INBOXES}/{inbox}"
        """Topic to which replies go."""
        self._group = f"{INBOXES}-{inbox}"
        self._groups = groups
        self._send = send
        self._consume = consume
        self._timeout_s = timeout_s
        self._open: dict[bytes, asyncio.Future[ReceivedMessage]] = {}
        """The requests that wait for their replies, by correlation data."""
        self._opening = asyncio.Lock()
        self._receiver: asyncio.Task[None] | None = None
        self._replies: Consumer | None = None

    async def request(self, message: OutgoingMessage, timeout_s: float) -> ReceivedMessage:
        """Send a request, and return its reply. Raises as `Client.request`."""
        correlation = secrets.token_bytes(12)
        reply: asyncio.Future[ReceivedMessage] = asyncio.get_running_loop().create_future()
        message = replace(
            message, response_topic=self.topic, correlation_data=correlation, deduplication_id=f"request {correlation.hex()}"
        )
        self._open[correlation] = reply
        try:
            async with asyncio.timeout(timeout_s) as limit:
                return await self._replied(message, reply, timeout_s)
        except TimeoutError:
            if not limit.expired():
                raise
            raise RequestTimedOut(
                f"no reply to the request on {message.topic!r} came within {timeout_s:g} s; it may or may not have been handled"
            ) from None
        finally:
            del self._open[correlation]

    async def aclose(self, within_s: float) -> None:
        """Receive no more replies. Delete the inbox, if it has no name, within so many seconds."""
        receiver, self._receiver = self._receiver, None
        if receiver is None:
            return
        receiver.cancel()
        await asyncio.wait((receiver,))
        try:
            async with asyncio.timeout(within_s):
                if self._replies is not None:
                    await self._replies.aclose()
                if self._is_own:
                    await self._groups.delete(self._group)
        except (PopError, TimeoutError) as error:
            logger.warning("the inbox %s is left on the node: %s", self._group, error or "no answer")

    async def _replied(
        self, message: OutgoingMessage, reply: asyncio.Future[ReceivedMessage], timeout_s: float
    ) -> ReceivedMessage:
        sending = asyncio.ensure_future(self._publish(message, timeout_s))
        sending.add_done_callback(lambda sent: sent.cancelled() or sent.exception())  # the reply counts, where there is one
        try:
            # The reply may come although the node did not answer the sending.
            await asyncio.wait((sending, reply), return_when=asyncio.FIRST_COMPLETED)
            if not reply.done():
                await sending
            return await reply
        finally:
            sending.cancel()

    async def _publish(self, message: OutgoingMessage, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        first_s: float | None = None
        delays = RetryDelays()
        while True:
            try:
                await self._open_inbox()
                now_s = loop.time()
                age_s = 0.0 if first_s is None else now_s - first_s + self._timeout_s
                first_s = now_s if first_s is None else first_s
                left_s = max(deadline_s - now_s, 0.001)
                await self._send(replace(message, expire_after=left_s, deduplication_age=age_s))
                return
            except (NodeUnavailable, Overloaded):
                await asyncio.sleep(delays.next_s())

    async def _open_inbox(self) -> None:
        """Create the group of the inbox, and receive its messages, unless this is done."""
        async with self._opening:
            if self._receiver is None:
                await self._groups.create(self._group, self.topic, start="latest")
                self._replies = self._consume(self.topic, self._group)
                self._receiver = asyncio.get_running_loop().create_task(self._receive(self._replies))

    async def _receive(self, replies: Consumer) -> None:
        try:
            async for message in replies:
                # Nobody waits for the acknowledgement: without it the reply comes again, and nobody will wait for that.
                message.ack().add_done_callback(lambda acked: acked.cancelled() or acked.exception())
                waiting = self._open.get(message.correlation_data)
                if waiting is None or waiting.done():
                    logger.info("a reply on %s came too late, or twice: %s", message.topic, message.message_id)
                else:
                    waiting.set_result(message)
        except PopError as error:  # the group was deleted, or this client may not consume it
            self._receiver = None
            for waiting in self._open.values():
                if not waiting.done():
                    waiting.set_exception(error)
            with suppress(PopError):  # the error that ended it is the one that counts
                await replies.aclose()
