"""The gRPC channels of both clients."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio

from penstock.pop.client.retrydelays import RETRY_MS_MAX, RETRY_MS_MIN
from penstock.pop.client.security import Security, check_target

CONNECT_MS = 2_000
"""How long an attempt to connect may take at least, in ms. gRPC's default is 20 s. Over a slow network, TLS takes more than
half a second."""

CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", -1),  # The node bounds its responses. One message may exceed gRPC's default of 4 MiB.
    ("grpc.initial_reconnect_backoff_ms", RETRY_MS_MIN),
    ("grpc.min_reconnect_backoff_ms", CONNECT_MS),  # In spite of its name, it delays no attempt.
    ("grpc.max_reconnect_backoff_ms", RETRY_MS_MAX),
    # If the node vanishes without closing the connection, the client notices after the sum of these two.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
]


class _TokenInterceptor:
    """Adds the token to the metadata of each call."""

    def __init__(self, metadata: tuple[tuple[str, str], ...]) -> None:
        self._metadata = metadata

    def _with_token(self, details: grpc.aio.ClientCallDetails) -> grpc.aio.ClientCallDetails:
        metadata = grpc.aio.Metadata(*self._metadata, *(details.metadata or ()))
        return grpc.aio.ClientCallDetails(
            details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
        )


# gRPC registers an interceptor for one kind of call only, so there are two classes. Only the stubs make the bases generic.
class _UnaryTokenInterceptor(_TokenInterceptor, grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]
    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await continuation(self._with_token(client_call_details), request)


class _StreamTokenInterceptor(_TokenInterceptor, grpc.aio.StreamStreamClientInterceptor):  # type: ignore[type-arg]
    async def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return await continuation(self._with_token(client_call_details), request_iterator)


def async_channel(target: str, security: Security) -> grpc.aio.Channel:
    """Return a channel of asyncio to the node at `target` (`HOST:PORT`). Its interceptors add the token to each call.

    Raises:
        TypeError, ValueError: The target or the security can't be used.
    """
    check_target(target)
    _check_security(security)
    credentials = security.credentials
    interceptors: Any = None
    if security.token:
        interceptors = [_UnaryTokenInterceptor(security.metadata), _StreamTokenInterceptor(security.metadata)]
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS, interceptors=interceptors)
    return grpc.aio.secure_channel(target, credentials, options=CHANNEL_OPTIONS, interceptors=interceptors)


def sync_channel(target: str, security: Security) -> grpc.Channel:
    """Return a blocking channel to the node at `target` (`HOST:PORT`). The caller adds `security.metadata` to each call.

    Raises:
        TypeError, ValueError: The target or the security can't be used.
    """
    check_target(target)
    _check_security(security)
    credentials = security.credentials
    if credentials is None:
        return grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
    return grpc.secure_channel(target, credentials, options=CHANNEL_OPTIONS)


def _check_security(security: Security) -> None:
    if not isinstance(security, Security):
        raise TypeError(f"security is {type(security).__name__}: give Security(token=...), or Security(tls=True)")
