"""kill -9 at random moments: acknowledged messages and acknowledgements survive, and no other messages appear."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from random import Random

import grpc.aio
import pytest

from penstock.gateway.protocol.decode import decode
from penstock.gateway.protocol.encode import encode_publish
from penstock.gateway.protocol.fixed_header import FROM_SERVER
from penstock.gateway.protocol.packets import CONNACK, PUBACK
from penstock.pop.proto import pop_pb2 as pb
from penstock.pop.proto import pop_pb2_grpc
from tests.system.processes import NodeProcess

pytestmark = pytest.mark.nightly

ROUNDS = int(os.environ.get("PENSTOCK_KILL_ROUNDS", "3"))
"""Number of kills in each test. `make nightly` makes more."""

WINDOW = 200
GROUP = "after"


class Acked(set[int]):
    """The acknowledged messages, and a way to wait for a number of them."""

    def __init__(self) -> None:
        super().__init__()
        self._target = 0
        self._reached = asyncio.Event()

    def note(self, number: int) -> None:
        self.add(number)
        if len(self) >= self._target:
            self._reached.set()

    def end(self) -> None:
        """Wake the waiting tests: no more acknowledgements follow."""
        self._reached.set()

    async def reach(self, target: int) -> None:
        self._target = target
        if len(self) < target:
            self._reached.clear()
            await self._reached.wait()


async def _publish_until_killed(port: int, first: int, acked: Acked) -> int:
    """Publish numbered messages at QoS 1 until the connection ends, collect the acknowledged ones; return the next number."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(bytes.fromhex("100c00044d5154540402003c0000"))
    number, buffer = first, b""
    waiting: dict[int, int] = {}
    try:
        while True:
            buffer += await reader.read(65536) or _ended()
            packets, used = decode(buffer, 1 << 20, FROM_SERVER)
            buffer = buffer[used:]
            for packet in packets:
                assert packet[0] in (CONNACK, PUBACK)
                if packet[0] == PUBACK:
                    acked.note(waiting.pop(packet[1]))
            while len(waiting) < WINDOW:
                packet_id = number % 65_535 + 1
                waiting[packet_id] = number
                topic = b"kill/%d/value" % (number % 7)
                writer.write(encode_publish(topic, b"%d" % number, 1, packet_id=packet_id))
                number += 1
    except OSError:
        writer.close()
        return number


def _ended() -> bytes:
    raise ConnectionResetError


async def _pop_all(address: str, group: str, *, wait_ms: int = 0, ack: bool = True) -> list[pb.PoppedMessage]:
    """Pop all visible messages, and acknowledge them if asked to."""
    found: list[pb.PoppedMessage] = []
    async with grpc.aio.insecure_channel(address) as channel:
        stub: pop_pb2_grpc.PopServiceAsyncStub = pop_pb2_grpc.PopServiceStub(channel)
        while True:
            request = pb.PopRequest(
                group=group, filter="kill/+/value", messages_max=1000, invisible_ms=600_000, wait_ms=wait_ms
            )
            popped = list((await stub.Pop(request)).messages)
            if not popped:
                return found
            found += popped
            if ack:
                answer = await stub.Ack(pb.AckRequest(group=group, handles=[message.handle for message in popped]))
                assert all(status.code == pb.OK for status in answer.statuses)


@pytest.mark.timeout(60 + 15 * ROUNDS)
async def test_every_message_whose_puback_arrived_is_popped_by_a_new_group(node: NodeProcess) -> None:
    random = Random(7)
    acked = Acked()
    sent = 0
    for _ in range(ROUNDS):
        node.start()
        publishing = asyncio.create_task(_publish_until_killed(node.port("mqtt"), sent, acked))
        await acked.reach(len(acked) + random.randrange(1, 3_000))
        node.kill()
        sent = await publishing
    node.start()
    popped = await _pop_all(node.addresses["pop"], GROUP, wait_ms=2_000)
    numbers = [int(message.body) for message in popped]
    counts = Counter(numbers)
    assert not acked - counts.keys(), "acknowledged, and gone"
    assert max(counts.values()) == 1, "one publish, two messages"
    assert counts.keys() <= set(range(sent)), "a message that nobody sent"
    by_topic = [[n for n in numbers if n % 7 == topic] for topic in range(7)]
    assert all(order == sorted(order) for order in by_topic), "out of order"


