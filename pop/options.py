"""The options of POP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from penstock.store.options import DAY_MS, GIB, HOUR_MS, KIB, MIB, MINUTE_MS, SECOND_MS, HostPort, OptionInvalid, bound, option

REQUEST_BYTES: Final = 16 * MIB
"""Size of a request, which may be a batch of messages, unless messages may be larger than a fourth of it."""

MESSAGES_OF_REQUEST: Final = 4
"""Messages of the largest size that a request has room for."""

MEMORY_PARTS: Final = 8
"""Parts of the memory for calls. A byte of a request takes up to three bytes of memory, and a byte of a response up to five. So
one part is the size of all requests, and as much that of all responses."""

INVISIBLE_MS_MAX: Final = 12 * HOUR_MS
"""See `PopOptions.invisible_ms_max`."""

TOPIC_IDS_SHARE: Final = 5
"""Which part of the deduplication ids one topic may have: a fifth. A busy topic must leave room for those of others."""


@dataclass(frozen=True, slots=True)
class PopOptions:
    """The section `[pop]`, and the bounds of POP."""

    listen: HostPort = option(
        HostPort("127.0.0.1", 8081),
        "Address of the gRPC listener. Port 0 picks a free port.",
    )
    anonymous: Literal["loopback", "always"] = option(
        "loopback",
        "Where callers may do everything if nothing authenticates them, that is without `access.file` and "
        '`pop.client_ca_file`. Beyond loopback the node does not start with "loopback".',
    )
    certificate_file: str = option(
        "",
        "PEM file with the node's certificate and its intermediate certificates. If empty, the listener uses plain text.",
    )
    key_file: str = option("", "PEM file with the private key of the certificate.")
    client_ca_file: str = option(
        "",
        "PEM file with the root certificates of clients. If it is set, every client must show a certificate.",
    )
    tls_optional: bool = option(
        False,
        "Whether clients with and without TLS share the port, as with RocketMQ, whose clients for Java and Go use TLS. "
        "Without certificate_file the node signs a certificate itself.",
    )
    rocketmq_advertise: str = option(
        "",
        "HOST:PORT that RocketMQ clients are told, such as that of a proxy. If empty, it is where they reached the node.",
    )
    connections_max: int = option(
        10_000,
        "Maximum number of open gRPC connections. A further one is closed at once.",
        minimum=1,
        maximum=1_000_000,
    )
    message_bytes_max: int = option(
        4 * MIB,
        "Maximum size of the body of a message. Its properties may have as many bytes, and a request four times as many.",
        minimum=KIB,
        maximum=32 * MIB,
    )
    memory_bytes_max: int = option(
        GIB,
        "Memory for the requests of all calls and for the responses that callers have not read yet. An eighth of so many bytes "
        "may be under way of each: then calls wait, for five seconds at most, and the slowest reader is disconnected.",
        minimum=128 * MIB,
        maximum=1024 * GIB,
    )
    compression: Literal["off", "on"] = option(
        "off",
        "Whether requests may be compressed by gRPC. A few bytes can then stand for a whole request.",
    )
    invisible_ms_default: int = option(
        MINUTE_MS,
        "Time for which a popped message is invisible if neither the call nor the group says.",
        minimum=1,
        maximum=INVISIBLE_MS_MAX,
    )
    attempts_max: int = option(
        16,
        "Number of times that a group gets a message before it becomes a dead letter.",
        minimum=1,
        maximum=65_535,
    )
    retry_backoff_ms: tuple[int, ...] = option(
        (1_000, 2_000, 4_000, 8_000, 15_000, 30_000, 60_000, 120_000, 240_000, 300_000),
        "Time from a failed attempt to the next one, by attempt; the last one repeats. A random quarter is taken off. If "
        "empty, the message is visible at once.",
        minimum=0,
        maximum=30 * DAY_MS,
    )
    in_flight_max: int = option(
        200_000,
        "Maximum number of messages that the consumers of a group have in flight. At the limit its pops get nothing.",
        minimum=1,
        maximum=100_000_000,
    )
    groups_max: int = option(
        10_000,
        "Maximum number of groups; a group counts once for each of its filters.",
        minimum=1,
        maximum=1_000_000,
    )
    groups_auto_create: bool = option(True, "Whether a pop creates the group that it names.")
    transaction_check_ms: int = option(
        30 * SECOND_MS,
        "Interval at which the node asks the producer of a half message for its outcome. After 15 questions it rolls back.",
        minimum=100,
        maximum=DAY_MS,
    )
    deduplication_ms: int = option(
        10 * MINUTE_MS,
        "Time for which deduplication ids are remembered.",
        minimum=SECOND_MS,
        maximum=30 * DAY_MS,
    )
    deduplication_ids_max: int = option(
        500_000,
        "Maximum number of deduplication ids, each in some 300 bytes of memory. One topic may have a fifth of them.",
        minimum=1,
        maximum=100_000_000,
    )
    request_bytes_max: int = bound(
        0,
        "Bytes of one request. A larger one is refused, and not read. 0: `REQUEST_BYTES`, or `MESSAGES_OF_REQUEST` of the "
        "largest messages, and no more than all requests together.",
    )
    invisible_ms_max: int = bound(
        INVISIBLE_MS_MAX,
        "Invisible time that a call may ask for. A consumer that works for longer asks again, so that the message of one that "
        "has died returns within half a day.",
    )
    requests_bytes_max: int = bound(0, "Bytes of all requests, which take three times as much memory. 0: see `MEMORY_PARTS`.")
    responses_bytes_max: int = bound(
        0, "Bytes of all responses that are not read, which take five times as much memory. 0: see `MEMORY_PARTS`."
    )
    transaction_checks_max: int = bound(
        15, "Questions for the outcome of a half message before it is rolled back: RocketMQ's default."
    )
    transactions_max: int = bound(
        100_000, "Pending half messages, each of them in memory: applications end theirs within a minute."
    )
    deduplication_topic_ids_max: int = bound(0, "Deduplication ids of one topic. 0: `TOPIC_IDS_SHARE` of all.")
    calls_max: int = bound(
        1000, "Calls under way on one connection: further ones wait in the client, and cost the node nothing."
    )
    messages_max: int = bound(1024, "Messages that one pop returns, as one turn of the loop takes them from the queue.")
    messages_default: int = bound(32, "Messages that a pop returns if the call doesn't say: RocketMQ's default.")
    wait_ms_max: int = bound(MINUTE_MS, "Time that a pop waits for its first message: proxies close calls that wait longer.")
    retry_jitter_percent: int = bound(
        25, "Each back-off is shorter by a random part of up to this, so that messages that failed together return apart."
    )
    delayed_max: int = bound(200_000, "Messages of a group that wait for a delay or back-off after they were returned.")
    waiters_max: int = bound(10_000, "Pops and pulls that wait on the node at a time, each with a task and a timer.")
    lite_idle_ms: int = bound(
        DAY_MS,
        "Time for which the group of a lite topic is kept when its last RocketMQ client is no longer heard of.",
    )

    def __post_init__(self) -> None:
        """Derive the bounds that are 0 from the options."""
        part = self.memory_bytes_max // MEMORY_PARTS
        requests_bytes = self.requests_bytes_max or part
        request_bytes = min(max(REQUEST_BYTES, MESSAGES_OF_REQUEST * self.message_bytes_max), requests_bytes)
        for name, derived in (
            ("requests_bytes_max", part),
            ("responses_bytes_max", part),
            ("request_bytes_max", request_bytes),
            ("deduplication_topic_ids_max", max(self.deduplication_ids_max // TOPIC_IDS_SHARE, 1)),
        ):
            if not getattr(self, name):
                object.__setattr__(self, name, derived)

    def check(self, section: str) -> None:
        """Raise OptionInvalid if options contradict each other."""
        if bool(self.certificate_file) != bool(self.key_file):
            missing = "key_file" if self.certificate_file else "certificate_file"
            raise OptionInvalid(f"{section}.{missing}", "", "a path, because certificate_file and key_file go together")
        if self.client_ca_file and not self.certificate_file:
            allowed = "a path where client_ca_file is set: without TLS no client shows a certificate"
            raise OptionInvalid(f"{section}.certificate_file", "", allowed)
        part = self.memory_bytes_max // MEMORY_PARTS
        if self.message_bytes_max > part:
            allowed = f"at most {part}, an eighth of {section}.memory_bytes_max"
            raise OptionInvalid(f"{section}.message_bytes_max", self.message_bytes_max, allowed)
