"""The encoding of messages as PUBLISH packets, for one client and for many."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.delivery.encoding import DeliveryOptions, EncodedBatch, encode_batch
from penstock.gateway.protocol.decode import decode
from penstock.gateway.protocol.fixed_header import FROM_SERVER_5
from penstock.gateway.protocol.packets import PUBLISH
from penstock.store.options import KIB, MIB, StoreOptions
from penstock.store.properties import Properties, encode_properties
from penstock.store.queues.lightqueue import ENTRY
from penstock.store.record import Flag
from penstock.store.store import Store
from tests.clock import ManualClock


class Stored(NamedTuple):
    """A stored message."""

    topic: bytes
    body: bytes
    qos: int = 0
    properties: bytes = b""


PROPERTIES = encode_properties(Properties(user=[("unit", "K")], tag="hot"))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Return a store without an event loop. The test commits by itself."""
    directory: Path = tmp_path_factory.mktemp("store")
    store = Store(directory, StoreOptions(segment_bytes=16 * MIB), ManualClock())
    store.recover()
    yield store
    store.index.close()
    store.log.close()


def entries_of(store: Store, messages: list[Stored]) -> bytes:
    """Store messages and return a light-queue entry for each."""
    entries = b""
    for message in messages:
        route = store.router.route(message.topic)
        position = store.append_message(route, message.body, message.properties, message.qos)
        entries += ENTRY.pack(position, store.log.end - position, 0)
    store.commit()
    return entries


def expected(messages: list[Stored], qos_max: int, *, retain: bool = False) -> list[tuple[object, ...]]:
    """Return the packets that a client decodes, if packet ids count from 1."""
    items: list[tuple[object, ...]] = []
    packet_id = 0
    for message in messages:
        qos = min(message.qos, qos_max)
        packet_id += qos > 0
        items.append((PUBLISH, qos << 1 | retain, message.topic, packet_id if qos else 0, message.body))
    return items


def check(store: Store, messages: list[Stored], qos_max: int, *, retain: bool = False) -> None:
    batch = encode_batch(store, entries_of(store, messages), DeliveryOptions(qos_max), retain=retain)
    data = batch.filled(range(1, len(batch.slots) + 1))
    assert batch.messages == len(messages)
    assert [slot.qos for slot in batch.slots] == [min(one.qos, qos_max) for one in messages if min(one.qos, qos_max)]
    assert decode(data, 16 * MIB) == (expected(messages, qos_max, retain=retain), len(data))


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("qos_max", [0, 1, 2])
@pytest.mark.parametrize("properties", [b"", PROPERTIES], ids=["plain", "properties"])
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_message_is_encoded_at_the_lower_qos_without_its_properties(
    store: Store, qos: int, properties: bytes, qos_max: int, retain: bool
) -> None:
    check(store, [Stored(b"plant/1/temperature", b"21.5", qos, properties)], qos_max, retain=retain)


@pytest.mark.parametrize("qos_max", [0, 1])
@pytest.mark.parametrize("remaining", [126, 127, 128, 129, 16_383, 16_384, 2_097_151, 2_097_152])
def test_packets_around_each_boundary_of_the_length_field_are_right(store: Store, remaining: int, qos_max: int) -> None:
    topic = b"plant/1"
    check(store, [Stored(topic, b"x" * (remaining - 2 - len(topic) - 2 * qos_max), 1)] * 2, qos_max)


@pytest.mark.parametrize("qos_max", [0, 2])
@pytest.mark.parametrize("body", [b"", b"x", b"x" * 200])
@pytest.mark.parametrize("topic_bytes", [1, 123, 124, 125, 126, 127, 128, 300, 4096])
def test_packets_with_long_topics_and_empty_bodies_are_right(store: Store, topic_bytes: int, body: bytes, qos_max: int) -> None:
    check(store, [Stored(b"t" * topic_bytes, body, 2)], qos_max)


def test_a_batch_keeps_its_order_and_each_packet_has_a_slot_of_its_own(store: Store) -> None:
    messages = [
        Stored(f"plant/{n}".encode(), b"x" * (n * 7 % 300), n % 3, PROPERTIES if n % 5 == 0 else b"") for n in range(200)
    ]
    for qos_max in (0, 1, 2):
        check(store, messages, qos_max)


