"""Bans: users, client ids and addresses that may not connect, for a time or until somebody lifts the ban."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any, Final, Literal, get_args

import orjson

from penstock.access.errors import AccessInvalid
from penstock.access.rule import Network
from penstock.access.subject import Subject
from penstock.store.files import SYSTEM_FILES, Files, read_file, replace_file
from penstock.store.space.causer import plain_address

FILE: Final = "bans.json"
"""Name of the file in the data directory."""

BANS_MAX: Final = 100_000
"""Maximum number of bans."""

TEXT_CHARS_MAX: Final = 1000

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

    Parameters:
        data_dir: of the node.
        now_ms: returns the time in ms since 1970.

    Raises:
        AccessInvalid: the file is damaged. Delete it to lift all bans.
    """

    def __init__(self, data_dir: Path, now_ms: Callable[[], int]) -> None:
        self._path = data_dir / FILE
        self._now_ms = now_ms
        self._bans: dict[tuple[str, str], Ban] = {}
        self._networks: dict[str, Network] = {}
        """The networks that are no single address, by name: only these must be searched."""
        for ban in read_bans(self._path):
            self._put(ban)

    def __len__(self) -> int:
        return len(self._bans)

    def __iter__(self) -> Iterator[Ban]:
        """Yield the bans that have not ended."""
        now_ms = self._now_ms()
        return iter([ban for ban in self._bans.values() if not 0 < ban.until_ms <= now_ms])

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
            names = (name for name, network in self._networks.items() if given in network)
            found = next((ban for name in names if (ban := self._find("address", name)) is not None), None)
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
        now_ms = self._now_ms()
        for ended in [ban for ban in self._bans.values() if 0 < ban.until_ms <= now_ms]:
            self._remove(ended)
        if len(self._bans) >= BANS_MAX:
            raise AccessInvalid(f"there are {len(self._bans)} bans, which is the limit; lift some, or ban networks")
        ban = Ban(kind, name, now_ms, now_ms + for_ms if for_ms else 0, why)
        self._put(ban)
        return ban

    def lift(self, kind: Kind, name: str) -> Ban:
        """Lift a ban. The caller saves that. Raises AccessInvalid if there is no such ban."""
        ban = self._bans.get((kind, network_name(name) if kind == "address" else name))
        if ban is None:
            raise AccessInvalid(f"there is no ban of the {kind} {name!r}")
        self._remove(ban)
        return ban

    def save(self) -> None:
        """Write the file. Raises OSError; what has changed then holds until the node ends."""
        data = orjson.dumps([asdict(ban) for ban in self._bans.values()])
        replace_file(SYSTEM_FILES, self._path, data, permissions=0o600)

    def _find(self, kind: str, name: str) -> Ban | None:
        ban = self._bans.get((kind, name)) if name else None
        return None if ban is None or 0 < ban.until_ms <= self._now_ms() else ban

    def _put(self, ban: Ban) -> None:
        self._bans[ban.kind, ban.name] = ban
        if ban.kind == "address" and "/" in ban.name:
            self._networks[ban.name] = ip_network(ban.name)

    def _remove(self, ban: Ban) -> None:
        del self._bans[ban.kind, ban.name]
        self._networks.pop(ban.name if ban.kind == "address" else "", None)


def network_name(text: str) -> str:
    """Return how an address or a network is written: a single address without the length of its prefix."""
    try:
        network = ip_network(plain_address(text) if "/" not in text else text, strict=False)
        if "%" in text:
            raise ValueError("an address with a zone")
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
        return ip_address(address) in ip_network(network, strict=False)
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
            if ban.kind == "address":
                ip_network(ban.name)
    except FileNotFoundError:
        return []
    except (ValueError, TypeError) as error:
        raise AccessInvalid(f"{path} is damaged ({error}); delete it to lift all bans") from error
    return found
