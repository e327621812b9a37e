"""Bans: users, client ids and addresses that may not connect, for a time or until somebody lifts the ban."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any, Final, Literal, get_args

import orjson

from penstock.access.errors import AccessInvalid
from penstock.access.subject import Subject
from penstock.store.files import SYSTEM_FILES, Files, read_file, replace_file
from penstock.store.sortednames import SortedNames
from penstock.store.space.causer import plain_network

FILE: Final = "bans.json"
"""Name of the file in the data directory."""

BANS_MAX: Final = 100_000
"""Maximum number of bans."""

TEXT_CHARS_MAX: Final = 1000

ENCODED_AT_ONCE: Final = 512
"""Bans that are encoded in one turn of the event loop."""

FORGOTTEN_AT_ONCE: Final = 64
"""Bans that have ended and are forgotten when another one is made."""

Kind = Literal["user", "client", "address"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Ban:
    """One ban.

    Parameters:
        kind: what `name` is.
        name: a user name, a client id, or a network such as 10.0.0.0/8.
        since_ms: when it was made, in ms since 1970.
        until_ms: when it ends, in ms since 1970; 0 for never.
        why: a note of the operator.
    """

    kind: Kind
    name: str
    since_ms: int
    until_ms: int = 0
    why: str = ""


class Bans:
    """The bans of a node, kept in a file of its data directory.

    The time to look for a ban, and to make or lift one, does not depend on how many there are. Only that to save them does: the
    file is written as a whole, outside of the event loop.

    Parameters:
        data_dir: of the node.
        now_ms: returns the time in ms since 1970.

    Raises:
        AccessInvalid: the file is damaged. Delete it to lift all bans.
    """

    def __init__(self, data_dir: Path, now_ms: Callable[[], int]) -> None:
        self._path = data_dir / FILE
        self._now_ms = now_ms
        self._bans: dict[str, Ban] = {}
        """The bans by their keys. Some may have ended."""
        self._keys = SortedNames()
        self._ends = SortedNames()
        """The keys of bans that end, each after its end."""
        self._networks: dict[tuple[int, int], dict[int, Ban]] = {}
        """The networks that are no single address: by version of IP and length of the prefix, and by the prefix."""
        self._changes = 0
        self._saved_changes: int
        """How many of the changes are in the file."""
        self._saving = asyncio.Lock()
        for ban in read_bans(self._path):
            self._put(ban)
        self._saved_changes = self._changes

    def __len__(self) -> int:
        """Return the number of bans that have not ended."""
        return len(self._bans) - self._ends.count_before(_end(self._now_ms() + 1))

    def at_or_after(self, start: str, count: int) -> list[tuple[str, Ban]]:
        """Return up to `count` bans with their keys from a key on, in the order of kind and name.

        Some may have ended. Fewer may come although more follow; none come if none follow.
        """
        return [(key, self._bans[key]) for key in self._keys.at_or_after(start, count)]

    def has_ended(self, ban: Ban) -> bool:
        """Return whether a ban holds no more."""
        return 0 < ban.until_ms <= self._now_ms()

    def of(self, subject: Subject) -> Ban | None:
        """Return a ban that applies to a subject, or None."""
        if not self._bans:
            return None
        return self._find("user", subject.user) or self._find("client", subject.client_id) or self.of_address(subject.address)

    def of_address(self, address: str) -> Ban | None:
        """Return a ban that applies to an IP address, or None."""
        found = self._find("address", address)
        if found is None and self._networks and address:
            try:
                given = ip_address(address)
            except ValueError:  # a Unix socket has none
                return None
            for (version, length), networks in self._networks.items():
                if version == given.version:
                    ban = networks.get(int(given) >> (given.max_prefixlen - length))
                    if ban is not None and not self.has_ended(ban):
                        return ban
        return found

    def add(self, kind: Kind, name: str, *, for_ms: int = 0, why: str = "") -> Ban:
        """Make a ban in place of an earlier one. The caller saves it.

        Args:
            kind: what `name` is.
            name: a user name, a client id, or an address or network.
            for_ms: how long it lasts, in ms; 0 without end.
            why: a note.

        Raises:
            AccessInvalid: the name is no network, or there are too many bans.
        """
        if not name or len(name) > TEXT_CHARS_MAX or len(why) > TEXT_CHARS_MAX:
            raise AccessInvalid(f"give a name and a note of at most {TEXT_CHARS_MAX} characters")
        if kind == "address":
            name = network_name(name)
        self._forget_ended()
        if len(self._bans) >= BANS_MAX and _key(kind, name) not in self._bans:
            raise AccessInvalid(f"there are {len(self._bans)} bans, which is the limit; lift some, or ban networks")
        now_ms = self._now_ms()
        ban = Ban(kind, name, now_ms, now_ms + for_ms if for_ms else 0, why)
        self._put(ban)
        return ban

    def lift(self, kind: Kind, name: str) -> Ban:
        """Lift a ban. The caller saves that. Raises AccessInvalid if there is no such ban."""
        ban = self._bans.get(_key(kind, network_name(name) if kind == "address" else name))
        if ban is None:
            raise AccessInvalid(f"there is no ban of the {kind} {name!r}")
        self._remove(ban)
        return ban

    async def save(self) -> None:
        """Return when the file has all changes up to now, and is durable. Callers that come meanwhile share the next write.

        Raises OSError; what has changed then holds until the node ends.
        """
        needed = self._changes
        async with self._saving:
            if self._saved_changes >= needed:
                return
            changes = self._changes
            pieces = await self._encoded()
            await asyncio.to_thread(replace_file, SYSTEM_FILES, self._path, pieces, permissions=0o600)
            self._saved_changes = changes

    async def _encoded(self) -> list[bytes]:
        """Return the pieces of a file with the bans of this moment that have not ended."""
        bans = tuple(self._bans.values())
        pieces = [b"["]
        for begin in range(0, len(bans), ENCODED_AT_ONCE):
            rows = orjson.dumps([ban for ban in bans[begin : begin + ENCODED_AT_ONCE] if not self.has_ended(ban)])[1:-1]
            if rows:
                pieces.append(b"," + rows if len(pieces) > 1 else rows)
            await asyncio.sleep(0)
        return [*pieces, b"]"]

    def _forget_ended(self) -> None:
        """Remove the bans that have ended, a few at a time, but more than one is made meanwhile."""
        now = _end(self._now_ms() + 1)
        for end in self._ends.at_or_after("", FORGOTTEN_AT_ONCE):
            if end >= now:
                break
            self._remove(self._bans[end.partition("/")[2]])

    def _find(self, kind: Kind, name: str) -> Ban | None:
        ban = self._bans.get(_key(kind, name)) if name else None
        return None if ban is None or self.has_ended(ban) else ban

    def _put(self, ban: Ban) -> None:
        key = _key(ban.kind, ban.name)
        if key in self._bans:
            self._remove(self._bans[key])
        self._bans[key] = ban
        self._keys.add(key)
        if ban.until_ms > 0:
            self._ends.add(_end(ban.until_ms, key))
        if (prefix := _prefix(ban)) is not None:
            lengths, number = prefix
            self._networks.setdefault(lengths, {})[number] = ban
        self._changes += 1

    def _remove(self, ban: Ban) -> None:
        key = _key(ban.kind, ban.name)
        del self._bans[key]
        self._keys.remove(key)
        if ban.until_ms > 0:
            self._ends.remove(_end(ban.until_ms, key))
        if (prefix := _prefix(ban)) is not None:
            lengths, number = prefix
            del self._networks[lengths][number]
            if not self._networks[lengths]:
                del self._networks[lengths]
        self._changes += 1


def _key(kind: Kind, name: str) -> str:
    return f"{kind}/{name}"


def _end(until_ms: int, key: str = "") -> str:
    """Return a text that sorts by a time, and holds a key."""
    return f"{until_ms:020}/{key}"


def _prefix(ban: Ban) -> tuple[tuple[int, int], int] | None:
    """Return version and length of the prefix of a network that is banned, and the prefix as a number; None for other bans."""
    if ban.kind != "address" or "/" not in ban.name:
        return None
    network = ip_network(ban.name)
    return (network.version, network.prefixlen), int(network.network_address) >> (network.max_prefixlen - network.prefixlen)


def network_name(text: str) -> str:
    """Return how an address or a network is written: a single address without the length of its prefix."""
    try:
        if "%" in text:
            raise ValueError("an address with a zone")
        network = plain_network(text, strict=False)
    except ValueError as error:
        raise AccessInvalid(f"{text[:80]!r} is no address and no network such as 10.0.0.0/8") from error
    return str(network.network_address) if network.prefixlen == network.max_prefixlen else str(network)


def concerns(kind: Kind, name: str, subject: Subject) -> bool:
    """Return whether a user name, a client id, or an address or network is that of a subject."""
    if kind == "address":
        return is_within(subject.address, name)
    return bool(name) and name == (subject.user if kind == "user" else subject.client_id)


def is_within(address: str, network: str) -> bool:
    """Return whether an IP address is one, or in a network. A text that is no address is in none, and no network has any."""
    try:
        return ip_address(address) in plain_network(network, strict=False)
    except ValueError:
        return False


def read_bans(path: Path, files: Files = SYSTEM_FILES) -> list[Ban]:
    """Return the bans of a file; none if there is no file. Raises AccessInvalid if it is damaged, and OSError."""
    try:
        rows: Any = orjson.loads(read_file(files, path))
        found = [Ban(**row) for row in rows]
        for ban in found:
            well_typed = all(
                isinstance(getattr(ban, each.name), int if each.name.endswith("_ms") else str) for each in fields(ban)
            )
            if ban.kind not in KINDS or not well_typed:
                raise ValueError(f"{ban} is no ban")
        # Earlier versions have written networks of IPv4 inside IPv6 as they were given.
        return [replace(ban, name=network_name(ban.name)) if ban.kind == "address" else ban for ban in found]
    except FileNotFoundError:
        return []
    except (ValueError, TypeError, AccessInvalid) as error:
        raise AccessInvalid(f"{path} is damaged ({error}); delete it to lift all bans") from error
