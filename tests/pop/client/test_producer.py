"""Producers: batches, back-pressure, and sending again where that is safe."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from penstock import (
    Client,
    ClientClosed,
    InvalidTopic,
    NodeUnavailable,
    NotPermitted,
    OutgoingMessage,
    Overloaded,
    Producer,
    Security,
    SendOutcomeUnknown,
    SendReceipt,
    SyncClient,
)
from penstock.pop.proto import pop_pb2 as pb
from penstock.pop.proto.pop_pb2_grpc import PopServiceStub
from tests.pop.wiring import FILTER, GROUP, TOPIC, Node
from tests.waiting import WAIT_S_MAX, until
from tests.worker.accessfile import access_file

Send = Callable[[pb.SendRequest], Awaitable[pb.SendResponse]]


class LossyWire:
    """Passes requests to a node, and loses answers or requests as a test says.

    Parameters:
        client: A client of the node.
    """

    def __init__(self, client: Client) -> None:
        self._stub = PopServiceStub(client._channel)
        self.losses: list[str] = []
        """What happens to the next calls: "answer" or "request" is lost, or the node is "overloaded"."""
        self.calls: list[int] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def send(self, request: pb.SendRequest) -> pb.SendResponse:
        self.calls.append(len(request.messages))
        await self.gate.wait()
        loss = self.losses.pop(0) if self.losses else ""
        if loss == "request":
            raise NodeUnavailable("the request was lost")
        if loss == "overloaded":
            raise Overloaded("too much at once")
        response: pb.SendResponse = await self._stub.Send(request, timeout=WAIT_S_MAX)
        if loss == "answer":
            raise NodeUnavailable("the answer was lost")
        return response


@pytest.fixture
def wire(client: Client) -> LossyWire:
    return LossyWire(client)


async def stored(client: Client) -> list[bytes]:
    return [message.body for message in await client.pop(FILTER, group=GROUP, messages_max=1_000)]


async def test_posted_messages_leave_in_order_and_a_lost_answer_doubles_none(client: Client, wire: LossyWire) -> None:
    wire.losses = ["answer", "request", "overloaded", "answer"]
    async with Producer(wire.send, timeout=60.0, batch_max=40) as producer:
        for number in range(100):
            await producer.post(OutgoingMessage(topic=TOPIC, body=b"%d" % number))
        await producer.flush()
        assert producer.unanswered == producer.unanswered_bytes == 0
    assert await stored(client) == [b"%d" % number for number in range(100)]
    assert wire.calls[-1] == 20


async def test_without_an_id_a_message_is_not_sent_again_and_the_error_says_so(client: Client, wire: LossyWire) -> None:
    async with Producer(wire.send, timeout=60.0, idempotent=False) as producer:
        wire.losses = ["answer"]
        one, other = await asyncio.gather(
            producer.send(TOPIC, b"plain"), producer.send(TOPIC, b"named", deduplication_id="n"), return_exceptions=True
        )
        assert isinstance(one, SendOutcomeUnknown)
        assert "has no deduplication id" in str(one)
        assert not isinstance(other, BaseException)
        assert other.repeated
        wire.losses = ["overloaded"]
        await producer.send(TOPIC, b"refused first")
    assert await stored(client) == [b"plain", b"named", b"refused first"]


async def test_an_error_concerns_its_message_only_and_flush_raises_it(client: Client, wire: LossyWire) -> None:
    producer = Producer(wire.send, timeout=60.0, retry_timeout=0.0)
    good = await producer.post(OutgoingMessage(topic=TOPIC, body=b"good"))
    bad = await producer.post(OutgoingMessage(topic="a/#"))
    with pytest.raises(InvalidTopic):
        await producer.flush()
    assert isinstance(bad.exception(), InvalidTopic)
    assert good.result().message_id
    await producer.flush()
    wire.losses = ["answer"]
    with pytest.raises(SendOutcomeUnknown, match="retry_timeout"):
        await producer.send(TOPIC, b"late")
    await producer.aclose()
    with pytest.raises(ClientClosed):
        await producer.send(TOPIC)


@pytest.mark.parametrize("bounds", [{"buffer_max": 2}, {"buffer_bytes_max": 2_100}])
async def test_a_full_buffer_holds_up_its_senders_in_turn(client: Client, wire: LossyWire, bounds: dict[str, int]) -> None:
    producer = Producer(wire.send, timeout=60.0, idempotent=False, **bounds)  # type: ignore[arg-type]
    wire.gate.clear()
    posts = [
        asyncio.create_task(producer.post(OutgoingMessage(topic=TOPIC, body=b"%d" % number * 1_000))) for number in range(5)
    ]
    await asyncio.sleep(0.01)
    assert [post.done() for post in posts] == [True, True, False, False, False]
    assert producer.unanswered == 2
    posts[3].cancel()
    wire.gate.set()
    await asyncio.wait(posts)
    await producer.aclose()
    assert [body[:1] for body in await stored(client)] == [b"0", b"1", b"2", b"4"]


async def test_lingering_gathers_a_batch_until_it_is_full_or_flushed(client: Client, wire: LossyWire) -> None:
    async with Producer(wire.send, timeout=60.0, linger=60.0, batch_max=3) as producer:
        for number in range(4):
            await producer.post(OutgoingMessage(topic=TOPIC, body=b"%d" % number))
            await asyncio.sleep(0.001)
        await until(lambda: wire.calls == [3])
        await producer.flush()
        assert wire.calls == [3, 1]


async def test_only_a_batch_that_is_not_full_lingers(client: Client, wire: LossyWire) -> None:
    async with Producer(wire.send, timeout=60.0, linger=60.0, batch_max=3) as producer:
        posted = [await producer.post(OutgoingMessage(topic=TOPIC, body=b"%d" % number)) for number in range(7)]
        async with asyncio.timeout(WAIT_S_MAX):
            await asyncio.wait(posted[:6])
        assert not posted[6].done()
        await producer.flush()
    assert wire.calls == [3, 3, 1]


@pytest.mark.parametrize("bounds", [{"buffer_max": 2}, {"buffer_bytes_max": 2_100}])
async def test_a_full_buffer_does_not_linger(client: Client, wire: LossyWire, bounds: dict[str, int]) -> None:
    producer = Producer(wire.send, timeout=60.0, linger=60.0, **bounds)  # type: ignore[arg-type]
    async with producer, asyncio.timeout(WAIT_S_MAX):
        for number in range(5):
            await producer.post(OutgoingMessage(topic=TOPIC, body=b"%d" % number * 1_000))
        await producer.flush()
    assert len(await stored(client)) == 5


async def test_a_node_that_restarts_gets_everything_once(tmp_path: Path) -> None:
    node = Node(tmp_path / "data")
    await node.start()
    port = node.port
    async with Client(node.target) as client, client.producer(batch_max=10) as producer:
        for number in range(200):
            await producer.post(OutgoingMessage(topic=TOPIC, body=b"%d" % number))
            if number == 100:
                await node.stop()
                node = Node(tmp_path / "data")
                await node.start(port)
        await producer.flush()
        assert await stored(client) == [b"%d" % number for number in range(200)]
    await node.stop()


async def test_threads_share_a_producer(node: Node) -> None:
    def work() -> None:
        with SyncClient(node.target) as client, client.producer(linger=0.005) as producer:
            receipts = [producer.post(OutgoingMessage(topic=TOPIC, body=b"%d" % number)) for number in range(50)]
            assert producer.send(TOPIC, b"last", deduplication_id="last").message_id
            assert producer.send(TOPIC, b"last", deduplication_id="last").repeated
            producer.flush()
            assert sorted(receipt.result(0).message_id for receipt in receipts)[0] == receipts[0].result().message_id
            failed = producer.post(OutgoingMessage(topic="a/#"))
            with pytest.raises(InvalidTopic):
                producer.flush()
            assert isinstance(failed.exception(0), InvalidTopic)

    await asyncio.to_thread(work)


async def test_a_closed_client_takes_its_producers_along(node: Node) -> None:
    client = Client(node.target)
    producer = client.producer(linger=60.0)
    posted = await producer.post(OutgoingMessage(topic=TOPIC, body=b"x"))
    await client.aclose()
    assert posted.result().message_id
    with pytest.raises(ClientClosed):
        await producer.send(TOPIC)


async def test_a_topic_that_is_not_permitted_does_not_stop_the_others_of_its_call(tmp_path: Path) -> None:
    access, security = access_file(tmp_path / "access.toml", "s3cret", write="+/public"), Security(token="s3cret")
    topics = ["1/public", "2/secret", "3/public", "3/public"]
    async with Node(tmp_path / "data", access=access) as node, Client(node.target, security=security) as client:
        producer = client.producer()
        receipts = [await producer.post(OutgoingMessage(topic=topic)) for topic in topics]
        posted = await asyncio.gather(*receipts, return_exceptions=True)
        sent = await asyncio.gather(*map(client.send, topics), return_exceptions=True)
    for answers in (posted, sent):
        assert [isinstance(answer, NotPermitted) for answer in answers] == [False, True, False, False]
        assert all(isinstance(answer, SendReceipt) for answer in (answers[0], *answers[2:]))
