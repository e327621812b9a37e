"""The state of a node, as `/api/v1/state` of the admin listener shows it."""

from __future__ import annotations

from typing import Any, Final

from penstock.gateway.gateway import Gateway
from penstock.node.clockcontrol import clock_of
from penstock.pop.core.core import PopCore
from penstock.pop.core.group import ConsumerGroup
from penstock.pop.core.transactions import Transactions
from penstock.store.recovery.recovery import Recovery
from penstock.store.space.accounts import Resource
from penstock.store.space.ledger import Holder, Ledger
from penstock.store.store import Store
from penstock.timer.delayed import DelayedMessages

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


def state_of(
    store: Store,
    recovery: Recovery,
    gateway: Gateway,
    delayed: DelayedMessages,
    transactions: Transactions,
    pop: PopCore,
) -> dict[str, Any]:
    """Return the state of a node's parts, of types that orjson can encode."""
    return {
        "log": {
            "start": store.log.start,
            "expires_before": store.retention.expires_before,
            "end": store.log.written,
            "appended": store.log.end,
            "durable": store.durable_position,
            "torn_bytes_at_start": recovery.torn_bytes,
            "replayed_at_start": recovery.replayed,
            "skipped_bytes_at_start": recovery.skipped_bytes,
        },
        "index": store.index.figures()._asdict(),
        "disk": {
            "store": store.space.level.name.lower(),
            "free": store.space.usage.free,
            "reserve": store.space.reserve,
            "why": store.space.why(),
            "held_bytes": gateway.backlog.kept_bytes,
        },
        "clock": clock_of(store),
        "connections": len(gateway.connections),
        "queues": len(store.queues),
        "quotas": quotas_of(store.ledger),
        "timers_pending": len(delayed),
        "transactions_pending": len(transactions),
        "in_memory": {
            "routes": len(store.router.cached),
            "checkpoints_open": pop.checkpoints_open,
            "checkpoints_closed": pop.checkpoints_remembered,
            "transactions_ended": transactions.remembered,
            "timers": delayed.in_memory,
        },
        "pop": {name: value for name in pop.counters.__slots__ if isinstance(value := getattr(pop.counters, name), int)},
        "groups": [_group(group) for group in pop.groups],
    }


def _group(group: ConsumerGroup) -> dict[str, Any]:
    returned_min, returned_max = group.count_returned()
    return {
        "id": group.id,
        "group": group.name,
        "filter": group.filter,
        "visible": group.count_visible(),
        "retries": group.count_retries(),
        "returned_min": returned_min,
        "returned_max": returned_max,
        "in_flight": group.in_flight,
        "delayed": group.delayed,
        "parked": group.order.parked if group.order is not None else 0,
        "dead": group.dead_letter_count,
        "waiting": len(group.polls),
    }
