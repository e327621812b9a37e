"""POP clients under load: producers and consumers that use everything, and tell the ledger."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from random import Random

from penstock import Client, PopError
from penstock.pop.client.groupsettings import group_settings
from penstock.pop.client.message import Message
from penstock.pop.errors import AlreadyFired, BatchFailed, HandleExpired, StatusError
from tests.chaos.ledger import Consumed, Key, Ledger, body_of

TIMEOUT_S = 5.0
INVISIBLE_S = 1.5
MESSAGE_GROUPS = 4


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class Numbers:
    """The next number of each writer, for as long as a round lasts."""

    def __init__(self) -> None:
        self._next: dict[str, int] = {}

    def key(self, writer: str) -> Key:
        number = self._next.get(writer, 0)
        self._next[writer] = number + 1
        return Key(writer, number)


class Services:
    """The tasks of one life of the node. `run` ends when it is cancelled; the next life gets new services.

    Parameters:
        address: of the node's gRPC listener.
        groups: the groups of the ledger, by name.
    """

    def __init__(self, address: str, ledger: Ledger, numbers: Numbers, random: Random, groups: dict[str, Consumed]) -> None:
        self.address = address
        self.ledger = ledger
        self.numbers = numbers
        self.random = random
        self.groups = groups
        self._producing = asyncio.Event()
        self._producing.set()
        self.is_careless = True
        """Whether consumers also return, forget and give up messages, besides acknowledging them."""
        self.is_over = False
        """True once the services are to end. A call that fails in the moment of its cancellation may hide the cancellation."""
        self.late_after_s = random.uniform(0.1, 1.0)

    def stop_producing(self) -> None:
        """Send nothing more, and from now on acknowledge whatever comes."""
        self._producing.clear()
        self.is_careless = False

    async def run(self) -> None:
        async with Client(self.address, timeout=TIMEOUT_S, close_timeout=0.001) as client, asyncio.TaskGroup() as tasks:
            for work in (self.send, self.send_ordered, self.transact, self.delay):
                tasks.create_task(self._again_and_again(client, work))
            tasks.create_task(self._again_and_again(client, self.redrive))
            for group, topic_filter in FILTERS:
                for _ in range(2 if group == "work" else 1):
                    tasks.create_task(self._consuming(client, group, topic_filter))

    async def _consuming(self, client: Client, group: str, topic_filter: str) -> None:
        async def consume(client: Client) -> None:
            await self.consume(client, group, topic_filter)

        if group == "late":
            await asyncio.sleep(self.late_after_s)
        await self._again_and_again(client, consume)

    async def _again_and_again(self, client: Client, work: Callable[[Client], Awaitable[None]]) -> None:
        while not self.is_over:
            try:
                await work(client)
            except PopError:  # no answer, or refused, such as for a full disk; the ledger knows what is certain
                await asyncio.sleep(0.05)

    async def create_groups(self) -> None:
        """Create the groups that need settings of their own. The late group is created by its first pop."""
        async with Client(self.address, timeout=TIMEOUT_S, close_timeout=0.001) as client:
            await client.groups.create("work", "mqtt/#", settings=group_settings(attempts_max=3, backoff=(0.05,)))
            await client.groups.create("ordered", "fifo/#", settings=group_settings(fifo=True, attempts_max=1_000))
            for topic_filter in ("pop/#", "tx/#", "delay/#"):
                await client.groups.create("rest", topic_filter, settings=group_settings(attempts_max=1_000))

    # --- producing --------------------------------------------------------------------------------------------------

    async def _pause(self) -> None:
        await asyncio.sleep(self.random.uniform(0.002, 0.03))
        await self._producing.wait()

    async def send(self, client: Client) -> None:
        await self._pause()
        await asyncio.gather(*(self._send(client, self.numbers.key("pop")) for _ in range(4)))

    async def _send(self, client: Client, key: Key) -> None:
        topic = f"pop/{key.number % 3}"
        self.ledger.sending(key, topic)
        await client.send(topic, body_of(key, self.random.randint(30, 400)))
        self.ledger.acked(key)

    async def send_ordered(self, client: Client) -> None:
        await self._pause()
        key = self.numbers.key("fifo")
        group = key.number % MESSAGE_GROUPS
        self.ledger.sending(key, f"fifo/{group}")
        await client.send(f"fifo/{group}", body_of(key, 60), message_group=f"g{group}")
        self.ledger.acked(key)

    async def transact(self, client: Client) -> None:
        await self._pause()
        key = self.numbers.key("tx")
        self.ledger.sending(key, "tx/1", withheld=None)
        transaction = await client.transactions.begin("tx/1", body_of(key, 60), producer="chaos")
        self.ledger.acked(key)
        publication = self.ledger.publications[key]
        if self.random.random() < 0.7:
            await transaction.commit()
            publication.withheld = False
        else:
            await transaction.rollback()
            publication.withheld = True

    async def delay(self, client: Client) -> None:
        await self._pause()
        key = self.numbers.key("delay")
        due_ms = now_ms() + self.random.randint(100, 2_000)
        self.ledger.sending(key, "delay/1", due_ms=due_ms)
        receipt = await client.send("delay/1", body_of(key, 60), deliver_at_ms=due_ms)
        self.ledger.acked(key)
        if self.random.random() < 0.3:
            publication = self.ledger.publications[key]
            await asyncio.sleep(self.random.uniform(0, 0.3))
            publication.withheld = None
            try:
                await client.recall(receipt.recall_handle)
            except AlreadyFired:
                publication.withheld = False
            else:
                publication.withheld = True

    async def redrive(self, client: Client) -> None:
        await asyncio.sleep(0.4)
        await client.dead_letters.redrive("work")

    # --- consuming --------------------------------------------------------------------------------------------------

    async def consume(self, client: Client, group: str, topic_filter: str) -> None:
        """Pop once, and settle what came."""
        view = self.groups[group]
        popped = await client.pop(topic_filter, group=group, messages_max=64, invisible=INVISIBLE_S, wait=0.2)
        received_ms = now_ms()
        for message in popped:
            self.ledger.popped(view, message.topic, message.body, message.message_id, message.attempt, now_ms=received_ms)
        careless = [message for message in popped if self.is_careless and self.random.random() < 0.15]
        if view.is_fifo:  # nothing is skipped in order; what comes back only waits
            careless = []
        chosen = {id(message) for message in careless}
        await asyncio.gather(
            self._ack(client, view, [message for message in popped if id(message) not in chosen]),
            *(self._misuse(message) for message in careless),
        )

    async def _ack(self, client: Client, view: Consumed, messages: Sequence[Message]) -> None:
        if not messages:
            return
        for message in messages:
            self.ledger.asking(view, message.message_id, message.attempt)
        refused: dict[int, PopError] = {}
        try:
            await client.ack([message.handle for message in messages], group=view.name)
        except BatchFailed as error:
            refused = dict(error.errors)
        for at, message in enumerate(messages):
            problem = refused.get(at)
            if problem is None:
                self.ledger.settled(view, message.message_id, message.attempt)
            elif isinstance(problem, HandleExpired):
                self.ledger.refused(view, message.message_id, message.attempt)

    async def _misuse(self, message: Message) -> None:
        choice = self.random.random()
        try:
            if choice < 0.4:
                await message.nack(delay=self.random.uniform(0, 0.2))
            elif choice < 0.6:
                await message.extend(0.5)
            elif choice < 0.8:
                await message.suspend(self.random.uniform(0.001, 0.2))
            elif choice < 0.9 and message.group == "work":
                await message.dead_letter()
        except StatusError:
            pass  # the invisible time was over, so the message comes again anyway

    async def end_transactions(self) -> None:
        """Roll back what is pending, so that a round ends with no open transaction."""
        async with Client(self.address, timeout=TIMEOUT_S, close_timeout=0.001) as client:
            for pending in await client.transactions.pending():
                with suppress(StatusError):  # an earlier call of its producer was under way, and has ended it now
                    await client.transactions.end(pending.transaction_handle, commit=False)


FILTERS = (
    ("work", "mqtt/#"),
    ("ordered", "fifo/#"),
    ("rest", "pop/#"),
    ("rest", "tx/#"),
    ("rest", "delay/#"),
    ("late", "mqtt/+/1"),
)
"""Groups and the filters that their consumers pop."""
