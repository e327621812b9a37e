"""The command line of Penstock: parses, calls, and turns errors into one line and an exit status.

What a command needs is imported when it runs: each is a process of its own, and all together take half a second to import.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import __version__
from penstock.install import install_hint
from penstock.node.errors import AdminUnavailable, ConfigError
from penstock.pop.errors import PopError
from penstock.store.errors import StoreError
from penstock.store.options import HostPort, OptionInvalid

if TYPE_CHECKING:
    from penstock.pop.backoff import Backoff
    from penstock.store.lightqueue import Start

EXIT_FAILED = 1
EXIT_USAGE = 2

MQTT = HostPort("127.0.0.1", 1883)
POP = HostPort("127.0.0.1", 8081)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status: 0 done, 1 it failed, 2 it was called wrongly."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except (StoreError, PopError, ConfigError, AdminUnavailable, OSError, ValueError) as error:
        print(f"penstock {options.command}: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, ConfigError | OptionInvalid) else EXIT_FAILED
    except KeyboardInterrupt:
        return 130
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="penstock", description="An MQTT broker and POP message queue on one durable log.")
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_serve(commands)
    _add_demo(commands)
    _add_mqtt_tools(commands)
    _add_pop_tools(commands)
    _add_group_tools(commands)
    _add_dlq(commands)
    _add_reconcile(commands)
    _add_inspect(commands)
    _add_repair(commands)
    return parser


Commands = Any
"""What argparse's `add_subparsers` returns has no public name."""


def _add_serve(commands: Commands) -> None:
    command = commands.add_parser("serve", help="run a node")
    command.add_argument("--config", type=Path, metavar="FILE", help="TOML file with options")
    command.add_argument("--data-dir", metavar="DIR", help="where everything is stored (./penstock-data)")
    command.add_argument("--mqtt", metavar="HOST:PORT", help="MQTT listener (127.0.0.1:1883); port 0 picks a free one")
    command.add_argument("--pop", metavar="HOST:PORT", help="gRPC listener (127.0.0.1:8081)")
    command.add_argument("--admin", metavar="HOST:PORT", help="HTTP listener for health and metrics (127.0.0.1:8080)")
    command.add_argument("--log-level", metavar="LEVEL", help="debug, info, warning or error (info)")
    command.add_argument("--print-config", action="store_true", help="print all options as TOML, and end")
    command.set_defaults(run=_serve)


def _serve(options: argparse.Namespace) -> int:
    from penstock.node.config import document_options, load_config

    overrides = {
        "data_dir": options.data_dir,
        "mqtt.listen": options.mqtt,
        "pop.listen": options.pop,
        "admin.listen": options.admin,
        "log.level": options.log_level,
    }
    config = load_config(options.config, overrides)
    if options.print_config:
        sys.stdout.write(document_options(config))
        return 0
    import uvloop

    from penstock.cli.serve import serve

    uvloop.run(serve(config))
    return 0


def _add_demo(commands: Commands) -> None:
    command = commands.add_parser("demo", help="run a fleet, failing consumers and the reconciliation, and show the report")
    command.add_argument("--dir", type=Path, metavar="DIR", help="where its files go (a new temporary directory)")
    command.add_argument("--devices", type=_count, default=200, help="devices, one MQTT connection each (%(default)s)")
    command.add_argument("--readings", type=_count, default=20_000, help="readings published in total (%(default)s)")
    command.add_argument("--seed", type=int, default=1, help="same seed, same readings (%(default)s)")
    command.set_defaults(run=_demo)


def _demo(options: argparse.Namespace) -> int:
    from penstock.demo.demo import run_demo

    return run_demo(options.dir, devices=options.devices, readings=options.readings, seed=options.seed)


def _add_mqtt_tools(commands: Commands) -> None:
    command = commands.add_parser("pub", help="publish over MQTT")
    command.add_argument("topic")
    command.add_argument("body", help="the message, or - for standard input")
    command.add_argument("--mqtt", type=HostPort.parse, default=MQTT, metavar="HOST:PORT")
    command.add_argument("--qos", type=int, choices=(0, 1, 2), default=1)
    command.add_argument("--retain", action="store_true")
    command.add_argument("--count", type=_count, default=1, help="publish it so many times (%(default)s)")
    command.set_defaults(run=_pub)
    command = commands.add_parser("sub", help="subscribe over MQTT and print what comes")
    command.add_argument("filter")
    command.add_argument("--mqtt", type=HostPort.parse, default=MQTT, metavar="HOST:PORT")
    command.add_argument("--qos", type=int, choices=(0, 1, 2), default=1)
    command.add_argument("--count", type=_count, default=0, help="end after so many messages (0: never)")
    command.add_argument("--json", action="store_true", help="one JSON object a line")
    command.set_defaults(run=_sub)


