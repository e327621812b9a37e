"""The options of the node's own spans."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from penstock.store.options import HOUR_MS, MINUTE_MS, SECOND_MS, OptionInvalid, option

SPANS_MAX = 1_000_000


@dataclass(frozen=True, slots=True)
class TracingOptions:
    """The section `[tracing]`: spans of OpenTelemetry for messages whose publishers sample them."""

    endpoint: str = option(
        "",
        "URL to which the node sends its spans by OTLP over HTTP, in JSON, such as `http://127.0.0.1:4318/v1/traces` of a "
        "collector on the same machine. If empty, the node makes no spans.",
    )
    service_name: str = option(
        "penstock",
        "Name of the node in traces: the attribute `service.name` of its resource.",
    )
    spans_per_s_max: int = option(
        1_000,
        "Maximum number of spans that the node makes in a second, whatever its clients sample. Further ones are dropped and "
        "counted.",
        minimum=1,
        maximum=SPANS_MAX,
    )
    queue_max: int = option(
        4_096,
        "Maximum number of spans that wait for the collector. Further ones are dropped and counted.",
        minimum=1,
        maximum=SPANS_MAX,
    )
    batch_max: int = option(
        256,
        "Maximum number of spans in a request to the collector.",
        minimum=1,
        maximum=10_000,
        at_most="queue_max",
    )
    interval_ms: int = option(
        SECOND_MS,
        "Time for which the first span of a batch waits for others.",
        minimum=10,
        maximum=MINUTE_MS,
    )
    timeout_ms: int = option(
        10 * SECOND_MS,
        "Time that the collector has for an answer. The node sends the batch again later.",
        minimum=10,
        maximum=HOUR_MS,
    )
    open_max: int = option(
        10_000,
        "Maximum number of sampled deliveries over MQTT, and as many over POP, that the node remembers until they are settled. "
        "The settlement of a forgotten one makes no span.",
        minimum=1,
        maximum=SPANS_MAX,
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
        if not self.service_name:
            raise OptionInvalid(f"{section}.service_name", "", "a name, by which traces show the node")
