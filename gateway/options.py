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
    SECOND_MS,
    HostPort,
    OptionInvalid,
    option,
)

DAY_S: Final = DAY_MS // SECOND_MS

_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")

PACKET_ROOM_BYTES: Final = 128 * KIB
"""Bytes of a packet that the defaults leave for the topic, which has 65,535 at most, and for the properties."""

HELD_SHARE: Final = 4
"""The part of the connections whose logins may be held: a fourth. The others stay for clients that need not wait."""

PLAIN_NAME: Final = "mqtt"
"""The name of the listener on `mqtt.listen`."""


@dataclass(frozen=True, slots=True)
class ListenerOptions:
    """One listener, an element of the list `[[mqtt.listeners]]`."""

    name: str = option(
        "",
        'Name of the listener in the ready line, the log and the metrics: 1 to 32 of a-z, 0-9, - and _, but not "mqtt".',
    )
    kind: Literal["tcp", "tls", "ws", "wss", "unix"] = option(
        "tcp",
        'Protocol of the listener: MQTT over TCP ("tcp"), TLS ("tls"), WebSocket ("ws"), WebSocket over TLS ("wss") or '
        'a Unix socket ("unix").',
    )
    listen: HostPort = option(
        HostPort("127.0.0.1", 0),
        'Address of the listener. Port 0 picks a free port. It has no effect if `kind` is "unix".',
    )
    socket: str = option(
        "",
        "Path of the Unix socket. The node removes the file when it stops, and replaces a file on which no process "
        "listens any more when it starts.",
    )
    socket_mode: int = option(
        0o660,
        "Access rights of the Unix socket, as for chmod (in TOML: 0o660).",
        minimum=0,
        maximum=0o777,
    )
    certificate_file: str = option(
        "",
        "PEM file with the server certificate and its intermediate certificates. TLS needs it.",
    )
    key_file: str = option(
        "",
        "PEM file with the unencrypted private key of the certificate. TLS needs it.",
    )
    tls_version_min: Literal["1.2", "1.3"] = option(
        "1.2",
        "The oldest version of TLS that the listener accepts.",
    )
    client_certificates: Literal["none", "optional", "required"] = option(
        "none",
        'Whether the listener asks clients for a certificate: "none" does not ask, "optional" accepts a client without '
        'one, "required" refuses a client without one in the TLS handshake.',
    )
    client_ca_file: str = option(
        "",
        "PEM file with the certificate authorities that sign client certificates. It is needed unless "
        '`client_certificates` is "none".',
    )
    client_crl_file: str = option(
        "",
        "PEM file with the certificate revocation lists of the authorities in `client_ca_file`. A client whose certificate is "
        "revoked is refused in the TLS handshake. So is every client of an authority whose list has expired or is not there.",
    )
    username_from: Literal["none", "cn", "san"] = option(
        "none",
        'Part of the client certificate that becomes the user name: the common name ("cn"), or the first alternative '
        'name that is a URI, an e-mail address or a DNS name ("san"). The certificate then identifies the client, '
        "whatever user name and password it sends; plugins decide what the client may do, but not who it is. With "
        '"none" a certificate only lets the client connect.',
    )
    roles_from: Literal["none", "ou"] = option(
        "none",
        'Part of the client certificate that states roles for the rules of `access.file`: each organizational unit ("ou"). It '
        "counts only with `username_from`.",
    )
    websocket_path: str = option(
        "",
        'Path that a WebSocket request must ask for, such as "/mqtt". An empty path accepts any.',
    )
    origins: tuple[str, ...] = option(
        (),
        'Values of the Origin header that a WebSocket request may have, such as "https://example.org". They decide '
        'which web pages may connect; "*" stands for all. An empty list accepts pages that have the address of the listener '
        "itself; on loopback that is localhost or a loopback address. A request without the header, which no browser sends, "
        "is always accepted.",
    )
    proxy_from: tuple[str, ...] = option(
        (),
        "Networks of the proxies in front of this listener. If there are any, every connection must come from one of "
        "them and begin with a PROXY protocol header, version 1 or 2, which states the client's address. Bans, limits, quotas "
        "and rules go by that address, and a client of another machine is not local, even if its proxy is. On a Unix socket "
        "the access rights of the file say who may send the header.",
    )
    connections_max: int = option(
        1_000_000,
        "Maximum number of open connections of this listener. A further connection is closed at once.",
        minimum=1,
        maximum=10_000_000,
    )
    connections_per_s: int = option(
        0,
        "Connections that this listener accepts per second on average; the burst is the same number. Up to as many "
        "again are refused with reason 0x9F (MQTT 3.1.1: return code 3). Further ones are closed at once, as is every "
        "excess connection with TLS or a PROXY header. 0 sets no limit.",
        minimum=0,
        maximum=1_000_000,
    )
    messages_per_s: int = option(
        0,
        "Messages that all clients of this listener together may publish per second on average; the burst is the same "
        "number. The node reads excess messages later. 0 sets no limit.",
        minimum=0,
        maximum=100_000_000,
    )
    bytes_per_s: int = option(
        0,
        "Bytes that all clients of this listener together may send per second on average; the burst is the same "
        "number. The node reads excess bytes later. 0 sets no limit.",
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
        elif self.client_crl_file:
            raise OptionInvalid(f"{section}.client_crl_file", self.client_crl_file, 'empty if client_certificates is "none"')
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
        'Which listeners accept clients without authentication if no authentication is configured. "loopback" '
        "means listeners on a loopback address and on Unix sockets; behind a proxy the client must have a loopback address, "
        "too. With a plugin, a password file or tokens, these decide.",
    )
    session_of_other: Literal["refuse", "fresh"] = option(
        "refuse",
        "What a client gets whose client id is that of a session of another user. A session belongs to the user name with "
        "which it began, if a certificate, a password, a token or a plugin vouched for that name; otherwise it is open to "
        'everybody. "refuse": its CONNECT is refused with reason 0x85 (MQTT 3.1.1: return code 2), whether the other one is '
        'connected or away. "fresh": the other session ends, with what waits in it, and the client gets a new one.',
    )
    client_id: str = option(
        "*",
        'Pattern that client ids must match. "%u" stands for the user name, "%n" for the common name in the client '
        'certificate, and "*" for any characters; so "%u-*" binds a client id to its user. A client without that name, or '
        "with another client id, is refused with reason 0x85 (MQTT 3.1.1: return code 2). A client id that the node assigns "
        "matches, too.",
    )
    plugins: dict[str, Any] | None = option(
        None,
        "Plugins of amqtt: a table from the path of a class to its options, in amqtt's own syntax. At least one "
        "authentication plugin must answer, and all that answer must agree. All topic plugins must agree.",
    )
    auth: dict[str, Any] | None = option(
        None,
        "amqtt's older table of authentication plugins by name, with their options. It can't be combined with `plugins`.",
    )
    topic_check: dict[str, Any] | None = option(
        None,
        "amqtt's older table of topic plugins by name, with their options. It can also be written topic-check. It "
        "can't be combined with `plugins`.",
    )
    denied_publish: Literal["drop", "close"] = option(
        "drop",
        'How the node treats a message that a client of MQTT 3.1.1 may not publish: "drop" acknowledges the message '
        'and does not store it, as Mosquitto and EMQX do; "close" ends the connection. A client of MQTT 5.0 gets '
        "reason 0x87 instead.",
    )
    denied_subscription: Literal["not-authorized", "unspecified"] = option(
        "not-authorized",
        'Reason code in a SUBACK of MQTT 5.0 for a filter that the plugins forbid: 0x87 ("not-authorized"), or 0x80 '
        '("unspecified"), which tells the client less, and which clients made for MQTT 3.1.1 understand.',
    )
    authentication_threads: int = option(
        0,
        "Number of threads on which plugins authenticate clients in parallel: see `parallel`. 0 stands for the number of "
        "processors, but no more than 4.",
        minimum=0,
        maximum=64,
    )
    parallel: tuple[str, ...] = option(
        (),
        "Paths of classes of which each thread that authenticates may have instances of its own, besides those that amqtt "
        "ships. All configured authentication plugins must be among them; otherwise one thread authenticates. An instance must "
        "not rely on having seen all logins.",
    )
    verified: Literal["passwords", "all", "none"] = option(
        "passwords",
        "Credentials that the node remembers when they are verified, so that a client that comes again needs no other "
        'password hash. "passwords": user names and passwords, if nothing but password files authenticates. They are '
        "remembered while a client is connected with them, and for `verified_for` after it has left. A changed password "
        'counts at once. "all": those that any plugin has verified, for one client id, address and certificate, and for '
        '`verified_for`. The plugins are not asked meanwhile, even if their answer would be another one by then. "none": the '
        "plugins are asked at each CONNECT. The memory holds keyed hashes, and its key is of this process alone.",
    )
    verified_for_ms: int = option(
        15 * MINUTE_MS,
        "Time for which the node remembers verified credentials: see `verified`.",
        minimum=SECOND_MS,
        maximum=24 * HOUR_MS,
    )
    verified_max: int = option(
        100_000,
        "Maximum number of credentials that the node remembers. Beyond it the oldest ones are forgotten.",
        minimum=1,
        maximum=100_000_000,
    )
    decision_ms: int = option(
        MINUTE_MS,
        "Time for which an answer of the topic plugins is valid. A withdrawn permission takes effect after this time at most.",
        minimum=SECOND_MS,
        maximum=24 * HOUR_MS,
    )
    subscriptions_ms: int = option(
        10 * MINUTE_MS,
        "Time after which the topic plugins are asked again whether a client may have its subscriptions. One that they "
        "no longer allow ends, and the client is disconnected with reason 0x98. 0 never asks again but when a client resumes a "
        "session: then they are asked about all of its filters in any case.",
        minimum=0,
        maximum=24 * HOUR_MS,
    )
    decisions_max: int = option(
        1_000_000,
        "Maximum number of answers of the topic plugins kept in memory for all clients. Beyond it the oldest answers "
        "are dropped, and the plugins are asked again.",
        minimum=1000,
        maximum=100_000_000,
    )
    decisions_per_client_max: int = option(
        10_000,
        "Maximum number of answers of the topic plugins kept in memory for one client.",
        minimum=16,
        maximum=1_000_000,
    )
    plugin_timeout_ms: int = option(
        5 * SECOND_MS,
        "Time within which the plugins must answer a question. After that it counts as not answered: see `unanswered`.",
        minimum=10,
        maximum=5 * MINUTE_MS,
    )
    unanswered_ms: int = option(
        30 * SECOND_MS,
        "Time for which a PUBLISH or SUBSCRIBE waits if the plugins give no answer about it, because they take too "
        "long, fail or can't tell. Meanwhile the node asks again, and reads nothing from the client. After that it closes "
        "the connection with reason 0x89, and has not acknowledged the packet. A delivery waits without a limit. A client "
        "that connects is refused at once with reason 0x89 (MQTT 3.1.1: return code 3).",
        minimum=0,
        maximum=HOUR_MS,
    )
    held_ms: int = option(
        15 * SECOND_MS,
        "Time for which a login keeps its place if more log in than can be authenticated within "
        "`mqtt.connect_timeout`. It is authenticated if there is room meanwhile. After that it is refused with reason 0x89 "
        "(MQTT 3.1.1: return code 3). 0 refuses it at once, and clients that come again at once then cost more than their "
        "passwords.",
        minimum=0,
        maximum=MINUTE_MS,
    )
    held_max: int = option(
        10_000,
        "Maximum number of logins that are held so, and no more than a quarter of the connections that the node or one of its "
        "listeners may have. A further one is refused at once, as is one whose CONNECT has more than 4096 bytes.",
        minimum=0,
        maximum=1_000_000,
    )
    questions_max: int = option(
        10_000,
        "Maximum number of clients that wait for an answer of the topic plugins at the same time, and of those that wait for "
        "their authentication. The question of a further client counts as not answered: see `unanswered`. Fewer wait for "
        "their authentication if the plugins can't answer so many within `mqtt.connect_timeout`.",
        minimum=1,
        maximum=1_000_000,
    )

    def check(self, section: str) -> None:
        """Raise OptionInvalid if options contradict each other."""
        if self.plugins is not None and (self.auth is not None or self.topic_check is not None):
            raise OptionInvalid(
                f"{section}.plugins", "combined with auth or topic-check", "used alone, because amqtt would ignore those"
            )


