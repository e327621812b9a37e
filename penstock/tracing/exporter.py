"""Sends the node's spans to a collector: one task on the event loop, which nothing of the node waits for.

A collector that can't be reached, or that never answers, costs the node one connection and one batch in memory. Spans wait
meanwhile, as many as `TracingOptions.queue_max`, and further ones are dropped and counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, Final
from uuid import uuid4

import orjson
import structlog
from aiohttp import ClientError, ClientSession, ClientTimeout, DummyCookieJar

from penstock.store.topics import excerpt
from penstock.tracing.traces import AttributeValue, Traces, TraceSpan

CONTENT_TYPE: Final = "application/json"

_ERROR: Final = 2
"""`Status.StatusCode.STATUS_CODE_ERROR`."""


def encode_spans(spans: Iterable[TraceSpan], resource: Mapping[str, AttributeValue], version: str) -> bytes:
    """Return the body of a request with spans.

    Args:
        spans: That have ended.
        resource: Attributes of the resource: who made the spans.
        version: Of the code that made them.
    """
    scope = {"scope": {"name": "penstock", "version": version}, "spans": [_span(span) for span in spans]}
    return orjson.dumps({"resourceSpans": [{"resource": {"attributes": _attributes(resource)}, "scopeSpans": [scope]}]})


def _span(span: TraceSpan) -> dict[str, Any]:
    trace_id, span_id, state = span.context
    found: dict[str, Any] = {
        "traceId": trace_id,
        "spanId": span_id,
        "parentSpanId": span.parent_id,
        "name": span.name,
        "kind": int(span.kind),
        "startTimeUnixNano": str(span.began_ns),
        "endTimeUnixNano": str(span.ended_ns),
        "attributes": _attributes(span.attributes),
    }
    if state:
        found["traceState"] = state
    if span.error:
        found["status"] = {"code": _ERROR, "message": span.error}
    return found


def _attributes(attributes: Mapping[str, AttributeValue]) -> list[dict[str, Any]]:
    return [
        {"key": name, "value": {"stringValue": value} if isinstance(value, str) else {"intValue": str(value)}}
        for name, value in attributes.items()
    ]


logger = structlog.get_logger("tracing")

SERVICE_NAME: Final = "penstock"
"""Name of every node in traces. `service.instance.id` tells nodes apart."""

ANSWER_BYTES_MAX: Final = 65_536
"""Bytes of an answer that are read."""

RETRY_S: Final = 1.0
RETRY_S_MAX: Final = 30.0
"""Seconds until a batch is sent again: they double with each failure."""

STOP_S_MAX: Final = 1.0
"""Seconds in which the last spans may still be sent when the node stops."""

RETRIED: Final = frozenset((429, 502, 503, 504))
"""Statuses after which a batch is sent again (OTLP, OTLP/HTTP Response). After any other failure it is dropped."""


class _TryLater(Exception):
    """Raised when the collector may take the same request later."""


class _BatchRefused(Exception):
    """Raised when the collector will never take the request."""


class SpanExporter:
    """Exports spans.

    Parameters:
        traces: Has the spans.
        version: Of Penstock.
    """

    def __init__(self, traces: Traces, version: str) -> None:
        self.traces = traces
        self._options = traces.options
        self._version = version
        self._resource = {
            "service.name": SERVICE_NAME,
            "service.version": version,
            "service.instance.id": str(uuid4()),
        }
        self._task: asyncio.Task[None] | None = None
        self.exported = 0
        """Spans that the collector has taken."""
        self.refused = 0
        """Spans that the collector has refused."""
        self.failures = 0
        """Requests without an answer, or with one that says to try again."""
        self._is_failing = False
        self._exporting = asyncio.Lock()
        """Held during requests."""

    def start(self) -> None:
        """Export spans from now on."""
        self._task = asyncio.get_running_loop().create_task(self._go_on())

    async def stop(self) -> None:
        """Export what is left, unless the collector doesn't answer, and nothing more."""
        task, self._task = self._task, None
        if task is None:
            return
        if not self._is_failing:
            try:
                async with asyncio.timeout(STOP_S_MAX), self._exporting:  # a request under way may end: it is not sent twice
                    task.cancel()
                    async with self._session() as session:
                        await self._export_all(session)
            except TimeoutError:
                logger.warning("tracing.spans_lost", spans=len(self.traces.ended), why="the collector did not answer in time")
        task.cancel()
        await asyncio.wait([task])

    def _session(self) -> ClientSession:
        timeout = ClientTimeout(total=self._options.timeout_ms / 1000)
        return ClientSession(timeout=timeout, cookie_jar=DummyCookieJar())

    async def _go_on(self) -> None:
        async with self._session() as session:
            while True:
                await self.traces.arrived.wait()
                await asyncio.sleep(self._options.interval_ms / 1000)
                retry_s = RETRY_S
                while True:
                    async with self._exporting:
                        if await self._export_all(session):
                            break
                    await asyncio.sleep(retry_s)
                    retry_s = min(2 * retry_s, RETRY_S_MAX)

    async def _export_all(self, session: ClientSession) -> bool:
        """Export all spans that wait, batch by batch; return False if the collector wants the rest later."""
        waiting = self.traces.ended
        while waiting:
            batch = list(islice(waiting, self._options.batch_max))
            try:
                rejected = await self._export(session, encode_spans(batch, self._resource, self._version))
            except _TryLater as error:
                self.failures += 1
                self._note(str(error))
                return False
            except _BatchRefused as error:
                self._note(str(error))
                rejected = len(batch)
            else:
                self._note(f"the collector rejected {rejected} of {len(batch)} spans" if rejected else "")
            for _ in batch:  # only `_export_all` takes spans out
                waiting.popleft()
            self.refused += rejected
            self.exported += len(batch) - rejected
        self.traces.arrived.clear()
        return True

    async def _export(self, session: ClientSession, data: bytes) -> int:
        """Send a request; return how many of its spans the collector has rejected.

        Raises:
            _TryLater: There is no answer, or the collector is busy.
            _BatchRefused: The collector doesn't want the request.
        """
        headers = {"Content-Type": CONTENT_TYPE}
        try:
            async with session.post(self._options.endpoint, data=data, headers=headers, allow_redirects=False) as response:
                answer = await response.content.read(ANSWER_BYTES_MAX)
        except TimeoutError as error:
            raise _TryLater(f"there was no answer in {self._options.timeout_ms} ms: look at the collector") from error
        except (ClientError, OSError, ValueError) as error:  # ValueError: the answer is no HTTP
            raise _TryLater(str(error) or type(error).__name__) from error
        if response.status in RETRIED:
            raise _TryLater(f"the collector answered with status {response.status}")
        if not 200 <= response.status < 300:
            raise _BatchRefused(f"the collector answered with status {response.status}: {excerpt(answer, 200)}")
        return _rejected(answer)

    def _note(self, why: str) -> None:
        """Log the first of several failures in a row, and the end of them. `why` is empty after a success."""
        if why and not self._is_failing:
            logger.warning("tracing.export_failed", endpoint=self._options.endpoint, why=why)
        elif self._is_failing and not why:
            logger.info("tracing.export_resumed", endpoint=self._options.endpoint)
        self._is_failing = bool(why)


def _rejected(answer: bytes) -> int:
    """Return how many spans a collector has rejected that answers with success."""
    try:
        return int(orjson.loads(answer)["partialSuccess"]["rejectedSpans"])
    except (ValueError, KeyError, TypeError):  # a collector may answer with nothing, or with something else
        return 0
