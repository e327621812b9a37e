"""`penstock inspect`."""

from __future__ import annotations

import argparse

from penstock.cli.arguments import Commands, add_command, add_json, add_node, count, data_dir_of, instant, position


def add_to(commands: Commands) -> None:
    """Add the command."""
    command = add_command(
        commands, "inspect", "Print what a data directory holds. It changes nothing; the node may be running."
    )
    things = command.add_subparsers(dest="thing", required=True, metavar="THING")

    log = add_command(things, "log", "Print the records of the CommitLog.")
    add_node(log, "data_dir")
    log.add_argument(
        "--kind",
        action="append",
        default=[],
        type=_kind,
        metavar="KIND",
        help="Only records of this kind, such as message or pop_ack. May be repeated; an unknown kind lists all kinds.",
    )
    log.add_argument(
        "--topic",
        default="",
        metavar="FILTER",
        help="Only messages whose topic fits this filter; of POP records, the group's name.",
    )
    log.add_argument(
        "--from",
        dest="position",
        type=position,
        default=0,
        metavar="POSITION",
        help="Position of the first record, or id of a message (the oldest record).",
    )
    log.add_argument(
        "--since",
        type=instant,
        default=0,
        metavar="INSTANT",
        dest="since_ms",
        help="Only records stored at this time or later.",
    )
    log.add_argument(
        "--until",
        type=instant,
        default=0,
        metavar="INSTANT",
        dest="until_ms",
        help="Only records stored at this time or before.",
    )
    _add_limit(log, "records")
    log.set_defaults(run=_log)

    queues = add_command(
        things,
        "queues",
        "Print the light queues as of the last flush of the index.",
    )
    add_node(queues, "data_dir")
    queues.add_argument("--filter", default="", metavar="FILTER", help="Only the queues of exactly this filter.")
    _add_limit(queues, "queues")
    queues.set_defaults(run=_queues)

    groups = add_command(things, "groups", "Print the groups as of the last flush of the index.")
    add_node(groups, "data_dir")
    groups.add_argument("--group", default="", metavar="GROUP", help="Only the group of this name.")
    add_json(groups)
    groups.set_defaults(run=_groups)

    sessions = add_command(things, "sessions", "Print the stored MQTT sessions as of the last flush of the index.")
    add_node(sessions, "data_dir")
    sessions.add_argument("--client", default="", metavar="ID", help="Only the session of this client identifier.")
    _add_limit(sessions, "sessions")
    sessions.set_defaults(run=_sessions)

    quotas = add_command(
        things, "quotas", "Print who holds most of what a node has a limited amount of, as of the last flush of the index."
    )
    add_node(quotas, "data_dir")
    quotas.add_argument(
        "--resource",
        type=_resource,
        metavar="RESOURCE",
        help="Only this resource, such as queues or retained_bytes; an unknown one lists all.",
    )
    quotas.add_argument("--of", choices=("tenant", "user", "source", "client"), help="Only tenants, users, sources or clients.")
    quotas.add_argument(
        "--limit", type=count, default=10, help="Maximum number of holders of each resource; 0 prints all (%(default)s)."
    )
    add_json(quotas)
    quotas.set_defaults(run=_quotas)


def _add_limit(command: argparse.ArgumentParser, things: str) -> None:
    command.add_argument("--limit", type=count, default=100, help=f"Maximum number of {things}; 0 prints all (%(default)s).")
    add_json(command)


def _kind(text: str) -> str:
    from penstock.store.record import Kind

    kinds = [kind.name.lower() for kind in Kind]
    if text not in kinds:
        raise argparse.ArgumentTypeError(f"{text!r} is not a kind of record. The kinds are {', '.join(kinds)}.")
    return text


def _resource(text: str) -> str:
    from penstock.store.space.accounts import Resource

    names = [resource.name.lower() for resource in Resource]
    if text not in names:
        raise argparse.ArgumentTypeError(f"{text!r} is not a resource. The resources are {', '.join(names)}.")
    return text


def _log(options: argparse.Namespace) -> int:
    from penstock.cli.inspect_log import inspect_log

    inspect_log(
        data_dir_of(options),
        kinds=options.kind,
        topic_filter=options.topic,
        position=options.position,
        since_ms=options.since_ms,
        until_ms=options.until_ms,
        limit=options.limit,
        as_json=options.json,
    )
    return 0


def _queues(options: argparse.Namespace) -> int:
    from penstock.cli.inspect_index import inspect_queues

    inspect_queues(data_dir_of(options), topic_filter=options.filter, limit=options.limit, as_json=options.json)
    return 0


def _groups(options: argparse.Namespace) -> int:
    from penstock.cli.inspect_index import inspect_groups

    inspect_groups(data_dir_of(options), name=options.group, as_json=options.json)
    return 0


def _sessions(options: argparse.Namespace) -> int:
    from penstock.cli.inspect_index import inspect_sessions

    inspect_sessions(data_dir_of(options), client_id=options.client, limit=options.limit, as_json=options.json)
    return 0


def _quotas(options: argparse.Namespace) -> int:
    from penstock.cli.inspect_index import inspect_quotas

    inspect_quotas(
        data_dir_of(options), resource=options.resource or "", of=options.of or "", limit=options.limit, as_json=options.json
    )
    return 0
