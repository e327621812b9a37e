"""The command line of Penstock: parses the arguments, runs the command, turns an error into one line and an exit status.

The parser of a family of commands is made when an argument names the family, so that each command starts quickly.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import NamedTuple

from penstock.cli.commandparser import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, CommandParser
from penstock.cli.standardstreams import open_missing


class Family(NamedTuple):
    """Commands of one module."""

    module: str
    """Its name below `penstock.cli`. Its function `add_to` adds the commands to a parser."""
    commands: Mapping[str, str]
    """What each command does, by its name."""


FAMILIES: Mapping[str, tuple[Family, ...]] = {
    "run": (
        Family("serve", {"serve": "Run a node."}),
        Family("demo", {"demo": "Run a node with devices and consumers that fail."}),
        Family("worker", {"worker": "Run the consumers of an application."}),
    ),
    "messages": (
        Family("mqtt", {"pub": "Publish a message over MQTT.", "sub": "Print the messages of a topic filter over MQTT."}),
        Family("messages", {"send": "Send a message over gRPC, now or later.", "pop": "Pop messages for a group."}),
        Family("groups", {"group": "Create, list, change, pause, reset and delete groups."}),
        Family("deadletters", {"dlq": "List dead letters, and send them back."}),
        Family("timers", {"timer": "List, find, cancel and reschedule delayed messages."}),
        Family("schedules", {"schedule": "Let the node send messages by a rule."}),
    ),
    "inspect": (
        Family(
            "connected",
            {
                "clients": "List, show, kick and ban MQTT clients.",
                "sessions": "List, show and delete stored sessions.",
            },
        ),
        Family("topics", {"topics": "List topics, queues and subscribers."}),
        Family("retained", {"retained": "List, show and delete retained messages."}),
        Family("top", {"top": "Show what a running node does."}),
        Family("storage", {"storage": "Show what a node stores, and what keeps it."}),
        Family("nodeoptions", {"options": "List the options of a node.", "log-level": "Show or set what a node logs."}),
        Family("inspect", {"inspect": "Print what a data directory holds."}),
        Family("story", {"story": "Print what happened to a message."}),
        Family("reconcile", {"reconcile": "Pair every delivery with its acknowledgement."}),
        Family("tables", {"tables": "Keep the log as Parquet tables."}),
    ),
    "maintain": (
        Family(
            "backup",
            {
                "backup": "Back up a data directory.",
                "restore": "Restore a backup into an empty directory.",
                "verify": "Verify a backup or a data directory.",
            },
        ),
        Family("repair", {"repair": "Set damaged parts of a log aside."}),
        Family("drain", {"drain": "Send the clients of a node away, and stop it."}),
        Family("clock", {"clock": "Show the node's time, and accept a jump."}),
        Family("cluster", {"cluster": "Make a cluster, show it, and move its leader."}),
        Family("access", {"access": "Reload, test and enforce the access control."}),
        Family("user", {"user": "Change a password file."}),
    ),
    "clients": (
        Family("rocketmq", {"rocketmq": "List RocketMQ clients, and give them commands."}),
        Family("context", {"context": "Name nodes, and choose the one to use."}),
        Family("completion", {"completion": "Print a script that completes commands in a shell."}),
    ),
}
"""All commands, in the groups of the help."""

REPLACED = {"recall": "penstock timer cancel", "client": "penstock rocketmq"}
"""What does the work of commands that were removed."""

_OF_NODE = (
    "aiohttp amqtt argon2 cronsim cryptography dateutil fastcrc grpc_health grpc_reflection jwt msgspec numpy paho "
    "prometheus_client rich rocksdict structlog uvloop websockets"
)

EXTRAS = dict.fromkeys(_OF_NODE.split(), "node") | {
    "pyarrow": "tables",
    "duckdb": "tables",
    "pyspark": "spark",
    "pandas": "spark",
    "shtab": "completion",
}
"""The extra that installs a package. A worker needs none: what it lacks is a package of the application."""

TRACEBACK = "PENSTOCK_TRACEBACK"
"""Environment variable with which an unexpected error shows where it comes from."""

PROCESSES = ("serve", "worker", "demo")
"""Commands whose unexpected errors belong in a log, with a traceback."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0 for success, 1 for a failure, 2 for wrong usage, 130 for Ctrl-C."""
    open_missing()
    # gRPC reads this when it is loaded. Its own lines about handshakes and ports say less than the errors that follow them.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    arguments = sys.argv[1:] if arguments is None else arguments
    command = _command_of(arguments)
    if command in REPLACED:
        print(f"penstock: there is no command {command!r}. Say {REPLACED[command]}.", file=sys.stderr)
        return EXIT_USAGE
    try:
        options = parse(arguments)
        status: int = options.run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:  # first, since what is below imports the errors of all packages
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Another command, such as `head`, has read enough. What the interpreter flushes at its end goes nowhere, too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except _expected_errors() as error:
        _print_error(f"penstock {command}: {_text_of(error)}")
        return EXIT_USAGE if isinstance(error, _usage_errors()) else EXIT_FAILED
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and command != "worker" and (package := _package_of(error)) in EXTRAS:
            _print_error(_what_installs(command or "", package))
            return EXIT_USAGE
        if TRACEBACK in os.environ or command in PROCESSES:
            raise
        # Whoever runs a command at night can do nothing with a traceback, and reads past what it was about.
        told = (
            f"this is a defect of Penstock ({type(error).__name__}: {error}). Set {TRACEBACK}=1 for a traceback, and report it."
        )
        _print_error(f"penstock {command}: {told}")
        return EXIT_FAILED
    return status


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of a command. A mistake in them ends the process with status 2."""
    options, unknown = build_parser(arguments).parse_known_args(arguments)
    parser: CommandParser = options.parser
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    for action in parser._actions:
        for text in _texts(getattr(options, action.dest, None)):
            if not _is_utf8(text):
                name = "/".join(action.option_strings) or action.dest
                parser.error(f"argument {name}: {os.fsencode(text)!r} is not UTF-8. Set the terminal to UTF-8.")
    return options


def _texts(value: object) -> Iterator[str]:
    """Yield the texts of a parsed argument. Paths are none: the name of a file may be any bytes."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)


