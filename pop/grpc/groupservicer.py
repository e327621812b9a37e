"""The servicer of `penstock.pop.v1.GroupService`: the administration of groups and dead letters."""

from __future__ import annotations

from dataclasses import replace

from penstock.pop.access.auditedcall import change_noted
from penstock.pop.access.caller import causer_of_call
from penstock.pop.core.core import PopCore
from penstock.pop.core.deadletters import DEAD_LETTERS_MAX
from penstock.pop.core.expression import ExpressionType
from penstock.pop.core.group import ConsumerGroup
from penstock.pop.core.groups import ResetTo, snapshots
from penstock.pop.core.sender import message_id
from penstock.pop.core.settings import DEFAULTS, Backoff, ConsumerGroupSettings, ExponentialBackoff
from penstock.pop.errors import RequestInvalid
from penstock.pop.grpc.requests import bounded, check_count, end_of, position_of, start_of
from penstock.pop.grpc.wire import dead_letter, stored_message
from penstock.pop.proto import pop_pb2 as pb
from penstock.store.record import decode
from penstock.store.store import Store

DEAD_LETTERS_DEFAULT = 1_000


class GroupServicer:
    """Has the methods of the service. A call that changes something is answered when the change is durable.

    Parameters:
        core: has the groups.
        store: tells when a change is durable.
    """

    def __init__(self, core: PopCore, store: Store) -> None:
        self._groups = core.groups
        self._checkpoints = core.checkpoints
        self._dead_letters = core.dead_letters
        self._read = core.read
        self._store = store

    async def CreateGroup(self, request: pb.CreateGroupRequest) -> pb.GroupsResponse:
        settings = changed(DEFAULTS, request.settings)
        start = start_of(request.start, request.start_at_ms)
        with change_noted(self._store):
            group = self._groups.create(request.group, request.filter, start, settings, causer_of_call())
        await self._store.durable()
        return self._described([group])

    async def UpdateGroup(self, request: pb.UpdateGroupRequest) -> pb.GroupsResponse:
        with change_noted(self._store):
            groups = self._groups.update(request.group, request.filter, lambda old: changed(old, request.settings))
        await self._store.durable()
        return self._described(groups)

    async def DescribeGroups(self, request: pb.GroupRequest) -> pb.GroupsResponse:
        return self._described(self._groups.find(request.group, request.filter) if request.group else list(self._groups))

    async def DeleteGroup(self, request: pb.GroupRequest) -> pb.DeleteGroupResponse:
        with change_noted(self._store):
            self._groups.delete(request.group, request.filter)
        await self._store.durable()
        return pb.DeleteGroupResponse()

    async def ResetGroup(self, request: pb.ResetGroupRequest) -> pb.GroupsResponse:
        chosen = request.WhichOneof("to")
        to = ResetTo(
            end=end_of(request.end) if chosen == "end" else None,
            time_ms=request.time_ms if chosen == "time_ms" else None,
            position=position_of(request.message_id) if chosen == "message_id" else None,
        )
        with change_noted(self._store) as fields:
            groups = self._groups.reset(request.group, request.filter, to)
            fields["to"] = to.end or to.time_ms or request.message_id
        await self._store.durable()
        return self._described(groups)

    async def ListDeadLetters(self, request: pb.ListDeadLettersRequest) -> pb.ListDeadLettersResponse:
        count = min(bounded("dead_letters_max", request.dead_letters_max, DEAD_LETTERS_DEFAULT), DEAD_LETTERS_MAX)
        after = position_of(request.after_message_id) + 1 if request.after_message_id else 0
        letters = []
        for letter in self._dead_letters.list(request.group, after, count):
            data = self._read(letter.position, letter.size)
            topic = decode(data).topic.decode() if data is not None else ""
            letters.append(dead_letter(letter, request.group, self._dead_letters.filter_of(letter), topic))
        return pb.ListDeadLettersResponse(dead_letters=letters)

    async def Redrive(self, request: pb.RedriveRequest) -> pb.RedriveResponse:
        check_count("redrive dead letters", request.message_ids, DEAD_LETTERS_MAX)
        positions = [position_of(each) for each in request.message_ids] or None
        with change_noted(self._store) as fields:
            fields["redriven"] = redriven = self._dead_letters.redrive(request.group, positions)
        await self._store.durable()
        return pb.RedriveResponse(redriven=redriven)

    async def GetDeadLetter(self, request: pb.GetDeadLetterRequest) -> pb.GetDeadLetterResponse:
        letter = self._dead_letters.find(request.group, position_of(request.message_id))
        if letter is None:
            return pb.GetDeadLetterResponse()
        data = self._read(letter.position, letter.size)
        message = stored_message(decode(data)) if data is not None else pb.PoppedMessage()
        message.message_id = message_id(letter.position)
        message.dead_letter.CopyFrom(dead_letter(letter, request.group, self._dead_letters.filter_of(letter), message.topic))
        return pb.GetDeadLetterResponse(message=message)

    async def PurgeDeadLetters(self, request: pb.RedriveRequest) -> pb.PurgeDeadLettersResponse:
        check_count("purge dead letters", request.message_ids, DEAD_LETTERS_MAX)
        positions = [position_of(each) for each in request.message_ids] or None
        with change_noted(self._store) as fields:
            fields["purged"] = purged = self._dead_letters.purge(request.group, positions)
        await self._store.durable()
        return pb.PurgeDeadLettersResponse(purged=purged)

    def _described(self, groups: list[ConsumerGroup]) -> pb.GroupsResponse:
        descriptions = []
        for snapshot in snapshots(groups, self._checkpoints, self._store):
            group = snapshot.group
            descriptions.append(
                pb.GroupDescription(
                    group=group.name,
                    filter=group.filter,
                    settings=_effective(group),
                    visible=snapshot.visible,
                    retries=snapshot.retries,
                    in_flight=snapshot.in_flight,
                    delayed=snapshot.delayed,
                    parked=snapshot.parked,
                    dead=snapshot.dead,
                    waiting=len(group.polls),
                    oldest_ms=snapshot.oldest_ms,
                    oldest_in_flight_ms=snapshot.oldest_in_flight_ms,
                )
            )
        return pb.GroupsResponse(groups=descriptions)


def changed(settings: ConsumerGroupSettings, request: pb.GroupSettings) -> ConsumerGroupSettings:
    """Return `settings` with the changes of a request. The caller must check the bounds."""
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
        settings = replace(settings, expression=request.expression, expression_of_consumers=False)
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
        raise RequestInvalid("give an exponential back-off or a list, not both")
    rule = backoff.exponential
    return ExponentialBackoff(rule.min_ms, rule.max_ms, rule.factor or 2.0)


def _effective(group: ConsumerGroup) -> pb.GroupSettings:
    """Return the settings that apply to a group, with the node's options where nothing was set for it."""
    backoff = group.backoff
    if isinstance(backoff, ExponentialBackoff):
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
