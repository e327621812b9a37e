"""Messages written by hand have the bytes that protobuf writes, or that it reads as the same message."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.pop.core.handle import Handles
from penstock.pop.grpc.wire import SENT_PLAIN, popped_messages, sent, sent_plain, statuses
from penstock.pop.proto import pop_pb2 as pb
from penstock.pop.proto.encoding import field_bytes, varint
from penstock.store.bodies import CHECKPOINT_ENTRY
from penstock.store.properties import Properties, encode_properties
from penstock.store.record import Kind, encode
from tests.depth import DEPTH

SECRET = bytes(range(32))

names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
message = st.fixed_dictionaries(
    {
        "topic": names.filter(bool),
        "body": st.one_of(st.binary(max_size=200), st.just(bytes(20_000))),
        "user": st.dictionaries(names.filter(bool), names, max_size=3),
        "tag": names,
        "message_group": names,
        "position": st.integers(0, 2**62),
        "offset": st.one_of(st.integers(0, 40_000), st.integers(0, 2**60)),
        "attempt": st.integers(1, 65_535),
        "stored_ms": st.integers(0, 2**44),
        "unreadable": st.booleans(),
        "dead": st.booleans(),
    }
)


def repeated(drawn: list[tuple[dict, int]]) -> list[dict]:
    """Return messages, some of which differ from the message before only in offset, body, and perhaps in their tag."""
    return [
        {
            **each,
            "offset": each["offset"] + at,
            "body": each["body"][at:] + each["body"][:at],
            "tag": each["tag"][at // 2 :] + each["tag"][: at // 2],
        }
        for each, count in drawn
        for at in range(count)
    ]


@settings(max_examples=15 * DEPTH)
@given(st.lists(st.tuples(message, st.integers(1, 4)), max_size=5).map(repeated), st.integers(0, 2**50))
def test_popped_messages_are_read_by_protobuf_as_they_were(messages: list[dict], deadline_ms: int) -> None:
    body = b"".join(CHECKPOINT_ENTRY.pack(each["position"], each["offset"], 100, each["attempt"], 0, 0) for each in messages)
    records: list[bytes | None] = []
    expected = []
    dead = {}
    handles = Handles(SECRET).deliveries(77, 123, 4, len(messages))
    for index, each in enumerate(messages):
        if each["dead"]:
            dead[index] = pb.DeadLetter(group="billing", attempts=16, reason=pb.FORWARDED)
        if each["unreadable"]:
            records.append(None)
            continue
        properties = encode_properties(Properties(list(each["user"].items()), each["tag"], each["message_group"]))
        topic = each["topic"].encode()
        records.append(encode(Kind.MESSAGE, topic, each["body"], store_ms=each["stored_ms"], properties=properties))
        expected.append(
            pb.PoppedMessage(
                handle=handles[index],
                message_id=f"{each['position']:016x}",
                topic=each["topic"],
                body=each["body"],
                properties=each["user"],
                message_group=each["message_group"],
                tag=each["tag"],
                stored_ms=each["stored_ms"],
                queue_offset=each["offset"],
                attempt=each["attempt"],
                visible_at_ms=deadline_ms,
                dead_letter=dead.get(index),
            )
        )
    joined = Handles(SECRET).deliveries_joined(77, 123, 4, len(messages))
    data = popped_messages(body, records, joined, deadline_ms, 60_000, dead)
    assert pb.PopResponse.FromString(data) == pb.PopResponse(messages=expected, invisible_ms=60_000)
    # Several joined responses are one response.
    assert len(pb.ConsumeResponse.FromString(data + data).messages) == 2 * len(expected)


@given(st.lists(st.sampled_from([pb.OK, pb.INVALID_HANDLE, pb.ALREADY_ACKED])))
def test_statuses_are_read_by_protobuf_as_they_were(codes: list[pb.Code.ValueType]) -> None:
    found = [pb.Status(code=code, detail="why" if code else "") for code in codes]
    assert statuses(found) == pb.AckResponse(statuses=found).SerializeToString()


@given(st.integers(0, 2**63 - 1))
def test_what_came_of_a_plain_message_is_what_protobuf_writes(position: int) -> None:
    result = pb.SendResult(status=pb.Status(), message_id=f"{position:016x}")
    assert SENT_PLAIN % position == sent(result) == pb.SendResponse(results=[result]).SerializeToString()
    assert sent_plain([position, 7, position]) == SENT_PLAIN % position + SENT_PLAIN % 7 + SENT_PLAIN % position


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16_383, 16_384, 2_097_151, 2_097_152])
def test_the_bytes_of_a_field_are_counted_as_protobuf_writes_them(size: int) -> None:
    assert pb.Message(body=bytes(size)).ByteSize() == field_bytes(size)


@given(st.one_of(st.integers(0, 70_000), st.integers(0, 2**63 - 1)))
def test_a_number_is_written_as_protobuf_does(value: int) -> None:
    assert b"\x08" + varint(value) == (pb.PoppedMessage(stored_ms=value).SerializeToString() or b"\x40\x00").replace(
        b"\x40", b"\x08", 1
    )
