"""`penstock clients` and `penstock sessions`: who is connected or has a session, and what can be done about it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any, Final

from penstock.cli.apiclient import ApiClient, escaped
from penstock.cli.arguments import Commands, add_command, duration
from penstock.cli.listing import RATES, add_bounds, awaited, finish, pages_of, print_listing, rows_of, show
from penstock.cli.output import cells_of, print_line, print_rows, time_of

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
BUSIEST_COLUMNS: Final = ("client_id", "user", "address", *(f"{rate}_per_s" for rate in RATES), "in_flight_out")

SUBSCRIPTION_COLUMNS: Final = ("filter", "qos", "no_local", "retain_as_published", "identifier", "queued")

SESSION_COLUMNS: Final = ("client_id", "user", "is_connected", "ends", "has_will")


def add_to(commands: Commands) -> None:
    """Add the commands."""
    clients = add_command(commands, "clients", "List, show, disconnect and ban the clients of MQTT that are connected.")
    actions = clients.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = add_command(actions, "list", "List the connected clients.")
    _add_search(listing)
    listing.add_argument("--address", default="", metavar="IP", help="Address, or network such as 10.0.0.0/8.")
    listing.add_argument(
        "--order",
        choices=("client_id", *RATES),
        default="client_id",
        help="All clients in the order of their ids, or up to 1,000 with the highest of these rates (%(default)s). The node "
        "measures rates only while somebody asks, so the first ones take two seconds.",
    )
    finish(listing, _list_clients)
    action = add_command(actions, "show", "Show a client with its subscriptions, queue, rates, will and certificate.")
    _add_client(action)
    finish(action, _show_client)
    listing = add_command(actions, "subscriptions", "List all subscriptions of a client, which may be away.")
    _add_client(listing)
    add_bounds(listing, "filter")
    finish(listing, _list_subscriptions)
    kick = add_command(actions, "kick", "Disconnect a client, which may connect again.")
    _add_client(kick)
    finish(kick, _kick)
    ban = add_command(actions, "ban", "Disconnect a client, and refuse its client id from now on.")
    _add_client(ban)
    ban.add_argument("--for", dest="for_ms", type=duration, default=0, metavar="TIME", help="How long, such as 12h (for ever).")
    ban.add_argument("--why", default="", metavar="TEXT", help="A note for other operators.")
    finish(ban, _ban)

    sessions = add_command(commands, "sessions", "List, show and delete the stored sessions, also of clients that are away.")
    actions = sessions.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = add_command(actions, "list", "List the stored sessions in the order of their client ids.")
    _add_search(listing)
    listing.add_argument(
        "--state", choices=("all", "connected", "away"), default="all", help="Whether the client is connected (%(default)s)."
    )
    finish(listing, _list_sessions)
    action = add_command(actions, "show", "Show a session.")
    _add_client(action)
    finish(action, _show_session)
    delete = add_command(actions, "delete", "Delete the session of a client that is away, with all that waits in it.")
    _add_client(delete)
    finish(delete, _delete_session)


def _add_search(listing: argparse.ArgumentParser) -> None:
    listing.add_argument("--prefix", default="", metavar="TEXT", help="With which the client id begins.")
    listing.add_argument("--contains", default="", metavar="TEXT", help="A text in the client id or the user name.")
    listing.add_argument("--of-user", default="", metavar="NAME", help="User name of the client.")
    add_bounds(listing, "client id")


def _add_client(action: argparse.ArgumentParser) -> None:
    action.add_argument("client_id", metavar="CLIENT_ID", help="Client id of MQTT.")


def _pages(options: argparse.Namespace, path: str, **query: object) -> Iterator[dict[str, Any]]:
    search = {"prefix": options.prefix, "contains": options.contains, "user": options.of_user}
    return pages_of(ApiClient(options), path, options, **search, **query)


def _list_clients(options: argparse.Namespace) -> int:
    if options.order != "client_id":
        return _list_busiest(options)
    rows = rows_of(_pages(options, "/clients", address=options.address))
    print_listing(rows, CLIENT_COLUMNS, {"connected": "connected_ms"}, as_json=options.json)
    return 0


def _list_busiest(options: argparse.Namespace) -> int:
    if options.after:
        raise ValueError("--after needs --order client_id: the highest rates are one listing that nothing follows.")
    pages = awaited(
        lambda: list(_pages(options, "/clients", address=options.address, order=options.order)),
        lambda found: not found or found[0]["rates_over_ms"] is not None,
    )
    rows = rows_of(pages)
    cells = (cells_of(row | row["rates"], BUSIEST_COLUMNS) for row in rows)
    print_rows(rows, cells, BUSIEST_COLUMNS, as_json=options.json, out=sys.stdout)
    if pages and pages[0]["rates_over_ms"] is None:
        print_line("the node has no rates yet: ask again in some seconds", out=sys.stderr)
    return 0


def _list_subscriptions(options: argparse.Namespace) -> int:
    path = f"/clients/{escaped(options.client_id)}/subscriptions"
    print_listing(rows_of(pages_of(ApiClient(options), path, options)), SUBSCRIPTION_COLUMNS, as_json=options.json)
    return 0


def _list_sessions(options: argparse.Namespace) -> int:
    rows = rows_of(_pages(options, "/sessions", state=options.state))
    print_listing(rows, SESSION_COLUMNS, {"ends": "ends_ms"}, as_json=options.json)
    return 0


def _show_client(options: argparse.Namespace) -> int:
    return show(options, f"/clients/{escaped(options.client_id)}", measured="rates")


def _show_session(options: argparse.Namespace) -> int:
    return show(options, f"/sessions/{escaped(options.client_id)}")


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
