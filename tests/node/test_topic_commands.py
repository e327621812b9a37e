"""`penstock topics` and `penstock retained` on a running node."""

from __future__ import annotations

import asyncio
import json
from base64 import b64decode
from typing import Any

from penstock.gateway.protocol.properties import Property
from tests.gateway.wire import Broker
from tests.node.adminapi import audited, broker, run
from tests.waiting import until

__all__ = ["broker", "run"]


async def test_topics_and_queues_and_subscribers_are_listed(broker: Broker, run: Any) -> None:
    client = await broker.connect_5("sensor-7", about={Property.SESSION_EXPIRY_S: 600})
    await client.subscribe(("plant/#", 1), ("$share/team/jobs", 1))
    status, said = await run("topics", "list", role="viewer")
    assert (status, "0 topics; it has looked at 100 % of the newest traffic" in said) == (0, True)
    for topic in ("plant/2", "plant/2", "plant/1"):
        await client.publish(topic, b"on", 1)
    broker.node._traffic.look()
    _, said = await run("topics", "list", "plant/#", role="viewer")
    assert [line.split()[0] for line in said.splitlines()] == ["topic", "plant/2", "plant/1", "sample"]
    _, said = await run("topics", "list", "--order", "topic", "--contains", "T/1", "--json")
    assert json.loads(said.splitlines()[0])["topic"] == "plant/1"
    assert (await run("topics", "list", "--after", "plant/1"))[0] == 1
    _, said = await run("topics", "queues", role="viewer")
    assert [line.split()[0] for line in said.splitlines()[:2]] == ["filter", "plant/#"]
    assert "sessions" in said
    _, said = await run("topics", "queues", "--exact")
    assert "plant/#" not in said
    _, said = await run("topics", "subscribers", "$share/team/jobs", role="viewer")
    assert said.splitlines()[1].split()[:3] == ["sensor-7", "True", "1"]


async def test_a_retained_message_is_listed_shown_and_deleted(broker: Broker, run: Any) -> None:
    client = await broker.connect_5("device")
    about = {Property.CONTENT_TYPE: "text/plain"}
    await client.publish_with("höhe/№ 1", b"line 1\n\x1b[2Jline 2 \xff", about, 1, retain=True)
    _, said = await run("retained", "list", "höhe/#", role="viewer")
    assert [line.split()[0] for line in said.splitlines()] == ["topic", "höhe/№"]
    _, said = await run("retained", "show", "höhe/№ 1", role="operator")
    assert [line.strip() for line in said.splitlines()[-2:]] == ["body  line 1", "\\u001b[2Jline 2 \\xff"]
    assert "content_type  text/plain" in said
    _, said = await run("retained", "show", "höhe/№ 1", "--json")
    assert b64decode(json.loads(said)["body_base64"]) == b"line 1\n\x1b[2Jline 2 \xff"
    status, said = await run("retained", "delete", "höhe/№ 1", role="operator")
    assert (status, "has no role admin" in said) == (1, True)
    assert await run("retained", "delete", "höhe/№ 1", role="admin") == (0, "deleted the retained message of höhe/№ 1\n")
    assert await run("retained", "list", "--json") == (0, "")
    assert (audited(broker)[-1]["what"], audited(broker)[-1]["topic"]) == ("deleteRetained", "höhe/№ 1")


async def test_messages_are_printed_as_they_are_stored(broker: Broker, run: Any) -> None:
    client = await broker.connect("sensor-7")
    streams = broker.node.api.streams

    async def tail(*arguments: str, role: str = "") -> tuple[int, str]:
        await until(lambda: not streams._tasks)
        streams._is_closing = False
        running = asyncio.ensure_future(run("topics", "tail", *arguments, role=role))
        await until(lambda: streams._tasks)
        await client.publish("plant/1", b"on", 1)
        if not arguments:
            streams.close()
        said: tuple[int, str] = await running
        return said

    for role in ("operator", ""):
        status, said = await tail("plant/#", "--count", "1", role=role)
        assert (status, said.split()[1:]) == (0, ["plant/1", "on"])
    for role in ("operator", ""):
        status, said = await tail(role=role)
        assert (status, said.splitlines()[-1]) == (1, "penstock topics: the node has ended the stream")
