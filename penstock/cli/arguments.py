"""Arguments that several commands share, and the types of their values."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Coroutine
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.store.options import HostPort, OptionInvalid

if TYPE_CHECKING:
    from penstock.cli.endpoint import Endpoint

MQTT = HostPort("127.0.0.1", 1883)
POP = HostPort("127.0.0.1", 8081)
ADMIN = HostPort("127.0.0.1", 8080)
Commands = Any
"""What argparse's `add_subparsers` returns. Its class has no public name."""


def add_command(commands: Commands, name: str, summary: str) -> argparse.ArgumentParser:
    """Add a command, or an action of one, whose help begins with a one-line summary."""
    # argparse formats both texts with "%".
    command: argparse.ArgumentParser = commands.add_parser(name, help=summary, description=summary)
    command.set_defaults(parser=command)
    return command


def add_data_dir(command: argparse.ArgumentParser) -> None:
    """Add `--data-dir`, with the directory that `penstock serve` uses by default."""
    command.add_argument(
        "--data-dir", type=Path, default=Path("penstock-data"), metavar="DIR", help="Data directory of a node (%(default)s)."
    )


def add_json(command: argparse.ArgumentParser) -> None:
    """Add `--json` for commands that print rows."""
    command.add_argument("--json", action="store_true", help="Print one JSON object per line.")


def add_mqtt_address(command: argparse.ArgumentParser) -> None:
    """Add `--mqtt`, the address of the node's MQTT listener."""
    command.add_argument(
        "--mqtt", type=address, default=MQTT, metavar="HOST:PORT", help="Address of the node's MQTT listener (%(default)s)."
    )
    _add_tls(command)


def add_login(command: argparse.ArgumentParser) -> None:
    """Add `--user`, and where its password comes from."""
    command.add_argument(
        "--user",
        metavar="NAME",
        help="User name. The password is that of --password-file, or else of the variable PENSTOCK_PASSWORD, or asked for. "
        "Without --tls, everybody on the network path can read it.",
    )
    # A password among the arguments would be seen by everybody on the machine who lists processes.
    command.add_argument(
        "--password-file", type=Path, metavar="FILE", help="Read the password from the first line of this file; - is stdin."
    )


def add_pop_address(command: argparse.ArgumentParser) -> None:
    """Add `--pop`, the address of the node's gRPC listener."""
    command.add_argument(
        "--pop", type=address, default=POP, metavar="HOST:PORT", help="Address of the node's gRPC listener (%(default)s)."
    )
    _add_tls(command)


def add_admin_address(command: argparse.ArgumentParser) -> None:
    """Add `--admin`, the address of the node's admin listener."""
    command.add_argument(
        "--admin", type=address, default=ADMIN, metavar="HOST:PORT", help="Address of the node's admin listener (%(default)s)."
    )
    _add_tls(command)


def admin_endpoint(options: argparse.Namespace) -> Endpoint:
    """Return the admin listener that the options of `add_admin_address` name. Raises ValueError if they are contradictory."""
    return _endpoint(options, options.admin)


def mqtt_endpoint(options: argparse.Namespace) -> Endpoint:
    """Return the MQTT listener that the options of `add_mqtt_address` name. Raises ValueError if they contradict each other."""
    return _endpoint(options, options.mqtt)


def pop_endpoint(options: argparse.Namespace) -> Endpoint:
    """Return the gRPC listener that the options of `add_pop_address` name. Raises ValueError if they contradict each other."""
    return _endpoint(options, options.pop)


def _add_tls(command: argparse.ArgumentParser) -> None:
    """Add the options of TLS, which are the same for both kinds of listeners."""
    command.add_argument(
        "--tls",
        action=argparse.BooleanOptionalAction,
        help="Speak TLS with the listener, or don't. By default the command does if one of the three files is given.",
    )
    command.add_argument(
        "--tls-ca-file",
        type=Path,
        metavar="FILE",
        help="PEM file of the roots that the node's certificate is checked by ($PENSTOCK_CA_FILE, or else the usual roots).",
    )
    command.add_argument("--tls-certificate", type=Path, metavar="FILE", help="PEM file of the client's certificate.")
    command.add_argument("--tls-key", type=Path, metavar="FILE", help="PEM file of the key of the client's certificate.")


