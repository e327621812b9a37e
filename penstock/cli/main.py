"""The command line of Penstock: parses the arguments, runs the command, turns an error into one line and an exit status."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from penstock import __version__
from penstock.cli.commands import (
    access,
    backup,
    client,
    clock,
    cluster,
    completion,
    deadletters,
    demo,
    groups,
    inspect,
    messages,
    mqtt,
    reconcile,
    repair,
    schedules,
    serve,
    story,
    tables,
    timers,
    top,
    user,
    worker,
)
from penstock.cli.commands.arguments import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE
from penstock.cluster.errors import ClusterError
from penstock.node.errors import AdminUnavailable, ConfigError, ControlRefused, DescriptorsTooFew, NodeNotRunning
from penstock.pop.errors import PopError
from penstock.spark.errors import ReconcileError
from penstock.store.errors import StoreError
from penstock.store.options import OptionInvalid
from penstock.store.printable import printable
from penstock.worker.errors import WorkerError

NODE_ERRORS = (ConfigError, AdminUnavailable, ControlRefused, DescriptorsTooFew, NodeNotRunning)

TRACEBACK = "PENSTOCK_TRACEBACK"
"""Environment variable with which an unexpected error shows where it comes from."""

PROCESSES = ("serve", "worker", "demo")
"""Commands whose unexpected errors belong in a log, with a traceback."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0 for success, 1 for a failure, 2 for wrong usage, 130 for Ctrl-C."""
    options = build_parser().parse_args(arguments)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # Another command, such as `head`, has read enough. What the interpreter flushes at its end goes nowhere, too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except (StoreError, PopError, WorkerError, ClusterError, ReconcileError, *NODE_ERRORS, OSError, ValueError) as error:
        print(printable(f"penstock {options.command}: {_text_of(error)}", keep="\n"), file=sys.stderr)
        return EXIT_USAGE if isinstance(error, ConfigError | OptionInvalid) else EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        if TRACEBACK in os.environ or options.command in PROCESSES:
            raise
        # Whoever runs a command at night can do nothing with a traceback, and reads past what it was about.
        told = (
            f"this is a defect of Penstock ({type(error).__name__}: {error}). Set {TRACEBACK}=1 for a traceback, and report it."
        )
        print(printable(f"penstock {options.command}: {told}"), file=sys.stderr)
        return EXIT_FAILED
    return status


def _text_of(error: Exception) -> str:
    """Return the text of an error. That of the system begins with its number, and does not say what it is about."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename} can't be used: {error.strerror}."
    return str(error)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands. Each command sets `run`, a function of the parsed options that returns the status."""
    parser = argparse.ArgumentParser(prog="penstock", description="An MQTT broker and POP message queue on one durable log.")
    parser.add_argument("--version", action="version", version=f"penstock {__version__}", help="Print the version.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for family in (
        serve,
        demo,
        top,
        mqtt,
        messages,
        groups,
        deadletters,
        schedules,
        timers,
        reconcile,
        tables,
        story,
        inspect,
        repair,
        backup,
        clock,
        cluster,
        client,
        access,
        user,
        worker,
        completion,
    ):
        family.add_to(commands)
    parser.set_defaults(parser=parser)
    return parser
