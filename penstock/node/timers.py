"""Pending delayed messages, as `/api/v1/timers` of the admin listener shows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from penstock.pop.core.sender import message_id
from penstock.store.topics import EXCERPT_CHARS_MAX
from penstock.timer.delayed import DelayedMessages
from penstock.timer.errors import ListingInvalid
from penstock.timer.listing import ROWS_DEFAULT, TimerListing, TimerQuery

_NUMBERS: Final = {"from_ms": 0, "before_ms": 0, "limit": ROWS_DEFAULT}
"""Parameters that are whole numbers, and what they are by default."""
_TEXTS: Final = {"filter": "#", "key": "", "page_token": ""}


async def timers_of(delayed: DelayedMessages, listing: TimerListing, parameters: Mapping[str, str]) -> dict[str, Any]:
    """Return how many messages are pending and due soon, and a page of them, of types that orjson can encode.

    It has no recall handles, with which whoever may only look could cancel the messages.

    Args:
        delayed, listing: of the node.
        parameters: of the request: `filter`, `key`, `from_ms`, `before_ms`, `limit`, `page_token`, as in `TimerCalls.list`.

    Raises:
        ListingInvalid, TopicInvalid: a parameter is not valid.
    """
    unknown = {*parameters} - {*_TEXTS, *_NUMBERS}
    if unknown:
        names = ", ".join((*_TEXTS, *_NUMBERS))
        raise ListingInvalid(f"there is no parameter {min(unknown)[:EXCERPT_CHARS_MAX]!r}: use {names}")
    texts = {name: parameters.get(name, default) for name, default in _TEXTS.items()}
    numbers = {name: _number(name, parameters.get(name, str(default))) for name, default in _NUMBERS.items()}
    query = TimerQuery(texts["filter"], texts["key"], numbers["from_ms"], numbers["before_ms"])
    page = await listing.page(query, texts["page_token"], numbers["limit"])
    due = delayed.due_counts()
    return {
        "pending": len(delayed),
        "due_minute": due.minute,
        "due_hour": due.hour,
        "due_day": due.day,
        "timers": [
            {
                "message_id": message_id(timer.position),
                "topic": timer.topic,
                "key": timer.key,
                "deliver_at_ms": timer.due_ms,
                "size": timer.size,
                "user": timer.causer.user,
                "source": timer.causer.source,
                "client_id": timer.causer.client,
            }
            for timer in page.timers
        ],
        "next_page_token": page.next_token,
    }


def _number(name: str, text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise ListingInvalid(f"{name} is {text[:EXCERPT_CHARS_MAX]!r}, but must be a whole number from 0 up")
    return int(text)
