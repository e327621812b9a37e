"""The clients by which commands call a node over gRPC. They end at once where no node answers, and don't wait for one."""

from __future__ import annotations

from queue import Empty, SimpleQueue

import grpc

from penstock import Client, Security, SyncClient
from penstock.cli.endpoint import GRPC, Endpoint, probe, why_unconnected
from penstock.pop.client.channel import sync_channel
from penstock.pop.errors import NodeUnavailable


def security_of(node: Endpoint) -> Security:
    """Return the token and the certificates of an endpoint.

    Raises:
        ValueError, OSError: as `Endpoint.context` raises them.
    """
    if not node.has_tls:
        return Security(token=node.token)
    node.context()  # gRPC says nothing about files that it can't use
    roots, certificate, key = (
        file.read_bytes() if file is not None else None for file in (node.ca_file, node.certificate, node.key)
    )
    return Security(token=node.token, tls=True, root_certificates=roots, certificate=certificate, key=key)


ANSWER_S = 5.0
"""Seconds that a listener has for the first bytes of HTTP/2."""


def client_of(node: Endpoint) -> Client:
    """Return a client of asyncio for a node that answers.

    Raises:
        NodeUnavailable: no node answers there. The text says what prevents it, and what to do.
        ValueError, OSError: as `Endpoint.context` raises them.
    """
    security = security_of(node)
    _check_answer(node, security)
    return Client(str(node.address), security=security)


def sync_client_of(node: Endpoint) -> SyncClient:
    """Return a blocking client for a node that answers. Raises as `client_of`."""
    security = security_of(node)
    _check_answer(node, security)
    return SyncClient(str(node.address), security=security)


def _check_answer(node: Endpoint, security: Security) -> None:
    """Raise NodeUnavailable unless the listener speaks HTTP/2."""
    seen: SimpleQueue[grpc.ChannelConnectivity] = SimpleQueue()
    channel = sync_channel(str(node.address), security)
    try:
        channel.subscribe(seen.put, try_to_connect=True)
        try:
            while (state := seen.get(timeout=ANSWER_S)) is not grpc.ChannelConnectivity.READY:
                if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                    break
            else:
                return
        except Empty:
            pass
    finally:
        channel.close()
    raise NodeUnavailable(why_unconnected(node, GRPC, probe(node, GRPC)))
