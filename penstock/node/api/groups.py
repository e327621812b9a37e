"""Consumer groups over the admin API: their backlogs, their consumers and their settings, and where they go on reading.

A group that consumes several filters is one group for each of them. Operations on a group concern all its filters, or the one
that the parameter `filter` names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from http import HTTPStatus
from itertools import islice
from typing import Annotated, Any, Final, Literal

import msgspec

from penstock.gateway.delivery.shared_subscriptions import SharedSubscriptions
from penstock.node.api.changes import DurableChanges, causer_of, refusals, version_of
from penstock.node.api.operation import LIMIT_MAX, NUMBER_MAX, ApiCall, ApiError, ApiRole, Done, Operation, PageQuery
from penstock.node.api.pages import in_slices, page_by_name
from penstock.pop.core.core import PopCore
from penstock.pop.core.group import ConsumerGroup
from penstock.pop.core.groups import GroupSnapshot, ResetTo, snapshots
from penstock.pop.core.settings import DEFAULTS, ConsumerGroupSettings, ExponentialBackoff
from penstock.pop.grpc.requests import position_of
from penstock.store.space.causer import Causer
from penstock.store.store import Store

SNAPSHOTS_AT_ONCE: Final = 8
"""Groups that are described in one slice. Each takes two reads of the log and up to three seeks in the index."""

CHECKPOINTS_AT_ONCE: Final = 1_024
"""Open checkpoints that are looked at in one slice."""

OF_NODE: Final = ("attempts_max", "backoff", "invisible_ms", "in_flight_max")
"""Settings for which the node's option stands in where a group has none of its own."""

Number = Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX)]
"""A number in a request. The core knows the bounds of each."""


