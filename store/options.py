"""What an option is, and the options of the store.

Each package keeps its options in a frozen dataclass beside the code that uses them, and `penstock.node.config` reads all of
them from one TOML file. The default, the unit and the bounds of an option are declared once, at its field:

    segment_bytes: int = option(256 * MIB, "Bytes of ...", minimum=MIB, maximum=4 * GIB)

In the code a duration is an integer, and the name of its field has the unit: `retention_ms`. Operators write a duration with a
unit and its name without: `retention = "7d"`. `operator_name` makes the one name of the other, wherever an operator sees it.

The bounds apply to what an operator writes: `check_options` is called for a configuration that was read from a file. Code that
creates the dataclass itself, such as a test with tiny segments, is not bound by them.

An option has an operator with a reason to change it. What only engineers have a reason to change is declared with `bound`.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass, field, fields
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

from penstock.store.durations import format_duration, milliseconds_of, parse_duration
from penstock.store.errors import StoreError

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

SECOND_MS = 1000
MINUTE_MS = 60 * SECOND_MS
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS
CENTURY_MS = 100 * 365 * DAY_MS

PORT_MAX = 65_535

T = TypeVar("T")


class OptionInvalid(StoreError):
    """Raised when the value of an option has the wrong type or is outside of the option's bounds."""

    def __init__(self, name: str, value: object, allowed: str) -> None:
        self.name = name
        self.value = value
        self.allowed = allowed
        super().__init__(f"{name} is {value!r}, but must be {allowed}")


@dataclass(frozen=True, slots=True, order=True)
class HostPort:
    """An address to listen on. With port 0 the system picks a free port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> HostPort:
        """Return the address in `text`: `127.0.0.1:1883`, `localhost:0`, or `[::1]:1883` for IPv6.

        Raises:
            OptionInvalid: the text has no host or no port, or the port is not from 0 to 65535.
        """
        host, colon, port = text.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        if bracketed:
            host = host[1:-1]
        if not (colon and host and host.isprintable()) or any(c in host for c in "[] /") or (":" in host) != bracketed:
            raise OptionInvalid("address", text, "HOST:PORT, or [HOST]:PORT where the host is an IPv6 address")
        if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= PORT_MAX):
            raise OptionInvalid("address", text, f"HOST:PORT with a port from 0 to {PORT_MAX}")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


OFF: Final = "off"

OptionalAddress: TypeAlias = HostPort | Literal["off"]
"""An address to listen on, or no listener."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What an option declares besides its name, type and default."""

    doc: str
    """What the option does."""

    minimum: int | None = None
    maximum: int | None = None


def option(
    default: T,
    doc: str,
    *,
    minimum: int | None = None,
    maximum: int | None = None,
) -> T:
    """Declare a field of an options dataclass.

    Args:
        default: the value when the operator sets none. It must be within the bounds too, which a test checks.
        doc: one or two sentences for the operator.
        minimum: the smallest integer that is allowed, in the unit of the field; for a tuple, the smallest element.
        maximum: the largest integer that is allowed; for a tuple, the largest element.
    """
    metadata = {"bounds": Bounds(doc, minimum, maximum)}
    # At run time this is a Field, which @dataclass replaces. Type checkers must see the type of the default.
    declared: T = field(default=default, metadata=metadata)
    return declared


def bound(default: T, reason: str) -> T:
    """Declare a field of an options dataclass that is a bound of the internals, and no option of an operator.

    Tests and the simulation set it. Neither a file nor a variable does, and no reference lists it.

    Args:
        default: the value of every node.
        reason: why there is such a bound, and why it has this value, for engineers.
    """
    declared: T = field(default=default, metadata={"reason": reason})
    return declared


_UNIT: Final = re.compile(r"(?<!_per)_(ms|s)(?=_|$)")
"""The unit of a duration in the name of a field. `messages_per_s` is a rate."""

_UNIT_MS: Final = {"ms": 1, "s": SECOND_MS}


def operator_name(field_name: str) -> str:
    """Return the name by which operators know the option of a field: `keep_alive_max` for `keep_alive_s_max`."""
    return _UNIT.sub("", field_name)


def unit_ms_of(field_name: str) -> int:
    """Return the milliseconds of the unit in the name of a field; 0 if the name has none."""
    unit = _UNIT.search(field_name)
    return _UNIT_MS[unit[1]] if unit else 0


