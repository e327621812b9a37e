"""Counts and times the calls of handlers for Prometheus."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from penstock.worker.context import CallNext, HandlerCall

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


class MeasureCalls:
    """A middleware that measures each call: `penstock_worker_messages_total` and `penstock_worker_call_seconds`.

    Both have the labels `group` and `handler`; the counter has `outcome` (`ok` or the name of the exception's class), too.

    Parameters:
        registry: Gets the metrics. By default that of the process. A registry may have one `MeasureCalls`.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        from prometheus_client import REGISTRY, Counter, Histogram

        registry = registry or REGISTRY
        self._messages = Counter(
            "penstock_worker_messages", "Messages that handlers got.", ("group", "handler", "outcome"), registry=registry
        )
        self._seconds = Histogram(
            "penstock_worker_call_seconds", "Duration of a handler's call.", ("group", "handler"), registry=registry
        )

    async def __call__(self, call: HandlerCall, call_next: CallNext) -> Any:
        began_s = time.monotonic()
        outcome = "cancelled"
        try:
            result = await call_next(call)
            outcome = "ok"
        except Exception as error:
            outcome = type(error).__name__
            raise
        finally:
            self._seconds.labels(call.group, call.handler).observe(time.monotonic() - began_s)
            self._messages.labels(call.group, call.handler, outcome).inc(len(call.messages))
        return result
