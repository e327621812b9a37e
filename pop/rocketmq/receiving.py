"""ReceiveMessage: the poll of a consumer, answered with a stream of messages."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

from penstock.access.actions import POP
from penstock.pop.access.auditedcall import note_change
from penstock.pop.access.caller import causer_of_call, check_permitted_throughout
from penstock.pop.core.core import PopCore
from penstock.pop.core.expression import ExpressionType
from penstock.pop.core.group import ConsumerGroup
from penstock.pop.core.handle import Handles
from penstock.pop.core.pops import PopResult, check_attempt_id
from penstock.pop.core.settings import ConsumerGroupSettings
from penstock.pop.grpc.responsebytes import bytes_of_stream
from penstock.pop.options import PopOptions
from penstock.pop.rocketmq.answering import status
from penstock.pop.rocketmq.clients import ConnectedClient
from penstock.pop.rocketmq.expressions import Expressions
from penstock.pop.rocketmq.leases import LEASE_MS, lease_id
from penstock.pop.rocketmq.litetopics import LiteTopics
from penstock.pop.rocketmq.messages import message_of
from penstock.pop.rocketmq.names import dead_letters_group, filter_of, group_of, namespace_of
from penstock.pop.rocketmq.settings import LONG_POLLING_MS, expression_of
from penstock.pop.rocketmq.status import Code, Refused
from penstock.pop.rocketmq.stubs import service_pb
from penstock.store.record import decode
from penstock.store.store import Store

DEADLINE_MARGIN_MS = 500
"""A poll ends this long before the deadline of its call, so that the answer is in time from a busy node too. A client takes an
exceeded deadline for an error."""

UNSTATED_MARGIN_MS = 1_500
"""A poll that does not say how long it waits ends this long before its deadline: half of the clients' request timeout, as in
RocketMQ."""


class MessageReceiver:
    """Serves ReceiveMessage.

    Parameters:
        core: Hands out messages.
        handles: Makes the handles of deliveries.
        lite: Lite topics, whose messages a poll may ask for.
        store: Tells when all that was stored is durable.
        options: Bounds and defaults.
        host: Returns the address of this node, which each message names.
        expressions: What the consumers of each group ask for.
    """

    def __init__(
        self,
        core: PopCore,
        handles: Handles,
        lite: LiteTopics,
        store: Store,
        options: PopOptions,
        host: Callable[[], str],
        expressions: Expressions,
    ) -> None:
        self._core = core
        self._groups = core.groups
        self._handles = handles
        self._lite = lite
        self._store = store
        self._options = options
        self._host = host
        self._expressions = expressions

    async def ReceiveMessage(
        self, request: Any, client: ConnectedClient, remaining_s: float | None
    ) -> AsyncGenerator[Any, None]:
        """Yield the messages of a poll. `remaining_s` is the time until the deadline of the call; None if it has none."""
        response = service_pb.ReceiveMessageResponse
        popped: PopResult | None = None
        written = False
        try:
            popped, lite_parent = await self._poll(request, client, remaining_s)
            await self._store.durable()
            messages = self._messages(popped, lite_parent, request.message_queue.topic) if popped is not None else []
            if not messages:
                written = True
                yield response(status=status(Code.MESSAGE_NOT_FOUND, "there is no visible message now"))
                return
            if popped is not None and (stream_bytes := bytes_of_stream()) is not None:
                stream_bytes.resize(popped.size)
            yield response(status=status())
            for message in messages:
                yield response(message=message)
            written = True
            now = response()
            now.delivery_timestamp.FromMilliseconds(self._store.now_ms())
            yield now
        finally:
            if popped is not None and not written:
                self._core.deliveries.requeue(popped.checkpoint)  # The consumer went away before it got all messages.

    async def _poll(self, request: Any, client: ConnectedClient, remaining_s: float | None) -> tuple[PopResult | None, str]:
        """Return the messages for a request, and the parent topic if they are messages of lite topics."""
        name, topic_filter = group_of(request.group), filter_of(request.message_queue.topic)
        if request.batch_size <= 0:
            raise Refused(Code.BAD_REQUEST, f"batch_size is {request.batch_size}: ask for at least 1 message")
        count = min(request.batch_size, self._options.messages_max)
        wait_ms = wait_ms_of(request, remaining_s, self._options)
        attempt_id = check_attempt_id(request.attempt_id)
        if request.auto_renew:
            attempt_id = lease_id(client.id, attempt_id or os.urandom(8).hex())
        asked_ms = self._invisible_ms(request)
        wanted = expression_of(request.filter_expression)
        if self._lite.serves(client, name, topic_filter):
            invisible_ms = asked_ms or self._options.invisible_ms_default
            popped = await self._lite.poll(client, name, topic_filter, count, invisible_ms, wait_ms, attempt_id)
            return popped, topic_filter
        check_permitted_throughout(POP, topic_filter)
        group = self._group(client, name, topic_filter, wanted)
        invisible_ms = asked_ms or group.invisible_ms
        caller = causer_of_call()
        return await self._core.polls.poll((group,), count, invisible_ms, wait_ms, attempt_id, caller=caller), ""

    def _group(
        self, client: ConnectedClient, name: str, topic_filter: str, wanted: tuple[str, ExpressionType]
    ) -> ConsumerGroup:
        """Return a group, with the filter on delivery that its consumer wants.

        If pops may create groups (`pop.groups_auto_create`), consumers choose the filter on delivery, unless an operator has.
        All consumers of the group that are there must choose the same: the group would skip what one of them asks for while it
        has the expression of another. A consumer that asks for "*" follows an operator's filter.

        Raises:
            GroupUnknown, GroupInvalid, TopicInvalid, Overloaded, LimitExceeded: As `Groups.get_or_create`.
            Refused: ILLEGAL_FILTER_EXPRESSION.
        """
        group = self._groups.get(name, topic_filter)
        if group is None:
            if not self._options.groups_auto_create:
                return self._groups.get_or_create(name, topic_filter, causer=causer_of_call())
            settings = ConsumerGroupSettings(
                expression=wanted[0], expression_type=wanted[1], expression_of_consumers=wanted[0] != "*"
            )
            group = self._groups.create(name, topic_filter, "earliest", settings, causer_of_call())
            self._expressions.note(client, group, wanted)
            return group
        current = (group.settings.expression, group.settings.expression_type)
        if wanted == current:
            self._expressions.note(client, group, wanted)
            return group
        is_theirs = self._options.groups_auto_create and (group.settings.expression_of_consumers or current[0] == "*")
        if wanted[0] == "*" and not is_theirs:
            return group
        if not is_theirs:
            raise Refused(
                Code.ILLEGAL_FILTER_EXPRESSION,
                f"the group {name[:80]!r} has the expression {current[0][:80]!r} from an operator, and its consumers may not "
                f"change it: ask for '*' to follow it, or update the group",
            )
        self._expressions.check_may_change(client, group, wanted)
        self._groups.update(
            name,
            topic_filter,
            lambda settings: replace(
                settings, expression=wanted[0], expression_type=wanted[1], expression_of_consumers=wanted[0] != "*"
            ),
        )
        note_change(group=name, filter=topic_filter, expression=wanted[0])
        self._expressions.note(client, group, wanted)
        return group

    def _invisible_ms(self, request: Any) -> int:
        """Return the invisible time that a request asks for; 0 if it leaves that to the group."""
        invisible_ms_max = self._options.invisible_ms_max
        if request.auto_renew:
            return min(LEASE_MS, invisible_ms_max)
        if not request.HasField("invisible_duration"):
            return 0
        invisible_ms = int(request.invisible_duration.ToMilliseconds())
        if not 0 < invisible_ms <= invisible_ms_max:
            raise Refused(
                Code.ILLEGAL_INVISIBLE_TIME, f"invisible_duration is {invisible_ms} ms: use 1 to {invisible_ms_max} ms"
            )
        return invisible_ms

    def _messages(self, popped: PopResult, lite_parent: str, asked: Any) -> list[Any]:
        """Return popped messages, those of higher priority first. `asked` names the topic by which the consumer asked."""
        checkpoint = popped.checkpoint
        handles = self._handles.deliveries(checkpoint.position, checkpoint.pop_ms, checkpoint.group_id, checkpoint.count)
        invisible_ms = checkpoint.deadline_ms - checkpoint.pop_ms
        namespace, dead_letters_of, store_host = namespace_of(asked), dead_letters_group(asked), self._host()
        messages = [
            message_of(
                decode(data, position=entry.position, verify=False),
                entry=entry,
                handle=handle,
                invisible_ms=invisible_ms,
                store_host=store_host,
                lite_parent=lite_parent,
                namespace=namespace,
                dead_letters_of=dead_letters_of,
            )
            for handle, entry, data in zip(handles, checkpoint.entries(), popped.records, strict=True)
            if data is not None
        ]
        if any(message.system_properties.priority for message in messages):
            messages.sort(key=lambda message: -message.system_properties.priority)
        return messages


def wait_ms_of(request: Any, remaining_s: float | None, options: PopOptions) -> int:
    """Return how long a poll or a pull may wait for its first message. Raises Refused with ILLEGAL_POLLING_TIME."""
    if request.HasField("long_polling_timeout"):
        wait_ms = request.long_polling_timeout.ToMilliseconds()
    else:  # The Go client (5.1.4) waits as long as its simple consumer was told, and says so only by its deadline.
        wait_ms = LONG_POLLING_MS if remaining_s is None else max(int(remaining_s * 1000) - UNSTATED_MARGIN_MS, 0)
    if wait_ms < 0:
        raise Refused(Code.ILLEGAL_POLLING_TIME, f"long_polling_timeout is {wait_ms} ms: use 0 ms or more")
    if remaining_s is not None:
        wait_ms = min(wait_ms, max(int(remaining_s * 1000) - DEADLINE_MARGIN_MS, 0))
    return int(min(wait_ms, options.wait_ms_max))
