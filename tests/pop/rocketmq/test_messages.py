"""Messages of the protocol, and how they are stored."""

from __future__ import annotations

import gzip
import zlib
from hashlib import md5, sha1
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pop.core.checkpoint import Entry
from penstock.pop.rocketmq.messages import PRODUCER, message_of, properties_of, topic_and_body_of
from penstock.pop.rocketmq.names import encode
from penstock.pop.rocketmq.status import Code, Refused
from penstock.pop.rocketmq.stubs import pb
from penstock.store.properties import Properties, encode_properties
from penstock.store.record import Flag, Kind, Record

TYPE = pb.MessageType
BODY = b"21.5"
BODY_MAX = 1_000
NOW_MS = 1_700_000_000_000


def outgoing(body: bytes = BODY, topic: str = "plant/1", user: dict[str, str] | None = None, **system: Any) -> Any:
    """Return a message as a client sends it."""
    system.setdefault("message_type", TYPE.NORMAL)
    return pb.Message(
        topic=pb.Resource(name=encode(topic)), body=body, user_properties=user, system_properties=pb.SystemProperties(**system)
    )


def stamp(ms: int) -> Any:
    return {"seconds": ms // 1000, "nanos": ms % 1000 * 1_000_000}


def stored(properties: Properties, *, flags: int = 1, topic: str = "plant/1") -> Record:
    return Record(255, 100, Kind.MESSAGE, flags, 1_700_000_000_123, b"", topic.encode(), encode_properties(properties), BODY)


text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0|"), min_size=1, max_size=20).filter(str.strip)


@given(st.dictionaries(text, text, max_size=4), text, st.lists(text, max_size=3), text, st.integers(1, 2**42))
def test_a_message_comes_back_with_all_its_fields(
    user: dict[str, str], tag: str, keys: list[str], host: str, born_ms: int
) -> None:
    message = outgoing(user=user, tag=tag, keys=keys, born_host=host, born_timestamp=stamp(born_ms))
    properties = properties_of(message, "plant/1", NOW_MS)
    assert dict(properties.user) == user
    back = message_of(stored(properties))
    assert back.user_properties == user
    system = back.system_properties
    assert (system.tag, list(system.keys), system.born_host) == (tag, [part for key in keys for part in key.split()], host)
    assert system.born_timestamp.ToMilliseconds() == born_ms


@pytest.mark.parametrize("seconds", [253_402_300_799, 253_402_300_800, 2**60, 2**63 - 1, -1])
def test_any_birth_time_can_be_stored_and_comes_back_as_one_that_the_protocol_has(seconds: int) -> None:
    properties = properties_of(outgoing(born_timestamp={"seconds": seconds}), "plant/1", NOW_MS)
    born = message_of(stored(properties)).system_properties.born_timestamp
    assert born.seconds == (min(seconds, 253_402_300_799) if seconds > 0 else NOW_MS // 1000)


def test_a_birth_time_that_an_earlier_version_stored_comes_back_as_one_that_the_protocol_has() -> None:
    assert message_of(stored(Properties(born_ms=2**60))).system_properties.born_timestamp.seconds == 253_402_300_799


@pytest.mark.parametrize(
    ("system", "field", "value"),
    [
        ({"message_type": TYPE.FIFO, "message_group": "a"}, "message_group", "a"),
        ({"message_type": TYPE.DELAY, "delivery_timestamp": stamp(1_700_000_000_500)}, "deliver_at_ms", 1_700_000_000_500),
        ({"message_type": TYPE.TRANSACTION}, "producer", f"{PRODUCER}plant/1"),
        ({"message_type": TYPE.LITE, "lite_topic": "a"}, "producer", ""),
    ],
)
def test_each_type_is_stored_as_its_kind_of_message(system: dict[str, Any], field: str, value: object) -> None:
    assert getattr(properties_of(outgoing(**system), "plant/1", NOW_MS), field) == value


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (outgoing(tag=" "), Code.ILLEGAL_MESSAGE_TAG),
        (outgoing(tag="a|b"), Code.ILLEGAL_MESSAGE_TAG),
        (outgoing(keys=["a", ""]), Code.ILLEGAL_MESSAGE_KEY),
        (outgoing(user={"": "x"}), Code.ILLEGAL_MESSAGE_PROPERTY_KEY),
        (outgoing(user={"a": "x\0"}), Code.ILLEGAL_MESSAGE_PROPERTY_KEY),
        (outgoing(message_type=TYPE.FIFO), Code.ILLEGAL_MESSAGE_GROUP),
        (outgoing(message_type=TYPE.FIFO, message_group=" "), Code.ILLEGAL_MESSAGE_GROUP),
        (outgoing(message_type=TYPE.DELAY), Code.ILLEGAL_DELIVERY_TIME),
        (outgoing(message_type=TYPE.DELAY, delivery_timestamp={"seconds": -5}), Code.ILLEGAL_DELIVERY_TIME),
        (outgoing(message_type=TYPE.LITE), Code.ILLEGAL_LITE_TOPIC),
        (outgoing(message_type=TYPE.PRIORITY, priority=-1), Code.BAD_REQUEST),
        (outgoing(priority=1), Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
        (outgoing(user={"DELAY": "19"}), Code.ILLEGAL_DELIVERY_TIME),
        (outgoing(user={"DELAY": "-1"}), Code.ILLEGAL_DELIVERY_TIME),
        (outgoing(user={"DELAY": "soon"}), Code.ILLEGAL_DELIVERY_TIME),
        (outgoing(user={"DELAY": "9" * 70_000}), Code.ILLEGAL_DELIVERY_TIME),
        (
            outgoing(user={"DELAY": "3"}, message_type=TYPE.FIFO, message_group="a"),
            Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
        ),
        (
            outgoing(message_type=TYPE.TRANSACTION, orphaned_transaction_recovery_duration={"seconds": -1}),
            Code.BAD_REQUEST,
        ),
        (outgoing(message_type=TYPE.MESSAGE_TYPE_UNSPECIFIED), Code.UNSUPPORTED),
        (outgoing(message_group="a"), Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
        (outgoing(delivery_timestamp=stamp(1)), Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
        (outgoing(lite_topic="a"), Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
        (outgoing(message_type=TYPE.TRANSACTION, message_group="a"), Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
    ],
)
def test_an_invalid_message_is_refused_with_a_code_of_its_own(message: Any, code: Code) -> None:
    with pytest.raises(Refused) as refused:
        properties_of(message, "plant/1", NOW_MS)
    assert refused.value.code is code


CRC = zlib.crc32(BODY)


@pytest.mark.parametrize(
    ("kind", "checksum"),
    [
        (pb.DigestType.CRC32, f"{CRC:x}"),
        (pb.DigestType.CRC32, f"{CRC:08X}"),
        (pb.DigestType.CRC32, str(CRC)),
        (pb.DigestType.MD5, md5(BODY).hexdigest().upper()),
        (pb.DigestType.SHA1, sha1(BODY).hexdigest()),
        (pb.DigestType.DIGEST_TYPE_UNSPECIFIED, ""),
    ],
)
def test_a_digest_is_read_in_each_way_that_clients_write_it(kind: int, checksum: str) -> None:
    message = outgoing(body_digest={"type": kind, "checksum": checksum})
    assert topic_and_body_of(message, BODY_MAX) == ("plant/1", BODY)


def test_a_body_is_stored_uncompressed() -> None:
    body = b"x" * BODY_MAX
    packed = outgoing(gzip.compress(body), body_encoding=pb.Encoding.GZIP)
    assert topic_and_body_of(packed, BODY_MAX) == ("plant/1", body)


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (outgoing(body_digest={"type": pb.DigestType.MD5, "checksum": "00"}), Code.MESSAGE_CORRUPTED),
        (outgoing(body_digest={"type": pb.DigestType.CRC32, "checksum": "0"}), Code.MESSAGE_CORRUPTED),
        (outgoing(b"no gzip", body_encoding=pb.Encoding.GZIP), Code.MESSAGE_CORRUPTED),
        (outgoing(gzip.compress(BODY)[:-3], body_encoding=pb.Encoding.GZIP), Code.MESSAGE_CORRUPTED),
        (outgoing(gzip.compress(bytes(10_000_000)), body_encoding=pb.Encoding.GZIP), Code.MESSAGE_BODY_TOO_LARGE),
        (outgoing(body_encoding=7), Code.UNSUPPORTED),
    ],
)
def test_an_invalid_body_is_refused(message: Any, code: Code) -> None:
    with pytest.raises(Refused) as refused:
        topic_and_body_of(message, BODY_MAX)
    assert refused.value.code is code


def test_a_delivery_has_its_handle_and_attempt() -> None:
    message = message_of(
        stored(Properties([("a", "1"), ("a", "2")])),
        entry=Entry(255, 7, 100, 3, 0),
        handle="h",
        invisible_ms=1_500,
        store_host="n",
    )
    system = message.system_properties
    assert (message.topic.name, message.body, dict(message.user_properties)) == ("plant%2F1", BODY, {"a": "2"})
    assert (system.message_id, system.receipt_handle, system.delivery_attempt) == ("00000000000000ff", "h", 3)
    assert (system.queue_offset, system.invisible_duration.ToMilliseconds(), system.store_host) == (7, 1_500, "n")
    assert (system.body_digest.type, system.body_digest.checksum) == (pb.DigestType.MD5, md5(BODY).hexdigest().upper())
    # A message from MQTT has no birth time of its own.
    assert system.born_timestamp.ToMilliseconds() == system.store_timestamp.ToMilliseconds() == 1_700_000_000_123


@pytest.mark.parametrize(
    ("properties", "flags", "lite_parent", "kind"),
    [
        (Properties(), 1, "", TYPE.NORMAL),
        (Properties(message_group="a"), 1, "", TYPE.FIFO),
        (Properties(deliver_at_ms=5), 1 | Flag.DELAYED, "", TYPE.DELAY),
        (Properties(producer="p"), 1 | Flag.HALF, "", TYPE.TRANSACTION),
        (Properties(), 1, "plant", TYPE.LITE),
    ],
)
def test_a_message_keeps_the_type_that_it_was_sent_as(properties: Properties, flags: int, lite_parent: str, kind: int) -> None:
    message = message_of(stored(properties, flags=flags), lite_parent=lite_parent)
    assert message.system_properties.message_type == kind
    if lite_parent:
        assert (message.topic.name, message.system_properties.lite_topic) == ("plant", "1")


def test_a_dead_letter_has_the_topic_of_rocketmq_and_names_its_own() -> None:
    letter = message_of(stored(Properties(sender_id="01AB")), dead_letters_of="billing")
    assert letter.topic.name == "%DLQ%billing"
    own = letter.system_properties.dead_letter_queue
    assert (own.topic, own.message_id) == ("plant%2F1", "01AB")


def test_a_message_in_a_namespace_has_its_name_within_the_namespace() -> None:
    message = message_of(stored(Properties(), topic="tenant/plant/1"), namespace="tenant")
    assert (message.topic.resource_namespace, message.topic.name) == ("tenant", "plant%2F1")
    lite = message_of(stored(Properties(), topic="tenant/plant/1"), namespace="tenant", lite_parent="tenant/plant")
    assert (lite.topic.name, lite.system_properties.lite_topic) == ("plant", "1")


@pytest.mark.parametrize(("level", "after_ms"), [("1", 1_000), ("4", 30_000), ("18", 7_200_000)])
def test_the_property_delay_delays_a_message_by_its_level_and_is_used_up(level: str, after_ms: int) -> None:
    properties = properties_of(outgoing(user={"DELAY": level, "unit": "K"}), "plant/1", NOW_MS)
    assert (properties.deliver_at_ms, properties.user) == (NOW_MS + after_ms, [("unit", "K")])


def test_level_0_is_no_delay() -> None:
    assert properties_of(outgoing(user={"DELAY": "0"}), "plant/1", NOW_MS).deliver_at_ms == 0


def test_a_message_keeps_the_id_and_the_trace_that_its_sender_gave_it() -> None:
    properties = properties_of(outgoing(message_id="01AB", trace_context="00-a-b-01"), "plant/1", NOW_MS)
    assert properties.user == [("traceparent", "00-a-b-01")]
    back = message_of(stored(properties)).system_properties
    assert (back.message_id, back.trace_context) == ("01AB", "00-a-b-01")


def test_a_half_message_keeps_when_its_producer_is_asked_first() -> None:
    half = outgoing(message_type=TYPE.TRANSACTION, orphaned_transaction_recovery_duration={"seconds": 7})
    properties = properties_of(half, "plant/1", NOW_MS)
    assert properties.check_after_ms == 7_000
    back = message_of(stored(properties, flags=1 | Flag.HALF)).system_properties
    assert back.orphaned_transaction_recovery_duration.ToMilliseconds() == 7_000


def test_a_message_keeps_its_priority() -> None:
    properties = properties_of(outgoing(message_type=TYPE.PRIORITY, priority=7), "plant/1", NOW_MS)
    back = message_of(stored(properties)).system_properties
    assert (back.message_type, back.priority) == (TYPE.PRIORITY, 7)


def test_a_key_with_spaces_is_a_list_of_keys() -> None:
    assert properties_of(outgoing(keys=["order 7", "k"]), "plant/1", NOW_MS).keys == ["order", "7", "k"]