@dataclass(frozen=True, slots=True)
class Option:
    """A field that was declared with `option`, as an operator sees it."""

    name: str
    """What operators call it, without the unit of a duration."""
    field: str
    """Name of the field."""
    hint: Any
    """Type of the field."""
    default: Any
    bounds: Bounds
    unit_ms: int
    """Milliseconds of the unit of a duration, or of each duration of a list; 0 if the option is no duration."""

    @property
    def listed(self) -> Any:
        """The type of the elements of a list; None if the option is no list."""
        return get_args(self.hint)[0] if get_origin(self.hint) is tuple else None

    @property
    def is_address(self) -> bool:
        """Whether the option is an address, or one that may be off."""
        return self.hint in (HostPort, OptionalAddress)

    def written(self, value: Any) -> Any:
        """Return a value of the field as operators write it: durations with their units, and all others as they are."""
        if self.unit_ms and isinstance(value, tuple | list):
            return type(value)(self.written(each) for each in value)
        if self.unit_ms and isinstance(value, int) and not isinstance(value, bool):
            return format_duration(value * self.unit_ms) if value else 0
        return value

    def read(self, value: Any, name: str) -> Any:
        """Return what an operator wrote as a value of the field. `check_options` judges values that don't fit.

        Args:
            value: a value of TOML, or one that the field can have. A duration is text, a timedelta, or 0.
            name: full name of the option, for errors.

        Raises:
            OptionInvalid: the value is no duration, or no address.
        """
        if self.unit_ms and self.listed is int:
            if not isinstance(value, tuple | list):
                raise OptionInvalid(name, value, describe_allowed(self))
            return tuple(self._read_duration(each, name) for each in value)
        if self.unit_ms:
            return self._read_duration(value, name)
        if self.is_address and isinstance(value, str):
            if self.hint is not HostPort and value == OFF:
                return OFF
            try:
                return HostPort.parse(value)
            except OptionInvalid as error:
                allowed = error.allowed if self.hint is HostPort else f'{error.allowed}, or "{OFF}"'
                raise OptionInvalid(name, value, allowed) from error
        if self.hint is Path and isinstance(value, str):
            if not value:
                raise OptionInvalid(name, value, 'a path; "." is the directory in which the node starts')
            return Path(value)
        return tuple(value) if self.listed and isinstance(value, list) else value

    def _read_duration(self, value: Any, name: str) -> int:
        if value == 0 and isinstance(value, int) and not isinstance(value, bool):
            return 0
        if _is_negative(value):
            raise OptionInvalid(name, value, "a duration that is not negative")
        try:
            ms = milliseconds_of(value) if isinstance(value, timedelta) else parse_duration(value)
        except (TypeError, ValueError) as error:
            raise OptionInvalid(name, value, f"a duration with a unit, such as {self._example!r}".replace("'", '"')) from error
        if ms % self.unit_ms:
            raise OptionInvalid(name, value, "a whole number of seconds")
        return ms // self.unit_ms

    @property
    def _example(self) -> str:
        default = max(self.default, default=0) if isinstance(self.default, tuple) else self.default
        return str(self.written(default) or "7d")


def _is_negative(duration: Any) -> bool:
    if isinstance(duration, str):
        return re.fullmatch(r"-[0-9]+[a-z]+", duration) is not None
    return isinstance(duration, timedelta) and duration < timedelta(0)


def options_of(declaring: type[Any]) -> list[Option]:
    """Return the options of a dataclass in the order of its fields. Fields that `option` did not declare are none."""
    hints = get_type_hints(declaring)
    found = []
    for declared in fields(declaring):
        if "bounds" in declared.metadata:
            found.append(
                Option(
                    operator_name(declared.name),
                    declared.name,
                    hints[declared.name],
                    declared.default,
                    declared.metadata["bounds"],
                    unit_ms_of(declared.name),
                )
            )
    return found


def check_options(options: Any, section: str = "") -> None:
    """Check every value of an options dataclass against its type and bounds.

    Args:
        options: an instance of a dataclass. Fields that were not declared with `option` are not checked.
        section: name of the section, such as `store`. Errors put it before the names of options.

    Raises:
        OptionInvalid: for the first value that is not allowed.
    """
    prefix = f"{section}." if section else ""
    for declared in options_of(type(options)):
        value = getattr(options, declared.field)
        if not _fits(declared.hint, value, declared.bounds):
            raise OptionInvalid(prefix + declared.name, declared.written(value), describe_allowed(declared))


_LISTED = {str: "strings"}
"""What errors call the elements of a list that are neither integers nor options dataclasses."""


def _is_table(hint: Any) -> bool:
    """Return whether an option is an optional table, whose content only a library understands."""
    return any(get_origin(choice) is dict for choice in get_args(hint))


def describe_allowed(declared: Option) -> str:
    """Return which values an option may have, as words that follow "must be"."""
    hint = declared.hint
    if get_origin(hint) is Literal:
        return " or ".join(f'"{choice}"' for choice in get_args(hint))
    if hint is int:
        return f"{'a duration' if declared.unit_ms else 'an integer'}{_describe_range(declared)}"
    if declared.listed is int:
        return f"a list of {'durations' if declared.unit_ms else 'integers'}, each{_describe_range(declared)}"
    if declared.listed:
        return f"a list of {_LISTED.get(declared.listed, 'tables')}"
    if declared.is_address:
        return "an address, HOST:PORT" if hint is HostPort else f'an address, HOST:PORT, or "{OFF}"'
    if _is_table(hint):
        return "a table"
    return {bool: "true or false", str: "a string", Path: "a path"}[hint]


