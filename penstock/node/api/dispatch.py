"""Serves the operations of the admin API over HTTP: requests are checked, answers are JSON, and changes are audited."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from functools import cached_property
from http import HTTPStatus
from typing import Any, Final, Literal

import msgspec
import structlog
from aiohttp import ClientPayloadError, hdrs, web

from penstock.access.audit import Audit
from penstock.access.subject import Subject
from penstock.node.api.httpheads import check_target, unless_known, versions_of
from penstock.node.api.openapi import PREFIX, document
from penstock.node.api.operation import NUMBER_MAX, ApiCall, ApiError, ApiRole, Operation
from penstock.node.api.streaming import STREAM_HEADERS, Streams
from penstock.store.errors import DiskFull, LimitExceeded

logger = structlog.get_logger("node")

CHANGES_MAX: Final = 256
"""Changes under way at a time. Callers that hang up leave theirs behind, so connections don't bound them."""

BODY_S_MAX: Final = 30.0
"""Seconds that a body may take to come."""

BODY_BYTES_MAX: Final = 4 * 1024 * 1024
"""Bytes of a body. A batch of messages is the largest."""

SUBJECT: Final = web.RequestKey("subject", Subject)
"""Key of a request: who sends it, once that is known."""

OVER: Final = web.RequestKey("over", str)
"""Key of a request: how it came, for the audit log, unless by the admin listener."""

ROLE: Final = "penstock_role"
"""Attribute of a handler: the role that its caller needs."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class AdminApi:
    """The operations of a node.

    Parameters:
        operations: all of them.
        audit: the audit log.
        version: of Penstock.
        streams: sends the streams.
    """

    def __init__(self, operations: Iterable[Operation], audit: Audit, version: str, streams: Streams) -> None:
        self._operations = tuple(operations)
        self.streams: Final = streams
        self._audit = audit
        self._changes: set[asyncio.Future[web.Response]] = set()
        """Changes under way: the loop itself keeps none of them alive."""
        self._version = version

    @cached_property
    def document(self) -> dict[str, Any]:
        """The OpenAPI document. It takes some 50 ms to make, so it is made for the first caller that wants it."""
        return document(self._operations, self._version)

    @cached_property
    def _encoded(self) -> bytes:
        return msgspec.json.encode(self.document)

    def routes(self) -> list[web.RouteDef]:
        """Return the routes, for the admin listener and for the control socket."""
        return [
            web.get(f"{PREFIX}/openapi.json", self._describe),
            *(web.route(operation.method, PREFIX + operation.path, self._handler(operation)) for operation in self._operations),
        ]

    async def _describe(self, _request: web.Request) -> web.Response:
        return _response(self._encoded)

    def _handler(self, operation: Operation) -> Handler:
        decoder = msgspec.json.Decoder(operation.body) if operation.body is not None else None

        async def handle(request: web.Request) -> web.StreamResponse:
            call = ApiCall(request[SUBJECT], request.match_info, None, None, (), request.get(OVER, "admin"))
            try:
                call.if_match = versions_of(request, hdrs.IF_MATCH)
                call.query = _query(operation, request)
                call.body = await _body(decoder, request) if decoder is not None else None
                if operation.is_stream:
                    return await self._stream(operation, call, request)
            except ApiError as error:
                return self._refuse(operation, call, error)
            if operation.is_safe:
                return await self._serve_safe(operation, call, request)
            # Whoever hangs up does not undo the change, so its line of the audit log must not be lost either.
            if len(self._changes) >= CHANGES_MAX:
                return self._refuse(
                    operation, call, ApiError(HTTPStatus.TOO_MANY_REQUESTS, "too many changes are under way; try again")
                )
            change = asyncio.ensure_future(self._serve(operation, call))
            self._changes.add(change)
            change.add_done_callback(self._changes.discard)
            return await asyncio.shield(change)

        setattr(handle, ROLE, operation.role)
        return handle

    async def _stream(self, operation: Operation, call: ApiCall, request: web.Request) -> web.StreamResponse:
        """Send a stream, of which HEAD gets no line. Raises ApiError before it has begun."""
        if request.method == hdrs.METH_HEAD:
            async with aclosing(await operation.serve(call)):
                return web.Response(headers=STREAM_HEADERS)
        with self.streams.place(request):
            async with aclosing(await operation.serve(call)) as lines:
                return await self.streams.send(request, lines)

    async def _serve_safe(self, operation: Operation, call: ApiCall, request: web.Request) -> web.Response:
        """Serve a call that changes nothing, without a body if its caller has the answer already."""
        try:
            return unless_known(request, await self._serve(operation, call))
        except ApiError as error:
            return self._refuse(operation, call, error)

    async def _serve(self, operation: Operation, call: ApiCall) -> web.Response:
        """Serve a call whose parameters and body are checked, and audit it."""
        try:
            answer = await operation.serve(call)
        except ApiError as error:
            return self._refuse(operation, call, error)
        except (DiskFull, LimitExceeded) as error:
            return self._refuse(operation, call, ApiError(HTTPStatus.CONFLICT, str(error)))
        except Exception:
            logger.exception("api.failed", operation=operation.id)
            why = "the node has failed to serve this, which is a defect of Penstock; its log has the details"
            return self._refuse(operation, call, ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, why))
        if not operation.is_safe and not operation.writes_audit:
            self._note("changed", operation, call)
        version = getattr(answer, "version", "")
        return _response(msgspec.json.encode(answer), headers={hdrs.ETAG: f'"{version}"'} if version else {})

    def _refuse(self, operation: Operation, call: ApiCall, error: ApiError) -> web.Response:
        if not operation.is_safe:
            call.noted["why"] = str(error)
            self._note("failed", operation, call)
        return error_response(error)

    def _note(self, event: Literal["changed", "failed"], operation: Operation, call: ApiCall) -> None:
        """Write a line of the audit log: who asked for what, over what, and with which parameters."""
        asked = msgspec.to_builtins(call.query) if call.query is not None else {}
        given = {name: value for name, value in asked.items() if value and name not in ("limit", "after")}
        values = {**given, **call.path, **call.noted}
        for name in ("user", "client", "address"):  # these are of whoever asks
            if name in values:
                values[f"of_{name}"] = values.pop(name)
        self._audit.note(event, call.subject, over=call.over, what=operation.id, **values)


def role_of(request: web.Request) -> ApiRole:
    """Return the role that the caller of a request needs: that of the operation, if the request is for one."""
    role = getattr(request.match_info.handler, ROLE, None)
    if isinstance(role, ApiRole):
        return role
    if request.match_info.http_exception is not None:
        return ApiRole.VIEWER  # there is nothing that could be changed
    return ApiRole.VIEWER if request.method in ("GET", "HEAD") else ApiRole.OPERATOR


async def answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Serve a request; where aiohttp refuses it, answer with JSON too."""
    try:
        check_target(request)
        return await handler(request)
    except ApiError as error:
        return error_response(error)
    except web.HTTPException as error:
        if error.status < HTTPStatus.BAD_REQUEST:
            raise
        why = {
            HTTPStatus.NOT_FOUND: f"there is no {request.path[:200]!r} here; `/` lists what there is",
            HTTPStatus.METHOD_NOT_ALLOWED: f"{request.path[:200]!r} takes no {request.method}",
        }.get(HTTPStatus(error.status), error.reason)
        response = error_response(ApiError(HTTPStatus(error.status), why))
        if hdrs.ALLOW in error.headers:
            response.headers[hdrs.ALLOW] = error.headers[hdrs.ALLOW]
        return response