def _pub(options: argparse.Namespace) -> int:
    from penstock.cli import pubsub

    body = _body(options.body)
    return _finish(
        pubsub.publish(options.mqtt, options.topic, body, qos=options.qos, retain=options.retain, count=options.count)
    )


def _sub(options: argparse.Namespace) -> int:
    from penstock.cli import pubsub

    return _finish(pubsub.subscribe(options.mqtt, options.filter, qos=options.qos, count=options.count, as_json=options.json))


def _add_pop_tools(commands: Commands) -> None:
    command = commands.add_parser("pop", help="pop messages of a group and acknowledge them")
    command.add_argument("filter")
    command.add_argument("--group", required=True)
    command.add_argument("--pop", type=HostPort.parse, default=POP, metavar="HOST:PORT")
    command.add_argument("--count", type=_count, default=1, help="messages at most (%(default)s)")
    command.add_argument("--invisible-ms", type=_count, default=0, help="invisible time (the node's default)")
    command.add_argument("--wait-ms", type=_count, default=0, help="wait so long for the first message (%(default)s)")
    settle = command.add_mutually_exclusive_group()
    settle.add_argument("--no-ack", action="store_true", help="let them come back when the invisible time is over")
    settle.add_argument(
        "--ask", action="store_true", help="ask for each: a(ck), n(ack), s(uspend), d(ead letter), or leave it as it is"
    )
    command.add_argument("--json", action="store_true", help="one JSON object a line")
    command.set_defaults(run=_pop)
    command = commands.add_parser("send", help="send a message over gRPC, now or later")
    command.add_argument("topic")
    command.add_argument("body", help="the message, or - for standard input")
    command.add_argument("--pop", type=HostPort.parse, default=POP, metavar="HOST:PORT")
    command.add_argument("--delay-ms", type=_count, default=0, help="deliver it so much later (%(default)s)")
    command.add_argument("--tag", default="")
    command.add_argument("--json", action="store_true", help="one JSON object a line")
    command.set_defaults(run=_send)
    command = commands.add_parser("recall", help="cancel a delayed message")
    command.add_argument("handle", help="as `penstock send --delay-ms` printed it")
    command.add_argument("--pop", type=HostPort.parse, default=POP, metavar="HOST:PORT")
    command.set_defaults(run=_recall)


def _pop(options: argparse.Namespace) -> int:
    from penstock.cli import tools

    return _finish(
        tools.pop(
            options.pop,
            options.filter,
            group=options.group,
            count=options.count,
            invisible_ms=options.invisible_ms,
            wait_ms=options.wait_ms,
            settle="ask" if options.ask else "leave" if options.no_ack else "ack",
            as_json=options.json,
        )
    )


def _send(options: argparse.Namespace) -> int:
    from penstock.cli import tools

    body = _body(options.body)
    return _finish(
        tools.send(options.pop, options.topic, body, delay_ms=options.delay_ms, tag=options.tag, as_json=options.json)
    )


def _recall(options: argparse.Namespace) -> int:
    from penstock.cli import tools

    return _finish(tools.recall(options.pop, options.handle))


def _add_group_tools(commands: Commands) -> None:
    command = commands.add_parser("group", help="create, list, change, pause, reset and delete groups")
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION")
    for action, text in (
        ("list", "how groups stand: all, or one"),
        ("create", "create a group on a filter"),
        ("update", "change settings of a group"),
        ("pause", "let its pops get nothing"),
        ("resume", "end a pause"),
        ("reset", "begin anew elsewhere; its handles are void"),
        ("delete", "delete it, with its dead letters unless another group consumes them"),
    ):
        each = actions.add_parser(action, help=text)
        optional = {"nargs": "?", "default": ""}
        each.add_argument("group", **(optional if action == "list" else {}))
        each.add_argument("filter", help="one of its filters", **({} if action == "create" else optional))
        each.add_argument("--pop", type=HostPort.parse, default=POP, metavar="HOST:PORT")
        each.add_argument("--json", action="store_true", help="one JSON object a line")
        each.set_defaults(run=_group)
        if action in ("create", "update"):
            _add_settings(each)
        if action == "create":
            each.add_argument(
                "--start", type=_start, default="earliest", help="earliest, latest or ms since 1970 (%(default)s)"
            )
        if action == "reset":
            to = each.add_mutually_exclusive_group(required=True)
            to.add_argument("--to", choices=("earliest", "latest"))
            to.add_argument("--time-ms", type=_count, help="what was stored then or later, ms since 1970")
            to.add_argument("--message-id", help="that message, or what follows it")


