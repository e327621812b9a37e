"""The options of POP."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.store.options import DAY_MS, HOUR_MS, KIB, MIB, MINUTE_MS, SECOND_MS, HostPort, option


@dataclass(frozen=True, slots=True)
class PopOptions:
    """The section `[pop]`."""

    listen: HostPort = option(
        HostPort("127.0.0.1", 8081),
        "Address of the gRPC listener. Port 0 picks a free one.",
    )
    tls_certificate_file: str = option(
        "",
        "PEM file with the node's certificate, and those between it and a root. Empty: the listener speaks plain text.",
    )
    tls_key_file: str = option(
        "",
        "PEM file with the key of that certificate.",
    )
    tls_client_ca_file: str = option(
        "",
        "PEM file with the roots of clients' certificates. Given, every client must show one.",
    )
    access_file: str = option(
        "",
        "TOML file that says who may publish, consume and administrate what, and which MQTT users may share the groups that it "
        "names: see pop/access/file.py. Empty: everybody may.",
    )
    rocketmq_advertise: str = option(
        "",
        "HOST:PORT that RocketMQ clients are told to use, where they can't go by the address at which they came, as behind a "
        "proxy. Empty: that address. It says nothing where rocketmq-python-client (the extra `rocketmq`) is not installed.",
    )
    messages_max: int = option(
        1024,
        "Messages that one pop may hand out. A call that asks for more gets this many.",
        minimum=1,
        maximum=16_384,
    )
    messages_default: int = option(
        32,
        "Messages that a pop hands out at most when the call doesn't say.",
        minimum=1,
        at_most="messages_max",
    )
    invisible_ms_default: int = option(
        MINUTE_MS,
        "Milliseconds for which a message handed out is invisible when the call doesn't say.",
        minimum=1,
        at_most="invisible_ms_max",
    )
    invisible_ms_max: int = option(
        12 * HOUR_MS,
        "Milliseconds of invisible time that a call may ask for. A longer time is refused.",
        minimum=SECOND_MS,
        maximum=30 * DAY_MS,
    )
    wait_ms_max: int = option(
        MINUTE_MS,
        "Milliseconds that a pop may wait for its first message. A longer wait ends here.",
        minimum=0,
        maximum=HOUR_MS,
    )
    attempts_max: int = option(
        16,
        "Times that a message is handed out to a group. When the last one isn't acknowledged, it goes to the dead letters.",
        minimum=1,
        maximum=65_535,
    )
    retry_backoff_ms: tuple[int, ...] = option(
        (),
        "Milliseconds from a failed attempt to the next, by attempt; the last holds for all that follow. Empty: none, the "
        "message is visible again at once.",
        minimum=0,
        maximum=30 * DAY_MS,
    )
    in_flight_max: int = option(
        200_000,
        "Messages that one group may have in flight. At the limit its pops get nothing until some are acknowledged.",
        minimum=1,
        maximum=100_000_000,
    )
    waiters_max: int = option(
        10_000,
        "Pops that may wait on this node at a time. One more is refused.",
        minimum=1,
        maximum=1_000_000,
    )
    groups_max: int = option(
        10_000,
        "Groups that may exist, each with each of its filters. The call that would need one more is refused.",
        minimum=1,
        maximum=1_000_000,
    )
    groups_auto_create: bool = option(
        True,
        "Whether a pop creates the group that it names. Where it doesn't, groups are created by the API or the command line.",
    )
    lite_idle_ms: int = option(
        DAY_MS,
        "Milliseconds for which the group of a lite topic is kept when the last RocketMQ client that had subscribed to it has "
        "ended or fallen silent. When it unsubscribes, the group ends at once.",
        minimum=0,
        maximum=30 * DAY_MS,
    )
    transaction_check_ms: int = option(
        30 * SECOND_MS,
        "Milliseconds after which the producer of a half message is asked whether to commit it; and again after as many.",
        minimum=100,
        maximum=DAY_MS,
    )
    transaction_checks_max: int = option(
        15,
        "Times that a producer is asked for the outcome of a half message. Then it is rolled back.",
        minimum=1,
        maximum=1_000,
    )
    transactions_max: int = option(
        100_000,
        "Half messages that may be pending. One more is refused.",
        minimum=1,
        maximum=10_000_000,
    )
    message_bytes_max: int = option(
        4 * MIB,
        "Bytes of one message sent: topic, properties and body together.",
        minimum=KIB,
        maximum=32 * MIB,
    )
