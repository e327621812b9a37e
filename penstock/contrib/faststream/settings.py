"""What brokers, subscribers and publishers are configured with, in the form that FastStream wants."""

from __future__ import annotations

from dataclasses import dataclass, field

from faststream._internal.configs import (
    BrokerConfig,
    PublisherSpecificationConfig,
    PublisherUsecaseConfig,
    SubscriberSpecificationConfig,
    SubscriberUsecaseConfig,
)
from faststream._internal.constants import EMPTY
from faststream._internal.utils.path import PARAM_REGEX, Address, AddressSyntax
from faststream.exceptions import SetupError
from faststream.middlewares import AckPolicy

from penstock.contrib.faststream.command import SendOptions
from penstock.pop.client.requests import Start
from penstock.pop.client.results import GroupSettings
from penstock.pop.client.tracing import Tracing

MQTT_ADDRESSES = AddressSyntax(
    replace_symbol="+",
    patch_regex=lambda regex: regex.replace(r"\+", "[^/]+").replace(r"/\#", "(?:/.*)?").replace(r"\#", ".*"),
    param_regex="[^/]+",
)


def address_of(topic: str, batch: int = 0) -> Address:
    """Return the address of a subscriber: a topic filter of MQTT in which `{name}` stands for one level.

    Raises:
        SetupError: A parameter shares its level with something else, or the subscriber takes batches.
    """
    for found in PARAM_REGEX.finditer(topic):
        if batch:
            raise SetupError(
                f"{found[0]} in {topic!r} has no value for a batch, which has messages of several topics: use + instead, and "
                "look at the topic of each message"
            )
        before, after = topic[: found.start()], topic[found.end() :]
        if (before and not before.endswith("/")) or (after and not after.startswith("/")):
            raise SetupError(f"{found[0]} in {topic!r} is only part of a level: a parameter stands for a whole level")
    return Address(topic, MQTT_ADDRESSES)


@dataclass(kw_only=True)
class PenstockConfig(BrokerConfig):
    """Configuration of a broker or router."""

    tracing: Tracing | None = None


@dataclass(kw_only=True)
class ConsumingPlan:
    """How a subscriber consumes. `PenstockRegistrator.subscriber` documents the fields."""

    group: str
    batch: int
    max_workers: int
    timeout_s: float
    invisible_s: float
    fifo: bool
    start: Start
    settings: GroupSettings | None


@dataclass(kw_only=True)
class PenstockSubscriberConfig(SubscriberUsecaseConfig):
    """Configuration of a subscriber."""

    _outer_config: PenstockConfig = field(default_factory=PenstockConfig)
    address: Address
    consuming: ConsumingPlan

    @property
    def ack_policy(self) -> AckPolicy:
        """What settles a message. By default, a handler that raises returns it as a failed attempt."""
        if self._ack_policy is not EMPTY:
            return self._ack_policy
        outer = self._outer_config.ack_policy
        return outer if outer is not EMPTY else AckPolicy.NACK_ON_ERROR


@dataclass(kw_only=True)
class PenstockSubscriberSpecificationConfig(SubscriberSpecificationConfig):
    """What the documentation of a subscriber is made of."""

    address: Address


@dataclass(kw_only=True)
class PenstockPublisherConfig(PublisherUsecaseConfig):
    """Configuration of a publisher."""

    _outer_config: PenstockConfig = field(default_factory=PenstockConfig)
    topic: str
    headers: dict[str, str]
    reply_to: str
    options: SendOptions


@dataclass(kw_only=True)
class PenstockPublisherSpecificationConfig(PublisherSpecificationConfig):
    """What the documentation of a publisher is made of."""

    topic: str
