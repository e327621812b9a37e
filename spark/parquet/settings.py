"""The rows of the table `settings`: what each change of a consumer group says about attempts and back-offs."""

from __future__ import annotations

from typing import Any

import orjson

from penstock.spark.parquet.schema import Change
from penstock.store.record import POP_FIXED, Kind, Record

WAITS_MAX = 64
"""Attempts for which the waits of a back-off are computed. The node allows no longer list."""

_CHANGES = {
    Kind.GROUP_CREATED: Change.CREATED,
    Kind.GROUP_CHANGED: Change.CHANGED,
    Kind.GROUP_OFFSET_RESET: Change.RESET,
    Kind.GROUP_DELETED: Change.DELETED,
}


def setting_rows(each: Record) -> list[dict[str, Any]]:
    """Return the rows of a record of a group: one per wait of its back-off, or one if it has none."""
    described = orjson.loads(each.properties or b"{}")
    if each.kind == Kind.GROUP_OFFSET_RESET and not described:
        return []  # a reset that ends many deliveries has several records, and its first one says the rest
    settings = described.get("settings", {})
    row = {
        "position": each.position,
        "at_ms": each.store_ms,
        "group_id": POP_FIXED.unpack(each.fixed)[0],
        "group_name": each.topic.decode(errors="replace"),
        "change": _CHANGES[Kind(each.kind)],
        "topic_filter": described.get("filter"),
        "attempts_max": settings.get("attempts_max"),
        "settings": orjson.dumps(settings).decode(),
    }
    waits: list[int | None] = [*waits_of(settings.get("backoff"))] or [None]
    return [{**row, "attempt": attempt, "backoff_ms": wait} for attempt, wait in enumerate(waits, 1)]


def waits_of(backoff: object) -> list[int]:
    """Return the waits of a back-off as `pop.core.settings` writes it, from the first attempt on.

    It is a list of waits, or a rule with min_ms, max_ms and factor. Without one, the group has the back-off of the node, which
    the log does not say: then there are no waits. The last wait holds for later attempts.
    """
    if isinstance(backoff, list):
        return [int(wait_ms) for wait_ms in backoff]
    if not isinstance(backoff, dict):
        return []
    wait_ms, max_ms, factor = float(backoff["min_ms"]), int(backoff["max_ms"]), float(backoff.get("factor", 2.0))
    waits = [int(min(wait_ms, max_ms))]
    while 0 < wait_ms < max_ms and factor > 1 and len(waits) < WAITS_MAX:
        wait_ms *= factor
        waits.append(int(min(wait_ms, max_ms)))
    return waits
