"""Connected MQTT clients over the admin API: a list, one client in detail, kicks and bans."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from http import HTTPStatus
from ipaddress import ip_network
from socket import AF_INET, AF_INET6, inet_pton
from typing import Annotated, Any, Final, Literal

import msgspec

from penstock.access.bans import network_name
from penstock.access.control import AccessControl
from penstock.access.errors import AccessInvalid
from penstock.gateway.connection.backpressure import PauseReason
from penstock.gateway.connection.connection import Connection
from penstock.gateway.connection.keep_alive import SILENCE_FACTOR
from penstock.gateway.gateway import Gateway
from penstock.gateway.protocol.connect import Will
from penstock.gateway.transport.peer import SAN_KINDS, Peer
from penstock.node.api.access import BanRequest, BanShown, make_ban
from penstock.node.api.clienttraffic import ClientTraffic, IsListed, Rates
from penstock.node.api.operation import ApiCall, ApiError, ApiRole, Done, Operation, PageQuery, not_found
from penstock.node.api.pages import in_slices, page_in_order
from penstock.node.api.subscriptions import SubscriptionShown, live_subscription, queued_for

PROTOCOLS: Final = {3: "3.1", 4: "3.1.1", 5: "5.0"}
"""Versions of MQTT by the protocol level of the CONNECT."""

SUBSCRIPTIONS_SHOWN: Final = 100
"""Subscriptions in the detail of one client. `/clients/{client_id}/subscriptions` has pages of all."""


class ClientQuery(PageQuery, forbid_unknown_fields=True, kw_only=True):
    """The parameters of the list of clients. A client is listed if all that are given fit."""

    prefix: Annotated[str, msgspec.Meta(description="With which the client id begins.")] = ""
    contains: Annotated[str, msgspec.Meta(description="A text in the client id or user name, in any case.")] = ""
    user: Annotated[str, msgspec.Meta(description="User name.")] = ""
    address: Annotated[str, msgspec.Meta(description="Address, or network such as 10.0.0.0/8.")] = ""
    order: Annotated[
        Literal["client_id", "messages_in", "messages_out", "bytes_in", "bytes_out"],
        msgspec.Meta(
            description="By client id, in pages; or those with the highest of these rates, on one page that has no next one."
        ),
    ] = "client_id"


class ClientRates(msgspec.Struct, kw_only=True):
    """What a client sends (`in`) and gets (`out`), as averages over some seconds."""

    messages_in_per_s: float
    messages_out_per_s: float
    bytes_in_per_s: float
    bytes_out_per_s: float


class ClientShown(msgspec.Struct, kw_only=True):
    """A connected client. Numbers of messages and bytes count from the beginning of its connection."""

    client_id: str
    user: Annotated[str, msgspec.Meta(description="User name that a password, token, certificate or plugin vouches for.")]
    listener: str
    protocol: Annotated[str, msgspec.Meta(description="Version of MQTT: 3.1, 3.1.1 or 5.0.")]
    address: Annotated[str, msgspec.Meta(description="Empty on a Unix socket.")]
    port: int
    connected_ms: Annotated[int, msgspec.Meta(description="When the CONNECT was accepted.")]
    last_packet_ms: Annotated[int, msgspec.Meta(description="When the node last read something, or began to read again.")]
    subscriptions: int
    in_flight_out: Annotated[int, msgspec.Meta(description="Deliveries that the client has not acknowledged.")]
    in_flight_in: Annotated[int, msgspec.Meta(description="Messages of the client that the node has not acknowledged.")]
    messages_in: int
    messages_out: int
    bytes_in: int
    bytes_out: int
    rates: Annotated[
        ClientRates | None,
        msgspec.Meta(
            description="null if they are not known: the node begins to count when somebody asks for the clients with the "
            "highest rates, or for one in detail, and knows them some seconds later."
        ),
    ]
    paused_for: Annotated[
        list[str],
        msgspec.Meta(description=f"Why the node does not read it: {', '.join(each.name.lower() for each in PauseReason)}."),
    ]


class ClientList(msgspec.Struct):
    """A page of the connected clients, in the order that was asked for. It may be short although there is a cursor."""

    items: list[ClientShown]
    next: str | None
    rates_over_ms: Annotated[
        int | None, msgspec.Meta(description="Over which time the rates are averages; null if none are known yet.")
    ]


class WillShown(msgspec.Struct, kw_only=True):
    """The message that the node publishes when a client is lost."""

    topic: str
    qos: int
    retain: bool
    delay_ms: int
    body_bytes: int


class TlsShown(msgspec.Struct, kw_only=True):
    """The TLS of a connection."""

    version: str
    cipher: str
    certificate_names: Annotated[
        list[str],
        msgspec.Meta(description="Common name and alternative names in the client's certificate, if it has one."),
    ]


class ClientInDetail(ClientShown, kw_only=True):
    """A connected client in detail."""

    claimed_user: Annotated[str, msgspec.Meta(description="User name in the CONNECT, cut if long. Nobody may have checked it.")]
    keep_alive_ms: Annotated[int, msgspec.Meta(description="Keep alive in force; 0 for none.")]
    session_lasts: Annotated[bool, msgspec.Meta(description="Whether the session is stored and outlives the connection.")]
    session_expiry_ms: Annotated[int, msgspec.Meta(description="How long the session lasts after the connection.")]
    will: WillShown | None
    queued: Annotated[int, msgspec.Meta(description="Messages that wait for the client, without those of shared filters.")]
    subscribed: Annotated[list[SubscriptionShown], msgspec.Meta(description=f"The oldest {SUBSCRIPTIONS_SHOWN} subscriptions.")]
    tls: TlsShown | None


class ClientBanRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A ban of a client id."""

    for_ms: Annotated[int, msgspec.Meta(ge=0, le=2**53, description="How long it lasts; 0 for ever.")] = 0
    why: Annotated[str, msgspec.Meta(max_length=1_000, description="A note for other operators.")] = ""


