"""An operation of the admin API: its path, its role, the types of what it takes and answers, and what serves it.

The types are `msgspec.Struct`s. Requests are checked against them, and the OpenAPI document is made from them, so neither can
say something else than the code does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar

import msgspec

from penstock.access.subject import Subject

if TYPE_CHECKING:
    from penstock.store.store import Store

LIMIT_MAX: Final = 1_000
"""Items of one page."""

NUMBER_MAX: Final = 2**53
"""The largest integer that all readers of JSON hold exactly."""

NAME_CHARS_MAX: Final = 65_535
"""Characters of a topic, a filter or a client id. MQTT has no longer ones."""

LINE_BYTES_MAX: Final = 1024 * 1024
"""Bytes of the first line of a request, in which a name has up to twelve for each character."""

ANY_VERSION: Final = "*"
"""The version of a caller that changes whatever there is. No version is called so."""

T = TypeVar("T")
Item = TypeVar("Item")


class ApiRole(StrEnum):
    """What a caller must be. Each role may do what those before it may."""

    VIEWER = "viewer"
    """Sees names, numbers and states; no message bodies."""
    OPERATOR = "operator"
    """Also reads messages, and does what can be undone or what clients could do: kick, publish, pause, redrive."""
    ADMIN = "admin"
    """Also deletes data, bans, and changes options of the node."""

    @property
    def sufficient(self) -> frozenset[str]:
        """The roles that include this one."""
        roles = list(ApiRole)
        return frozenset(roles[roles.index(self) :])


class ApiError(Exception):
    """Raised for a request that is not served as asked. The message is for whoever sent it.

    Parameters:
        status: the status of the response.
    """

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


def not_found(what: str, name: str) -> ApiError:
    """Return the error for a thing that does not exist."""
    return ApiError(HTTPStatus.NOT_FOUND, f"there is no {what} {name[:200]!r}")


def check_leads(store: Store) -> None:
    """Raise ApiError on a replica that follows another one: only the leader appends records."""
    if store.replaying:
        raise ApiError(HTTPStatus.CONFLICT, "this replica follows another one and can't change anything; ask the leader")


class NoQuery(msgspec.Struct, forbid_unknown_fields=True):
    """The parameters of an operation that takes none."""


class PageQuery(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The parameters of every listing."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=LIMIT_MAX, description="Maximum number of items.")] = 100
    after: Annotated[
        str, msgspec.Meta(max_length=NAME_CHARS_MAX, description="`next` of the page before; empty for the first page.")
    ] = ""


class Done(msgspec.Struct):
    """The answer of an operation that has nothing else to say."""

    done: Literal[True] = True


@dataclass(slots=True)
class ApiCall:
    """A request that is checked, and may be served."""

    subject: Subject
    """Who asks."""
    path: Mapping[str, str]
    """The parts of the path that the operation names."""
    query: Any
    """Of the operation's type."""
    body: Any
    """Of the operation's type; None if it takes no body."""
    if_match: tuple[str, ...] = ()
    """The versions of the thing that the caller would change; empty if it did not say."""
    over: str = "admin"
    """How the call came, for the audit log."""
    noted: dict[str, object] = field(default_factory=dict)
    """Fields of the line in the audit log, besides the parts of the path."""

    def check_version(self, version: str) -> None:
        """Raise ApiError if the caller has seen another version of what it is about to change than the present one."""
        if self.if_match and ANY_VERSION not in self.if_match and version not in self.if_match:
            raise ApiError(
                HTTPStatus.PRECONDITION_FAILED,
                f"it has changed since it was read: its version is {version!r} and not "
                f"{' or '.join(self.if_match)[:80]!r}; read it again",
            )


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation: a method on a path."""

    id: str
    """Its name in the OpenAPI document and in the audit log, such as `kickClient`."""
    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"]
    path: str
    """Below `/api/v1`, with the names of its parts in braces, such as `/clients/{client_id}`."""
    role: ApiRole
    summary: str
    """A sentence for the reference."""
    serve: Callable[[ApiCall], Awaitable[Any]]
    """Returns the answer, of the type `answer`, or for a stream an iterator of them. It raises ApiError."""
    answer: Any
    """The type of the answer."""
    query: type[msgspec.Struct] = NoQuery
    """The type of the parameters."""
    body: Any = None
    """The type of the body; None if the operation takes none."""
    writes_audit: bool = False
    """Whether what it calls writes the line of a change into the audit log."""
    is_stream: bool = False
    """Whether the answer goes on until the caller hangs up, with a line of JSON for each `answer`."""

    @property
    def tag(self) -> str:
        """The resource that the operation belongs to."""
        return self.path.split("/")[1]

    @property
    def is_safe(self) -> bool:
        """Whether the operation changes nothing."""
        return self.method == "GET"
