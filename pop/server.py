"""The gRPC listener of a node."""

from __future__ import annotations

import grpc
import grpc.aio

from pop import pop_pb2_grpc
from pop.service import PopService
from store.options import HostPort

RECEIVE_BYTES_MAX = 64 * 1024 * 1024
"""Of one request: a batch of messages. A larger one is refused with RESOURCE_EXHAUSTED by gRPC itself."""

STOP_GRACE_S = 1.0
"""How long calls that are under way may take when the node stops. Waiting polls are ended."""


class PopServer:
    """Serves a `PopService` on an address.

    Parameters:
        service: what is served.
        listen: where. Port 0 picks a free one.
    """

    def __init__(self, service: PopService, listen: HostPort) -> None:
        self._listen = listen
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", RECEIVE_BYTES_MAX),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
                ("grpc.keepalive_permit_without_calls", 1),
            ]
        )
        pop_pb2_grpc.add_PopServiceServicer_to_server(service, self._server)

    async def start(self) -> int:
        """Open the listener; return its port.

        Raises:
            OSError: the address can't be listened on, because something else does or it isn't this machine's.
        """
        try:
            port = self._server.add_insecure_port(str(self._listen))
        except RuntimeError as error:
            raise OSError(f"gRPC can't listen on {self._listen}: {error}; choose another with --pop HOST:PORT") from error
        await self._server.start()
        return port

    async def stop(self) -> None:
        """Accept nothing more, let calls end, close."""
        await self._server.stop(STOP_GRACE_S)
