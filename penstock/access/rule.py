"""One rule of the access file: whom it applies to, what it allows or denies, and where."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from ipaddress import IPv4Network, IPv6Network, ip_address
from typing import Final, TypeAlias

from penstock.access.subject import Subject

Network: TypeAlias = IPv4Network | IPv6Network

_WILDCARDS: Final = frozenset("*?[")


def is_exact(pattern: str) -> bool:
    """Return whether a pattern of names fits only the name that it is."""
    return not _WILDCARDS & set(pattern)


def fits_any(name: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a name that is not empty fits one of some patterns, in which `*` and `?` are wildcards."""
    return name != "" and any(fnmatchcase(name, pattern) for pattern in patterns)


@dataclass(frozen=True, slots=True)
class Who:
    """Whom a rule applies to: all of the conditions that are given must hold, and of each one of its values.

    Parameters:
        name: the user name itself, which may contain wildcards that mean nothing; empty for any.
        users: patterns of user names. A client without a user name fits none of them, not even `*`.
        roles: names of roles.
        clients: patterns of client ids of MQTT.
        addresses: networks.
    """

    name: str = ""
    users: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    clients: tuple[str, ...] = ()
    addresses: tuple[Network, ...] = ()

    def applies_to(self, subject: Subject) -> bool:
        """Return whether the rule applies to a subject."""
        return (
            (not self.name or subject.user == self.name)
            and (not self.users or fits_any(subject.user, self.users))
            and (not self.roles or any(role in subject.roles for role in self.roles))
            and (not self.clients or fits_any(subject.client_id, self.clients))
            and (not self.addresses or self._is_from(subject.address))
        )

    def _is_from(self, address: str) -> bool:
        try:
            found = ip_address(address)
        except ValueError:  # a Unix socket, or a proxy that named no address: no network has it
            return False
        return any(found in network for network in self.addresses)


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule.

    Parameters:
        source: where the rule comes from, as an operator knows it: `rule 3`, or `principal 'billing', read`.
        is_allowing: it allows; otherwise it denies.
        actions: see `penstock.access.actions`.
        who: whom it applies to.
        topics: filters, whose levels may have `%u` and `%c` in them.
        groups: patterns of the names of groups.
    """

    source: str
    is_allowing: bool
    actions: tuple[str, ...]
    who: Who = Who()
    topics: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