class GroupQuery(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The parameters of an operation on a group."""

    filter: Annotated[str, msgspec.Meta(description="One filter of the group; empty for all of them.")] = ""


class GroupDeleteQuery(GroupQuery, forbid_unknown_fields=True, kw_only=True):
    """The parameters of the deletion of a group."""

    force: Annotated[
        bool,
        msgspec.Meta(
            description="Whether the group is deleted although it has consumers or messages in flight. One that MQTT clients "
            "share is created anew at once."
        ),
    ] = False


class GroupPageQuery(PageQuery, forbid_unknown_fields=True, kw_only=True):
    """The parameters of a listing of groups."""

    contains: Annotated[str, msgspec.Meta(max_length=1_000, description="Text that the name or the filter contains.")] = ""
    temporary: Annotated[
        bool, msgspec.Meta(description="Whether groups are listed that subscriptions have created, and that end with them.")
    ] = True


class GroupListed(msgspec.Struct, kw_only=True):
    """A group on one filter."""

    group: str
    filter: str
    visible: Annotated[int, msgspec.Meta(description="Messages that a pop can get now; an upper bound if the group selects.")]
    retries: Annotated[int, msgspec.Meta(description="How many of the visible messages were handed out before.")]
    in_flight: Annotated[int, msgspec.Meta(description="Messages that were handed out and not acknowledged.")]
    delayed: Annotated[int, msgspec.Meta(description="How many of those in flight wait for a delay or their back-off.")]
    parked: Annotated[int, msgspec.Meta(description="Messages that wait for their message group.")]
    dead_letters: int
    oldest_age_ms: Annotated[
        int | None, msgspec.Meta(description="Age of the oldest message that was not handed out; null if there is none.")
    ]
    waiting_polls: Annotated[int, msgspec.Meta(description="Calls of consumers that wait for messages.")]
    mqtt_members: Annotated[int, msgspec.Meta(description="Connected MQTT clients that share the subscription.")]
    paused: bool
    temporary: Annotated[bool, msgspec.Meta(description="Whether a subscription has created the group, which ends with it.")]


class GroupPage(msgspec.Struct):
    """A page of groups, in the order of name and filter."""

    items: list[GroupListed]
    next: str | None


class BackoffRule(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """How long a message waits after a failed attempt: a list of waits, or a wait that grows by a factor."""

    list_ms: Annotated[
        list[Number] | None, msgspec.Meta(description="The wait after each attempt. The last one holds for all later attempts.")
    ] = None
    min_ms: Number | None = None
    max_ms: Number | None = None
    factor: float = 2.0


class GroupSettingsShown(msgspec.Struct, kw_only=True):
    """The settings that apply to a group."""

    attempts_max: int
    backoff: BackoffRule
    invisible_ms: int
    in_flight_max: int
    fifo: bool
    expression: str
    expression_type: Literal["tag", "sql"]
    of_node: Annotated[list[str], msgspec.Meta(description="Which of them are the node's options, because nothing was set.")]


class GroupShown(GroupListed, kw_only=True):
    """A group on one filter, with its settings."""

    oldest_in_flight_age_ms: Annotated[
        int | None, msgspec.Meta(description="Age of the oldest open delivery; null if there is none.")
    ]
    next_offset: Annotated[int, msgspec.Meta(description="Offset after the last entry of the group's queue.")]
    cursor: Annotated[int, msgspec.Meta(description="Offset of the first message that was not handed out.")]
    resets: int
    settings: GroupSettingsShown


class GroupFilters(msgspec.Struct, kw_only=True):
    """A group on each of its filters."""

    group: str
    items: list[GroupShown]
    version: str


class GroupSettingsChange(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Settings to change. Those that are left out stay as they are; null stands for the node's option."""

    attempts_max: int | msgspec.UnsetType | None = msgspec.UNSET
    backoff: BackoffRule | msgspec.UnsetType | None = msgspec.UNSET
    invisible_ms: int | msgspec.UnsetType | None = msgspec.UNSET
    in_flight_max: int | msgspec.UnsetType | None = msgspec.UNSET
    fifo: bool | msgspec.UnsetType = msgspec.UNSET
    expression: str | msgspec.UnsetType = msgspec.UNSET
    expression_type: Literal["tag", "sql"] | msgspec.UnsetType = msgspec.UNSET


class GroupCreate(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A group to create on one filter."""

    group: str
    filter: str
    start: Annotated[
        Literal["earliest", "latest"],
        msgspec.Meta(description="Where it begins: with all messages that are still there, or with those from now on."),
    ] = "earliest"
    start_at_ms: Annotated[
        Number | None, msgspec.Meta(description="In place of `start`: with messages that were stored at this time or later.")
    ] = None
    settings: GroupSettingsChange = GroupSettingsChange()


class GroupReset(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Where a group begins again. Exactly one of the fields must be given."""

    end: Annotated[
        Literal["earliest", "latest"] | None,
        msgspec.Meta(description="`earliest` for all messages that are still there, `latest` for those that come from now on."),
    ] = None
    time_ms: Annotated[Number | None, msgspec.Meta(description="Messages that were stored at this time or later.")] = None
    message_id: Annotated[
        str | None, msgspec.Meta(description="Messages that came into the queue when this one was stored, or later.")
    ] = None
    offset: Annotated[Number | None, msgspec.Meta(description="Messages from this offset of the group's queue on.")] = None


class GroupMember(msgspec.Struct, kw_only=True):
    """A consumer of a group: a call that waits for messages, or an MQTT client."""

    filter: str
    over: Literal["pop", "mqtt"]
    user: Annotated[str, msgspec.Meta(description="Empty if nothing vouches for one.")]
    address: Annotated[str, msgspec.Meta(description="Address or network; `local` for loopback; empty if it is not known.")]
    client_id: Annotated[str, msgspec.Meta(description="Of an MQTT client.")]
    messages_max: Annotated[int | None, msgspec.Meta(description="How many messages the call wants at most.")]


class GroupMembers(msgspec.Struct, kw_only=True):
    """The consumers that are known now. A consumer that handles messages, and does not wait for any, is not known."""

    items: list[GroupMember]
    more: Annotated[bool, msgspec.Meta(description=f"Whether there are more than {LIMIT_MAX}, which are left out.")]


class GroupOperations:
    """Serves the groups.

    Parameters:
        core: has the groups.
        shared: knows the MQTT clients of the groups that are shared subscriptions.
        store: has the messages.
        changes: waits until changes are durable.
    """

    def __init__(self, core: PopCore, shared: SharedSubscriptions, store: Store, changes: DurableChanges) -> None:
        self._groups = core.groups
        self._checkpoints = core.checkpoints
        self._shared = shared
        self._store = store
        self._changes = changes

    def operations(self) -> Iterator[Operation]:
        """Yield the operations."""
        viewer, operator, admin, one = ApiRole.VIEWER, ApiRole.OPERATOR, ApiRole.ADMIN, "/groups/{group}"
        query: dict[str, Any] = {"query": GroupQuery}
        yield Operation(
            "listGroups", "GET", "/groups", viewer, "List groups with their backlogs.", self.page, GroupPage, GroupPageQuery
        )
        yield Operation(
            "createGroup",
            "POST",
            "/groups",
            operator,
            "Create a group, unless it exists with the same settings.",
            self.create,
            GroupFilters,
            body=GroupCreate,
        )
        yield Operation("getGroup", "GET", one, viewer, "Show a group with its settings.", self.show, GroupFilters, **query)
        yield Operation(
            "listGroupMembers",
            "GET",
            f"{one}/members",
            viewer,
            "List the consumers of a group that wait for messages.",
            self.members,
            GroupMembers,
            **query,
        )
        yield Operation(
            "changeGroup",
            "PATCH",
            one,
            admin,
            "Change settings of a group.",
            self.change,
            GroupFilters,
            body=GroupSettingsChange,
            **query,
        )
        yield Operation(
            "pauseGroup",
            "POST",
            f"{one}/pause",
            operator,
            "Hand out no messages.",
            self.pause,
            GroupFilters,
            **query,
        )
        yield Operation(
            "resumeGroup", "POST", f"{one}/resume", operator, "End the pause of a group.", self.resume, GroupFilters, **query
        )
        yield Operation(
            "resetGroup",
            "POST",
            f"{one}/reset",
            admin,
            "Let a group begin again elsewhere; its retries are forgotten.",
            self.reset,
            GroupFilters,
            body=GroupReset,
            **query,
        )
        yield Operation(
            "purgeGroup",
            "POST",
            f"{one}/purge",
            admin,
            "Skip all messages that a group has not acknowledged yet.",
            self.purge,
            GroupFilters,
            **query,
        )
        yield Operation(
            "deleteGroup",
            "DELETE",
            one,
            admin,
            "Delete a group that nobody uses, and its dead letters unless another group consumes them.",
            self.delete,
            Done,
            query=GroupDeleteQuery,
        )

    async def page(self, call: ApiCall) -> GroupPage:
        """Return a page of groups."""
        asked: GroupPageQuery = call.query
        named = await in_slices((f"{group.name}/{group.filter}", group) for group in list(self._groups))

        def is_wanted(name: str, group: ConsumerGroup) -> bool:
            return asked.contains in name and (asked.temporary or not group.settings.is_temporary)

        page, after = await page_by_name(dict(named), asked, is_wanted)
        items: list[GroupListed] = []
        for begin in range(0, len(page), SNAPSHOTS_AT_ONCE):
            groups = [group for _, group in page[begin : begin + SNAPSHOTS_AT_ONCE] if not group.is_deleted]
            items += [GroupListed(**self._figures(snapshot)) for snapshot in snapshots(groups, {}, self._store)]
            await asyncio.sleep(0)
        return GroupPage(items, after)

    async def create(self, call: ApiCall) -> GroupFilters:
        """Create a group."""
        asked: GroupCreate = call.body
        call.noted |= {"group": asked.group, "filter": asked.filter}
        start = asked.start_at_ms or asked.start
        async with self._changes.durable():
            settings = _changed(DEFAULTS, asked.settings)
            group = self._groups.create(asked.group, asked.filter, start, settings, causer_of(call.subject))
        return await self._shown(asked.group, [group])

    async def show(self, call: ApiCall) -> GroupFilters:
        """Return a group on each of its filters."""
        return await self._shown(call.path["group"], self._named(call))

    async def members(self, call: ApiCall) -> GroupMembers:
        """Return the consumers of a group that are known."""
        items = list(islice(self._members(self._named(call)), LIMIT_MAX + 1))
        return GroupMembers(items=items[:LIMIT_MAX], more=len(items) > LIMIT_MAX)

    async def change(self, call: ApiCall) -> GroupFilters:
        """Change settings."""
        asked: GroupSettingsChange = call.body
        self._check_version(call)
        call.noted["settings"] = msgspec.to_builtins(asked)
        async with self._changes.durable():
            groups = self._groups.update(call.path["group"], call.query.filter, lambda settings: _changed(settings, asked))
        return await self._shown(call.path["group"], groups)

    async def pause(self, call: ApiCall) -> GroupFilters:
        """Let pops get nothing."""
        async with self._changes.durable():
            groups = self._groups.pause(call.path["group"], call.query.filter)
        return await self._shown(call.path["group"], groups)

    async def resume(self, call: ApiCall) -> GroupFilters:
        """End a pause."""
        async with self._changes.durable():
            groups = self._groups.resume(call.path["group"], call.query.filter)
        return await self._shown(call.path["group"], groups)

    async def reset(self, call: ApiCall) -> GroupFilters:
        """Let a group begin again elsewhere."""
        asked: GroupReset = call.body
        with refusals():
            position = position_of(asked.message_id) if asked.message_id is not None else None
        return await self._reset(call, ResetTo(asked.end, asked.time_ms, position, asked.offset))

    async def purge(self, call: ApiCall) -> GroupFilters:
        """Let a group go on with the messages that come from now on."""
        return await self._reset(call, ResetTo("latest"))

    async def delete(self, call: ApiCall) -> Done:
        """Delete a group."""
        self._check_version(call)
        asked: GroupDeleteQuery = call.query
        async with self._changes.durable():
            if not asked.force:
                for group in self._groups.find(call.path["group"], asked.filter):
                    self._check_unused(group)
            self._groups.delete(call.path["group"], asked.filter)
        return Done()

    def _check_unused(self, group: ConsumerGroup) -> None:
        """Raise ApiError if a group has consumers or messages in flight."""
        shared = self._shared.get(group.name, group.filter)
        members = shared.count if shared is not None else 0
        waiting = sum(isinstance(poll.caller, Causer) for poll in group.polls)
        if members or waiting or group.in_flight:
            raise ApiError(
                HTTPStatus.CONFLICT,
                f"the group {group.name[:200]!r} on {group.filter[:200]!r} is in use: {members} MQTT clients share it, "
                f"{waiting} calls wait for messages, {group.in_flight} messages are in flight; "
                "stop its consumers, or give force=true",
            )

    async def _reset(self, call: ApiCall, to: ResetTo) -> GroupFilters:
        self._check_version(call)
        call.noted |= {name: value for name, value in to._asdict().items() if value is not None}
        async with self._changes.durable():
            groups = self._groups.reset(call.path["group"], call.query.filter, to)
        return await self._shown(call.path["group"], groups)

    def _named(self, call: ApiCall) -> list[ConsumerGroup]:
        """Return the group of a path on the filters that the query names. Raises ApiError."""
        with refusals():
            groups = self._groups.find(call.path["group"], call.query.filter)
        if len(groups) > LIMIT_MAX:
            raise ApiError(
                HTTPStatus.CONFLICT,
                f"the group consumes {len(groups)} filters, and one call shows at most {LIMIT_MAX}; give one as `filter`",
            )
        return groups

    def _check_version(self, call: ApiCall) -> None:
        """Raise ApiError if the caller has seen another version of the group than the present one."""
        call.check_version(_version(self._named(call)) if call.if_match else "")

    async def _shown(self, name: str, groups: list[ConsumerGroup]) -> GroupFilters:
        oldest_ms = await self._oldest_pops_ms({group.id for group in groups if group.in_flight})
        items: list[GroupShown] = []
        for begin in range(0, len(groups), SNAPSHOTS_AT_ONCE):
            now_ms = self._store.now_ms()
            for snapshot in snapshots(groups[begin : begin + SNAPSHOTS_AT_ONCE], {}, self._store):
                group = snapshot.group
                items.append(
                    GroupShown(
                        **self._figures(snapshot),
                        oldest_in_flight_age_ms=now_ms - oldest_ms[group.id] if group.id in oldest_ms else None,
                        next_offset=group.queue.next_offset,
                        cursor=group.cursor,
                        resets=group.epoch,
                        settings=_settings(group),
                    )
                )
            await asyncio.sleep(0)
        return GroupFilters(group=name, items=items, version=_version(groups))

    async def _oldest_pops_ms(self, group_ids: set[int]) -> dict[int, int]:
        """Return when the oldest open delivery of each group was handed out, by the id of the group."""
        oldest_ms: dict[int, int] = {}
        if not group_ids:
            return oldest_ms
        for number, checkpoint in enumerate(tuple(self._checkpoints.values())):  # in the order of their pops
            if len(oldest_ms) == len(group_ids):
                break
            if checkpoint.group_id in group_ids and checkpoint.open:
                oldest_ms.setdefault(checkpoint.group_id, checkpoint.pop_ms)
            if number % CHECKPOINTS_AT_ONCE == 0:
                await asyncio.sleep(0)
        return oldest_ms

    def _figures(self, snapshot: GroupSnapshot) -> dict[str, Any]:
        group = snapshot.group
        shared = self._shared.get(group.name, group.filter)
        return {
            "group": group.name,
            "filter": group.filter,
            "visible": snapshot.visible,
            "retries": snapshot.retries,
            "in_flight": snapshot.in_flight,
            "delayed": snapshot.delayed,
            "parked": snapshot.parked,
            "dead_letters": snapshot.dead,
            "oldest_age_ms": snapshot.oldest_ms,
            "waiting_polls": len(group.polls),
            "mqtt_members": shared.count if shared is not None else 0,
            "paused": group.settings.paused,
            "temporary": group.settings.is_temporary,
        }

    def _members(self, groups: list[ConsumerGroup]) -> Iterator[GroupMember]:
        for group in groups:
            for poll in group.polls:
                if not isinstance(poll.caller, Causer):
                    continue  # the node itself waits for the MQTT clients of the group
                yield GroupMember(
                    filter=group.filter,
                    over="pop",
                    user=poll.caller.user,
                    address=poll.caller.source,
                    client_id=poll.caller.client,
                    messages_max=poll.messages_max,
                )
            shared = self._shared.get(group.name, group.filter)
            for session in shared.sessions if shared is not None else ():
                yield GroupMember(
                    filter=group.filter,
                    over="mqtt",
                    user=session.causer.user,
                    address=session.causer.source,
                    client_id=session.client_id,
                    messages_max=None,
                )


def _version(groups: list[ConsumerGroup]) -> str:
    return version_of([[group.id, group.settings.row()] for group in groups])


def _settings(group: ConsumerGroup) -> GroupSettingsShown:
    backoff = group.backoff
    if isinstance(backoff, ExponentialBackoff):
        rule = BackoffRule(min_ms=backoff.min_ms, max_ms=backoff.max_ms, factor=backoff.factor)
    else:
        rule = BackoffRule(list_ms=list(backoff))
    return GroupSettingsShown(
        attempts_max=group.attempts_max,
        backoff=rule,
        invisible_ms=group.invisible_ms,
        in_flight_max=group.in_flight_max,
        fifo=group.settings.fifo,
        expression=group.settings.expression,
        expression_type=group.settings.expression_type,
        of_node=[name for name in OF_NODE if getattr(group.settings, name) is None],
    )


def _changed(settings: ConsumerGroupSettings, asked: GroupSettingsChange) -> ConsumerGroupSettings:
    """Return settings with the changes of a request. The core checks their bounds."""
    values = {name: value for name in asked.__struct_fields__ if (value := getattr(asked, name)) is not msgspec.UNSET}
    if values.get("backoff") is not None:
        values["backoff"] = _backoff(values["backoff"])
    if "expression" in values:
        values["expression_of_consumers"] = False
    return replace(settings, **values)


def _backoff(rule: BackoffRule) -> tuple[int, ...] | ExponentialBackoff:
    if rule.list_ms is not None and rule.min_ms is None and rule.max_ms is None:
        return tuple(rule.list_ms)
    if rule.list_ms is None and rule.min_ms is not None and rule.max_ms is not None:
        return ExponentialBackoff(rule.min_ms, rule.max_ms, rule.factor)
    raise ApiError(HTTPStatus.BAD_REQUEST, "backoff is neither a list nor a rule; give list_ms, or min_ms and max_ms")
