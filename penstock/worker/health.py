"""The health endpoint of a worker process: HTTP with two paths."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import asdict
from types import TracebackType

import orjson

from penstock.worker.worker import Worker

REQUEST_BYTES_MAX = 8_192
REQUEST_S_MAX = 5.0
"""A client that sends its request more slowly is cut off."""


class HealthListener:
    """Answers `GET /health` and `GET /metrics` while it is open.

    `/health` has the status 200 if all consumers get messages, or could, and 503 if not: the node is away, or refuses them. Its
    body is JSON with the problems and counts of each consumer. `/metrics` has the process's metrics for Prometheus.

    Parameters:
        worker: The worker.
        host: Address to listen on.
        port: Port; 0 for a free one.
    """

    def __init__(self, worker: Worker, host: str, port: int) -> None:
        self._worker = worker
        self._host = host
        self._port = port
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        """The port that it listens on."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def __aenter__(self) -> HealthListener:
        self._server = await asyncio.start_server(self._serve, self._host, self._port, limit=REQUEST_BYTES_MAX)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_S_MAX):
                head = await reader.readuntil(b"\r\n\r\n")
                method, _, rest = head.partition(b" ")
                status, kind, body = self._answer(method, rest.partition(b" ")[0])
                length = f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close"
                writer.write(f"HTTP/1.1 {status}\r\n{length}\r\n\r\n".encode() + body)
                await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            pass  # It was no request, or its client went away.
        finally:
            writer.close()

    def _answer(self, method: bytes, path: bytes) -> tuple[str, str, bytes]:
        if method not in (b"GET", b"HEAD"):
            return "405 Method Not Allowed", "text/plain", b"use GET\n"
        if path == b"/health":
            body = self._health()
            return ("200 OK" if not self._worker.problems else "503 Service Unavailable"), "application/json", body
        if path == b"/metrics":
            if "prometheus_client" not in sys.modules:
                return "404 Not Found", "text/plain", b"this worker has no metrics: add the middleware MeasureCalls\n"
            from prometheus_client import generate_latest

            return "200 OK", "text/plain; version=0.0.4", generate_latest()
        return "404 Not Found", "text/plain", b"use /health or /metrics\n"

    def _health(self) -> bytes:
        worker = self._worker
        consumers = {
            name: {"problem": worker.problems.get(name, ""), **asdict(counts)} for name, counts in worker.counts.items()
        }
        return orjson.dumps({"healthy": not worker.problems, "busy": worker.busy, "consumers": consumers}) + b"\n"
