"""The gRPC interceptor that finds out who calls, and whether they may, before a call is served."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import grpc
import grpc.aio

from penstock.access.control import AccessControl
from penstock.access.identity import KeysUnavailable, ProvenIdentity, TokenInvalid, is_token
from penstock.access.policy import SIGNATURE, AccessPolicy
from penstock.access.rights import Rights
from penstock.access.subject import Subject
from penstock.pop.access.caller import CALLER, AccessDenied, address_of, check_rights
from penstock.pop.access.livecalls import LiveCall, LiveCalls
from penstock.pop.errors import PopError

OPEN_METHODS = ("/grpc.health.v1.Health/",)
"""Prefixes of the methods that anybody may call."""

RIGHTS_REMEMBERED: Final = 10_000
"""Callers whose rights an interceptor remembers. It forgets all of them when it reaches this number."""

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Need: TypeAlias = tuple[str, str]
"""What a call needs: an action, and the topic, filter or group that it is about. An empty group means all groups."""
Needs: TypeAlias = Callable[[Any], Iterator[Need]]
"""Yields what a request needs."""
Refuse: TypeAlias = Callable[[Context, Exception], Awaitable[Any]]
"""Ends a call that is not allowed: returns the response that says so, or aborts the call."""


@dataclass(frozen=True, slots=True)
class ServiceRules:
    """What the methods of a service need, and how the service refuses a call.

    Parameters:
        prefix: what the full names of its methods begin with.
        needs: the needs of a request, by the name of its method. A method that is not in here needs a principal only.
        refuse: ends a call that is not allowed.
        changes: the methods that change what others rely on, so that the audit log names their callers.
    """

    prefix: str
    needs: Mapping[str, Needs]
    refuse: Refuse
    changes: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class _Method:
    """What the interceptor knows of a method: see `ServiceRules`."""

    name: str
    needs: Needs
    refuse: Refuse
    is_change: bool = False


def no_needs(_request: Any) -> Iterator[Need]:
    """Yield nothing: the call needs a principal only, or the method checks by itself what its handles are about."""
    return iter(())


async def abort_denied(context: Context, error: Exception) -> Any:
    """End a call with the gRPC status of the error."""
    status = error.status if isinstance(error, AccessDenied) else grpc.StatusCode.INVALID_ARGUMENT
    await context.abort(status, str(error))


class AccessInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Asks who calls, and whether they may, before a call is served.

    What goes on is looked at again when the access control changes, or when the caller's token ends. It ends if its caller may
    no longer do what it does.

    Parameters:
        access: decides, if it has a policy, and keeps the audit log.
        rules: of the services. Methods of other services need a principal only.
    """

    def __init__(self, access: AccessControl, rules: Iterable[ServiceRules]) -> None:
        self._access = access
        self._rules = tuple(rules)
        self._rights: dict[Subject, Rights] = {}
        self._live = LiveCalls()
        access.on_change.append(self._changed)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        full_name: str = handler_call_details.method
        if handler is None or full_name.startswith(OPEN_METHODS):
            return handler
        method = self._method(full_name)
        if handler.request_streaming:
            return handler._replace(stream_stream=self._stream_stream(handler.stream_stream, method))
        if handler.response_streaming:
            return handler._replace(unary_stream=self._unary_stream(handler.unary_stream, method))
        return handler._replace(unary_unary=self._unary_unary(handler.unary_unary, method))

    def _method(self, full_name: str) -> _Method:
        for rules in self._rules:
            if full_name.startswith(rules.prefix):
                name = full_name.removeprefix(rules.prefix)
                return _Method(name, rules.needs.get(name, no_needs), rules.refuse, name in rules.changes)
        return _Method(full_name, no_needs, abort_denied)

    def _unary_unary(self, serve: Any, method: _Method) -> Any:
        async def checked(request: Any, context: Context) -> Any:
            try:
                needed = tuple(method.needs(request))
                ends_ms = self._check(context, method, needed)
                if method.is_change:
                    self._note_change(context, method, request)
                call = LiveCall(lambda: self._check(context, method, needed))
                return await self._live.run(call, serve(request, context), self._seconds_to(ends_ms))
            except PopError as error:
                return await method.refuse(context, error)

        return checked

    def _unary_stream(self, serve: Any, method: _Method) -> Any:
        async def checked(request: Any, context: Context) -> AsyncIterator[Any]:
            try:
                needed = tuple(method.needs(request))
                ends_ms = self._check(context, method, needed)
                call = LiveCall(lambda: self._check(context, method, needed))
                async for response in self._live.serve(call, serve(request, context), self._seconds_to(ends_ms)):
                    yield response
            except PopError as error:
                yield await method.refuse(context, error)

        return checked

    def _stream_stream(self, serve: Any, method: _Method) -> Any:
        async def checked(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
            needed: dict[Need, None] = {}
            call = LiveCall(lambda: self._check(context, method, needed))

            async def permitted() -> AsyncIterator[Any]:
                async for request in requests:
                    found = tuple(method.needs(request))
                    self._check(context, method, found)
                    needed.update(dict.fromkeys(found))
                    yield request

            try:
                ends_ms = self._check(context, method, ())
                async for response in self._live.serve(call, serve(permitted(), context), self._seconds_to(ends_ms)):
                    yield response
            except PopError as error:
                yield await method.refuse(context, error)

        return checked

    def _changed(self) -> None:
        self._rights.clear()
        self._live.check()

    def _seconds_to(self, ends_ms: int | None) -> float | None:
        return max((ends_ms - self._access.now_ms()) / 1000, 0.0) if ends_ms is not None else None

    # --- one call ---------------------------------------------------------------------------------------------------

    def _check(self, context: Context, method: _Method, needs: Iterable[Need]) -> int | None:
        """Find out who calls, for the code that serves the call, and check what the call needs.

        Returns when the proof of the caller's identity ends, in ms since 1970; None if it does not. Raises AccessDenied.
        """
        policy = self._access.policy
        if policy is None:
            return None
        identity = self._authenticate(policy, context)
        if identity is None:
            raise AccessDenied(
                grpc.StatusCode.UNAUTHENTICATED,
                "the node doesn't know who calls: show a token that it knows (metadata 'authorization: Bearer TOKEN'), a "
                "certificate, or a signature by an access key",
            )
        subject = Subject(identity.user, identity.roles, address=address_of(context))
        rights = self._rights.get(subject)
        if rights is None:
            if len(self._rights) >= RIGHTS_REMEMBERED:
                self._rights.clear()
            rights = self._rights[subject] = policy.rights_of(subject)
        if (ban := self._access.bans.of(subject)) is not None:
            raise AccessDenied(grpc.StatusCode.PERMISSION_DENIED, f"the {ban.kind} {ban.name} is banned")
        CALLER.set(rights)
        for action, name in needs:
            if not rights.may(action, name):
                self._access.audit.note("denied", subject, over="grpc", method=method.name, action=action, name=name)
            check_rights(rights, action, name)
        return identity.expires_ms

    def _authenticate(self, policy: AccessPolicy, context: Context) -> ProvenIdentity | None:
        metadata = {
            key: value if isinstance(value, str) else value.decode(errors="replace")
            for key, value in context.invocation_metadata() or ()
        }
        authorization = metadata.get("authorization", "")
        scheme, _, credentials = authorization.partition(" ")
        why = "nothing that the node knows was shown"
        if authorization.startswith(SIGNATURE):
            principal = policy.by_signature(authorization, metadata.get("x-mq-date-time", ""))
        elif scheme.lower() == "bearer" and credentials.strip():
            token, tokens = credentials.strip(), self._access.tokens
            principal = policy.by_token(token)
            if principal is None and tokens is not None and is_token(token):
                try:
                    return tokens.verify(token)
                except TokenInvalid as error:
                    why = str(error)
                except KeysUnavailable as error:
                    raise AccessDenied(grpc.StatusCode.UNAVAILABLE, f"{error}; try again") from error
        else:
            properties: Any = context.auth_context() or {}
            principal = policy.by_certificate(
                name.decode(errors="replace")
                for field in ("x509_common_name", "x509_subject_alternative_name")
                for name in properties.get(field, ())
            )
        if principal is not None:
            return ProvenIdentity(principal.name)
        self._access.audit.note("refused", Subject(address=address_of(context)), over="grpc", why=why)
        return None

    def _note_change(self, context: Context, method: _Method, request: Any) -> None:
        caller = CALLER.get()
        subject = caller.subject if caller is not None else Subject(address=address_of(context))
        self._access.audit.note(
            "changed", subject, over="grpc", what=method.name, group=request.group, filter=getattr(request, "filter", "")
        )
