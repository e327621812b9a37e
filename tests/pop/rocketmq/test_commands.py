"""Commands of an operator to clients, with clients that refuse, hang, answer for others or are gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from penstock.pop.rocketmq import commands
from penstock.pop.rocketmq.status import Code, Refused
from penstock.pop.rocketmq.stubs import pb, service_pb
from tests.pop.rocketmq.calling import Caller
from tests.pop.wiring import Node
from tests.waiting import WAIT_S_MAX


@pytest.fixture
async def caller(node: Node) -> AsyncIterator[Caller]:
    async with grpc.aio.insecure_channel(node.target) as channel:
        yield Caller(channel)


async def listening(caller: Caller) -> Any:
    """Return the open Telemetry stream of a client."""
    stream = caller.telemetry()
    await stream.write(service_pb.TelemetryCommand(settings=pb.Settings(client_type=pb.ClientType.PRODUCER)))
    assert (await stream.read()).status.code == Code.OK
    return stream


def commanding(node: Node) -> commands.ClientCommands:
    assert node.rocketmq is not None
    return node.rocketmq.commands


async def test_the_answer_with_the_nonce_of_the_command_counts(node: Node, caller: Caller) -> None:
    stream = await listening(caller)
    asked = asyncio.create_task(commanding(node).threads_of("c1"))
    nonce = (await stream.read()).print_thread_stack_trace_command.nonce
    for given, text in (("other", "wrong"), (nonce, "main sleeps")):
        trace = service_pb.ThreadStackTrace(nonce=given, thread_stack_trace=text)
        await stream.write(service_pb.TelemetryCommand(status=pb.Status(code=Code.OK), thread_stack_trace=trace))
    assert await asyncio.wait_for(asked, WAIT_S_MAX) == "main sleeps"
    stream.cancel()


async def test_a_client_that_refuses_or_hangs_or_is_gone_is_named(
    node: Node, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Refused, match="no client 'c1' uses this node"):
        await commanding(node).threads_of("c1")
    stream = await listening(caller)
    asked = asyncio.create_task(commanding(node).threads_of("c1"))
    nonce = (await stream.read()).print_thread_stack_trace_command.nonce
    refusal = pb.Status(code=Code.NOT_IMPLEMENTED, message="not here")
    await stream.write(service_pb.TelemetryCommand(status=refusal, thread_stack_trace=service_pb.ThreadStackTrace(nonce=nonce)))
    with pytest.raises(Refused, match="the client answers NOT_IMPLEMENTED not here"):
        await asyncio.wait_for(asked, WAIT_S_MAX)
    monkeypatch.setattr(commands, "ANSWER_S", 0.05)
    with pytest.raises(Refused, match="gave no answer"):
        await commanding(node).threads_of("c1")
    monkeypatch.setattr(commands, "PENDING_MAX", 0)
    with pytest.raises(Refused, match="the limit"):
        await commanding(node).threads_of("c1")
    stream.cancel()
    await node.until(lambda: not commanding(node).described()[0]["listens"])
    with pytest.raises(Refused, match="no open Telemetry stream"):
        commanding(node).reconnect("c1")
