"""Finds the subscriptions of one session that match the same topics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from penstock.gateway.delivery.subscription import Subscription
from penstock.store import topics

WILDCARDS_COMPARED_MAX: Final = 64
"""Wildcard filters of a session up to which each new filter is compared with them. With more, all subscriptions are taken to
overlap."""


def mark_overlaps(by_filter: Mapping[str, Subscription], changed: Subscription) -> list[Subscription]:
    """Mark the subscriptions of a session that overlap after `changed` was added or removed; return those whose mark changed.

    Two filters without wildcards never match the same topic. So only filters with wildcards are compared with all others. After
    a removal some marks may remain that no longer hold. They cost these subscriptions the shared path and nothing else, and are
    corrected if the session has few subscriptions.
    """
    everyone = tuple(one for one in by_filter.values() if not one.is_shared)
    before = {one for one in everyone if one.overlaps}
    wildcards = [one for one in everyone if topics.is_wildcard(one.filter)]
    if len(wildcards) > WILDCARDS_COMPARED_MAX:
        for one in everyone:
            one.overlaps = True
    elif by_filter.get(changed.filter) is changed:
        for one in everyone if topics.is_wildcard(changed.filter) else wildcards:
            if one is not changed and not (one.overlaps and changed.overlaps) and topics.overlap(one.filter, changed.filter):
                one.overlaps = changed.overlaps = True
    elif changed.overlaps and len(everyone) <= WILDCARDS_COMPARED_MAX:
        for one in everyone:
            others = everyone if topics.is_wildcard(one.filter) else wildcards
            one.overlaps = any(topics.overlap(other.filter, one.filter) for other in others if other is not one)
    return [one for one in everyone if one.overlaps != (one in before)]
