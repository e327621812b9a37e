"""Calls to a cluster of etcd: to whichever member answers first, within a bounded time."""

from __future__ import annotations

import asyncio
from typing import Any, Final, Generic, NamedTuple, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from penstock.cluster.options import EtcdOptions
from penstock.cluster.proto import etcd_pb2 as pb

CALL_S = 1.5
"""After this time a call has no answer."""
NEXT_S = 0.2
"""After this time without an answer, a call is sent to the next member as well. All calls may be repeated."""
CONNECT_MS = 300
"""The longest pause between two attempts to connect to a member."""

FINAL = frozenset(
    {
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)
"""Codes of refusals. Another member would say the same. All other errors say that a member can't answer now."""

Metadata = tuple[tuple[str, str], ...]


A = TypeVar("A", bound=Message)


class Rpc(NamedTuple, Generic[A]):
    """One of etcd's calls."""

    path: str
    answer: type[A]


RANGE = Rpc("/etcdserverpb.KV/Range", pb.RangeResponse)
TXN = Rpc("/etcdserverpb.KV/Txn", pb.TxnResponse)
LEASE_GRANT = Rpc("/etcdserverpb.Lease/LeaseGrant", pb.LeaseGrantResponse)
LEASE_REVOKE = Rpc("/etcdserverpb.Lease/LeaseRevoke", pb.LeaseRevokeResponse)
LEASE_KEEP_ALIVE = Rpc("/etcdserverpb.Lease/LeaseKeepAlive", pb.LeaseKeepAliveResponse)
"""A stream in etcd's definition. One request on it has one answer, so it is called as the others are."""
WATCH = Rpc("/etcdserverpb.Watch/Watch", pb.WatchResponse)
AUTHENTICATE = Rpc("/etcdserverpb.Auth/Authenticate", pb.AuthenticateResponse)


class EtcdRefused(Exception):
    """Raised when etcd has an answer, and the answer is an error."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self.code: Final = error.code()
        super().__init__(error.details() or error.code().name)

    @property
    def is_token_old(self) -> bool:
        """Whether another token is needed: the last one has expired, or somebody has changed users or roles."""
        return self.code is grpc.StatusCode.UNAUTHENTICATED or "revision in header is old" in str(self)


class EtcdCalls:
    """Calls to etcd.

    Parameters:
        options: where etcd is.
    """

    def __init__(self, options: EtcdOptions) -> None:
        self._options = options
        settings = [
            ("grpc.max_reconnect_backoff_ms", CONNECT_MS),
            ("grpc.initial_reconnect_backoff_ms", CONNECT_MS // 3),
            ("grpc.min_reconnect_backoff_ms", CONNECT_MS // 3),
            ("grpc.enable_http_proxy", 0),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        credentials = _credentials_of(options)
        self._channels = [
            grpc.aio.secure_channel(each, credentials, settings) if credentials else grpc.aio.insecure_channel(each, settings)
            for each in options.endpoints
        ]
        self._current = 0
        """Number of the member that has answered last."""
        self._token = ""
        self.problem = ""
        """Why the last call had no answer; empty if it had one."""

    async def close(self) -> None:
        """End all calls and connections."""
        for channel in self._channels:
            await channel.close(None)

    async def call(self, rpc: Rpc[A], request: Message) -> A | None:
        """Return the first answer of a member, or None if no member answers within `CALL_S`.

        The request may be carried out although there is no answer, more than once, and later.

        Raises:
            EtcdRefused: etcd refuses the request.
        """
        try:
            async with asyncio.timeout(CALL_S):
                return await self._call_authenticated(rpc, request)
        except TimeoutError:
            self.problem = f"etcd at {', '.join(self._options.endpoints)} did not answer {rpc.path} within {CALL_S:g} s"
            return None
        except EtcdRefused as refused:
            self.problem = f"etcd refused {rpc.path}: {refused}{self._remedy(refused)}"
            raise

    def _remedy(self, refused: EtcdRefused) -> str:
        text = str(refused)
        if "authentication is not enabled" in text:
            return "; leave out replication.etcd_user, or enable etcd's authentication"
        if "user name is empty" in text:
            return "; etcd wants a user: set replication.etcd_user and replication.etcd_password_file"
        if "authentication failed" in text:
            return f"; check the password of user {self._options.user!r} (replication.etcd_password_file)"
        if refused.code is grpc.StatusCode.PERMISSION_DENIED:
            return f"; give user {self._options.user!r} a role that may read and write the keys below /penstock/"
        return ""

    async def _call_authenticated(self, rpc: Rpc[A], request: Message) -> A | None:
        if not self._options.user:
            return await self._race(rpc, request, ())
        for is_last in (False, True):
            metadata = await self.metadata()
            if metadata is None:
                return None
            try:
                return await self._race(rpc, request, metadata)
            except EtcdRefused as refused:
                if is_last or not refused.is_token_old:
                    raise
                self._token = ""
        raise AssertionError

    async def metadata(self) -> Metadata | None:
        """Return the metadata of calls, with a token if etcd has users. None if there is no answer. Raises EtcdRefused."""
        options = self._options
        if options.user and not self._token:
            answer = await self._race(AUTHENTICATE, pb.AuthenticateRequest(name=options.user, password=options.password), ())
            if answer is None:
                return None
            self._token = answer.token
        return (("token", self._token),) if self._token else ()

    async def _race(self, rpc: Rpc[A], request: Message, metadata: Metadata) -> A | None:
        """Call a member, and after each `NEXT_S` the next one too."""
        count = len(self._channels)
        waiting = [(self._current + each) % count for each in range(count)]
        running: dict[asyncio.Future[A], int] = {}
        try:
            while waiting or running:
                if waiting:
                    member = waiting.pop(0)
                    running[asyncio.ensure_future(self._call_one(member, rpc, request, metadata))] = member
                timeout_s = NEXT_S if waiting else None
                done, _ = await asyncio.wait(running, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                for call in done:
                    member = running.pop(call)
                    try:
                        answer = call.result()
                    except grpc.aio.AioRpcError as error:
                        if error.code() in FINAL:
                            self._current = member
                            raise EtcdRefused(error) from error
                        self.problem = f"etcd at {self._options.endpoints[member]}: {error.details() or error.code().name}"
                    else:
                        self._current, self.problem = member, ""
                        return answer
            return None
        finally:
            for call in running:
                call.cancel()

    async def _call_one(self, member: int, rpc: Rpc[A], request: Message, metadata: Metadata) -> A:
        call = self._channels[member].unary_unary(rpc.path, _serialized, rpc.answer.FromString)
        answer: A = await call(request, metadata=metadata, timeout=CALL_S)
        return answer

    def watch(self, metadata: Metadata) -> grpc.aio.StreamStreamCall[Any, Any]:
        """Open a stream of watches at the next member. It ends when that member has no leader for some time."""
        self._current = (self._current + 1) % len(self._channels)
        call = self._channels[self._current].stream_stream(WATCH.path, _serialized, WATCH.answer.FromString)
        return call(None, metadata=(*metadata, ("hasleader", "true")))


def _credentials_of(options: EtcdOptions) -> grpc.ChannelCredentials | None:
    """Return the credentials of a channel, or None for plain text."""
    if options.root_certificates is None:
        return None
    return grpc.ssl_channel_credentials(options.root_certificates, options.key, options.certificate)


def _serialized(message: Message) -> bytes:
    return message.SerializeToString()
