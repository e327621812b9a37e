"""Attacks over gRPC, on the native API and on that of RocketMQ."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, ClassVar

import grpc
import grpc.aio

from penstock.pop.options import PopOptions
from penstock.pop.proto import pop_pb2 as pb
from penstock.pop.proto import pop_pb2_grpc as pb_grpc
from penstock.store.options import MIB
from tests.attack.attacks.attack import FAILURES, Attack, together
from tests.attack.ground import BILLING_TOKEN, HONEST_TOKEN, Ground
from tests.attack.link import ANSWER_S_MAX
from tests.pop.unreading import Unreading

COMPRESSIONS = (grpc.Compression.Gzip, grpc.Compression.NoCompression)

TOKEN = (("authorization", f"Bearer {BILLING_TOKEN}"),)
HOUR_MS = 3_600_000

HONEST = (("authorization", f"Bearer {HONEST_TOKEN}"),)


class CallAttack(Attack):
    """An attack over gRPC: calls by the principal `billing`, whose statuses count."""

    side_by_side = 8
    channel_options: tuple[tuple[str, Any], ...] = ()

    async def run(self) -> None:
        credentials = grpc.ssl_channel_credentials(self.ground.roots)
        # Without its own pool of subchannels, a channel would share the connection of the one before.
        options = (("grpc.use_local_subchannel_pool", 1), *self.channel_options)
        async with grpc.aio.secure_channel(f"localhost:{self.ground.ports['pop']}", credentials, options=options) as channel:
            await together(self._again(channel, number) for number in range(self.side_by_side))

    async def finish(self) -> None:
        """Wait for an answer: a window may be too short for the first one."""
        if self.saw:
            return
        self.side_by_side = 1
        running = asyncio.create_task(self.run())
        with suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S_MAX):
                while not self.saw:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        running.cancel()

    async def _again(self, channel: grpc.aio.Channel, number: int) -> None:
        while True:
            try:
                await self.call(channel, number)
            except grpc.aio.AioRpcError as error:
                self.saw[error.code().name] += 1
            await asyncio.sleep(0)

    async def call(self, channel: grpc.aio.Channel, number: int) -> None:
        raise NotImplementedError


class ForbiddenPops(CallAttack):
    """Pops of topics that the principal may not read, by groups that it may consume."""

    name = "forbidden-pops"
    summary = "a principal pops and consumes topics that it may not read, in its own group"
    must_get = "PERMISSION_DENIED"

    async def call(self, channel: grpc.aio.Channel, number: int) -> None:
        stub: Any = pb_grpc.PopServiceStub(channel)
        wanted = ("hr/#", "honest/#", "#", "+/#", "orders/#/x", "$dlq/honest")[number % 6]
        if number % 2:
            await stub.Pop(pb.PopRequest(group="billing", filter=wanted), metadata=TOKEN, timeout=20)
        else:
            stream = stub.Consume(metadata=TOKEN, timeout=20)
            await stream.write(pb.ConsumeRequest(open=pb.ConsumeOpen(group="billing", filter=wanted)))
            if await stream.read() is grpc.aio.EOF:  # type: ignore[attr-defined]
                raise AssertionError("a stream ended without a status")
        self.saw["messages"] += 1

    def problems(self) -> list[str]:
        return self.only("PERMISSION_DENIED", "INVALID_ARGUMENT")


class Zeros(CallAttack):
    """Requests that are small on the wire and large in memory."""

    name = "grpc-zeros"
    summary = "32 calls at a time, each with 24 MB of zeros, every second one compressed"
    must_get = "UNIMPLEMENTED (pop.compression) or RESOURCE_EXHAUSTED (pop.message_bytes_max)"
    side_by_side = 32

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        self._request = pb.SendRequest(messages=[pb.Message(topic="orders/x", body=bytes(3 * MIB)) for _ in range(8)])

    async def call(self, channel: grpc.aio.Channel, number: int) -> None:
        stub: Any = pb_grpc.PopServiceStub(channel)
        await stub.Send(self._request, metadata=TOKEN, timeout=30, compression=COMPRESSIONS[number % 2])
        self.saw["stored"] += 1

    def problems(self) -> list[str]:
        return self.only("UNIMPLEMENTED", "RESOURCE_EXHAUSTED")


class Streams(CallAttack):
    """Streams without end on one connection."""

    name = "grpc-streams"
    summary = "3,000 Consume streams on one connection"
    must_get = "at most 1000 streams at a time; the others wait in the client"
    side_by_side = 3_000

    CALLS_MAX = PopOptions().calls_max

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        self._open = self._open_most = 0

    async def call(self, channel: grpc.aio.Channel, number: int) -> None:
        stub: Any = pb_grpc.PopServiceStub(channel)
        stream = stub.Consume(metadata=TOKEN, timeout=60)
        await stream.write(pb.ConsumeRequest(open=pb.ConsumeOpen(group="billing", filter="orders/#", credits=1)))
        self.saw["open"] += 1
        self._open += 1
        self._open_most = max(self._open_most, self._open)
        try:
            await stream.read()
        finally:
            self._open -= 1

    def problems(self) -> list[str]:
        found = self.only("open")
        if self._open_most > self.CALLS_MAX:
            found.append(f"{self._open_most:,} streams were open at a time, and the bound is {self.CALLS_MAX:,}")
        return found


class ForgedHandles(CallAttack):
    """Acknowledgements with handles that the node never gave."""

    name = "forged-handles"
    summary = "acknowledgements with 1,000 forged handles a call, over Ack, ChangeInvisible, Recall and DeadLetter"
    must_get = "INVALID_HANDLE for each"

    async def prepare(self) -> None:
        self._handles = [self.random.randbytes(self.random.choice((1, 30, 46, 60))).hex() for _ in range(1_000)]

    async def call(self, channel: grpc.aio.Channel, number: int) -> None:
        stub: Any = pb_grpc.PopServiceStub(channel)
        kind = number % 4
        if kind == 0:
            answer = await stub.Ack(pb.AckRequest(group="billing", handles=self._handles), metadata=TOKEN, timeout=20)
        elif kind == 1:
            answer = await stub.DeadLetter(pb.AckRequest(group="billing", handles=self._handles), metadata=TOKEN, timeout=20)
        elif kind == 2:
            changes = [pb.InvisibleChange(handle=handle, invisible_ms=1) for handle in self._handles]
            request = pb.ChangeInvisibleRequest(group="billing", changes=changes)
            answer = await stub.ChangeInvisible(request, metadata=TOKEN, timeout=20)
        else:
            answer = await stub.Recall(pb.RecallRequest(recall_handles=self._handles), metadata=TOKEN, timeout=20)
        for status in [one.status for one in answer.results] if kind == 2 else answer.statuses:
            self.saw[pb.Code.Name(status.code)] += 1

    def problems(self) -> list[str]:
        return self.only("INVALID_HANDLE")


class Groups(CallAttack):
    """Groups without end."""

    name = "groups-flood"
    summary = "a principal creates ever new groups (pop.groups_max = 1000)"
    must_get = "RESOURCE_EXHAUSTED once it holds its share"
    options: ClassVar[dict[str, str]] = {"pop": "groups_max = 1000"}

    async def call(self, channel: grpc.aio.Channel, number: int) -> None:
        stub: Any = pb_grpc.PopServiceStub(channel)
        await stub.Pop(pb.PopRequest(group=f"billing-{self.next_number()}", filter="orders/#"), metadata=TOKEN, timeout=20)
        self.saw["created"] += 1

    def problems(self) -> list[str]:
        return self.only("RESOURCE_EXHAUSTED", "created") + self.once("RESOURCE_EXHAUSTED")


class Unread(CallAttack):
    """Responses that nobody reads."""

    name = "responses-unread"
    summary = (
        "eight connections whose windows let no byte through, each with 16 streams and 48 pops that wait; then three messages "
        "of 900 KB for all of them"
    )
    must_get = "the end of the connection, once an eighth of pop.memory_bytes_max (64 MiB) is not read"
    options: ClassVar[dict[str, str]] = {"pop": f"memory_bytes_max = {512 * MIB}\ngroups_max = 100000"}
    peak_mib = 384  # Five times what the option says, and the attacker's own messages.

    WAIT_S = 0.2
    """How long pops may take to be waiting."""

    async def call(self, channel: grpc.aio.Channel, number: int) -> None:
        stub: Any = pb_grpc.PopServiceStub(channel)
        topic = f"orders/large/{number}/{self.next_number()}"
        with suppress(*FAILURES):
            unreading = await Unreading.to(self.ground.ports["pop"], self.ground.context(), TOKEN)
            try:
                for _ in range(16):
                    unreading.consume(f"billing-{self.next_number()}", topic)
                for _ in range(48):
                    unreading.pop(f"billing-{self.next_number()}", topic, wait_ms=20_000)
                await asyncio.sleep(self.WAIT_S)
                message = pb.Message(topic=topic, body=bytes(900_000))
                await stub.Send(pb.SendRequest(messages=[message] * 3), metadata=TOKEN, timeout=20)
                async with asyncio.timeout(20):
                    await unreading.ended()
                self.saw["closed"] += 1
            finally:
                unreading.close()

    def problems(self) -> list[str]:
        return self.once("closed")


class Schedules(CallAttack):
    """Schedules whose rules are dear to evaluate, and lists of them."""

    name = "schedule-rules"
    summary = "a principal creates schedules whose rules occur seldom or never, and lists them (timer.schedules_max = 100)"
    must_get = "INVALID_ARGUMENT for rules without occurrences, and RESOURCE_EXHAUSTED once it holds its share"
    options: ClassVar[dict[str, str]] = {"more": "[timer]\nschedules_max = 100"}
    side_by_side = 16

    RULES = (
        "FREQ=YEARLY;BYMONTH=2;BYMONTHDAY=29;BYDAY=SU",
        "FREQ=YEARLY;BYWEEKNO=20;BYMONTH=12",
        "FREQ=SECONDLY;INTERVAL=61;BYMONTHDAY=31;BYHOUR=3;BYMINUTE=17",
        "FREQ=MINUTELY;BYDAY=MO;BYMONTHDAY=13;BYSETPOS=-1",
    )

    async def call(self, channel: grpc.aio.Channel, number: int) -> None:
        stub: Any = pb_grpc.ScheduleServiceStub(channel)
        if number % 4 == 0:
            answer = await stub.ListSchedules(pb.ListSchedulesRequest(schedules_max=10_000), metadata=TOKEN, timeout=30)
            self.saw["listed"] += bool(answer.schedules)
            return
        rule = self.RULES[self.next_number() % len(self.RULES)]
        schedule = pb.Schedule(
            name=f"dear-{self.number}", topic="orders/x", rrule=rule, zone="Europe/Berlin", body=bytes(16_384)
        )
        await stub.CreateSchedule(pb.CreateScheduleRequest(schedule=schedule), metadata=TOKEN, timeout=30)
        self.saw["created"] += 1

    def problems(self) -> list[str]:
        return self.only("created", "listed", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED") + self.once("RESOURCE_EXHAUSTED")


class Listings(CallAttack):
    """Lists of pending delayed messages, of which there are many."""

    name = "timer-listings"
    summary = (
        "a principal delays 50,000 messages over 30 days, then 32 calls at a time list them by filters and keys of which most "
        "match few or none, and count them"
    )
    must_get = "pages of topics to which it may send; PERMISSION_DENIED for counts of all"
    side_by_side = 32

    MESSAGES = 50_000
    BATCH = 500
    SPAN_MS = 30 * 24 * HOUR_MS
    FILTERS = ("orders/none/#", "#", "+/+/7", "hr/#", "orders/late/7", "orders/#")

    async def prepare(self) -> None:
        credentials = grpc.ssl_channel_credentials(self.ground.roots)
        async with grpc.aio.secure_channel(f"localhost:{self.ground.ports['pop']}", credentials) as channel:
            stub: Any = pb_grpc.PopServiceStub(channel)
            for first in range(0, self.MESSAGES, self.BATCH):
                numbers = range(first, first + self.BATCH)
                messages = [
                    pb.Message(
                        topic=f"orders/late/{number % 100}",
                        delay_ms=2 * HOUR_MS + self.random.randrange(self.SPAN_MS),
                        extras=pb.MessageExtras(timer_key=str(number) if number % 10 == 0 else ""),
                    )
                    for number in numbers
                ]
                answer = await stub.Send(pb.SendRequest(messages=messages), metadata=TOKEN, timeout=30)
                refused = [result.status.detail for result in answer.results if result.status.code]
                assert not refused, refused[0]
            foreign = pb.Message(topic="honest/late", delay_ms=HOUR_MS)  # first in any list
            await stub.Send(pb.SendRequest(messages=[foreign]), metadata=HONEST, timeout=30)

    async def call(self, channel: grpc.aio.Channel, number: int) -> None:
        stub: Any = pb_grpc.TimerServiceStub(channel)
        if number % 8 == 0:
            await stub.CountTimers(pb.CountTimersRequest(), metadata=TOKEN, timeout=60)
            self.saw["counted"] += 1
            return
        wanted = self.FILTERS[number % len(self.FILTERS)]
        key = str(self.MESSAGES + number) if number % 3 == 0 else ""
        request = pb.ListTimersRequest(filter=wanted, key=key, timers_max=1_000)
        while True:
            page = await stub.ListTimers(request, metadata=TOKEN, timeout=60)
            self.saw["pages"] += 1
            if any(not timer.topic.startswith("orders/") for timer in page.timers):
                self.saw["a topic to which it may not send"] += 1
            request.page_token = page.next_page_token
            if not page.next_page_token:
                return

    def problems(self) -> list[str]:
        return self.only("pages", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED") + self.once("pages")


class Anonymous(CallAttack):
    """Calls without a token."""

    name = "grpc-anonymous"
    summary = "calls without a token, with a wrong one, and with 7 KB of metadata"
    must_get = "UNAUTHENTICATED"

    async def call(self, channel: grpc.aio.Channel, number: int) -> None:
        stub: Any = pb_grpc.PopServiceStub(channel)
        metadata = ((), (("authorization", "Bearer x"),), (("authorization", "Bearer " + "x" * 7_000),))[number % 3]
        await stub.Pop(pb.PopRequest(group="billing", filter="orders/#"), metadata=metadata, timeout=20)
        self.saw["messages"] += 1

    def problems(self) -> list[str]:
        return self.only("UNAUTHENTICATED")


class Telemetry(CallAttack):
    """RocketMQ's Telemetry streams."""

    name = "rocketmq-telemetry"
    summary = "64 Telemetry streams of RocketMQ send settings and commands in any order, as fast as they can"
    must_get = "answers to the first 32 of each stream, then to one a second"
    side_by_side = 64

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        from penstock.pop.rocketmq.stubs import SERVICE, service_pb
        from penstock.pop.rocketmq.stubs import pb as rocket

        self._rocket, self._service, self._service_pb = rocket, SERVICE, service_pb

    async def call(self, channel: grpc.aio.Channel, number: int) -> None:
        make = channel.stream_stream(
            f"/{self._service.full_name}/Telemetry",
            request_serializer=lambda request: request.SerializeToString(),
            response_deserializer=self._service_pb.TelemetryCommand.FromString,
        )
        metadata = (*TOKEN, ("x-mq-client-id", f"telemetry-{number}"))
        stream = make(self._commands(), metadata=metadata, timeout=20)
        async for _ in stream:
            self.saw["answers"] += 1
        self.saw["ended"] += 1

    async def _commands(self) -> AsyncIterator[Any]:
        command = self._service_pb.TelemetryCommand
        for _ in range(2_000):
            one = command()
            kind = self.random.randrange(5)
            if kind == 0:
                one.settings.publishing.topics.add().name = "orders"
                one.settings.client_type = self._rocket.ClientType.PRODUCER
            elif kind == 1:
                one.settings.subscription.group.name = "billing"
                one.settings.client_type = self._rocket.ClientType.SIMPLE_CONSUMER
            elif kind == 2:
                one.thread_stack_trace.thread_stack_trace = "x" * 1_000
            elif kind == 3:
                one.recover_orphaned_transaction_command.transaction_id = "x"
            yield one
            await asyncio.sleep(0)

    def problems(self) -> list[str]:
        return self.once("answers")
