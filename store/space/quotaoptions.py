"""The options of quotas: how much one tenant, user, source or client may hold of what the node has for all."""

from __future__ import annotations

from dataclasses import dataclass, fields
from ipaddress import ip_network
from typing import Final, Literal

from penstock.store.options import GIB, MIB, OptionInvalid, bound, option
from penstock.store.space.causer import IPV6_PREFIX, LOCAL, source_of

_PATTERN: Final = frozenset("*?[")
"""Characters that make a name a pattern."""

_COUNT_MAX: Final = 1_000_000_000


def _quota(what: str) -> int:
    return option(0, f"{what}.", minimum=0, maximum=_COUNT_MAX)


def _quota_bytes(what: str) -> int:
    return option(0, f"Bytes of {what}.", minimum=0, maximum=1024 * GIB)


@dataclass(frozen=True, slots=True)
class QuotaLimitOptions:
    """Limits of certain tenants, users, sources or clients, an element of the list `[[quotas.limits]]`.

    The names of the limits are those of `Resource` in lower case.
    """

    of: Literal["tenant", "user", "source", "client"] = option(
        "client",
        "What the limits apply to. Each one with a fitting name has these limits for itself.",
    )
    name: str = option(
        "*",
        'Pattern of the names, with *, ? and [...]. A source is an IPv4 address, an IPv6 network such as "2001:db8::/64", or '
        '"local".',
    )
    queues: int = _quota("Light queues")
    sessions: int = _quota("Stored sessions")
    subscriptions: int = _quota("Subscriptions, those of absent clients included")
    retained: int = _quota("Retained messages")
    retained_bytes: int = _quota_bytes("retained messages")
    groups: int = _quota("Consumer groups; a group counts once for each of its filters")
    delayed: int = _quota("Delayed messages that are pending")
    delayed_bytes: int = _quota_bytes("delayed messages that are pending")
    transactions: int = _quota("Half messages without an outcome")
    shared: int = _quota("Shared subscriptions of connected clients; clients that share one count once")
    schedules: int = _quota("Schedules")
    schedules_bytes: int = _quota_bytes("schedules")
    timer_keys: int = _quota("Delayed messages that are pending and have a key")

    def check(self, section: str) -> None:
        """Raise OptionInvalid if the limits apply to nothing."""
        if not self.name:
            raise OptionInvalid(f"{section}.name", "", 'a pattern, such as "*"')
        resources = [declared.name for declared in fields(self) if declared.name not in ("of", "name")]
        if not any(getattr(self, resource) for resource in resources):
            raise OptionInvalid(f"{section}.{resources[0]}", 0, f"above 0, or another one of {', '.join(resources[1:])}")
        if self.of == "source" and not _PATTERN & set(self.name) and self.name != LOCAL:
            source = _source_named(self.name)
            if source != self.name:
                raise OptionInvalid(
                    f"{section}.name",
                    self.name,
                    f'{source!r}, which is how this source is called; or a pattern, such as "192.0.2.*"'
                    if source
                    else f'an IPv4 address, an IPv6 network of 64 bits such as "2001:db8::/64", {LOCAL!r}, or a pattern',
                )


@dataclass(frozen=True, slots=True)
class QuotaOptions:
    """The section `[quotas]`."""

    share_percent: int = option(
        100,
        "Percent of what is free that one user, or one source of clients without a user name, may hold. With 100 it gets half "
        "of a limit of the node at most. 0 switches the share off.",
        minimum=0,
        maximum=100,
    )
    tenant: Literal["none", "user", "topic"] = option(
        "none",
        'What names a tenant: the part of the user name before the first "/" ("user"), or the first level of the topic. A '
        "tenant has a share like a user.",
    )
    limits: tuple[QuotaLimitOptions, ...] = option(
        (),
        "Limits of certain tenants, users, sources or clients, in place of the share of what is free. The first table that "
        "fits and has a limit for the resource applies; 0 means the share.",
    )
    share_from: int = bound(100, "Things of a kind that anybody may hold whatever the share, so that no device meets it.")
    share_from_bytes: int = bound(16 * MIB, "The same in bytes, for retained and delayed messages and for schedules.")

    def check(self, section: str) -> None:
        """Raise OptionInvalid if a value makes no sense."""
        if self.tenant == "none" and any(limits.of == "tenant" for limits in self.limits):
            allowed = '"user" or "topic", because [[quotas.limits]] has limits of tenants'
            raise OptionInvalid(f"{section}.tenant", self.tenant, allowed)


def _source_named(name: str) -> str:
    """Return the name of the source that an address or a network belongs to; empty if the text is neither."""
    try:
        network = ip_network(name, strict=False)
    except ValueError:
        return ""
    if network.prefixlen < (IPV6_PREFIX if network.version == 6 else network.max_prefixlen):
        return ""
    return source_of(str(network.network_address)) or LOCAL