def _add_settings(command: argparse.ArgumentParser) -> None:
    command.add_argument("--attempts-max", type=_count, help="times that a message is handed out; 0: the node's option")
    command.add_argument("--backoff", type=_backoff, help="none, 1000,5000 (ms) or exponential:MIN_MS:MAX_MS[:FACTOR]")
    command.add_argument("--invisible-ms", type=_count, help="for pops that don't say; 0: the node's option")
    command.add_argument("--in-flight-max", type=_count, help="messages that may be out; 0: the node's option")
    command.add_argument("--fifo", action=argparse.BooleanOptionalAction, help="one message of a message group at a time")
    expression = command.add_mutually_exclusive_group()
    expression.add_argument("--tags", help="'a || b': only these; '*': all")
    expression.add_argument("--sql", help="a condition on properties: \"level > 3 AND unit = 'degC'\"")


def _add_dlq(commands: Commands) -> None:
    command = commands.add_parser("dlq", help="list dead letters of a group, and send them back")
    actions = command.add_subparsers(dest="dlq_action", required=True, metavar="ACTION")
    listing = actions.add_parser("list", help="dead letters that were not sent back")
    listing.add_argument("group")
    listing.add_argument("--after", default="", metavar="MESSAGE_ID", help="those behind this one")
    listing.add_argument("--limit", type=_count, default=100, help="at most so many (%(default)s)")
    listing.add_argument("--json", action="store_true", help="one JSON object a line")
    listing.set_defaults(run=_group, action="letters")
    redrive = actions.add_parser("redrive", help="send dead letters back to their group, as new messages")
    redrive.add_argument("group")
    which = redrive.add_mutually_exclusive_group(required=True)
    which.add_argument("message_id", nargs="*", default=[])
    which.add_argument("--all", action="store_true", help="all of them, up to 10,000")
    redrive.set_defaults(run=_group, action="redrive")
    for each in (listing, redrive):
        each.add_argument("--pop", type=HostPort.parse, default=POP, metavar="HOST:PORT")


def _group(options: argparse.Namespace) -> int:
    from penstock.cli.groups import run

    return run(options)


def _add_reconcile(commands: Commands) -> None:
    command = commands.add_parser("reconcile", help="pair every checkpoint with its acknowledgement, with Spark")
    command.add_argument("--data-dir", type=Path, default=Path("penstock-data"), metavar="DIR", help="of a node (%(default)s)")
    command.add_argument("--out", type=Path, metavar="DIR", help="write Parquet tables and summary.json there")
    command.add_argument("--master", default="local[*]", metavar="URL", help="Spark master (%(default)s)")
    command.add_argument("--json", action="store_true", help="print the summary as JSON")
    command.add_argument("--as-of-ms", type=_count, help="judge deadlines as of this time (the log's last record)")
    command.add_argument("--grace-ms", type=_count, default=60_000, help="time after a deadline until it counts (%(default)s)")
    command.set_defaults(run=_reconcile)


def _reconcile(options: argparse.Namespace) -> int:
    try:
        from penstock.spark.reconcile import run
    except ModuleNotFoundError as error:
        print(f"penstock reconcile: {error.name} is not installed: {install_hint('spark')}", file=sys.stderr)
        return EXIT_USAGE
    return run(options.data_dir, options.out, options.master, options.json, options.as_of_ms, options.grace_ms)


