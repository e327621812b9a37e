"""The options of the MQTT gateway."""

from __future__ import annotations

from dataclasses import dataclass

from store.options import KIB, MIB, MINUTE_MS, SECOND_MS, HostPort, option


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
