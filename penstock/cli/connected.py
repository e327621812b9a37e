"""`penstock clients` and `penstock sessions`: who is connected or has a session, and what can be done about it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

from penstock.cli.apiclient import ApiClient, add_api, escaped
from penstock.cli.arguments import Commands, add_command, add_json, count, duration
from penstock.cli.output import cells_of, print_line, print_row, print_rows, time_of

CLIENT_COLUMNS: Final = (
    "client_id",
    "user",
    "address",
    "protocol",
    "connected",
    "subscriptions",
    "in_flight_out",
    "messages_in",
    "messages_out",
    "bytes_in",
    "bytes_out",
)
TIMES: Final = frozenset(("connected_ms", "last_packet_ms", "ends_ms", "will_due_ms"))
"""Fields that are points in time. Other fields in ms are durations."""

SESSION_COLUMNS: Final = ("client_id", "user", "is_connected", "ends", "has_will")


def add_to(commands: Commands) -> None:
    """Add the commands."""
    clients = add_command(commands, "clients", "List, show, disconnect and ban the clients of MQTT that are connected.")
    actions = clients.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = add_command(actions, "list", "List the clients in the order of their ids, as of now.")
    _add_search(listing)
    listing.add_argument("--address", default="", metavar="IP", help="Address, or network such as 10.0.0.0/8.")
    _finish(listing, _list_clients)
    show = add_command(actions, "show", "Show a client with its subscriptions, queue, will and certificate.")
    _add_client(show)
    _finish(show, _show_client)
    kick = add_command(actions, "kick", "Disconnect a client, which may connect again.")
    _add_client(kick)
    _finish(kick, _kick)
    ban = add_command(actions, "ban", "Disconnect a client, and refuse its client id from now on.")
    _add_client(ban)
    ban.add_argument("--for", dest="for_ms", type=duration, default=0, metavar="TIME", help="How long, such as 12h (for ever).")
    ban.add_argument("--why", default="", metavar="TEXT", help="A note for other operators.")
    _finish(ban, _ban)

    sessions = add_command(commands, "sessions", "List, show and delete the stored sessions, also of clients that are away.")
    actions = sessions.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = add_command(actions, "list", "List the stored sessions in the order of their client ids.")
    _add_search(listing)
    listing.add_argument(
        "--state", choices=("all", "connected", "away"), default="all", help="Whether the client is connected (%(default)s)."
    )
    _finish(listing, _list_sessions)
    show = add_command(actions, "show", "Show a session.")
    _add_client(show)
    _finish(show, _show_session)
    delete = add_command(actions, "delete", "Delete the session of a client that is away, with all that waits in it.")
    _add_client(delete)
    _finish(delete, _delete_session)


def _add_search(listing: argparse.ArgumentParser) -> None:
    listing.add_argument("--prefix", default="", metavar="TEXT", help="With which the client id begins.")
    listing.add_argument("--contains", default="", metavar="TEXT", help="A text in the client id or the user name.")
    listing.add_argument("--of-user", default="", metavar="NAME", help="User name of the client.")
    listing.add_argument("--after", default="", metavar="ID", help="Begin after this client id (the first).")
    listing.add_argument("--limit", type=count, default=100, help="Maximum number of rows (%(default)s).")


def _add_client(action: argparse.ArgumentParser) -> None:
    action.add_argument("client_id", metavar="CLIENT_ID", help="Client id of MQTT.")


def _finish(action: argparse.ArgumentParser, run: object) -> None:
    add_json(action)
    add_api(action)
    action.set_defaults(run=run)


def _pages(api: ApiClient, path: str, options: argparse.Namespace, **query: object) -> Iterator[dict[str, Any]]:
    """Yield the rows of a listing, page by page, up to the limit of the command."""
    search = {"prefix": options.prefix, "contains": options.contains, "user": options.of_user}
    return api.rows(path, limit=options.limit, after=options.after, **search, **query)


def _print(rows: Sequence[dict[str, Any]], columns: Sequence[str], times: dict[str, str], *, as_json: bool) -> None:
    shown = [row | {name: time_of(row[source]) for name, source in times.items()} for row in rows]
    print_rows(rows, (cells_of(row, columns) for row in shown), columns, as_json=as_json, out=sys.stdout)


def _list_clients(options: argparse.Namespace) -> int:
    rows = list(_pages(ApiClient(options), "/clients", options, address=options.address))
    _print(rows, CLIENT_COLUMNS, {"connected": "connected_ms"}, as_json=options.json)
    return 0


def _list_sessions(options: argparse.Namespace) -> int:
    rows = list(_pages(ApiClient(options), "/sessions", options, state=options.state))
    _print(rows, SESSION_COLUMNS, {"ends": "ends_ms"}, as_json=options.json)
    return 0


def _show_client(options: argparse.Namespace) -> int:
    return _show(options, f"/clients/{escaped(options.client_id)}")


def _show_session(options: argparse.Namespace) -> int:
    return _show(options, f"/sessions/{escaped(options.client_id)}")


def _show(options: argparse.Namespace, path: str) -> int:
    shown = ApiClient(options).get(path)
    if options.json:
        print_row(shown, as_json=True)
        return 0
    width = max(map(len, shown))
    for name, value in shown.items():
        for number, line in enumerate(_lines(time_of(value) if name in TIMES else value)):
            print_line(f"{'' if number else name:>{width}}  {line}")
    return 0


def _lines(value: object) -> list[str]:
    """Return a value of an answer as lines: the fields of each part of a list in one."""
    if isinstance(value, list):
        return [line for part in value for line in _lines(part)] or ["-"]
    if isinstance(value, dict):
        return [", ".join(f"{name}={part}" for name, part in value.items())]
    return [str(value) if value not in (None, "") else "-"]


def _kick(options: argparse.Namespace) -> int:
    ApiClient(options).call("DELETE", f"/clients/{escaped(options.client_id)}")
    print_line(f"disconnected {options.client_id}")
    return 0


def _ban(options: argparse.Namespace) -> int:
    path = f"/clients/{escaped(options.client_id)}/ban"
    ban = ApiClient(options).call("POST", path, body={"for_ms": options.for_ms, "why": options.why})
    until = f"until {time_of(ban['until_ms'])}" if ban["until_ms"] else "until the ban is lifted"
    print_line(f"banned {options.client_id} {until}")
    return 0


def _delete_session(options: argparse.Namespace) -> int:
    ApiClient(options).call("DELETE", f"/sessions/{escaped(options.client_id)}")
    print_line(f"deleted the session of {options.client_id}")
    return 0
