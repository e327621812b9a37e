"""Arguments that several commands share, and the types of their values."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Coroutine
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.standardstreams import standard_input
from penstock.settings import DEFAULTS, PREFIX, Settings, find_settings
from penstock.store.durations import format_duration, parse_duration
from penstock.store.options import DAY_MS, HostPort, OptionInvalid

if TYPE_CHECKING:
    from penstock.cli.endpoint import Endpoint
    from penstock.cli.login import UserPassword

Commands = Any
"""What argparse's `add_subparsers` returns. Its class has no public name."""


def add_command(commands: Commands, name: str, summary: str) -> argparse.ArgumentParser:
    """Add a command, or an action of one, whose help begins with a one-line summary."""
    # argparse formats both texts with "%".
    command: argparse.ArgumentParser = commands.add_parser(name, help=summary, description=summary)
    command.set_defaults(parser=command)
    return command


def add_json(command: argparse.ArgumentParser) -> None:
    """Add `--json` for commands that print rows."""
    command.add_argument("--json", action="store_true", help="Print one JSON object per line.")


NODE = "node"
"""Title of the group of arguments that say which node a command means, and how it identifies itself."""

_TLS = ("tls", "ca_file", "certificate_file", "key_file")

_OF_ADDRESS = {
    "target": ("context", "token_file", *_TLS),
    "mqtt": ("context", "user", "password_file", *_TLS),
    "admin": ("context", "token_file", "user", "password_file", *_TLS),
    "data_dir": ("context",),
}
"""Arguments that come with the one that names a listener or a directory."""

SETTINGS = {
    "target": "Address of the gRPC listener.",
    "mqtt": "Address of the MQTT listener.",
    "admin": "Address of the admin listener.",
    "data_dir": "Data directory of the node.",
    "context": "Context that has what the other arguments and variables leave out.",
    "token_file": "File with the token. PENSTOCK_TOKEN is the token itself.",
    "user": "User name. The command asks for the password if neither PENSTOCK_PASSWORD nor a file has it.",
    "password_file": "File with the password in its first line; - is standard input.",
    "tls": (
        "Speak TLS, or don't. By default the command does if there is one of the files below. The variable is yes, true, on or "
        "1, or no, false, off or 0."
    ),
    "ca_file": "PEM file of the roots by which the command checks the node's certificate.",
    "certificate_file": "PEM file of the command's own certificate.",
    "key_file": "PEM file of the key of that certificate.",
}
"""The arguments that several commands share. A password or a token among them would be seen by all who list processes."""


def add_node(command: argparse.ArgumentParser, *addresses: str) -> None:
    """Add the arguments that name a node, as one group.

    Args:
        command: gets the arguments.
        addresses: what names the node: `target`, `mqtt`, `admin`, `data_dir`.
    """
    group = command.add_argument_group(NODE, "Each is set by its flag, else by its variable, else by the context.")
    names = dict.fromkeys([*addresses, *(name for each in addresses for name in _OF_ADDRESS[each])])
    for name in sorted(names, key=list(SETTINGS).index):
        add_setting(group, name, variable=PREFIX + name.upper())


def add_setting(command: argparse._ActionsContainer, name: str, *, variable: str = "") -> None:
    """Add the argument that gives a setting, whose help names the variable."""
    default = f" ({DEFAULTS[name]})" if name in DEFAULTS else ""
    text = f"{SETTINGS[name].removesuffix('.')}{default}." + (f" [{variable}]" if variable else "")
    flag = f"--{name.replace('_', '-')}"
    if name == "tls":
        command.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
    elif name in ("target", "mqtt", "admin"):
        command.add_argument(flag, type=address, metavar="HOST:PORT", help=text)
    elif name in ("context", "user"):
        command.add_argument(flag, metavar="NAME", help=text)
    else:
        command.add_argument(flag, type=Path, metavar="DIR" if name == "data_dir" else "FILE", help=text)


def node_settings(options: argparse.Namespace, address: str) -> Settings:
    """Return the settings of a command that names its node by an address. Raises SettingInvalid."""
    given: dict[str, str | None] = {}
    for name in (address, *_OF_ADDRESS[address]):
        value = getattr(options, name)
        given[name] = None if value is None else ("no", "yes")[value] if name == "tls" else str(value)
    context = given.pop("context")
    return find_settings(address, given, context)


def data_dir_of(options: argparse.Namespace) -> Path:
    """Return the data directory of the node that the options name. Raises SettingInvalid."""
    return Path(node_settings(options, "data_dir")["data_dir"])


def endpoint(options: argparse.Namespace, address: str) -> Endpoint:
    """Return the listener that the options name. Raises ValueError if they contradict each other."""
    from penstock.cli.endpoint import endpoint_of

    if options.tls is False and any((options.ca_file, options.certificate_file, options.key_file)):
        raise ValueError("--no-tls has no use for --ca-file, --certificate-file and --key-file: leave one or the other out.")
    return endpoint_of(node_settings(options, address), address)


def login(options: argparse.Namespace, address: str) -> UserPassword | None:
    """Return the login of a command, or None. Raises as `login_of`."""
    from penstock.cli.login import login_of

    settings = node_settings(options, address)
    user = options.user if options.user is not None else settings.get("user")
    file = options.password_file if user is None else settings.get("password_file")
    return login_of(user, None if file is None else Path(file))


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
    """Return a time such as `500ms`, `90s`, `10m` or `7d`, in ms. Only 0 needs no unit."""
    try:
        ms = 0 if text == "0" else parse_duration(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time: write a whole number with ms, s, m, h or d, such as 10m."
        ) from None
    if ms > DURATION_MS_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is too long: give at most {format_duration(DURATION_MS_MAX)}.")
    return ms


DURATION_MS_MAX = 100 * 366 * DAY_MS
"""Longest time: a hundred years. The clients refuse a longer one as a mistake."""


def duration_within(text: str, shortest_ms: int, longest_ms: int) -> int:
    """Return a time in ms, as `duration`, that must be within bounds."""
    ms = duration(text)
    if not shortest_ms <= ms <= longest_ms:
        bounds = f"{format_duration(shortest_ms)} to {format_duration(longest_ms)}"
        raise argparse.ArgumentTypeError(f"{text!r} is out of bounds: give {bounds}.")
    return ms


def delay(text: str) -> int:
    """Return the delay of a message in ms, which a node bounds."""
    from penstock.timer.options import TimerOptions

    return duration_within(text, 0, TimerOptions().delay_ms_max)


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
    """Return the body of a message: the argument, or all of standard input where it is `-`. Raises as `standard_input`."""
    return standard_input().buffer.read() if argument == b"-" else argument


def run_async(action: Coroutine[Any, Any, None]) -> int:
    """Run an action on an event loop, and return the exit status of success."""
    import asyncio

    asyncio.run(action)
    return 0
