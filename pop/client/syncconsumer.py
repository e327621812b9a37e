"""An iterator over the messages of a group, for threads."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Generator
from contextlib import suppress
from typing import TYPE_CHECKING

from penstock.pop.client.calls import SyncCalls
from penstock.pop.client.requests import attempt_ids
from penstock.pop.client.retrydelays import RetryDelays
from penstock.pop.client.syncmessage import SyncMessage, SyncSettlements
from penstock.pop.client.tracing import Tracing, now_ns
from penstock.pop.client.unseen import UnseenMessages, take_surplus
from penstock.pop.errors import NodeUnavailable, Overloaded, PopError
from penstock.pop.proto import pop_pb2 as pb

if TYPE_CHECKING:
    from penstock.pop.proto.pop_pb2_grpc import PopServiceStub

logger = logging.getLogger("penstock.client")


class SyncConsumer:
    """Messages of a group for one loop of a thread, one pop at a time: `SyncClient.consume`.

    A second thread returns the messages that the loop will not reach in time. It runs only while several messages wait.

    Parameters:
        call: Performs a call.
        stub: The node.
        request: The pop. Its `messages_max` is the maximum for each.
        tracing: Makes spans, if there is one.
    """

    def __init__(self, call: SyncCalls, stub: PopServiceStub, request: pb.PopRequest, tracing: Tracing | None = None) -> None:
        self._call = call
        self._stub = stub
        self._request = request
        self._batch = request.messages_max
        self._settlements = SyncSettlements(call, stub, request.group, tracing)
        self._unseen: UnseenMessages[SyncMessage] = UnseenMessages(self._batch, request.invisible_ms / 1000)
        self._changed = threading.Condition()
        """Guards `_unseen`. Notified when messages wait again, and when the loop ends."""
        self._watcher: threading.Thread | None = None
        self._ended = False
        self._attempts = attempt_ids()
        request.attempt_id = next(self._attempts)
        self._is_polling = False
        """True while a poll is under way. If it stays so, something such as Ctrl-C cut the poll short."""

    def messages(self) -> Generator[SyncMessage]:
        """Yield messages without end. While the node is away, wait for it. Return unseen messages when the loop ends."""
        delays = RetryDelays()
        try:
            while True:
                with self._changed:
                    message = self._unseen.take(time.monotonic())
                if message is not None:
                    began_s = time.monotonic()
                    yield message
                    with self._changed:
                        self._unseen.handled(time.monotonic() - began_s)
                    continue
                self._return_surplus()
                try:
                    self._pop()
                except (NodeUnavailable, Overloaded) as error:
                    self._is_polling = False
                    wait_s = delays.next_s()
                    logger.warning("group %s: %s; the consumer polls again in %.2f s", self._request.group, error, wait_s)
                    time.sleep(wait_s)
                    continue
                delays.reset()
        finally:
            with self._changed:
                self._ended = True
                left = self._unseen.clear()
                self._changed.notify()
            if self._is_polling:
                left += self._answered_meanwhile()
            self._give_back(left)

    def _pop(self) -> None:
        with self._changed:
            self._request.messages_max = min(max(self._unseen.room(time.monotonic()), 1), self._batch)
        began_ns = now_ns()
        self._is_polling = True
        answer = self._call(self._stub.Pop, self._request, self._request.wait_ms)
        self._is_polling = False
        if not answer.messages:
            return
        self._request.attempt_id = next(self._attempts)
        if self._settlements.tracing is not None:
            self._settlements.tracing.received(self._request.group, self._request.filter, answer.messages, began_ns)
        with self._changed:
            self._unseen.invisible_s = answer.invisible_ms / 1000
            received = [SyncMessage(each, self._settlements) for each in answer.messages]
            self._unseen.add(received, time.monotonic())
            if len(received) > 1:
                if self._watcher is None:
                    self._watcher = threading.Thread(target=self._watch, name="penstock-consumer", daemon=True)
                    self._watcher.start()
                self._changed.notify()

    def _answered_meanwhile(self) -> list[SyncMessage]:
        """Return the messages that a poll had got when it was cut short; or one that is visible now."""
        self._request.wait_ms, self._request.messages_max = 0, 1
        try:
            answer = self._call(self._stub.Pop, self._request, 0)
        except PopError:
            return []  # What the poll may have got comes back when its invisible time is over.
        return [SyncMessage(each, self._settlements) for each in answer.messages]

    def _watch(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or len(self._unseen) > 0)
                self._changed.wait_for(lambda: self._ended, self._unseen.check_after_s())
                if self._ended:
                    return
            self._return_surplus()

    def _return_surplus(self) -> None:
        with self._changed:
            surplus = take_surplus(self._unseen, self._request.group, time.monotonic(), "stopped the process")
        if surplus:
            self._give_back(surplus)

    def _give_back(self, messages: list[SyncMessage]) -> None:
        """Return messages that the application has not seen. If that fails, they come back at their deadline."""
        with suppress(PopError):
            self._settlements.give_back([message.handle for message in messages])
