"""Dead letters over the admin API: listed with the reason of each, sent back to their group, or deleted.

The body of a dead letter is that of its message: `/messages/{message_id}/body`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from typing import Annotated, Final, NamedTuple

import msgspec

from penstock.node.api.changes import DurableChanges, refusals
from penstock.node.api.messagereader import MessageReader
from penstock.node.api.operation import LIMIT_MAX, ApiCall, ApiError, ApiRole, Operation, PageQuery
from penstock.pop.core.core import PopCore
from penstock.pop.core.deadletters import DeadLetter
from penstock.pop.core.sender import message_id
from penstock.pop.grpc.requests import position_of

LETTERS_AT_ONCE: Final = 32
"""Dead letters that are listed, redriven or deleted in one slice. The record of each may be read."""

ALL_MAX: Final = 10_000
"""Dead letters that one call redrives or deletes if it names none. A caller with more calls again."""


class DeadLetterShown(msgspec.Struct, kw_only=True):
    """A message that a group has failed to process."""

    message_id: str
    filter: Annotated[str, msgspec.Meta(description="By which the group got it; empty if the group was deleted since.")]
    topic: Annotated[str, msgspec.Meta(description="Empty if the message can't be read any more.")]
    reason: Annotated[str, msgspec.Meta(description="attempts_exhausted, unreadable, or forwarded (by a consumer).")]
    detail: Annotated[str, msgspec.Meta(description="What the consumer said, or why the last attempt failed.")]
    attempts: int
    failed_ms: int
    size_bytes: int


class DeadLetterPage(msgspec.Struct):
    """A page of dead letters, in the order in which their messages were stored."""

    items: list[DeadLetterShown]
    next: str | None


class DeadLettersNamed(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Which dead letters of a group are meant."""

    message_ids: Annotated[
        Annotated[list[str], msgspec.Meta(max_length=LIMIT_MAX)] | None,
        msgspec.Meta(description=f"Their messages; null for all, up to {ALL_MAX} of them."),
    ]


class DeadLettersDone(msgspec.Struct):
    """How many dead letters a call concerned."""

    dead_letters: int
    more: Annotated[bool, msgspec.Meta(description="Whether the group may have more, so that the caller must call again.")]


class _LetterPlace(NamedTuple):
    """A dead letter in the order of listings; pages begin after it."""

    position: int
    group_id: int
    seen: int
    """How many dead letters of the same message come up to here: one for each filter of the group."""


_BEGIN: Final = _LetterPlace(0, -1, 0)


