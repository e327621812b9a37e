"""The gRPC listener of a node: the native services, the RocketMQ-compatible service, health and reflection, TLS and access."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import grpc.aio
import structlog
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from penstock.access.bans import Kind
from penstock.access.control import AccessControl
from penstock.install import install_hint
from penstock.pop.access.callguard import CallGuard
from penstock.pop.access.refusals import Refusals
from penstock.pop.core.core import PopCore
from penstock.pop.core.handle import Handles
from penstock.pop.core.sender import Sender
from penstock.pop.core.transactions import Transactions
from penstock.pop.front import Front
from penstock.pop.grpc.access import GROUP_RULES, POP_RULES, REFLECTION_RULES, SCHEDULE_RULES, TIMER_RULES
from penstock.pop.grpc.calls import Calls, Service
from penstock.pop.grpc.groupservicer import GroupServicer
from penstock.pop.grpc.peersockets import shut_down
from penstock.pop.grpc.requestbytes import RequestBytes
from penstock.pop.grpc.responsebytes import ResponseBytes
from penstock.pop.grpc.scheduleservicer import ScheduleServicer
from penstock.pop.grpc.servicer import PopServicer
from penstock.pop.grpc.timerservicer import TimerServicer
from penstock.pop.options import PopOptions
from penstock.pop.proto import pop_pb2 as pb
from penstock.pop.relayed import PLAIN, TLS, RelayedCallers
from penstock.pop.rocketmq.access import RULES as ROCKETMQ_RULES
from penstock.pop.servercertificates import ServerCertificates, credentials, server_certificates
from penstock.store.options import SECOND_MS, HostPort, OptionInvalid, resolved
from penstock.store.store import Store
from penstock.timer.delayed import DelayedMessages

if TYPE_CHECKING:
    from penstock.pop.rocketmq.service import MessagingService

logger = structlog.get_logger("pop.server")

IDENTITY_ONLY = 1
"""The set of compression algorithms that holds only the one that does not compress."""

HANDSHAKE_MS = 10 * SECOND_MS
"""Milliseconds within which a new connection must complete TLS and send the beginning of HTTP/2. After that gRPC closes it, so
that idle sockets don't keep clients out for long."""

STOP_GRACE_S = 1.0
"""How long calls that are under way may still take when the node stops. Calls that wait for messages end at once."""


