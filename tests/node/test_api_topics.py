"""Retained messages, topics of live traffic and filters over the admin API of a node."""

from __future__ import annotations

from base64 import b64decode
from typing import Any
from urllib.parse import quote

import pytest

from penstock.gateway.protocol.properties import Property
from penstock.node import recordheads, topictraffic
from tests.gateway.wire import Broker
from tests.node.adminapi import Api, api, audited, broker

__all__ = ["api", "broker"]

TOPICS = ("plant/1/state", "plant/2/state", "plant/2/name", "höhe/№ 1", "plant")


def topics_of(items: list[dict[str, Any]]) -> list[str]:
    return [item["topic"] for item in items]


async def test_retained_messages_are_browsed_read_and_cleared(broker: Broker, api: Api) -> None:
    client = await broker.connect_5("device")
    for topic in TOPICS:
        await client.publish(topic, b"on", 1, retain=True)
    about = {Property.CONTENT_TYPE: "text/plain", Property.USER_PROPERTY: [("a", "1")], Property.MESSAGE_EXPIRY_S: 3600}
    await client.publish_with("large", b"x" * 70_000, about, 1, retain=True)
    assert topics_of(await api.pages("/retained", limit=1)) == sorted((*TOPICS, "large"), key=str.encode)
    for topic_filter, expected in (
        ("plant/#", ["plant", "plant/1/state", "plant/2/name", "plant/2/state"]),
        ("plant/+/state", ["plant/1/state", "plant/2/state"]),
        ("+/2/#", ["plant/2/name", "plant/2/state"]),
        ("plant/1/state", ["plant/1/state"]),
        ("nothing/+", []),
    ):
        assert topics_of(await api.pages("/retained", filter=topic_filter, limit=1)) == expected, topic_filter
    assert (await api.get("/retained", limit=1))["total"] == 6
    odd = f"/api/v1/retained/{quote('höhe/№ 1', safe='')}"
    assert (await api("viewer").call("GET", odd))[0] == 403
    status, shown = await api("operator").call("GET", odd)
    assert (status, shown["topic"], shown["qos"], b64decode(shown["body_base64"])) == (200, "höhe/№ 1", 1, b"on")
    assert (shown["body_bytes"], shown["cut"], shown["expires_at_ms"]) == (2, False, 0)
    large = await api("operator").get("/retained/large")
    assert (large["body_bytes"], large["cut"], len(b64decode(large["body_base64"]))) == (70_000, True, 65_536)
    assert large["client_id"] == "device"
    assert large["properties"]["content_type"] == "text/plain"
    assert large["properties"]["user"] == [{"name": "a", "value": "1"}]
    assert large["expires_at_ms"] - large["stored_ms"] == 3_600_000
    await client.subscribe(("höhe/#", 1))
    await client.message()
    assert (await api("operator").call("DELETE", odd))[0] == 403
    assert (await api("admin").call("DELETE", odd))[0] == 200
    cleared = await client.message()
    assert (cleared.topic, cleared.body) == ("höhe/№ 1", b"")
    assert (await api("admin").call("DELETE", odd))[0] == 404
    assert topics_of(await api.pages("/retained", filter="höhe/#")) == []
    assert audited(broker)[-2]["message_id"] == shown["message_id"]


async def test_long_topics_are_on_pages_too(broker: Broker, api: Api) -> None:
    client = await broker.connect("device")
    topics = ["a" * 4000, "a" * 4001, "№" * 1300]
    for topic in topics:
        await client.publish(topic, b"on", 1, retain=True)
    assert topics_of(await api.pages("/retained", limit=1)) == topics
    assert [each["filter"] for each in await api.pages("/filters", limit=1)] == [f"{topic}/#" for topic in topics]
    await client.subscribe(*((topic, 0) for topic in topics))
    assert [each["filter"] for each in await api.pages("/clients/device/subscriptions", limit=1)] == topics