class DeadLetterOperations:
    """Serves the dead letters of groups.

    Parameters:
        core: has the dead letters.
        reader: reads the topics of their messages.
        changes: waits until changes are durable.
    """

    def __init__(self, core: PopCore, reader: MessageReader, changes: DurableChanges) -> None:
        self._groups = core.groups
        self._letters = core.dead_letters
        self._reader = reader
        self._changes = changes

    def operations(self) -> Iterator[Operation]:
        """Yield the operations."""
        path = "/groups/{group}/dead-letters"
        yield Operation(
            "listDeadLetters",
            "GET",
            path,
            ApiRole.VIEWER,
            "List dead letters.",
            self.page,
            DeadLetterPage,
            PageQuery,
        )
        yield Operation(
            "redriveDeadLetters",
            "POST",
            f"{path}/redrive",
            ApiRole.OPERATOR,
            "Send dead letters back to their group as new messages.",
            self.redrive,
            DeadLettersDone,
            body=DeadLettersNamed,
        )
        yield Operation(
            "deleteDeadLetters",
            "POST",
            f"{path}/delete",
            ApiRole.ADMIN,
            "Delete dead letters.",
            self.delete,
            DeadLettersDone,
            body=DeadLettersNamed,
        )

    async def page(self, call: ApiCall) -> DeadLetterPage:
        """Return a page of dead letters."""
        asked: PageQuery = call.query
        name = self._known(call)
        begin = place = _place_of(asked.after)
        letters, has_more = list[DeadLetter](), True
        while has_more and len(letters) <= asked.limit:
            following, place, has_more = self._following(name, place)
            letters += following
            await asyncio.sleep(0)
        page = letters[: asked.limit]
        items: list[DeadLetterShown] = []
        for first in range(0, len(page), LETTERS_AT_ONCE):
            items += map(self._shown, page[first : first + LETTERS_AT_ONCE])
            await asyncio.sleep(0)
        return DeadLetterPage(items, _cursor_after(begin, page) if len(letters) > asked.limit else None)

    def _following(self, name: str, place: _LetterPlace) -> tuple[list[DeadLetter], _LetterPlace, bool]:
        """Return some dead letters after a place, the place of the last one, and whether there may be more."""
        count = LETTERS_AT_ONCE + place.seen
        letters = self._letters.list(name, place.position, count)
        following = [each for each in letters if (each.position, each.group_id) > (place.position, place.group_id)]
        if following:
            last = following[-1]
            place = _LetterPlace(last.position, last.group_id, sum(each.position == last.position for each in letters))
        return following, place, len(letters) == count and bool(following)

    async def redrive(self, call: ApiCall) -> DeadLettersDone:
        """Send dead letters back to their group."""
        return await self._end(call, self._letters.redrive)

    async def delete(self, call: ApiCall) -> DeadLettersDone:
        """Delete dead letters."""
        return await self._end(call, self._letters.purge)

    async def _end(self, call: ApiCall, end: Callable[[str, Sequence[int]], int]) -> DeadLettersDone:
        """Redrive or delete what a call names, in slices."""
        asked: DeadLettersNamed = call.body
        name = self._known(call)
        ended, place, has_more = 0, _BEGIN, asked.message_ids is None
        async with self._changes.durable():
            if asked.message_ids is not None:
                positions = [position_of(each) for each in asked.message_ids]
                for begin in range(0, len(positions), LETTERS_AT_ONCE):
                    ended += end(name, positions[begin : begin + LETTERS_AT_ONCE])
                    call.noted["dead_letters"] = ended
                    await asyncio.sleep(0)
            while has_more and ended < ALL_MAX:
                letters, place, has_more = self._following(name, place)
                ended += end(name, [each.position for each in letters])
                call.noted["dead_letters"] = ended
                await asyncio.sleep(0)
        return DeadLettersDone(ended, has_more)

    def _known(self, call: ApiCall) -> str:
        """Return the name of the group of a path. Raises ApiError if there is none."""
        with refusals():
            return self._groups.find(call.path["group"])[0].name

    def _shown(self, letter: DeadLetter) -> DeadLetterShown:
        return DeadLetterShown(
            message_id=message_id(letter.position),
            filter=self._letters.filter_of(letter),
            topic=self._reader.head_at(letter.position, letter.size)[0],
            reason=letter.reason.name.lower(),
            detail=letter.detail,
            attempts=letter.attempts,
            failed_ms=letter.failed_ms,
            size_bytes=letter.size,
        )


def _cursor_after(begin: _LetterPlace, page: Sequence[DeadLetter]) -> str:
    last = page[-1]
    seen = sum(each.position == last.position for each in page)
    seen += begin.seen if begin.position == last.position else 0
    return f"{last.position:016x}.{last.group_id}.{seen}"


def _place_of(cursor: str) -> _LetterPlace:
    if not cursor:
        return _BEGIN
    try:
        position, group_id, seen = cursor.split(".")
        place = _LetterPlace(int(position, 16), int(group_id), int(seen))
    except ValueError:
        place = _BEGIN
    if not (0 <= place.position < 2**63 and 0 <= place.group_id < 2**32 and 0 < place.seen < 2**32):
        raise ApiError(HTTPStatus.BAD_REQUEST, f"after is {cursor[:80]!r}, which is not `next` of a page; begin without it")
    return place
