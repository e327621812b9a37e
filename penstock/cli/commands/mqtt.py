"""`penstock pub` and `penstock sub`, to try a node by hand over MQTT."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from penstock.cli.commands.arguments import (
    Commands,
    add_command,
    add_json,
    add_mqtt_address,
    add_mqtt_login,
    count,
    mqtt_endpoint,
    read_body,
    run_async,
)

if TYPE_CHECKING:
    from penstock.cli.actions.mqtt import UserPassword


def add_to(commands: Commands) -> None:
    """Add the commands."""
    command = add_command(commands, "pub", "Publish a message over MQTT.")
    command.add_argument("topic", help="Topic of the message.")
    command.add_argument("body", help="Body of the message, or - to read it from standard input.")
    add_mqtt_address(command)
    add_mqtt_login(command)
    command.add_argument("--qos", type=int, choices=(0, 1, 2), default=1, help="Quality of service (%(default)s).")
    command.add_argument("--retain", action="store_true", help="Have the node retain the message for later subscribers.")
    command.add_argument("--count", type=count, default=1, help="Number of times to publish the message (%(default)s).")
    command.set_defaults(run=_publish)

    command = add_command(commands, "sub", "Subscribe over MQTT and print each message that arrives.")
    command.add_argument("filter", help="Topic filter to subscribe to, such as 'plant/+/temp'.")
    add_mqtt_address(command)
    add_mqtt_login(command)
    command.add_argument("--qos", type=int, choices=(0, 1, 2), default=1, help="Highest quality of service (%(default)s).")
    command.add_argument(
        "--count", type=count, default=0, help="Number of messages after which to end; 0 never ends (%(default)s)."
    )
    add_json(command)
    command.set_defaults(run=_subscribe)


def _publish(options: argparse.Namespace) -> int:
    from penstock.cli.actions.mqtt import publish

    login = _login(options)
    body = read_body(options.body)
    return run_async(
        publish(mqtt_endpoint(options), login, options.topic, body, qos=options.qos, retain=options.retain, count=options.count)
    )


def _subscribe(options: argparse.Namespace) -> int:
    from penstock.cli.actions.mqtt import subscribe

    login = _login(options)
    return run_async(
        subscribe(mqtt_endpoint(options), login, options.filter, qos=options.qos, count=options.count, as_json=options.json)
    )


def _login(options: argparse.Namespace) -> UserPassword | None:
    from penstock.cli.actions.mqtt import login_of

    return login_of(options.user, options.password_file)