def _endpoint(options: argparse.Namespace, at: HostPort) -> Endpoint:
    from penstock.cli.endpoint import endpoint_of

    return endpoint_of(
        at, tls=options.tls, ca_file=options.tls_ca_file, certificate=options.tls_certificate, key=options.tls_key
    )


def address(text: str) -> HostPort:
    """Return the address that is written as `HOST:PORT`."""
    try:
        return HostPort.parse(text)
    except OptionInvalid as error:
        raise argparse.ArgumentTypeError(f"{text!r} must be {error.allowed}.") from None


def count(text: str) -> int:
    """Return a whole number from 0 up."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 up.")
    return _bounded(text, int(text[:NUMBER_CHARS_MAX]))


def _bounded(text: str, number: int) -> int:
    """Return a number that 64 bits can hold, as the log and gRPC do."""
    if number > NUMBER_MAX or len(text) > NUMBER_CHARS_MAX:
        raise argparse.ArgumentTypeError(f"{text[:NUMBER_CHARS_MAX]!r} is too large: the largest number is {NUMBER_MAX}.")
    return number


NUMBER_MAX = 2**63 - 1
NUMBER_CHARS_MAX = 40
"""Digits of a number, with zeros in front. Python itself refuses numbers of more than 4,300 digits."""


def duration(text: str) -> int:
    """Return a time such as `500ms`, `90s`, `10min` or `7d`, in ms. A number alone has been ms from the beginning."""
    found = re.fullmatch(r"([0-9]{1,15})(ms|s|m|min|h|d)?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: write a whole number with ms, s, min, h or d, such as 10min.")
    return int(found[1]) * _UNITS_MS[found[2] or "ms"]


_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}


def position(text: str) -> int:
    """Return the position of a record that is written as a number, as `0x` and hexadecimal digits, or as a message id."""
    if found := re.fullmatch(rf"(?:0x)?([0-9a-f]{{{MESSAGE_ID_CHARS}}})|0x([0-9a-f]+)", text, re.IGNORECASE):
        digits: str = found[1] or found[2]
        return _bounded(text, int(digits[:NUMBER_CHARS_MAX], 16))
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(
            f"{text!r} is no position: give a number, or the id of a message, such as 00000000000004d2."
        )
    return count(text)


def message_id(text: str) -> str:
    """Return the id of a message that is given as such, or as a position. What is neither stays as it is for the node."""
    try:
        return f"{position(text):0{MESSAGE_ID_CHARS}x}"
    except argparse.ArgumentTypeError:
        return text


MESSAGE_ID_CHARS = 16
"""Length of the id of a message: its position in hexadecimal digits. No position has as many decimal digits."""


_DATE_CHARS = 8
"""Length of 20260301, which is a date. As milliseconds since 1970 it would be a time of that New Year's Day."""


def instant(text: str) -> int:
    """Return a time that is written as ISO 8601, or in ms since 1970, as the latter. Without an offset it is of UTC."""
    if text.isdecimal() and len(text) != _DATE_CHARS:
        return count(text)
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no time, such as 2026-03-01T02:30:00+01:00.") from None
    return round((found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp() * 1000)


def add_body(command: argparse.ArgumentParser, *, is_required: bool = True) -> None:
    """Add the body of a message, whose bytes `read_body` returns. It need not be UTF-8."""
    command.add_argument(
        "body",
        type=os.fsencode,
        nargs=None if is_required else "?",
        default=b"",
        help="Body of the message, or - to read it from standard input.",
    )


def read_body(argument: bytes) -> bytes:
    """Return the body of a message: the argument itself, or all of standard input where the argument is `-`."""
    return sys.stdin.buffer.read() if argument == b"-" else argument


def run_async(action: Coroutine[Any, Any, None]) -> int:
    """Run an action on an event loop, and return the exit status of success."""
    import asyncio

    asyncio.run(action)
    return 0
