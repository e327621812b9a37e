"""`penstock serve`: a node as a process."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys

import structlog

from penstock.access.errors import AccessInvalid
from penstock.node.config import Config
from penstock.node.descriptors import raise_descriptor_limit
from penstock.node.logs import configure_logging
from penstock.node.node import Node

logger = structlog.get_logger("node")

PRIVATE_UMASK = 0o077
"""Nobody but the node's user may read what it writes, such as the files of RocksDB."""

GC_THRESHOLD = 5_000
"""New containers before the garbage collector examines the youngest generation. The hot path creates no cycles, so collections
as frequent as Python's own would find nothing. A collection of 5,000 takes up to 9 ms if all of them are garbage, and nothing
else runs meanwhile."""


async def serve(config: Config) -> None:
    """Run a node until SIGTERM or SIGINT, then stop it in order. On SIGHUP, the node reads certificates, rules, users and
    keys again.

    Raises:
        Whatever `Node` and `Node.start` raise.
    """
    os.umask(PRIVATE_UMASK)
    configure_logging(config.log)
    raise_descriptor_limit()
    node = Node(config)
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, 2, 5_000)
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    loop.add_signal_handler(signal.SIGHUP, lambda: _reload(node))
    node.on_ready = lambda: _say(node.ready_line())
    node.on_restart = _start_again
    is_moving = False

    def move() -> None:
        nonlocal is_moving
        is_moving = not ended.is_set()
        ended.set()

    node.on_move = move
    await node.start()
    await ended.wait()
    await node.stop()
    if is_moving:
        _start_again()


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _start_again() -> None:
    """Replace this process by a new one with the same arguments and process id. All files and sockets are closed by that."""
    sys.stderr.flush()
    os.execv(sys.executable, sys.orig_argv)


def _reload(node: Node) -> None:
    """Let a node read its files again, and log it if one is not valid: then the old ones stay in force."""
    try:
        node.reload("SIGHUP")
    except AccessInvalid as error:
        logger.error("access.not_reloaded", why=str(error))
    else:
        logger.info("node.reloaded")
