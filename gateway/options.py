"""The options of the MQTT gateway."""

from __future__ import annotations

from dataclasses import dataclass

from store.options import DAY_MS, KIB, MIB, MINUTE_MS, SECOND_MS, HostPort, option

DAY_S = DAY_MS // SECOND_MS


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
        "long the sessions of MQTT 3.1.1 last that are not clean. A stop of the node ends all sessions.",
        minimum=0,
        maximum=100 * 365 * DAY_S,
    )
    sessions_away_max: int = option(
        100_000,
        "Sessions that are kept for clients which are away. With one more the session ends whose client left first.",
        minimum=1,
        maximum=10_000_000,
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
