"""Access control over the admin API: bans, kicks, tests of rules, and a reload of the files."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from http import HTTPStatus
from typing import Annotated, Literal

import msgspec

from penstock.access.actions import ACTIONS
from penstock.access.bans import KINDS, Ban, Kind, network_name
from penstock.access.control import AccessControl
from penstock.access.errors import AccessInvalid
from penstock.access.explain import explained
from penstock.access.subject import Subject
from penstock.node.api.operation import ApiCall, ApiError, ApiRole, Operation, PageQuery, not_found
from penstock.node.api.pages import page_in_order

Kick = Callable[[Kind, str], int]
"""Ends what the clients with a user name, a client id or an address do; returns how much."""


class BanRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A ban to be made."""

    kind: Literal["user", "client", "address"]
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=1_000, description="User, client id, address or network.")]
    for_ms: Annotated[int, msgspec.Meta(ge=0, le=2**53, description="How long it lasts; 0 for ever.")] = 0
    why: Annotated[str, msgspec.Meta(max_length=1_000, description="A note for other operators.")] = ""


class BanShown(msgspec.Struct, kw_only=True):
    """A ban."""

    kind: str
    name: str
    since_ms: int
    until_ms: Annotated[int, msgspec.Meta(description="When it ends; 0 for never.")]
    why: str


class BanList(msgspec.Struct):
    """A page of bans, in the order of kind and name."""

    items: list[BanShown]
    next: str | None


class KickRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Whose connections are to be ended."""

    kind: Literal["user", "client", "address"]
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=1_000)]


class Kicked(msgspec.Struct):
    """What was ended."""

    clients: Annotated[int, msgspec.Meta(description="MQTT connections.")]
    calls: Annotated[int, msgspec.Meta(description="Calls and streams over gRPC.")]


class RightQuery(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The parameters of a test of a right."""

    user: str = ""
    action: Annotated[str, msgspec.Meta(description=f"One of {', '.join(ACTIONS)}.")]
    name: Annotated[str, msgspec.Meta(description="Topic, topic filter, or name of a group.")]
    client: str = ""
    address: str = ""
    role: Annotated[str, msgspec.Meta(description="Roles of a token or a certificate, separated by commas.")] = ""


class RightShown(msgspec.Struct, kw_only=True):
    """Whether a right is there, and why."""

    allowed: bool
    why: str
    roles: list[str] = []


class AccessReloaded(msgspec.Struct):
    """What is in force after a reload."""

    rules: int
    users: int
    bans: int


