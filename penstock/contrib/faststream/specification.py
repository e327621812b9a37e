"""The descriptions of subscribers and publishers in AsyncAPI."""

from __future__ import annotations

from faststream._internal.endpoint.publisher import PublisherSpecification
from faststream._internal.endpoint.subscriber import SubscriberSpecification
from faststream.specification.asyncapi.utils import resolve_payloads
from faststream.specification.schema import Message, Operation, PublisherSpec, SubscriberSpec

from penstock.contrib.faststream.settings import (
    PenstockConfig,
    PenstockPublisherSpecificationConfig,
    PenstockSubscriberSpecificationConfig,
)


class PenstockSubscriberSpecification(SubscriberSpecification[PenstockConfig, PenstockSubscriberSpecificationConfig]):
    """Describes a subscriber."""

    @property
    def topic(self) -> str:
        """The address, with its parameters."""
        return self.config.address.add_prefix(self._outer_config.prefix).template

    @property
    def channel_labels(self) -> list[str]:
        """The address: the only channel of a subscriber."""
        return [self.topic]

    def get_schema(self) -> dict[str, SubscriberSpec]:
        """Return the description."""
        message = Message(title=f"{self.name}:Message", payload=resolve_payloads(self.get_payloads()))
        return {
            self.name: SubscriberSpec(
                address=self.topic,
                description=self.description,
                operation=Operation(message=message, bindings=None),
                bindings=None,
            )
        }


class PenstockPublisherSpecification(PublisherSpecification[PenstockConfig, PenstockPublisherSpecificationConfig]):
    """Describes a publisher."""

    @property
    def topic(self) -> str:
        """The topic."""
        return f"{self._outer_config.prefix}{self.config.topic}"

    @property
    def name(self) -> str:
        """The title, or a name made of the topic."""
        return self.config.title_ or f"{self.topic}:Publisher"

    def get_schema(self) -> dict[str, PublisherSpec]:
        """Return the description."""
        message = Message(title=f"{self.name}:Message", payload=resolve_payloads(self.get_payloads(), "Publisher"))
        return {
            self.name: PublisherSpec(
                address=self.topic,
                description=self.config.description_,
                operation=Operation(message=message, bindings=None),
                bindings=None,
            )
        }
