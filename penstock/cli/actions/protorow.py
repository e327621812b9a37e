"""Messages of protobuf as rows of JSON, in which numbers are numbers."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

_LONG = (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)


def row_of(message: Message, *, is_full: bool = False) -> dict[str, Any]:
    """Return the fields of a message by their names in the definition.

    Args:
        message: any message.
        is_full: also return fields that have their default, such as 0.
    """
    row: dict[str, Any] = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=is_full)
    _make_numbers(row, message.DESCRIPTOR)
    return row


def _make_numbers(row: dict[str, Any], descriptor: Any) -> None:
    """Make numbers of the texts that protobuf's JSON has for integers of 64 bits, for languages that have none."""
    for field in descriptor.fields:
        value = row.get(field.name)
        if value is None:
            continue
        if field.cpp_type in _LONG:
            row[field.name] = [int(each) for each in value] if isinstance(value, list) else int(value)
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for each in value if isinstance(value, list) else [value]:
                _make_numbers(each, field.message_type)
