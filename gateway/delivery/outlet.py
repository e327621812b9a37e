"""Where the packets of a subscription go. `gateway.connection` implements it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from penstock.gateway.delivery.aliases import TopicAliases


class ReceivePermissions(Protocol):
    """Which messages the rules and the plugins allow one client to receive. `gateway.auth` implements it."""

    @property
    def passes_all(self) -> bool:
        """Whether the client may receive every message of its subscriptions, so that none has to be looked at."""

    def admit(self, entries: bytes, /) -> tuple[bytes, int]:
        """Return those light-queue entries that the client may receive, and the number of entries that are decided.

        The check stops before the first entry that is not decided yet. It then asks the plugins, and the client's lagging
        subscriptions are pumped when they have answered.
        """

    @property
    def is_unanswered(self) -> bool:
        """Whether the plugins give no answer at present, so that nothing is decided for a while."""

    def passes(self, topics: frozenset[bytes], /) -> bool:
        """Return whether the client is known to be allowed messages of all these topics."""

    def receivable(self, topics: list[bytes], then: Callable[[], None], /) -> list[bytes] | None:
        """Return the topics whose messages the client may receive; None if the plugins must be asked, and `then` runs later."""


class LaggingSubscription(Protocol):
    """A subscription that is not live, as the outlet sees it."""

    def pump(self) -> None:
        """Send what can be sent now."""


class Outlet(Protocol):
    """One client's connection, as its subscriptions see it."""

    @property
    def writable(self) -> bool:
        """Whether the send buffer takes more packets. If not, the outlet pumps the lagging subscriptions once it does."""

    @property
    def is_v5(self) -> bool:
        """Whether the client speaks MQTT 5.0."""

    @property
    def packet_bytes_max(self) -> int | None:
        """The client's maximum packet size, in bytes; None if it has named none."""

    @property
    def aliases(self) -> TopicAliases | None:
        """The topic aliases that the server has assigned; None if the client accepts none."""

    @property
    def permissions(self) -> ReceivePermissions | None:
        """What the plugins allow the client; None if no plugin decides about topics."""

    @property
    def lagging(self) -> dict[LaggingSubscription, None]:
        """The subscriptions that are not live. The outlet pumps them in turn; the one that waits longest is first."""

    def send_publishes(self, data: bytes, count: int, /) -> None:
        """Send `count` PUBLISH packets, after those that wait for durability."""

    def send_when_durable(self, data: bytes, count: int, /) -> None:
        """Send `count` PUBLISH packets, or a PUBREL if it is 0, as soon as everything recorded so far is durable."""

    def pump_soon(self) -> None:
        """Pump the lagging subscriptions in the next turn of the loop."""
