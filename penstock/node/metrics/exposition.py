"""The text of all metrics, made in slices of the event loop: that of two hundred groups takes a tenth of a second."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from penstock.node.loopshare import LoopShare

SAMPLES_AT_ONCE = 50
"""Samples that are encoded before the scrape looks at the time. Each takes some microseconds."""

END = b"# EOF\n"
"""The last line of OpenMetrics."""

Encode = Callable[[Any], bytes]
"""Encodes what `collect` of its argument returns, with a comment before each family."""


async def exposition(registry: CollectorRegistry, encode: Encode) -> bytes:
    """Return the text of all metrics of a registry, as the encoder would make it at once."""
    parts = []
    share = LoopShare()
    is_open_metrics = False
    for family in registry.collect():
        for chunk in _chunks_of(family):
            text = encode(chunk)
            if text.endswith(END):
                is_open_metrics = True
                text = text[: -len(END)]
            parts.append(text if chunk.is_first else _without_comments(text))
            await share.rest()
    if is_open_metrics:
        parts.append(END)
    return b"".join(parts)


class _Chunk:
    """Some samples of a family, which the encoder takes for a registry."""

    def __init__(self, family: Metric, samples: Sequence[Any], *, is_first: bool) -> None:
        self._family = Metric(family.name, family.documentation, family.type, family.unit)
        self._family.samples = list(samples)
        self.is_first = is_first

    def collect(self) -> list[Metric]:
        return [self._family]


def _chunks_of(family: Metric) -> Iterator[_Chunk]:
    samples = family.samples
    yield _Chunk(family, samples[:SAMPLES_AT_ONCE], is_first=True)
    for start in range(SAMPLES_AT_ONCE, len(samples), SAMPLES_AT_ONCE):
        yield _Chunk(family, samples[start : start + SAMPLES_AT_ONCE], is_first=False)


def _without_comments(text: bytes) -> bytes:
    while text.startswith(b"# "):
        text = text.partition(b"\n")[2]
    return text


def registry_of(*collectors: Collector) -> CollectorRegistry:
    """Return a registry with the collectors of a node's parts, and the figures of its process."""
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    ProcessCollector(registry=registry)
    return registry
