"""`penstock worker`."""

from __future__ import annotations

import logging

from penstock.store.options import HostPort


def run(name: str, processes: int, *, reload: bool, health: HostPort | None) -> int:
    """Run a worker until a signal; return the exit status.

    Args:
        name: of the worker, as `module:app`.
        processes: number of processes, at least 1.
        reload: whether to start again when a file changes.
        health: address of the health endpoint; None for none.

    Raises:
        ValueError: the name names no worker, or the number is 0.
    """
    if processes < 1:
        raise ValueError(f"--processes is {processes}: use 1 or more")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    listening = (health.host, health.port) if health is not None else None
    if processes > 1 or reload:
        from penstock.worker.processes import WorkerProcesses

        return WorkerProcesses(name, processes, reload=reload, health=listening).run()
    from penstock.worker.application import run_worker

    run_worker(name, listening)
    return 0
