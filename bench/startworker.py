"""The worker that `bench.pop` starts and stops to measure how long a start takes: it says when a message was handled."""

from __future__ import annotations

import os

from penstock import Worker

FILTER = "PENSTOCK_BENCH_FILTER"
"""Environment variable with the filter of the worker's group, and its name."""

app = Worker()


@app.consumer(os.environ.get(FILTER, "bench/#"), group=os.environ.get(FILTER, "bench/#").partition("/")[0])
async def handle(body: bytes) -> None:
    """Say that a message came."""
    print("handled", flush=True)
