"""Sequences of calls over gRPC, native and of RocketMQ, in any order, with fields and bytes that are changed.

What the node has answered goes into later requests: handles, message ids, groups. So a sequence pops and acknowledges what it
has sent, twice, after the deadline, in another group, or with a handle of which a character is another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import Any, NamedTuple

import grpc
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

from penstock.pop.proto import pop_pb2 as pb
from penstock.pop.proto import pop_pb2_grpc as pb_grpc

CALL_S_MAX = 2.0
"""After that a call is cancelled. A call that waits for messages, or a stream, is no failure."""

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
)
"""Strings that requests begin with, before the node has answered any."""

NUMBERS = (0, 0, 1, 2, 7, 100, 1_000, 60_000, -1, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63))

DEFECTS = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
"""Statuses that a node gives for its own mistakes."""

NOT_A_MESSAGE = "deserializ"
"""A part of the text with which gRPC itself refuses bytes that are no message, also with INTERNAL."""

CLEAN_EVERY = 50
"""After so many sequences the groups are deleted, or their maximum would refuse all others."""

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
        st.integers(0, 31),
        st.integers(0, 2**32),
        st.sampled_from((0, 0, 0, 0, 0, 1, 3, 20)),
        st.sampled_from((0, 0, 0, 0, 1, 2, 3, 4, 5)),
    )
    apis = st.sampled_from((api,) if api else APIS)
    return st.builds(CallSequence, apis, st.lists(step, min_size=1, max_size=12))


def _services() -> dict[str, tuple[ServiceDescriptor, ...]]:
    found: dict[str, tuple[ServiceDescriptor, ...]] = {
        "pop": (pb.DESCRIPTOR.services_by_name["PopService"], pb.DESCRIPTOR.services_by_name["GroupService"]),
    }
    try:
        from penstock.pop.rocketmq.stubs import SERVICE
    except ModuleNotFoundError:  # the extra `rocketmq` is not installed
        return found
    return found | {"rocketmq": (SERVICE,)}


APIS = tuple(_services())
"""The names of the APIs that are served here."""


class Calls:
    """Plays sequences of calls, and raises AssertionError where the node makes a mistake.

    Parameters:
        port: of the node's gRPC listener.
    """

    def __init__(self, port: int) -> None:
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        self._methods = {
            api: [method for service in services for method in service.methods] for api, services in _services().items()
        }
        self.played = 0
        self.counts: Counter[str] = Counter()
        """How many sequences and calls there were, and statuses."""
        self._pool: list[str] = []

    def clean(self) -> None:
        """Delete all groups. They would stay for ever, as they should."""
        stub: Any = pb_grpc.GroupServiceStub(self._channel)
        for group in stub.DescribeGroups(pb.GroupRequest()).groups:
            if not group.settings.shared:  # A shared subscription has it, and ends it.
                stub.DeleteGroup(pb.GroupRequest(group=group.group, filter=group.filter))

    def close(self) -> None:
        self._channel.close()

    def play(self, sequence: CallSequence) -> None:
        self._pool = list(FIRST)
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
        requests = [self._request(method, random, step.damage) for _ in range(count)]
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
            answer = call(given, timeout=random.choice((0.02, 0.1, CALL_S_MAX)), metadata=self._metadata(step, random))
            if method.server_streaming:
                for each in answer:
                    self._learn(method, each)
                    if random.randrange(4) == 0:
                        answer.cancel()
            else:
                self._learn(method, answer)
            self.counts["OK"] += 1
        except grpc.RpcError as error:
            status: Any = error
            code, details = status.code(), status.details() or ""
            self.counts[code.name] += 1
            is_known = code is grpc.StatusCode.INTERNAL and NOT_A_MESSAGE in details
            assert code not in DEFECTS or is_known, f"{method.name} failed with {code.name}: {details}"

    # --- requests -----------------------------------------------------------------------------------------------------

    def _request(self, method: MethodDescriptor, random: Random, damage: int) -> bytes:
        message = GetMessageClass(method.input_type)()
        self._fill(message, random, 0)
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
        for field in message.DESCRIPTOR.fields:
            if random.random() < 0.25 + depth / 8:
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

    def _metadata(self, step: CallStep, random: Random) -> tuple[tuple[str, str | bytes], ...]:
        client = (("x-mq-client-id", f"fuzz-{random.randrange(3)}"),)
        given: tuple[tuple[tuple[str, str | bytes], ...], ...] = (
            client,
            (),
            (*client, ("authorization", "Bearer " + "x" * random.randrange(5_000))),
            (*client, ("authorization", random.choice(("", "Basic x", "MQv2-HMAC-SHA1 Credential=, Signature=", "bearer")))),
            (*client, ("x-mq-date-time", "~ not a time"), ("garbage-bin", random.randbytes(200))),
            (("x-mq-client-id", "x" * 3_000), ("x-mq-namespace", random.choice(("", "a", "%", "../..")))),
        )
        return given[step.metadata]

    # --- responses ----------------------------------------------------------------------------------------------------

    def _learn(self, method: MethodDescriptor, data: bytes) -> None:
        """Check a response, and keep its strings for later requests."""
        answer = GetMessageClass(method.output_type)()
        try:
            answer.ParseFromString(data)
        except DecodeError as error:
            raise AssertionError(f"the node answered {method.name} with bytes that are no message: {data[:200]!r}") from error
        for text in _strings(answer):
            if len(self._pool) < POOL_MAX and text not in self._pool:
                self._pool.append(text)


def _strings(message: Message) -> Iterator[str]:
    """Yield all strings in a message. Raise AssertionError for a status that says that the node has a defect."""
    for field, value in message.ListFields():
        listed = value if field.is_repeated else (value,)
        for each in listed:
            if isinstance(each, Message):
                if isinstance(each, pb.Status):
                    assert each.code != CODE_OF_DEFECT, f"the node answered with a defect: {each.detail}"
                yield from _strings(each)
            elif isinstance(each, str) and each:
                yield each
