"""CONNECT and CONNACK: how a connection becomes that of a client.

Clauses in brackets are those of MQTT 5.0. Where MQTT 3.1.1 has a clause of another number, it follows as 3.1.1:[...].
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from penstock.gateway.auth.authorizer import Authorizer
from penstock.gateway.connection.keep_alive import SILENCE_FACTOR
from penstock.gateway.connection.open_connections import OpenConnections
from penstock.gateway.connection.redelivery import Redelivery
from penstock.gateway.counters import GatewayCounters, Traffic
from penstock.gateway.delivery.aliases import TopicAliases
from penstock.gateway.delivery.client_subscriptions import ClientSubscriptions, Deliveries
from penstock.gateway.options import GatewayOptions
from penstock.gateway.protocol.connect import (
    Connect,
    Will,
    level_of_too_large,
    parse_connect,
    protocol_level,
    stated_packet_bytes_max,
)
from penstock.gateway.protocol.delays import DELAY_MS, DELIVER_AT_MS
from penstock.gateway.protocol.encode import encode_connack, encode_connack_5, encode_refusal
from penstock.gateway.protocol.errors import ConnectRefused, PacketTooLarge, ProtocolError
from penstock.gateway.protocol.packets import CONNECT, MALFORMED, NAMES, V5_0, Packet
from penstock.gateway.protocol.properties import Property, PropertyValues
from penstock.gateway.protocol.reasons import ConnectCode, ReasonCode
from penstock.gateway.sessions.lifecycle import SessionLifecycle
from penstock.gateway.sessions.session import Session
from penstock.gateway.sessions.wills import Author
from penstock.gateway.transport.strikes import Claim, Strikes
from penstock.store.topics import excerpt

if TYPE_CHECKING:
    from penstock.gateway.connection.connection import Connection


class Handshake:
    """Accepts and refuses CONNECTs, for all connections.

    Parameters:
        options: what the server allows, and tells a client of MQTT 5.0.
        authorizer: says who may connect.
        connections: all connections, those of clients among them.
        lifecycle: begins and resumes sessions.
        deliveries: what subscriptions are made of.
        strikes: says who is held off.
        counters, traffic: count clients and CONNECTs.
    """

    def __init__(
        self,
        options: GatewayOptions,
        authorizer: Authorizer,
        connections: OpenConnections,
        lifecycle: SessionLifecycle,
        deliveries: Deliveries,
        strikes: Strikes,
        counters: GatewayCounters,
        traffic: Traffic,
    ) -> None:
        self._store = deliveries.context.store
        self._options = options
        self._authorizer = authorizer
        self._clients = connections.clients
        self._lifecycle = lifecycle
        self._deliveries = deliveries
        self._keep_alives = connections.keep_alives
        self._strikes = strikes
        self._counters = counters
        self._traffic = traffic
        self.is_draining = False
        """Whether all clients are refused, because the node is about to stop."""

    def accept(self, connection: Connection, packet: Packet) -> None:
        """Accept the CONNECT that must be the first packet of a connection [MQTT-3.1.0-1].

        Raises:
            AuthorizationPending: the plugins have to be asked first.
            ProtocolError: the packet is no CONNECT, or is refused; to be answered by `refuse`.
        """
        connect: Connect | None = None
        try:
            connect = self._read_connect(connection, packet)
            self._accept(connection, connect)
        except ProtocolError as error:  # whatever the reason: nobody is refused without a line in the audit log
            self._authorizer.note_refused(connection, connect, error)
            raise

    def _read_connect(self, connection: Connection, packet: Packet) -> Connect:
        """Return what the first packet of a connection says. Raises ProtocolError."""
        if packet[0] == MALFORMED:
            raise packet[1]
        if packet[0] != CONNECT:
            raise ProtocolError(f"the first packet is {NAMES[packet[0]]}, and must be CONNECT [MQTT-3.1.0-1]")
        limits = self._store.options
        connection.level = protocol_level(packet[2])
        if connection.candidate is not None:  # the plugins have been asked about this CONNECT, which was parsed before
            return connection.candidate.connect
        return parse_connect(
            packet[2],
            topic_levels_max=limits.topic_levels_max,
            topic_bytes_max=limits.topic_bytes_max,
            user_properties_max=self._options.user_properties_max,
        )

    def _accept(self, connection: Connection, connect: Connect) -> None:
        if self.is_draining:
            raise ConnectRefused(
                "the node is about to stop: connect to another one, or try again",
                ConnectCode.SERVER_UNAVAILABLE,
                ReasonCode.SERVER_UNAVAILABLE,
            )
        if connection.peer.is_over_rate:
            raise ConnectRefused(
                "more clients connect than the listener accepts in a second: see connections_per_s",
                ConnectCode.SERVER_UNAVAILABLE,
                ReasonCode.CONNECTION_RATE_EXCEEDED,
            )
        self._check_held(connection, connect, "")
        self._authorizer.check_ban(connection, connect, "")
        self._authorizer.admit(connection, connect)
        self._check_held(connection, connect, connection.user)
        self._authorizer.check_ban(connection, connect, self._authorizer.user_of(connection))
        if connect.will is not None:
            self._check_will(connect.will)
        self._authorizer.check_will(connection, connect)
        client_id = self._authorizer.client_id_of(connection, connect)
        stored = self._lifecycle.claim(client_id, connection.user)
        filters = list(stored.subscriptions) if stored is not None and not connect.clean_start else []
        forbidden = self._authorizer.forbidden(connection, client_id, filters)
        self._clients.check_room(client_id)
        outbox = connection.outbox
        if connect.level == V5_0:
            alias_max = min(connect.topic_alias_max, self._options.sent_topic_alias_max)
            outbox.is_v5 = True
            outbox.says_why = connect.wants_problem_information
            outbox.packet_bytes_max = connect.packet_bytes_max
            outbox.aliases = TopicAliases(alias_max) if alias_max else None
        before = self._store.log.end
        is_afresh = stored is not None and (stored.curtailed or bool(forbidden))
        session, is_present = self._open_session(connection, connect, client_id, is_afresh=is_afresh)
        is_recorded = self._store.log.end > before
        keep_alive_s = self._keep_alive_s(connect)
        connection.keep_alive_s = keep_alive_s * SILENCE_FACTOR
        subscriptions = ClientSubscriptions(session, outbox, self._deliveries)
        connection.begin(subscriptions)
        self._keep_alives.watch(connection)
        if is_present:
            subscriptions.restore()
            subscriptions.withdraw([each for each in forbidden if each in subscriptions.by_filter])
            if connection.permissions is not None:
                connection.permissions.consider(subscriptions.by_filter)
            outbox.redelivery = Redelivery(self._store, self._deliveries.shared.settlements, subscriptions, outbox)
            outbox.pump_soon()
        connack = self._connack(connect, session, is_present=is_present and not is_afresh, keep_alive_s=keep_alive_s)
        outbox.greet(connack, is_recorded=is_recorded)
        self._traffic.packets_in[CONNECT] += 1
        self._counters.packets_in += 1

    def refuse(self, connection: Connection, error: ProtocolError, packet: Packet, data: bytes) -> None:
        """Answer a CONNECT that is refused, if its version has an answer [MQTT-3.1.4-2]. The caller closes the connection.

        Args:
            connection: whose CONNECT it is.
            error: why it is refused.
            packet: the CONNECT, or what came in its place.
            data: the bytes that have come of it.
        """
        if isinstance(error, PacketTooLarge):
            connection.level = level_of_too_large(data)
        outbox, level = connection.outbox, connection.level
        if not level and not isinstance(error, ConnectRefused):
            return
        if level == V5_0 and packet[0] == CONNECT:
            outbox.packet_bytes_max = stated_packet_bytes_max(packet[2], self._options.user_properties_max)
        answer = outbox.explained(partial(encode_refusal, error, level), str(error))
        if answer:
            outbox.send(answer)

    def _open_session(
        self, connection: Connection, connect: Connect, client_id: str, *, is_afresh: bool
    ) -> tuple[Session, bool]:
        """Give a connection the session of its client id, and return it, and whether it existed before.

        An older connection with that client id is closed [MQTT-3.1.4-3] 3.1.1:[MQTT-3.1.4-2]. `is_afresh` as for
        `SessionLifecycle.open`. Raises ConnectRefused.
        """
        expiry_s = min(connect.session_expiry_s, self._options.session_expiry_s_max)
        self._lifecycle.check_room(client_id, connect, expiry_s)
        self._clients.close_older(client_id)
        user, source = connection.user, connection.peer.source
        author = Author(*self._authorizer.author_of(connection, client_id)) if connect.will is not None else None
        session, is_present = self._lifecycle.open(client_id, connect, expiry_s, user, source, author, is_afresh=is_afresh)
        connection.session = session
        self._clients.enter(client_id, connection)
        self._authorizer.entered(connection, session.client_id)
        if connection.permissions is not None and connect.will is not None:
            connection.permissions.will_topic = connect.will.topic.encode()
        self._counters.connections_accepted += 1
        self._traffic.client_connected(connection.peer.listener.name, connection.level)
        return session, is_present

    def _check_held(self, connection: Connection, connect: Connect, user: str) -> None:
        """Raise ConnectRefused if a client is held off. `user` is empty as long as nobody has vouched for it."""
        connection.claim = Claim.of(connect.username, connect.client_id)
        if self._strikes.is_held(connection.peer, user, connection.claim):
            raise ConnectRefused(
                "The client is held off after too many errors. It may try again later: see mqtt.limits.strikes_max.",
                ConnectCode.SERVER_UNAVAILABLE,
                ReasonCode.CONNECTION_RATE_EXCEEDED,
            )

    def _check_will(self, will: Will) -> None:
        """Raise ConnectRefused if the will can never be published: nobody could tell its client when the time has come."""
        bytes_max = self._options.message_bytes_max
        if len(will.body) > bytes_max:
            raise ConnectRefused(
                f"The will has {len(will.body)} bytes. Send {bytes_max} at most: see mqtt.message_bytes_max.",
                ConnectCode.NOT_AUTHORIZED,
                ReasonCode.QUOTA_EXCEEDED,
            )
        if will.topic.startswith("$"):
            raise ConnectRefused(
                f"The will can't be published to {excerpt(will.topic)}, because topics that begin with '$' are the node's own, "
                "and no will is a delayed message. MQTT 5.0 has the will delay interval.",
                ConnectCode.NOT_AUTHORIZED,
                ReasonCode.TOPIC_NAME_INVALID,
            )
        for name, _ in will.properties.get(Property.USER_PROPERTY, ()):
            if name in (DELAY_MS, DELIVER_AT_MS):
                raise ConnectRefused(
                    f"The will has the user property {name}, and no will is a delayed message. Use the will delay interval.",
                    ConnectCode.NOT_AUTHORIZED,
                    ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR,
                )

    def _keep_alive_s(self, connect: Connect) -> int:
        """Return the keep alive that holds: the client's, or in MQTT 5.0 the server's if that is shorter."""
        longest_s = self._options.keep_alive_s_max
        if connect.level == V5_0 and longest_s and not 0 < connect.keep_alive_s <= longest_s:
            return longest_s
        return connect.keep_alive_s

    def _connack(self, connect: Connect, session: Session, *, is_present: bool, keep_alive_s: int) -> bytes:
        if connect.level != V5_0:
            return encode_connack(is_present and connect.level > 3, ConnectCode.ACCEPTED)  # 3.1 has no such flag
        options = self._options
        properties: PropertyValues = {
            Property.RECEIVE_MAXIMUM: options.inflight_max,
            Property.MAXIMUM_PACKET_SIZE: options.packet_bytes_max,
            Property.SHARED_SUBSCRIPTION_AVAILABLE: int(options.shared_max > 0),
        }
        if options.topic_alias_max:
            properties[Property.TOPIC_ALIAS_MAXIMUM] = options.topic_alias_max
        if not connect.client_id:  # [MQTT-3.1.3-7]
            properties[Property.ASSIGNED_CLIENT_ID] = session.client_id
        if keep_alive_s != connect.keep_alive_s:  # [MQTT-3.1.2-21]
            properties[Property.SERVER_KEEP_ALIVE_S] = keep_alive_s
        if session.expiry_s != connect.session_expiry_s:  # 3.2.2.3.2
            properties[Property.SESSION_EXPIRY_S] = session.expiry_s
        return encode_connack_5(is_present, ReasonCode.SUCCESS, properties)
