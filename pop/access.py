"""Who may do what over gRPC: principals, known by token or certificate, and what each may publish, consume, administrate.

A TOML file names them:

    [[principal]]
    name = "billing"
    token_sha256 = "9f86d081884c7d65..."   # of the token that calls carry as `authorization: Bearer TOKEN`
    certificate = "billing.example.org"    # or: a name in the client's certificate, by mTLS
    publish = ["orders/#"]                 # topic filters
    consume = ["billing", "audit-*"]       # groups, with `*` and `?`
    admin = ["billing"]                    # groups that it may create, change, reset, delete and redrive

The file holds hashes of tokens, not tokens; `printf %s TOKEN | sha256sum` makes one. It is read at the start. Health checks
need no principal, reflection any.
"""

from __future__ import annotations

import tomllib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio

from store import topics

PERMITTED_REMEMBERED = 100_000
"""Decisions on topics that are kept."""

SHA256_DIGITS = 64

SERVICE = "/millrace.pop.v1."

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]


class AccessInvalid(ValueError):
    """Raised when an access file can't be read, or says something that it can't mean."""


@dataclass(frozen=True, slots=True)
class Principal:
    """Somebody who calls."""

    name: str
    token_sha256: str = ""
    certificate: str = ""
    publish: tuple[str, ...] = ()
    consume: tuple[str, ...] = ()
    admin: tuple[str, ...] = ()


Need = tuple[str, str]
"""What a call needs: "publish" and a topic, "consume" or "admin" and a group; an empty group means all of them."""


class Access:
    """Decides on calls.

    Parameters:
        principals: who is known.
    """

    def __init__(self, principals: Iterable[Principal]) -> None:
        self._by_token: dict[str, Principal] = {}
        self._by_certificate: dict[str, Principal] = {}
        for principal in principals:
            if principal.token_sha256:
                self._by_token[principal.token_sha256] = principal
            if principal.certificate:
                self._by_certificate[principal.certificate] = principal
        self._topics: dict[tuple[str, str], bool] = {}

    def principal_of(self, token: str, certificates: Iterable[str]) -> Principal | None:
        """Return who shows a token, or a certificate with these names; None for a stranger."""
        if token:
            # Found by its hash: how long the search takes tells nothing of the token.
            return self._by_token.get(sha256(token.encode()).hexdigest())
        return next((self._by_certificate[name] for name in certificates if name in self._by_certificate), None)

    def permits(self, principal: Principal, need: Need) -> bool:
        """Return whether somebody may do something."""
        what, name = need
        if what == "publish":
            return self._may_publish(principal, name)
        patterns = principal.consume if what == "consume" else principal.admin
        return any(pattern == "*" or (name != "" and fnmatchcase(name, pattern)) for pattern in patterns)

    def _may_publish(self, principal: Principal, topic: str) -> bool:
        key = (principal.name, topic)
        found = self._topics.get(key)
        if found is None:
            if len(self._topics) >= PERMITTED_REMEMBERED:
                self._topics.clear()
            found = self._topics[key] = any(topics.matches(allowed, topic) for allowed in principal.publish)
        return found