@dataclass(frozen=True, slots=True)
class LimitOptions:
    """The section `[mqtt.limits]`: limits that protect the node from clients."""

    client_messages_per_s: int = option(
        0,
        "Messages that one client may publish per second on average; the burst is the same number. The node reads "
        "excess messages later. 0 sets no limit.",
        minimum=0,
        maximum=10_000_000,
    )
    client_bytes_per_s: int = option(
        0,
        "Bytes that one client may send per second on average; the burst is the same number. The node reads excess "
        "bytes later. 0 sets no limit.",
        minimum=0,
        maximum=64 * GIB,
    )
    source_connections_max: int = option(
        0,
        "Maximum number of open connections from one source, which is an IPv4 address or an IPv6 network of 64 bits. A "
        "further connection is closed at once. 0 sets no limit. Loopback addresses and Unix sockets have no limit.",
        minimum=0,
        maximum=10_000_000,
    )
    strikes_max: int = option(
        100,
        "Number of protocol errors and failed authentications within `strike_window` after which a source or a user is held "
        "off for `hold_off`: the node closes the connections of a source at once, and refuses the CONNECTs of a user with "
        "reason 0x9F (MQTT 3.1.1: return code 3). A client, which is a client id with its user name, is held off after a tenth "
        "of this number. Only its first error in a window also counts against the user, or, if nothing vouches for the user "
        "name, against the source. 0 never holds anybody off, nor are loopback addresses and Unix sockets ever held off.",
        minimum=0,
        maximum=1_000_000,
    )
    strike_window_ms: int = option(
        MINUTE_MS,
        "Time during which the errors of a client, a user or a source are added up.",
        minimum=SECOND_MS,
        maximum=24 * HOUR_MS,
    )
    hold_off_ms: int = option(
        MINUTE_MS,
        "Time for which a client, a user or a source is held off.",
        minimum=SECOND_MS,
        maximum=24 * HOUR_MS,
    )
    sources_max: int = option(
        100_000,
        "Maximum number of sources, of users and of clients whose errors are remembered. Beyond it the one whose last error is "
        "oldest is forgotten.",
        minimum=100,
        maximum=10_000_000,
    )
    undurable_bytes_max: int = option(
        256 * MIB,
        "Maximum number of log bytes that are stored but not yet on disk. Beyond it the node stops reading from "
        "publishers until half of them are on disk.",
        minimum=MIB,
        maximum=64 * GIB,
    )
    log_lines_per_s: int = option(
        20,
        "Maximum number of log lines per second for one kind of event that clients cause, such as a closed connection. "
        "The log states how many further events there were.",
        minimum=1,
        maximum=100_000,
    )


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """The section `[mqtt]`."""

    listen: HostPort = option(
        HostPort("127.0.0.1", 1883),
        "Address of the MQTT listener. Port 0 picks a free port.",
    )
    message_bytes_max: int = option(
        MIB,
        "Maximum size of a payload in bytes; topic and properties don't count. A larger message is refused with reason 0x97 "
        "(MQTT 3.1.1: the connection is closed), and a CONNECT with a larger will is refused.",
        minimum=KIB,
        maximum=16 * MIB,
    )
    packet_bytes_max: int = option(
        MIB + PACKET_ROOM_BYTES,
        "Maximum size of an MQTT packet in bytes, including its fixed header, topic and properties. Leave 128 KiB above "
        "`message_bytes_max`, so that every payload which that allows has room. A client that sends a larger packet is "
        "disconnected (MQTT 5.0: reason 0x95). The CONNACK of MQTT 5.0 states this limit.",
        minimum=KIB,
        maximum=16 * MIB + PACKET_ROOM_BYTES,
    )
    connect_bytes_max: int = option(
        128 * KIB,
        "Maximum size of a CONNECT packet in bytes, if that is less than `packet_bytes_max`: what a client that is not "
        "yet known may make the node keep and parse. It must leave room for the will, the user name and the password. "
        "A larger CONNECT ends the connection (MQTT 5.0: reason 0x95).",
        minimum=KIB,
        maximum=16 * MIB,
    )
    user_properties_max: int = option(
        256,
        "Maximum number of user properties in a packet, and in the will of a CONNECT (MQTT 5.0). A client that sends "
        "more is disconnected with reason 0x97.",
        minimum=16,
        maximum=65_536,
    )
    packet_filters_max: int = option(
        1000,
        "Maximum number of topic filters in one SUBSCRIBE or UNSUBSCRIBE. A client that sends more is disconnected (MQTT "
        "5.0: reason 0x97).",
        minimum=1,
        maximum=100_000,
    )
    connections_max: int = option(
        100_000,
        "Maximum number of open connections. A further connection is refused with reason 0x97 (MQTT 3.1.1: return code 3).",
        minimum=1,
        maximum=10_000_000,
    )
    connect_timeout_ms: int = option(
        10 * SECOND_MS,
        "Time within which a new connection must send its CONNECT, and after that for which it may wait until the "
        "plugins are asked to authenticate it.",
        minimum=100,
        maximum=10 * MINUTE_MS,
    )
    inflight_max: int = option(
        1000,
        "Maximum number of deliveries at QoS 1 and 2 that a session may leave unacknowledged, even if the client asks "
        "for a larger receive maximum. It is also the receive maximum of the node.",
        minimum=1,
        maximum=65_535,
    )
    subscriptions_max: int = option(
        1000,
        "Maximum number of subscriptions of one session. A further subscription is refused with reason 0x97 (MQTT "
        "3.1.1: 0x80).",
        minimum=1,
        maximum=100_000,
    )
    all_subscriptions_max: int = option(
        10_000_000,
        "Maximum number of subscriptions of all sessions, those of absent clients included. A further one is refused "
        "with reason 0x97 (MQTT 3.1.1: 0x80).",
        minimum=1,
        maximum=1_000_000_000,
    )
    retained_max: int = option(
        1_000_000,
        "Maximum number of retained messages. A message to be retained for a further topic is refused with reason 0x97 "
        "(MQTT 3.1.1: the connection is closed).",
        minimum=1,
        maximum=1_000_000_000,
    )
    retained_bytes_max: int = option(
        4 * GIB,
        "Maximum number of bytes of retained messages. Their records outlive retention. Further ones are refused in the "
        "same way.",
        minimum=KIB,
        maximum=1024 * GIB,
    )
    overlapping: Literal["each", "once"] = option(
        "each",
        "How often a client of MQTT 3.1.1 gets a message that several of its subscriptions match: once for each of them, at "
        'the QoS of each ("each"), or once in all, at the highest QoS of them ("once"). The version allows both. A client of '
        'MQTT 5.0 gets it once in any case. Retained messages come once for each new subscription. With "once" such a message '
        "takes several times the processor time.",
    )
    shared: Literal["on", "off"] = option(
        "on",
        "Whether clients may use shared subscriptions, `$share/NAME/FILTER`. Each of them is the POP group NAME on "
        'FILTER, so a client that may subscribe to FILTER may take messages from any such group. "off" refuses them '
        "with reason 0x9E (MQTT 3.1.1: 0x80).",
    )
    share_ack_timeout_ms: int = option(
        5 * MINUTE_MS,
        "Time within which a client must acknowledge a message of a shared subscription. After that another "
        "client gets the message.",
        minimum=100,
        maximum=24 * HOUR_MS,
    )
    shared_max: int = option(
        5000,
        "Maximum number of shared subscriptions of all connected clients; clients that share one count once. Each is a "
        "POP group. A further one is refused with reason 0x97 (MQTT 3.1.1: 0x80).",
        minimum=1,
        maximum=1_000_000,
    )
    topic_alias_max: int = option(
        64,
        "Maximum number of topic aliases that a client may set on a connection (MQTT 5.0). 0 disables them.",
        minimum=0,
        maximum=65_535,
    )
    sent_topic_alias_max: int = option(
        0,
        "Maximum number of topic aliases that the node sets on a connection (MQTT 5.0), if the client accepts so many. 0 sends "
        "none, because some clients accept aliases and then deliver messages with an empty topic: see the guide for devices.",
        minimum=0,
        maximum=65_535,
    )
    keep_alive_s_max: int = option(
        0,
        "Longest keep alive. A client of MQTT 5.0 that asks for a longer one, or for none, is told to use "
        "this one. 0 leaves the keep alive to the clients. MQTT 3.1.1 can't tell clients, so it has no effect there.",
        minimum=0,
        maximum=65_535,
    )
    session_expiry_s_max: int = option(
        7 * DAY_S,
        "Longest time that a session lasts while its client is away, even if the client asks for longer. "
        "Sessions of MQTT 3.1.1 that are not clean last exactly this long.",
        minimum=0,
        maximum=CENTURY_MS // SECOND_MS,
    )
    sessions_max: int = option(
        1_000_000,
        "Maximum number of sessions stored on disk: those that outlive their connections, and those of connected "
        "clients with a will. Beyond it the session of an absent client ends: the one whose end or will is due first.",
        minimum=1,
        maximum=100_000_000,
    )
    session_queued_max: int = option(
        0,
        "Maximum number of messages that wait for one client in all of its subscriptions, while the client is away or "
        "slow. Beyond it the client misses the oldest messages of its longest queues when it reads on. 0 sets no limit "
        "but the retention.",
        minimum=0,
        maximum=1_000_000_000,
    )
    check_payload_format: bool = option(
        False,
        "Whether the node refuses, with reason 0x99, a message that is not UTF-8 although its publisher says so (MQTT "
        "5.0, payload format indicator). The check reads the body of each such message.",
    )
    sys_interval_s: int = option(
        10,
        "Interval at which the node publishes its own topics, $SYS/broker/..., to their subscribers. 0 disables them.",
        minimum=0,
        maximum=3600,
    )
    send_buffer_bytes: int = option(
        256 * KIB,
        "Bytes waiting to be sent to a client above which the client counts as lagging. A lagging client gets nothing "
        "more until the buffer has drained; then the node continues from its cursor.",
        minimum=4 * KIB,
        maximum=64 * MIB,
    )
    listen_backlog: int = option(
        4096,
        "Maximum number of connections that wait to be accepted. The system may allow fewer (net.core.somaxconn). If "
        "it is too small, devices that connect at the same moment have to repeat their SYN.",
        minimum=1,
        maximum=65_535,
    )
    plain: Literal["on", "off"] = option(
        "on",
        'Whether the node listens on `listen`. "off" leaves only the listeners of `[[mqtt.listeners]]`.',
    )
    tls_handshake_ms: int = option(
        10 * SECOND_MS,
        "Time within which a new connection must send its PROXY header, if the listener expects one, and the "
        "same time again for its TLS handshake.",
        minimum=100,
        maximum=10 * MINUTE_MS,
    )
    handshakes_max: int = option(
        10_000,
        "Maximum number of connections that are in their PROXY header or TLS handshake at the same time. A further one "
        "is closed at once.",
        minimum=1,
        maximum=1_000_000,
    )
    access: AccessOptions = AccessOptions()
    limits: LimitOptions = LimitOptions()
    listeners: tuple[ListenerOptions, ...] = option(
        (),
        "Further listeners.",
    )

    @property
    def all_listeners(self) -> tuple[ListenerOptions, ...]:
        """The plain listener, unless it is off, and the further ones."""
        plain = (ListenerOptions(name=PLAIN_NAME, listen=self.listen),) if self.plain == "on" else ()
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
        if self.plain == "off" and not names:
            raise OptionInvalid(f"{section}.plain", "off", '"on" if there is no other listener')
