"""Pops that are repeated, against a real node."""

from __future__ import annotations

import pytest

from penstock import Client
from penstock.pop.errors import (
    RequestInvalid,
)
from tests.pop.wiring import FILTER, GROUP, TOPIC


async def test_a_pop_whose_answer_was_lost_is_repeated_with_its_attempt_id(client: Client) -> None:
    for number in range(4):
        await client.send(TOPIC, b"%d" % number)
    lost = await client.pop(FILTER, group=GROUP, messages_max=2, attempt_id="one")
    again = await client.pop(FILTER, group=GROUP, messages_max=2, attempt_id="one")
    assert [message.handle for message in again] == [message.handle for message in lost]
    assert [message.attempt for message in again] == [1, 1]
    await client.ack([message.handle for message in again], group=GROUP)
    with pytest.raises(RequestInvalid, match="attempt_id"):
        await client.pop(FILTER, group=GROUP, attempt_id="x" * 256)