def _why_not(listen: HostPort) -> str:
    """Return why nobody can listen on an address, which gRPC does not say; an empty text if it could be done."""
    try:
        for host in resolved(listen):
            with socket.create_server((host, listen.port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
                pass
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)
    return ""


@dataclass(frozen=True, slots=True)
class Servicers:
    """The APIs of POP.

    Parameters:
        pop: serves messages.
        groups: serves groups and dead letters.
        schedules: serves schedules.
        timers: serves pending delayed messages.
        rocketmq: the RocketMQ-compatible API; see `rocketmq_service`.
    """

    pop: PopServicer
    groups: GroupServicer
    schedules: ScheduleServicer
    timers: TimerServicer
    rocketmq: MessagingService | None = None

    def services(self) -> list[Service]:
        """Return the services of gRPC that they serve."""
        described = pb.DESCRIPTOR.services_by_name
        services = [
            Service(described["PopService"], self.pop, POP_RULES),
            Service(described["GroupService"], self.groups, GROUP_RULES),
            Service(described["ScheduleService"], self.schedules, SCHEDULE_RULES),
            Service(described["TimerService"], self.timers, TIMER_RULES),
        ]
        if self.rocketmq is not None:
            from penstock.pop.rocketmq.stubs import SERVICE

            services.append(Service(SERVICE, self.rocketmq, ROCKETMQ_RULES, takes_context=True))
        return services


class PopServer:
    """Serves the APIs of POP on one address.

    Parameters:
        servicers: the APIs.
        options: address and TLS files.
        access: who may do what.
        inherited: a socket that listens already, which replaces `pop.listen`; see `Front`.
        connections_max: the maximum number of open connections; None for `PopOptions.connections_max`.
        relay_dir: gets the sockets for callers whose connections other replicas relay; None if there are no replicas.
    """

    def __init__(
        self,
        servicers: Servicers,
        options: PopOptions,
        access: AccessControl,
        *,
        inherited: socket.socket | None = None,
        connections_max: int | None = None,
        relay_dir: Path | None = None,
    ) -> None:
        self._relay_dir = relay_dir
        self._relayed: RelayedCallers | None = None
        self._options = options
        self._port = 0
        self._rocketmq = servicers.rocketmq
        self.requests = RequestBytes(options.request_bytes_max, options.requests_bytes_max)
        """Room for the requests of all calls together."""
        self.responses = ResponseBytes(options.responses_bytes_max, self._shut_down, servicers.pop.unsynced)
        """Room for the responses that callers have not read."""
        self.refusals = Refusals()
        """Tells callers that their calls are refused."""
        self._access = access
        self._guard = CallGuard(access)
        if self._rocketmq is not None:
            access.on_change.append(self._renew_rights)
        connections_max = connections_max or options.connections_max
        self.certificates: ServerCertificates | None = None
        """The certificates, if the listener speaks TLS and has started."""
        self._front = None
        if options.tls_optional and options.client_ca_file:
            raise OptionInvalid("pop.tls_optional", True, "false where pop.client_ca_file is set")
        if options.tls_optional or inherited is not None:
            self._front = Front(options.listen, connections_max, HANDSHAKE_MS, inherited)
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", options.request_bytes_max),
                ("grpc.max_concurrent_streams", options.calls_max),
                *([] if options.compression == "on" else [("grpc.compression_enabled_algorithms_bitset", IDENTITY_ONLY)]),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),
                ("grpc.max_allowed_incoming_connections", connections_max),
                ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
                ("grpc.keepalive_permit_without_calls", 1),
            ],
        )
        served = servicers.services()
        self._names = ("", *(each.name for each in served))
        reflected = reflection.aio.ReflectionServicer(  # type: ignore[attr-defined]  # it is there
            (*self._names[1:], health.SERVICE_NAME, reflection.SERVICE_NAME)
        )
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # it is there
        served += [
            Service(
                reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"], reflected, REFLECTION_RULES, takes_context=True
            ),
            Service(health_pb2.DESCRIPTOR.services_by_name["Health"], self._health, None, takes_context=True),
        ]
        self._server.add_generic_rpc_handlers((Calls(served, self.refusals, self.requests, self.responses, self._guard),))

    def _renew_rights(self) -> None:
        """Let the clients of RocketMQ go by the rules that are in force now."""
        if self._rocketmq is not None and self._access.policy is not None:
            self._rocketmq.clients.renew_rights(self._access.policy)

    async def _shut_down(self, peers: Collection[str]) -> None:
        await shut_down(peers, self._port)

    async def start(self) -> int:
        """Open the listener, and return its port.

        Raises:
            OSError: another process listens on the address, or the address isn't one of this machine; or a file of the TLS
                options can't be read.
        """
        options = self._options
        port = options.listen.port
        if options.certificate_file or options.tls_optional:
            self.certificates = server_certificates(options)
        try:
            if self._relay_dir is not None:
                self._relayed = self._serve_relayed(self._relay_dir)
            if self._front is not None:
                if self.certificates is not None:
                    self._server.add_secure_port(self._front.inner("tls"), self._credentials(self.certificates))
                if self.certificates is None or options.tls_optional:
                    self._server.add_insecure_port(self._front.inner("plain"))
                await self._server.start()
                port = await self._front.start()
            else:
                # gRPC gets numbers, because it takes some names for other kinds of address, such as `unix`.
                for host in resolved(options.listen):
                    address = str(HostPort(host, port))  # port 0 becomes the same free port for all addresses
                    if self.certificates is not None:
                        port = self._server.add_secure_port(address, self._credentials(self.certificates))
                    else:
                        port = self._server.add_insecure_port(address)
        except (RuntimeError, OSError) as error:
            if self._front is not None:
                await self._front.stop()
            why = _why_not(options.listen) or error
            raise OSError(
                f"gRPC can't listen on {options.listen}: {why}. Choose another address with --pop HOST:PORT."
            ) from error
        self._port = port
        if self._front is None:
            await self._server.start()
        if self._rocketmq is not None:
            self._rocketmq.start(HostPort(options.listen.host, port))
        if self.certificates is not None:
            self.certificates.watch(asyncio.get_running_loop())
        for name in self._names:
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        return port

    def _credentials(self, certificates: ServerCertificates) -> grpc.ServerCredentials:
        return credentials(certificates, has_roots=bool(self._options.client_ca_file))

    def _serve_relayed(self, directory: Path) -> RelayedCallers:
        has_plain = self.certificates is None or self._options.tls_optional
        relayed = RelayedCallers(directory, has_tls=self.certificates is not None, has_plain=has_plain)
        if self.certificates is not None:
            self._server.add_secure_port(relayed.address(TLS), self._credentials(self.certificates))
        if has_plain:
            self._server.add_insecure_port(relayed.address(PLAIN))
        return relayed

    async def connect(self, host: str, port: int, *, begins_tls: bool) -> socket.socket:
        """Return a connection for a caller that has connected to another replica: see `RelayedCallers`. Raises OSError."""
        if self._relayed is None:
            raise ConnectionRefusedError("the gRPC listener is not open")
        return await self._relayed.connect(host, port, begins_tls=begins_tls)

    def reload(self) -> None:
        """Read the certificates again."""
        if self.certificates is not None:
            self.certificates.reload()

    def disconnect(self, kind: Kind, name: str) -> int:
        """End the calls and streams of a user, a RocketMQ client id, or an address or network; return how many there were."""
        return self._guard.disconnect(kind, name)

    async def stop(self) -> None:
        """Accept no more calls, let those under way end, and close the listener."""
        if self.certificates is not None:
            self.certificates.close()
        await self._health.enter_graceful_shutdown()
        if self._rocketmq is not None:
            self._rocketmq.stop()
        if self._front is not None:
            self._front.accept_no_more()
        await self._server.stop(STOP_GRACE_S)
        if self._relayed is not None:
            self._relayed.close()
        if self._front is not None:
            await self._front.stop()


def rocketmq_service(
    core: PopCore,
    store: Store,
    handles: Handles,
    sender: Sender,
    delayed: DelayedMessages,
    transactions: Transactions,
    options: PopOptions,
) -> MessagingService | None:
    """Return the RocketMQ-compatible API.

    Return None, and log why, if the package that ships the protocol's messages is not installed.
    """
    try:
        from penstock.pop.rocketmq.service import MessagingService
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("rocketmq"):  # a module that the RocketMQ package itself needs is missing
            raise
        logger.info("rocketmq.off", why=f"rocketmq-python-client is not installed: {install_hint('rocketmq')}")
        return None
    return MessagingService(core, store, handles, sender, delayed, transactions, options)
