"""Loading a worker by its name, and running it as this process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from importlib import import_module
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


PYTHON_GC_THRESHOLD = gc.get_threshold()[0]

GC_THRESHOLD = 10_000
"""New containers before the garbage collector examines the youngest generation. Each pop brings up to two thousand that the
collector can't free, so collections as frequent as Python's own are a fifth of what a worker with fast handlers does."""


def spare_collector() -> None:
    """Let the garbage collector pass over what the process has loaded, and run less often.

    A collector that the application has set otherwise is left as it is.
    """
    if gc.get_threshold()[0] == PYTHON_GC_THRESHOLD:
        gc.collect()
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD)


def load(name: str) -> Worker:
    """Return the worker with a name such as `module:app` or `package.module:app`. The current directory is searched first.

    Raises:
        ValueError: The name is not of this form, or names no worker.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ValueError(f"{name!r} names no worker: write MODULE:NAME, such as billing:app")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise  # The module was found, and imports something that was not.
        raise ValueError(f"there is no module {module_name!r} in {os.getcwd()} or on the path") from error
    if not hasattr(module, attribute):
        raise ValueError(f"there is no {attribute!r} in {module_name}: name a penstock.Worker of it, as in billing:app")
    found = getattr(module, attribute)
    if not isinstance(found, Worker):
        raise ValueError(f"{attribute!r} of {module_name} is {type(found).__name__}: it must be a penstock.Worker")
    return found


def run_worker(name: str, health: tuple[str, int] | None) -> None:
    """Run a worker as this process until SIGTERM or SIGINT.

    Args:
        name: Names the worker, as for `load`.
        health: Host and port of the health endpoint; None for none.

    Raises:
        ValueError: The name names no worker.
        WorkerError, PopError: As `Worker.run` raises them.
    """
    worker = load(name)
    spare_collector()
    run = _loop()
    run(_run(worker, health))
    if any(thread.name.startswith("penstock-worker") for thread in threading.enumerate()):
        # The grace is over, and their messages went back. Python would wait for these threads for ever.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _loop() -> Callable[[Coroutine[None, None, None]], None]:
    """Return what runs a coroutine: uvloop, which comes with the node's packages, or asyncio's own loop without it."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.run
    return uvloop.run


async def _run(worker: Worker, health: tuple[str, int] | None) -> None:
    async with contextlib.AsyncExitStack() as stack:
        if health is not None:
            await stack.enter_async_context(HealthListener(worker, *health))
        await worker.run()
        # Threads of handlers that just returned need a moment to end.
        for thread in threading.enumerate():
            if thread.name.startswith("penstock-worker"):
                await asyncio.to_thread(thread.join, 0.05)
