"""What an option is, and the options of the store.

Each package keeps its options in a frozen dataclass beside the code that uses them; `penstock.node.config` reads all of them
from one TOML file. An option's default, unit and bounds stand once, at its field:

    segment_bytes: int = option(256 * MIB, "Bytes of ...", minimum=MIB, maximum=4 * GIB)

Bounds hold for what an operator writes: `check_options` is called on a configuration that was read. Code that makes the
dataclass itself, as a test with tiny segments does, is not held to them.
"""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from penstock.store.errors import StoreError

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

SECOND_MS = 1000
MINUTE_MS = 60 * SECOND_MS
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS

PORT_MAX = 65_535

T = TypeVar("T")


class OptionInvalid(StoreError):
    """Raised when a value is of another type than its option, or outside of the option's bounds."""

    def __init__(self, name: str, value: object, allowed: str) -> None:
        self.name = name
        self.value = value
        self.allowed = allowed
        super().__init__(f"{name} is {value!r}, but must be {allowed}")


@dataclass(frozen=True, slots=True, order=True)
class HostPort:
    """An address to listen on. Port 0 lets the system pick a free one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> HostPort:
        """Return the address in `text`: `127.0.0.1:1883`, `localhost:0`, or `[::1]:1883` for IPv6.

        Raises:
            OptionInvalid: there is no host, no port, or the port is not within 0 to 65535.
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


@dataclass(frozen=True, slots=True)
class Bounds:
    """What is known of an option besides its name, type and default."""

    doc: str
    """What the option is for, with its unit."""

    minimum: int | None = None
    maximum: int | None = None
    at_most: str = ""
    """Name of the option of the same section that this one may not exceed."""


def option(
    default: T,
    doc: str,
    *,
    minimum: int | None = None,
    maximum: int | None = None,
    at_most: str = "",
) -> T:
    """Declare a field of an options dataclass.

    Args:
        default: the value where the operator names none. Its bounds are tested, like an operator's.
        doc: one or two sentences for the operator, with the unit.
        minimum: the smallest integer allowed (of a tuple: the smallest element).
        maximum: the largest integer allowed (of a tuple: the largest element).
        at_most: the option of the same dataclass that this one may not exceed.
    """
    metadata = {"bounds": Bounds(doc, minimum, maximum, at_most)}
    # A Field stands in for the default until @dataclass replaces it; type checkers see the default's type.
    declared: T = field(default=default, metadata=metadata)
    return declared


def bounds_of(declared: Field[Any]) -> Bounds:
    """Return the bounds with which `option` declared a field."""
    bounds = declared.metadata["bounds"]
    assert isinstance(bounds, Bounds), declared.name
    return bounds


def check_options(options: Any, section: str = "") -> None:
    """Check every value of an options dataclass against its type and bounds.

    Args:
        options: an instance of a dataclass whose fields were declared with `option`. Others are left out.
        section: what stands before the names in an error, such as `store`.

    Raises:
        OptionInvalid: for the first value that doesn't fit.
    """
    hints = get_type_hints(type(options))
    prefix = f"{section}." if section else ""
    checked = [declared for declared in fields(options) if "bounds" in declared.metadata]
    for declared in checked:
        name, value, bounds = f"{prefix}{declared.name}", getattr(options, declared.name), bounds_of(declared)
        if not _fits(hints[declared.name], value, bounds):
            raise OptionInvalid(name, value, describe_allowed(hints[declared.name], bounds))
    # Only now is it certain that both sides are integers.
    for declared in checked:
        other = bounds_of(declared).at_most
        value = getattr(options, declared.name)
        if other and value > getattr(options, other):
            raise OptionInvalid(
                f"{prefix}{declared.name}", value, f"at most {prefix}{other}, which is {getattr(options, other)}"
            )


_LISTED = {str: "strings"}
"""What the elements of a list are called, where they are no integers and no options of their own."""


def _is_table(hint: Any) -> bool:
    """Return whether an option is a table that a library will read, or None."""
    return any(get_origin(choice) is dict for choice in get_args(hint))


