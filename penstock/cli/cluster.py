"""`penstock cluster`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from penstock.cli.arguments import Commands, add_command


def add_to(commands: Commands) -> None:
    """Add the command."""
    command = add_command(commands, "cluster", "Make a cluster from this node's data, show its replicas, and promote one.")
    command.add_argument(
        "action",
        choices=("create", "status", "move", "promote"),
        help="create makes the data directory of a stopped node the first replica; replicas with empty directories join it. "
        "status shows who leads, is in sync and is alive. move lets the node of this configuration, which must lead, hand over "
        "to --replica, or to the one that has most. promote lets --replica lead, though it may lack acknowledged messages, "
        "when no replica in sync can come back.",
    )
    command.add_argument("--config", required=True, help="Configuration with the section [replication].")
    command.add_argument(
        "--required",
        type=int,
        default=2,
        help="Replicas that must have a message before it is acknowledged, the leader included (%(default)s).",
    )
    command.add_argument("--replica", default="", metavar="ID", help="For move and promote: the replica that must lead.")
    command.add_argument("--lossy", action="store_true", help="For promote: acknowledged messages may be lost.")
    command.add_argument("--json", action="store_true", help="Print one JSON object.")
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from penstock.cli.replicas import create_cluster, move_leader, promote_replica, show_cluster
    from penstock.node.config import load_config

    config = load_config(Path(options.config), environment=os.environ)
    if options.action == "create":
        create_cluster(config, options.required)
    elif options.action == "move":
        move_leader(config, options.replica)
    elif options.action == "promote":
        promote_replica(config, options.replica, lossy=options.lossy)
    else:
        show_cluster(config, as_json=options.json)
    return 0