class ClientOperations:
    """Serves the connected clients.

    Parameters:
        gateway: has the clients.
        access: makes bans.
        traffic: of the clients.
    """

    def __init__(self, gateway: Gateway, access: AccessControl, traffic: ClientTraffic) -> None:
        self._gateway = gateway
        self._access = access
        self._traffic = traffic

    def operations(self) -> Iterator[Operation]:
        """Yield the operations."""
        yield Operation(
            "listClients",
            "GET",
            "/clients",
            ApiRole.VIEWER,
            "List the connected clients, all in their order or those that are busiest.",
            self.clients,
            ClientList,
            query=ClientQuery,
        )
        yield Operation(
            "getClient",
            "GET",
            "/clients/{client_id}",
            ApiRole.VIEWER,
            "Show a connected client in detail.",
            self.client,
            ClientInDetail,
        )
        yield Operation(
            "kickClient",
            "DELETE",
            "/clients/{client_id}",
            ApiRole.OPERATOR,
            "Disconnect a client, which may connect again.",
            self.kick,
            Done,
        )
        yield Operation(
            "banClient",
            "POST",
            "/clients/{client_id}/ban",
            ApiRole.ADMIN,
            "Refuse a client id, and disconnect its client if it is connected.",
            self.ban,
            BanShown,
            body=ClientBanRequest,
            writes_audit=True,
        )

    async def clients(self, call: ApiCall) -> ClientList:
        """Return a page of the clients."""
        self._check_serves()
        query: ClientQuery = call.query
        clients, is_listed = self._gateway.clients, _filter_of(query)
        if query.order != "client_id":
            return await self._busiest(query, is_listed)

        def read(start: str, count: int) -> list[tuple[str, Connection]]:
            return [(client_id, clients[client_id]) for client_id in clients.at_or_after(start, count)]

        def row_of(client_id: str, connection: Connection) -> ClientShown | None:
            if not connection.connected or not is_listed(client_id, connection):
                return None
            return self._shown(client_id, connection, self._traffic.rates_of(client_id, connection))

        return ClientList(*await page_in_order(query, read, row_of, prefix=query.prefix), self._over_ms())

    async def _busiest(self, query: ClientQuery, is_listed: IsListed) -> ClientList:
        """Return the clients with the highest rates."""
        self._traffic.ask()
        over_ms = self._over_ms()

        def is_meant(client_id: str, connection: Connection) -> bool:
            return client_id.startswith(query.prefix) and is_listed(client_id, connection)

        busiest = await self._traffic.busiest(query.order, query.limit, is_meant)
        return ClientList(await in_slices(self._shown(*each) for each in busiest), None, over_ms)

    def _over_ms(self) -> int | None:
        return round(self._traffic.over_s * 1000) or None

    def _shown(self, client_id: str, connection: Connection, rates: Rates | None) -> ClientShown:
        return ClientShown(**self._figures(client_id, connection), rates=rates_shown(rates))

    async def client(self, call: ApiCall) -> ClientInDetail:
        """Return one client."""
        client_id = call.path["client_id"]
        connection = self._connected(client_id)
        self._traffic.ask()
        session = connection.session
        stored = session.stored
        will = self._gateway.lifecycle.will_of(stored) if session.has_will and stored is not None else None
        first = list(connection.subscriptions.by_filter.values())[:SUBSCRIPTIONS_SHOWN]
        details: dict[str, Any] = {
            "claimed_user": connection.claim.user,
            "keep_alive_ms": round(connection.keep_alive_s / SILENCE_FACTOR * 1000),
            "session_lasts": session.lasts,
            "session_expiry_ms": session.expiry_s * 1000,
            "will": will_shown(will),
            "tls": _tls(connection.peer),
            "rates": rates_shown(self._traffic.rates_of(client_id, connection)),
        }
        figures = self._figures(client_id, connection)
        subscribed = await in_slices(live_subscription(one) for one in first)
        queued = await queued_for(connection)
        return ClientInDetail(**figures, **details, subscribed=subscribed, queued=queued)

    async def kick(self, call: ApiCall) -> Done:
        """Disconnect a client."""
        client_id = call.path["client_id"]
        connection = self._connected(client_id)
        call.noted |= {"client_address": connection.peer.host}
        self._gateway.disconnect("client", client_id)
        return Done()

    async def ban(self, call: ApiCall) -> BanShown:
        """Ban a client id."""
        asked: ClientBanRequest = call.body
        request = BanRequest(kind="client", name=call.path["client_id"], for_ms=asked.for_ms, why=asked.why)
        shown = await make_ban(self._access, request, call)
        await self._gateway.rechecked()
        return shown

    def _connected(self, client_id: str) -> Connection:
        """Return the connection of a client. Raises ApiError if it is not connected."""
        connection = self._gateway.clients.get(client_id)
        if connection is None or not connection.connected:
            self._check_serves()
            raise not_found("connected client", client_id)
        return connection

    def _check_serves(self) -> None:
        """Raise ApiError on a replica that follows another one: it relays clients, so it knows of none who is connected."""
        if self._gateway.store.replaying:
            raise ApiError(HTTPStatus.CONFLICT, "this replica follows another one, which has the clients; ask the leader")

    def _figures(self, client_id: str, connection: Connection) -> dict[str, Any]:
        """Return the fields of a `ClientShown` besides the rates."""
        session, outbox, peer = connection.session, connection.outbox, connection.peer
        gateway, paused_for = self._gateway, connection.paused_for
        silent_ms = int((gateway.clock.monotonic_s() - connection.received_s) * 1000)
        return {
            "client_id": client_id,
            "user": session.user,
            "listener": peer.listener.name,
            "protocol": PROTOCOLS[connection.level],
            "address": peer.host,
            "port": peer.port,
            "connected_ms": connection.connected_ms,
            "last_packet_ms": gateway.store.now_ms() - silent_ms,
            "subscriptions": len(connection.subscriptions.by_filter),
            "in_flight_out": len(session.inflight.slots),
            "in_flight_in": outbox.unacked + len(session.received),
            "messages_in": connection.messages_in,
            "messages_out": outbox.messages_out,
            "bytes_in": connection.bytes_in,
            "bytes_out": outbox.bytes_out,
            "paused_for": [str(each.name).lower() for each in paused_for] if paused_for else [],
        }