def load_access(path: Path) -> Access:
    """Read an access file.

    Raises:
        AccessInvalid: says what is wrong with it.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise AccessInvalid(f"the access file {path} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise AccessInvalid(f"the access file {path} is not TOML: {error}") from error
    rows = document.pop("principal", [])
    if document or not isinstance(rows, list):
        raise AccessInvalid(f"the access file {path} has {', '.join(document) or 'a principal'} where [[principal]] should be")
    principals = [_principal(path, row) for row in rows]
    if len({principal.name for principal in principals}) < len(principals):
        raise AccessInvalid(f"the access file {path} has two principals of one name")
    return Access(principals)


def _principal(path: Path, row: Any) -> Principal:
    texts = {name: row.pop(name, "") for name in ("name", "token_sha256", "certificate")}
    lists = {name: row.pop(name, []) for name in ("publish", "consume", "admin")}
    where = f"the access file {path}, principal {texts['name']!r}"
    if row:
        raise AccessInvalid(f"{where}: there is no {', '.join(row)}")
    if not all(isinstance(value, str) for value in texts.values()) or not texts["name"]:
        raise AccessInvalid(f"{where}: name, token_sha256 and certificate are text, and the name is not empty")
    if not all(isinstance(value, list) and all(isinstance(each, str) for each in value) for value in lists.values()):
        raise AccessInvalid(f"{where}: publish, consume and admin are lists of text")
    token = texts["token_sha256"].lower()
    if token and (len(token) != SHA256_DIGITS or not all(c in "0123456789abcdef" for c in token)):
        raise AccessInvalid(f"{where}: token_sha256 must have {SHA256_DIGITS} hexadecimal digits")
    if not token and not texts["certificate"]:
        raise AccessInvalid(f"{where}: give token_sha256 or certificate, by which it is known")
    for allowed in lists["publish"]:
        topics.check_filter(allowed)
    publish, consume, admin = (tuple(lists[name]) for name in ("publish", "consume", "admin"))
    return Principal(texts["name"], token, texts["certificate"], publish, consume, admin)


# --- calls ----------------------------------------------------------------------------------------------------------


def _publishing(request: Any) -> Iterator[Need]:
    for topic in {message.topic for message in request.messages}:
        yield "publish", topic


def _consuming(request: Any) -> Iterator[Need]:
    yield "consume", request.group


def _opening(request: Any) -> Iterator[Need]:
    if request.HasField("open"):
        yield "consume", request.open.group


def _administrating(request: Any) -> Iterator[Need]:
    yield "admin", request.group


def _nothing(_request: Any) -> Iterator[Need]:
    # A handle is known only to whoever got it.
    return iter(())


def _everything(_request: Any) -> Iterator[Need]:
    yield "admin", ""


NEEDS: dict[str, Callable[[Any], Iterator[Need]]] = {
    f"{SERVICE}PopService/Send": _publishing,
    f"{SERVICE}PopService/Pop": _consuming,
    f"{SERVICE}PopService/Ack": _consuming,
    f"{SERVICE}PopService/ChangeInvisible": _consuming,
    f"{SERVICE}PopService/GiveUp": _consuming,
    f"{SERVICE}PopService/Consume": _opening,
    f"{SERVICE}PopService/Recall": _nothing,
    f"{SERVICE}PopService/EndTransactions": _nothing,
    f"{SERVICE}PopService/PollTransactions": _everything,
    f"{SERVICE}PopService/ListTransactions": _everything,
    f"{SERVICE}GroupService/CreateGroup": _administrating,
    f"{SERVICE}GroupService/UpdateGroup": _administrating,
    f"{SERVICE}GroupService/DescribeGroups": _administrating,
    f"{SERVICE}GroupService/DeleteGroup": _administrating,
    f"{SERVICE}GroupService/ResetGroup": _administrating,
    f"{SERVICE}GroupService/ListDeadLetters": _administrating,
    f"{SERVICE}GroupService/Redrive": _administrating,
}
"""What the calls need. One that isn't here needs a principal, and nothing else."""

OPEN = ("/grpc.health.v1.Health/",)
"""What anybody may call."""


class AccessInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Asks who calls, and whether they may, before a call is served.

    Parameters:
        access: decides.
    """

    def __init__(self, access: Access) -> None:
        self._access = access

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method: str = handler_call_details.method
        if handler is None or method.startswith(OPEN):
            return handler
        needs = NEEDS.get(method, _nothing)
        if handler.request_streaming:
            return handler._replace(stream_stream=self._streaming(handler.stream_stream, needs))
        if handler.response_streaming:
            return handler._replace(unary_stream=self._streamed(handler.unary_stream, needs))
        return handler._replace(unary_unary=self._unary(handler.unary_unary, needs))

    def _unary(self, serve: Any, needs: Callable[[Any], Iterator[Need]]) -> Any:
        async def checked(request: Any, context: Context) -> Any:
            await self._check(context, needs(request))
            return await serve(request, context)

        return checked

    def _streamed(self, serve: Any, needs: Callable[[Any], Iterator[Need]]) -> Any:
        async def checked(request: Any, context: Context) -> AsyncIterator[Any]:
            await self._check(context, needs(request))
            async for response in serve(request, context):
                yield response

        return checked

    def _streaming(self, serve: Any, needs: Callable[[Any], Iterator[Need]]) -> Any:
        async def checked(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
            async def permitted() -> AsyncIterator[Any]:
                async for request in requests:
                    await self._check(context, needs(request))
                    yield request

            await self._check(context, ())
            async for response in serve(permitted(), context):
                yield response

        return checked

    async def _check(self, context: Context, needs: Iterable[Need]) -> None:
        principal = self._principal(context)
        if principal is None:
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                "show a token that the node knows (metadata 'authorization: Bearer TOKEN'), or a certificate",
            )
        for what, name in needs:
            if not self._access.permits(principal, (what, name)):
                to = f"{name[:80]!r}" if name else "all groups"
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, f"{principal.name} may not {what} {to}")

    def _principal(self, context: Context) -> Principal | None:
        token = ""
        for key, value in context.invocation_metadata() or ():
            if key == "authorization":
                scheme, _, shown = (value if isinstance(value, str) else value.decode(errors="replace")).partition(" ")
                token = shown.strip() if scheme.lower() == "bearer" else ""
        names: Any = context.auth_context() or {}
        certificates = [
            name.decode(errors="replace")
            for field in ("x509_common_name", "x509_subject_alternative_name")
            for name in names.get(field, ())
        ]
        return self._access.principal_of(token, certificates)
