"""`penstock pub` and `penstock sub`."""

from __future__ import annotations

import logging
import os
import ssl
import sys
from getpass import getpass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from amqtt.client import MQTTClient
from amqtt.errors import AMQTTError, ConnectError

from penstock.cli.actions.endpoint import Endpoint
from penstock.cli.actions.output import print_row, text_of
from penstock.gateway.protocol.reasons import ConnectCode

PASSWORD = "PENSTOCK_PASSWORD"
"""Environment variable with the password of the user that `--user` names."""

REFUSALS = {
    ConnectCode.IDENTIFIER_REJECTED: "it does not accept the client id",
    ConnectCode.SERVER_UNAVAILABLE: "it is busy or has no room, so try again later",
    ConnectCode.BAD_USER_NAME_OR_PASSWORD: "the user name or the password is not right",
    ConnectCode.NOT_AUTHORIZED: "it accepts no client without a login (give --user NAME), or this user may not connect",
}
"""What the return codes of a CONNACK mean (MQTT 3.1.1, 3.2.2.3)."""

_CLIENT: dict[str, Any] = {"auto_reconnect": False, "keep_alive": 60, "plugins": {}}


class UserPassword(NamedTuple):
    """A user name and its password."""

    user: str
    password: str


def login_of(user: str | None, source: Path | None) -> UserPassword | None:
    """Return the login of a command: the password is that of a file, of the environment, or typed in. None without a user.

    Raises:
        ValueError: there is a password without a user, or a user without a password.
        OSError: the file can't be read.
    """
    if user is None:
        if source is not None:
            raise ValueError("--password-file has a password and no user name: add --user NAME.")
        return None
    if not user:
        raise ValueError("--user is empty: name a user, or leave the option out to connect without a login.")
    if source is not None:
        text = sys.stdin.readline() if str(source) == "-" else source.read_text("utf-8").partition("\n")[0]
        password = text.rstrip("\r\n")
    elif PASSWORD in os.environ:
        password = os.environ[PASSWORD]
    elif sys.stdin.isatty():
        password = getpass(f"Password of {user}: ")
    else:
        raise ValueError(f"no terminal to ask for the password of {user!r}; give --password-file FILE, or set {PASSWORD}")
    if not password:
        raise ValueError(f"the password of {user!r} is empty; no user of a node has an empty one")
    return UserPassword(user, password)


async def publish(
    node: Endpoint, login: UserPassword | None, topic: str, body: bytes, *, qos: int, retain: bool, count: int
) -> None:
    """Publish a message over MQTT `count` times. At QoS 1 and 2, return when all of them are acknowledged."""
    client = await _connected(node, login)
    for _ in range(count):
        await client.publish(topic, body, qos=qos, retain=retain)
    await client.disconnect()


async def subscribe(
    node: Endpoint, login: UserPassword | None, topic_filter: str, *, qos: int, count: int, as_json: bool
) -> None:
    """Print the messages of `topic_filter` as they arrive over MQTT. End after `count` messages, or never if `count` is 0."""
    client = await _connected(node, login)
    codes = await client.subscribe([(topic_filter, qos)])
    if codes and codes[0] >= 0x80:
        await client.disconnect()
        raise ValueError(
            f"The node refused the filter {topic_filter!r}. Check its wildcards, and whether this user may subscribe to it: "
            "`penstock access test` explains what the rules say."
        )
    received = 0
    try:
        while not count or received < count:
            message = await client.deliver_message()
            if message is None:
                raise ConnectionError("The node closed the connection.")
            print_row({"topic": message.topic, "body": text_of(bytes(message.data or b""))}, as_json)
            received += 1
    finally:
        await client.disconnect()


async def _connected(node: Endpoint, login: UserPassword | None) -> MQTTClient:
    """Return a client that is connected.

    Raises:
        ConnectionError: it can't connect. The text says what prevents it, and what to do.
        ValueError, OSError: as `Endpoint.context` raises them.
    """
    logging.getLogger("amqtt").setLevel(logging.CRITICAL)  # amqtt raises its errors as well as logging them
    scheme, config = "mqtt", _CLIENT
    if node.has_tls:
        node.context()  # amqtt makes a context of its own, and does not say which file it can't use
        files = {"cafile": node.ca_file, "certfile": node.certificate, "keyfile": node.key}
        scheme, config = "mqtts", {**_CLIENT, "connection": files}
    client = MQTTClient(config=config)
    who = f"{quote(login.user, safe='')}:{quote(login.password, safe='')}@" if login is not None else ""
    try:
        await client.connect(f"{scheme}://{who}{node.address}/")
    except ConnectError as error:
        code = getattr(error, "return_code", None)  # what the node said; None if it said nothing
        if code is not None:
            why = REFUSALS.get(code, f"return code {code}")
            raise ConnectionError(f"The node on {node.address} refused the connection: {why}.") from error
        raise ConnectionError(_why_unconnected(node, error.__cause__)) from error
    except AMQTTError as error:
        raise ConnectionError(_why_unconnected(node, error)) from error
    return client


def _why_unconnected(node: Endpoint, cause: BaseException | None) -> str:
    """Return what prevents a connection, and what to do."""
    at = node.address
    if isinstance(cause, ssl.SSLCertVerificationError):
        return (
            f"The certificate of the node on {at} can't be trusted: {cause.verify_message}. Name the file of its authority "
            "with --tls-ca-file, and give --mqtt a host name that the certificate has."
        )
    if isinstance(cause, ssl.SSLError) and "ALERT" in (cause.reason or ""):
        return (
            f"The listener on {at} refused the connection with the TLS alert {cause.reason}. If it asks for a client "
            "certificate, give one that its authority has signed with --tls-certificate and --tls-key."
        )
    is_unreachable = isinstance(cause, OSError) and cause.errno is not None and not isinstance(cause, ssl.SSLError)
    if is_unreachable or isinstance(cause, TimeoutError):
        return f"No MQTT broker answers on {at} ({cause}). Is `penstock serve` running there?"
    if node.has_tls:
        how, remedy = " over TLS", "If it speaks plain text, add --no-tls."
    else:
        how, remedy = "", "If it speaks TLS, add --tls, and --tls-ca-file FILE for an authority of your own."
    return (
        f"The listener on {at} does not answer as an MQTT broker does{how}. {remedy} Otherwise the log of the node says why it "
        "closed the connection."
    )
