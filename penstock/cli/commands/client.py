"""`penstock client`."""

from __future__ import annotations

import argparse

from penstock.cli.commands.arguments import EXIT_FAILED, Commands, add_command, add_data_dir, add_json, message_id


def add_to(commands: Commands) -> None:
    """Add the command."""
    command = add_command(commands, "client", "List the RocketMQ clients of a running node, and give one of them a command.")
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION")

    action = add_command(actions, "list", "Show RocketMQ's clients that use the node.")
    add_json(action)
    _finish(action, _list)

    action = add_command(actions, "threads", "Print what the threads of a client do, as the client describes it.")
    _add_client(action)
    _finish(action, _threads)

    action = add_command(
        actions,
        "verify",
        "Give a message to the listener of a push consumer, and print whether it succeeds. This is no delivery: groups do not "
        "change. The exit status is 0 if it succeeds, else 1.",
    )
    _add_client(action)
    action.add_argument("message_id", type=message_id, help="Id of a stored message, as `penstock pop` prints it.")
    _finish(action, _verify)

    action = add_command(actions, "reconnect", "Tell a client to connect again, for example behind a load balancer.")
    _add_client(action)
    _finish(action, _reconnect)


def _add_client(action: argparse.ArgumentParser) -> None:
    action.add_argument("client", help="Id of the client, as `penstock client list` prints it.")


def _finish(action: argparse.ArgumentParser, run: object) -> None:
    add_data_dir(action)
    action.set_defaults(run=run)


def _list(options: argparse.Namespace) -> int:
    from penstock.cli.actions.client import list_clients

    list_clients(options.data_dir, as_json=options.json)
    return 0


def _threads(options: argparse.Namespace) -> int:
    from penstock.cli.actions.client import print_threads

    print_threads(options.data_dir, options.client)
    return 0


def _verify(options: argparse.Namespace) -> int:
    from penstock.cli.actions.client import verify

    return 0 if verify(options.data_dir, options.client, options.message_id) else EXIT_FAILED


def _reconnect(options: argparse.Namespace) -> int:
    from penstock.cli.actions.client import reconnect

    reconnect(options.data_dir, options.client)
    return 0
