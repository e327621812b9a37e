"""How a subscription gets its messages."""

from __future__ import annotations

from typing import NamedTuple


class DeliveryOptions(NamedTuple):
    """How a subscription gets its messages. Subscriptions with equal options share one encoding of each batch."""

    qos: int
    """The maximum QoS granted: a message is delivered at the lower of this and its own."""
    is_v5: bool = False
    """Whether packets are those of MQTT 5.0."""
    keeps_retain: bool = False
    """The option Retain As Published (MQTT 5.0, 3.8.3.1)."""
    identifiers: tuple[int, ...] = ()
    """Subscription identifiers to put into each packet."""

    @property
    def key(self) -> int:
        """A number that is the same for equal options, provided that there is at most one identifier."""
        identifier = self.identifiers[0] if self.identifiers else 0
        return self.qos | self.is_v5 << 2 | self.keeps_retain << 3 | identifier << 4
