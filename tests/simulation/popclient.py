"""A producer and the consumers of POP groups in the simulation. They call the servicers that gRPC calls."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from random import Random
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

import grpc

from penstock.pop.access.caller import note_call
from penstock.pop.core.settings import ConsumerGroupSettings
from penstock.pop.errors import PopError
from penstock.pop.grpc.calls import Context
from penstock.pop.grpc.status import refusal
from penstock.pop.proto import pop_pb2 as pb
from penstock.store.errors import StoreError
from penstock.store.queues.lightqueue import Start
from tests.simulation.oracle import Consumer, Oracle
from tests.simulation.process import Process
from tests.simulation.sent import Fate, Sent, Violation

Answer = TypeVar("Answer")


class CallFailed(Exception):
    """A call has ended with a status of gRPC."""


class CallContext:
    """What the servicers need of the context of a call."""

    def peer(self) -> str:
        """Return the address of the caller."""
        return "ipv4:192.0.2.1:4711"

    def invocation_metadata(self) -> tuple[()]:
        """Return the metadata of the call."""
        return ()

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        """End the call."""
        raise CallFailed(f"{code.name}: {details}")


CONTEXT = cast(Context, CallContext())


async def served(answer: Awaitable[Answer]) -> Answer:
    """Return the answer of a method, or raise what ends its call, as the stages of a call do."""
    note_call(CONTEXT)
    try:
        return await answer
    except (PopError, StoreError) as error:
        raise refusal(error) from error


class Held(NamedTuple):
    """A delivery that a consumer has."""

    handle: str
    message: Sent
    position: int


class Producer:
    """Sends messages, also delayed and half ones.

    Parameters:
        oracle: gets what happens.
        random: decides about transactions.
    """

    def __init__(self, oracle: Oracle, random: Random) -> None:
        self._oracle = oracle
        self._random = random
        self.open_halves: list[tuple[str, Sent]] = []
        """Handle and message of each half message that is to be decided."""

    def send(self, process: Process, messages: list[Sent]) -> None:
        """Send messages in one call."""
        request = pb.SendRequest()
        for message in messages:
            request.messages.add(
                topic=message.topic,
                body=message.body,
                message_group=message.key,
                deliver_at_ms=message.due_ms,
                producer="p" if message.fate is Fate.OPEN else "",
            )

        def done(response: Any, error: Exception | None) -> None:
            if error is not None:
                return  # the disk is full
            results = pb.SendResponse.FromString(response).results
            for message, result in zip(messages, results, strict=True):
                if result.status.code == pb.OK:
                    self._oracle.acknowledged(message)
                    position = int(result.message_id, 16)
                    message.positions.add(position)
                    if message.fate is Fate.OPEN:
                        self.open_halves.append((result.transaction_handle, message))

        process.call(served(process.servicer.Send(request)), done)

    def decide(self, process: Process) -> None:
        """Commit or roll back one half message, or repeat that where no answer came."""
        if not self.open_halves:
            return
        handle, message = self._random.choice(self.open_halves)
        if message.fate is Fate.OPEN:
            message.fate = self._random.choice((Fate.COMMITTING, Fate.ROLLING_BACK))
        commit = message.fate is Fate.COMMITTING
        ends = [pb.TransactionEnd(transaction_handle=handle, commit=commit)]

        def done(response: Any, error: Exception | None) -> None:
            if error is None:
                (status,) = pb.EndTransactionsResponse.FromString(response).statuses
                self._decided(handle, message, commit, status.code)

        process.call(served(process.servicer.EndTransactions(pb.EndTransactionsRequest(ends=ends))), done)

    def _decided(self, handle: str, message: Sent, commit: bool, code: int) -> None:
        if (handle, message) not in self.open_halves:
            return
        self.open_halves.remove((handle, message))
        if code in (pb.OK, pb.ALREADY_COMMITTED if commit else pb.ALREADY_ROLLED_BACK):
            message.fate = Fate.COMMITTED if commit else Fate.ROLLED_BACK
        elif code == pb.ALREADY_ROLLED_BACK:  # after the last check
            message.fate = Fate.ROLLED_BACK
        elif not self._oracle.was_repaired:
            raise Violation(f"the {'commit' if commit else 'roll back'} of {message} got the status {code}")


class Group:
    """A POP group and its consumers.

    Parameters:
        oracle: gets what happens.
        random: decides what consumers do.
        name, topic_filter: of the group.
        settings: of the group.
        earliest: whether it begins with what the log has.
    """

    def __init__(
        self, oracle: Oracle, random: Random, name: str, topic_filter: str, settings: ConsumerGroupSettings, *, earliest: bool
    ) -> None:
        self.name = name
        self.topic_filter = topic_filter
        self.settings = settings
        self.consumer = Consumer(f"group {name}", earliest=earliest)
        self.held: list[Held] = []
        self.is_created = False
        self.calls = 0
        """Calls without an answer."""
        self._oracle = oracle
        self._random = random
        self._in_order_max = random.choice((1, 3)) if settings.fifo else 1
        self._order: dict[str, int] = {}
        """In FIFO order: the position of the last message of each message group."""
        self._came: set[int] = set()
        """In FIFO order, if a pop takes several messages of a message group: the positions of all that came. What follows a
        failed message comes again after it."""
        self._asked: set[tuple[int, int]] = set()
        """Deliveries that a consumer has asked to end."""
        self._life = 0

    def cut_off(self) -> None:
        """The node is gone, with all calls."""
        self.calls = 0
        self._life += 1

    def create(self, process: Process) -> None:
        """Create the group."""
        start: Start = "earliest" if self.consumer.earliest else "latest"

        async def work() -> None:
            process.pop.groups.create(self.name, self.topic_filter, start, self.settings)
            await process.store.durable()

        self._call(process, work(), self._created)

    def _created(self, _: Any) -> None:
        if not self.is_created:
            self.is_created = True
            self.consumer.since[self.topic_filter] = self._oracle.tick()

    def _call(self, process: Process, work: Awaitable[Any], then: Any) -> None:
        self.calls += 1
        life = self._life

        def done(response: Any, error: Exception | None) -> None:
            if life != self._life:
                return
            self.calls -= 1
            if error is None:
                then(response)

        process.call(work, done)

    # --- popping ------------------------------------------------------------------------------------------------------

    def pop(self, process: Process, messages_max: int, invisible_ms: int, *, wait_ms: int = 0, acks: bool = False) -> None:
        """Pop messages; with `acks`, acknowledge everything that is held in the same call."""
        ended = self.held if acks else []
        if acks:
            self.held = []
        request = pb.PopRequest(
            group=self.name,
            filter=self.topic_filter,
            messages_max=messages_max,
            invisible_ms=invisible_ms,
            wait_ms=wait_ms,
            acks=[each.handle for each in ended],
            in_order_max=self._in_order_max,
        )
        self._asked.update((each.message.number, each.position) for each in ended)

        def then(data: Any) -> None:
            response = pb.PopResponse.FromString(data)
            statuses = [status.code for status in response.ack_statuses] or [pb.OK] * len(ended)
            self._ended(ended, statuses)
            for found in response.messages:
                self._got(process, found)

        self._call(process, served(process.servicer.Pop(request)), then)

    def _got(self, process: Process, found: pb.PoppedMessage) -> None:
        position = int(found.message_id, 16)
        consumer = self.consumer
        consumer.was_set_back |= self.is_set_back(process)
        is_exact = not (self._oracle.was_repaired or consumer.was_set_back)
        message = self._oracle.delivered(consumer, found.body, found.topic, process.store.now_ms())
        if (message.number, position) in consumer.ended and is_exact:
            raise Violation(f"{message} came to {consumer.name} again after its acknowledgement was acknowledged")
        if self.settings.fifo and message.is_in_order and is_exact:
            key = message.key or message.topic
            last = self._order.get(key, -1)
            if position < last and position not in self._came:
                raise Violation(f"{message} came to {consumer.name} after the message at {last} of the same message group")
            self._order[key] = max(position, last) if self._in_order_max > 1 else position
            if self._in_order_max > 1:
                self._came.add(position)
        self.held.append(Held(found.handle, message, position))

    def is_set_back(self, process: Process) -> bool:
        """Return whether a process has let the group go back in its queue."""
        group = process.pop.groups.get(self.name, self.topic_filter)
        return group is not None and bool(group.set_back)

    def _ended(self, deliveries: list[Held], codes: Sequence[int]) -> None:
        for held, code in zip(deliveries, codes, strict=True):
            key = (held.message.number, held.position)
            if code == pb.OK:
                self.consumer.ended.add(key)
            elif code == pb.INVALID_HANDLE and not self._oracle.was_repaired:
                raise Violation(f"the handle of {held.message} that {self.consumer.name} got is invalid")

    # --- ending deliveries --------------------------------------------------------------------------------------------

    def _take(self, count: int) -> list[Held]:
        taken = [self.held.pop(self._random.randrange(len(self.held))) for _ in range(min(count, len(self.held)))]
        self._asked.update((each.message.number, each.position) for each in taken)
        return taken

    def ack(self, process: Process, count: int) -> None:
        """Acknowledge some deliveries."""
        taken = self._take(count)
        if taken:
            request = pb.AckRequest(group=self.name, handles=[each.handle for each in taken])
            self._call(process, served(process.servicer.Ack(request)), lambda data: self._ended(taken, _codes(data, taken)))

    def dead_letter(self, process: Process) -> None:
        """Make a dead letter of a delivery."""
        taken = self._take(1)
        if taken:
            request = pb.AckRequest(group=self.name, handles=[each.handle for each in taken])
            work = served(process.servicer.DeadLetter(request))
            self._call(process, work, lambda data: self._ended(taken, _codes(data, taken)))

    def change(self, process: Process, invisible_ms: int) -> None:
        """Change the invisible time of a delivery; 0 returns the message."""
        if not self.held:
            return
        held = self.held.pop(self._random.randrange(len(self.held)))
        change = pb.InvisibleChange(handle=held.handle, invisible_ms=invisible_ms)
        request = pb.ChangeInvisibleRequest(group=self.name, changes=[change])

        def then(response: pb.ChangeInvisibleResponse) -> None:
            (result,) = response.results
            if result.status.code == pb.OK and invisible_ms:
                self.held.append(held._replace(handle=result.handle))
            elif result.status.code == pb.INVALID_HANDLE and not self._oracle.was_repaired:
                raise Violation(f"the handle of {held.message} that {self.consumer.name} got is invalid")

        self._call(process, served(process.servicer.ChangeInvisible(request)), then)

    def forget(self) -> None:
        """Consumers go away with what they hold."""
        self.held.clear()


def _codes(data: Any, deliveries: list[Held]) -> list[int]:
    statuses = pb.AckResponse.FromString(data).statuses
    assert len(statuses) == len(deliveries)
    return [status.code for status in statuses]
