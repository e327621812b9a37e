"""`python -m bench pop`: POP over gRPC, beside Redis streams, NATS JetStream, beanstalkd and Apache RocketMQ.

Two client processes and the node share the machine. Penstock answers Send, Pop and Ack after fdatasync. `bench.peers` says what
the other brokers promise. The brokers take turns as in `bench.mqtt`. beanstalkd syncs each job by itself, so it gets fewer
messages.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import grpc
import grpc.aio

from bench import clients, startworker
from bench.clients import Clients, Publisher, Span, Stubs, Tick, check, connected, rate_of
from bench.peers import (
    OURS,
    BrokerFailed,
    BrokerProcess,
    NotInstalled,
    beanstalkd,
    memory_of,
    nats_server,
    path_of,
    processor_s,
    redis_server,
)
from bench.rocketmq import ROCKETMQ, check_rocketmq, rocketmq_work
from bench.rows import Figures, Goal, Measure, Row, RowFailed, Setting, add_beside, beside, find_rivals, parser_of, run
from bench.trees import THIS
from penstock.pop.proto import pop_pb2 as pb

RIVAL = "Redis"
NATS = "NATS"
BEANSTALKD_SHARE = 20
"""The broker gets one of so many messages."""

ROCKETMQ_SHARE = 4
"""Its client sends one message a call, so it gets one of so many messages."""

BATCH = 256
BATCH_LARGE = 1_024
BATCH_SMALL = 32
MESSAGES = 200_000
QUICK = 2_000

DEADLINES = 100_000
DEADLINES_AFTER_S = 8
"""Seconds for popping the messages, and for measuring publishes before the deadlines."""
BASELINE_S = 3

IN_FLIGHT = 1_000_000

_runs = itertools.count()
"""Numbers that make the names of each run unique."""


# --- the brokers, and how each sends and drains -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Broker:
    """A running broker, and its client jobs."""

    peer: BrokerProcess
    address: str
    share: int
    """The broker gets one of so many messages."""
    send: Callable[[Clients, str, int, int], list[Span]]
    """Sends messages to a queue. Arguments: client processes, name of the queue, messages a batch, number of messages."""
    drain: Callable[[Clients, str, int, int], list[Span]]
    """Takes and acknowledges all messages. Arguments: client processes, name of the queue, messages a batch, consumers."""


def _penstock(peer: BrokerProcess) -> Broker:
    address = peer.addresses["pop"]

    def drain(processes: Clients, name: str, batch: int, consumers: int) -> list[Span]:
        # Services that work on each message use small batches and the public client, so this row does, too.
        job = clients.pop_with_client if batch == BATCH_SMALL else clients.pop_and_ack
        return processes.run(job, address, name, f"{name}/#", batch, consumers)

    return Broker(
        peer,
        address,
        1,
        lambda processes, name, batch, count: processes.run(clients.send, address, name, batch, count, 8),
        drain,
    )


def _redis(peer: BrokerProcess) -> Broker:
    address = f"{peer.host}:{peer.port}"

    def drain(processes: Clients, name: str, batch: int, consumers: int) -> list[Span]:
        clients.redis_group(address, name)
        return processes.run(clients.redis_drain, address, name, batch)

    def send(processes: Clients, name: str, batch: int, count: int) -> list[Span]:
        return processes.run(clients.redis_send, address, name, batch, count)

    return Broker(peer, address, 1, send, drain)


def _beanstalkd(peer: BrokerProcess) -> Broker:
    address = f"{peer.host}:{peer.port}"
    return Broker(
        peer,
        address,
        BEANSTALKD_SHARE,
        lambda processes, name, batch, count: processes.run(clients.beanstalk_send, address, name, batch, count),
        lambda processes, name, batch, consumers: processes.run(clients.beanstalk_drain, address, name, batch),
    )


def _prepare(setting: Setting) -> None:
    """Start the client processes, and skip brokers that aren't installed, with a line that says so."""
    setting.options.clients = Clients(0.05) if setting.options.quick else Clients()
    programs: dict[str, Callable[[], object]] = {
        RIVAL: _find_redis,
        NATS: _find_nats,
        "beanstalkd": partial(path_of, "beanstalkd"),
        ROCKETMQ: check_rocketmq,
    }
    find_rivals(setting, programs)


