"""The registry that `/metrics` shows."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector


def registry_of(*collectors: Collector) -> CollectorRegistry:
    """Return a registry with the collectors of a node's parts, and the figures of its process."""
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    ProcessCollector(registry=registry)
    return registry
