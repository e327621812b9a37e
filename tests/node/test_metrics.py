"""The metrics of a node: names that Prometheus accepts, and labels that don't grow with the clients."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from penstock import Client, OutgoingMessage, __version__
from penstock.gateway.options import ListenerOptions
from penstock.node import loopshare
from penstock.node.metrics import exposition, grouptotals
from penstock.node.metrics.families import durations, gauge, labelled_counter, labelled_gauge
from penstock.store.histogram import DURATION_BOUNDS_S, Histogram
from tests.gateway.packet_cases import subscribe
from tests.gateway.wire import CLEAN, FREE, PING, WILL, Broker
from tests.waiting import until


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    broker = await Broker(tmp_path, {"listeners": (ListenerOptions(name="second", listen=FREE),)}).start()
    yield broker
    await broker.stop()


def samples(broker: Broker) -> dict[str, float]:
    """Return all samples of a scrape, by name and labels."""
    families = text_string_to_metric_families(generate_latest(broker.node.registry).decode())
    found = {}
    for family in families:
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


async def test_clients_are_counted_by_listener_and_version_until_they_leave(broker: Broker) -> None:
    first, _ = await broker.connect("a"), await broker.connect("b", listener="second")
    bad = await broker.dial("second")
    await bad.send(PING)
    await bad.ended()
    first.reset()
    await until(lambda: len(broker.node.gateway.connections) == 1)
    found = samples(broker)
    assert found["penstock_mqtt_connections"] == 1
    assert found["penstock_mqtt_clients{listener=mqtt,version=3.1.1}"] == 0
    assert found["penstock_mqtt_clients{listener=second,version=3.1.1}"] == 1
    assert found["penstock_mqtt_connections_accepted_total{listener=mqtt,version=3.1.1}"] == 1
    assert found["penstock_mqtt_connections_closed_total{listener=mqtt,reason=client}"] == 1
    assert found["penstock_mqtt_connections_closed_total{listener=second,reason=protocol_error}"] == 1


async def test_packets_are_counted_by_type_and_bytes_by_listener(broker: Broker) -> None:
    client = await broker.connect("a", listener="second")
    await client.send(subscribe(1, (b"a", 1)))
    await client.expect(9)
    for packet_id in range(1, 4):
        await client.publish("a", b"x", 2, packet_id=packet_id)
        await client.message()
    await client.drained()
    found = samples(broker)
    expected = {"connect": 1, "subscribe": 1, "publish": 3, "pubrel": 3, "puback": 3, "pingreq": 2}
    assert {name: found[f"penstock_mqtt_packets_in_total{{type={name}}}"] for name in expected} == expected
    expected = {"connack": 1, "suback": 1, "publish": 3, "pubrec": 3, "pubcomp": 3, "pingresp": 2}
    assert {name: found[f"penstock_mqtt_packets_out_total{{type={name}}}"] for name in expected} == expected
    assert found["penstock_mqtt_bytes_in_total{listener=second}"] == 15 + 8 + 3 * (8 + 4 + 4) + 4
    assert found["penstock_mqtt_bytes_out_total{listener=second}"] == 4 + 5 + 3 * (4 + 4 + 8) + 4
    assert found["penstock_mqtt_bytes_in_total{listener=mqtt}"] == 0


async def test_retained_messages_sessions_and_subscriptions_are_counted_across_a_restart(broker: Broker) -> None:
    client = await broker.connect("a")
    await client.subscribe(("a", 0), ("b/#", 0))
    for topic in ("a", "b", "c", "a"):
        await client.publish(topic, b"x", 1, retain=True)
    await client.publish("b", b"", 1, retain=True)
    await client.publish("never", b"", 1, retain=True)
    found = samples(broker)
    assert found["penstock_mqtt_retained"] == 2
    assert (found["penstock_mqtt_sessions"], found["penstock_mqtt_subscriptions"]) == (1, 2)
    lasting = await broker.connect("b", flags=0)
    await lasting.subscribe(("a", 0))
    found = samples(broker)
    assert (found["penstock_mqtt_sessions_stored"], found["penstock_mqtt_sessions_away"]) == (1, 0)
    await broker.restart()
    found = samples(broker)
    assert (found["penstock_mqtt_retained"], found["penstock_mqtt_subscriptions"]) == (2, 0)
    assert (found["penstock_mqtt_sessions_stored"], found["penstock_mqtt_sessions_away"]) == (1, 1)


async def test_labels_do_not_grow_with_clients_and_topics(broker: Broker) -> None:
    async def visit(number: int) -> None:
        client = await broker.connect(f"client-{number}", b"will", b"x", flags=CLEAN | WILL)
        await client.subscribe((f"t/{number}/#", 1))
        await client.publish(f"t/{number}/a", b"x", 1, retain=True)
        await client.message()
        client.reset()

    await visit(0)
    await until(lambda: not broker.node.gateway.connections)
    before = set(samples(broker))
    for number in range(1, 50):
        await visit(number)
    await until(lambda: not broker.node.gateway.connections)
    assert set(samples(broker)) == before


async def test_names_and_help_texts_follow_the_rules_of_prometheus(broker: Broker) -> None:
    await broker.connect("a")
    for family in broker.node.registry.collect():
        assert re.fullmatch(r"(penstock|process)_[a-z0-9_]+", family.name), family.name
        assert family.documentation.endswith("."), family.name
        assert not family.name.endswith("_total"), "the client library adds it to counters"


async def test_shared_subscriptions_and_their_groups_have_metrics(broker: Broker) -> None:
    one, two = [await broker.connect(name) for name in ("one", "two")]
    await one.subscribe(("$share/g/a", 1), ("$share/h/a", 1), ("b", 1))
    await two.subscribe(("$share/g/a", 1))
    await one.publish("a", b"x", 1)
    await until(lambda: samples(broker)["penstock_pop_group_in_flight{filter=a,group=g}"] == 1)
    found = samples(broker)
    assert (found["penstock_mqtt_subscriptions"], found["penstock_mqtt_subscriptions_shared"]) == (4, 3)
    assert found["penstock_mqtt_shared"] == 2
    one.reset()
    await until(lambda: samples(broker)["penstock_mqtt_subscriptions_shared"] == 1)
    assert samples(broker)["penstock_mqtt_deliveries_returned_total"] >= 1


async def test_the_version_is_a_label(broker: Broker) -> None:
    (name,) = [name for name in samples(broker) if name.startswith("penstock_build_info")]
    assert f"version={__version__}}}" in name


async def test_times_are_in_seconds(broker: Broker) -> None:
    await broker.connect("a")
    wrong = [family.name for family in broker.node.registry.collect() if re.search("_ms(_|$)", family.name)]
    assert wrong == []


async def test_syncs_commits_deliveries_and_the_loop_have_histograms(broker: Broker) -> None:
    client = await broker.connect("a")
    await client.subscribe(("a", 1))
    for packet_id in range(1, 4):
        await client.publish("a", b"x", 1, packet_id=packet_id)
        await client.message()
    found = samples(broker)
    assert found["penstock_log_sync_seconds_count"] == found["penstock_log_syncs_total"] > 0
    assert found["penstock_log_commit_seconds_count"] >= 3
    assert found["penstock_mqtt_delivery_seconds_count"] == 3
    for name in ("log_sync", "log_commit", "mqtt_delivery"):
        assert 0 < found[f"penstock_{name}_seconds_sum"] < 60
        assert found[f"penstock_{name}_seconds_bucket{{le=+Inf}}"] == found[f"penstock_{name}_seconds_count"]
    await until(lambda: samples(broker)["penstock_loop_lag_seconds_count"] > 0)


async def test_totals_count_the_groups_without_a_label_and_services_come_first(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouptotals, "GROUPS_LABELLED_MAX", 3)
    client = await broker.connect("a")
    await client.subscribe(*((f"$share/device-{number}/a", 1) for number in range(3)))
    groups = broker.node.pop.groups
    for number in range(2):
        groups.get_or_create(f"service-{number}", "a")
    await client.publish("a", b"x", 1)
    await until(lambda: samples(broker)["penstock_pop_in_flight"] == 3)
    at_once = samples(broker)
    assert (at_once["penstock_pop_groups"], at_once["penstock_pop_groups_unlabelled"]) == (5, 2)
    assert at_once["penstock_pop_visible"] == 2
    labelled = {name for name in at_once if name.startswith("penstock_pop_group_visible{")}
    assert labelled == {
        f"penstock_pop_group_visible{{filter=a,group={name}}}" for name in ("device-0", "service-0", "service-1")
    }


async def test_a_scrape_of_many_groups_does_not_hold_up_the_loop(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopshare, "SLICE_S", 0)
    for number in range(50):
        broker.node.pop.groups.get_or_create(f"g{number}", "a")
    totaller = grouptotals.GroupTotaller(broker.node.pop, broker.node.store)
    turns = 0
    preparing = asyncio.ensure_future(totaller.prepare())
    while not preparing.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns >= 50
    broker.node.pop.groups.get_or_create("later", "a")
    assert totaller.take().groups == 50, "what was prepared"
    assert totaller.take().groups == 51, "and nothing of it a second time"


async def test_the_index_says_whether_compactions_keep_up(broker: Broker) -> None:
    found = samples(broker)
    assert (found["penstock_index_stopped"], found["penstock_index_slowed_bytes_per_second"]) == (0, 0)
    assert (found["penstock_index_errors_total"], found["penstock_index_pending_compaction_bytes"]) == (0, 0)


class Static(Collector):
    """Families of all types, one of which has more samples than are encoded at once."""

    def collect(self) -> Iterator[Metric]:
        yield gauge("a_gauge", "A gauge.", 1.5)
        yield labelled_gauge("none", "Without samples.", ["name"], {})
        yield labelled_gauge("many", "Many.\\n", ["name"], {(f"{number}\n",): number for number in range(1000)})
        yield labelled_counter("a_counter", "A counter.", ["name"], {("a",): 1, ("b",): 2})
        yield durations("a_histogram_seconds", "A histogram.", Histogram(DURATION_BOUNDS_S))


@pytest.mark.parametrize("accept", ["text/plain", "application/openmetrics-text; version=1.0.0"])
async def test_metrics_in_slices_are_what_the_library_makes_at_once(accept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopshare, "SLICE_S", 0)
    registry = CollectorRegistry()
    registry.register(Static())
    encode, _ = choose_encoder(accept)
    turns = 0
    making = asyncio.ensure_future(exposition.exposition(registry, encode))
    while not making.done():
        await asyncio.sleep(0)
        turns += 1
    assert making.result() == encode(registry)
    assert turns >= 1000 / exposition.SAMPLES_AT_ONCE


async def test_every_way_in_which_services_send_is_counted_once(broker: Broker) -> None:
    async with Client(str(broker.node.grpc)) as client:
        plain = [OutgoingMessage(topic="plant/1", body=b"x")] * 64
        for messages in (plain, plain[:1], [OutgoingMessage(topic="plant/1", body=b"x", tag="t")]):
            await client.send_batch(messages)
        for _ in range(2):  # the second is a repetition
            await client.send("plant/1", b"x", deduplication_id="once")
        await client.send("plant/1", b"x", correlation_data=b"1")
    assert samples(broker)["penstock_pop_sent_total"] == 64 + 1 + 1 + 1 + 1
    assert samples(broker)["penstock_mqtt_publishes_in_total"] == 0