def describe_allowed(hint: Any, bounds: Bounds) -> str:
    """Return what values an option of type `hint` may have, to stand behind "must be"."""
    if get_origin(hint) is Literal:
        return " or ".join(f'"{choice}"' for choice in get_args(hint))
    if hint is int:
        return f"an integer{_describe_range(bounds)}"
    if get_origin(hint) is tuple:
        element = get_args(hint)[0]
        return (
            f"a list of integers, each{_describe_range(bounds)}"
            if element is int
            else f"a list of {_LISTED.get(element, 'tables')}"
        )
    if hint is HostPort:
        return "an address, HOST:PORT"
    if _is_table(hint):
        return "a table"
    return {bool: "true or false", str: "a string", Path: "a path"}[hint]


def _describe_range(bounds: Bounds) -> str:
    if bounds.minimum is not None and bounds.maximum is not None:
        return f" from {bounds.minimum} to {bounds.maximum}"
    if bounds.minimum is not None:
        return f" of at least {bounds.minimum}"
    if bounds.maximum is not None:
        return f" of at most {bounds.maximum}"
    return ""


def _fits(hint: Any, value: object, bounds: Bounds) -> bool:
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_fits(get_args(hint)[0], element, bounds) for element in value)
    if hint is int:
        # A bool is an int to Python, and never one to an operator.
        return (
            isinstance(value, int)
            and not isinstance(value, bool)
            and (bounds.minimum is None or value >= bounds.minimum)
            and (bounds.maximum is None or value <= bounds.maximum)
        )
    if _is_table(hint):
        return value is None or isinstance(value, dict)
    assert isinstance(hint, type), hint
    return isinstance(value, hint)


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """The section `[store]`."""

    segment_bytes: int = option(
        256 * MIB,
        "Bytes of a CommitLog segment. No record is larger than one.",
        minimum=MIB,
        maximum=4 * GIB,
    )
    flush: Literal["sync", "async"] = option(
        "sync",
        'When a publisher gets its acknowledgement: "sync" after fdatasync of the group that its message belongs to, "async" '
        "after the write, so that a crash of the machine (not of the process) can lose what was acknowledged.",
    )
    sync_in: Literal["process", "thread"] = option(
        "process",
        'Who calls fdatasync: a "process" of its own, which takes 10 MiB, or a "thread" of the node, which has to wait for the '
        "interpreter behind each sync: with many publishers at QoS 1 that is a fifth of what the node can take.",
    )
    reserve_bytes: int = option(
        GIB,
        "Bytes of the disk that are kept free. With less, the node is read-only: messages, queues and groups are refused, "
        "while what is stored can be consumed and acknowledged. The smaller of this and store.reserve_percent counts; 0 is no "
        "reserve.",
        minimum=0,
    )
    reserve_percent: int = option(
        5,
        "Percent of the disk that are kept free, if that is less than store.reserve_bytes, so that a small disk can be used.",
        minimum=0,
        maximum=50,
    )
    index_flush_bytes: int = option(
        128 * MIB,
        "Bytes of log after which the RocksDB index is flushed. A start replays at most about this much.",
        minimum=MIB,
        maximum=16 * GIB,
    )
    index_flush_ms: int = option(
        30 * SECOND_MS,
        "Milliseconds after which the RocksDB index is flushed if anything was written.",
        minimum=100,
        maximum=HOUR_MS,
    )
    retention_ms: int = option(
        72 * HOUR_MS,
        "Milliseconds for which records are kept at least. Whole segments go, so some stay a quarter longer. 0: no bound.",
        minimum=0,
    )
    retention_bytes: int = option(
        0,
        "Bytes of log above which the oldest segments go, whatever their age. The open segment always stays. 0: no bound.",
        minimum=0,
    )
    copied_bytes_max: int = option(
        16 * GIB,
        "Bytes of records that outlive retention because somebody still needs them: pending delayed messages, deliveries that "
        "are not acknowledged, retained messages. Above that no segment is dropped.",
        minimum=0,
    )
    route_cache_max: int = option(
        100_000,
        "Topics whose matching queues are kept in memory.",
        minimum=1,
        maximum=10_000_000,
    )
    queues_max: int = option(
        1_000_000,
        "Light queues that may exist. A filter that would need one more is refused.",
        minimum=1,
        maximum=100_000_000,
    )
    topic_levels_max: int = option(
        128,
        "Levels of a topic or of a topic filter.",
        minimum=1,
        maximum=32_768,
    )
    topic_bytes_max: int = option(
        4096,
        "Bytes of a topic or of a topic filter in UTF-8. MQTT itself allows no more than 65535.",
        minimum=16,
        maximum=65_535,
    )
