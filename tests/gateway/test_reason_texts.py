"""Reasons name what a client has sent as text, and not as Python shows bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.gateway.connection.incoming_publishes import PublishForbidden
from penstock.gateway.protocol.connect import protocol_level
from penstock.gateway.protocol.delays import parse_delayed
from penstock.gateway.protocol.errors import MalformedPacket
from penstock.gateway.transport.proxy import ProxyHeaderInvalid, client_of, header_bytes
from penstock.store.errors import StoreError
from penstock.store.topics import check_topic

CASES: list[tuple[Callable[[], object], str]] = [
    (lambda: check_topic(b"x/+"), "'x/+'"),
    (lambda: check_topic(b"x/\xff"), "'x/\ufffd'"),
    (lambda: check_topic("\u00e9+".encode() * 40), repr("\u00e9+" * 32) + "..."),
    (lambda: parse_delayed(b"$delayed/x", 0, 0), "'$delayed/x'"),
    (lambda: parse_delayed(b"$delayed/x/1", 0, 0), "'$delayed/x/1'"),
    (lambda: protocol_level(b"\0\x04HTTP\x04"), "'HTTP'"),
    (lambda: header_bytes(b"PUT / HTTP"), "'PUT / HTTP'"),
    (lambda: header_bytes(b"GET / HTTP"), "'GET / HTTP'"),
    (lambda: client_of(b"PROXY TCP4 x\r\n"), "'PROXY TCP4 x\\r\\n'"),
]


@pytest.mark.parametrize(("refuse", "shown"), CASES)
def test_a_reason_shows_what_was_sent_as_text(refuse: Callable[[], object], shown: str) -> None:
    with pytest.raises((StoreError, MalformedPacket, ProxyHeaderInvalid)) as refused:
        refuse()
    assert shown in str(refused.value)
    assert "b'" not in str(refused.value)


def test_a_forbidden_topic_is_shown_as_text() -> None:
    assert str(PublishForbidden(b"x/1")) == "the client may not publish to 'x/1'"
