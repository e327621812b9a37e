"""`penstock pub` and `penstock sub`, to try a node by hand over MQTT."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from penstock.cli.commands.arguments import (
    Commands,
    add_command,
    add_json,
    add_login,
    add_mqtt_address,
    count,
    duration,
    mqtt_endpoint,
    read_body,
)

if TYPE_CHECKING:
    from paho.mqtt.properties import Properties

    from penstock.cli.actions.login import UserPassword


def add_to(commands: Commands) -> None:
    """Add the commands."""
    command = add_command(commands, "pub", "Publish a message over MQTT.")
    command.add_argument("topic", help="Topic of the message.")
    command.add_argument("body", help="Body of the message, or - to read it from standard input.")
    add_mqtt_address(command)
    add_login(command)
    command.add_argument("--qos", type=int, choices=(0, 1, 2), default=1, help="Quality of service (%(default)s).")
    command.add_argument("--retain", action="store_true", help="Have the node retain the message for later subscribers.")
    command.add_argument("--count", type=count, default=1, help="Number of times to publish the message (%(default)s).")
    _add_version(command)
    command.add_argument(
        "--property",
        type=_pair,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="User property of the message; may be repeated. This and the options below need MQTT 5.",
    )
    command.add_argument("--content-type", metavar="TEXT", help="Content type of the message.")
    command.add_argument("--response-topic", metavar="TOPIC", help="Topic on which a reply is expected.")
    command.add_argument("--correlation-data", metavar="TEXT", help="What the reply should repeat.")
    command.add_argument(
        "--expiry", type=duration, metavar="TIME", help="Time after which nobody gets the message any more, such as 10min."
    )
    command.set_defaults(run=_publish)

    command = add_command(commands, "sub", "Subscribe over MQTT and print each message that arrives.")
    command.add_argument("filter", help="Topic filter to subscribe to, such as 'plant/+/temp'.")
    add_mqtt_address(command)
    add_login(command)
    command.add_argument("--qos", type=int, choices=(0, 1, 2), default=1, help="Highest quality of service (%(default)s).")
    command.add_argument(
        "--count", type=count, default=0, help="Number of messages after which to end; 0 never ends (%(default)s)."
    )
    _add_version(command)
    add_json(command)
    command.set_defaults(run=_subscribe)


def _add_version(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--mqtt-version",
        choices=("3.1.1", "5"),
        default="5",
        help="Version of MQTT to speak (%(default)s). With 5, the node says why it refuses something.",
    )


def _publish(options: argparse.Namespace) -> int:
    from penstock.cli.actions.mqtt import publish

    properties = _properties(options)
    login = _login(options)
    body = read_body(options.body)
    publish(
        mqtt_endpoint(options),
        login,
        options.topic,
        body,
        version=options.mqtt_version,
        qos=options.qos,
        retain=options.retain,
        count=options.count,
        properties=properties,
    )
    return 0


def _subscribe(options: argparse.Namespace) -> int:
    from penstock.cli.actions.mqtt import subscribe

    subscribe(
        mqtt_endpoint(options),
        _login(options),
        options.filter,
        version=options.mqtt_version,
        qos=options.qos,
        count=options.count,
        as_json=options.json,
    )
    return 0


def _properties(options: argparse.Namespace) -> Properties | None:
    """Return the properties of a message, or None if there are none. Raises ValueError for MQTT 3.1.1, which has none."""
    given = {
        "UserProperty": options.property or None,
        "ContentType": options.content_type,
        "ResponseTopic": options.response_topic,
        "CorrelationData": None if options.correlation_data is None else options.correlation_data.encode(),
        "MessageExpiryInterval": None if options.expiry is None else -(-options.expiry // 1000),
    }
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        return None
    if options.mqtt_version != "5":
        raise ValueError("Messages of MQTT 3.1.1 have no properties: leave --mqtt-version out, or the properties.")
    from paho.mqtt.packettypes import PacketTypes
    from paho.mqtt.properties import Properties

    properties = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
    for name, value in given.items():
        setattr(properties, name, value)
    return properties


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=VALUE, such as unit=degC.")
    return name, value


def _login(options: argparse.Namespace) -> UserPassword | None:
    from penstock.cli.actions.login import login_of

    return login_of(options.user, options.password_file)
