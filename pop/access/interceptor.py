"""The gRPC interceptor that finds out who calls, and whether they may, before a call is served."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
import grpc.aio

from penstock.pop.access.policy import SIGNATURE, AccessPolicy, Need, Principal
from penstock.pop.errors import PopError

CALLER: ContextVar[str] = ContextVar("caller", default="")
"""Name of the principal whose call is being served; empty where access is not restricted."""

OPEN_METHODS = ("/grpc.health.v1.Health/",)
"""Prefixes of the methods that anybody may call."""

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Needs: TypeAlias = Callable[[Any], Iterator[Need]]
"""Yields what a request needs."""
Refuse: TypeAlias = Callable[[Context, Exception], Awaitable[Any]]
"""Ends a call that is not allowed: returns the response that says so, or aborts the call."""


class AccessDenied(Exception):
    """Raised for a call that is not allowed.

    Parameters:
        status: UNAUTHENTICATED or PERMISSION_DENIED.
        detail: what the caller is told.
    """

    def __init__(self, status: grpc.StatusCode, detail: str) -> None:
        self.status = status
        self.detail = detail
        super().__init__(detail)


@dataclass(frozen=True, slots=True)
class ServiceRules:
    """What the methods of a service need, and how the service refuses a call.

    Parameters:
        prefix: what the full names of its methods begin with.
        needs: the needs of a request, by the name of its method. A method that is not in here needs a principal only.
        refuse: ends a call that is not allowed.
    """

    prefix: str
    needs: Mapping[str, Needs]
    refuse: Refuse


def no_needs(_request: Any) -> Iterator[Need]:
    """Yield nothing: the call needs a principal only, for example because only the rightful owner knows its handles."""
    return iter(())


async def abort_denied(context: Context, error: Exception) -> Any:
    """End a call with the gRPC status of the error."""
    status = error.status if isinstance(error, AccessDenied) else grpc.StatusCode.INVALID_ARGUMENT
    await context.abort(status, str(error))


class AccessInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Asks who calls, and whether they may, before a call is served.

    Parameters:
        policy: decides.
        rules: of the services. Methods of other services need a principal only.
    """

    def __init__(self, policy: AccessPolicy, rules: Iterable[ServiceRules]) -> None:
        self._policy = policy
        self._rules = tuple(rules)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method: str = handler_call_details.method
        if handler is None or method.startswith(OPEN_METHODS):
            return handler
        needs, refuse = self._rules_of(method)
        if handler.request_streaming:
            return handler._replace(stream_stream=self._stream_stream(handler.stream_stream, needs, refuse))
        if handler.response_streaming:
            return handler._replace(unary_stream=self._unary_stream(handler.unary_stream, needs, refuse))
        return handler._replace(unary_unary=self._unary_unary(handler.unary_unary, needs, refuse))

    def _rules_of(self, method: str) -> tuple[Needs, Refuse]:
        for rules in self._rules:
            if method.startswith(rules.prefix):
                return rules.needs.get(method.removeprefix(rules.prefix), no_needs), rules.refuse
        return no_needs, abort_denied

    def _unary_unary(self, serve: Any, needs: Needs, refuse: Refuse) -> Any:
        async def checked(request: Any, context: Context) -> Any:
            try:
                self._check(context, needs(request))
            except (AccessDenied, PopError) as error:
                return await refuse(context, error)
            return await serve(request, context)

        return checked

    def _unary_stream(self, serve: Any, needs: Needs, refuse: Refuse) -> Any:
        async def checked(request: Any, context: Context) -> AsyncIterator[Any]:
            try:
                self._check(context, needs(request))
            except (AccessDenied, PopError) as error:
                yield await refuse(context, error)
                return
            async for response in serve(request, context):
                yield response

        return checked

    def _stream_stream(self, serve: Any, needs: Needs, refuse: Refuse) -> Any:
        async def checked(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
            async def permitted() -> AsyncIterator[Any]:
                async for request in requests:
                    self._check(context, needs(request))
                    yield request

            try:
                self._check(context, ())
                async for response in serve(permitted(), context):
                    yield response
            except (AccessDenied, PopError) as error:
                yield await refuse(context, error)

        return checked

    def _check(self, context: Context, needs: Iterable[Need]) -> None:
        principal = self._authenticate(context)
        if principal is None:
            raise AccessDenied(
                grpc.StatusCode.UNAUTHENTICATED,
                "the node doesn't know who calls: show a token that it knows (metadata 'authorization: Bearer TOKEN'), a "
                "certificate, or a signature by an access key",
            )
        CALLER.set(principal.name)  # gRPC serves each call in a task of its own, so this is the call's own context
        for what, name in needs:
            if not self._policy.permits(principal, (what, name)):
                whom = f"{name[:80]!r}" if name else "all groups"
                raise AccessDenied(grpc.StatusCode.PERMISSION_DENIED, f"{principal.name} may not {what} {whom}")

    def _authenticate(self, context: Context) -> Principal | None:
        metadata = {
            key: value if isinstance(value, str) else value.decode(errors="replace")
            for key, value in context.invocation_metadata() or ()
        }
        authorization = metadata.get("authorization", "")
        if authorization.startswith(SIGNATURE):
            return self._policy.authenticate_signature(authorization, metadata.get("x-mq-date-time", ""))
        scheme, _, credentials = authorization.partition(" ")
        token = credentials.strip() if scheme.lower() == "bearer" else ""
        properties: Any = context.auth_context() or {}
        names = [
            name.decode(errors="replace")
            for field in ("x509_common_name", "x509_subject_alternative_name")
            for name in properties.get(field, ())
        ]
        return self._policy.authenticate(token, names)