@pytest.mark.timeout(60 + 15 * ROUNDS)
async def test_what_was_acknowledged_to_a_group_never_comes_back_and_the_rest_does(node: NodeProcess) -> None:
    random = Random(11)
    messages = 2_000
    node.start()
    async with grpc.aio.insecure_channel(node.addresses["pop"]) as channel:
        stub: pop_pb2_grpc.PopServiceAsyncStub = pop_pb2_grpc.PopServiceStub(channel)
        batch = [pb.Message(topic=f"kill/{n % 7}/value", body=b"%d" % n) for n in range(messages)]
        await stub.Send(pb.SendRequest(messages=batch))
    acked = Acked()
    for _ in range(ROUNDS):
        consuming = asyncio.create_task(_consume_until_killed(node.addresses["pop"], acked, random))
        await acked.reach(min(len(acked) + random.randrange(1, 300), messages * 2 // 3))
        node.kill()
        await consuming
        node.start()
    rest = await _pop_all(node.addresses["pop"], GROUP, wait_ms=4_000)
    returned = Counter(int(message.body) for message in rest)
    assert not acked & returned.keys(), "acknowledged, and handed out again"
    assert not set(range(messages)) - acked - returned.keys(), "not acknowledged, and gone"
    assert max(returned.values(), default=1) == 1


async def _consume_until_killed(address: str, acked: Acked, random: Random) -> None:
    """Pop small batches and acknowledge about half of each until the node is killed."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: pop_pb2_grpc.PopServiceAsyncStub = pop_pb2_grpc.PopServiceStub(channel)
        request = pb.PopRequest(group=GROUP, filter="kill/+/value", messages_max=20, invisible_ms=2_000, wait_ms=500)
        try:
            while True:
                popped = list((await stub.Pop(request)).messages)
                chosen = [message for message in popped if random.random() < 0.5]
                answer = await stub.Ack(pb.AckRequest(group=GROUP, handles=[message.handle for message in chosen]))
                for message, status in zip(chosen, answer.statuses, strict=True):
                    if status.code == pb.OK:
                        acked.note(int(message.body))
        except grpc.aio.AioRpcError as error:
            if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                raise
        finally:
            acked.end()


@pytest.mark.timeout(60 + 15 * ROUNDS)
async def test_a_transaction_that_was_committed_is_seen_once_and_one_that_was_not_never(node: NodeProcess) -> None:
    random = Random(13)
    ends: dict[int, bool | None] = {}
    """Answers of the node: committed, rolled back, or none because it was killed."""
    for _ in range(ROUNDS):
        node.start()
        answered = Acked()
        ending = asyncio.create_task(_transact_until_killed(node.addresses["pop"], ends, answered, random))
        await answered.reach(random.randrange(1, 150))
        node.kill()
        await ending
    node.start()
    async with grpc.aio.insecure_channel(node.addresses["pop"]) as channel:
        stub: pop_pb2_grpc.PopServiceAsyncStub = pop_pb2_grpc.PopServiceStub(channel)
        pending = list((await stub.ListTransactions(pb.ListTransactionsRequest())).transactions)
        open_numbers = {int(transaction.message.body) for transaction in pending}
        rolled = [pb.TransactionEnd(transaction_handle=transaction.transaction_handle) for transaction in pending]
        answer = await stub.EndTransactions(pb.EndTransactionsRequest(ends=rolled))
        assert all(status.code == pb.OK for status in answer.statuses)
    counts = Counter(int(message.body) for message in await _pop_all(node.addresses["pop"], GROUP, wait_ms=2_000))
    committed = {number for number, commit in ends.items() if commit}
    unanswered = {number for number, commit in ends.items() if commit is None}
    assert not committed - counts.keys(), "committed, and gone"
    assert max(counts.values(), default=1) == 1, "one commit, two messages"
    assert counts.keys() <= committed | unanswered, "rolled back, and delivered"
    assert open_numbers <= unanswered, "ended, and open again"


async def _transact_until_killed(address: str, ends: dict[int, bool | None], answered: Acked, random: Random) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: pop_pb2_grpc.PopServiceAsyncStub = pop_pb2_grpc.PopServiceStub(channel)
        try:
            while True:
                numbers = range(len(ends), len(ends) + 5)
                ends.update(dict.fromkeys(numbers))
                halves = [pb.Message(topic="kill/1/value", body=b"%d" % number, producer="kill") for number in numbers]
                sent = await stub.Send(pb.SendRequest(messages=halves))
                chosen = [random.random() < 0.5 for _ in numbers]
                wanted = [
                    pb.TransactionEnd(transaction_handle=result.transaction_handle, commit=commit)
                    for result, commit in zip(sent.results, chosen, strict=True)
                ]
                await stub.EndTransactions(pb.EndTransactionsRequest(ends=wanted))
                for number, commit in zip(numbers, chosen, strict=True):
                    ends[number] = commit
                    answered.note(number)
        except grpc.aio.AioRpcError as error:
            if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                raise
        finally:
            answered.end()
