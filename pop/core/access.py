"""Who may do what over gRPC, and take part in groups over MQTT: principals, and what each may publish, consume, administrate.

A TOML file names them:

    [[principal]]
    name = "billing"
    token_sha256 = "9f86d081884c7d65..."   # of the token that calls carry as `authorization: Bearer TOKEN`
    certificate = "billing.example.org"    # or: a name in the client's certificate, by mTLS
    access_key = "billing"                 # or: by which RocketMQ clients sign, with
    access_secret = "..."                  # this; nothing but the plain secret can check a signature
    mqtt_user = "billing-*"                # or: MQTT user names, with `*` and `?`
    publish = ["orders/#"]                 # topic filters
    consume = ["billing", "audit-*"]       # groups, with `*` and `?`
    admin = ["billing"]                    # groups that it may create, change, reset, delete and redrive

The file holds hashes of tokens, not tokens; `printf %s TOKEN | sha256sum` makes one. One with secrets of access keys is for the
node's eyes only. It is read at the start. Health checks need no principal, reflection any.

A signature covers the time that its client states, and nothing else of a call (RocketMQ's clients, docs/transport.md); and that
time is the client's local one, called UTC. So its age is not judged: whoever reads it on the way can use it. Use TLS.

Over MQTT, `$share/GROUP/FILTER` takes from the group GROUP. A group that some principal's `consume` names is a back end's, and
no device may have its messages: only MQTT users that are principals whose `consume` names it, too. Groups that the file doesn't
name are of no use over gRPC, so devices may have those among themselves. A user name counts where the gateway's plugins or a
client certificate vouch for it; `mqtt_user = "*"` is everybody, with those who have none. What else a client may do over MQTT
(publish, subscribe to FILTER) its plugins say.
"""

from __future__ import annotations

import hmac
import tomllib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, TypeVar

import grpc
import grpc.aio

from penstock.pop.errors import PopError
from penstock.pop.rocketmq.names import filter_of, group_of, topic_of_message
from penstock.pop.rocketmq.status import Code, code_of, refusal
from penstock.store import topics

PERMITTED_REMEMBERED = 100_000
"""Decisions on topics that are kept."""

SHA256_DIGITS = 64

SERVICE = "/penstock.pop.v1."
ROCKETMQ = "/apache.rocketmq.v2.MessagingService/"

SIGNATURE = "MQv2-HMAC-SHA1 "
"""With what the authorization of a RocketMQ client begins."""

_CREDENTIALS = ("token_sha256", "certificate", "access_key", "access_secret", "mqtt_user")

CALLER: ContextVar[str] = ContextVar("caller", default="")
"""Name of the principal whose call is served; empty where access is not restricted."""

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
    access_key: str = ""
    access_secret: str = ""
    mqtt_user: str = ""
    publish: tuple[str, ...] = ()
    consume: tuple[str, ...] = ()
    admin: tuple[str, ...] = ()


class Denied(Exception):
    """Raised for a call that isn't allowed."""

    def __init__(self, status: grpc.StatusCode, detail: str) -> None:
        self.status = status
        self.detail = detail
        super().__init__(detail)


Need = tuple[str, str]
"""What a call needs: "publish" and a topic, "consume" or "admin" and a group; an empty group means all of them."""

Needs: TypeAlias = Callable[[Any], Iterator[Need]]
Refuse: TypeAlias = Callable[[Context, Exception], Awaitable[Any]]


