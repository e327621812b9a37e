"""Requests whose bytes are no message."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from penstock.pop.access.refusals import CallRefused
from penstock.pop.errors import RequestInvalid


def readable(full_name: str, handler: Any) -> Any:
    """Return the gRPC handler of a method that refuses requests whose bytes are no message with INVALID_ARGUMENT.

    By itself gRPC would take them for a defect of the node: it would answer UNKNOWN, and log a traceback for each.
    """
    read = handler.request_deserializer

    def read_or_keep(data: bytes) -> Any:
        try:
            return read(data)
        except DecodeError as error:
            return RequestInvalid(f"the request is no message of {full_name}: {error}")

    read_it = handler._replace(request_deserializer=read_or_keep)
    if handler.request_streaming:
        return read_it._replace(stream_stream=_stream_stream(handler.stream_stream))
    if handler.response_streaming:
        return read_it._replace(unary_stream=_unary_stream(handler.unary_stream))
    return read_it._replace(unary_unary=_unary_unary(handler.unary_unary))


def _refusal(error: RequestInvalid) -> CallRefused:
    return CallRefused(grpc.StatusCode.INVALID_ARGUMENT, str(error))


def _unary_unary(serve: Any) -> Any:
    async def checked(request: Any, context: Any) -> Any:
        if isinstance(request, RequestInvalid):
            raise _refusal(request)
        return await serve(request, context)

    return checked


def _unary_stream(serve: Any) -> Any:
    async def checked(request: Any, context: Any) -> AsyncIterator[Any]:
        if isinstance(request, RequestInvalid):
            raise _refusal(request)
        async with aclosing(serve(request, context)) as responses:
            async for response in responses:
                yield response

    return checked


def _stream_stream(serve: Any) -> Any:
    async def checked(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        malformed: RequestInvalid | None = None

        async def valid() -> AsyncIterator[Any]:
            nonlocal malformed
            async for request in requests:
                if isinstance(request, RequestInvalid):
                    malformed = request
                    raise request
                yield request

        try:
            async with aclosing(serve(valid(), context)) as responses:
                async for response in responses:
                    yield response
        except RequestInvalid as error:
            if error is not malformed:
                raise
            raise _refusal(error) from error

    return checked
