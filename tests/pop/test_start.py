"""A group begins where its creator says, also after the index was rebuilt."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.store.properties import Properties, encode_properties
from penstock.store.record import Flag
from tests.pop.wiring import GROUP, Parts


def bodies(parts: Parts, *, group: str = GROUP, topic_filter: str) -> list[bytes]:
    return [message.body for message in parts.pop(group=group, topic_filter=topic_filter)]


def test_a_group_from_earliest_gets_what_came_before_one_from_latest(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "0")
    parts.publish(b"old", topic="plant/1/a")
    parts.group("late", "plant/+/a", "latest")
    parts.publish(b"new", topic="plant/1/a")
    assert bodies(parts, group="late", topic_filter="plant/+/a") == [b"new"]
    assert bodies(parts, group="early", topic_filter="plant/+/a") == [b"old", b"new"]
    parts.close()


def test_a_group_from_latest_gets_nothing_old_while_a_queue_of_its_filter_is_filled(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "0")
    parts.publish(b"old", topic="plant/1/a")
    parts.core.groups.get_or_create("early", "plant/+/a", "earliest")
    parts.core.groups.get_or_create("late", "plant/+/a", "latest")  # the queue of the first group has no messages yet
    parts.settle_queues()
    parts.publish(b"new", topic="plant/1/a")
    assert bodies(parts, group="late", topic_filter="plant/+/a") == [b"new"]
    parts.close()


@pytest.mark.parametrize("keep_index", [True, False])
def test_a_delayed_message_keeps_its_place_between_roots_when_the_index_is_made_anew(tmp_path: Path, keep_index: bool) -> None:
    parts = Parts(tmp_path / "0")
    parts.group(topic_filter="#")
    due_ms = parts.store.now_ms() + 50
    properties = encode_properties(Properties(deliver_at_ms=due_ms))
    parts.store.append_message(parts.store.router.route(b"a/x"), b"delayed", properties, 1 | Flag.DELAYED)
    parts.publish(b"first", topic="b/x")
    (first,) = parts.pop(topic_filter="#")
    assert first.body == b"first"
    assert parts.ack(first.handle)[0].name == "OK"
    parts.advance(50)
    again = parts.after_crash("1", keep_index=keep_index)
    assert bodies(again, topic_filter="#") == [b"delayed"]
    again.close()
