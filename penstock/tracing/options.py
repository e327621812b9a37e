"""The options of the node's own spans."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from penstock.store.options import SECOND_MS, OptionInvalid, bound, option


@dataclass(frozen=True, slots=True)
class TracingOptions:
    """The section `[tracing]`: spans of OpenTelemetry for messages whose publishers sample them."""

    endpoint: str = option(
        "",
        "URL that gets spans by OTLP over HTTP, such as `http://127.0.0.1:4318/v1/traces`. If empty, the node makes none.",
    )
    spans_per_s_max: int = bound(1_000, "Spans in a second, whatever clients sample: each takes time of the loop.")
    queue_max: int = bound(4_096, "Spans that wait for the collector, in memory. Further ones are dropped and counted.")
    batch_max: int = bound(256, "Spans in a request to the collector, which is made in one turn of the loop.")
    interval_ms: int = bound(SECOND_MS, "Time for which the first span of a batch waits for others.")
    timeout_ms: int = bound(10 * SECOND_MS, "Time for an answer of the collector: the default of OTLP exporters.")
    open_max: int = bound(
        10_000,
        "Sampled deliveries over MQTT, and as many over POP, that are remembered until they are settled, in memory.",
    )

    def check(self, section: str) -> None:
        """Raise OptionInvalid if the endpoint is no URL that the node can send to."""
        if not self.endpoint:
            return
        try:
            parts = urlsplit(self.endpoint)
            is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port that is no number, or half of an IPv6 address
            is_url = False
        if not is_url:
            raise OptionInvalid(
                f"{section}.endpoint", self.endpoint, "an http or https URL, such as http://HOST:4318/v1/traces"
            )