def _is_utf8(text: str) -> bool:
    """Return whether an argument was UTF-8. Python has surrogates in place of other bytes, which nothing can encode."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def build_parser(arguments: Sequence[str] | None = None) -> CommandParser:
    """Return the parser of all commands, or one that can parse certain arguments.

    Each command sets `run`, a function of the parsed options that returns the status, and `parser`, its own parser.

    Args:
        arguments: that the parser must understand. It knows only the names of commands that they do not name. None for all.
    """
    parser = _Penstock(prog="penstock", description="An MQTT broker and POP message queue on one durable log.")
    parser.add_argument("--version", action=_PrintVersion, nargs=0, help="Print the version.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=CommandParser)
    wanted = None if arguments is None else _command_of(arguments)
    for family in _families():
        if arguments is None or wanted in family.commands:
            import_module(f"penstock.cli.{family.module}").add_to(commands)
        else:
            for name in family.commands:
                commands.add_parser(name)
    return parser


class _PrintVersion(argparse.Action):
    """Prints the version, and ends the process."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from penstock.cli.version import version_text

        print(version_text())
        parser.exit()


class _Penstock(CommandParser):
    """The parser of everything. Its help shows the commands in groups."""

    def format_help(self) -> str:
        lines = ["usage: penstock COMMAND [ARGUMENT ...]", "", self.description or ""]
        for title, families in FAMILIES.items():
            lines += ["", f"{title}:"]
            lines += [f"  {name:<12}{summary}" for family in families for name, summary in family.commands.items()]
        lines += ["", "`penstock COMMAND --help` shows the arguments of a command, `penstock --version` the version."]
        return "\n".join(lines) + "\n"


def _families() -> Iterator[Family]:
    for families in FAMILIES.values():
        yield from families


def _command_of(arguments: Sequence[str]) -> str | None:
    """Return the first argument that is no option; None if there is none."""
    return next((each for each in arguments if not each.startswith("-")), None)


def _expected_errors() -> tuple[type[Exception], ...]:
    """Return the errors whose text is meant for an operator. Python calls this when an error is raised."""
    from penstock.access.errors import AccessInvalid
    from penstock.cluster.errors import ClusterError
    from penstock.node.errors import AdminUnavailable, ControlRefused, DescriptorsTooFew, NodeNotRunning
    from penstock.pop.errors import PopError
    from penstock.spark.errors import ReconcileError
    from penstock.store.errors import StoreError
    from penstock.worker.errors import WorkerError

    of_packages = (StoreError, PopError, WorkerError, ClusterError, ReconcileError, AccessInvalid)
    return (
        *of_packages,
        AdminUnavailable,
        ControlRefused,
        DescriptorsTooFew,
        NodeNotRunning,
        *_usage_errors(),
        OSError,
        ValueError,
    )


def _usage_errors() -> tuple[type[Exception], ...]:
    """Return the errors that mean wrong usage."""
    from penstock.node.errors import ConfigError
    from penstock.settings import SettingInvalid
    from penstock.store.options import OptionInvalid

    return (ConfigError, OptionInvalid, SettingInvalid)


def _package_of(error: ModuleNotFoundError) -> str:
    return (error.name or "").partition(".")[0]


def _what_installs(command: str, package: str) -> str:
    """Return what to do about a package that is not installed."""
    from penstock.install import install_hint

    extra = EXTRAS[package]
    needed = "the node's packages" if extra == "node" else package
    return f"penstock {command} needs {needed}: {install_hint(extra)}."


def _print_error(text: str) -> None:
    from penstock.store.printable import printable

    print(printable(text, keep="\n"), file=sys.stderr)


def _text_of(error: Exception) -> str:
    """Return the text of an error. One of the system begins with its number; one of a call does not know of flags."""
    from penstock.pop.errors import NotAuthenticated

    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename} can't be used: {error.strerror}."
    if isinstance(error, NotAuthenticated):
        return f"{error}. A command shows the token of --token-file or PENSTOCK_TOKEN."
    return str(error)
