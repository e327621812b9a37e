"""Finds the queues that get the messages of a topic, and caches them as a route.

There is always one root queue per first level of a topic (`plant/#`). A filter without wildcards is found by the topic itself,
and filters with wildcards are in a trie.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from penstock.store import topics
from penstock.store.errors import TopicInvalid
from penstock.store.options import StoreOptions
from penstock.store.queues.lightqueue import LightQueue
from penstock.store.space.accounts import NODE_ACCOUNT
from penstock.store.space.causer import NODE, Causer

if TYPE_CHECKING:
    from penstock.store.queues.queues import Queues

EVICTED_SHARE = 128
"""When the route cache is full, one route in this many is evicted. If routes were evicted singly, each search for the oldest
would walk over the dict's slots of all those that were evicted before."""

OUTDATED = -1
"""Version of a route that is invalid whatever the version of its root is."""

ENDED = -2
"""Version of a root that has ended."""


class Root:
    """The root queue of the topics of one first level, and the version of their routes."""

    __slots__ = ("queue", "version")

    def __init__(self, queue: LightQueue) -> None:
        self.queue = queue
        self.version = 0


class Route:
    """The queues that get the messages of one topic. It is valid while `version` equals the version of its root.

    `beginning` holds what the last record without properties had between its checksum and its body, with `flags` and
    `turn_ms` in it. The next record mostly begins the same way.
    """

    __slots__ = ("beginning", "flags", "name", "queues", "root", "topic", "turn_ms", "version")

    def __init__(self, topic: bytes, name: str, root: Root, queues: tuple[LightQueue, ...]) -> None:
        self.topic = topic
        self.name = name
        self.root = root
        self.queues = queues
        self.version = root.version
        self.beginning = b""
        self.flags = 0
        self.turn_ms = -1


class Router:
    """The routes from topics to light queues.

    Parameters:
        queues: the registry of the queues, which calls `add` and `remove` for each live queue.
        options: limits of topics and of the cache.
    """

    def __init__(self, queues: Queues, options: StoreOptions) -> None:
        self._queues = queues
        self._options = options
        self._trie: topics.FilterTrie[list[int]] = topics.FilterTrie()
        """Ids of the queues whose filters have wildcards, by filter. Other queues are looked up by the topic itself."""
        self.roots: dict[str, Root] = {}
        """The roots, by first level."""
        self.cached: dict[bytes, Route] = {}
        """The cache of `route`, by topic. A cached route may be outdated, but its topic is one that `route` accepts."""

    def route(self, topic: bytes, causer: Causer = NODE) -> Route:
        """Return the route of a topic, from the cache if it is still valid there.

        Args:
            topic: of a message that is about to be stored.
            causer: is charged for the root queue if the first level of the topic is new.

        Raises:
            TopicInvalid: clients can't publish to this topic.
            LimitExceeded: its first level is new, and `store.queues_max` queues exist, or the causer may have no more.
        """
        route = self.cached.get(topic)
        if route is not None and route.version == route.root.version:
            return route
        options = self._options
        name = topics.check_topic(topic, levels_max=options.topic_levels_max, bytes_max=options.topic_bytes_max)
        if name.startswith("$"):
            raise TopicInvalid(f"the topic {name[:64]!r} begins with '$', which only the node may use; choose another topic")
        level = topics.first_level(name)
        if level not in self.roots:
            self._queues.declare_root(level, causer)
        return self._resolve(topic, name)

    def known(self, topic: bytes) -> Route | None:
        """Return the route of a topic if it is in the cache and still valid."""
        route = self.cached.get(topic)
        return route if route is not None and route.version == route.root.version else None

    def route_stored(self, topic: bytes, account: int = NODE_ACCOUNT) -> Route:
        """Return the route of a topic that is in the log. Limits that were lowered since then don't apply to it.

        Args:
            topic: of a message in the log.
            account: is charged for the root queue if that has ended since the message was stored.
        """
        route = self.cached.get(topic)
        if route is not None and route.version == route.root.version:
            return route
        name = topic.decode()
        level = topics.first_level(name)
        if level not in self.roots:
            self._queues.restore_root(level, account)
        return self._resolve(topic, name)

    def _resolve(self, topic: bytes, name: str) -> Route:
        get = self._queues.get
        queues = [get(queue_id) for ids in self._trie.match(name) for queue_id in ids]
        queues += self._queues.named(name)
        self._forget(topic)
        if len(self.cached) >= self._options.route_cache_max:
            for oldest in list(islice(self.cached, max(self._options.route_cache_max // EVICTED_SHARE, 1))):
                self._forget(oldest)
        route = self.cached[topic] = Route(topic, name, self.roots[topics.first_level(name)], tuple(queues))
        return route

    def _forget(self, topic: bytes) -> None:
        """Remove a route from the cache, and mark it as outdated for callers that hold it."""
        route = self.cached.pop(topic, None)
        if route is not None:
            route.version = OUTDATED

    def add_root(self, queue: LightQueue) -> None:
        """Make a queue the root of its first level. It must be added as well."""
        self.roots[topics.first_level(queue.filter)] = Root(queue)

    def remove_root(self, queue: LightQueue) -> None:
        """Forget the root of a first level whose root queue has ended. Call `remove` first, and `forget_ended` afterwards."""
        self.roots.pop(topics.first_level(queue.filter)).version = ENDED

    def forget_ended(self) -> None:
        """Forget the cached routes of roots that have ended. It looks at the whole cache, so callers end many roots at once."""
        for topic in [topic for topic, route in self.cached.items() if route.root.version == ENDED]:
            self._forget(topic)

    def add(self, queue: LightQueue) -> None:
        """Begin to route messages to a queue."""
        if topics.is_wildcard(queue.filter):
            sharing = self._trie.get(queue.filter)
            if sharing is None:
                self._trie.insert(queue.filter, [queue.id])
            else:
                sharing.append(queue.id)
        self._outdate(queue.filter)

    def remove(self, queue: LightQueue) -> None:
        """Route no more messages to a queue. It need not have been added."""
        sharing = self._trie.get(queue.filter)
        if sharing is not None and queue.id in sharing:
            sharing.remove(queue.id)
            if not sharing:
                self._trie.remove(queue.filter)
        self._outdate(queue.filter)

    def _outdate(self, topic_filter: str) -> None:
        """Outdate the cached routes that a filter may affect."""
        if not topics.is_wildcard(topic_filter):
            self._forget(topic_filter.encode())
            return
        level = topics.first_level(topic_filter)
        if level in ("+", "#"):
            for root in self.roots.values():
                root.version += 1
        elif level in self.roots:
            self.roots[level].version += 1
