"""Who holds how much of what the node has a limited amount of, as `/api/v1/state` shows it."""

from __future__ import annotations

from typing import Any, Final

from penstock.store.space.accounts import Resource
from penstock.store.space.ledger import Holder, Ledger

LARGEST: Final = 10
"""Number of holders of each resource that are shown."""


def quotas_of(ledger: Ledger) -> dict[str, Any]:
    """Return what is held of each resource, by whom mostly, and how often more was refused."""
    found: dict[str, Any] = {}
    for resource in Resource:
        limit = ledger.limit_of(resource)
        found[resource.name.lower()] = {
            "held": ledger.held(resource),
            "maximum": limit.maximum if limit is not None else None,
            "refused": {kind.name.lower(): count for (of, kind), count in ledger.refused.items() if of is resource},
            "largest": [_described(holder) for holder in ledger.top(resource, LARGEST)],
        }
    return found


def _described(holder: Holder) -> dict[str, Any]:
    *above, name = holder.names
    part_of = {"part_of": above} if above else {}
    return {"of": holder.kind.name.lower(), "name": name, **part_of, "held": holder.held}
