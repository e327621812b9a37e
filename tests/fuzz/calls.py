"""Sequences of calls over gRPC, native and of RocketMQ, in any order, with fields and bytes that are changed.

What the node has answered goes into later requests: handles, message ids, groups. So a sequence pops and acknowledges what it
has sent, twice, after the deadline, in another group, as another caller, or with a handle of which a character is another. A
`Judge` says what must be true of the answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

import grpc
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

from penstock.pop.proto import pop_pb2 as pb
from penstock.pop.proto import pop_pb2_grpc as pb_grpc
from tests.fuzz.callers import EVERYBODY, Caller
from tests.fuzz.judge import Judge

CALL_S_MAX = 0.5
"""After that a call is cancelled. A call that waits for messages, or a stream, is no failure. A sequence has up to 12."""

POOL_MAX = 200

FIRST = (
    "",
    "seq",
    "seq/a",
    "seq/#",
    "#",
    "$share/x/y",
    "seq/" + "x" * 300,
    "\0",
    "é\U0001f600",
    "cli%ent",
    "a.b.c",
    "$dlq/seq",
    "call%2Fa",
    "call%2Fsecret%2Fx",
    "call",
)
"""Strings that requests begin with, before the node has answered any."""

HINTS: dict[str, tuple[Any, ...]] = {
    "group": ("call", "call-2", "hidden"),
    "filter": ("call/#", "call/a", "call/+/x", "call/own/#", "call/secret/#", "seq/#", "seq/secret/x", "#", "$dlq/call"),
    "topic": ("call/a", "call/b", "call/own/x", "call/secret/x", "seq/a"),
    "messages_max": (0, 1, 8, 32),
    "batch_max": (0, 1, 10),
    "credits": (0, 1, 10),
    "invisible_ms": (0, 50, 1_000, 60_000),
    "wait_ms": (0, 0, 0, 20),
    "delay_ms": (0, 0, 0, 50, 60_000),
    "deliver_at_ms": (0,),
    "start_at_ms": (0,),
    "in_order_max": (0, 1),
    "message_group": ("", "", "g"),
    "tag": ("", "", "t"),
    "producer": ("", "", "", "p"),
    "timer_key": ("", "", "k"),
    "key": ("", "k"),
    "deduplication_id": ("", "", "", "d"),
    "deduplication_age_ms": (0,),
    "expire_after_ms": (0, 0, 60_000),
    "response_topic": ("", "call/b"),
    "attempt_id": ("", "", "try"),
    "page_token": ("",),
    "name": ("s", "s/2", "s/3"),
    "Resource.name": ("call%2Fa", "call%2Fsecret%2Fx", "call%2F%23", "call", "call", "call-2"),
    "PollTransactionsRequest.producer": ("p",),
    "transactions_max": (0, 8),
    "timers_max": (0, 8),
    "schedules_max": (0, 8),
    "dead_letters_max": (0, 8),
    "from_ms": (0,),
    "before_ms": (0,),
    "prefix": ("", "s"),
    "after": ("", "s"),
    "zone": ("", "UTC", "Europe/Berlin"),
    "every_ms": (1_000, 60_000),
    "cron": ("* * * * *", "0 6 * * 1-5"),
    "rrule": ("FREQ=DAILY",),
    "start_ms": (0,),
    "end_ms": (0,),
    "count": (0, 2),
    "grace_ms": (0,),
    "resource_namespace": ("",),
    "message_type": (1, 1, 1, 4),
    "body_encoding": (1,),
    "lite_topic": ("lite",),
    "batch_size": (1, 8, 32),
    "seconds": (0, 0, 1, 30),
    "nanos": (0,),
    "start": (0, 0, 1),
    "missed": (0, 1, 2, 3),
}
"""Values with which most requests make sense, by the name of their field, or of message and field. Without them few requests
pass their checks."""

LEARNED = {
    "handles": "handle",
    "acks": "handle",
    "receipt_handle": "receipt_handle",
    "handle": "handle",
    "recall_handle": "recall_handle",
    "recall_handles": "recall_handle",
    "transaction_handle": "transaction_handle",
    "message_id": "message_id",
    "message_ids": "message_id",
    "after_message_id": "message_id",
}
"""The field of an answer from which a field of a request mostly has its value."""

HINTED = 0.92
"""How often a request has such a value, where there is one."""

SELDOM = (
    "properties",
    "extras",
    "settings",
    "body_is_template",
    "body_digest",
    "user_properties",
    "keys",
    "delivery_timestamp",
    "priority",
    "filter_expression",
    "orphaned_transaction_recovery_duration",
    "SystemProperties.message_group",
    "lite_topic",
)
"""Fields that are left out more often than others."""

OFTEN = {
    "Send": 4,
    "Pop": 5,
    "Ack": 4,
    "ChangeInvisible": 2,
    "SendMessage": 4,
    "CreateSchedule": 3,
    "ReceiveMessage": 5,
    "AckMessage": 4,
}
"""How often a method is called, where that is not once: other methods are about what these make."""

NUMBERS = (0, 0, 1, 2, 7, 100, 1_000, 60_000, -1, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63))

DEFECTS = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
"""Statuses that a node gives for its own mistakes."""

NOT_A_MESSAGE = "deserializ"
"""A part of the text with which gRPC itself refuses bytes that are no message, also with INTERNAL."""

CLEAN_EVERY = 50
"""After so many sequences the groups are deleted, or their maximum would refuse all others."""

CALLERS_MAX = 2
"""How many callers a sequence has."""

CODE_OF_DEFECT = pb.Code.INTERNAL


class CallStep(NamedTuple):
    """A call: which method, with a seed of its requests, how far they are changed, and what metadata it has."""

    method: int
    seed: int
    damage: int
    """Number of bytes that are changed in each request."""
    metadata: int


class CallSequence(NamedTuple):
    """Calls of one of the two APIs, one after the other."""

    api: str
    steps: list[CallStep]


def call_sequences(api: str = "") -> st.SearchStrategy[CallSequence]:
    step = st.builds(
        CallStep,
        st.integers(0, METHODS_MAX - 1),
        st.integers(0, 2**32),
        st.sampled_from((0, 0, 0, 0, 0, 1, 3, 20)),
        st.sampled_from((0, 0, 0, 0, 1, 2, 3, 4, 5)),
    )
    apis = st.sampled_from((api,) if api else APIS)
    return st.builds(CallSequence, apis, st.lists(step, min_size=1, max_size=12))


def _services() -> dict[str, tuple[ServiceDescriptor, ...]]:
    found: dict[str, tuple[ServiceDescriptor, ...]] = {
        "pop": tuple(
            pb.DESCRIPTOR.services_by_name[name] for name in ("PopService", "GroupService", "ScheduleService", "TimerService")
        ),
    }
    try:
        from penstock.pop.rocketmq.stubs import SERVICE
    except ModuleNotFoundError:  # the extra `rocketmq` is not installed
        return found
    return found | {"rocketmq": (SERVICE,)}


APIS = tuple(_services())
"""The names of the APIs that are served here."""

METHODS_MAX = 64
"""A step names its method by a number below this. Each API has fewer methods, also if those of `OFTEN` count several times."""

STRANGER = Caller(is_known=False)


class Calls:
    """Plays sequences of calls, and raises AssertionError where the node makes a mistake.

    Parameters:
        port: of the node's gRPC listener.
        callers: who calls, each call as one of them.
        keeper: who may delete everything.
    """

    def __init__(self, port: int, callers: Sequence[Caller] = (EVERYBODY,), keeper: Caller = EVERYBODY) -> None:
        self._callers = callers
        self._keeper = keeper
        self._judge = Judge()
        self._bodies = 0
        self._present: Sequence[Caller] = callers
        self._learned: dict[str, list[str]] = {}
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        self._methods = {
            api: [method for service in services for method in service.methods for _ in range(OFTEN.get(method.name, 1))]
            for api, services in _services().items()
        }
        self.played = 0
        self.counts: Counter[str] = Counter()
        """How many sequences and calls there were, and statuses."""
        self._pool: list[str] = []

    def clean(self) -> None:
        """Delete all groups and schedules. They would stay for ever, as they should."""
        as_keeper = _shown(self._keeper)
        stub: Any = pb_grpc.GroupServiceStub(self._channel)
        for group in stub.DescribeGroups(pb.GroupRequest(), metadata=as_keeper).groups:
            if not group.settings.shared:  # A shared subscription has it, and ends it.
                stub.DeleteGroup(pb.GroupRequest(group=group.group, filter=group.filter), metadata=as_keeper)
        schedules: Any = pb_grpc.ScheduleServiceStub(self._channel)
        while found := schedules.ListSchedules(pb.ListSchedulesRequest(), metadata=as_keeper).schedules:
            for one in found:
                schedules.DeleteSchedule(pb.ScheduleRequest(name=one.schedule.name), metadata=as_keeper)

    def close(self) -> None:
        self._channel.close()

    def play(self, sequence: CallSequence) -> None:
        self._pool, self._learned = list(FIRST), {}
        random = Random(sequence.steps[0].seed)
        self._present = [random.choice(self._callers) for _ in range(CALLERS_MAX)]
        self._judge.begin()
        self.played += 1
        if self.played % CLEAN_EVERY == 0:
            self.clean()
        self.counts[f"sequences of {sequence.api}"] += 1
        for step in sequence.steps:
            methods = self._methods[sequence.api]
            self._call(methods[step.method % len(methods)], step)

    def _call(self, method: MethodDescriptor, step: CallStep) -> None:
        random = Random(step.seed)
        count = random.choice((0, 1, 2, 3, 8)) if method.client_streaming else 1
        requests = [self._request(method, random, step.damage, at) for at in range(count)]
        caller, metadata = self._who(step, random)
        understood = _parsed(method, requests)
        self._judge.asked(understood)
        make: Any = {
            (False, False): self._channel.unary_unary,
            (False, True): self._channel.unary_stream,
            (True, False): self._channel.stream_unary,
            (True, True): self._channel.stream_stream,
        }[method.client_streaming, method.server_streaming]
        call = make(f"/{method.containing_service.full_name}/{method.name}")
        self.counts[f"calls of {method.name}"] += 1
        try:
            given: Any = iter(requests) if method.client_streaming else requests[0]
            answer = call(given, timeout=random.choice((0.02, CALL_S_MAX, CALL_S_MAX)), metadata=metadata)
            if method.server_streaming:
                for each in answer:
                    found = self._learn(method, each)
                    if understood:
                        self._judge.answered(method.name, caller, understood, found)
                    if random.randrange(4) == 0:
                        answer.cancel()
            else:
                found = self._learn(method, answer)
                if understood:
                    self._judge.answered(method.name, caller, understood, found)
            self.counts["OK"] += 1
            self.counts[f"OK of {method.name}"] += 1
        except grpc.RpcError as error:
            status: Any = error
            code, details = status.code(), status.details() or ""
            self.counts[code.name] += 1
            is_known = code is grpc.StatusCode.INTERNAL and NOT_A_MESSAGE in details
            assert code not in DEFECTS or is_known, f"{method.name} failed with {code.name}: {details}"

    # --- requests -----------------------------------------------------------------------------------------------------

    def _request(self, method: MethodDescriptor, random: Random, damage: int, at: int) -> bytes:
        message = GetMessageClass(method.input_type)()
        self._fill(message, random, 0)
        if isinstance(message, pb.ConsumeRequest) and at and random.random() < HINTED:
            message.ClearField("open")  # Only the first request of a stream may have it.
        data = bytearray(message.SerializeToString())
        for _ in range(damage):
            at = random.randrange(len(data) + 1)
            kind = random.randrange(3)
            if kind == 0:
                data.insert(at, random.randrange(256))
            elif at < len(data) and kind == 1:
                del data[at : at + random.randrange(1, 9)]
            elif at < len(data):
                data[at] = random.randrange(256)
        return bytes(data)

    def _fill(self, message: Message, random: Random, depth: int) -> None:
        """Set some fields of a message to anything, but most strings to what the node has answered."""
        oneofs: Sequence[Any] = message.DESCRIPTOR.oneofs
        chosen = {random.choice(oneof.fields).name for oneof in oneofs}
        for field in message.DESCRIPTOR.fields:
            if field.containing_oneof is not None and field.name not in chosen:
                continue
            whole = f"{message.DESCRIPTOR.name}.{field.name}"
            is_message = field.message_type is not None and not field.message_type.GetOptions().map_entry
            if field.name in SELDOM or whole in SELDOM:
                leaves_out = 0.9
            elif is_message or field.name in HINTS or field.name in LEARNED or field.name == "body":
                leaves_out = 0.05
            else:
                leaves_out = 0.25 + depth / 8
            if random.random() < leaves_out:
                continue
            if field.message_type is not None and field.message_type.GetOptions().map_entry:
                for _ in range(random.randrange(3)):
                    key, value = self._scalar(field.message_type.fields[0], random), field.message_type.fields[1]
                    if value.message_type is None:
                        getattr(message, field.name)[key] = self._scalar(value, random)
            elif field.is_repeated:
                listed = getattr(message, field.name)
                for _ in range(random.choice((0, 1, 1, 2, 20))):
                    if field.message_type is not None:
                        self._fill(listed.add(), random, depth + 1)
                    else:
                        listed.append(self._scalar(field, random))
            elif field.message_type is not None:
                if depth < 4:
                    inner = getattr(message, field.name)
                    inner.SetInParent()
                    self._fill(inner, random, depth + 1)
            else:
                setattr(message, field.name, self._scalar(field, random))

    def _scalar(self, field: Any, random: Random) -> Any:
        kind = field.cpp_type
        if field.name == "body" and random.random() < HINTED:
            self._bodies += 1
            return b"body %d" % self._bodies  # No other message has it, so the judge knows the message by its body.
        whole = f"{field.containing_type.name}.{field.name}"
        known = HINTS.get(whole) or HINTS.get(field.name) or self._learned.get(LEARNED.get(field.name, ""))
        if known and random.random() < HINTED and _fits(kind, known[0]):
            return random.choice(known)
        if kind == FieldDescriptor.CPPTYPE_STRING:
            text = random.choice(self._pool)
            if text and random.random() < 0.1:
                at = random.randrange(len(text))
                text = text[:at] + random.choice("aZ/+#\0%") + text[at + 1 :]
            return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            return random.random() < 0.5
        if kind == FieldDescriptor.CPPTYPE_ENUM:
            return random.choice([0, 1, 2, 3, 77])
        if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
            return random.choice((0.0, 1.5, -1.0, 1e300, float("nan"), float("inf")))
        number = random.choice(NUMBERS)
        bits = 64 if kind in (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64) else 32
        if kind in (FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64):
            return number % 2**bits
        return number if -(2 ** (bits - 1)) <= number < 2 ** (bits - 1) else number % 2 ** (bits - 1)

    def _who(self, step: CallStep, random: Random) -> tuple[Caller, tuple[tuple[str, str | bytes], ...]]:
        """Return who makes a call, as far as its metadata show that, and the metadata."""
        client = (("x-mq-client-id", f"fuzz-{random.randrange(3)}"),)
        given: tuple[tuple[tuple[str, str | bytes], ...], ...] = (
            client,
            (),
            (*client, ("authorization", "Bearer " + "x" * random.randrange(5_000))),
            (*client, ("authorization", random.choice(("", "Basic x", "MQv2-HMAC-SHA1 Credential=, Signature=", "bearer")))),
            (*client, ("x-mq-date-time", "~ not a time"), ("garbage-bin", random.randbytes(200))),
            (("x-mq-client-id", "x" * 3_000), ("x-mq-namespace", random.choice(("", "a", "%", "../..")))),
        )
        caller, metadata = random.choice(self._present), given[step.metadata]
        if any(name == "authorization" for name, _ in metadata):
            return (caller if caller.may_all else STRANGER), metadata
        return caller, (*metadata, *_shown(caller))

    # --- responses ----------------------------------------------------------------------------------------------------

    def _learn(self, method: MethodDescriptor, data: bytes) -> Message:
        """Check a response, keep its strings for later requests, and return it."""
        answer = GetMessageClass(method.output_type)()
        try:
            answer.ParseFromString(data)
        except DecodeError as error:
            raise AssertionError(f"the node answered {method.name} with bytes that are no message: {data[:200]!r}") from error
        for name, text in _strings(answer):
            if len(self._pool) < POOL_MAX and text not in self._pool:
                self._pool.append(text)
            if name in LEARNED:
                self._learned.setdefault(LEARNED[name], []).append(text)
        return answer


def _shown(caller: Caller) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {caller.token}"),) if caller.token else ()


def _fits(kind: int, value: Any) -> bool:
    """Return whether a field of a type can have a value."""
    if isinstance(value, str):
        return kind == FieldDescriptor.CPPTYPE_STRING
    return kind in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_ENUM)


def _parsed(method: MethodDescriptor, requests: list[bytes]) -> list[Message]:
    """Return the requests as the node reads them, but those that are no messages."""
    found = []
    for data in requests:
        try:
            found.append(GetMessageClass(method.input_type).FromString(data))
        except DecodeError:
            continue
    return found


def _strings(message: Message) -> Iterator[tuple[str, str]]:
    """Yield all strings in a message with the names of their fields.

    Raises AssertionError for a status that says that the node has a defect.
    """
    for field, value in message.ListFields():
        listed = value if field.is_repeated else (value,)
        for each in listed:
            if isinstance(each, Message):
                if isinstance(each, pb.Status):
                    assert each.code != CODE_OF_DEFECT, f"the node answered with a defect: {each.detail}"
                yield from _strings(each)
            elif isinstance(each, str) and each:
                yield field.name, each
