"""The health check of a node, as load balancers make it."""

from __future__ import annotations

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc


async def is_serving(channel: grpc.aio.Channel, within_s: float) -> bool:
    """Return whether the node at the other end of a channel says within so many seconds that it takes calls."""
    check = health_pb2_grpc.HealthStub(channel).Check
    try:
        answer = await check(health_pb2.HealthCheckRequest(), timeout=within_s, wait_for_ready=True)
    except grpc.aio.AioRpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def is_serving_sync(channel: grpc.Channel, within_s: float) -> bool:
    """Do what `is_serving` does, and block meanwhile."""
    check = health_pb2_grpc.HealthStub(channel).Check
    try:
        answer = check(health_pb2.HealthCheckRequest(), timeout=within_s, wait_for_ready=True)
    except grpc.RpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
