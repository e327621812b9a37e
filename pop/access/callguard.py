"""Finds out who calls, and whether they may, before a call is served."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import grpc

from penstock.access.bans import Bans, Kind, concerns
from penstock.access.control import AccessControl
from penstock.access.identity import KeysUnavailable, ProvenIdentity, TokenInvalid, is_token
from penstock.access.policy import SIGNATURE, AccessPolicy
from penstock.access.rights import Rights
from penstock.access.subject import Subject
from penstock.pop.access.auditedcall import AuditedCall, LineFields
from penstock.pop.access.caller import CALLER, GUARDED, AccessDenied, address_of, check_rights
from penstock.pop.access.livecalls import LiveCall, LiveCalls
from penstock.pop.access.refusals import CallRefused
from penstock.pop.errors import PopError
from penstock.store.errors import StoreError

if TYPE_CHECKING:
    from penstock.pop.grpc.calls import Call, Context, Serve

RIGHTS_REMEMBERED: Final = 10_000
"""Callers whose rights a guard remembers. It forgets all of them when it reaches this number."""

CLIENT_ID: Final = "x-mq-client-id"
"""Metadata with the client id that a RocketMQ client has given itself."""

_NOBODY: Final = AccessPolicy()

Need: TypeAlias = tuple[str, str]
"""What a call needs: an action, and the topic, filter or group that it is about. An empty group means all groups."""
Needs: TypeAlias = Callable[[Any], Iterator[Need]]
"""Yields what a request needs."""
Refuse: TypeAlias = Callable[[Exception], CallRefused]
"""Returns what ends a call that fails."""


@dataclass(frozen=True, slots=True)
class ServiceRules:
    """What the methods of a service need, and how the service tells errors.

    Parameters:
        prefix: what the full names of its methods begin with.
        needs: the needs of a request, by the name of its method. A method that is not in here needs a principal only.
        refuse: returns what ends a call that fails.
        changes: the methods that change what others rely on; each returns what a request is to change, for the audit log. The
            code of the method calls `note_change` when that is done.
        errors: that `refuse` takes. Others are defects of the node, which gRPC logs.
    """

    prefix: str
    needs: Mapping[str, Needs]
    refuse: Refuse
    changes: Mapping[str, Callable[[Any], LineFields]] = field(default_factory=dict)
    errors: tuple[type[Exception], ...] = (PopError, StoreError)


def no_needs(_request: Any) -> Iterator[Need]:
    """Yield nothing: the call needs a principal only, or the method checks by itself what its handles are about."""
    return iter(())


class CallGuard:
    """Asks who calls, and whether they may, before a call is served.

    What goes on is looked at again when the access control changes, or when the caller's token ends. It ends if its caller may
    no longer do what it does. Without a policy, only bans keep callers out.

    Parameters:
        access: decides, and keeps the audit log.
    """

    def __init__(self, access: AccessControl) -> None:
        self._access = access
        self._rights: dict[Subject, Rights] = {}
        self._live = LiveCalls(self._check_again, lambda live: self._subject(live.context))
        access.on_change.append(self._changed)

    async def admit(self, serve: Serve, call: Call) -> Any:
        """Serve a call if its caller may make it, and as long as that is so: a stage of `Calls`.

        The audit log gets the errors of this stage and of the method. Raises AccessDenied.
        """
        method, context, request = call.method, call.context, call.request
        assert method.rules is not None
        change_of = method.rules.changes.get(method.name)
        change = partial(change_of, request) if change_of is not None else None
        with AuditedCall(self._access.audit, method.name, partial(self._caller, context), change):
            needs = method.rules.needs.get(method.name, no_needs)
            if method.has_request_stream:
                live = LiveCall(context)
                call.request = self._permitted(request, needs, live)
            else:
                live = LiveCall(context, self._needs(needs, request))
            GUARDED.set(live)
            ends_ms = self._check(context, live.needs)
            if method.has_response_stream:
                call.write = live.while_allowed(call.write)
            ends_s = max((ends_ms - self._access.now_ms()) / 1000, 0.0) if ends_ms is not None else None
            return await self._live.run(live, serve(call), ends_s)

    async def _permitted(self, requests: AsyncIterator[Any], needs_of: Needs, live: LiveCall) -> AsyncIterator[Any]:
        """Yield the requests of a stream, each of which may need more. Raises AccessDenied."""
        async for request in requests:
            needs = self._needs(needs_of, request)
            self._check(live.context, needs)
            live.needs.update(dict.fromkeys(needs))
            yield request

    def disconnect(self, kind: Kind, name: str) -> int:
        """End the calls of a user, of a RocketMQ client id, or from an address or network; return how many there were."""
        error = AccessDenied(grpc.StatusCode.UNAVAILABLE, "an operator has ended the call", "disconnected")
        return self._live.end(lambda subject: concerns(kind, name, subject), error)

    def _changed(self) -> None:
        self._rights.clear()
        self._live.check()

    def _needs(self, needs_of: Needs, request: Any) -> tuple[Need, ...]:
        return tuple(needs_of(request)) if self._access.policy is not None else ()

    # --- one call ---------------------------------------------------------------------------------------------------

    def _check(self, context: Context, needs: Iterable[Need]) -> int | None:
        """Find out who calls, for the code that serves the call, and check what the call needs.

        Returns when the proof of the caller's identity ends, in ms since 1970; None if it does not. Raises AccessDenied.
        """
        access = self._access
        policy, bans = access.policy, access.bans
        if policy is None:
            if bans:
                _check_banned(bans, self._subject(context))
            return None
        if bans:  # what follows may cost a signature
            _check_banned(bans, _stranger(context))
        identity, why = self._authenticate(policy, context)
        if identity is None:
            is_unknown = "authorization" in _metadata_of(context)
            shown = "it doesn't know the token or signature of the call" if is_unknown else "the call has no token"
            raise AccessDenied(
                grpc.StatusCode.UNAUTHENTICATED,
                f"the node doesn't know who calls: {shown}. Show a token that the node knows (metadata 'authorization: Bearer "
                "TOKEN'), a certificate, or a signature by an access key",
                subject=_stranger(context),
                reason="UNAUTHENTICATED",
                why=why,
            )
        subject = Subject(identity.user, identity.roles, address=address_of(context))
        if bans:
            _check_banned(bans, subject)
        rights = self._rights.get(subject)
        if rights is None:
            if len(self._rights) >= RIGHTS_REMEMBERED:
                self._rights.clear()
            rights = self._rights[subject] = policy.rights_of(subject)
        CALLER.set(rights)
        for action, name in needs:
            check_rights(rights, action, name)
        return identity.expires_ms

    def _check_again(self, live: LiveCall) -> None:
        """Check a call that goes on as `_check` does, and note what its caller may do now.

        That happens in a context of its own, because the present one is that of whoever has changed access control.
        """

        def check() -> Rights | None:
            self._check(live.context, live.needs)
            return CALLER.get()

        live.rights = copy_context().run(check)

    def _subject(self, context: Context) -> Subject:
        """Return who calls, as bans and operators name callers. Raises AccessDenied if nobody can tell now."""
        policy = self._access.policy
        identity, _ = self._authenticate(policy if policy is not None else _NOBODY, context)
        return replace(_stranger(context), user=identity.user if identity is not None else "")

    def _caller(self, context: Context, subject: Subject | None) -> Subject:
        """Return who calls, as the audit log names callers. `subject` is what is known of the caller already, if anything."""
        rights = CALLER.get()
        if subject is None and rights is not None:
            subject = rights.subject
        if subject is not None:
            return replace(subject, client_id=_client_id_of(context))
        try:
            return self._subject(context)
        except AccessDenied:
            return _stranger(context)

    def _authenticate(self, policy: AccessPolicy, context: Context) -> tuple[ProvenIdentity | None, str]:
        """Return who calls, or None and why that is not known. Raises AccessDenied if nobody can tell now."""
        metadata = _metadata_of(context)
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
                    return tokens.verify(token), ""
                except TokenInvalid as error:
                    why = str(error)
                except KeysUnavailable as error:
                    raise AccessDenied(
                        grpc.StatusCode.UNAVAILABLE, f"{error}; try again", subject=_stranger(context), reason="UNAVAILABLE"
                    ) from error
        else:
            properties: Any = context.auth_context() or {}
            principal = policy.by_certificate(
                name.decode(errors="replace")
                for kind in ("x509_common_name", "x509_subject_alternative_name")
                for name in properties.get(kind, ())
            )
        return (ProvenIdentity(principal.name), "") if principal is not None else (None, why)


def _check_banned(bans: Bans, subject: Subject) -> None:
    if (ban := bans.of(subject)) is not None:
        detail = f"the {ban.kind} {ban.name} is banned"
        raise AccessDenied(grpc.StatusCode.PERMISSION_DENIED, detail, subject=subject, reason="BANNED")


def _stranger(context: Context) -> Subject:
    """Return what is known of a caller that has not shown who it is."""
    return Subject(client_id=_client_id_of(context), address=address_of(context))


def _metadata_of(context: Context) -> dict[str, str]:
    return {
        key: value if isinstance(value, str) else value.decode(errors="replace")
        for key, value in context.invocation_metadata() or ()
    }


def _client_id_of(context: Context) -> str:
    return _metadata_of(context).get(CLIENT_ID, "")
