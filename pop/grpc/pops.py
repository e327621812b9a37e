"""Pop: receiving messages, and acknowledging earlier ones in the same call."""

from __future__ import annotations

from penstock.pop.access.caller import causer_of_call
from penstock.pop.core.core import PopCore
from penstock.pop.core.deliveries import AckOutcome
from penstock.pop.core.groups import Groups
from penstock.pop.core.pops import check_attempt_id
from penstock.pop.grpc.requests import bounded, check_count, start_of
from penstock.pop.grpc.responses import PopResponses
from penstock.pop.grpc.status import ACK_STATUS
from penstock.pop.grpc.wire import serialize
from penstock.pop.options import PopOptions
from penstock.pop.proto import pop_pb2 as pb
from penstock.store.store import Store


class PopMethods:
    """Serves `Pop`.

    Parameters:
        core: hands out messages.
        groups: that the calls name.
        store: tells when a pop is durable.
        responses: makes the responses.
        options: bounds and defaults.
    """

    def __init__(self, core: PopCore, groups: Groups, store: Store, responses: PopResponses, options: PopOptions) -> None:
        self._core = core
        self._groups = groups
        self._store = store
        self._responses = responses
        self._options = options

    async def Pop(self, request: pb.PopRequest) -> bytes:
        core, options = self._core, self._options
        messages_max = bounded("messages_max", request.messages_max, options.messages_default)
        wait_ms = min(bounded("wait_ms", request.wait_ms, 0), options.wait_ms_max)
        start = start_of(request.start, request.start_at_ms)
        asked_ms = bounded("invisible_ms", request.invisible_ms, 0, options.invisible_ms_max)
        in_order_max = bounded("in_order_max", request.in_order_max, 1)
        attempt_id = check_attempt_id(request.attempt_id)
        acks = list(request.acks)
        check_count("acknowledge handles", acks)
        causer = causer_of_call()
        group = self._groups.get_or_create(request.group, request.filter, start, causer)
        outcomes = core.deliveries.ack(group.name, acks) if acks else []
        result = await core.polls.poll(
            (group,),
            min(messages_max, options.messages_max),
            asked_ms or group.invisible_ms,
            0 if acks else wait_ms,  # a call that waits would tell what came of its acks only with the next message
            attempt_id,
            in_order_max,
            causer,
        )
        if result is None and not acks:
            return b""
        try:
            await self._store.durable()
            messages = self._responses.messages(result) if result is not None else b""
        except BaseException:
            if result is not None:
                core.deliveries.requeue(result.checkpoint)  # the consumer went away, so it never saw the messages
            raise
        if outcomes.count(AckOutcome.OK) == len(acks):
            return messages
        # Protocol buffers merge messages whose bytes are joined.
        return messages + serialize(pb.PopResponse(ack_statuses=[ACK_STATUS[outcome] for outcome in outcomes]))
