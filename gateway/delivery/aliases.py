"""The topic aliases that the server assigns to topics on one connection. MQTT 5.0, 3.3.2.3.4."""

from __future__ import annotations


class TopicAliases:
    """The aliases of one connection. The first topics that are sent get one and keep it: such clients receive few topics.

    Parameters:
        alias_max: the client's topic alias maximum, at least 1.
    """

    __slots__ = ("_alias_max", "_assigned")

    def __init__(self, alias_max: int) -> None:
        self._alias_max = alias_max
        self._assigned: dict[bytes, int] = {}

    def lookup(self, topic: bytes) -> tuple[int, bool]:
        """Return the alias for a topic, or 0 if none is left, and whether the client knows the alias already."""
        alias = self._assigned.get(topic)
        if alias is not None:
            return alias, True
        return (len(self._assigned) + 1 if len(self._assigned) < self._alias_max else 0), False

    def assign(self, topic: bytes, alias: int) -> None:
        """Note that the packet that is being encoded tells the client what an alias stands for."""
        self._assigned[topic] = alias

    def clear(self) -> None:
        """Assign all aliases anew. A packet that names both topic and alias overrides what the client was told before."""
        self._assigned.clear()
