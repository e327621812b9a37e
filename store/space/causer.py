"""Who causes what takes room on the node: the user, the source address and the client of a request.

A causer is charged for what it creates (`store.space.ledger`). Its names are in the record that creates something, so that who
is charged follows from the log.
"""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache
from hashlib import blake2b
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any, Final, NamedTuple

import orjson

IPV6_PREFIX: Final = 64
"""The bits of an IPv6 address that name a source. A site or a subscriber gets a prefix of this length, and chooses the rest."""

EXEMPT: Final = ""
"""The source of loopback addresses and Unix sockets, where limits on connections don't apply: often all clients share it."""

LOCAL: Final = "local"
"""The name of that source among the names of a causer."""

NAME_BYTES_MAX: Final = 128
"""Bytes of a name that records and the ledger keep. MQTT allows names of 65,535 bytes."""

_MAPPED_BITS: Final = 96
"""Bits of an IPv6 address before the IPv4 address that is inside it."""

_DIGEST_BYTES: Final = 8
_CHAINS_REMEMBERED: Final = 16_384
_SOURCES_REMEMBERED: Final = 4_096
"""Number of addresses whose source is known without parsing them. A login asks for its own nine times."""


@lru_cache(_SOURCES_REMEMBERED)
def source_of(host: str) -> str:
    """Return the source of an address: the address itself, its network of 64 bits (IPv6), or `EXEMPT`.

    `host` is a numeric address, with or without a scope (`fe80::1%eth0`), or empty for a Unix socket.
    """
    if not host:
        return EXEMPT
    address = ip_address(host.partition("%")[0])
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        elif not address.is_loopback:
            prefix = int(address) >> (128 - IPV6_PREFIX) << (128 - IPV6_PREFIX)
            return f"{IPv6Address(prefix)}/{IPV6_PREFIX}"
    return EXEMPT if address.is_loopback else str(address)


def is_local(host: str) -> bool:
    """Return whether only this machine reaches an address, or comes from it: a loopback address, or a Unix socket.

    `host` is as in `source_of`. The wildcard addresses 0.0.0.0 and :: are not local.
    """
    return source_of(host) == EXEMPT


def is_loopback_name(name: str) -> bool:
    """Return whether a host name in lower case means this machine for everybody: localhost, or a loopback address."""
    if name == "localhost":
        return True
    try:
        return is_local(str(ip_address(name.partition("%")[0])))
    except ValueError:
        return False


def plain_address(host: str) -> str:
    """Return a numeric address as it is written everywhere: an IPv4 address inside IPv6 (::ffff:192.0.2.1) as IPv4."""
    address = ip_address(host)
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return str(address)


def plain_network(text: str, *, strict: bool = True) -> IPv4Network | IPv6Network:
    """Return a network as `plain_address` writes its addresses: one of IPv4 inside IPv6 (::ffff:10.0.0.0/104) is one of IPv4.

    With `strict`, the address must have no bits beyond its prefix. Raises ValueError.
    """
    network = ip_network(text, strict=strict)
    if isinstance(network, IPv6Network) and network.prefixlen >= _MAPPED_BITS:
        mapped = network.network_address.ipv4_mapped
        if mapped is not None:
            return IPv4Network((mapped, network.prefixlen - _MAPPED_BITS))
    return network


class AccountKind(IntEnum):
    """What an account is about. Each account is part of one of a kind with a lesser number; the numbers are in the index."""

    NODE = 0
    TENANT = 1
    USER = 2
    SOURCE = 3
    CLIENT = 4
    MEMBER = 5
    """What a client, or a source without clients, has of a tenant that topics name. It is part of that tenant as well."""


class Step(NamedTuple):
    """An account on the way from the node to a causer."""

    account: int
    """Its id: a hash of its names, never 0."""
    kind: AccountKind
    name: str


class Causer(NamedTuple):
    """Who causes something. Names that are not known are empty; without any name it is the node itself.

    Create one with `Causer.of`, which bounds the names.
    """

    user: str = ""
    """The user name that a password, a token or a certificate vouches for."""
    source: str = ""
    """Where the request comes from: an IPv4 address, an IPv6 network of 64 bits, or `LOCAL`."""
    client: str = ""
    """The client id of MQTT, which clients choose themselves."""
    tenant: str = ""
    """The tenant that the user belongs to: see `QuotaOptions.tenant`."""
    topic: str = ""
    """The tenant that the topic belongs to. It is apart from the user: a user may have things of many such tenants."""

    @classmethod
    def of(cls, user: str, source: str, client: str = "") -> Causer:
        """Return a causer whose names are no longer than `NAME_BYTES_MAX`.

        Args:
            user: empty if nothing vouches for one.
            source: of `source_of`.
            client: empty over gRPC.
        """
        return cls(_bounded(user), source or LOCAL, _bounded(client))

    def for_topic(self, tenant: str) -> Causer:
        """Return this causer with the tenant that a topic belongs to."""
        return self._replace(topic=_bounded(tenant))

    def chain(self) -> tuple[Step, ...]:
        """Return the accounts from the tenant of the user down to the client. Each is part of the one before it."""
        return _chain(self)

    def member(self) -> Step:
        """Return the account of what the causer has of the tenant of a topic. Its name is that of the tenant."""
        return _member(self)

    @property
    def account(self) -> int:
        """Id of the innermost account, to which charges go; 0 for the node."""
        if self.topic:
            return _member(self).account
        chain = _chain(self)
        return chain[-1].account if chain else 0

    def row(self) -> list[str]:
        """Return what a record has of this causer: a list that JSON can hold; empty for the node."""
        names = list(self)
        while names and not names[-1]:
            names.pop()
        return names

    @classmethod
    def from_row(cls, row: Any) -> Causer:
        """Return the causer that a record names; the node if it names none."""
        return cls(*row) if row else NODE


NODE: Final = Causer()
"""The node itself, which no quota limits."""


def _bounded(name: str) -> str:
    """Return a name, or if it is too long its beginning and its hash."""
    encoded = name.encode()
    if len(encoded) <= NAME_BYTES_MAX:
        return name
    digest = blake2b(encoded, digest_size=16).hexdigest()
    return f"{encoded[: NAME_BYTES_MAX - len(digest) - 4].decode(errors='ignore')}...{digest}"


@lru_cache(_CHAINS_REMEMBERED)
def _chain(causer: Causer) -> tuple[Step, ...]:
    user, source, client, tenant, _ = causer
    steps = []
    if tenant:
        steps.append(tenant_step(tenant))
    if user:
        steps.append(_step(AccountKind.USER, user, tenant))
    if source:
        steps.append(_step(AccountKind.SOURCE, source, user, tenant))
    if client:
        # Nothing vouches for the client id of an anonymous client, so another source may not add to the account of that client.
        steps.append(_step(AccountKind.CLIENT, client, *((user,) if user else ("", source)), tenant))
    return tuple(steps)


@lru_cache(_CHAINS_REMEMBERED)
def _member(causer: Causer) -> Step:
    return _step(AccountKind.MEMBER, causer.topic, str(_chain(causer)[-1].account))


def tenant_step(name: str) -> Step:
    """Return the account of a tenant."""
    return _step(AccountKind.TENANT, name)


def _step(kind: AccountKind, name: str, *above: str) -> Step:
    digest = blake2b(orjson.dumps([kind, name, *above]), digest_size=_DIGEST_BYTES).digest()
    return Step(int.from_bytes(digest, "big") or 1, kind, name)