def _describe_range(declared: Option) -> str:
    minimum, maximum = declared.written(declared.bounds.minimum), declared.written(declared.bounds.maximum)
    if minimum is not None and maximum is not None:
        return f" from {minimum} to {maximum}"
    if minimum is not None:
        return f" of at least {minimum}"
    if maximum is not None:
        return f" of at most {maximum}"
    return ""


def _fits(hint: Any, value: object, bounds: Bounds) -> bool:
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_fits(get_args(hint)[0], element, bounds) for element in value)
    if hint is int:
        # In Python a bool is an int, but an operator who writes `true` for a number has made a mistake.
        return (
            isinstance(value, int)
            and not isinstance(value, bool)
            and (bounds.minimum is None or value >= bounds.minimum)
            and (bounds.maximum is None or value <= bounds.maximum)
        )
    if _is_table(hint):
        return value is None or isinstance(value, dict)
    if hint == OptionalAddress:
        return isinstance(value, HostPort) or value == OFF
    assert isinstance(hint, type), hint
    return isinstance(value, hint)


@dataclass(frozen=True, slots=True)
class ClockOptions:
    """The bounds of the node's clock."""

    confirm_ms: int = bound(
        10 * MINUTE_MS,
        "A time of day that has jumped is taken for right when the jump has lasted so long: a time server corrects a wrong one "
        "sooner. `penstock clock accept` does not wait.",
    )
    gap_ms_max: int = bound(
        DAY_MS,
        "Time for which the machine may have been off when the node trusts the time of day at its start: a clock whose battery "
        "is empty is wrong by more.",
    )


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """The section `[store]`, and the bounds of the store."""

    segment_bytes: int = option(
        256 * MIB,
        "Size of a segment of the log. Retention deletes whole segments, and no record is larger than one.",
        minimum=MIB,
        maximum=4 * GIB,
    )
    flush: Literal["sync", "async"] = option(
        "sync",
        'When publishers get their acknowledgement: "sync" is after the fdatasync, "async" after the write, so that a crash of '
        "the machine can lose acknowledged messages.",
    )
    sync_in: Literal["process", "thread"] = bound(
        "process",
        "Where fdatasync is called. A thread must wait for the interpreter after each sync (`python -m bench store --only "
        "synced`). A node within a test of a user has a thread, because it comes and goes often.",
    )
    reserve_bytes: int = option(
        GIB,
        "Free space to keep on the disk, and never more than 5 percent of it. With less the node is read-only.",
        minimum=0,
    )
    reserve_percent: int = bound(5, "Percent of the disk that the reserve takes at most, so that small disks are usable.")
    ballast_bytes: int = bound(
        96 * MIB,
        "Size of a file that takes room besides the reserve. A start on a disk without a free byte deletes it: recovery and "
        "the first flush of the index need about that much. 0 means no such file.",
    )
    index_flush_bytes: int = bound(128 * MIB, "Log after which the index is flushed, so that a start replays about as much.")
    index_flush_ms: int = bound(
        30 * SECOND_MS,
        "Interval at which the index is flushed: `penstock inspect` shows its state then, and a start replays what came after.",
    )
    retention_ms: int = option(
        72 * HOUR_MS,
        "Time for which records are kept at least. 0 keeps them for ever.",
        minimum=0,
        maximum=CENTURY_MS,
    )
    retention_bytes: int = option(
        0,
        "Size of the log above which the oldest segments are deleted, whatever their age. 0 means no limit.",
        minimum=0,
    )
    copied_bytes_max: int = bound(
        16 * GIB,
        "Size of records that outlive retention because they are needed, such as delayed, unacknowledged and retained "
        "messages. Beyond it no segment is deleted: so much that nobody takes needs somebody who looks at it.",
    )
    queues_max: int = option(
        1_000_000,
        "Maximum number of light queues. A filter that would need one more is refused.",
        minimum=1,
        maximum=100_000_000,
    )
    route_cache_max: int = bound(100_000, "Topics whose matching queues are kept in memory, in some 600 bytes each.")
    topic_levels_max: int = bound(128, "Levels of a topic or filter. Matching a topic costs a step for each level.")
    topic_bytes_max: int = bound(
        4096, "Bytes of a topic or filter. MQTT allows 65,535, which keys of the index have no use for."
    )


def resolved(listen: HostPort) -> tuple[str, ...]:
    """Return the numeric addresses of a host, each once. It may ask a name server. Raises OSError."""
    try:
        ip_address(listen.host)
    except ValueError:
        found = socket.getaddrinfo(listen.host, listen.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        return tuple(dict.fromkeys(str(address[0]) for *_, address in found))
    return (listen.host,)
