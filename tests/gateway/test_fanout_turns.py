"""A commit with many deliveries goes on in later turns: in order, completely, and while subscriptions come and go."""

from __future__ import annotations

import pytest

from penstock.gateway.delivery import fanout
from penstock.gateway.delivery.fanout import AT_ONCE_MAX
from penstock.gateway.protocol.encode import encode_publish
from penstock.gateway.protocol.packets import PUBLISH, UNSUBACK
from penstock.gateway.protocol.reasons import ReasonCode
from penstock.gateway.transport import overtime
from penstock.store.queues.lightqueue import LightQueue
from tests.gateway.brokers import StartBroker
from tests.gateway.packet_cases import unsubscribe
from tests.gateway.wire import Broker, Client
from tests.waiting import until

MEMBERS = 3 * AT_ONCE_MAX


@pytest.fixture
def no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every turn be over at once, so that all that can wait does."""
    monkeypatch.setattr(overtime, "TURN_S", 0.0)


async def members_of(broker: Broker, count: int, qos: int = 0) -> list[Client]:
    """Return clients that subscribe to the same filter."""
    clients = [await broker.connect(f"c{number}") for number in range(count)]
    for client in clients:
        assert await client.subscribe(("a/#", qos)) == [qos]
    return clients


async def bodies(client: Client, count: int) -> list[int]:
    return [int((await client.message()).body) for _ in range(count)]


@pytest.mark.parametrize("qos", [0, 1])
async def test_every_member_gets_the_batches_of_several_commits_in_order(no_time: None, broker: Broker, qos: int) -> None:
    clients = await members_of(broker, MEMBERS, qos)
    store = broker.node.store
    for number in range(10):
        store.append_message(store.router.route(b"a/b"), b"%d" % number, b"", qos)
        store.commit()
    assert broker.node.gateway.fanouts.waiting == 10
    for client in clients:
        assert await bodies(client, 10) == list(range(10))
    assert broker.node.gateway.fanouts.waiting == 0
    assert all(one.live for client in broker.node.gateway.clients.values() for one in client.subscriptions)


async def test_few_deliveries_do_not_wait_for_a_turn_that_others_have_used_up(no_time: None, broker: Broker) -> None:
    await members_of(broker, MEMBERS)
    few = await broker.connect("few")
    await few.subscribe(("b", 1))
    store, gateway = broker.node.store, broker.node.gateway
    store.append_message(store.router.route(b"a"), b"7", b"", 0)
    store.commit()
    assert gateway.fanouts.waiting == 1
    await until(lambda: not gateway.fanouts.waiting)
    store.append_message(store.router.route(b"b"), b"8", b"", 1)
    assert gateway.overtime.is_over()
    store.commit()
    assert gateway.fanouts.waiting == 0
    assert await bodies(few, 1) == [8]


async def test_one_commit_to_many_members_does_not_hold_up_others(no_time: None, broker: Broker) -> None:
    clients = await members_of(broker, MEMBERS)
    honest = await broker.connect("honest")
    for number in range(50):
        await clients[-1].subscribe((f"+/{number}/#", 0), (f"a/{number}/+", 0))
    store = broker.node.store
    for number in range(50):
        store.append_message(store.router.route(b"a/%d/x" % number), b"x", b"", 0)
    store.commit()
    assert broker.node.gateway.fanouts.waiting > 0
    assert await honest.drained() == []
    received = 0
    while received < 150:
        received += (await clients[-1].receive())[0] == PUBLISH


async def test_a_client_that_unsubscribes_or_leaves_while_a_batch_waits_disturbs_nobody(no_time: None, broker: Broker) -> None:
    clients = await members_of(broker, MEMBERS)
    store = broker.node.store
    store.append_message(store.router.route(b"a"), b"7", b"", 0)
    store.commit()
    assert broker.node.gateway.fanouts.waiting == 1
    broker.feed(f"c{MEMBERS - 1}", unsubscribe(5, b"a/#"))
    broker.connection(f"c{MEMBERS - 2}").close("the test closes it", ReasonCode.ADMINISTRATIVE_ACTION)
    for client in clients[:-2]:
        assert await bodies(client, 1) == [7]
    assert (await clients[-1].receive())[0] == UNSUBACK
    assert broker.node.gateway.fanouts.waiting == 0


async def test_a_client_that_subscribes_while_a_batch_waits_gets_only_what_comes_later(no_time: None, broker: Broker) -> None:
    await members_of(broker, MEMBERS)
    store = broker.node.store
    store.append_message(store.router.route(b"a"), b"1", b"", 0)
    store.commit()
    late = await broker.connect("late")
    await late.subscribe(("a/#", 0))
    store.append_message(store.router.route(b"a"), b"2", b"", 0)
    assert await bodies(late, 1) == [2]


async def test_more_batches_than_may_wait_are_read_from_the_queue(
    no_time: None, monkeypatch: pytest.MonkeyPatch, start_broker: StartBroker
) -> None:
    monkeypatch.setattr(fanout, "WAITING_MAX", 3)
    broker = await start_broker()
    clients = await members_of(broker, MEMBERS)
    store = broker.node.store
    for number in range(20):
        store.append_message(store.router.route(b"a"), b"%d" % number, b"", 0)
        store.commit()
    assert broker.node.gateway.fanouts.waiting == 3
    for client in clients:
        assert await bodies(client, 20) == list(range(20))
    await until(lambda: not broker.node.gateway.fanouts.waiting)


async def test_lagging_subscriptions_of_one_client_take_turns_with_other_clients(no_time: None, broker: Broker) -> None:
    client, honest = await broker.connect("many"), await broker.connect("honest")
    await client.subscribe(*((f"+/{number}", 0) for number in range(300)))
    connection = broker.connection("many")
    for one in connection.subscriptions:
        one.fall_behind()
    publisher = await broker.connect("publisher")
    await publisher.send(*(encode_publish(b"a/%d" % number, b"%d" % number) for number in range(300)))
    await publisher.drained()
    connection.pump_soon()
    await honest.drained()
    assert sorted(await bodies(client, 300)) == list(range(300))


@pytest.mark.parametrize("turn_s", [0.0, 60.0])
async def test_subscriptions_that_another_one_sends_for_read_nothing(
    monkeypatch: pytest.MonkeyPatch, broker: Broker, turn_s: float
) -> None:
    monkeypatch.setattr(overtime, "TURN_S", turn_s)
    read: list[str] = []
    read_from = LightQueue.read_from

    def noted(queue: LightQueue, *about: int) -> tuple[int, bytes]:
        read.append(queue.filter)
        return read_from(queue, *about)

    filters = ["/".join("+" if number >> at & 1 else str(at) for at in range(6)) for number in range(64)]
    clients = [await broker.connect_5(f"c{number}") for number in range(3)]
    for client in clients:
        await client.subscribe(*((one, 1) for one in filters))
    await until(lambda: all(one.live for client in broker.node.gateway.clients.values() for one in client.subscriptions))
    monkeypatch.setattr(LightQueue, "read_from", noted)
    store = broker.node.store
    for number in range(5):
        store.append_message(store.router.route(b"0/1/2/3/4/5"), b"%d" % number, b"", 1)
        store.commit()
    for client in clients:
        assert [(await client.message()).body for _ in range(5)] == [b"%d" % number for number in range(5)]
        assert await client.drained() == []
    assert set(read) == {filters[0]}