def _add_inspect(commands: Commands) -> None:
    command = commands.add_parser("inspect", help="look into a data directory; changes nothing")
    things = command.add_subparsers(dest="thing", required=True, metavar="THING")
    log = things.add_parser("log", help="the records of the CommitLog")
    log.add_argument("--data-dir", type=Path, default=Path("penstock-data"), metavar="DIR", help="of a node (%(default)s)")
    log.add_argument(
        "--kind",
        action="append",
        default=[],
        type=_kind,
        metavar="KIND",
        help="such as message or pop_ack; a wrong one lists them",
    )
    log.add_argument("--topic", default="", metavar="FILTER", help="topic filter; of POP records the group")
    log.add_argument("--from", dest="position", type=_count, default=0, metavar="POSITION", help="a record's position")
    log.add_argument("--since-ms", type=_count, default=0, help="stored at this time or later, ms since 1970")
    log.add_argument("--until-ms", type=_count, default=0, help="stored at this time or before")
    log.add_argument("--limit", type=_count, default=100, help="records at most, 0 for all (%(default)s)")
    log.add_argument("--json", action="store_true", help="one JSON object a line")
    log.set_defaults(run=_inspect_log)
    queues = things.add_parser(
        "queues", help="the light queues, as of the last flush of the index (every store.index_flush_ms, and at a stop)"
    )
    queues.add_argument("--data-dir", type=Path, default=Path("penstock-data"), metavar="DIR", help="of a node (%(default)s)")
    queues.add_argument("--filter", default="", metavar="FILTER", help="those of this very filter")
    queues.add_argument("--limit", type=_count, default=100, help="queues at most, 0 for all (%(default)s)")
    queues.add_argument("--json", action="store_true", help="one JSON object a line")
    queues.set_defaults(run=_inspect_queues)
    groups = things.add_parser("groups", help="the groups, as of the last flush of the index")
    groups.add_argument("--data-dir", type=Path, default=Path("penstock-data"), metavar="DIR", help="of a node (%(default)s)")
    groups.add_argument("--group", default="", metavar="GROUP", help="only this one")
    groups.add_argument("--json", action="store_true", help="one JSON object a line")
    groups.set_defaults(run=_inspect_groups)
    sessions = things.add_parser("sessions", help="the stored MQTT sessions, as of the last flush of the index")
    sessions.add_argument("--data-dir", type=Path, default=Path("penstock-data"), metavar="DIR", help="of a node (%(default)s)")
    sessions.add_argument("--client", default="", metavar="ID", help="only the one of this client")
    sessions.add_argument("--limit", type=_count, default=100, help="sessions at most, 0 for all (%(default)s)")
    sessions.add_argument("--json", action="store_true", help="one JSON object a line")
    sessions.set_defaults(run=_inspect_sessions)


def _inspect_log(options: argparse.Namespace) -> int:
    from penstock.cli.inspect import inspect_log

    inspect_log(
        options.data_dir,
        kinds=options.kind,
        topic_filter=options.topic,
        position=options.position,
        since_ms=options.since_ms,
        until_ms=options.until_ms,
        limit=options.limit,
        as_json=options.json,
    )
    return 0


def _inspect_queues(options: argparse.Namespace) -> int:
    from penstock.cli.inspect import inspect_queues

    inspect_queues(options.data_dir, topic_filter=options.filter, limit=options.limit, as_json=options.json)
    return 0


def _inspect_groups(options: argparse.Namespace) -> int:
    from penstock.cli.inspect import inspect_groups

    inspect_groups(options.data_dir, name=options.group, as_json=options.json)
    return 0


def _inspect_sessions(options: argparse.Namespace) -> int:
    from penstock.cli.inspect import inspect_sessions

    inspect_sessions(options.data_dir, client_id=options.client, limit=options.limit, as_json=options.json)
    return 0


def _add_repair(commands: Commands) -> None:
    command = commands.add_parser("repair", help="set damaged parts of the CommitLog of a stopped node aside")
    command.add_argument("--data-dir", type=Path, required=True, metavar="DIR", help="of a node that is stopped")
    command.add_argument("--dry-run", action="store_true", help="only look; exit status 1 if there is damage")
    command.add_argument("--json", action="store_true", help="print what was found as one JSON object")
    command.set_defaults(run=_repair)


def _repair(options: argparse.Namespace) -> int:
    from penstock.cli.mend import mend

    return EXIT_FAILED if mend(options.data_dir, dry_run=options.dry_run, as_json=options.json) else 0


def _finish(work: Coroutine[Any, Any, None]) -> int:
    import uvloop

    uvloop.run(work)
    return 0


def _body(text: str) -> bytes:
    return sys.stdin.buffer.read() if text == "-" else text.encode()


def _start(text: str) -> Start:
    return "earliest" if text == "earliest" else "latest" if text == "latest" else _count(text)


def _kind(text: str) -> str:
    from penstock.store.record import Kind

    kinds = [kind.name.lower() for kind in Kind]
    if text not in kinds:
        raise argparse.ArgumentTypeError(f"{text!r} is no kind of record: give one of {', '.join(kinds)}")
    return text


def _backoff(text: str) -> Backoff:
    from penstock.cli.groups import backoff_of

    return backoff_of(text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)
