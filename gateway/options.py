"""The options of the MQTT gateway."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import ip_network
from typing import Any, Final, Literal

from penstock.store.options import (
    CENTURY_MS,
    DAY_MS,
    GIB,
    HOUR_MS,
    KIB,
    MIB,
    MINUTE_MS,
    OFF,
    SECOND_MS,
    HostPort,
    OptionalAddress,
    OptionInvalid,
    bound,
    option,
)

DAY_S: Final = DAY_MS // SECOND_MS

_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")

PACKET_ROOM_BYTES: Final = 128 * KIB
"""Bytes of a packet for the topic, which has 65,535 at most, and for the properties."""

SUBSCRIPTIONS_OF_SESSION: Final = 10
"""Average number of subscriptions of a session, if there are as many sessions as may be."""

RETAINED_BYTES: Final = 4 * KIB
"""Average size of the records of retained messages, if there are as many as may be."""

OLDER_TABLES: Final = frozenset(("auth", "topic-check", "topic_check"))
"""Tables of plugins in amqtt's older configurations. They name plugins by entry points, and have all options in one table."""

ROOM_BYTES: Final = 64 * MIB
"""Room that a small number of large retained messages has anyhow."""

HELD_SHARE: Final = 4
"""The part of the connections whose logins may be held: a fourth. The others stay for clients that need not wait."""

PLAIN_NAME: Final = "mqtt"
"""The name of the listener on `mqtt.listen`."""


@dataclass(frozen=True, slots=True)
class ListenerOptions:
    """One listener, an element of the list `[[mqtt.listeners]]`."""

    name: str = option("", 'Name in the ready line, the log and the metrics: 1 to 32 of a-z, 0-9, - and _, but not "mqtt".')
    kind: Literal["tcp", "tls", "ws", "wss", "unix"] = option(
        "tcp",
        'MQTT over TCP, TLS, WebSocket ("ws"), WebSocket over TLS ("wss") or a Unix socket.',
    )
    listen: HostPort = option(HostPort("127.0.0.1", 0), 'Address, unless `kind` is "unix". Port 0 picks a free port.')
    socket: str = option("", "Path of the Unix socket.")
    socket_mode: int = option(0o660, "Access rights of the Unix socket, as for chmod (0o660).", minimum=0, maximum=0o777)
    certificate_file: str = option("", "PEM file with the server certificate and its intermediate certificates.")
    key_file: str = option("", "PEM file with the unencrypted private key of the certificate.")
    tls_version_min: Literal["1.2", "1.3"] = option("1.2", "The oldest version of TLS that is accepted.")
    client_certificates: Literal["none", "optional", "required"] = option(
        "none",
        "Whether clients are asked for a certificate. Without a required one they are refused in the TLS handshake.",
    )
    client_ca_file: str = option("", "PEM file with the authorities that sign client certificates.")
    client_crl_file: str = option(
        "",
        "PEM file with the revocation lists of these authorities. Without a valid list of its authority, a client is refused.",
    )
    username_from: Literal["none", "cn", "san"] = option(
        "none",
        'Part of the client certificate that is the user name, whatever the client sends: the common name ("cn"), or the first '
        'URI, e-mail address or DNS name among the alternative names ("san").',
    )
    roles_from: Literal["none", "ou"] = option(
        "none",
        'Part of the client certificate that states roles for `access.file`: each organizational unit ("ou").',
    )
    websocket_path: str = option("", 'Path of WebSocket requests, such as "/mqtt". If empty, any.')
    origins: tuple[str, ...] = option(
        (),
        'Origins of the web pages that may connect, such as "https://example.org"; "*" for all. If empty, pages of the '
        "listener's own address.",
    )
    proxy_from: tuple[str, ...] = option(
        (),
        "Networks of the proxies in front of the listener. If there are any, every connection must come from one and begin "
        "with a PROXY protocol header, whose address counts.",
    )
    connections_max: int = option(
        1_000_000,
        "Maximum number of open connections. A further one is closed at once.",
        minimum=1,
        maximum=10_000_000,
    )
    connections_per_s: int = option(
        0,
        "Connections accepted per second. As many again are refused with reason 0x9F, and further ones closed. 0: no limit.",
        minimum=0,
        maximum=1_000_000,
    )
    messages_per_s: int = option(
        0,
        "Messages per second of all clients together. Excess messages are read later. 0: no limit.",
        minimum=0,
        maximum=100_000_000,
    )
    bytes_per_s: int = option(
        0,
        "Bytes per second of all clients together. Excess bytes are read later. 0: no limit.",
        minimum=0,
        maximum=1024 * GIB,
    )

    @property
    def is_tls(self) -> bool:
        return self.kind in ("tls", "wss")

    @property
    def is_websocket(self) -> bool:
        return self.kind in ("ws", "wss")

    def check(self, section: str) -> None:
        """Raise OptionInvalid if options contradict each other."""
        if not _NAME.fullmatch(self.name) or self.name == PLAIN_NAME:
            raise OptionInvalid(f"{section}.name", self.name, f'1 to 32 of a-z, 0-9, - and _, and not "{PLAIN_NAME}"')
        if self.kind == "unix" and not self.socket:
            raise OptionInvalid(f"{section}.socket", "", "a path if kind is unix")
        if self.is_tls:
            for name in ("certificate_file", "key_file"):
                if not getattr(self, name):
                    raise OptionInvalid(f"{section}.{name}", "", f"a path if kind is {self.kind}")
        if self.client_certificates != "none":
            if not self.is_tls:
                raise OptionInvalid(f"{section}.client_certificates", self.client_certificates, '"none" without TLS')
            if not self.client_ca_file:
                raise OptionInvalid(f"{section}.client_ca_file", "", "a path if clients are asked for a certificate")
        elif unused := next((name for name in ("client_crl_file", "client_ca_file") if getattr(self, name)), ""):
            raise OptionInvalid(f"{section}.{unused}", getattr(self, unused), 'empty if client_certificates is "none"')
        elif self.username_from != "none":
            wanted = '"none" if client_certificates is "none"'
            raise OptionInvalid(f"{section}.username_from", self.username_from, wanted)
        if self.roles_from != "none" and self.username_from == "none":
            raise OptionInvalid(f"{section}.roles_from", self.roles_from, '"none" if username_from is "none"')
        for network in self.proxy_from:
            try:
                ip_network(network)
            except ValueError as error:
                raise OptionInvalid(f"{section}.proxy_from", network, 'networks such as "10.0.0.0/8"') from error


