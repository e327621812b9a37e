"""Metrics of quotas."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.node.metrics.families import labelled_counter, labelled_gauge
from penstock.store.space.accounts import Resource
from penstock.store.space.ledger import Ledger


class QuotaCollector(Collector):
    """How much of each limited resource is in use, and how often more was refused."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def collect(self) -> Iterator[Metric]:
        ledger = self._ledger
        limits = {resource: limit for resource in Resource if (limit := ledger.limit_of(resource)) is not None}
        yield labelled_gauge(
            "penstock_quota_held",
            "Amount of the resource that is in use.",
            ["resource"],
            {(resource.name.lower(),): ledger.held(resource) for resource in Resource},
        )
        yield labelled_gauge(
            "penstock_quota_maximum",
            "Amount of the resource that the node has for all.",
            ["resource"],
            {(resource.name.lower(),): limit.maximum for resource, limit in limits.items()},
        )
        yield labelled_gauge(
            "penstock_quota_largest_held",
            "Amount that the largest holder has; 0 if that is little. /api/v1/state has the names.",
            ["resource", "kind"],
            {
                (resource.name.lower(), kind.name.lower()): held
                for resource in Resource
                for kind, held in ledger.largest(resource).items()
            },
        )
        yield labelled_counter(
            "penstock_quota_refused",
            "Requests refused because the node, tenant, user, source or client may have no more.",
            ["resource", "kind"],
            {(resource.name.lower(), kind.name.lower()): count for (resource, kind), count in ledger.refused.items()},
        )
