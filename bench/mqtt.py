"""`python -m bench mqtt`: the same MQTT load on Penstock, mosquitto and nats-server, in turn, on one machine.

For each row the benchmark starts the brokers anew and warms them up with a tenth of the load. Then they take turns (A B C A B C
...), so that other work on the machine affects all of them; the brokers that are not measured are idle. A broker's column shows
the median of its runs. A ratio is the median of the ratios of each run to mosquitto's run beside it.

The load generator is a process with one thread. On two cores it uses one, and the broker uses the other and what is idle of the
first. The promises of the brokers differ: see `bench.peers`.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial

from bench.load import Load, LoadFailed, LoadUnavailable, Result, compile_load, run_load, start_load
from bench.peers import OURS, BrokerFailed, BrokerProcess, floor, memory_of, mosquitto, nats_server, path_of, processor_s
from bench.rows import Figures, Goal, Measure, Row, RowFailed, Setting, add_beside, beside, find_rivals, parser_of, run

RIVAL = "mosquitto"
RIVALS = (RIVAL, "nats-server")

WARM_UP_SHARE = 10
QUICK_SHARE = 50

IDLE = 10_000
OTHER_FILTERS = 10_000
STEADY_PER_S = 10_000
STEADY_S = 10

SLOW_PER_S = 50_000
SLOW_S = 60
SLOW_SUBSCRIBERS = 1_000
SLOW_STALLED = 100
SETTLED_SHARE = 2
"""The row counts after one of so many parts of the minute. The node flushes the index every 30 s, and before the first flush
the memory of the index only grows."""

SPARE_FILES = 200
"""File descriptors that a process needs in addition to its connections."""

Start = Callable[[], AbstractContextManager[BrokerProcess]]


# --- the brokers ------------------------------------------------------------------------------------------------------


def _prepare(setting: Setting) -> None:
    """Compile the load generator, and skip brokers that aren't installed, with a line that says so."""
    compile_load()
    find_rivals(setting, {name: partial(path_of, name) for name in RIVALS} | {"floor": lambda: None})


@contextmanager
def _brokers(setting: Setting, *, bounded: bool = False) -> Iterator[list[BrokerProcess]]:
    """Run Penstock and its rivals. With `bounded`, mosquitto drops messages above its default limits."""
    starts: dict[str, Start] = {
        RIVAL: partial(mosquitto, bounded=bounded),
        "nats-server": lambda: nats_server(setting.fresh()),
        "floor": floor,
    }
    with ExitStack() as stack:
        brokers = [stack.enter_context(setting.node())]
        kind = "bounded" if bounded else "unbounded"
        brokers += [stack.enter_context(setting.broker(f"{name}, {kind}", starts[name])) for name in setting.options.rivals]
        yield brokers


def _in_turn(setting: Setting, brokers: list[BrokerProcess], load: Load) -> dict[str, Result]:
    """Put a load on each broker in turn. A rival that fails is skipped for the rest of the row."""
    results = {}
    for broker in list(brokers):
        try:
            before_s = processor_s(broker.pid)
            result = run_load(broker.host, broker.port, load)
            results[broker.name] = replace(result, broker_s=processor_s(broker.pid) - before_s)
        except LoadFailed as error:
            if broker.name == OURS:
                raise
            setting.tell(f"{broker.name} is skipped in this row: {error}")
            brokers.remove(broker)
    return results


