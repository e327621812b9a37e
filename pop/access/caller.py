"""Who calls: the principal whose call is being served, what it may do, and who is charged for what the call creates."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

import grpc

from penstock.access.actions import SEND
from penstock.access.audit import Event
from penstock.access.rights import Rights
from penstock.access.subject import Subject
from penstock.pop.errors import PopError
from penstock.store.record import decode
from penstock.store.space.causer import NODE, Causer, source_of
from penstock.store.store import Store
from penstock.tracing.context import TRACEPARENT, TRACEPARENT_FORM, TRACESTATE, TRACESTATE_CHARS_MAX

if TYPE_CHECKING:
    from penstock.pop.access.livecalls import LiveCall
    from penstock.pop.grpc.calls import Context

CALLER: ContextVar[Rights | None] = ContextVar("caller", default=None)
"""The rights of the caller whose call is being served; None where access is not restricted. gRPC serves each call in a task of
its own, so this is the call's own context."""


_TRACE_KEYS: Final = (TRACEPARENT, TRACESTATE)

_SERVED: ContextVar[Context | None] = ContextVar("served", default=None)

_PEER: ContextVar[str] = ContextVar("peer", default="")
"""The peer of the call that is being served; empty outside of a call that gRPC serves."""


def note_call(context: Context) -> None:
    """Note that the call of this context is being served, and its peer.

    gRPC crashes when it is asked for the peer of a call that has ended.
    """
    _SERVED.set(context)
    _PEER.set(context.peer())


def peer_of(context: Context) -> str:
    """Return the address of the caller of the present call, as gRPC names it.

    Examples are `ipv4:127.0.0.1:4711` and `ipv6:%5B::1%5D:4711`.
    """
    return _PEER.get() or context.peer()


def address_of(context: Context) -> str:
    """Return the IP address of a caller.

    A connection that came through `pop.front` has it in the name of its socket: `unix-abstract:penstock-TOKEN:127.0.0.1:4711`.
    """
    kind, _, address = peer_of(context).partition(":")
    if kind == "unix-abstract":
        kind, address = "ipv6", address.partition(":")[2]
    host = address.rpartition(":")[0].replace("%5B", "[").replace("%5D", "]").strip("[]")
    return host if kind in ("ipv4", "ipv6") else ""


def causer_of_call() -> Causer:
    """Return who causes what the present call creates; the node outside of a call."""
    context, rights = _SERVED.get(), CALLER.get()
    if context is None:
        return NODE
    return Causer.of(rights.subject.user if rights is not None else "", source_of(address_of(context)))


def trace_of_call() -> dict[str, str]:
    """Return the trace context in the metadata of the present call, as user properties; nothing if there is none.

    Its form is that of W3C Trace Context. A `traceparent` of another form is ignored, as the recommendation asks.
    """
    context = _SERVED.get()
    trace = {
        key: value
        for key, value in (context.invocation_metadata() or () if context is not None else ())
        if key in _TRACE_KEYS and isinstance(value, str)
    }
    if not trace or not TRACEPARENT_FORM.fullmatch(trace.get(TRACEPARENT, "")):
        return {}
    if len(trace.get(TRACESTATE, "")) > TRACESTATE_CHARS_MAX:
        del trace[TRACESTATE]
    return trace


GUARDED: ContextVar[LiveCall | None] = ContextVar("guarded", default=None)
"""The call that is being served; None outside of a call whose access is controlled."""


class AccessDenied(PopError):
    """Raised for a call that is not allowed.

    Parameters:
        status: UNAUTHENTICATED, PERMISSION_DENIED, or UNAVAILABLE if nobody can tell now.
        detail: what the caller is told.
        event: what the audit log calls it.
        subject: who is not allowed, as far as that is known; None for the caller of the present call.
        fields: of the line in the audit log.
    """

    def __init__(
        self,
        status: grpc.StatusCode,
        detail: str,
        event: Event = "refused",
        subject: Subject | None = None,
        **fields: object,
    ) -> None:
        self.status = status
        self.detail = detail
        self.event: Final[Event] = event
        self.subject = subject
        self.fields = fields
        super().__init__(detail)


def check_permitted(action: str, name: str) -> None:
    """Check that the caller may perform an action on a topic, a filter or a group. See `Rights.may`.

    Raises:
        AccessDenied: it may not.
    """
    rights = CALLER.get()
    if rights is not None:
        check_rights(rights, action, name)


def check_permitted_throughout(action: str, name: str) -> None:
    """Check that the caller may perform an action, now and as long as the present call goes on.

    A call that waits, and whose needs its request does not tell, calls this for each of them before it waits.

    Raises:
        AccessDenied: the caller may not.
    """
    check_permitted(action, name)
    call = GUARDED.get()
    if call is not None:
        call.needs[action, name] = None


def check_sender(store: Store, position: int, size: int | None) -> None:
    """Check that the caller may send to the topic of a stored message, whose end the caller wants to decide.

    Args:
        store: has the message.
        position: of the message.
        size: of its record in bytes; None if it is no longer there, so that there is nothing to check.

    Raises:
        AccessDenied: the caller may not, or the message can't be read, so that its topic is not known.
    """
    if CALLER.get() is None or size is None:
        return
    topic = _topic_of(store, position, size)
    if topic is None:
        detail = "the message can't be read, so its topic is not known"
        raise AccessDenied(grpc.StatusCode.PERMISSION_DENIED, detail, "denied", action=SEND, why=detail)
    check_permitted(SEND, topic)


def may_send_now(store: Store, position: int, size: int) -> bool:
    """Return whether the caller may send to the topic of a stored message, by the rules as they are now.

    They may have changed since the call began. The arguments are those of `check_sender`.
    """
    call = GUARDED.get()
    rights = call.rights if call is not None and call.rights is not None else CALLER.get()
    if rights is None:
        return True
    topic = _topic_of(store, position, size)
    return topic is not None and rights.may(SEND, topic)


def _topic_of(store: Store, position: int, size: int) -> str | None:
    store.commit()  # the message may have been stored in this turn
    data = store.read_intact(position, size)
    return decode(data, position=position, verify=False).topic.decode() if data is not None else None


def check_rights(rights: Rights, action: str, name: str) -> None:
    """Check that somebody may perform an action. Raises AccessDenied."""
    if not rights.may(action, name):
        what = f"{name[:80]!r}" if name else "all groups"
        detail = f"{rights.subject.user} may not {action} {what}: the node's access file does not allow it"
        raise AccessDenied(grpc.StatusCode.PERMISSION_DENIED, detail, "denied", rights.subject, action=action, name=name)