class Access:
    """Decides on calls.

    Parameters:
        principals: who is known.
    """

    def __init__(self, principals: Iterable[Principal]) -> None:
        self._principals = tuple(principals)
        self._by_token: dict[str, Principal] = {}
        self._by_certificate: dict[str, Principal] = {}
        self._by_access_key: dict[str, Principal] = {}
        for principal in self._principals:
            if principal.token_sha256:
                self._by_token[principal.token_sha256] = principal
            if principal.certificate:
                self._by_certificate[principal.certificate] = principal
            if principal.access_key:
                self._by_access_key[principal.access_key] = principal
        self._topics: dict[tuple[str, str], bool] = {}

    def principal_of(self, token: str, certificates: Iterable[str]) -> Principal | None:
        """Return who shows a token, or a certificate with these names; None for a stranger."""
        if token:
            # Found by its hash: how long the search takes tells nothing of the token.
            return self._by_token.get(sha256(token.encode()).hexdigest())
        return next((self._by_certificate[name] for name in certificates if name in self._by_certificate), None)

    def principal_of_signature(self, authorization: str, date_time: str) -> Principal | None:
        """Return who signed `date_time`, the value of x-mq-date-time; None for a stranger.

        `authorization` begins with `SIGNATURE`. It is an HMAC-SHA1 by the secret, in hexadecimal digits of either case: the
        clients differ.
        """
        fields = dict(part.strip().partition("=")[::2] for part in authorization.removeprefix(SIGNATURE).split(","))
        principal = self._by_access_key.get(fields.get("Credential", ""))
        secret = "" if principal is None else principal.access_secret
        signed = hmac.digest(secret.encode(), date_time.encode(), "sha1").hex()
        shown = fields.get("Signature", "").lower()
        return principal if hmac.compare_digest(signed.encode(), shown.encode()) else None

    def permits(self, principal: Principal, need: Need) -> bool:
        """Return whether somebody may do something."""
        what, name = need
        if what == "publish":
            return self._may_publish(principal, name)
        patterns = principal.consume if what == "consume" else principal.admin
        return any(pattern == "*" or (name != "" and fnmatchcase(name, pattern)) for pattern in patterns)

    def may_share(self, user: str, group: str) -> bool:
        """Return whether an MQTT user may take from a group; empty: a client of whom nobody says who it is."""
        consumers = [principal for principal in self._principals if self.permits(principal, ("consume", group))]
        return not consumers or any(one.mqtt_user and fnmatchcase(user, one.mqtt_user) for one in consumers)

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
    keys = [principal.access_key for principal in principals if principal.access_key]
    if len(set(keys)) < len(keys):
        raise AccessInvalid(f"the access file {path} has two principals of one access key")
    return Access(principals)


def _principal(path: Path, row: Any) -> Principal:
    texts = {name: row.pop(name, "") for name in ("name", *_CREDENTIALS)}
    lists = {name: row.pop(name, []) for name in ("publish", "consume", "admin")}
    where = f"the access file {path}, principal {texts['name']!r}"
    if row:
        raise AccessInvalid(f"{where}: there is no {', '.join(row)}")
    if not all(isinstance(value, str) for value in texts.values()) or not texts["name"]:
        raise AccessInvalid(f"{where}: name, {', '.join(_CREDENTIALS)} are text, and the name is not empty")
    if not all(isinstance(value, list) and all(isinstance(each, str) for each in value) for value in lists.values()):
        raise AccessInvalid(f"{where}: publish, consume and admin are lists of text")
    token = texts["token_sha256"].lower()
    if token and (len(token) != SHA256_DIGITS or not all(c in "0123456789abcdef" for c in token)):
        raise AccessInvalid(f"{where}: token_sha256 must have {SHA256_DIGITS} hexadecimal digits")
    if bool(texts["access_key"]) != bool(texts["access_secret"]):
        raise AccessInvalid(f"{where}: access_key and access_secret go together")
    if not (token or texts["certificate"] or texts["access_key"]):
        if not texts["mqtt_user"]:
            raise AccessInvalid(f"{where}: give token_sha256, certificate, access_key or mqtt_user, by which it is known")
        if lists["publish"] or lists["admin"]:
            raise AccessInvalid(
                f"{where}: an MQTT user has only consume here; who publishes over MQTT, the gateway's plugins say"
            )
    for allowed in lists["publish"]:
        topics.check_filter(allowed)
    publish, consume, admin = (tuple(lists[name]) for name in ("publish", "consume", "admin"))
    texts["token_sha256"] = token
    return Principal(**texts, publish=publish, consume=consume, admin=admin)


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


def _sending_there(request: Any) -> Iterator[Need]:
    # What can't be read as a topic is not permitted to anybody: nothing of the call is served.
    for topic in {topic_of_message(message) for message in request.messages}:
        yield "publish", topic


def _consuming_there(request: Any) -> Iterator[Need]:
    yield "consume", group_of(request.group)


def _reporting_there(request: Any) -> Iterator[Need]:
    # Who publishes to a topic is asked about its half messages, and shown them.
    for topic in request.settings.publishing.topics:
        yield "publish", filter_of(topic)


