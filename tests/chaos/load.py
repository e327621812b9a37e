"""Everything that a node can do, at the same time: the devices and services of one round, and the audits of the log."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from random import Random
from typing import Any

import orjson

from penstock import Client, PopError
from tests.chaos.devices import Device, Look, Publisher, Subscriber
from tests.chaos.ledger import Key, Ledger, key_of
from tests.chaos.nodeprocess import ServeProcess
from tests.chaos.services import Numbers, Services, now_ms

RETAINED_TOPICS = 3
STILL_S_MAX = 25.0
"""The drain at the end fails if nothing arrives for so long."""

SEGMENT_BYTES = 1 << 20
"""Size of a segment of the log."""

RETAINED_S_MAX = 5.0

AUDITED = ("mqtt/#", "keep/#", "pop/#", "fifo/#", "tx/#", "delay/#")
DUE_MS = 300
"""A delayed message may be missing for so long after it is due: the node may just have started."""


def below(prefix: str, last: str = "") -> Callable[[str], bool]:
    """Return a test of topics, for the filters `PREFIX/#` and `PREFIX/+/LAST`."""
    return lambda topic: topic.startswith(f"{prefix}/") and topic.endswith(f"/{last}" if last else "")


class Load:
    """The clients of a round.

    Parameters:
        body_bytes: bounds of the sizes of the bodies that MQTT publishers send.
        retention_bytes: of the node; 0 if retention deletes nothing in a round.
    """

    def __init__(self, ledger: Ledger, random: Random, *, body_bytes: tuple[int, int], retention_bytes: int = 0) -> None:
        self.ledger = ledger
        self.random = random
        self.retention_bytes = retention_bytes
        self._start = 0
        """Where the log began at the last look."""
        ledger.has_retention = bool(retention_bytes)
        self.numbers = Numbers()
        self.publishers = [
            Publisher(
                f"{'v5' if is_v5 else 'v3'}q{qos}",
                ledger,
                Random(random.random()),
                is_v5=is_v5,
                qos=qos,
                topic=f"mqtt/{qos}",
                window=random.randint(2, 12),
                body_bytes=body_bytes,
            )
            for is_v5 in (False, True)
            for qos in (1, 2)
        ]
        self.keeper = Publisher(
            "keeper",
            ledger,
            Random(random.random()),
            is_v5=False,
            qos=1,
            topic="keep",
            topics=RETAINED_TOPICS,
            window=2,
            retain=True,
        )
        self.publishers.append(self.keeper)
        self.subscribers = [
            self._subscriber(f"sub-{'v5' if is_v5 else 'v3'}q{qos}", "mqtt/#", is_v5, qos, below("mqtt"))
            for is_v5 in (False, True)
            for qos in (1, 2)
        ]
        self.subscribers[0].vanishing = 0.03
        self.subscribers[3].pace_s = 0.02
        team = ledger.subscriber("the shared subscription", below("mqtt", "2"), is_ordered=False)
        self.team = [
            Subscriber(
                f"team-{n}",
                ledger,
                Random(random.random()),
                is_v5=bool(n),
                qos=1,
                topic_filter="$share/team/mqtt/+/2",
                received=team,
            )
            for n in range(2)
        ]
        self.devices: list[Device] = [*self.publishers, *self.subscribers, *self.team]
        tests = {"work": below("mqtt"), "ordered": below("fifo"), "late": below("mqtt", "1")}
        self.groups = {name: ledger.group(name, takes, is_fifo=name == "ordered") for name, takes in tests.items()}
        self.groups["rest"] = ledger.group("rest", lambda topic: topic.startswith(("pop/", "tx/", "delay/")))
        self.services: Services | None = None
        self._running: list[asyncio.Task[None]] = []
        self._serving: asyncio.Task[None] | None = None
        self._audits = 0

    def _subscriber(self, name: str, topic_filter: str, is_v5: bool, qos: int, takes: Callable[[str], bool]) -> Subscriber:
        received = self.ledger.subscriber(name, takes)
        random = Random(self.random.random())
        return Subscriber(name, self.ledger, random, is_v5=is_v5, qos=qos, topic_filter=topic_filter, received=received)

    # --- lives of the node ------------------------------------------------------------------------------------------

    async def prepare(self, node: ServeProcess) -> None:
        """Create groups and sessions, so that each of them exists before the first message."""
        await Services(node.addresses["pop"], self.ledger, self.numbers, Random(0), self.groups).create_groups()
        self._running = [asyncio.create_task(device.run()) for device in self.devices]
        for device in self.devices:
            device.port = node.port("mqtt")
            if isinstance(device, Subscriber):
                device.up.set()
        async with asyncio.timeout(STILL_S_MAX):
            while not all(one.is_subscribed for one in (*self.subscribers, *self.team)):
                self.check_tasks()
                await asyncio.sleep(0.005)

    def connect(self, node: ServeProcess) -> None:
        """Let all clients use a node that is ready."""
        for device in self.devices:
            device.port = node.port("mqtt")
            device.up.set()
        self.services = Services(node.addresses["pop"], self.ledger, self.numbers, Random(self.random.random()), self.groups)
        self._serving = asyncio.create_task(self.services.run())

    async def disconnect(self) -> None:
        """End the calls of services. Devices notice by themselves that the node is gone, and wait for `connect`."""
        for device in self.devices:
            device.up.clear()
        if self._serving is not None:
            assert self.services is not None
            self.services.is_over = True
            while not self._serving.done():
                self._serving.cancel()
                await asyncio.wait((self._serving,), timeout=1)
            serving, self._serving = self._serving, None
            if not serving.cancelled():
                serving.result()

    def check_tasks(self) -> None:
        """Raise what a client's task has raised, which is a defect of these tests."""
        for task in (*self._running, *filter(None, [self._serving])):
            if task.done() and not task.cancelled():
                task.result()

    async def close(self) -> None:
        await self.disconnect()
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    # --- audits -----------------------------------------------------------------------------------------------------

    async def audit(self, node: ServeProcess) -> None:
        """Read the whole log as a new group, and compare it with what was acknowledged."""
        name = f"audit-{self._audits}"
        self._audits += 1
        acked = self._last_retained()
        self._check_retained(acked, await self._retained(node, len(acked)))
        expected = self.ledger.expected(lambda topic: True, now_ms=now_ms() - DUE_MS)
        self.ledger.audited(await self._read(node, name, expected), expected)

    async def audit_copy(self, node: ServeProcess, expected: list[Key], withheld: set[Key]) -> None:
        """Audit a node on a copy of the data directory, which must have `expected` at least, and nothing of `withheld`."""
        ledger = self.ledger
        before = ledger.copies, ledger.copies_ever.copy(), ledger.log_start, self._start
        ledger.audited(await self._read(node, "audit-copy", expected), expected, withheld)
        ledger.copies, ledger.copies_ever, ledger.log_start, self._start = before

    async def _read(self, node: ServeProcess, name: str, expected: list[Key]) -> list[tuple[str, str, bytes]]:
        """Return id, topic and body of all messages that a new group gets, or at least of those that are expected."""
        found: dict[str, tuple[str, str, bytes]] = {}
        deadline = time.monotonic() + STILL_S_MAX
        async with Client(node.addresses["pop"], timeout=10.0, close_timeout=0.001) as client:
            for topic_filter in AUDITED:
                await client.groups.create(name, topic_filter)
            missing = set(expected)
            while True:
                for topic_filter in AUDITED:
                    while popped := await client.pop(topic_filter, group=name, messages_max=1_000, invisible=600.0):
                        for message in popped:
                            found[message.message_id] = (message.message_id, message.topic, message.body)
                            key = key_of(message.body)
                            if key is not None:
                                missing.discard(key)
                if not missing or await self._is_filled(client, name) or time.monotonic() > deadline:
                    break
                await asyncio.sleep(0.02)
            await client.groups.delete(name)
        await self.look_up_start(node)
        return list(found.values())

    async def look_up_start(self, node: ServeProcess) -> None:
        """Tell the ledger where the log begins by now, and check that retention has not dropped more than it should."""
        log = (await _state(node))["log"]
        was, start, end = self._start, log["start"], log["end"]
        self._start = start
        # Nobody gets what has expired, although its segments go only when what is still needed has been copied. After a start
        # it may be there again, but who has passed it goes on.
        self.ledger.log_start = max(start, log["expires_before"], self.ledger.log_start)
        if start > was and (not self.retention_bytes or end - was <= self.retention_bytes):
            self.ledger.report("lost", f"retention has dropped what was before {start}, with {end - was} bytes of log in all")

    async def has_room(self, node: ServeProcess) -> bool:
        """Return whether a node stores everything."""
        return bool((await _state(node))["disk"]["store"] == "open")

    async def _is_filled(self, client: Client, name: str) -> bool:
        """Return whether the group has nothing left to read: no backfill is under way, and two looks find nothing."""
        await asyncio.sleep(0.3)
        for topic_filter in AUDITED:
            if any(one.visible for one in await client.groups.describe(name, topic_filter)):
                return False
        try:  # a queue that is being filled can't be reset
            for topic_filter in AUDITED:
                await client.groups.reset(name, topic_filter=topic_filter, end="latest")
        except PopError:
            return False
        return True

    async def _retained(self, node: ServeProcess, topics: int) -> dict[str, Key]:
        """Return the names of the retained messages by topic, as a new client gets them."""
        look = Look(f"look-{self._audits}", self.ledger, Random(0), topic_filter="keep/#")
        look.port = node.port("mqtt")
        look.up.set()
        task = asyncio.create_task(look.run())
        deadline = time.monotonic() + RETAINED_S_MAX
        while len(look.bodies) < topics and node.is_running and time.monotonic() < deadline:  # noqa: ASYNC110 - it may never come
            await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if not node.is_running:
            raise ConnectionResetError("the node has ended while its retained messages were read")
        return {topic: key for topic, body in look.bodies.items() if (key := key_of(body)) is not None}

    def _last_retained(self) -> dict[str, Key]:
        """Return the last acknowledged message of each topic that is retained, without topics whose last one was destroyed."""
        last: dict[str, Key] = {}
        for key, one in self.ledger.publications.items():
            if key.writer == self.keeper.client_id and one.must_exist:
                last[one.topic] = max(key, last.get(one.topic, key))
        return {topic: key for topic, key in last.items() if key not in self.ledger.excused}

    def _check_retained(self, acked: dict[str, Key], found: dict[str, Key]) -> None:
        for topic, key in acked.items():
            if topic not in found:
                self.ledger.report("lost", f"the retained message of {topic} is gone; {key} was acknowledged")
            elif found[topic] < key:
                self.ledger.report("lost", f"{found[topic]} is retained on {topic}, although {key} was acknowledged")

    # --- the end ----------------------------------------------------------------------------------------------------

    async def drain(self, node: ServeProcess) -> None:
        """Stop producing, and wait until every reader has what it must have, or until nothing comes any more."""
        assert self.services is not None
        for publisher in self.publishers:
            publisher.is_publishing = False
            publisher.vanishing = 0.0
        for subscriber in (*self.subscribers, *self.team):
            subscriber.vanishing = 0.0
        self.services.stop_producing()
        await self._still(lambda: sum(len(one.under_way) for one in self.publishers))
        for one in self.publishers:
            if one.under_way:
                self.ledger.report("unanswered", f"{one.client_id} still waits for answers to {len(one.under_way)} messages")
        await asyncio.sleep(0.1)
        last_due_ms = max((one.due_ms for one in self.ledger.publications.values()), default=0)
        await asyncio.sleep(max(min(last_due_ms - now_ms(), 3_000) / 1000 + DUE_MS / 1000, 0))
        await self.services.end_transactions()
        await self.audit(node)
        if not self.ledger.problems:
            await self._still(self._waiting)

    def _waiting(self) -> int:
        ledger, now = self.ledger, now_ms() - DUE_MS
        received = [one for one in ledger.received.values() if one.is_judged]
        consumed = [one for one in ledger.consumed.values() if one.is_judged]
        return sum(len(ledger.missing_to(one, now_ms=now)) for one in received) + sum(
            len(ledger.waits_for(one, now_ms=now)) for one in consumed
        )

    async def _still(self, waiting: Callable[[], int]) -> None:
        """Return when nothing waits, or when what waits has not become less for `STILL_S_MAX`."""
        least, since = waiting(), time.monotonic()
        while least and time.monotonic() < since + STILL_S_MAX:
            self.check_tasks()
            await asyncio.sleep(0.05)
            now = waiting()
            if now < least:
                least, since = now, time.monotonic()


async def _state(node: ServeProcess) -> dict[str, Any]:
    """Return the state of a node, as its admin listener tells it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", node.port("admin"))
    writer.write(b"GET /api/v1/state HTTP/1.0\r\n\r\n")
    answer = await reader.read()
    writer.close()
    found: dict[str, Any] = orjson.loads(answer.partition(b"\r\n\r\n")[2])
    return found
