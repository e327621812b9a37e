"""Figures of a node between two scrapes of its metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Scrape:
    """The metrics of a node at one time.

    Parameters:
        at_s: when, in monotonic seconds.
        samples: labels and value of each sample, by name.
    """

    at_s: float
    samples: Mapping[str, list[tuple[Labels, float]]]

    @staticmethod
    def parse(text: str, at_s: float) -> Scrape:
        """Return what an answer of `/metrics` says. Raises ValueError if it is none."""
        samples: dict[str, list[tuple[Labels, float]]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
        return Scrape(at_s, samples)

    def fitting(self, name: str, labels: Labels) -> Iterator[tuple[Labels, float]]:
        """Yield the samples of a metric that have these labels."""
        for found, value in self.samples.get(name, ()):
            if all(found.get(key) == wanted for key, wanted in labels.items()):
                yield found, value

    def sum(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of a metric that have these labels; 0 if there are none."""
        return sum(value for _, value in self.fitting(name, labels))


class Figures:
    """What a node does between two scrapes, and how it is at the second.

    Parameters:
        before, now: the scrapes. If the node has started in between, there are no rates.
    """

    def __init__(self, before: Scrape, now: Scrape) -> None:
        start = "process_start_time_seconds"
        self.now = now
        self._before = before if before.sum(start) == now.sum(start) else now

    def rate(self, name: str, **labels: str) -> float:
        """Return by how much a counter has grown, per second."""
        seconds = self.now.at_s - self._before.at_s
        return (self.now.sum(name, **labels) - self._before.sum(name, **labels)) / seconds if seconds > 0 else 0.0

    def quantile(self, name: str, part: float, **labels: str) -> float | None:
        """Return about the time below which a part of what a histogram counted in between is; None if it counted nothing."""
        before, now = (_buckets(scrape, name, labels) for scrape in (self._before, self.now))
        counts = [(bound, count - before.get(bound, 0.0)) for bound, count in sorted(now.items())]
        if not counts or counts[-1][1] <= 0:
            return None
        wanted = part * counts[-1][1]
        lower_bound = lower_count = 0.0
        for bound, count in counts:
            if count >= wanted:
                if bound == float("inf"):
                    return lower_bound
                return lower_bound + (bound - lower_bound) * (wanted - lower_count) / (count - lower_count)
            lower_bound, lower_count = bound, count
        return lower_bound


def _buckets(scrape: Scrape, name: str, labels: Labels) -> dict[float, float]:
    buckets: dict[float, float] = {}
    for found, value in scrape.fitting(f"{name}_bucket", labels):
        bound = float(found["le"])
        buckets[bound] = buckets.get(bound, 0.0) + value
    return buckets