def error_response(error: ApiError) -> web.Response:
    """Return the response that tells an error."""
    headers = {hdrs.RETRY_AFTER: "1"} if error.status in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS) else {}
    return _response(msgspec.json.encode({"error": str(error)}), error.status, headers)


def _response(body: bytes, status: HTTPStatus = HTTPStatus.OK, headers: Mapping[Any, str] | None = None) -> web.Response:
    return web.Response(
        body=body,
        status=status,
        content_type="application/json",
        headers={hdrs.CACHE_CONTROL: "no-store", **(headers or {})},
    )


def _query(operation: Operation, request: web.Request) -> Any:
    query = request.query
    for name in query:
        if len(query.getall(name)) > 1:
            raise ApiError(HTTPStatus.BAD_REQUEST, f"the parameter {name[:80]!r} is given more than once")
    try:
        converted = msgspec.convert(dict(query), operation.query, strict=False)
    except msgspec.ValidationError as error:
        raise ApiError(HTTPStatus.BAD_REQUEST, f"the parameters are not valid: {error}") from None
    _check_numbers(msgspec.to_builtins(converted))
    return converted


async def _body(decoder: msgspec.json.Decoder[Any], request: web.Request) -> Any:
    if request.content_type != "application/json":
        raise ApiError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"the body is {request.content_type[:80]!r}, but must be application/json"
        )
    if encoding := request.headers.get(hdrs.CONTENT_ENCODING):
        raise ApiError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"the body is encoded as {encoding[:80]!r}; send it as it is")
    try:
        async with asyncio.timeout(BODY_S_MAX):
            data = await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise ApiError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body has more than {BODY_BYTES_MAX} bytes; send less at a time"
        ) from None
    except TimeoutError:
        raise ApiError(HTTPStatus.REQUEST_TIMEOUT, f"the body did not come within {BODY_S_MAX:g} s") from None
    except (OSError, ClientPayloadError, web.RequestPayloadError) as error:
        raise ApiError(HTTPStatus.BAD_REQUEST, f"the body ends early: {error}") from None
    try:
        body = decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(HTTPStatus.BAD_REQUEST, f"the body is not valid: {error}") from None
    _check_numbers(msgspec.to_builtins(body))
    return body


def _check_numbers(value: Any) -> None:
    """Raise ApiError for an integer that no field of the node can hold."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            _check_numbers(part)
    elif isinstance(value, int) and abs(value) > NUMBER_MAX:
        raise ApiError(HTTPStatus.BAD_REQUEST, f"the number {str(value)[:40]} is too large; the largest is {NUMBER_MAX}")