@dataclass(frozen=True, slots=True)
class AccessOptions:
    """The section `[mqtt.access]`: which clients may connect, and what they may do."""

    anonymous: Literal["loopback", "always", "never"] = option(
        "loopback",
        "Which listeners accept clients without authentication if no plugin, password file or token is configured. "
        '"loopback" includes Unix sockets.',
    )
    client_id: str = option(
        "*",
        'Pattern that client ids must match: "%u" is the user name, "%n" the common name of the client certificate, and "*" '
        'anything. "%u-*" binds client ids to users.',
    )
    plugins: dict[str, Any] | None = option(
        None,
        "Plugins of amqtt: a table from the path of a class to its options, or amqtt's older tables `auth` and `topic-check`. "
        "All that answer must agree.",
    )
    decision_ms: int = option(
        MINUTE_MS,
        "Time for which an answer of topic plugins is kept, and after which a withdrawn permission takes effect.",
        minimum=SECOND_MS,
        maximum=24 * HOUR_MS,
    )
    verified: Literal["passwords", "all", "none"] = option(
        "passwords",
        "Credentials that the node remembers, so that a client that returns costs no password hash: those of password files, "
        "all, also those of plugins, or none.",
    )
    denied_publish: Literal["drop", "close"] = option(
        "drop",
        'How a message is refused that a client of MQTT 3.1.1 may not publish: acknowledged and not stored ("drop"), or by the '
        "end of the connection.",
    )
    plugin_timeout_ms: int = bound(
        5 * SECOND_MS,
        "Time within which plugins must answer. No answer is neither yes nor no: the client waits, or is refused before it "
        "gives up.",
    )
    authentication_threads: int = bound(
        0,
        "Threads on which plugins authenticate in parallel. 0 is the number of processors, but no more than 4: the hash of a "
        "password takes memory, too.",
    )
    verified_for_ms: int = bound(15 * MINUTE_MS, "Time for which verified credentials are remembered after a client has left.")
    verified_max: int = bound(100_000, "Credentials that are remembered, in memory. The oldest are forgotten.")
    subscriptions_ms: int = bound(
        10 * MINUTE_MS,
        "Time after which topic plugins are asked again whether a client may have its subscriptions: a question for each is "
        "dearer than one for a message, and a plugin can't tell the node of a change. 0 never asks again.",
    )
    decisions_max: int = bound(1_000_000, "Answers of topic plugins that are kept for all clients, in memory.")
    decisions_per_client_max: int = bound(10_000, "Answers of topic plugins that are kept for one client.")
    unanswered_ms: int = bound(
        30 * SECOND_MS,
        "Time for which a PUBLISH or SUBSCRIBE waits for an answer of the plugins, in which a server of theirs can restart. "
        "Then the connection is closed, and the packet is not acknowledged.",
    )
    held_ms: int = bound(
        15 * SECOND_MS,
        "Time for which a login keeps its place if more log in than can be authenticated in `connect_timeout_ms`. Clients that "
        "are refused at once come again at once, and cost more than their passwords.",
    )
    held_max: int = bound(10_000, "Logins that are held so, in memory, and no more than a fourth of the connections.")
    questions_max: int = bound(10_000, "Clients that wait for topic plugins, and for authentication, each with a packet.")

    @property
    def older_plugins(self) -> dict[str, Any]:
        """amqtt's older tables among `plugins`, by the names that amqtt gives them."""
        tables = self.plugins or {}
        return {name.replace("_", "-"): table for name, table in tables.items() if name in OLDER_TABLES}

    def check(self, section: str) -> None:
        """Raise OptionInvalid if options contradict each other."""
        names = self.plugins or {}
        if self.older_plugins and len(self.older_plugins) < len(names):
            allowed = "paths of classes, or only auth and topic-check, which amqtt would ignore beside those"
            raise OptionInvalid(f"{section}.plugins", sorted(names), allowed)


