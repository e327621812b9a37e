"""The options of the MQTT gateway."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import ip_network
from typing import Any, Literal

from penstock.store.options import (
    DAY_MS,
    GIB,
    HOUR_MS,
    KIB,
    MIB,
    MINUTE_MS,
    SECOND_MS,
    HostPort,
    OptionInvalid,
    option,
)

DAY_S = DAY_MS // SECOND_MS

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")

PLAIN_NAME = "mqtt"
"""Name of the listener that `mqtt.listen` opens."""


@dataclass(frozen=True, slots=True)
class ListenerOptions:
    """An element of the list `[[mqtt.listeners]]`."""

    name: str = option(
        "",
        'Name of the listener in the ready line, the log and the metrics: up to 32 of a-z, 0-9, - and _, not "mqtt".',
    )
    kind: Literal["tcp", "tls", "ws", "wss", "unix"] = option(
        "tcp",
        'What is spoken there: MQTT over TCP ("tcp"), TLS ("tls"), WebSocket ("ws"), WebSocket over TLS ("wss") or a Unix '
        'socket ("unix").',
    )
    listen: HostPort = option(
        HostPort("127.0.0.1", 0),
        "Address of the listener; of no meaning to a Unix socket. Port 0 picks a free one.",
    )
    socket: str = option(
        "",
        "File of a Unix socket. It is removed at the end, and at a start where no process listens on it any more.",
    )
    socket_mode: int = option(
        0o660,
        "Mode of that file, as chmod takes it (in TOML: 0o660).",
        minimum=0,
        maximum=0o777,
    )
    certificate: str = option(
        "",
        "PEM file with the server's certificate, and those between it and a root. Needed by TLS.",
    )
    key: str = option(
        "",
        "PEM file with the key of the certificate, unencrypted. Needed by TLS.",
    )
    tls_version_min: Literal["1.2", "1.3"] = option(
        "1.2",
        "The oldest version of TLS that is spoken.",
    )
    client_certificates: Literal["none", "optional", "required"] = option(
        "none",
        'Whether clients are asked for a certificate: "none" doesn\'t ask, "optional" takes a client without one, "required" '
        "ends its handshake.",
    )
    client_ca: str = option(
        "",
        "PEM file with the authorities that sign the clients' certificates. Needed where clients are asked for one.",
    )
    username_from: Literal["none", "cn", "san"] = option(
        "none",
        'What of a client\'s certificate is its user name: the common name ("cn"), or the first alternative name that is a '
        'URI, an e-mail address or a DNS name ("san"). Such a client is who its certificate says, whatever user name and '
        'password it sends; plugins are asked what it may do, but not who it is. "none": a certificate only lets it connect.',
    )
    websocket_path: str = option(
        "",
        'The path that a WebSocket request must ask for, such as "/mqtt". Empty: any.',
    )
    origins: tuple[str, ...] = option(
        (),
        'Values of the header Origin that a WebSocket request may have, such as "https://example.org": what web pages may '
        "connect. Empty: any. One without the header, which no browser sends, is always taken.",
    )
    proxy_from: tuple[str, ...] = option(
        (),
        "Networks of the proxies that stand before this listener. Where there are any, every connection must come from one of "
        "them and begin with a header of the PROXY protocol, version 1 or 2; the client's address is what that says.",
    )
    connections_max: int = option(
        1_000_000,
        "Connections of this listener open at a time. One more is closed at once.",
        minimum=1,
        maximum=10_000_000,
    )
    connections_per_s: int = option(
        0,
        "Connections a second that this listener accepts in the long run, with a burst of as many. As many more are refused "
        "with reason 0x9F (MQTT 3.1.1: return code 3); beyond that, and where TLS or a PROXY header comes first, one more is "
        "closed at once. 0: no limit.",
        minimum=0,
        maximum=1_000_000,
    )
    messages_per_s: int = option(
        0,
        "Messages a second that all clients of this listener together may publish in the long run, with a burst of as many. "
        "Beyond that they are read later. 0: no limit.",
        minimum=0,
        maximum=100_000_000,
    )
    bytes_per_s: int = option(
        0,
        "Bytes a second that all clients of this listener together may send in the long run, with a burst of as many. Beyond "
        "that they are read later. 0: no limit.",
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
        """Check what no bound of one option tells. Raises OptionInvalid."""
        if not _NAME.fullmatch(self.name) or self.name == PLAIN_NAME:
            raise OptionInvalid(f"{section}.name", self.name, f'1 to 32 of a-z, 0-9, - and _, and not "{PLAIN_NAME}"')
        if self.kind == "unix" and not self.socket:
            raise OptionInvalid(f"{section}.socket", "", "a path where kind is unix")
        if self.is_tls:
            for name in ("certificate", "key"):
                if not getattr(self, name):
                    raise OptionInvalid(f"{section}.{name}", "", f"a path where kind is {self.kind}")
        if self.client_certificates != "none":
            if not self.is_tls:
                raise OptionInvalid(f"{section}.client_certificates", self.client_certificates, '"none" without TLS')
            if not self.client_ca:
                raise OptionInvalid(f"{section}.client_ca", "", "a path where clients are asked for a certificate")
        elif self.username_from != "none":
            wanted = '"none" where client_certificates is "none"'
            raise OptionInvalid(f"{section}.username_from", self.username_from, wanted)
        for network in self.proxy_from:
            try:
                ip_network(network)
            except ValueError as error:
                raise OptionInvalid(f"{section}.proxy_from", network, 'networks such as "10.0.0.0/8"') from error


@dataclass(frozen=True, slots=True)
class AccessOptions:
    """The section `[mqtt.access]`: who may connect, and what a client may do."""

    anonymous: Literal["loopback", "always", "never"] = option(
        "loopback",
        "Where no authentication plugin is configured: from which listeners clients are taken that nothing authenticates. "
        '"loopback": those on a loopback address and on Unix sockets. Where a plugin is configured, it decides.',
    )
    plugins: dict[str, Any] | None = option(
        None,
        "Plugins of amqtt's interface: a table of options for each path of a class, in amqtt's own syntax. All "
        "authentication plugins that answer at all must agree, and at least one must answer; all topic plugins must agree.",
    )
    auth: dict[str, Any] | None = option(
        None,
        "amqtt's older section of authentication plugins by name, and their options. Not beside `plugins`.",
    )
    topic_check: dict[str, Any] | None = option(
        None,
        "amqtt's older section of topic plugins by name, and their options; may be written topic-check. Not beside `plugins`.",
    )
    denied_publish: Literal["drop", "close"] = option(
        "drop",
        'What a client of MQTT 3.1.1 gets for a message that it may not publish: "drop" acknowledges it and stores nothing, as '
        'Mosquitto and EMQX do; "close" ends the connection. MQTT 5.0 has an answer for it: reason 0x87.',
    )
    denied_subscription: Literal["not-authorized", "unspecified"] = option(
        "not-authorized",
        'What a SUBACK of MQTT 5.0 says of a filter that the plugins forbid: 0x87, or 0x80 ("unspecified"), which tells less, '
        "and which clients made for 3.1.1's codes know.",
    )
    decision_ms: int = option(
        MINUTE_MS,
        "Milliseconds for which an answer of the topic plugins is good: what they withdraw is denied after this time at most.",
        minimum=SECOND_MS,
        maximum=24 * HOUR_MS,
    )
    decisions_max: int = option(
        1_000_000,
        "Answers of the topic plugins kept for all clients. When there are more, the oldest are asked again.",
        minimum=1000,
        maximum=100_000_000,
    )
    decisions_per_client_max: int = option(
        10_000,
        "Answers of the topic plugins kept for one client.",
        minimum=16,
        maximum=1_000_000,
    )
    plugin_timeout_ms: int = option(
        5 * SECOND_MS,
        "Milliseconds in which the plugins must have answered. What they haven't answered by then is denied.",
        minimum=10,
        maximum=5 * MINUTE_MS,
    )
    questions_max: int = option(
        10_000,
        "Clients that may wait for an answer of the plugins at a time. One more is denied.",
        minimum=1,
        maximum=1_000_000,
    )

    def check(self, section: str) -> None:
        """Check what no bound of one option tells. Raises OptionInvalid."""
        if self.plugins is not None and (self.auth is not None or self.topic_check is not None):
            raise OptionInvalid(f"{section}.plugins", "given beside auth or topic-check", "alone: amqtt would ignore those")


@dataclass(frozen=True, slots=True)
class LimitOptions:
    """The section `[mqtt.limits]`: what protects the node from clients that want too much."""

    client_messages_per_s: int = option(
        0,
        "Messages a second that a client may publish in the long run, with a burst of as many. Beyond that it is read later. "
        "0: no limit.",
        minimum=0,
        maximum=10_000_000,
    )
    client_bytes_per_s: int = option(
        0,
        "Bytes a second that a client may send in the long run, with a burst of as many. Beyond that it is read later. "
        "0: no limit.",
        minimum=0,
        maximum=64 * GIB,
    )
    source_connections_max: int = option(
        0,
        "Connections from one source open at a time: an IPv4 address, or an IPv6 network of 64 bits. One more is closed at "
        "once. 0: no limit. Loopback addresses and Unix sockets have none.",
        minimum=0,
        maximum=10_000_000,
    )
    strikes_max: int = option(
        100,
        "Protocol errors and failed authentications from one source in `strike_window_ms` with which it is held off: its "
        "connections are closed at once for `hold_off_ms`. 0: never. Loopback addresses and Unix sockets never are.",
        minimum=0,
        maximum=1_000_000,
    )
    strike_window_ms: int = option(
        MINUTE_MS,
        "Milliseconds in which the strikes of a source are added up.",
        minimum=SECOND_MS,
        maximum=24 * HOUR_MS,
    )
    hold_off_ms: int = option(
        MINUTE_MS,
        "Milliseconds for which a source is held off.",
        minimum=SECOND_MS,
        maximum=24 * HOUR_MS,
    )
    sources_max: int = option(
        100_000,
        "Sources with strikes that are remembered. Beyond that the one that was struck longest ago is forgotten.",
        minimum=100,
        maximum=10_000_000,
    )
    undurable_bytes_max: int = option(
        256 * MIB,
        "Bytes of log that may be stored and not yet on disk. Beyond that nobody who publishes is read until half of it is.",
        minimum=MIB,
        maximum=64 * GIB,
    )
    log_lines_per_s: int = option(
        20,
        "Lines a second that the log gets of one kind of event that clients cause, such as a connection closed. The others are "
        "counted.",
        minimum=1,
        maximum=100_000,
    )


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """The section `[mqtt]`."""

    listen: HostPort = option(
        HostPort("127.0.0.1", 1883),
        "Address of the MQTT listener. Port 0 picks a free one.",
    )
    packet_bytes_max: int = option(
        MIB,
        "Bytes of one MQTT packet, its fixed header included. A client that sends a larger one is disconnected (MQTT 5.0: "
        "reason 0x95), and learns the limit in its CONNACK.",
        minimum=KIB,
        maximum=16 * MIB,
    )
    connections_max: int = option(
        100_000,
        "Connections open at a time. One more is closed with reason 0x97 (MQTT 3.1.1: return code 3).",
        minimum=1,
        maximum=10_000_000,
    )
    connect_timeout_ms: int = option(
        10 * SECOND_MS,
        "Milliseconds in which a new connection must send its CONNECT.",
        minimum=100,
        maximum=10 * MINUTE_MS,
    )
    inflight_max: int = option(
        1000,
        "Deliveries of QoS 1 and 2 that a session may leave unacknowledged, whatever larger receive maximum its client asks "
        "for. The node's own receive maximum for what clients publish is the same.",
        minimum=1,
        maximum=65_535,
    )
    subscriptions_max: int = option(
        1000,
        "Subscriptions of one session. One more is answered with 0x97 (MQTT 3.1.1: 0x80).",
        minimum=1,
        maximum=100_000,
    )
    shared: Literal["on", "off"] = option(
        "on",
        "Whether clients may share subscriptions, `$share/NAME/FILTER`. Each is the POP group NAME on FILTER: whoever may "
        "subscribe to FILTER may take messages from any such group. Off: they are refused with 0x9E (MQTT 3.1.1: 0x80).",
    )
    share_ack_timeout_ms: int = option(
        5 * MINUTE_MS,
        "Milliseconds in which the client of a shared subscription must acknowledge a message. Then another one gets it.",
        minimum=100,
        maximum=24 * HOUR_MS,
    )
    shared_max: int = option(
        5000,
        "Shared subscriptions of connected clients, each with all its clients: as many POP groups. One more is answered with "
        "0x97 (MQTT 3.1.1: 0x80).",
        minimum=1,
        maximum=1_000_000,
    )
    topic_alias_max: int = option(
        64,
        "Topic aliases in each direction of a connection (MQTT 5.0). A client may give this many, and gets this many at most, "
        "if it asks for more; 0 for none.",
        minimum=0,
        maximum=65_535,
    )
    keep_alive_s_max: int = option(
        0,
        "Seconds of the longest keep alive. A client of MQTT 5.0 that asks for a longer one, or for none, is told to use this "
        "one; 0 leaves it to the clients. MQTT 3.1.1 has no way to tell them.",
        minimum=0,
        maximum=65_535,
    )
    session_expiry_s_max: int = option(
        7 * DAY_S,
        "Seconds that a session lasts at most when its client is away, whatever longer the client asks for. This is also how "
        "long the sessions of MQTT 3.1.1 last that are not clean.",
        minimum=0,
        maximum=100 * 365 * DAY_S,
    )
    sessions_max: int = option(
        1_000_000,
        "Sessions that are stored, on disk: those that outlive their connections, and those of connected clients that leave a "
        "will. With one more the session of a client that is away ends: the one of which an end or a will is due first.",
        minimum=1,
        maximum=100_000_000,
    )
    session_queued_max: int = option(
        0,
        "Messages that may wait for one client, in all of its subscriptions, while it is away or slow. With more the oldest of "
        "the longest queues are passed over, when the client reads on. 0: as many as retention leaves.",
        minimum=0,
        maximum=1_000_000_000,
    )
    check_payload_format: bool = option(
        False,
        "Whether a message that its publisher calls UTF-8 (MQTT 5.0, payload format indicator) is refused with reason 0x99 "
        "where it is not. That reads each such message.",
    )
    sys_interval_s: int = option(
        10,
        "Seconds between two publications of the node's own topics, $SYS/broker/..., to those who subscribe to them; 0 for "
        "none.",
        minimum=0,
        maximum=3600,
    )
    send_buffer_bytes: int = option(
        256 * KIB,
        "Bytes waiting to be sent to a client from which on it counts as lagging: it gets no more until the buffer has "
        "drained, and then reads on from its cursor.",
        minimum=4 * KIB,
        maximum=64 * MIB,
    )
    listen_backlog: int = option(
        4096,
        "Connections that may wait to be accepted. The system may allow less (net.core.somaxconn). With fewer, many devices "
        "that connect at one instant wait for retries of their SYN.",
        minimum=1,
        maximum=65_535,
    )
    plain: Literal["on", "off"] = option(
        "on",
        'Whether `listen` is opened: "off" leaves the listeners of `[[mqtt.listeners]]`.',
    )
    tls_handshake_ms: int = option(
        10 * SECOND_MS,
        "Milliseconds in which a new connection must send its PROXY header, if one is due, and as many for its TLS handshake.",
        minimum=100,
        maximum=10 * MINUTE_MS,
    )
    handshakes_max: int = option(
        10_000,
        "Connections in their PROXY header or TLS handshake at a time. One more is closed at once.",
        minimum=1,
        maximum=1_000_000,
    )
    access: AccessOptions = AccessOptions()
    limits: LimitOptions = LimitOptions()
    listeners: tuple[ListenerOptions, ...] = option(
        (),
        "More listeners.",
    )

    def check(self, section: str) -> None:
        """Check what no bound of one option tells. Raises OptionInvalid."""
        names = [listener.name for listener in self.listeners]
        for name in names:
            if names.count(name) > 1:
                raise OptionInvalid(f"{section}.listeners.name", name, "another name: two listeners have it")
        if self.plain == "off" and not names:
            raise OptionInvalid(f"{section}.plain", "off", '"on" where there is no other listener')
