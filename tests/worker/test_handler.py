"""What can be a handler, and how bodies become its arguments."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

from penstock import HandlerInvalid, Message, Worker
from penstock.worker.codecs import codec_of, decoded
from penstock.worker.errors import Undecodable
from penstock.worker.handler import BODY, MESSAGE, handler_of
from penstock.worker.middleware.logging import LogCalls
from tests.pop.wiring import FILTER, GROUP

pydantic = pytest.importorskip("pydantic")


class Reading(pydantic.BaseModel):  # type: ignore[name-defined,misc]
    meter: int
    value: float


@dataclass
class Point:
    x: int


@pytest.mark.parametrize(
    ("annotation", "body", "argument"),
    [
        (None, b"\xff", b"\xff"),
        (bytes, b"\xff", b"\xff"),
        (str, "ü".encode(), "ü"),
        (Any, b"[1]", [1]),
        (dict, b'{"a":1}', {"a": 1}),
        (list, b"[1]", [1]),
        (int, b"7", 7),
        (float, b"7", 7),
        (bool, b"true", True),
        (list[int], b"[1,2]", [1, 2]),
        (dict[str, int], b'{"a":1}', {"a": 1}),
        (Point, b'{"x":1}', Point(1)),
        (Reading, b'{"meter":1,"value":2.5}', Reading(meter=1, value=2.5)),
    ],
)
def test_the_annotation_says_what_the_body_is(annotation: Any, body: bytes, argument: Any) -> None:
    assert decoded(codec_of(annotation), body) == argument


@pytest.mark.parametrize(
    ("annotation", "body"),
    [
        (str, b"\xff"),
        (Any, b"{"),
        (dict, b"[1]"),
        (int, b"true"),
        (int, b"1.5"),
        (list[int], b'["x"]'),
        (Point, b"{}"),
        (Reading, b'{"meter":"x","value":1}'),
    ],
)
def test_a_body_that_is_not_valid_is_told_with_the_reason(annotation: Any, body: bytes) -> None:
    with pytest.raises(Undecodable, match=f"the body of {len(body)} bytes is not valid: ."):
        decoded(codec_of(annotation), body)


def test_msgspec_decodes_its_structs() -> None:
    msgspec = pytest.importorskip("msgspec")
    kind = msgspec.defstruct("Order", [("number", int)])
    assert decoded(codec_of(kind), b'{"number":7}').number == 7
    with pytest.raises(Undecodable, match="Expected `int`"):
        decoded(codec_of(kind), b'{"number":"x"}')


def test_the_argument_that_is_annotated_with_message_gets_the_message() -> None:
    async def both(reading: Reading, message: Message) -> None: ...
    async def turned(message: Message, reading: Reading) -> None: ...
    def alone(message: Message) -> None: ...
    def plain(body, retries: int = 3) -> None: ...  # type: ignore[no-untyped-def]

    made_of_each = [handler_of(each) for each in (both, turned, alone, plain)]
    found = [(made.takes, made.is_async) for made in made_of_each]
    assert found == [((BODY, MESSAGE), True), ((MESSAGE, BODY), True), ((MESSAGE,), False), ((BODY,), False)]


def test_a_codec_decodes_instead_of_the_annotation() -> None:
    def handle(body: bytes) -> None: ...

    made = handler_of(handle, codec=lambda body: body.hex())
    assert made.codec is not None
    assert made.codec(b"\x01") == "01"


def nothing() -> None: ...
def three(a: bytes, b: Message, c: int) -> None: ...
def keyword(a: bytes, *, b: int) -> None: ...
def twice(a: bytes, b: str) -> None: ...
def generator(a: bytes) -> Iterator[int]:
    yield 1


async def asynchronous_generator(a: bytes) -> AsyncIterator[int]:
    yield 1


def unknown(a: Absent) -> None: ...  # type: ignore[name-defined]  # noqa: F821
def untyped_value(a: 7) -> None: ...  # type: ignore[valid-type]


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (nothing, "must take one argument"),
        (three, "must take one argument"),
        (keyword, "must take one argument"),
        (twice, "two arguments of one kind"),
        (generator, "is a generator"),
        (asynchronous_generator, "is a generator"),
        (unknown, "names nothing that its module knows"),
        (untyped_value, "is no type|type"),
        (Point, "is no function"),
    ],
)
def test_what_can_t_be_a_handler_is_refused_when_it_is_decorated(function: Any, why: str) -> None:
    with pytest.raises((HandlerInvalid, TypeError), match=why):
        Worker("127.0.0.1:1").consumer("a/#", group="g")(function)


def test_a_handler_of_batches_takes_lists() -> None:
    def handle(body: dict) -> None: ...

    with pytest.raises(HandlerInvalid, match=r"annotate body with list\[...\]"):
        handler_of(handle, batch=10)


@pytest.mark.parametrize(
    "options", [{"concurrency": 0}, {"timeout": timedelta()}, {"invisible": 0.01}, {"batch": 2_000}, {"batch": -1}]
)
def test_numbers_out_of_bounds_are_refused_when_a_handler_is_decorated(options: dict[str, Any]) -> None:
    def handle(bodies: list) -> None: ...

    with pytest.raises(ValueError, match="use "):
        Worker("127.0.0.1:1").consumer("a/#", group="g", **options)(handle)


def test_a_negative_grace_is_refused() -> None:
    with pytest.raises(ValueError, match="grace is -1"):
        Worker(grace=-1)


def test_a_codec_that_can_not_be_called_is_refused() -> None:
    def handle(body: bytes) -> None:
        raise NotImplementedError

    with pytest.raises(HandlerInvalid, match=r"the codec of .*handle is 5: give a function"):
        handler_of(handle, codec=5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("middleware", "why"),
    [(5, "the middleware 5 can't be called"), (LogCalls, r"LogCalls is a class: pass an instance, such as LogCalls\(\)")],
)
def test_a_middleware_that_can_not_be_called_is_refused(middleware: Any, why: str) -> None:
    with pytest.raises(TypeError, match=why):
        Worker(middleware=[middleware])
    with pytest.raises(TypeError, match=why):
        Worker().consumer(FILTER, group=GROUP, middleware=[middleware])
