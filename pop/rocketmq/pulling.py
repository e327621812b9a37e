"""Methods of pull consumers, which this node does not serve."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from penstock.pop.access.refusals import CallRefused
from penstock.pop.rocketmq.answering import Callers, Context, answered, status_of
from penstock.pop.rocketmq.clients import ConnectedClient
from penstock.pop.rocketmq.status import Code, Refused
from penstock.pop.rocketmq.stubs import service_pb


class PullRefusals:
    """Refuses PullMessage, UpdateOffset, GetOffset and QueryOffset with NOT_IMPLEMENTED.

    Parameters:
        callers: Finds the client of a call.
    """

    def __init__(self, callers: Callers) -> None:
        self.callers = callers

    @answered(service_pb.UpdateOffsetResponse)
    async def UpdateOffset(self, _request: Any, _client: ConnectedClient) -> Any:
        raise _refusal()

    @answered(service_pb.GetOffsetResponse)
    async def GetOffset(self, _request: Any, _client: ConnectedClient) -> Any:
        raise _refusal()

    @answered(service_pb.QueryOffsetResponse)
    async def QueryOffset(self, _request: Any, _client: ConnectedClient) -> Any:
        raise _refusal()

    async def PullMessage(self, _request: Any, _context: Context) -> AsyncGenerator[Any, None]:
        raise CallRefused(response=service_pb.PullMessageResponse(status=status_of(_refusal())))
        yield  # type: ignore[unreachable]  # makes the method a stream


def _refusal() -> Refused:
    return Refused(
        Code.NOT_IMPLEMENTED, "this node serves no pull consumers: use a SimpleConsumer, and GroupService to move offsets"
    )