NEEDS: dict[str, Needs] = {
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
    f"{ROCKETMQ}QueryRoute": _nothing,
    f"{ROCKETMQ}Heartbeat": _nothing,
    f"{ROCKETMQ}SendMessage": _sending_there,
    f"{ROCKETMQ}QueryAssignment": _consuming_there,
    f"{ROCKETMQ}ReceiveMessage": _consuming_there,
    f"{ROCKETMQ}AckMessage": _consuming_there,
    f"{ROCKETMQ}ForwardMessageToDeadLetterQueue": _consuming_there,
    f"{ROCKETMQ}PullMessage": _consuming_there,
    f"{ROCKETMQ}UpdateOffset": _consuming_there,
    f"{ROCKETMQ}GetOffset": _consuming_there,
    f"{ROCKETMQ}QueryOffset": _nothing,
    f"{ROCKETMQ}EndTransaction": _nothing,
    f"{ROCKETMQ}Telemetry": _reporting_there,
    f"{ROCKETMQ}NotifyClientTermination": _nothing,
    f"{ROCKETMQ}ChangeInvisibleDuration": _consuming_there,
    f"{ROCKETMQ}RecallMessage": _nothing,
    f"{ROCKETMQ}SyncLiteSubscription": _consuming_there,
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
        refuse = _answer if method.startswith(ROCKETMQ) else _abort
        if handler.request_streaming:
            return handler._replace(stream_stream=self._streaming(handler.stream_stream, needs, refuse))
        if handler.response_streaming:
            return handler._replace(unary_stream=self._streamed(handler.unary_stream, needs, refuse))
        return handler._replace(unary_unary=self._unary(handler.unary_unary, needs, refuse))

    def _unary(self, serve: Any, needs: Needs, refuse: Refuse) -> Any:
        async def checked(request: Any, context: Context) -> Any:
            try:
                self._check(context, needs(request))
            except (Denied, PopError) as error:
                return await refuse(context, error)
            return await serve(request, context)

        return checked

    def _streamed(self, serve: Any, needs: Needs, refuse: Refuse) -> Any:
        async def checked(request: Any, context: Context) -> AsyncIterator[Any]:
            try:
                self._check(context, needs(request))
            except (Denied, PopError) as error:
                yield await refuse(context, error)
                return
            async for response in serve(request, context):
                yield response

        return checked

    def _streaming(self, serve: Any, needs: Needs, refuse: Refuse) -> Any:
        async def checked(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
            async def permitted() -> AsyncIterator[Any]:
                async for request in requests:
                    self._check(context, needs(request))
                    yield request

            try:
                self._check(context, ())
                async for response in serve(permitted(), context):
                    yield response
            except (Denied, PopError) as error:
                yield await refuse(context, error)

        return checked

    def _check(self, context: Context, needs: Iterable[Need]) -> None:
        principal = self._principal(context)
        if principal is None:
            raise Denied(
                grpc.StatusCode.UNAUTHENTICATED,
                "show a token that the node knows (metadata 'authorization: Bearer TOKEN'), a certificate, or a signature by "
                "an access key",
            )
        CALLER.set(principal.name)  # each call is served by a task of its own
        for what, name in needs:
            if not self._access.permits(principal, (what, name)):
                to = f"{name[:80]!r}" if name else "all groups"
                raise Denied(grpc.StatusCode.PERMISSION_DENIED, f"{principal.name} may not {what} {to}")

    def _principal(self, context: Context) -> Principal | None:
        said = {
            key: value if isinstance(value, str) else value.decode(errors="replace")
            for key, value in context.invocation_metadata() or ()
        }
        authorization = said.get("authorization", "")
        if authorization.startswith(SIGNATURE):
            return self._access.principal_of_signature(authorization, said.get("x-mq-date-time", ""))
        scheme, _, shown = authorization.partition(" ")
        token = shown.strip() if scheme.lower() == "bearer" else ""
        names: Any = context.auth_context() or {}
        certificates = [
            name.decode(errors="replace")
            for field in ("x509_common_name", "x509_subject_alternative_name")
            for name in names.get(field, ())
        ]
        return self._access.principal_of(token, certificates)


async def _abort(context: Context, error: Exception) -> NoReturn:
    """End a call of the native API with a gRPC status."""
    status = error.status if isinstance(error, Denied) else grpc.StatusCode.INVALID_ARGUMENT
    await context.abort(status, str(error))


async def _answer(_context: Context, error: Exception) -> bytes:
    """Answer a call of the RocketMQ-compatible API with the status that says what is wrong."""
    codes = {grpc.StatusCode.UNAUTHENTICATED: Code.UNAUTHORIZED, grpc.StatusCode.PERMISSION_DENIED: Code.FORBIDDEN}
    return refusal(codes[error.status] if isinstance(error, Denied) else code_of(error), str(error))
