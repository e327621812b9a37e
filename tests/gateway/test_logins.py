"""Logins: plugins authenticate apart from everything else, in parallel, and no more at a time than they can answer in time."""

from __future__ import annotations

import threading

import pytest

from penstock.gateway.auth import logins
from penstock.gateway.auth import plugins as plugins_of_gateway
from penstock.gateway.auth.held_logins import CONNECT_BYTES_MAX
from penstock.gateway.auth.login import Answer, Login
from penstock.gateway.auth.login_queue import LoginQueue
from penstock.gateway.options import AccessOptions, GatewayOptions, ListenerOptions
from penstock.gateway.protocol.connect import Connect
from penstock.gateway.protocol.encode import encode_publish
from penstock.gateway.protocol.packets import CONNACK, PUBACK
from penstock.gateway.protocol.reasons import ReasonCode
from tests.gateway.brokers import StartBroker
from tests.gateway.logins import BUSY, PASSWORD, USER, login, plugins
from tests.gateway.moving_time import pass_time
from tests.gateway.packet_cases import connect
from tests.gateway.scripted_plugins import Script
from tests.gateway.wire import CLEAN, Broker, Client
from tests.waiting import until

ACCEPTED = (CONNACK, 0, b"\0\0")


@pytest.fixture(autouse=True)
def _no_niceness(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let threads take logins at once also where other tests keep all processors busy."""
    for module in (logins, plugins_of_gateway):
        monkeypatch.setattr(module, "LOGIN_NICENESS", 0)


def waiting(broker: Broker) -> int:
    return broker.node.gateway.authorizer.logins.queue.waiting


def running(broker: Broker) -> int:
    return broker.node.gateway.authorizer.logins.queue.running


async def blocked_logins(broker: Broker, script: Script, count: int) -> list[Client]:
    """Send logins of which the plugins block as many as they have threads for; the others wait."""
    script.may_answer.clear()
    script.blocks = True
    asked = len(script.asked)
    threads = broker.node.gateway.authorizer.logins.queue._threads
    clients = [await login(broker, f"c{number}", "ann", "secret") for number in range(min(count, threads))]
    await until(lambda: len(script.asked) - asked == running(broker) == len(clients))  # or too many would wait
    clients += [await login(broker, f"c{number}", "ann", "secret") for number in range(threads, count)]
    await until(lambda: waiting(broker) + running(broker) == count)
    return clients


# --- apart from everything else -----------------------------------------------------------------------------------------


async def test_a_flood_of_logins_holds_up_no_message(start_broker: StartBroker, script: Script) -> None:
    broker = await start_broker(access=plugins("Blocker", "Topics", plugin_timeout_ms=60_000))
    publisher, watcher = await broker.connect("publisher"), await broker.connect("watcher")
    await watcher.subscribe(("a/#", 1))
    script.only_logins = True
    await blocked_logins(broker, script, 20)
    for number in range(20):
        await publisher.publish(f"a/{number}", b"x", 1)
        assert (await watcher.message()).topic == f"a/{number}"
    script.may_answer.set()


async def test_each_thread_has_its_own_instance_of_a_plugin_that_may_run_in_parallel(
    start_broker: StartBroker, script: Script
) -> None:
    broker = await start_broker(access=plugins("ParallelBlocker", authentication_threads=3))
    clients = await blocked_logins(broker, script, 5)
    await until(lambda: len(script.asked) == 3)
    assert (running(broker), waiting(broker)) == (3, 2)
    script.may_answer.set()
    for client in clients:
        assert await client.receive() == ACCEPTED
    threads = {thread for _, thread in script.calls}
    assert len(threads) == 3
    assert {(instance, thread) for instance, thread in script.calls} == set(script.built), "an instance belongs to one thread"


async def test_any_other_plugin_has_one_instance_on_a_thread_of_its_own(start_broker: StartBroker, script: Script) -> None:
    broker = await start_broker(access=plugins("Blocker", "Topics", authentication_threads=3))
    clients = [await broker.connect(f"c{number}") for number in range(5)]
    await clients[0].publish("a", b"", 1)
    assert set(script.calls) == set(script.built)
    assert len(script.built) == 1
    assert script.topic_threads.isdisjoint(thread for _, thread in script.built)


async def test_a_plugin_that_decides_about_topics_too_does_so_with_the_same_instance(
    start_broker: StartBroker, script: Script
) -> None:
    broker = await start_broker(access=plugins("Both"))
    client = await broker.connect_5("c", b"ann", b"x", flags=CLEAN | USER | PASSWORD)
    assert await client.publish_with("of/ann", b"x", {}, 1) == 0
    assert await client.publish_with("of/bob", b"x", {}, 1) == ReasonCode.NOT_AUTHORIZED


async def test_a_plugin_that_waits_for_a_network_is_asked_about_many_logins_at_once(
    start_broker: StartBroker, script: Script
) -> None:
    broker = await start_broker(access=plugins("Users"))
    script.may_answer.clear()
    clients = [await login(broker, f"c{number}", "ann", "secret") for number in range(30)]
    await until(lambda: running(broker) == 30)
    script.may_answer.set()
    for client in clients:
        assert await client.receive() == ACCEPTED


# --- too many -----------------------------------------------------------------------------------------------------------


async def test_more_logins_than_may_wait_are_told_that_the_server_is_busy(start_broker: StartBroker, script: Script) -> None:
    broker = await start_broker(access=plugins("Blocker", questions_max=2, held_ms=0))
    clients = await blocked_logins(broker, script, 3)
    assert await (await login(broker, "d", "ann", "x")).ended() == [BUSY]
    new = await broker.connect_5("e", b"ann", b"x", flags=CLEAN | USER | PASSWORD, accepted=False)
    assert (await new.connack())[0] == ReasonCode.SERVER_BUSY
    script.may_answer.set()
    for client in clients:
        assert await client.receive() == ACCEPTED
    assert broker.node.gateway.authorizer.questions.outcomes == {("connect", "overload"): 2, ("connect", "allowed"): 3}


async def test_a_login_for_which_there_is_no_room_is_held_and_accepted_when_there_is(
    start_broker: StartBroker, script: Script
) -> None:
    broker = await start_broker(access=plugins("Blocker", questions_max=2))
    clients = await blocked_logins(broker, script, 3)
    clients.append(await login(broker, "held", "ann", "secret"))
    await until(lambda: broker.node.gateway.authorizer.logins.queue.held == 1)
    script.may_answer.set()
    for client in clients:
        assert await client.receive() == ACCEPTED


async def test_a_login_that_was_held_for_long_enough_is_told_that_the_server_is_busy(
    start_broker: StartBroker, script: Script
) -> None:
    broker = await start_broker(access=plugins("Blocker", questions_max=2, held_ms=15_000), connect_timeout_ms=60_000)
    queue = broker.node.gateway.authorizer.logins.queue
    await blocked_logins(broker, script, 3)
    held = [await login(broker, "d", "ann", "x"), await login(broker, "e", "ann", "x")]
    await until(lambda: queue.held == 2)
    held[1].writer.close()
    await until(lambda: queue.held == 1)
    pass_time(broker.node.gateway, 14)
    held.append(await login(broker, "f", "ann", "x"))
    await until(lambda: queue.held == 2)
    pass_time(broker.node.gateway, 1)
    assert await held[0].ended() == [BUSY]
    assert (queue.held, queue.waiting) == (1, 2), "the other one has waited for a second"
    script.may_answer.set()


async def test_a_login_that_is_held_gives_way_when_its_connection_is_needed(start_broker: StartBroker, script: Script) -> None:
    broker = await start_broker(access=plugins("Blocker", questions_max=1))
    await blocked_logins(broker, script, 2)
    held = await login(broker, "held", "ann", "x")
    await until(lambda: broker.node.gateway.authorizer.logins.queue.held == 1)
    assert broker.node.gateway._shed()
    assert await held.ended() == [BUSY]
    script.may_answer.set()


def test_no_more_logins_are_held_than_a_quarter_of_the_connections() -> None:
    assert GatewayOptions().logins_held_max == 10_000
    assert GatewayOptions(connections_max=400).logins_held_max == 100
    small = ListenerOptions(name="small", connections_max=40)
    assert GatewayOptions(listeners=(small,)).logins_held_max == 10
    assert GatewayOptions(access=AccessOptions(held_max=7)).logins_held_max == 7


async def test_a_login_that_has_waited_for_too_long_is_told_so_and_never_asked(
    start_broker: StartBroker, script: Script
) -> None:
    broker = await start_broker(access=plugins("Blocker"), connect_timeout_ms=10_000)
    _, late = await blocked_logins(broker, script, 2)
    pass_time(broker.node.gateway, 11)
    assert await late.ended() == [BUSY]
    script.may_answer.set()
    assert await (await login(broker, "other", "ann", "secret")).receive() == ACCEPTED
    assert script.asked == [("connect", "c0"), ("connect", "other")]


@pytest.mark.parametrize("ending", ["reset", "fin"])
async def test_a_login_whose_client_has_gone_is_never_asked(start_broker: StartBroker, script: Script, ending: str) -> None:
    broker = await start_broker(access=plugins("Blocker"))
    _, gone = await blocked_logins(broker, script, 2)
    if ending == "reset":
        gone.reset()
    else:
        gone.writer.close()
    await until(lambda: waiting(broker) == 0)
    script.may_answer.set()
    assert await (await login(broker, "other", "ann", "secret")).receive() == ACCEPTED
    assert script.asked == [("connect", "c0"), ("connect", "other")]


async def test_a_plugin_that_blocks_for_ever_is_given_up(start_broker: StartBroker, script: Script) -> None:
    broker = await start_broker(access=plugins("Blocker", plugin_timeout_ms=50))
    (client,) = await blocked_logins(broker, script, 1)
    pass_time(broker.node.gateway, 2)
    assert await client.ended() == [BUSY]
    assert broker.node.gateway.authorizer.questions.outcomes == {("connect", "timeout"): 1}
    script.may_answer.set()


async def test_what_a_client_sends_after_its_connect_waits_with_it(start_broker: StartBroker, script: Script) -> None:
    broker = await start_broker(access=plugins("Blocker"))
    script.may_answer.clear()
    script.blocks = True
    client = await broker.dial()
    messages = b"".join(encode_publish(b"a", b"x" * 1000, 1, packet_id=number) for number in range(1, 41))
    await client.send(connect(CLEAN, b"c"), messages[:700])
    await until(lambda: script.asked == [("connect", "c")])
    await client.send(messages[700:])
    await until(lambda: broker.listener("mqtt").bytes_in > 16_000)
    script.may_answer.set()
    assert await client.receive() == ACCEPTED
    assert [await client.receive() for _ in range(40)] == [(PUBACK, number) for number in range(1, 41)]
    assert [message.body for message in broker.stored()] == [b"x" * 1000] * 40


# --- the queue ----------------------------------------------------------------------------------------------------------


class Line:
    """A queue with a clock that the test moves, and threads that the test plays."""

    def __init__(
        self, *, threads: int = 1, patience_s: float = 10, waiting_max: int = 1000, hold_s: float = 0, held_max: int = 0
    ) -> None:
        self.now_s = 1000.0
        self.queue = LoginQueue(patience_s, waiting_max, hold_s, held_max)
        self.queue.start(lambda: self.now_s, threads)
        self.woken = 0
        self.answers: list[tuple[str, Answer, str]] = []

    def login(self, source: str = "", size: int = 100) -> Login:
        wish = Connect(4, "c", True, 0, None, None, None, size=size)
        return Login(wish, None, source, None, lambda answer, outcome: self.answers.append((source, answer, outcome)))

    def add(self, *sources: str) -> list[Login]:
        """Add logins, and return those that were refused."""
        found = [self.queue.add(self.login(source)) for source in sources]
        return [each for each in found if each is not None]

    def take(self) -> Login | None:
        return self.queue.take(self.wake)

    def wake(self) -> None:
        self.woken += 1

    def serve(self, count: int, seconds_each: float) -> list[str]:
        """Take and finish logins one after the other, and return their sources."""
        served = []
        for _ in range(count):
            login = self.take()
            assert login is not None
            self.now_s += seconds_each
            self.queue.finish(login)
            served.append(login.source)
        return served


def test_sources_take_turns() -> None:
    line = Line()
    line.add("a", "a", "a", "b", "c", "c")
    assert line.serve(6, 0.1) == ["a", "b", "c", "a", "c", "a"]


def test_as_many_may_wait_as_can_be_answered_in_time() -> None:
    line = Line(patience_s=10)
    line.add(*["a"] * 100)
    assert line.queue.waiting_max == 1000, "the rate is not known yet"
    line.serve(5, 0.5)
    assert line.queue.per_s == pytest.approx(2)
    assert line.queue.waiting_max == 20
    assert line.queue.wait_s == pytest.approx(47.5)
    assert len(line.queue.shed()) == 75
    assert line.queue.wait_s == pytest.approx(10)
    assert len(line.add("a")) == 1


def test_the_rate_follows_what_is_measured() -> None:
    line = Line(patience_s=1000)
    line.add(*["a"] * 200)
    line.serve(20, 0.1)
    assert line.queue.per_s == pytest.approx(10)
    line.serve(50, 0.2)
    assert line.queue.per_s == pytest.approx(5, rel=0.05)


def test_the_rate_falls_while_nothing_is_answered() -> None:
    line = Line()
    line.add(*["a"] * 100)
    line.serve(20, 0.1)
    line.take()
    line.now_s += 5
    assert line.queue.per_s < 2
    assert line.queue.waiting_max < 20


def test_the_rate_is_not_measured_while_the_threads_keep_up() -> None:
    line = Line()
    for _ in range(50):
        line.add("a")
        line.serve(1, 0.1)
        line.now_s += 60
    assert line.queue.per_s == 0
    assert line.queue.waiting_max == 1000


def test_a_full_queue_refuses_the_newest_of_the_source_with_the_most() -> None:
    line = Line(waiting_max=5)
    line.add("a", "a", "a", "b")
    assert line.add("b") == []
    assert [each.source for each in line.add("c")] == ["a"]
    assert [each.source for each in line.add("a", "b", "c")] == ["a", "b", "c"]
    assert line.queue.waiting == 5


def test_a_login_that_is_held_keeps_its_place_until_there_is_room() -> None:
    line = Line(waiting_max=2, hold_s=15, held_max=100)
    assert line.add("a", "a", "b", "c", "d") == []
    assert (line.queue.waiting, line.queue.held) == (2, 3), "one of a source with more gives way to one with none"
    assert line.serve(5, 0.1) == ["a", "b", "a", "c", "d"]
    assert (line.queue.waiting, line.queue.held) == (0, 0)
    assert line.add("a", "a", "a", "a") == []
    assert line.queue.wait_s == pytest.approx(0.4), "those that are held are waited for, too"


def test_a_login_is_held_for_its_time_and_then_refused_with_no_more_than_a_number_at_once() -> None:
    line = Line(waiting_max=1, hold_s=15, held_max=100)
    line.add(*"abcde")
    line.now_s += 14
    line.add("f")
    assert line.queue.release(10) == []
    line.now_s += 1
    assert [each.source for each in line.queue.release(2)] == ["b", "c"]
    assert [each.source for each in line.queue.release(10)] == ["d", "e"]
    assert line.queue.held == 1


def test_no_more_logins_are_held_than_may_be_and_none_with_a_large_connect() -> None:
    line = Line(waiting_max=1, hold_s=15, held_max=2)
    assert [each.source for each in line.add(*"abcde")] == ["d", "e"]
    assert line.queue.give_way() is not None
    large = line.login("f", CONNECT_BYTES_MAX + 1)
    assert line.queue.add(large) is large
    assert line.queue.add(line.login("g", CONNECT_BYTES_MAX)) is None
    assert [line.queue.give_way() is not None for _ in range(3)] == [True, True, False]


def test_a_login_that_is_held_is_forgotten_when_its_client_has_gone() -> None:
    line = Line(waiting_max=1, hold_s=15, held_max=2)
    gone = line.login("b")
    line.add("a")
    assert line.queue.add(gone) is None
    line.add("c")
    line.queue.drop(gone)
    assert line.queue.held == 1
    assert line.serve(2, 0.1) == ["a", "c"]


def test_logins_that_the_rate_no_longer_allows_are_held() -> None:
    line = Line(patience_s=10, hold_s=15, held_max=70)
    line.add(*["a"] * 100)
    line.serve(5, 0.5)
    assert len(line.queue.shed()) == 5
    assert (line.queue.waiting, line.queue.held) == (20, 70)


def test_a_login_that_is_overdue_is_not_taken() -> None:
    line = Line(patience_s=10)
    line.add("a")
    line.now_s += 6
    line.add("b")
    line.now_s += 6
    login = line.take()
    assert login is not None
    assert login.source == "b"
    assert [each.source for each in line.queue.expire()] == ["a"]
    assert line.queue.expire() == []


def test_overdue_logins_are_found_without_a_thread_that_takes_them() -> None:
    line = Line(patience_s=10)
    line.add("a", "b")
    line.now_s += 11
    assert len(line.queue.expire()) == 2
    assert line.queue.waiting == 0


def test_a_login_that_was_dropped_is_not_taken_or_answered() -> None:
    line = Line()
    gone = line.login("a")
    line.queue.add(gone)
    line.queue.drop(gone)
    gone.answer(True)
    assert (line.take(), line.answers, line.queue.waiting) == (None, [], 0)
    line.queue.drop(gone)


def test_a_thread_that_found_nothing_is_woken_once() -> None:
    line = Line()
    assert line.take() is None
    assert line.take() is None
    line.add("a", "a")
    assert line.woken == 1


def test_threads_and_the_loop_share_a_queue() -> None:
    line = Line(waiting_max=10_000)
    served: list[Login] = []

    def work() -> None:
        while len(served) < 4000:
            login = line.take()
            if login is not None:
                served.append(login)
                line.queue.finish(login)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(4000):
        line.add(f"source {number % 7}")
    for thread in threads:
        thread.join(30)
    assert len(set(served)) == 4000
    assert (line.queue.waiting, line.queue.running) == (0, 0)