@pytest.mark.parametrize("sizes", [[9] * 3, [9] * 4, [9] * 300, [9, 9, 9, 10, 9], [0, 200, 200, 200, 200]])
def test_slots_are_filled_be_they_equally_far_from_each_other_or_not(store: Store, sizes: list[int]) -> None:
    messages = [Stored(b"plant/1", b"x" * size, 1) for size in sizes]
    check(store, messages, 1)
    batch = encode_batch(store, entries_of(store, messages), DeliveryOptions(1))
    assert bool(batch.stride) == (len(sizes) > 3 and len(set(sizes)) == 1)


def test_no_entries_make_an_empty_batch(store: Store) -> None:
    assert encode_batch(store, b"", DeliveryOptions(1)) == EncodedBatch(b"", [], 0)


def test_the_retain_flag_of_a_stored_message_is_not_passed_on(store: Store) -> None:
    # [MQTT-3.3.1-9]: the flag is set for a new subscription only.
    message = Stored(b"plant/1", b"on", Flag.RETAIN | 1)
    batch = encode_batch(store, entries_of(store, [message]), DeliveryOptions(1))
    assert decode(batch.filled([5]), MIB)[0] == [(PUBLISH, 1 << 1, b"plant/1", 5, b"on")]


@given(
    st.lists(
        st.builds(
            Stored,
            st.text("abc/\u00fc", min_size=1, max_size=70).map(str.encode),
            st.binary(max_size=150),
            st.integers(0, 2),
            st.sampled_from([b"", PROPERTIES]),
        ),
        max_size=8,
    ),
    st.integers(0, 2),
)
def test_a_client_decodes_what_was_stored(store: Store, messages: list[Stored], qos_max: int) -> None:
    check(store, messages, qos_max)


def test_adjacent_records_are_read_at_once_and_scattered_ones_one_by_one(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    read = store.log.read

    def counted(position: int, size: int) -> bytes:
        reads.append(size)
        return read(position, size)

    monkeypatch.setattr(store.log, "read", counted)
    alike = [Stored(b"plant/1", b"%d" % n, 0) for n in range(50)]
    check(store, alike, 0)
    assert len(reads) == 1
    reads.clear()
    entries = entries_of(store, [each for n in range(50) for each in (Stored(b"a", b"%d" % n, 0), *alike[:5])])
    mine = b"".join(entries[at : at + ENTRY.size] for at in range(0, len(entries), 6 * ENTRY.size))
    batch = encode_batch(store, mine, DeliveryOptions(0))
    assert decode(batch.data, MIB)[0] == [(PUBLISH, 0, b"a", 0, b"%d" % n) for n in range(50)]
    assert len(reads) == 50


def test_messages_with_and_without_properties_alternate_in_mqtt_5(store: Store) -> None:
    """The shape of the last message without properties must not be taken from a message with properties in between."""
    messages = [
        Stored(b"a/b", b"1", 0),
        Stored(b"a/b", b"2", 0),
        Stored(b"a/longer", b"3", 0, PROPERTIES),
        Stored(b"a/b", b"4", 0),
        Stored(b"c/longer", b"", 0),
        Stored(b"a/b", b"x" * 200, 0),
        Stored(b"a/b", b"6", 0),
    ]
    batch = encode_batch(store, entries_of(store, messages), DeliveryOptions(0, is_v5=True, identifiers=(300,)))
    items = decode(batch.data, MIB, FROM_SERVER_5)[0]
    assert [(item[2], item[4]) for item in items] == [(message.topic, message.body) for message in messages]
    assert all(item[5].endswith(b"\x0b\xac\x02") for item in items)


def test_a_batch_may_span_several_segments(tmp_path: Path) -> None:
    store = Store(tmp_path, StoreOptions(segment_bytes=16 * KIB), ManualClock())
    store.recover()
    check(store, [Stored(b"plant/1", b"%d" % n, n % 2) for n in range(1500)], 0)
    assert len(store.log.segments()) > 2
    store.abandon()
