"""Whether one of amqtt's filters covers what a client asks for: the node's own answer in place of amqtt's.

amqtt compares a filter that a client asks for level by level with a filter that its plugins allow, as if it were a topic. So
`b/+` would cover a subscription to `b/#`, and in the plugin for lists of topics `#` would cover `$SYS/#`. Its plugins for
lists, JWT, LDAP and databases call one of two functions for it, which `use_containment` replaces.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from amqtt.plugins import TopicMatcher
from amqtt.plugins.topic_checking import TopicAccessControlListPlugin

from penstock.store.errors import TopicInvalid
from penstock.store.topics import check_filter, contains

FILTERS_REMEMBERED: Final = 10_000
"""Filters of plugins that are remembered to be valid, or not."""


def use_containment() -> None:
    """Let the plugins of amqtt allow a filter only if one that they know matches all of its topics."""
    TopicMatcher.is_topic_allowed = staticmethod(covers)
    TopicAccessControlListPlugin.topic_ac = staticmethod(covers)


def covers(requested: str, allowed: str) -> bool:
    """Return whether a filter that a plugin allows covers a topic or a filter. A filter that is not valid covers nothing."""
    return _is_valid(allowed) and contains(allowed, requested)


@lru_cache(FILTERS_REMEMBERED)
def _is_valid(topic_filter: str) -> bool:
    try:
        check_filter(topic_filter)
    except TopicInvalid:
        return False
    return True
