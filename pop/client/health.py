"""The health check of a node, as load balancers make it.

The check is gRPC's own (grpc.health.v1). Its two messages are a few bytes, so the client needs no package for them.
"""

from __future__ import annotations

from typing import cast

import grpc
import grpc.aio

METHOD = "/grpc.health.v1.Health/Check"

WHOLE_NODE = b""
"""The encoded HealthCheckRequest without a service, which asks about the node as a whole."""

SERVING = b"\x08\x01"
"""The encoded HealthCheckResponse with status = SERVING."""


async def check_health(channel: grpc.aio.Channel, within_s: float, *, wait_for_ready: bool = False) -> bytes:
    """Make a health check, and return the encoded response.

    Raises:
        grpc.aio.AioRpcError: The node can't be reached, or does not answer within so many seconds.
        grpc.aio.UsageError: The channel is closed.
    """
    check = channel.unary_unary(METHOD, bytes, bytes)
    response = await check(WHOLE_NODE, timeout=within_s, wait_for_ready=wait_for_ready)
    return cast(bytes, response)


def check_health_sync(channel: grpc.Channel, within_s: float, *, wait_for_ready: bool = False) -> bytes:
    """Do what `check_health` does, and block meanwhile.

    Raises:
        grpc.RpcError: The node can't be reached, or does not answer within so many seconds.
        ValueError: The channel is closed.
    """
    check = channel.unary_unary(METHOD, bytes, bytes)
    response = check(WHOLE_NODE, timeout=within_s, wait_for_ready=wait_for_ready)
    return cast(bytes, response)


async def is_serving(channel: grpc.aio.Channel, within_s: float) -> bool:
    """Return whether the node at the other end of a channel says within so many seconds that it takes calls."""
    try:
        return await check_health(channel, within_s, wait_for_ready=True) == SERVING
    except grpc.aio.AioRpcError:
        return False


def is_serving_sync(channel: grpc.Channel, within_s: float) -> bool:
    """Do what `is_serving` does, and block meanwhile."""
    try:
        return check_health_sync(channel, within_s, wait_for_ready=True) == SERVING
    except grpc.RpcError:
        return False