def will_shown(will: Will | None) -> WillShown | None:
    """Return what is shown of a will; None if there is none."""
    if will is None:
        return None
    return WillShown(
        topic=will.topic, qos=will.qos, retain=will.retain, delay_ms=will.delay_s * 1000, body_bytes=len(will.body)
    )


def rates_shown(rates: Rates | None) -> ClientRates | None:
    """Return what is shown of the rates of a client; None if they are not known."""
    if rates is None:
        return None
    return ClientRates(
        messages_in_per_s=round(rates.messages_in, 3),
        messages_out_per_s=round(rates.messages_out, 3),
        bytes_in_per_s=round(rates.bytes_in, 1),
        bytes_out_per_s=round(rates.bytes_out, 1),
    )


def _filter_of(query: ClientQuery) -> IsListed:
    """Return the function that tells which clients are listed. Raises ApiError."""
    is_near = _address_filter(query.address) if query.address else None
    text, user = query.contains.casefold(), query.user

    def is_listed(client_id: str, connection: Connection) -> bool:
        name = connection.session.user
        if user and name != user:
            return False
        if text and text not in client_id.casefold() and text not in name.casefold():
            return False
        return is_near is None or is_near(connection.peer.host)

    return is_listed


def _address_filter(text: str) -> Callable[[str], bool]:
    """Return the function that tells which numeric addresses are an address or in a network. Raises ApiError."""
    try:
        name = network_name(text)
    except AccessInvalid as error:
        raise ApiError(HTTPStatus.BAD_REQUEST, str(error)) from error
    if "/" not in name:
        return name.__eq__
    network = ip_network(name)
    family = AF_INET if network.version == 4 else AF_INET6
    first, mask = int(network.network_address), int(network.netmask)

    def is_within(host: str) -> bool:
        try:  # several times faster than an `ip_address`, of which a search would need one for each client
            return int.from_bytes(inet_pton(family, host)) & mask == first
        except OSError:  # it is of the other family, or a Unix socket
            return False

    return is_within


def _tls(peer: Peer) -> TlsShown | None:
    tls = peer.ssl_object
    if tls is None:
        return None
    cipher = tls.cipher()
    certificate: dict[str, Any] = tls.getpeercert() or {}
    names = [value for part in certificate.get("subject", ()) for kind, value in part if kind == "commonName"]
    names += [value for kind, value in certificate.get("subjectAltName", ()) if kind in SAN_KINDS]
    return TlsShown(version=tls.version() or "", cipher=cipher[0] if cipher else "", certificate_names=names)
