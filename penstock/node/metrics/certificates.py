"""Metrics of the certificates with which listeners speak TLS."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.node.metrics.families import labelled_gauge
from penstock.store.watchedfiles import WatchedFiles


class CertificateCollector(Collector):
    """When certificates expire. The node knows it since it has read them, so a scrape reads no file.

    Parameters:
        certificates: returns those in force.
    """

    def __init__(self, certificates: Callable[[], Iterable[WatchedFiles[Any]]]) -> None:
        self._certificates = certificates

    def collect(self) -> Iterator[Metric]:
        yield labelled_gauge(
            "penstock_certificate_expires_timestamp_seconds",
            "When the certificate of a listener, or one of its chain, expires, in seconds since 1970.",
            ["listener"],
            {(each.listener,): each.expires_s for each in self._certificates() if each.expires_s != math.inf},
        )
