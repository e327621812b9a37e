"""Methods that settle deliveries: acknowledge them, make dead letters of them, move their deadlines."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from penstock.pop.core.core import PopCore
from penstock.pop.core.deliveries import AckOutcome, VisibilityChange
from penstock.pop.rocketmq.answering import status
from penstock.pop.rocketmq.names import group_of
from penstock.pop.rocketmq.status import OUTCOME_CODES, Code, Refused, overall_code
from penstock.pop.rocketmq.stubs import service_pb

HANDLES_MAX = 1_024


class DeliverySettler:
    """Serves AckMessage, ForwardMessageToDeadLetterQueue and ChangeInvisibleDuration.

    Parameters:
        core: Has the deliveries.
        durable: Returns when all that was stored is durable.
    """

    def __init__(self, core: PopCore, durable: Callable[[], Awaitable[None]]) -> None:
        self._core = core
        self._durable = durable

    async def AckMessage(self, request: Any) -> Any:
        if not 0 < len(request.entries) <= HANDLES_MAX:
            raise Refused(Code.BAD_REQUEST, f"a call acknowledges 1 to {HANDLES_MAX} messages, not {len(request.entries)}")
        outcomes = self._core.deliveries.ack(group_of(request.group), [entry.receipt_handle for entry in request.entries])
        await self._durable()
        entries = [
            service_pb.AckMessageResultEntry(
                message_id=entry.message_id,
                receipt_handle=entry.receipt_handle,
                status=_status(outcome),
            )
            for entry, outcome in zip(request.entries, outcomes, strict=True)
        ]
        code = overall_code([OUTCOME_CODES[outcome] for outcome in outcomes])
        return service_pb.AckMessageResponse(status=status(code, _detail(outcomes[0])), entries=entries)

    async def ForwardMessageToDeadLetterQueue(self, request: Any) -> Any:
        (outcome,) = self._core.deliveries.dead_letter(group_of(request.group), [request.receipt_handle])
        await self._durable()
        # The official clients repeat the call until they get OK. If the delivery is over, another attempt has the message.
        code = Code.INVALID_RECEIPT_HANDLE if outcome is AckOutcome.INVALID_HANDLE else Code.OK
        return service_pb.ForwardMessageToDeadLetterQueueResponse(status=status(code, _detail(outcome)))

    async def ChangeInvisibleDuration(self, request: Any) -> Any:
        invisible_ms = int(request.invisible_duration.ToMilliseconds())
        change = VisibilityChange(request.receipt_handle, invisible_ms, request.suspend)
        ((outcome, handle),) = self._core.deliveries.change_invisible(group_of(request.group), [change])
        await self._durable()
        return service_pb.ChangeInvisibleDurationResponse(status=_status(outcome), receipt_handle=handle)


def _status(outcome: AckOutcome) -> Any:
    return status(OUTCOME_CODES[outcome], _detail(outcome))


def _detail(outcome: AckOutcome) -> str:
    """Return what a client is told. The protocol has other handles, too, so the kind is named."""
    return outcome.value.replace("handle", "receipt handle")
