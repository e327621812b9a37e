"""Reason codes of MQTT 5.0 (2.4) and return codes of MQTT 3.1.1 (3.2.2.3)."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from penstock.gateway.protocol.packets import AUTH, CONNACK, DISCONNECT, PUBACK, PUBCOMP, PUBREC, PUBREL, SUBACK, UNSUBACK


class ReasonCode(IntEnum):
    """The reason codes of MQTT 5.0. Codes from 0x80 up are failures.

    The first three share the number 0; the type of the packet tells which of them is meant.
    """

    SUCCESS = 0x00
    NORMAL_DISCONNECTION = 0x00
    GRANTED_QOS_0 = 0x00
    GRANTED_QOS_1 = 0x01
    GRANTED_QOS_2 = 0x02
    DISCONNECT_WITH_WILL = 0x04
    NO_MATCHING_SUBSCRIBERS = 0x10
    NO_SUBSCRIPTION_EXISTED = 0x11
    CONTINUE_AUTHENTICATION = 0x18
    REAUTHENTICATE = 0x19
    UNSPECIFIED_ERROR = 0x80
    MALFORMED_PACKET = 0x81
    PROTOCOL_ERROR = 0x82
    IMPLEMENTATION_SPECIFIC_ERROR = 0x83
    UNSUPPORTED_PROTOCOL_VERSION = 0x84
    CLIENT_IDENTIFIER_NOT_VALID = 0x85
    BAD_USER_NAME_OR_PASSWORD = 0x86
    NOT_AUTHORIZED = 0x87
    SERVER_UNAVAILABLE = 0x88
    SERVER_BUSY = 0x89
    BANNED = 0x8A
    SERVER_SHUTTING_DOWN = 0x8B
    BAD_AUTHENTICATION_METHOD = 0x8C
    KEEP_ALIVE_TIMEOUT = 0x8D
    SESSION_TAKEN_OVER = 0x8E
    TOPIC_FILTER_INVALID = 0x8F
    TOPIC_NAME_INVALID = 0x90
    PACKET_IDENTIFIER_IN_USE = 0x91
    PACKET_IDENTIFIER_NOT_FOUND = 0x92
    RECEIVE_MAXIMUM_EXCEEDED = 0x93
    TOPIC_ALIAS_INVALID = 0x94
    PACKET_TOO_LARGE = 0x95
    MESSAGE_RATE_TOO_HIGH = 0x96
    QUOTA_EXCEEDED = 0x97
    ADMINISTRATIVE_ACTION = 0x98
    PAYLOAD_FORMAT_INVALID = 0x99
    RETAIN_NOT_SUPPORTED = 0x9A
    QOS_NOT_SUPPORTED = 0x9B
    USE_ANOTHER_SERVER = 0x9C
    SERVER_MOVED = 0x9D
    SHARED_SUBSCRIPTIONS_NOT_SUPPORTED = 0x9E
    CONNECTION_RATE_EXCEEDED = 0x9F
    MAXIMUM_CONNECT_TIME = 0xA0
    SUBSCRIPTION_IDENTIFIERS_NOT_SUPPORTED = 0xA1
    WILDCARD_SUBSCRIPTIONS_NOT_SUPPORTED = 0xA2

    @property
    def is_failure(self) -> bool:
        """True if the code says that something failed."""
        return self >= SUBACK_FAILURE


class ConnectCode(IntEnum):
    """The return codes of a CONNACK of MQTT 3.1.1 (3.2.2.3)."""

    ACCEPTED = 0
    UNACCEPTABLE_PROTOCOL_VERSION = 1
    IDENTIFIER_REJECTED = 2
    SERVER_UNAVAILABLE = 3
    BAD_USER_NAME_OR_PASSWORD = 4
    NOT_AUTHORIZED = 5


REASON_OF: Final[dict[ConnectCode, ReasonCode]] = {
    ConnectCode.ACCEPTED: ReasonCode.SUCCESS,
    ConnectCode.UNACCEPTABLE_PROTOCOL_VERSION: ReasonCode.UNSUPPORTED_PROTOCOL_VERSION,
    ConnectCode.IDENTIFIER_REJECTED: ReasonCode.CLIENT_IDENTIFIER_NOT_VALID,
    ConnectCode.SERVER_UNAVAILABLE: ReasonCode.SERVER_UNAVAILABLE,
    ConnectCode.BAD_USER_NAME_OR_PASSWORD: ReasonCode.BAD_USER_NAME_OR_PASSWORD,
    ConnectCode.NOT_AUTHORIZED: ReasonCode.NOT_AUTHORIZED,
}
"""The reason code of MQTT 5.0 for each return code of MQTT 3.1.1."""

SUBACK_FAILURE: Final = 0x80
"""The only failure that a SUBACK of MQTT 3.1.1 can state (3.9.3)."""

_R = ReasonCode
_PUBLISHED = frozenset(
    (
        _R.SUCCESS,
        _R.NO_MATCHING_SUBSCRIBERS,
        _R.UNSPECIFIED_ERROR,
        _R.IMPLEMENTATION_SPECIFIC_ERROR,
        _R.NOT_AUTHORIZED,
        _R.TOPIC_NAME_INVALID,
        _R.PACKET_IDENTIFIER_IN_USE,
        _R.QUOTA_EXCEEDED,
        _R.PAYLOAD_FORMAT_INVALID,
    )
)
_RELEASED = frozenset((_R.SUCCESS, _R.PACKET_IDENTIFIER_NOT_FOUND))

REASONS: Final[dict[int, frozenset[ReasonCode]]] = {
    CONNACK: frozenset(
        (
            _R.SUCCESS,
            _R.UNSPECIFIED_ERROR,
            _R.MALFORMED_PACKET,
            _R.PROTOCOL_ERROR,
            _R.IMPLEMENTATION_SPECIFIC_ERROR,
            _R.UNSUPPORTED_PROTOCOL_VERSION,
            _R.CLIENT_IDENTIFIER_NOT_VALID,
            _R.BAD_USER_NAME_OR_PASSWORD,
            _R.NOT_AUTHORIZED,
            _R.SERVER_UNAVAILABLE,
            _R.SERVER_BUSY,
            _R.BANNED,
            _R.BAD_AUTHENTICATION_METHOD,
            _R.TOPIC_NAME_INVALID,
            _R.PACKET_TOO_LARGE,
            _R.QUOTA_EXCEEDED,
            _R.PAYLOAD_FORMAT_INVALID,
            _R.RETAIN_NOT_SUPPORTED,
            _R.QOS_NOT_SUPPORTED,
            _R.USE_ANOTHER_SERVER,
            _R.SERVER_MOVED,
            _R.CONNECTION_RATE_EXCEEDED,
        )
    ),
    PUBACK: _PUBLISHED,
    PUBREC: _PUBLISHED,
    PUBREL: _RELEASED,
    PUBCOMP: _RELEASED,
    SUBACK: frozenset(
        (
            _R.GRANTED_QOS_0,
            _R.GRANTED_QOS_1,
            _R.GRANTED_QOS_2,
            _R.UNSPECIFIED_ERROR,
            _R.IMPLEMENTATION_SPECIFIC_ERROR,
            _R.NOT_AUTHORIZED,
            _R.TOPIC_FILTER_INVALID,
            _R.PACKET_IDENTIFIER_IN_USE,
            _R.QUOTA_EXCEEDED,
            _R.SHARED_SUBSCRIPTIONS_NOT_SUPPORTED,
            _R.SUBSCRIPTION_IDENTIFIERS_NOT_SUPPORTED,
            _R.WILDCARD_SUBSCRIPTIONS_NOT_SUPPORTED,
        )
    ),
    UNSUBACK: frozenset(
        (
            _R.SUCCESS,
            _R.NO_SUBSCRIPTION_EXISTED,
            _R.UNSPECIFIED_ERROR,
            _R.IMPLEMENTATION_SPECIFIC_ERROR,
            _R.NOT_AUTHORIZED,
            _R.TOPIC_FILTER_INVALID,
            _R.PACKET_IDENTIFIER_IN_USE,
        )
    ),
    DISCONNECT: frozenset(
        (
            _R.NORMAL_DISCONNECTION,
            _R.DISCONNECT_WITH_WILL,
            _R.UNSPECIFIED_ERROR,
            _R.MALFORMED_PACKET,
            _R.PROTOCOL_ERROR,
            _R.IMPLEMENTATION_SPECIFIC_ERROR,
            _R.NOT_AUTHORIZED,
            _R.SERVER_BUSY,
            _R.SERVER_SHUTTING_DOWN,
            _R.KEEP_ALIVE_TIMEOUT,
            _R.SESSION_TAKEN_OVER,
            _R.TOPIC_FILTER_INVALID,
            _R.TOPIC_NAME_INVALID,
            _R.RECEIVE_MAXIMUM_EXCEEDED,
            _R.TOPIC_ALIAS_INVALID,
            _R.PACKET_TOO_LARGE,
            _R.MESSAGE_RATE_TOO_HIGH,
            _R.QUOTA_EXCEEDED,
            _R.ADMINISTRATIVE_ACTION,
            _R.PAYLOAD_FORMAT_INVALID,
            _R.RETAIN_NOT_SUPPORTED,
            _R.QOS_NOT_SUPPORTED,
            _R.USE_ANOTHER_SERVER,
            _R.SERVER_MOVED,
            _R.SHARED_SUBSCRIPTIONS_NOT_SUPPORTED,
            _R.CONNECTION_RATE_EXCEEDED,
            _R.MAXIMUM_CONNECT_TIME,
            _R.SUBSCRIPTION_IDENTIFIERS_NOT_SUPPORTED,
            _R.WILDCARD_SUBSCRIPTIONS_NOT_SUPPORTED,
        )
    ),
    AUTH: frozenset((_R.SUCCESS, _R.CONTINUE_AUTHENTICATION, _R.REAUTHENTICATE)),
}
"""The reason codes that each type of packet may have: MQTT 5.0, Table 2-6."""
