"""The stages that each call of each method passes, in their order, from gRPC to the method of a servicer.

A stage is an async function that passes the call on to the next one, and returns its response. An interceptor of gRPC would do
the same, but costs each call some 0.1 ms. The node reads unary requests by itself, which is the same on the wire: see
`RequestBytes`. Streams of responses are written where the method yields them, so each stage is the same for all methods.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from inspect import isawaitable
from typing import Any, Final, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from penstock.pop.access.caller import note_call
from penstock.pop.access.callguard import CallGuard, ServiceRules
from penstock.pop.access.refusals import CallRefused, Refusals
from penstock.pop.errors import RequestInvalid
from penstock.pop.grpc.requestbytes import RequestBytes
from penstock.pop.grpc.responsebytes import ResponseBytes
from penstock.pop.grpc.wire import serialize

SENDS: Final = frozenset({"/penstock.pop.v1.PopService/Send", "/apache.rocketmq.v2.MessagingService/SendMessage"})
"""The methods whose requests have messages in them, and may be as large as `PopOptions.request_bytes_max`."""

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
"""What gRPC knows of a call."""


class Service:
    """A service of the listener.

    Parameters:
        descriptor: of the service, which names its methods.
        servicer: has the methods. They may return messages, or their bytes.
        rules: what the methods need of their callers, and how the service tells errors. None for a service that everybody may
            call.
        takes_context: whether the methods take the context of gRPC after the request.
    """

    def __init__(self, descriptor: Any, servicer: object, rules: ServiceRules | None, *, takes_context: bool = False) -> None:
        self.name: str = descriptor.full_name
        self.rules = rules
        self._descriptor = descriptor
        self._servicer = servicer
        self._takes_context = takes_context

    def methods(self) -> dict[str, Any]:
        """Return the descriptors of the methods by their full names, such as `/penstock.pop.v1.PopService/Pop`."""
        return {f"/{self.name}/{method.name}": method for method in self._descriptor.methods}

    def serve(self, method: Any) -> Callable[[Call], Any]:
        """Return a function that calls a method, given by its descriptor."""
        served = getattr(self._servicer, method.name)
        if self._takes_context:
            return lambda call: served(call.request, call.context)
        return lambda call: served(call.request)


@dataclass(frozen=True, slots=True)
class Method:
    """A method of a service, as the stages know it.

    Parameters:
        name: by which the audit log names it.
        serve: calls the method of the servicer.
        parse: returns a request from its bytes. Raises RequestInvalid.
        rules: of the service.
        has_request_stream: whether callers send a stream of requests.
        has_response_stream: whether the node answers with a stream of responses.
        is_send: whether the requests have messages in them.
    """

    name: str
    serve: Callable[[Call], Any]
    parse: Callable[[bytes], Any]
    rules: ServiceRules | None
    has_request_stream: bool
    has_response_stream: bool
    is_send: bool


class Call:
    """A call on its way through the stages.

    Parameters:
        method: that is called.
        context: what gRPC knows of the call.
        request: the request; of a method with a stream of requests, their iterator. At first it has bytes.
    """

    __slots__ = ("context", "method", "request", "write")

    def __init__(self, method: Method, context: Context, request: Any) -> None:
        self.method = method
        self.context = context
        self.request = request
        self.write: Callable[[Any], Awaitable[None]] = context.write
        """Sends a response of a stream. It returns when gRPC can take the next one."""


Serve: TypeAlias = Callable[[Call], Awaitable[Any]]
"""Serves a call, and returns the response; None after a stream of responses."""
Stage: TypeAlias = Callable[[Serve, Call], Awaitable[Any]]


class Calls(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # it takes none
    """Finds the handler of a method. It is made at the first call: of the fifty that a node has, most of them never are.

    Parameters:
        services: that are called.
        refusals: tells callers that their calls are refused.
        requests: room for the requests of all calls together.
        responses: room for the responses that callers have not read.
        guard: decides who may call.
    """

    def __init__(
        self,
        services: Collection[Service],
        refusals: Refusals,
        requests: RequestBytes,
        responses: ResponseBytes,
        guard: CallGuard,
    ) -> None:
        self._methods = {name: (service, method) for service in services for name, method in service.methods().items()}
        self._handlers: dict[str, Any] = {}
        self._refusals = refusals
        self._requests = requests
        self._responses = responses
        self._guard = guard

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Return the handler of a call; None if there is no such method."""
        name = handler_call_details.method
        handler = self._handlers.get(name)
        if handler is None and name in self._methods:
            handler = self._handlers[name] = self._handler(name)
        return handler

    def _handler(self, full_name: str) -> Any:
        service, descriptor = self._methods[full_name]
        rules = service.rules
        method = Method(
            name=full_name.removeprefix(rules.prefix) if rules is not None else full_name,
            serve=service.serve(descriptor),
            parse=_parser(full_name, GetMessageClass(descriptor.input_type).FromString),
            rules=rules,
            has_request_stream=descriptor.client_streaming,
            has_response_stream=descriptor.server_streaming,
            is_send=full_name in SENDS,
        )
        serve = self._composed(method)

        async def called(requests: AsyncIterator[bytes], context: Context) -> Any:
            note_call(context)
            return await serve(Call(method, context, requests))

        if method.has_response_stream:
            return grpc.stream_stream_rpc_method_handler(called, None, serialize)
        return grpc.stream_unary_rpc_method_handler(called, None, serialize)

    def _composed(self, method: Method) -> Serve:
        """Return the stages of a method as one function. A call passes them from the first to the last; its response, back."""
        stages: list[Stage] = [
            self._refusals.tell,  # whoever is refused hears it at a bounded rate, and holds no room meanwhile
            self._requests.hold,  # the request has room from before it is read until the call ends; it must be a message
            self._responses.count,  # the response counts until it is read
        ]
        if method.rules is not None:
            stages += [
                state_errors,  # an error of the stages below becomes the status of the call, or of its response
                self._guard.admit,  # the caller is known and may do this, and the audit log has what the call changes
            ]
        serve: Serve = _write_all if method.has_response_stream else method.serve
        for stage in reversed(stages):
            serve = partial(stage, serve)
        return serve


def _parser(full_name: str, parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Return a function that parses the requests of a method.

    By itself gRPC would take bytes that are no message for a defect of the node: it would answer UNKNOWN, and log a traceback
    for each.
    """

    def parsed(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError as error:
            raise RequestInvalid(f"the request is no message of {full_name}: {error}") from None

    return parsed


async def state_errors(serve: Serve, call: Call) -> Any:
    """Serve a call, and end it as its service tells errors: a stage of `Calls`. Raises CallRefused."""
    rules = call.method.rules
    assert rules is not None
    try:
        return await serve(call)
    except (CallRefused, grpc.aio.BaseError):  # gRPC has ended the call itself
        raise
    except rules.errors as error:
        raise rules.refuse(error) from error


async def _write_all(call: Call) -> None:
    """Write all responses of a stream: the last stage. A method that writes by itself returns no generator."""
    served = call.method.serve(call)
    if isawaitable(served):
        await served
        return
    async with aclosing(served) as responses:
        async for response in responses:
            await call.write(response)
