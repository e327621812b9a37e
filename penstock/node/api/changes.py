"""What all changes over the admin API have in common: the node must serve, and the answer waits until the change is durable."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from hashlib import blake2b
from http import HTTPStatus
from typing import Any, Final

import orjson

from penstock.access.subject import Subject
from penstock.node.api.operation import ApiError, check_leads
from penstock.pop.errors import GroupBusy, GroupExists, GroupUnknown, Overloaded, PopError, ScheduleExists, ScheduleUnknown
from penstock.store.errors import TopicInvalid
from penstock.store.space.causer import Causer, source_of
from penstock.store.store import Store
from penstock.timer.errors import ListingInvalid, RecurrenceInvalid

VERSION_BYTES: Final = 8
"""Bytes of the hash that is a version."""

_STATUSES: Final[tuple[tuple[type[Exception], HTTPStatus], ...]] = (
    (GroupUnknown, HTTPStatus.NOT_FOUND),
    (ScheduleUnknown, HTTPStatus.NOT_FOUND),
    (GroupBusy, HTTPStatus.CONFLICT),
    (GroupExists, HTTPStatus.CONFLICT),
    (ScheduleExists, HTTPStatus.CONFLICT),
    (Overloaded, HTTPStatus.CONFLICT),
)
"""The status of each error that does not mean that the request is not valid."""


@contextmanager
def refusals() -> Iterator[None]:
    """Turn the errors of POP and of timers that are raised within into ApiErrors."""
    try:
        yield
    except (PopError, TopicInvalid, ListingInvalid, RecurrenceInvalid) as error:
        statuses = (status for kind, status in _STATUSES if isinstance(error, kind))
        raise ApiError(next(statuses, HTTPStatus.BAD_REQUEST), str(error)) from error


class DurableChanges:
    """Lets operations change what the log has.

    Parameters:
        store: of the node.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    @asynccontextmanager
    async def durable(self) -> AsyncIterator[None]:
        """Let the code within change something, and return when that is durable.

        Raises:
            ApiError: the node follows a leader, so that it changes nothing itself; or the code within has raised an error of
                POP or of timers.
        """
        check_leads(self._store)
        with refusals():
            yield
        await self._store.durable()


def causer_of(subject: Subject) -> Causer:
    """Return who is charged for what a caller of the admin API creates."""
    return Causer.of(subject.user, source_of(subject.address))


def version_of(values: Any) -> str:
    """Return the version of something that can be changed: a short hash of the values that a change would replace.

    Args:
        values: of types that JSON has.
    """
    return blake2b(orjson.dumps(values), digest_size=VERSION_BYTES).hexdigest()