@dataclass(frozen=True, slots=True)
class LimitOptions:
    """The section `[mqtt.limits]`: limits that protect the node from clients."""

    client_messages_per_s: int = option(
        0,
        "Messages per second of one client. Excess messages are read later. 0: no limit.",
        minimum=0,
        maximum=10_000_000,
    )
    client_bytes_per_s: int = option(
        0,
        "Bytes per second of one client. Excess bytes are read later. 0: no limit.",
        minimum=0,
        maximum=64 * GIB,
    )
    source_connections_max: int = option(
        0,
        "Maximum number of open connections from one IPv4 address or IPv6 network of 64 bits, beyond loopback. 0: no limit.",
        minimum=0,
        maximum=10_000_000,
    )
    strikes_max: int = option(
        100,
        "Number of errors and failed logins in a minute after which a source or user is held off, and a client after a tenth "
        "of it. 0 holds nobody off, nor is loopback ever.",
        minimum=0,
        maximum=1_000_000,
    )
    hold_off_ms: int = option(
        MINUTE_MS,
        "Time for which it is held off: its connections are closed, or refused with reason 0x9F.",
        minimum=SECOND_MS,
        maximum=24 * HOUR_MS,
    )
    strike_window_ms: int = bound(MINUTE_MS, "Time in which errors are added up: a broken device makes one each few seconds.")
    sources_max: int = bound(100_000, "Sources, users and clients whose errors are remembered, in memory.")
    undurable_bytes_max: int = bound(
        256 * MIB,
        "Log that is stored but not on disk, in the kernel's memory. Beyond it publishers are not read until half of it is.",
    )
    log_lines_per_s: int = bound(20, "Log lines of one kind that clients cause, so that they can't fill the log.")


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """The section `[mqtt]`."""

    listen: OptionalAddress = option(
        HostPort("127.0.0.1", 1883),
        'Address of the MQTT listener. Port 0 picks a free port. With "off" the node has only further listeners.',
    )
    message_bytes_max: int = option(
        MIB,
        "Maximum size of a payload. A larger message is refused with reason 0x97 (MQTT 3.1.1: the connection is closed).",
        minimum=KIB,
        maximum=16 * MIB,
    )
    connections_max: int = option(
        100_000,
        "Maximum number of open connections. A further one is refused with reason 0x97 (MQTT 3.1.1: return code 3).",
        minimum=1,
        maximum=10_000_000,
    )
    connect_timeout_ms: int = option(
        10 * SECOND_MS,
        "Time for the TLS handshake, for the CONNECT, and until the client is authenticated.",
        minimum=100,
        maximum=10 * MINUTE_MS,
    )
    keep_alive_s_max: int = option(
        0,
        "Longest keep alive of a client of MQTT 5.0, which is told so. 0: no limit.",
        minimum=0,
        maximum=65_535,
    )
    inflight_max: int = option(
        1000,
        "Maximum number of unacknowledged deliveries of a session, and of unacknowledged messages of a publisher.",
        minimum=1,
        maximum=65_535,
    )
    topic_alias_max: int = option(
        64,
        "Maximum number of topic aliases that a client may set (MQTT 5.0). 0 disables them.",
        minimum=0,
        maximum=65_535,
    )
    sent_topic_alias_max: int = option(
        0,
        "Maximum number of topic aliases that the node sets. Some clients accept aliases and lose the topic.",
        minimum=0,
        maximum=65_535,
    )
    subscriptions_max: int = option(
        1000,
        "Maximum number of subscriptions of one session.",
        minimum=1,
        maximum=100_000,
    )
    overlapping: Literal["each", "once"] = option(
        "each",
        "How often a client of MQTT 3.1.1 gets a message that several of its subscriptions match. A client of MQTT 5.0 gets it "
        "once.",
    )
    shared_max: int = option(
        5000,
        "Maximum number of shared subscriptions, `$share/NAME/FILTER`: filters of the POP group NAME. Clients that share one "
        "count once. 0 refuses them all.",
        minimum=0,
        maximum=1_000_000,
    )
    share_ack_timeout_ms: int = option(
        5 * MINUTE_MS,
        "Time after which another client gets a shared message that is not acknowledged.",
        minimum=100,
        maximum=24 * HOUR_MS,
    )
    retained_max: int = option(
        1_000_000,
        "Maximum number of retained messages, of 4 KiB on average.",
        minimum=1,
        maximum=1_000_000_000,
    )
    session_expiry_s_max: int = option(
        7 * DAY_S,
        "Longest time that a session lasts while its client is away. Those of MQTT 3.1.1 last exactly this long.",
        minimum=0,
        maximum=CENTURY_MS // SECOND_MS,
    )
    sessions_max: int = option(
        1_000_000,
        "Maximum number of stored sessions, with ten subscriptions on average. Beyond it the one ends that is due first.",
        minimum=1,
        maximum=100_000_000,
    )
    session_queued_max: int = option(
        0,
        "Maximum number of messages that wait for one client. Beyond it the client misses the oldest. 0: no limit.",
        minimum=0,
        maximum=1_000_000_000,
    )
    sys_interval_s: int = option(
        10,
        "Interval of the topics $SYS/broker/... 0 disables them.",
        minimum=0,
        maximum=3600,
    )
    packet_bytes_max: int = bound(0, "Bytes of a packet. 0: those of a payload, and `PACKET_ROOM_BYTES`.")
    connect_bytes_max: int = bound(
        128 * KIB,
        "Bytes of a CONNECT, if less than `packet_bytes_max`: what a client that is not yet known may make the node keep.",
    )
    user_properties_max: int = bound(256, "User properties of a packet, which cost far more than their bytes to parse.")
    packet_filters_max: int = bound(1000, "Filters of a SUBSCRIBE, whose whole answer is one packet in memory.")
    all_subscriptions_max: int = bound(0, "Subscriptions of all sessions, in memory. 0: see `SUBSCRIPTIONS_OF_SESSION`.")
    retained_bytes_max: int = bound(0, "Bytes of retained messages, which outlive retention. 0: see `RETAINED_BYTES`.")
    send_buffer_bytes: int = bound(
        256 * KIB,
        "Bytes that wait to be sent above which a client lags. It gets nothing more until they are sent, then from its cursor.",
    )
    listen_backlog: int = bound(
        4096,
        "Connections that wait to be accepted (net.core.somaxconn). Devices that connect at once would repeat their SYN.",
    )
    tls_handshake_ms: int = bound(0, "Time for a PROXY header, and for a TLS handshake. 0: `connect_timeout_ms`.")
    handshakes_max: int = bound(10_000, "Connections in their PROXY header or TLS handshake, each with its buffers.")
    access: AccessOptions = AccessOptions()
    limits: LimitOptions = LimitOptions()
    listeners: tuple[ListenerOptions, ...] = option(
        (),
        "Further listeners.",
    )

    def __post_init__(self) -> None:
        """Derive the bounds that are 0 from the options."""
        for name, derived in (
            ("packet_bytes_max", self.message_bytes_max + PACKET_ROOM_BYTES),
            ("all_subscriptions_max", self.sessions_max * SUBSCRIPTIONS_OF_SESSION),
            ("retained_bytes_max", max(self.retained_max * RETAINED_BYTES, ROOM_BYTES)),
            ("tls_handshake_ms", self.connect_timeout_ms),
        ):
            if not getattr(self, name):
                object.__setattr__(self, name, derived)

    @property
    def all_listeners(self) -> tuple[ListenerOptions, ...]:
        """The listener on `listen`, unless that is off, and the further ones."""
        plain = (ListenerOptions(name=PLAIN_NAME, listen=self.listen),) if isinstance(self.listen, HostPort) else ()
        return (*plain, *self.listeners)

    @property
    def logins_held_max(self) -> int:
        """The number of logins that are held at a time: see `AccessOptions.held_max`."""
        connections = min([self.connections_max, *(listener.connections_max for listener in self.listeners)])
        return min(self.access.held_max, connections // HELD_SHARE)

    def check(self, section: str) -> None:
        """Raise OptionInvalid if options contradict each other."""
        names = [listener.name for listener in self.listeners]
        for name in names:
            if names.count(name) > 1:
                raise OptionInvalid(f"{section}.listeners.name", name, "unique, because two listeners have this name")
        if self.listen == OFF and not names:
            raise OptionInvalid(f"{section}.listen", OFF, "an address if there is no other listener")
