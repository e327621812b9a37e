"""Health and reflection of the gRPC listener."""

from __future__ import annotations

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.pop.wiring import Node


async def test_the_listener_serves_health_and_reflection(node: Node) -> None:
    async with grpc.aio.insecure_channel(node.target) as channel:
        checks = health_pb2_grpc.HealthStub(channel)
        for name in ("", "penstock.pop.v1.PopService", "penstock.pop.v1.GroupService"):
            answer = await checks.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        watching = checks.Watch(health_pb2.HealthCheckRequest())
        assert (await watching.read()).status == health_pb2.HealthCheckResponse.SERVING
        watching.cancel()
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        async for answer in stub.ServerReflectionInfo(iter([asked])):
            names = {service.name for service in answer.list_services_response.service}
    assert {"penstock.pop.v1.PopService", "penstock.pop.v1.GroupService"} <= names
