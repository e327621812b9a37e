"""`penstock tables`."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec

from penstock.cli.commands.arguments import EXIT_FAILED, EXIT_USAGE, Commands, add_command, add_data_dir, add_json
from penstock.install import install_hint


def add_to(commands: Commands) -> None:
    """Add the command."""
    command = add_command(commands, "tables", "Keep the sealed segments of a log as Parquet tables; the node may be running.")
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION")

    backfill = add_command(actions, "backfill", "Write the tables of all sealed segments that are not in the tables yet.")
    add_data_dir(backfill)
    backfill.add_argument("--json", action="store_true", help="Print one JSON object per segment.")
    backfill.set_defaults(run=_backfill)

    compact = add_command(actions, "compact", "Join the small files of days that are over, as the node does once a day.")
    add_data_dir(compact)
    compact.add_argument("--json", action="store_true", help="Print one JSON object per file of each table.")
    compact.set_defaults(run=_compact)

    listing = add_command(actions, "list", "Print the tables with their files, rows, bytes and positions.")
    add_data_dir(listing)
    add_json(listing)
    listing.set_defaults(run=_list)

    verify = add_command(
        actions, "verify", "Compare the tables with the segments that the log still has. The exit status is 1 if they differ."
    )
    add_data_dir(verify)
    verify.add_argument("--json", action="store_true", help="Print the findings as one JSON object.")
    verify.set_defaults(run=_verify)


def _backfill(options: argparse.Namespace) -> int:
    if not _is_installed():
        return EXIT_USAGE
    from penstock.cli.actions.tables import backfill_tables

    backfill_tables(options.data_dir, as_json=options.json)
    return 0


def _compact(options: argparse.Namespace) -> int:
    if not _is_installed():
        return EXIT_USAGE
    from penstock.cli.actions.tables import compact_tables

    compact_tables(options.data_dir, as_json=options.json)
    return 0


def _list(options: argparse.Namespace) -> int:
    if not _is_installed():
        return EXIT_USAGE
    from penstock.cli.actions.tables import list_tables

    list_tables(options.data_dir, as_json=options.json)
    return 0


def _verify(options: argparse.Namespace) -> int:
    if not _is_installed():
        return EXIT_USAGE
    from penstock.cli.actions.tables import verify_tables

    return 0 if verify_tables(options.data_dir, as_json=options.json) else EXIT_FAILED


def _is_installed() -> bool:
    if find_spec("pyarrow") is not None:
        return True
    print(f"penstock tables: pyarrow is not installed: {install_hint('tables')}", file=sys.stderr)
    return False