def _find_redis() -> None:
    path_of("redis-server")
    if find_spec("redis") is None or find_spec("hiredis") is None:
        raise NotInstalled("Its client is not installed (pip install 'redis[hiredis]').")


def _find_nats() -> None:
    path_of("nats-server")
    if find_spec("nats") is None:
        raise NotInstalled("Its client is not installed (pip install nats-py).")


@contextmanager
def _node(setting: Setting) -> Iterator[Broker]:
    with setting.node() as node:
        yield _penstock(node)


@contextmanager
def _brokers(setting: Setting) -> Iterator[list[Broker]]:
    """Run Penstock and its rivals."""
    starts: dict[str, tuple[Callable[[], AbstractContextManager[BrokerProcess]], Callable[[BrokerProcess], Broker]]] = {
        "Redis": (lambda: redis_server(setting.fresh()), _redis),
        "beanstalkd": (lambda: beanstalkd(setting.fresh()), _beanstalkd),
    }
    with ExitStack() as stack:
        brokers = [stack.enter_context(_node(setting))]
        for name in (each for each in setting.options.rivals if each in starts):
            start, broker_of = starts[name]
            brokers.append(broker_of(stack.enter_context(setting.broker(name, start))))
        yield brokers


def _whole(spans: Sequence[Span], count: int) -> float:
    """Return the rate, if as many messages were taken as were sent.

    Raises:
        RowFailed: more or fewer messages were taken.
    """
    came = sum(span.messages for span in spans)
    if came != count:
        raise RowFailed(f"{count:,} messages were sent, and {came:,} were taken.")
    return rate_of(spans)


# --- the rows of the table: rates -------------------------------------------------------------------------------------


def _drained(setting: Setting, brokers: Sequence[Broker], batch: int, consumers: int) -> dict[str, float]:
    """Send messages to each broker and drain it. Return the rates of draining."""
    rates = {}
    for broker in brokers:
        name, count = f"queue{next(_runs)}", setting.count(MESSAGES, QUICK) // broker.share
        broker.send(setting.options.clients, name, BATCH, count)
        rates[broker.peer.name] = _whole(broker.drain(setting.options.clients, name, batch, consumers), count)
    return rates


def _consumed(setting: Setting, node: Broker, batch: int) -> float:
    """Send messages and consume them with one stream in each client process. Return the rate."""
    name, count = f"queue{next(_runs)}", setting.count(MESSAGES, QUICK)
    node.send(setting.options.clients, name, BATCH, count)
    return _whole(
        setting.options.clients.run(clients.consume, node.address, name, f"{name}/#", batch, clients.PROCESSES), count
    )


def _send(setting: Setting) -> Generator[Figures]:
    with _brokers(setting) as brokers:
        for is_warm in itertools.chain((False,), itertools.repeat(True)):
            rates = {}
            for broker in brokers:
                count = setting.count(MESSAGES, QUICK) // broker.share
                rates[broker.peer.name] = rate_of(broker.send(setting.options.clients, f"queue{next(_runs)}", BATCH, count))
            if is_warm:
                yield beside("send", rates)


def _send_single(setting: Setting) -> Generator[Figures]:
    count = setting.count(20_000, 500)
    with _node(setting) as node:
        while True:
            run = setting.options.clients.run
            shared = run(clients.send_singly, node.address, f"queue{next(_runs)}", count, 64)
            alone = run(clients.send, node.address, f"queue{next(_runs)}", 1, count, 64)
            yield beside("send_single", {OURS: rate_of(shared)}) | beside("send_calls", {OURS: rate_of(alone)})


def _pop(figure: str, batch: int, consumers: int) -> Measure:
    def measure(setting: Setting) -> Generator[Figures]:
        with _brokers(setting) as brokers:
            _drained(setting, brokers, batch, consumers)  # warms up
            while True:
                yield beside(figure, _drained(setting, brokers, batch, consumers))

    return measure


