"""A receiver of OTLP over HTTP, in the process of a test."""

from __future__ import annotations

import asyncio
import base64
from types import TracebackType
from typing import Any, NamedTuple, Self

import orjson
from aiohttp import web
from google.protobuf.json_format import ParseDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.waiting import until

IDS = ("traceId", "spanId", "parentSpanId")
"""Fields that are hexadecimal in OTLP's JSON, where protobuf's JSON has base64."""


class Received(NamedTuple):
    """A span that was received."""

    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    state: str
    began_ns: int
    ended_ns: int
    attributes: dict[str, str | int]
    error: str
    resource: dict[str, str | int]


class Collector:
    """Takes spans at `endpoint`, and reads each request by the protocol's own definition.

    Parameters:
        statuses: With which the first requests are answered; the later ones are taken.
        answer: JSON of the answers.
    """

    def __init__(self, *statuses: int, answer: bytes = b"{}") -> None:
        self.statuses = list(statuses)
        self.answer = answer
        self.spans: list[Received] = []
        self.requests = 0
        self._port = 0

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_post("/v1/traces", self._receive)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1/traces"

    async def spans_of(self, *names: str) -> list[Received]:
        """Wait until there is a span of each name; return the first of each, in that order."""
        await until(lambda: set(names) <= {span.name for span in self.spans})
        return [next(span for span in self.spans if span.name == name) for name in names]

    async def _receive(self, request: web.Request) -> web.Response:
        self.requests += 1
        assert request.content_type == "application/json"
        status = self.statuses.pop(0) if self.statuses else 200
        if status == 200:
            self.spans += spans_in(await request.read())
        return web.Response(body=self.answer, status=status, content_type="application/json")


def spans_in(body: bytes) -> list[Received]:
    """Return the spans in a request. Raises ParseError if it is none by the protocol's definition."""
    document = orjson.loads(body)
    for scope in (scope for found in document["resourceSpans"] for scope in found["scopeSpans"]):
        for span in scope["spans"]:
            span |= {name: base64.b64encode(bytes.fromhex(span[name])).decode() for name in IDS if name in span}
    request = ParseDict(document, ExportTraceServiceRequest())
    return [
        Received(
            span.name,
            span.kind,
            span.trace_id.hex(),
            span.span_id.hex(),
            span.parent_span_id.hex(),
            span.trace_state,
            span.start_time_unix_nano,
            span.end_time_unix_nano,
            _attributes(span.attributes),
            span.status.message if span.status.code == span.status.STATUS_CODE_ERROR else "",
            _attributes(found.resource.attributes),
        )
        for found in request.resource_spans
        for scope in found.scope_spans
        for span in scope.spans
    ]


def _attributes(found: Any) -> dict[str, str | int]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in found}


class SilentCollector:
    """Accepts connections and requests, and never answers."""

    async def __aenter__(self) -> Self:
        self.connections = 0
        self._writers: list[asyncio.StreamWriter] = []
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.endpoint = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1/traces"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.append(writer)
        while await reader.read(65_536):
            pass
