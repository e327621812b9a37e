"""The gRPC face of the administration of groups and dead letters: `penstock.pop.v1.GroupService`."""

from __future__ import annotations

from dataclasses import replace

from penstock.pop.backoff import Backoff, Exponential
from penstock.pop.core.admin import DEAD_LETTERS_MAX, GroupAdmin, ResetTo
from penstock.pop.core.expression import ExpressionType
from penstock.pop.core.group import ConsumerGroup
from penstock.pop.core.settings import DEFAULTS, GroupSettings
from penstock.pop.errors import PopError, RequestInvalid
from penstock.pop.grpc.service import Context, bounded, dead_letter, end_of, position_of, refuse, start_of
from penstock.pop.proto import pop_pb2 as pb
from penstock.store.errors import StoreError
from penstock.store.record import decode

DEAD_LETTERS_DEFAULT = 1_000


class GroupService:
    """Serves the administration.

    Parameters:
        admin: what does it.
    """

    def __init__(self, admin: GroupAdmin) -> None:
        self._admin = admin
        self._core = admin.core
        self._store = admin.core.store

    async def CreateGroup(self, request: pb.CreateGroupRequest, context: Context) -> pb.GroupsResponse:
        try:
            settings = changed(DEFAULTS, request.settings)
            group = self._admin.create(request.group, request.filter, start_of(request.start, request.start_at_ms), settings)
        except (PopError, StoreError) as error:
            await refuse(context, error)
        await self._store.durable()
        return self._described([group])

    async def UpdateGroup(self, request: pb.UpdateGroupRequest, context: Context) -> pb.GroupsResponse:
        try:
            groups = self._admin.update(request.group, request.filter, lambda old: changed(old, request.settings))
        except (PopError, StoreError) as error:
            await refuse(context, error)
        await self._store.durable()
        return self._described(groups)

    async def DescribeGroups(self, request: pb.GroupRequest, context: Context) -> pb.GroupsResponse:
        try:
            groups = self._admin.find(request.group, request.filter) if request.group else list(self._core)
        except PopError as error:
            await refuse(context, error)
        return self._described(groups)

    async def DeleteGroup(self, request: pb.GroupRequest, context: Context) -> pb.DeleteGroupResponse:
        try:
            self._admin.delete(request.group, request.filter)
        except (PopError, StoreError) as error:
            await refuse(context, error)
        await self._store.durable()
        return pb.DeleteGroupResponse()

    async def ResetGroup(self, request: pb.ResetGroupRequest, context: Context) -> pb.GroupsResponse:
        try:
            chosen = request.WhichOneof("to")
            to = ResetTo(
                end=end_of(request.end) if chosen == "end" else None,
                time_ms=request.time_ms if chosen == "time_ms" else None,
                position=position_of(request.message_id) if chosen == "message_id" else None,
            )
            groups = self._admin.reset(request.group, request.filter, to)
        except (PopError, StoreError) as error:
            await refuse(context, error)
        await self._store.durable()
        return self._described(groups)

    async def ListDeadLetters(self, request: pb.ListDeadLettersRequest, context: Context) -> pb.ListDeadLettersResponse:
        try:
            count = min(bounded("dead_letters_max", request.dead_letters_max, DEAD_LETTERS_DEFAULT), DEAD_LETTERS_MAX)
            after = position_of(request.after_message_id) + 1 if request.after_message_id else 0
            letters = self._admin.dead_letters(request.group, after, count)
        except PopError as error:
            await refuse(context, error)
        found = []
        for letter in letters:
            data = self._core.read(letter.position, letter.size)
            topic = decode(data).topic.decode() if data is not None else ""
            origin = self._core.state.groups_by_id.get(letter.group_id)
            found.append(dead_letter(letter, request.group, origin.filter if origin else "", topic))
        return pb.ListDeadLettersResponse(dead_letters=found)

    async def Redrive(self, request: pb.RedriveRequest, context: Context) -> pb.RedriveResponse:
        try:
            if len(request.message_ids) > DEAD_LETTERS_MAX:
                raise RequestInvalid(f"send back at most {DEAD_LETTERS_MAX} dead letters a call")
            positions = [position_of(each) for each in request.message_ids] or None
            redriven = self._admin.redrive(request.group, positions)
        except (PopError, StoreError) as error:
            await refuse(context, error)
        await self._store.durable()
        return pb.RedriveResponse(redriven=redriven)

    def _described(self, groups: list[ConsumerGroup]) -> pb.GroupsResponse:
        found = []
        for told in self._admin.describe(groups):
            group = told.group
            found.append(
                pb.GroupDescription(
                    group=group.name,
                    filter=group.filter,
                    settings=_effective(group),
                    visible=told.visible,
                    retries=told.retries,
                    in_flight=told.in_flight,
                    delayed=told.delayed,
                    parked=told.parked,
                    dead=told.dead,
                    waiting=len(group.polls),
                    oldest_ms=told.oldest_ms,
                    oldest_in_flight_ms=told.oldest_in_flight_ms,
                )
            )
        return pb.GroupsResponse(groups=found)


def changed(settings: GroupSettings, request: pb.GroupSettings) -> GroupSettings:
    """Return settings with what a request gives. Bounds are not checked here."""
    if request.HasField("attempts_max"):
        settings = replace(settings, attempts_max=request.attempts_max or None)
    if request.HasField("invisible_ms"):
        settings = replace(settings, invisible_ms=request.invisible_ms or None)
    if request.HasField("in_flight_max"):
        settings = replace(settings, in_flight_max=request.in_flight_max or None)
    if request.HasField("fifo"):
        settings = replace(settings, fifo=request.fifo)
    if request.HasField("paused"):
        settings = replace(settings, paused=request.paused)
    if request.HasField("expression"):
        settings = replace(settings, expression=request.expression)
    if request.HasField("expression_type"):
        kind: ExpressionType = "sql" if request.expression_type == pb.SQL else "tag"
        settings = replace(settings, expression_type=kind)
    if request.HasField("backoff"):
        settings = replace(settings, backoff=_backoff(request.backoff))
    elif request.backoff_of_node:
        settings = replace(settings, backoff=None)
    return settings


def _backoff(backoff: pb.Backoff) -> Backoff:
    if not backoff.HasField("exponential"):
        return tuple(backoff.list_ms)
    if backoff.list_ms:
        raise RequestInvalid("a back-off is exponential or a list, not both")
    rule = backoff.exponential
    return Exponential(rule.min_ms, rule.max_ms, rule.factor or 2.0)


def _effective(group: ConsumerGroup) -> pb.GroupSettings:
    backoff = group.backoff
    if isinstance(backoff, Exponential):
        rule = pb.Backoff(exponential=pb.Exponential(min_ms=backoff.min_ms, max_ms=backoff.max_ms, factor=backoff.factor))
    else:
        rule = pb.Backoff(list_ms=backoff)
    settings = group.settings
    return pb.GroupSettings(
        attempts_max=group.attempts_max,
        backoff=rule,
        invisible_ms=group.invisible_ms,
        in_flight_max=group.in_flight_max,
        fifo=settings.fifo,
        expression=settings.expression,
        expression_type=pb.SQL if settings.expression_type == "sql" else pb.TAG,
        paused=settings.paused,
        backoff_of_node=settings.backoff is None,
        shared=settings.shared,
    )
