"""Where connections come from: how many each source has open, and which sources are held off for what they did."""

from __future__ import annotations

from ipaddress import IPv6Address, ip_address
from typing import Final

from penstock.gateway.options import LimitOptions
from penstock.store.recent import RecentIds

IPV6_PREFIX: Final = 64
"""Bits of an IPv6 address that name a source: what a site or a subscriber is given. The rest it makes up as it likes."""

EXEMPT: Final = ""
"""The source of loopback addresses and Unix sockets: all of this machine, often one proxy for everybody. It has no limits."""


def source_of(host: str) -> str:
    """Return what an address counts as: itself, or its network of 64 bits (IPv6), or `EXEMPT`.

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


class Strikes:
    """What a source did wrong in the current window, and until when it is held off (0: it isn't)."""

    __slots__ = ("count", "held_until_ms", "window_until_ms")

    def __init__(self, window_until_ms: int) -> None:
        self.count = 0
        self.window_until_ms = window_until_ms
        self.held_until_ms = 0


class Sources:
    """All sources with connections or strikes.

    Parameters:
        options: see `LimitOptions`.
    """

    def __init__(self, options: LimitOptions) -> None:
        self._options = options
        self._open: dict[str, int] = {}
        self._strikes: RecentIds[str, Strikes] = RecentIds(options.sources_max)
        """By source; the one that was struck longest ago comes first."""

    def __len__(self) -> int:
        """How many sources are remembered for their strikes."""
        return len(self._strikes)

    def refusal(self, source: str, now_ms: int) -> str:
        """Return why a source may have no more connections, as a word for the metrics; empty if it may."""
        if source == EXEMPT:
            return ""
        strikes = self._strikes.get(source)
        if strikes is not None and strikes.held_until_ms > now_ms:
            return "held_off"
        most = self._options.source_connections_max
        return "source_connections" if most and self._open.get(source, 0) >= most else ""

    def opened(self, source: str) -> None:
        """Count a connection."""
        if source != EXEMPT:
            self._open[source] = self._open.get(source, 0) + 1

    def closed(self, source: str) -> None:
        """Count a connection off."""
        if source != EXEMPT:
            left = self._open[source] - 1
            if left:
                self._open[source] = left
            else:
                del self._open[source]

    def strike(self, source: str, now_ms: int) -> bool:
        """Note that a source did something wrong; return whether that was once too often, and it is held off from now on."""
        most = self._options.strikes_max
        if source == EXEMPT or not most:
            return False
        strikes = self._strikes.get(source)
        if strikes is None or strikes.window_until_ms <= now_ms:
            strikes = Strikes(now_ms + self._options.strike_window_ms)
        self._strikes.add(source, strikes)
        strikes.count += 1
        if strikes.count < most or strikes.held_until_ms > now_ms:
            return False
        strikes.held_until_ms = now_ms + self._options.hold_off_ms
        # What it does after that counts anew. Until then its window stays open, or the next strike would forget the hold.
        strikes.count = 0
        strikes.window_until_ms = strikes.held_until_ms
        return True