class AccessOperations:
    """Serves access control.

    Parameters:
        access: of the node.
        reload: reads all files again that may change while the node runs, for a caller and over what. Raises AccessInvalid.
        rechecked: returns when a change is in force for all clients.
        disconnect: ends the connections of MQTT clients.
        end_calls: ends calls and streams over gRPC.
    """

    def __init__(
        self,
        access: AccessControl,
        reload: Callable[[Subject, str], None],
        rechecked: Callable[[], Awaitable[None]],
        disconnect: Kick,
        end_calls: Kick,
    ) -> None:
        self._access = access
        self._reload_files = reload
        self._rechecked = rechecked
        self._disconnect = disconnect
        self._end_calls = end_calls

    def operations(self) -> Iterator[Operation]:
        """Yield the operations."""
        yield Operation("listBans", "GET", "/access/bans", ApiRole.VIEWER, "List the bans.", self.bans, BanList, PageQuery)
        yield Operation(
            "ban",
            "POST",
            "/access/bans",
            ApiRole.ADMIN,
            "Refuse a user, a client id or an address, and disconnect whom it concerns.",
            self.ban,
            BanShown,
            body=BanRequest,
            writes_audit=True,
        )
        yield Operation(
            "liftBan",
            "DELETE",
            "/access/bans/{kind}/{name}",
            ApiRole.ADMIN,
            "Lift a ban.",
            self.lift,
            BanShown,
            writes_audit=True,
        )
        yield Operation(
            "kick",
            "POST",
            "/access/kick",
            ApiRole.OPERATOR,
            "Disconnect clients, which may connect again.",
            self.kick,
            Kicked,
            body=KickRequest,
        )
        yield Operation(
            "testRight",
            "GET",
            "/access/test",
            ApiRole.VIEWER,
            "Say whether somebody may do something, and which rule decides.",
            self.test,
            RightShown,
            query=RightQuery,
        )
        yield Operation(
            "reloadAccess",
            "POST",
            "/access/reload",
            ApiRole.ADMIN,
            "Read rules, users, keys and certificates again, if all are valid.",
            self.reload,
            AccessReloaded,
            writes_audit=True,
        )

    async def bans(self, call: ApiCall) -> BanList:
        """Return a page of the bans that have not ended."""
        bans = self._access.bans

        def row_of(_key: str, ban: Ban) -> BanShown | None:
            return None if bans.has_ended(ban) else _shown(ban)

        return BanList(*await page_in_order(call.query, bans.at_or_after, row_of))

    async def ban(self, call: ApiCall) -> BanShown:
        """Make a ban."""
        asked: BanRequest = call.body
        call.noted |= {"of": asked.kind, "name": asked.name}
        shown = await make_ban(self._access, asked, call)
        await self._rechecked()
        return shown

    async def lift(self, call: ApiCall) -> BanShown:
        """Lift a ban."""
        kind, name = _kind(call.path["kind"]), call.path["name"]
        try:
            return _shown(await self._access.lift(kind, name, by=call.subject, over=call.over))
        except AccessInvalid as error:
            raise ApiError(HTTPStatus.NOT_FOUND, str(error)) from error
        except OSError as error:
            raise _not_saved(error) from error

    async def kick(self, call: ApiCall) -> Kicked:
        """Disconnect clients."""
        asked: KickRequest = call.body
        call.noted |= {"of": asked.kind, "name": asked.name}
        name = asked.name
        if asked.kind == "address":
            try:
                name = network_name(name)
            except AccessInvalid as error:
                raise ApiError(HTTPStatus.BAD_REQUEST, str(error)) from error
        kicked = Kicked(self._disconnect(asked.kind, name), self._end_calls(asked.kind, name))
        call.noted |= {"clients": kicked.clients, "calls": kicked.calls}
        return kicked

    async def test(self, call: ApiCall) -> RightShown:
        """Say whether somebody may do something."""
        asked: RightQuery = call.query
        if asked.action not in ACTIONS:
            raise ApiError(HTTPStatus.BAD_REQUEST, f"there is no action {asked.action[:80]!r}; use {', '.join(ACTIONS)}")
        policy = self._access.policy
        if policy is None:
            return RightShown(allowed=True, why="the node has no access file (access.file), so nothing is restricted")
        roles = frozenset(filter(None, asked.role.split(",")))
        subject = Subject(asked.user, roles, asked.client, asked.address)
        return RightShown(**explained(policy, subject, asked.action, asked.name))

    async def reload(self, call: ApiCall) -> AccessReloaded:
        """Read the files again."""
        try:
            self._reload_files(call.subject, call.over)
        except AccessInvalid as error:
            raise ApiError(HTTPStatus.CONFLICT, f"nothing has changed: {error}") from error
        await self._rechecked()
        policy, passwords = self._access.policy, self._access.passwords
        return AccessReloaded(
            len(policy.rules.rules) if policy is not None else 0,
            len(passwords.hashes) if passwords is not None else 0,
            len(self._access.bans),
        )


async def make_ban(access: AccessControl, asked: BanRequest, call: ApiCall) -> BanShown:
    """Make the ban that a call asks for, and return it. Raises ApiError if it can't be made or saved."""
    try:
        return _shown(
            await access.ban(asked.kind, asked.name, for_ms=asked.for_ms, why=asked.why, by=call.subject, over=call.over)
        )
    except AccessInvalid as error:
        raise ApiError(HTTPStatus.BAD_REQUEST, str(error)) from error
    except OSError as error:
        raise _not_saved(error) from error


def _shown(ban: Ban) -> BanShown:
    return BanShown(kind=ban.kind, name=ban.name, since_ms=ban.since_ms, until_ms=ban.until_ms, why=ban.why)


def _kind(text: str) -> Kind:
    for kind in KINDS:
        if kind == text:
            return kind
    raise not_found("kind of ban", text)


def _not_saved(error: OSError) -> ApiError:
    return ApiError(
        HTTPStatus.SERVICE_UNAVAILABLE,
        f"that is in force until the node ends, but the bans can't be saved ({error}); mend the disk, and ask again",
    )
