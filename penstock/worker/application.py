"""Loading a worker by its name, and running it as this process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from importlib import import_module

from penstock.worker.health import HealthListener
from penstock.worker.worker import Worker

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
