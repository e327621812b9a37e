"""An application with tasks, which a test runs as worker processes of taskiq."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from penstock.contrib.taskiq import PenstockTasks

broker = PenstockTasks(os.environ["PENSTOCK_TARGET"], invisible=float(os.environ["TASKS_INVISIBLE"]))


@broker.task
async def note(number: int, wait_s: float) -> None:
    """Write a line when the task begins, and one when it ends."""
    log = Path(os.environ["TASKS_LOG"])
    with log.open("a") as file:  # noqa: ASYNC230 - a line
        file.write(f"began {number}\n")
    await asyncio.sleep(wait_s)
    with log.open("a") as file:  # noqa: ASYNC230 - a line
        file.write(f"ended {number}\n")