def _consume(setting: Setting) -> Generator[Figures]:
    """Measure streams, and in turn with them Redis."""
    with _brokers(setting) as (node, *others):
        rivals = [broker for broker in others if broker.peer.name == RIVAL]
        _consumed(setting, node, BATCH)
        while True:
            figures: Figures = {}
            for figure, batch in (("consume", BATCH), ("consume_small", BATCH_SMALL)):
                rates = {OURS: _consumed(setting, node, batch), **_drained(setting, rivals, batch, clients.PROCESSES)}
                figures |= beside(figure, rates, RIVAL)
            yield figures


def _many(setting: Setting) -> Generator[Figures]:
    """Measure few consumers and many consumers in turn."""
    with _node(setting) as node:
        _drained(setting, [node], BATCH_SMALL, 16)
        while True:
            few, many = (_drained(setting, [node], BATCH_SMALL, consumers)[OURS] for consumers in (16, 1_000))
            yield {"many": (1 - many / few) * 100, f"many@{OURS}": many}


@contextmanager
def _workplaces(setting: Setting) -> Iterator[dict[str, Callable[[str, int, int], float]]]:
    """Run the rivals that have a client for one process: each with what fills a queue, drains it, and returns the rate.

    The arguments are name of the queue, messages a batch, and number of messages.
    """

    def redis(address: str, name: str, batch: int, count: int) -> float:
        setting.options.clients.run(clients.redis_send, address, name, BATCH, count)
        clients.redis_group(address, name)
        return _whole(setting.options.clients.run(clients.redis_work, address, name, batch), count)

    def nats(address: str, name: str, batch: int, count: int) -> float:
        clients.nats_fill(address, name, BATCH, count)
        return _whole(setting.options.clients.run(clients.nats_work, address, name, batch), count)

    with ExitStack() as stack:
        places: dict[str, Callable[[str, int, int], float]] = {}
        if RIVAL in setting.options.rivals:
            peer = stack.enter_context(setting.broker(RIVAL, lambda: redis_server(setting.fresh())))
            places[RIVAL] = partial(redis, f"{peer.host}:{peer.port}")
        if NATS in setting.options.rivals:
            peer = stack.enter_context(setting.broker(NATS, lambda: nats_server(setting.fresh())))
            places[NATS] = partial(nats, peer.addresses["nats"])
        yield places


