"""`penstock serve`: a node as a process."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.access.errors import AccessInvalid
from penstock.cli.arguments import Commands, add_command

if TYPE_CHECKING:
    from penstock.node.config import Config
    from penstock.node.node import Node
    from penstock.node.supervisor import Supervisor


def add_to(commands: Commands) -> None:
    """Add the command."""
    command = add_command(commands, "serve", "Run a node until SIGTERM or SIGINT.")
    command.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="TOML file with options. Variables such as PENSTOCK_STORE__RETENTION override it, and the arguments below both.",
    )
    command.add_argument(
        "--data-dir", metavar="DIR", help="Directory where the node stores everything (penstock-data). [PENSTOCK_DATA_DIR]"
    )
    command.add_argument(
        "--mqtt", metavar="HOST:PORT", help="Address of the MQTT listener (127.0.0.1:1883). Port 0 picks a free port."
    )
    command.add_argument("--pop", metavar="HOST:PORT", help="Address of the gRPC listener (127.0.0.1:8081).")
    command.add_argument(
        "--admin", metavar="HOST:PORT", help="Address of the HTTP listener for health, metrics and state (127.0.0.1:8080)."
    )
    command.add_argument(
        "--anonymous",
        action="store_true",
        help="Serve callers whom nothing authenticates, also beyond loopback. For networks that you trust.",
    )
    command.add_argument(
        "--log-level", metavar="LEVEL", help="Least severe events to log: debug, info, warning or error (info)."
    )
    command.add_argument(
        "--print-config", action="store_true", help="Print all options as TOML, each with its meaning, and end."
    )
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from penstock.node.config import load_config

    overrides = {
        "data_dir": options.data_dir,
        "mqtt.listen": options.mqtt,
        "pop.listen": options.pop,
        "admin.listen": options.admin,
        "log.level": options.log_level,
    }
    if options.anonymous:
        overrides |= dict.fromkeys(("mqtt.access.anonymous", "pop.anonymous", "admin.anonymous"), "always")
    config = load_config(options.config, overrides, os.environ)
    if options.print_config:
        from penstock.node.document import document_options

        sys.stdout.write(document_options(config))
        return 0
    import uvloop

    uvloop.run(serve(config))
    return 0


PRIVATE_UMASK = 0o077
"""Nobody but the node's user may read what it writes, such as the files of RocksDB."""

GC_THRESHOLD = 5_000
"""New containers before the garbage collector examines the youngest generation. The hot path creates no cycles, so collections
as frequent as Python's own would find nothing. A collection of 5,000 takes up to 9 ms if all of them are garbage, and nothing
else runs meanwhile."""


SERVES = "serves clients"
FOLLOWS = "follows, and relays clients to the replica that leads"
"""What the supervisor shows as the status of the node."""


async def serve(config: Config) -> None:
    """Run a node until SIGTERM or SIGINT, then stop it in order; after SIGTERM it drains first.

    On SIGHUP, the node reads certificates, rules, users and keys again. A supervisor such as systemd is told of all
    this.

    Raises:
        Whatever `Node` and `Node.start` raise.
    """
    from penstock.node.descriptors import raise_descriptor_limit
    from penstock.node.draining import DrainState
    from penstock.node.logs import configure_logging
    from penstock.node.node import Node
    from penstock.node.supervisor import Supervisor

    os.umask(PRIVATE_UMASK)
    configure_logging(config.log)
    raise_descriptor_limit()
    supervisor = Supervisor(os.environ)
    supervisor.starting()
    node = Node(config)
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, 2, 5_000)
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def drain(grace_s: float) -> None:
        supervisor.stopping("drains")
        node.draining.begin(grace_s).add_done_callback(lambda _: ended.set())

    def terminate() -> None:
        if config.drain_ms and node.draining.state is DrainState.SERVING:
            drain(config.drain_ms / 1000)
        else:
            ended.set()

    loop.add_signal_handler(signal.SIGTERM, terminate)
    loop.add_signal_handler(signal.SIGINT, ended.set)
    node.on_drain = drain
    loop.add_signal_handler(signal.SIGHUP, lambda: _reload(node, supervisor))
    node.on_ready = lambda: _announce(node, supervisor)
    node.on_restart = lambda: _start_again(supervisor)
    is_moving = False

    def move() -> None:
        nonlocal is_moving
        is_moving = not ended.is_set()
        ended.set()

    node.on_move = move
    await node.start()
    if not node.is_ready:
        supervisor.ready(FOLLOWS)
    supervisor.watch(loop)
    await ended.wait()
    if not is_moving:
        supervisor.stopping("stops")
    await node.stop()
    if is_moving:
        _start_again(supervisor)
    supervisor.close()


def _announce(node: Node, supervisor: Supervisor) -> None:
    sys.stdout.write(node.ready_line() + "\n")
    sys.stdout.flush()
    supervisor.ready(SERVES)


def _start_again(supervisor: Supervisor) -> None:
    """Replace this process by a new one with the same arguments and process id. All files and sockets are closed by that."""
    supervisor.begins_anew()
    sys.stderr.flush()
    os.execv(sys.executable, sys.orig_argv)


def _reload(node: Node, supervisor: Supervisor) -> None:
    """Let a node read its files again, and log it if one is not valid: then the old ones stay in force."""
    import structlog

    from penstock.access.subject import Subject

    logger = structlog.get_logger("node")
    supervisor.reloading()
    try:
        node.reload(Subject("SIGHUP"))
    except AccessInvalid as error:
        logger.error("access.not_reloaded", why=str(error))
    else:
        logger.info("node.reloaded")
    supervisor.ready()
