"""Drops messages that were handled before."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from penstock.pop.client.durations import Duration, positive_seconds
from penstock.pop.client.message import Message
from penstock.worker.context import CallNext, HandlerCall


class Deduplicate:
    """A middleware that calls the handler once for messages with one key within a time window. Repetitions count as handled.

    The window is in the memory of one process: a message that comes to another process, or after a restart, is handled again.
    Where that must not happen, keep the keys in the database that the handler writes to.

    Parameters:
        window: Time for which a key is remembered, in seconds or as a timedelta, above 0.
        key: Returns the key of a message; an empty key is never a repetition. By default the message id, which tells the second
            delivery of a message and not a second message.
        keys_max: Maximum number of keys in memory. The oldest are forgotten first.
    """

    def __init__(
        self, window: Duration, *, key: Callable[[Message], str] = lambda message: message.message_id, keys_max: int = 1_000_000
    ) -> None:
        if keys_max < 1:
            raise ValueError(f"keys_max is {keys_max}: use at least 1")
        self._window_s = positive_seconds(window, "window")
        self._key = key
        self._keys_max = keys_max
        self._seen: OrderedDict[str, float] = OrderedDict()

    async def __call__(self, call: HandlerCall, call_next: CallNext) -> Any:
        now_s = time.monotonic()
        while self._seen and next(iter(self._seen.values())) <= now_s - self._window_s:
            self._seen.popitem(last=False)
        keys = [self._key(message) for message in call.messages]
        fresh, found = [], set()
        for at, key in enumerate(keys):
            if not key or (key not in self._seen and key not in found):
                fresh.append(at)
                found.add(key)
        if not fresh:
            return None
        kept = HandlerCall([call.messages[at] for at in fresh], [call.bodies[at] for at in fresh], call.handler, call.group)
        result = await call_next(kept)
        for at in fresh:  # After a failure the next attempt must be handled.
            if keys[at]:
                self._seen[keys[at]] = now_s
                if len(self._seen) > self._keys_max:
                    self._seen.popitem(last=False)
        return result