def _work(setting: Setting) -> Generator[Figures]:
    """Measure a worker of one process whose handlers do nothing.

    Redis and NATS get one process with one consumer that takes batches and handles nothing. The NATS consumer doesn't wait for
    the answers to its acknowledgements. RocketMQ gets its Java client's PushConsumer with 32 threads, and a quarter of the
    messages.
    """
    with _node(setting) as node, _workplaces(setting) as places:
        while True:
            figures: Figures = {}
            for figure, batch in (("worker", BATCH), ("worker_single", 0)):
                name, count = f"queue{next(_runs)}", setting.count(MESSAGES, QUICK)
                node.send(setting.options.clients, name, BATCH, count)
                spans = setting.options.clients.run(clients.work, node.address, name, f"{name}/#", batch, count)
                rates = {OURS: _whole(spans, count)}
                if batch:
                    rates |= {rival: drain(name, batch, count) for rival, drain in places.items()}
                elif ROCKETMQ in setting.options.rivals:  # Its worker has no batches.
                    rates[ROCKETMQ] = rocketmq_work(name, count // ROCKETMQ_SHARE, in_order=False)
                figures |= beside(figure, rates)
            yield figures


def _start(setting: Setting) -> Generator[Figures]:
    """Measure `penstock worker` from its start to its first message, which waits for it."""
    with _node(setting) as node:
        while True:
            name = f"queue{next(_runs)}"
            node.send(setting.options.clients, name, 1, 1)
            command = [*THIS.command, "worker", "bench.startworker:app"]
            environment = {**THIS.environment, "PENSTOCK_TARGET": node.address, startworker.FILTER: f"{name}/#"}
            began_s = time.monotonic()
            with subprocess.Popen(command, cwd=THIS.root, env=environment, stdout=subprocess.PIPE) as process:
                assert process.stdout is not None
                line = process.stdout.readline()
                started_s = time.monotonic() - began_s
                spent_s = processor_s(process.pid)
                process.terminate()
            if line != b"handled\n":
                raise RowFailed(f"The worker ended with status {process.returncode} before it handled a message.")
            yield {"start": started_s, "start_processor": spent_s}


def _in_order(setting: Setting) -> Generator[Figures]:
    """Measure one consumer of one message group, and one message a pop beside many.

    The others get one consumer as for `worker`. It is in order, but the messages after a failed one don't wait for it.
    """
    with _node(setting) as node, _workplaces(setting) as places:
        while True:
            figures: Figures = {}
            for figure, batch, number in (("fifo", BATCH, 50_000), ("fifo_single", 1, 2_000)):
                name, count = f"queue{next(_runs)}", setting.count(number, QUICK // 10)
                clients.create_in_order(node.address, name)
                clients.send_in_order(node.address, name, count, BATCH)
                spans = setting.options.clients.run(clients.drain_in_order, node.address, name, name, batch)
                rates = {OURS: _whole(spans, count)}
                rates |= {rival: drain(name, batch, count) for rival, drain in places.items()}
                if batch > 1 and ROCKETMQ in setting.options.rivals:
                    rates[ROCKETMQ] = rocketmq_work(name, count // ROCKETMQ_SHARE, in_order=True)
                figures |= beside(figure, rates)
            yield figures


# --- latency ----------------------------------------------------------------------------------------------------------


def _quantiles(figure: str, seconds: list[float]) -> Figures:
    ordered = sorted(seconds)
    return {f"{figure}_{name}": ordered[int(len(ordered) * part)] * 1000 for name, part in (("p50", 0.5), ("p99", 0.99))}


def _latency(setting: Setting) -> Generator[Figures]:
    """Measure pops of one available message, one after the other."""
    count = setting.count(2_000, 50)

    async def work(stubs: Stubs, name: str) -> list[float]:
        request = pb.PopRequest(group=name, filter=f"{name}/#", messages_max=1)
        taken: list[float] = []
        for _ in range(count):
            began_s = time.perf_counter()
            popped = await stubs.pop.Pop(request)
            taken.append(time.perf_counter() - began_s)
            handles = [message.handle for message in popped.messages]
            check((await stubs.pop.Ack(pb.AckRequest(group=name, handles=handles))).statuses)
            if not handles:
                raise RowFailed("A message that was sent did not arrive.")
        return taken

    with _node(setting) as node:
        while True:
            name = f"queue{next(_runs)}"
            node.send(setting.options.clients, name, BATCH, count)
            yield _quantiles("latency", connected(node.address, lambda stubs, name=name: work(stubs, name)))  # type: ignore[misc]


def _arrival(setting: Setting) -> Generator[Figures]:
    """Measure the time from a PUBACK to the answer of a waiting pop. The answer may come first, which counts as 0."""
    count = setting.count(500, 20)

    async def work(stubs: Stubs, peer: BrokerProcess, name: str) -> list[float]:
        publisher = await Publisher.connect(peer.host, peer.port)
        request = pb.PopRequest(group=name, filter=f"{name}/#", messages_max=1, wait_ms=10_000, start=pb.LATEST)
        groups = pb.GroupRequest(group=name)
        await stubs.groups.CreateGroup(pb.CreateGroupRequest(group=name, filter=f"{name}/#", start=pb.LATEST))
        taken: list[float] = []

        async def answered() -> tuple[pb.PopResponse, float]:
            response = await stubs.pop.Pop(request)
            return response, time.perf_counter()

        for _ in range(count):
            poll = asyncio.create_task(answered())
            while not (await stubs.groups.DescribeGroups(groups)).groups[0].waiting:  # noqa: ASYNC110  # no event reports it
                await asyncio.sleep(0)
            await publisher.publish(f"{name}/t".encode(), clients.BODY)
            acked_s = time.perf_counter()
            response, answered_s = await poll
            taken.append(max(answered_s - acked_s, 0.0))
            handles = [message.handle for message in response.messages]
            check((await stubs.pop.Ack(pb.AckRequest(group=name, handles=handles))).statuses)
        await publisher.close()
        return taken

    with _node(setting) as node:
        while True:
            name = f"queue{next(_runs)}"
            taken = connected(node.address, lambda stubs, name=name: work(stubs, node.peer, name))  # type: ignore[misc]
            yield _quantiles("arrival", taken)


# --- deadlines, and messages in flight --------------------------------------------------------------------------------


async def _describe(stubs: Stubs, group: str) -> pb.GroupDescription:
    return (await stubs.groups.DescribeGroups(pb.GroupRequest(group=group))).groups[0]


def _deadlines(setting: Setting) -> Generator[Figures]:
    """Pop many messages so that all their deadlines are at one instant, and publish before and after it."""
    count = setting.count(DEADLINES, QUICK)
    after_s, baseline_s = setting.count(DEADLINES_AFTER_S, 3), setting.count(BASELINE_S, 1)

    async def work(stubs: Stubs, name: str, publish: Callable[[float], list[list[Tick]]]) -> Figures:
        at_s = time.time() + after_s
        at_monotonic_s = time.monotonic() + after_s
        left, first_ms, last_ms = count, 0, 0
        publishing = asyncio.create_task(asyncio.to_thread(publish, at_monotonic_s + baseline_s))
        while left > 0:
            request = pb.PopRequest(group=name, filter=f"{name}/#", messages_max=1024)
            request.invisible_ms = int((at_s - time.time()) * 1000)
            popped = await stubs.pop.Pop(request)
            if not popped.messages:
                raise RowFailed(f"{left:,} of {count:,} messages that were sent did not arrive.")
            left -= len(popped.messages)
            first_ms = min(first_ms or popped.messages[0].visible_at_ms, popped.messages[0].visible_at_ms)
            last_ms = max(last_ms, popped.messages[0].visible_at_ms)
        if time.time() + baseline_s > at_s:
            raise RowFailed(f"Popping {count:,} messages took {after_s - at_s + time.time():.1f} s, which is too long.")
        await asyncio.sleep(first_ms / 1000 - time.time())
        while (await _describe(stubs, name)).retries < count:
            if time.time() > at_s + 60:
                raise RowFailed(f"{(await _describe(stubs, name)).retries:,} of {count:,} were revived within a minute.")
            await asyncio.sleep(0.01)
        revived_s = time.time() - first_ms / 1000
        ticks = list(itertools.chain(*await publishing))
        before = _sent(ticks, at_monotonic_s - baseline_s, at_monotonic_s - 0.5)
        meanwhile = _sent(ticks, at_monotonic_s, at_monotonic_s + max(revived_s, 1.0))
        return {
            "deadlines": revived_s,
            "deadlines_spread": last_ms - first_ms,
            "deadlines_publish": meanwhile / before * 100,
            f"deadlines_publish@{OURS}": before,
        }

    with _node(setting) as node:
        while True:
            name = f"queue{next(_runs)}"
            node.send(setting.options.clients, name, BATCH, count)

            def publish(end_s: float) -> list[list[Tick]]:
                ticks: list[list[Tick]] = setting.options.clients.run(clients.send_until, node.address, "others", BATCH, end_s)
                return ticks

            yield connected(node.address, lambda stubs, name=name, publish=publish: work(stubs, name, publish))  # type: ignore[misc]


def _sent(ticks: Sequence[Tick], from_s: float, to_s: float) -> float:
    """Return the messages per second in a period."""
    return sum(tick.messages for tick in ticks if from_s <= tick.at_s < to_s) / (to_s - from_s)


def _in_flight(setting: Setting) -> Generator[Figures]:
    """Pop a million messages without an ack, kill the node, and start it again."""
    count, data_dir = setting.count(IN_FLIGHT, QUICK), setting.fresh()
    name = "flight"
    settings = pb.GroupSettings(in_flight_max=count + 1)
    request = pb.CreateGroupRequest(group=name, filter=f"{name}/#", settings=settings)

    async def create(stubs: Stubs) -> None:
        await stubs.groups.CreateGroup(request)

    async def describe(stubs: Stubs) -> pb.GroupDescription:
        return await _describe(stubs, name)

    with setting.node(data_dir) as node:
        address = node.addresses["pop"]
        connected(address, create)
        _penstock(node).send(setting.options.clients, name, BATCH, count)
        before = memory_of(node.pid).anonymous
        spans = setting.options.clients.run(clients.pop_and_ack, address, name, f"{name}/#", 1024, 4, is_acked=False)
        _whole(spans, count)
        after = memory_of(node.pid).anonymous
        os.kill(node.pid, signal.SIGKILL)
    began_s = time.monotonic()
    with setting.node(data_dir) as node:
        ready_s = time.monotonic() - began_s
        kept = connected(node.addresses["pop"], describe).in_flight
        if kept != count:
            raise RowFailed(f"{kept:,} of {count:,} messages are in flight after the restart.")
        yield {
            "in_flight": after / 1024,
            "in_flight_each": (after - before) * 1024 / count,
            "in_flight_start": ready_s,
            "in_flight_started": memory_of(node.pid).anonymous / 1024,
        }


ROWS: dict[str, Row] = {
    "send": Row(_send, (Goal("send", f"send, {BATCH} a batch, durable", "msg/s", 150_000),)),
    "send-single": Row(
        _send_single,
        (
            Goal("send_single", "send, 64 tasks with one message each, through the client", "msg/s", 4_000),
            Goal("send_calls", "... each with a gRPC call of its own", "msg/s"),
        ),
    ),
    "pop": Row(_pop("pop", BATCH, 8), (Goal("pop", f"pop + ack, {BATCH} a batch, 8 consumers", "msg/s", 120_000),)),
    "pop-small": Row(
        _pop("pop_small", BATCH_SMALL, 16),
        (Goal("pop_small", f"pop + ack, {BATCH_SMALL} a batch, 16 consumers", "msg/s", 40_000),),
    ),
    "consume": Row(
        _consume,
        (
            Goal("consume", f"stream (Consume), {BATCH} a response, beside Redis", "x", 1),
            Goal("consume_small", f"stream (Consume), {BATCH_SMALL} a response, beside Redis", "x", 1),
        ),
    ),
    "worker": Row(
        _work,
        (
            Goal("worker", f"worker, 32 handlers with batches of up to {BATCH}, one process", "msg/s", 100_000),
            Goal("worker_single", "... with one message a call", "msg/s", 30_000),
        ),
    ),
    "start": Row(
        _start,
        (
            Goal("start", "penstock worker: from its start to its first message", "s", 0.5, is_most=True),
            Goal("start_processor", "... processor time of that", "s"),
        ),
    ),
    "fifo": Row(
        _in_order,
        (
            Goal("fifo", f"pop + ack in FIFO order, one message group, {BATCH} a batch", "msg/s", 20_000),
            Goal("fifo_single", "... one message a pop", "msg/s"),
        ),
    ),
    "latency": Row(
        _latency,
        (
            Goal("latency_p50", "pop of an available message: p50", "ms"),
            Goal("latency_p99", "... p99", "ms", 3, is_most=True),
        ),
    ),
    "arrival": Row(
        _arrival,
        (
            Goal("arrival_p50", "waiting pop, from the PUBACK to its answer: p50", "ms"),
            Goal("arrival_p99", "... p99", "ms", 5, is_most=True),
        ),
    ),
    "deadlines": Row(
        _deadlines,
        (
            Goal("deadlines", f"{DEADLINES:,} deadlines at one instant: time until all are revived", "s", 2, is_most=True),
            Goal("deadlines_spread", "... time from the first deadline to the last", "ms"),
            Goal("deadlines_publish", "... rate of publishes meanwhile, of the rate before", "%", 50),
        ),
    ),
    "many": Row(
        _many,
        (Goal("many", f"1,000 consumers, {BATCH_SMALL} a batch: slowdown against 16", "%", 30, is_most=True),),
    ),
    "in-flight": Row(
        _in_flight,
        (
            Goal("in_flight", f"{IN_FLIGHT:,} messages in flight: memory without the mapped log", "MiB"),
            Goal("in_flight_each", "... memory of each message", "B"),
            Goal("in_flight_start", "... time of a start after kill -9", "s"),
            Goal("in_flight_started", "... memory after that start", "MiB"),
        ),
    ),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and return the exit status."""
    parser = parser_of("pop", "Measure POP over gRPC beside Redis streams, NATS JetStream, beanstalkd and RocketMQ.", ROWS)
    add_beside(parser, (RIVAL, NATS, "beanstalkd", ROCKETMQ))
    return run(parser, ROWS, arguments, failures=(BrokerFailed, RuntimeError, grpc.RpcError), prepare=_prepare)
