"""`penstock serve`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from penstock.cli.commands.arguments import Commands, add_command, run_async


def add_to(commands: Commands) -> None:
    """Add the command."""
    command = add_command(commands, "serve", "Run a node until SIGTERM or SIGINT.")
    command.add_argument("--config", type=Path, metavar="FILE", help="TOML file with options. The arguments below override it.")
    command.add_argument("--data-dir", metavar="DIR", help="Directory where the node stores everything (penstock-data).")
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
        help="Serve callers whom nothing authenticates, on all listeners, also beyond loopback. For networks that you trust.",
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
    config = load_config(options.config, overrides)
    if options.print_config:
        from penstock.node.document import document_options

        sys.stdout.write(document_options(config))
        return 0
    from penstock.cli.actions.serve import serve

    return run_async(serve(config))
