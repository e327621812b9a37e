"""Rows in Arrow batches as requests to a node: the hot path of a task.

A column becomes a list of encoded fields, and a message is the join of its fields. Objects of protobuf for each row would take
several times the processor time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from google.protobuf.message import Message as ProtobufMessage

from penstock.pop.proto import pop_pb2 as pb
from penstock.pop.proto.encoding import text, varint
from penstock.spark.errors import RowsInvalid
from penstock.spark.sink.columns import NEEDED

ROWS_MAX: Final = 1_024
"""Maximum number of rows in a request. The node stores a request in one turn of its loop, so other clients wait meanwhile."""

BYTES_MAX: Final = 960 * 1024
"""Maximum size of the rows of a request in bytes; a larger row goes alone. With tags and lengths, a request is smaller than the
smallest bound that a node can have (`PopOptions.request_bytes_max`)."""

SHOWN_MAX: Final = 60
"""Maximum number of characters of a value that an error shows."""

_NUMBER, _BYTES = 0, 2
"""Wire types of protobuf."""


def _tag(message: type[ProtobufMessage], name: str, wire_type: int) -> bytes:
    return varint(message.DESCRIPTOR.fields_by_name[name].number << 3 | wire_type)


_ROW: Final = _tag(pb.SendRequest, "messages", _BYTES)
_EXTRAS: Final = _tag(pb.Message, "extras", _BYTES)
_AGE: Final = _tag(pb.MessageExtras, "deduplication_age_ms", _NUMBER)
_KEY, _VALUE = varint(1 << 3 | _BYTES), varint(2 << 3 | _BYTES)
"""Tags of an entry of a map."""


def _texts(tag: bytes, column: pa.Array) -> list[bytes]:
    """Return the field of each text or binary value. Null and empty values have no bytes."""
    return [text(tag, value) if value else b"" for value in column.cast(pa.large_binary()).to_pylist()]


def _numbers(tag: bytes, column: pa.Array) -> list[bytes]:
    """Return the field of each number. A negative one is its two's complement, as in protobuf; the node refuses it."""
    return [tag + varint(value % (1 << 64)) if value else b"" for value in column.to_pylist()]


def _instants(tag: bytes, column: pa.Array) -> list[bytes]:
    return _numbers(tag, _in_ms(column))


def _maps(tag: bytes, column: pa.Array) -> list[bytes]:
    """Return the entries of each map as a field."""
    return [
        b"".join(
            text(tag, text(_KEY, key.encode()) + text(_VALUE, value.encode())) or tag + b"\0" for key, value in pairs or ()
        )
        for pairs in column.to_pylist()
    ]


Encode = Callable[[bytes, Any], list[bytes]]

_HEAD_FIELDS: Final[dict[str, tuple[Encode, bytes]]] = {
    "topic": (_texts, _tag(pb.Message, "topic", _BYTES)),
    "body": (_texts, _tag(pb.Message, "body", _BYTES)),
    "properties": (_maps, _tag(pb.Message, "properties", _BYTES)),
    "message_group": (_texts, _tag(pb.Message, "message_group", _BYTES)),
    "tag": (_texts, _tag(pb.Message, "tag", _BYTES)),
    "deliver_at": (_instants, _tag(pb.Message, "deliver_at_ms", _NUMBER)),
    "delay_ms": (_numbers, _tag(pb.Message, "delay_ms", _NUMBER)),
}
"""Columns that are fields of `Message`, with how they are encoded."""

_EXTRAS_FIELDS: Final[dict[str, tuple[Encode, bytes]]] = {
    "deduplication_id": (_texts, _tag(pb.MessageExtras, "deduplication_id", _BYTES)),
    "response_topic": (_texts, _tag(pb.MessageExtras, "response_topic", _BYTES)),
    "correlation_data": (_texts, _tag(pb.MessageExtras, "correlation_data", _BYTES)),
    "content_type": (_texts, _tag(pb.MessageExtras, "content_type", _BYTES)),
    "expire_after_ms": (_numbers, _tag(pb.MessageExtras, "expire_after_ms", _NUMBER)),
    "timer_key": (_texts, _tag(pb.MessageExtras, "timer_key", _BYTES)),
}
"""Columns that are fields of `MessageExtras`."""