async def test_topics_of_live_traffic_have_rates(broker: Broker, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topictraffic, "TOPICS_MAX", 3)
    monkeypatch.setattr(topictraffic, "LOOK_S_MIN", 3600.0)  # the only looks are those of the test
    monkeypatch.setattr(topictraffic, "LOOK_S_MAX", 3600.0)
    assert await api.pages("/topics") == []
    client = await broker.connect("device")
    for number in range(4):
        for _ in range(number + 1):
            await client.publish(f"plant/{number}", b"x" * 100, 1)
    broker.node._traffic.look()
    page = await api.get("/topics")
    assert (page["topics"], page["topics_dropped"], page["sampled_percent"]) == (3, 1, 100.0)
    assert topics_of(await api.pages("/topics", limit=1)) == ["plant/1", "plant/2", "plant/3"]
    fast, slow = (await api.get("/topics", order="messages", limit=2))["items"]
    assert (fast["topic"], slow["topic"]) == ("plant/3", "plant/2")
    assert fast["messages_per_s"] / slow["messages_per_s"] == pytest.approx(4 / 3, rel=0.2)
    assert fast["bytes_per_s"] > 100 * fast["messages_per_s"]
    assert 0 < fast["last_ms"] <= broker.node.store.now_ms()
    assert topics_of(await api.pages("/topics", filter="+/1")) == ["plant/1"]
    assert topics_of(await api.pages("/topics", contains="T/2")) == ["plant/2"]


async def test_a_look_at_much_traffic_is_made_up_for(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordheads, "RECORDS_MAX", 10)
    client = await broker.connect("device")
    await client.publish("plant", b"x", 1)
    sample = topictraffic.TrafficSample(broker.node.store)
    sample.begin()
    for _ in range(40):
        await client.publish("plant", b"x", 1)
    sample.look()
    assert sample.share == pytest.approx(0.25)
    assert sample.topics["plant"].messages == pytest.approx(40)
    factor = sample.per_second(sample.topics["plant"])
    broker.clock.advance(10_000)
    assert sample.per_second(sample.topics["plant"]) == factor, "the time since the last look is no time without traffic"
    sample.look()
    assert sample.per_second(sample.topics["plant"]) < factor


async def test_filters_that_have_queues_are_listed(broker: Broker, api: Api) -> None:
    client = await broker.connect_5("device", about={Property.SESSION_EXPIRY_S: 60})
    await client.subscribe(("plant/+/state", 1), ("plant/#", 1), ("plant/1", 1), ("höhe", 1))
    brief = await broker.connect("brief")
    await brief.subscribe(("passing", 0))
    await client.publish("plant/1/state", b"x", 1)
    filters = await api.pages("/filters", limit=1)
    assert [each["filter"] for each in filters] == ["plant/#", "plant/+/state"]
    assert [(each["queues"][0]["messages"], each["queues"][0]["owners"]) for each in filters] == [
        (1, ["root", "sessions"]),
        (1, ["sessions"]),
    ]
    assert [each["filter"] for each in await api.pages("/filters", wildcards="false")] == ["höhe", "plant/1"]
    assert [each["filter"] for each in await api.pages("/filters", wildcards="false", prefix="h", limit=1)] == ["höhe"]
    assert (await api.get("/filters"))["transient"] == 1


WRONG = (
    (("GET", "/retained?filter=a%23"), 400, "inside of the level"),
    (("GET", "/retained/nothing"), 404, "nothing"),
    (("DELETE", "/retained/%23"), 404, "'#'"),
    (("GET", "/topics?filter=a%2B"), 400, "inside of the level"),
    (("GET", "/topics?order=age"), 400, "age"),
    (("GET", "/retained/%ED%A0%80"), 400, "no UTF-8"),
    (("GET", "/filters?wildcards=perhaps"), 400, "wildcards"),
)


async def test_what_is_wrong_is_said_in_a_sentence(api: Api) -> None:
    for (method, path), status, why in WRONG:
        answered, answer = await api("admin").call(method, f"/api/v1{path}")
        assert answered == status, path
        assert why in answer["error"], answer
