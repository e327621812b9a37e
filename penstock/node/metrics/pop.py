"""Metrics of POP: deliveries, transactions and groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.node.metrics.families import add_latencies, counter, gauge, label_of, labelled_counter
from penstock.node.metrics.grouptotals import GroupTotaller, GroupTotals
from penstock.pop.access.refusals import Refusals
from penstock.pop.core.core import PopCore
from penstock.pop.core.groups import GroupSnapshot
from penstock.pop.core.sender import Sender
from penstock.pop.core.sentids import SentIds
from penstock.pop.core.transactions import Transactions
from penstock.pop.grpc.requestbytes import RefusedFor, RequestBytes
from penstock.pop.grpc.responsebytes import ResponseBytes

GROUP_GAUGES: dict[str, tuple[str, Callable[[GroupSnapshot], float]]] = {
    "visible": (
        "Messages that a pop could return now; an upper bound for groups with a filter on delivery.",
        lambda found: found.visible,
    ),
    "retries": ("Visible messages that were delivered before.", lambda found: found.retries),
    "in_flight": ("Messages delivered and not settled.", lambda found: found.in_flight),
    "delayed": ("Messages in flight that wait for a back-off.", lambda found: found.delayed),
    "parked": ("Messages that wait for an earlier one of their message group.", lambda found: found.parked),
    "dead": ("Dead letters that were not sent back.", lambda found: found.dead),
    "waiting": ("Pops that wait for a message.", lambda found: len(found.group.polls)),
    "oldest_seconds": ("Age of the oldest undelivered message.", lambda found: (found.oldest_ms or 0) / 1000),
    "oldest_in_flight_seconds": (
        "Age of the oldest unsettled delivery.",
        lambda found: (found.oldest_in_flight_ms or 0) / 1000,
    ),
}
"""Metrics of each group, by the ends of their names."""

TOTALS = {
    "visible": "As `penstock_pop_group_visible`, of all groups.",
    "retries": "As `penstock_pop_group_retries`, of all groups.",
    "in_flight": "As `penstock_pop_group_in_flight`, of all groups.",
    "delayed": "As `penstock_pop_group_delayed`, of all groups.",
    "parked": "As `penstock_pop_group_parked`, of all groups.",
    "dead": "As `penstock_pop_group_dead`, of all groups.",
}
"""Metrics of all groups together. A message counts once for each group that has it."""


class PopCollector(Collector):
    """Figures of POP.

    Parameters:
        pop: the core.
        transactions: the half messages.
        requests: the room of gRPC requests.
        responses: the room of gRPC responses.
        refusals: tells callers that their calls are refused.
        sent_ids: the deduplication ids.
        sender: stores what services send.
        rocketmq_clients: returns how many RocketMQ clients are connected; None without the RocketMQ-compatible API.
        totaller: adds up the groups.
    """

    def __init__(
        self,
        pop: PopCore,
        transactions: Transactions,
        requests: RequestBytes,
        responses: ResponseBytes,
        refusals: Refusals,
        sent_ids: SentIds,
        sender: Sender,
        rocketmq_clients: Callable[[], int] | None,
        totaller: GroupTotaller,
    ) -> None:
        self._totaller = totaller
        self._pop = pop
        self._transactions = transactions
        self._requests = requests
        self._responses = responses
        self._refusals = refusals
        self._sent_ids = sent_ids
        self._sender = sender
        self._rocketmq_clients = rocketmq_clients

    def collect(self) -> Iterator[Metric]:
        pop, counters, transactions = self._pop, self._pop.counters, self._transactions
        yield gauge("penstock_pop_waiting", "Pops that wait for a message.", pop.waiting)
        yield gauge("penstock_pop_checkpoints_open", "Checkpoints with unsettled deliveries.", pop.checkpoints_open)
        yield counter("penstock_pop_sent", "Messages of services that were stored.", self._sender.sent)
        yield counter("penstock_pop_handed_out", "Deliveries.", counters.handed_out)
        yield counter("penstock_pop_acked", "Deliveries acknowledged.", counters.acked)
        yield counter("penstock_pop_revived", "Deliveries revived.", counters.revived)
        yield counter(
            "penstock_pop_uncounted",
            "Deliveries revived without counting an attempt.",
            counters.uncounted,
        )
        yield counter("penstock_pop_dead_lettered", "Messages that became dead letters.", counters.dead_lettered)
        yield counter("penstock_pop_expired", "Messages skipped because they had expired.", counters.expired)
        yield counter("penstock_pop_refused", "Pops refused because too many waited.", counters.refused)
        yield gauge("penstock_pop_requests_bytes", "Bytes that gRPC requests have or may need.", self._requests.used)
        yield labelled_counter(
            "penstock_pop_requests_refused",
            "gRPC requests not served because of their bytes, except those that gRPC itself refuses.",
            ["reason"],
            {(reason,): self._requests.refused[reason] for reason in RefusedFor},
        )
        yield gauge("penstock_pop_responses_bytes", "Bytes of responses that callers have not read.", self._responses.used)
        yield counter(
            "penstock_pop_unread_closed",
            "Connections closed because of unread responses: see pop.memory_bytes_max.",
            self._responses.ended,
        )
        yield counter(
            "penstock_pop_refusals_delayed",
            "Refused gRPC calls whose answer was delayed.",
            self._refusals.delayed,
        )
        yield gauge(
            "penstock_pop_revive_late_seconds_max",
            "Longest time from a deadline to its revival.",
            counters.revive_late_ms_max / 1000,
        )
        if self._rocketmq_clients is not None:
            yield gauge("penstock_rocketmq_clients", "Connected RocketMQ clients.", self._rocketmq_clients())
        yield gauge("penstock_pop_transactions_pending", "Half messages without an outcome.", len(transactions))
        yield counter("penstock_pop_transactions_committed", "Half messages committed.", transactions.committed)
        yield counter("penstock_pop_transactions_rolled_back", "Half messages rolled back.", transactions.rolled_back)
        yield gauge("penstock_pop_deduplication_ids", "Remembered deduplication ids.", len(self._sent_ids))
        yield counter("penstock_pop_repeated", "Messages sent again with their deduplication id.", self._sent_ids.repeated)
        totals = self._totaller.take()
        yield from self._of_all_groups(totals)
        yield from self._by_group(totals.labelled)
        lateness = HistogramMetricFamily("penstock_pop_revive_lateness_seconds", "Time from a deadline to its revival.")
        add_latencies(lateness, [], counters.revive_lateness)
        yield lateness

    def _of_all_groups(self, totals: GroupTotals) -> Iterator[Metric]:
        yield gauge("penstock_pop_groups", "Groups, each once for each of its filters.", totals.groups)
        yield gauge(
            "penstock_pop_groups_unlabelled",
            "Groups that only the totals count, because there are too many.",
            totals.groups - len(totals.labelled),
        )
        for name, text in TOTALS.items():
            yield gauge(f"penstock_pop_{name}", text, totals.sums[name])

    def _by_group(self, found: list[GroupSnapshot]) -> Iterator[Metric]:
        labels = ["group", "filter"]
        named = [((label_of(snapshot.group.name), label_of(snapshot.group.filter)), snapshot) for snapshot in found]
        for name, (text, value_of) in GROUP_GAUGES.items():  # one at a time, so that a scrape can rest in between
            family = GaugeMetricFamily(f"penstock_pop_group_{name}", text, labels=labels)
            for names, snapshot in named:
                family.add_metric(names, value_of(snapshot))
            yield family
        latency = HistogramMetricFamily(
            "penstock_pop_group_ack_latency_seconds", "Time from a delivery to its acknowledgement.", labels=labels
        )
        for snapshot in found:
            add_latencies(latency, [snapshot.group.name, snapshot.group.filter], snapshot.group.latency)
        yield latency