def _runs(setting: Setting, load: Load, *, bounded: bool = False) -> Generator[dict[str, Result]]:
    """Warm up, then put a load on each broker in turn, without end."""
    load = replace(load, msgs=max(setting.count(load.msgs, load.msgs // QUICK_SHARE), load.pubs))
    with _brokers(setting, bounded=bounded) as brokers:
        _in_turn(setting, brokers, replace(load, msgs=max(load.msgs // WARM_UP_SHARE, load.pubs)))
        while True:
            results = _in_turn(setting, brokers, load)
            for name, result in results.items():
                if missing := result.missing(load):
                    setting.tell(f"{missing:,} of {result.msgs:,} messages, or their deliveries, are missing at {name}")
            yield results


# --- the rows of the table --------------------------------------------------------------------------------------------


def _rate(name: str, *, bounded: bool = False) -> Measure:
    """Return the measurement of messages per second: delivered if the load has subscribers, else acknowledged.

    It also yields the broker's processor time per message in us, and the number of missing messages.

    With QoS 0, messages that a client has sent may still be in a socket's buffer, so only deliveries show the broker's work.
    """

    def measure(setting: Setting) -> Generator[Figures]:
        load = LOADS[name]
        is_delivered = load.subs > 0
        for results in _runs(setting, load, bounded=bounded):
            rates = {broker: each.deliver_per_s if is_delivered else each.publish_per_s for broker, each in results.items()}
            costs = {
                broker: each.broker_s / max(each.delivered if is_delivered else each.msgs, 1) * 1e6
                for broker, each in results.items()
            }
            missing = {broker: float(each.missing(load)) for broker, each in results.items()}
            yield beside(name, rates, RIVAL) | beside(f"{name}_us", costs) | beside(f"{name}_missing", missing)

    return measure


def _row(name: str, title: str, goal: float) -> Row:
    return Row(_rate(name), (Goal(name, title, "x", goal),))


def _filters(setting: Setting) -> Generator[Figures]:
    """Measure the first row, and in turn with it the same load beside other filters."""
    first_row = LOADS["one-to-one"]
    alone = replace(first_row, msgs=setting.count(first_row.msgs, first_row.msgs // QUICK_SHARE))
    crowded = replace(alone, others=setting.count(OTHER_FILTERS, 1_000))
    with _brokers(setting) as brokers:
        _in_turn(setting, brokers, replace(alone, msgs=alone.msgs // WARM_UP_SHARE))
        while True:
            first, second = _in_turn(setting, brokers, alone), _in_turn(setting, brokers, crowded)
            slower = {name: (1 - each.deliver_per_s / first[name].deliver_per_s) * 100 for name, each in second.items()}
            connected = {name: each.connect_s for name, each in second.items()}
            yield beside("filters", slower) | beside("filters_connect", connected)


def _idle(setting: Setting) -> Generator[Figures]:
    """Measure idle connections: the time until all are accepted, and their memory."""
    connections = setting.count(IDLE, 200)
    _allow_files(connections + SPARE_FILES)
    while True:
        seconds, kib = {}, {}
        with _brokers(setting) as brokers:
            for broker in brokers:
                before = memory_of(broker.pid).resident
                load = Load(pubs=connections, msgs=connections, window=1, hold=1)
                with start_load(broker.host, broker.port, load) as running:
                    seconds[broker.name] = running.result().connect_s
                    kib[broker.name] = (memory_of(broker.pid).resident - before) / connections
        yield beside("idle_connect", seconds) | beside("idle_memory", kib)


def _allow_files(count: int) -> None:
    """Let this process and its children open `count` files.

    Raises:
        RowFailed: the hard limit is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        raise RowFailed(f"The row needs {count:,} open files, and the hard limit is {hard:,} (ulimit -Hn).")
    if soft != resource.RLIM_INFINITY and soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def _latency(setting: Setting) -> Generator[Figures]:
    load = Load(pubs=10, subs=1, qos=1, subqos=1, rate=STEADY_PER_S, msgs=STEADY_PER_S * STEADY_S)
    for results in _runs(setting, load):
        figures: Figures = {}
        for quantile in ("p50", "p99"):
            for name, field in (("latency", "latency_us"), ("ack", "ack_us")):
                taken = {broker: getattr(each, f"{field}_{quantile}") / 1000 for broker, each in results.items()}
                figures |= beside(f"{name}_{quantile}", taken)
        yield figures


def _slow(setting: Setting) -> Generator[Figures]:
    """Measure the effect of subscribers that never read: on memory, and on the latency of the others.

    Publishers send 50,000 messages a second with QoS 1. The topic of each message belongs to one of 900 subscribers that read,
    so each message is delivered once. 100 subscribers that don't read subscribe to everything. Their backlog grows by 50,000
    messages a second each, to 23 GB for all of them after the minute. The row shows the second half of the minute, and compares
    it with the same minute without the 100 subscribers.
    """
    seconds, readers = setting.count(SLOW_S, 1), SLOW_SUBSCRIBERS - SLOW_STALLED
    _allow_files(SLOW_SUBSCRIBERS + SPARE_FILES)
    load = Load(
        pubs=10, subs=readers, qos=1, topics=readers, own=1, rate=SLOW_PER_S, msgs=SLOW_PER_S * seconds, timeout=seconds + 60
    )
    load = replace(load, skip=load.msgs // SETTLED_SHARE)
    crowded = replace(load, subs=SLOW_SUBSCRIBERS, stalled=SLOW_STALLED)
    alone, _ = _watched(setting, load)
    result, anonymous = _watched(setting, crowded)
    settled = len(anonymous) // SETTLED_SHARE
    yield {
        "slow_rate": result.deliver_per_s,
        "slow_missing": result.missing(crowded),
        "slow_growth": max(anonymous[settled:]) - max(anonymous[: settled + 1]),
        "slow_memory": max(anonymous),
        "slow_p99": result.latency_us_p99 / 1000,
        "slow_p99_alone": alone.latency_us_p99 / 1000,
        "slow_disturbed": result.latency_us_p99 / alone.latency_us_p99,
    }


def _watched(setting: Setting, load: Load) -> tuple[Result, list[float]]:
    """Put a load on a new node. Return the result, and samples every half second of the memory without mapped files, in MiB.

    A sample takes some milliseconds of processor time, so compare only loads that are both watched.
    """
    anonymous: list[float] = []
    with setting.node() as node, start_load(node.host, node.port, load) as running:
        while running.is_running:
            anonymous.append(memory_of(node.pid).anonymous / 1024)
            time.sleep(0.5)
        return running.result(), anonymous


LOADS = {
    "one-to-one": Load(subs=1, msgs=1_000_000),
    "window": Load(qos=1, msgs=1_000_000),
    "hundred": Load(pubs=100, qos=1, window=20, msgs=1_000_000),
    "hundred-single": Load(pubs=100, qos=1, window=1, msgs=100_000),
    "many-single": Load(pubs=500, qos=1, window=1, msgs=100_000),
    "devices": Load(pubs=1_000, subs=1, chunk=1, msgs=200_000),
    "fanout": Load(subs=100, qos=1, msgs=10_000),
    "fanout-acked": Load(subs=100, qos=1, subqos=1, msgs=5_000),
    "fanout-lasting": Load(subs=100, qos=1, subqos=1, msgs=5_000, lasting=1),
    "delayed": Load(subs=1, qos=1, msgs=20_000, delay=1),
    "both-ways": Load(pubs=10, subs=10, qos=1, subqos=1, window=10, msgs=20_000),
}
"""Load of each row that measures a rate, by the row's name. `bench.compare` has most of them, too, and `delayed` alone."""

ROWS: dict[str, Row] = {
    "one-to-one": _row("one-to-one", "1 publisher → 1 subscriber, QoS 0", 2),
    "window": _row("window", "1 publisher, QoS 1, window 1,000", 3.5),
    "hundred": _row("hundred", "100 publishers, QoS 1, window 20", 3.5),
    "hundred-single": _row("hundred-single", "100 publishers, QoS 1, window 1", 1),
    "many-single": _row("many-single", "500 publishers, QoS 1, window 1", 1.2),
    "devices": _row("devices", "1,000 publishers, QoS 0, one message per write → 1 subscriber", 1),
    "fanout": _row("fanout", "1 publisher, QoS 1 → 100 subscribers, QoS 0 (deliveries)", 10),
    "fanout-acked": _row("fanout-acked", "1 publisher, QoS 1 → 100 subscribers, QoS 1 (deliveries)", 3),
    "fanout-lasting": _row("fanout-lasting", "... whose sessions last (deliveries)", 2),
    "both-ways": Row(
        _rate("both-ways", bounded=True),
        (
            Goal("both-ways", "10 publishers → 10 subscribers, QoS 1 both, window 10", "x", 1.5),
            Goal("both-ways_missing", "... messages not delivered", "", 0, is_most=True),
        ),
    ),
    "filters": Row(
        _filters,
        (
            Goal("filters", f"slowdown of the first row by {OTHER_FILTERS:,} other filters", "%", 20, is_most=True),
            Goal("filters_connect", "... time until all of these are subscribed", "s"),
        ),
    ),
    "idle": Row(
        _idle,
        (
            Goal("idle_connect", f"{IDLE:,} connections: time until all are accepted", "s", 10, is_most=True),
            Goal("idle_memory", "... resident memory of an idle connection", "KiB", 8, is_most=True),
        ),
    ),
    "latency": Row(
        _latency,
        (
            Goal("latency_p50", f"{STEADY_PER_S:,} msg/s, QoS 1 both ways: time to delivery, p50", "ms"),
            Goal("latency_p99", "... p99", "ms", 5, is_most=True),
            Goal("ack_p50", "... time to PUBACK, p50", "ms"),
            Goal("ack_p99", "... p99", "ms", 5, is_most=True),
        ),
    ),
    "slow": Row(
        _slow,
        (
            Goal(
                "slow_rate",
                f"{SLOW_PER_S:,} msg/s, 100 of 1,000 subscribers never read: delivered to the others",
                "msg/s",
                SLOW_PER_S * 0.99,
            ),
            Goal("slow_missing", "... messages not delivered to the others", "", 0, is_most=True),
            Goal("slow_growth", "... growth of memory after the first 30 s", "MiB", 16, is_most=True),
            Goal("slow_memory", "... memory without the mapped log", "MiB"),
            Goal("slow_p99", "... latency of the others after the first 30 s, p99", "ms"),
            Goal("slow_p99_alone", "... latency if all read, p99", "ms"),
            Goal("slow_disturbed", "... ratio of these two latencies", "x", 1.5, is_most=True),
        ),
    ),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and return the exit status."""
    parser = parser_of("mqtt", "Measure MQTT of Penstock beside other brokers.", ROWS)
    add_beside(parser, RIVALS)
    return run(parser, ROWS, arguments, failures=(BrokerFailed, LoadFailed, LoadUnavailable), prepare=_prepare)