@dataclass(slots=True)
class RowsRequest:
    """Rows that one call sends.

    Parameters:
        heads: each row's fields of `Message`, but for its extras, encoded.
        extras: each row's fields of `MessageExtras`, but for its age, encoded.
        first_sent_ms: when each row may have been sent first, in ms since 1970.
    """

    heads: list[bytes]
    extras: list[bytes]
    first_sent_ms: list[int]

    def encoded(self, at_ms: int) -> bytes:
        """Return the request as protobuf has it, with the ages that the rows have at a time in ms since 1970."""
        ages = {sent_ms: _AGE + varint(max(at_ms - sent_ms, 1)) for sent_ms in set(self.first_sent_ms)}
        return b"".join(
            [
                text(_ROW, head + text(_EXTRAS, extras + ages[sent_ms]))
                for head, extras, sent_ms in zip(self.heads, self.extras, self.first_sent_ms, strict=True)
            ]
        )

    def row(self, index: int) -> str:
        """Return words that name a row in an error."""
        message = pb.Message.FromString(self.heads[index] + text(_EXTRAS, self.extras[index]))
        return f"the row with the topic {_shown(message.topic)} and the id {_shown(message.extras.deduplication_id)}"


def requests_of(batches: Iterable[pa.RecordBatch], planned_ms: int | None) -> Iterator[RowsRequest]:
    """Yield the requests for the rows of a task, in their order.

    Args:
        batches: the rows. Their schema was checked.
        planned_ms: when Spark planned the write, in ms since 1970: rows without `first_sent` were not sent before. None: each
            row must have `first_sent`.

    Raises:
        RowsInvalid: a row has no value where it needs one, or a text is not UTF-8.
    """
    needed = NEEDED if planned_ms is not None else (*NEEDED, "first_sent")
    for batch in batches:
        _check_values(batch, needed)
        for start in range(0, batch.num_rows, ROWS_MAX):
            yield from _split(_request(batch.slice(start, ROWS_MAX), planned_ms))


def _request(batch: pa.RecordBatch, planned_ms: int | None) -> RowsRequest:
    names = batch.schema.names
    heads = [encode(tag, batch[name]) for name, (encode, tag) in _HEAD_FIELDS.items() if name in names]
    extras = [encode(tag, batch[name]) for name, (encode, tag) in _EXTRAS_FIELDS.items() if name in names]
    first_sent = _in_ms(batch["first_sent"]) if "first_sent" in names else pa.nulls(batch.num_rows, pa.int64())
    first_sent_ms = (first_sent if planned_ms is None else first_sent.fill_null(planned_ms)).to_pylist()
    return RowsRequest(
        list(map(b"".join, zip(*heads, strict=True))), list(map(b"".join, zip(*extras, strict=True))), first_sent_ms
    )


def _split(request: RowsRequest) -> Iterator[RowsRequest]:
    """Yield a request, in parts if it has too many bytes."""
    sizes = [len(head) + len(extras) for head, extras in zip(request.heads, request.extras, strict=True)]
    if sum(sizes) <= BYTES_MAX:
        yield request
        return
    starts, size = [0], 0
    for index, row_size in enumerate(sizes):
        size += row_size
        if size > BYTES_MAX and index > starts[-1]:
            starts.append(index)
            size = row_size
    for start, stop in pairwise([*starts, len(sizes)]):
        yield RowsRequest(request.heads[start:stop], request.extras[start:stop], request.first_sent_ms[start:stop])


def _check_values(batch: pa.RecordBatch, needed: tuple[str, ...]) -> None:
    """Check that rows have values in the columns that need them, and that texts are UTF-8. Raises RowsInvalid."""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            raise RowsInvalid(
                f"The column {name!r} has a value that is not valid: {error}. Correct it, or leave it out."
            ) from error
    for name in needed:
        missing = pc.is_null(batch[name])
        if name == "deduplication_id":
            missing = pc.or_kleene(missing, pc.equal(batch[name], ""))
        index = pc.index(missing, True).as_py()
        if index >= 0:
            (row,) = batch.slice(index, 1).to_pylist()
            values = ", ".join(f"{other}={_shown(row[other])}" for other in NEEDED)
            raise RowsInvalid(f"A row has no {name}: {values}. Give it one, or leave the row out.")


def _in_ms(column: pa.Array) -> pa.Array:
    """Return instants as ms since 1970."""
    return column.cast(pa.timestamp("ms", tz=column.type.tz), safe=False).cast(pa.int64())


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= SHOWN_MAX else f"{shown[:SHOWN_MAX]}..."
