"""Users and rules over the admin API, as the files of access control have them, without anything secret."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Annotated

import msgspec

from penstock.access.control import AccessControl
from penstock.access.policy import AccessPolicy
from penstock.access.rule import Rule
from penstock.access.subject import Subject
from penstock.node.api.operation import ApiCall, ApiError, ApiRole, Operation, PageQuery
from penstock.node.api.pages import in_slices, page_by_name

NOBODY = AccessPolicy()
"""The policy of a node without an access file, of which no user has a role."""


class UserQuery(PageQuery, forbid_unknown_fields=True, kw_only=True):
    """The parameters of the list of users."""

    contains: Annotated[str, msgspec.Meta(description="A text in the user name, in any case.")] = ""


class UserShown(msgspec.Struct, kw_only=True):
    """A user that the files name. A token or a plugin may vouch for others."""

    user: str
    has_password: Annotated[bool, msgspec.Meta(description="Whether the password file has the user.")]
    is_principal: Annotated[bool, msgspec.Meta(description="Whether the access file has a [[principal]] of this name.")]
    roles: Annotated[list[str], msgspec.Meta(description="That the access file gives the user.")]


class UserList(msgspec.Struct):
    """A page of the users, in the order of their names."""

    items: list[UserShown]
    next: str | None


class RuleShown(msgspec.Struct, kw_only=True):
    """A rule. It applies to whoever fits all of its conditions that are not empty, and of each one of the values."""

    number: Annotated[int, msgspec.Meta(description="Its place: the first rule that applies decides.")]
    source: Annotated[str, msgspec.Meta(description="Where it comes from, such as `rule 3` or `role 'viewer'`.")]
    allows: Annotated[bool, msgspec.Meta(description="Whether it allows; else it denies.")]
    actions: list[str]
    users: Annotated[list[str], msgspec.Meta(description="Names, in which `*` and `?` are wildcards.")]
    roles: list[str]
    clients: Annotated[list[str], msgspec.Meta(description="Client ids, in which `*` and `?` are wildcards.")]
    addresses: Annotated[list[str], msgspec.Meta(description="Networks.")]
    topics: Annotated[list[str], msgspec.Meta(description="Topic filters, with `%u` for the user and `%c` for the client id.")]
    groups: Annotated[list[str], msgspec.Meta(description="Names of groups, in which `*` and `?` are wildcards.")]


class RuleList(msgspec.Struct, kw_only=True):
    """A page of the rules in force, in their order."""

    items: list[RuleShown]
    next: str | None
    rules: Annotated[int, msgspec.Meta(description="All rules.")]
    no_match: Annotated[str, msgspec.Meta(description="allow or deny: what holds where no rule applies.")]


class AccessFileOperations:
    """Serves users and rules.

    Parameters:
        access: of the node.
    """

    def __init__(self, access: AccessControl) -> None:
        self._access = access

    def operations(self) -> Iterator[Operation]:
        """Yield the operations."""
        viewer = ApiRole.VIEWER
        users, rules = "List the users that the files of access control name.", "List the rules of access control in force."
        yield Operation("listUsers", "GET", "/access/users", viewer, users, self.users, UserList, UserQuery)
        yield Operation("listRules", "GET", "/access/rules", viewer, rules, self.rules, RuleList, PageQuery)

    async def users(self, call: ApiCall) -> UserList:
        """Return a page of the users."""
        query: UserQuery = call.query
        policy = self._access.policy or NOBODY
        passwords: Mapping[str, str] = self._access.passwords.hashes if self._access.passwords is not None else {}
        text = query.contains.casefold()
        names = {**dict.fromkeys(passwords), **dict.fromkeys(policy.principals)}
        page, cursor = await page_by_name(names, query, lambda name, _: text in name.casefold())
        shown = (
            UserShown(
                user=name,
                has_password=name in passwords,
                is_principal=name in policy.principals,
                roles=sorted(policy.with_roles(Subject(name)).roles),
            )
            for name, _ in page
        )
        return UserList(await in_slices(shown), cursor)

    async def rules(self, call: ApiCall) -> RuleList:
        """Return a page of the rules."""
        query: PageQuery = call.query
        if query.after and not (query.after.isascii() and query.after.isdecimal()):
            raise ApiError(HTTPStatus.BAD_REQUEST, f"`after` is {query.after[:80]!r}, but must be the number of a rule")
        policy = self._access.policy
        rules = policy.rules.rules if policy is not None else ()
        begin = min(int(query.after[:9] or 0), len(rules))
        end = min(begin + query.limit, len(rules))
        items = await in_slices(_shown(number, rules[number - 1]) for number in range(begin + 1, end + 1))
        allows = policy is None or policy.allows_unmatched
        next_after = str(end) if end < len(rules) else None
        return RuleList(items=items, next=next_after, rules=len(rules), no_match="allow" if allows else "deny")


def _shown(number: int, rule: Rule) -> RuleShown:
    who = rule.who
    return RuleShown(
        number=number,
        source=rule.source,
        allows=rule.is_allowing,
        actions=list(rule.actions),
        users=[who.name] if who.name else list(who.users),
        roles=list(who.roles),
        clients=list(who.clients),
        addresses=[str(network) for network in who.addresses],
        topics=list(rule.topics),
        groups=list(rule.groups),
    )
