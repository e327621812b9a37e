"""The options of POP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.store.options import DAY_MS, GIB, HOUR_MS, KIB, MIB, MINUTE_MS, SECOND_MS, HostPort, option


@dataclass(frozen=True, slots=True)
class PopOptions:
    """The options of the section `[pop]`."""

    listen: HostPort = option(
        HostPort("127.0.0.1", 8081),
        "Address of the gRPC listener. Port 0 picks a free port.",
    )
    anonymous: Literal["loopback", "always"] = option(
        "loopback",
        "Where callers may do everything if nothing authenticates them, that is without `access.file` and "
        '`pop.client_ca_file`. "loopback": on a loopback address; the node does not start with another one. "always": '
        "wherever the listener is.",
    )
    certificate_file: str = option(
        "",
        "PEM file with the node's certificate and its intermediate certificates. If empty, the listener uses plain text.",
    )
    key_file: str = option(
        "",
        "PEM file with the private key of the node's certificate.",
    )
    client_ca_file: str = option(
        "",
        "PEM file with the root certificates of clients. If it is set, every client must show a certificate (mTLS).",
    )
    tls_optional: bool = option(
        False,
        "Whether the listener accepts clients with TLS and clients without on its one port, as RocketMQ does: its official "
        "clients for Java and Go use TLS unless they are told otherwise. Without certificate_file the node signs a "
        "certificate itself at each start, which those clients accept. All bytes then pass through a process of their own.",
    )
    rocketmq_advertise: str = option(
        "",
        "HOST:PORT that RocketMQ clients are told to connect to, for example the address of a proxy. If empty, clients use the "
        "address at which they reached the node. Has no effect without rocketmq-python-client (the extra `rocketmq`).",
    )
    connections_max: int = option(
        10_000,
        "Maximum number of open gRPC connections. A further connection is closed at once. Where the process may have few file "
        "descriptors, an eighth of that limit applies if it is less.",
        minimum=1,
        maximum=1_000_000,
    )
    calls_max: int = option(
        1000,
        "Maximum number of calls under way on one connection. Further calls wait in the client until one ends.",
        minimum=1,
        maximum=100_000,
    )
    request_bytes_max: int = option(
        16 * MIB,
        "Maximum size of one request in bytes, which may be a batch of messages. A larger one is refused with "
        "RESOURCE_EXHAUSTED, and not read.",
        minimum=MIB,
        maximum=256 * MIB,
        at_most="requests_bytes_max",
    )
    requests_bytes_max: int = option(
        128 * MIB,
        "Maximum number of bytes of the requests of all calls together. A call takes `request_bytes_max` of them while its "
        "request is read, and then what the request has. Requests that send no messages, such as pops that wait, may have half "
        "of it. Calls that find no room wait, one of each connection in turn, and are "
        "refused with RESOURCE_EXHAUSTED after five seconds. The node needs up to three times as much memory for them.",
        minimum=MIB,
        maximum=64 * GIB,
    )
    responses_bytes_max: int = option(
        128 * MIB,
        "Maximum number of bytes of the responses that callers have not read yet, of all calls together. When there are more, "
        "the caller that has most of them loses the connection with the oldest, and gets nothing for a second. Messages that "
        "were handed out and are not synced yet may have a quarter of it besides; a caller with a quarter of this quarter "
        "waits for a sync. The node needs up to five times as much memory for them.",
        minimum=16 * MIB,
        maximum=64 * GIB,
    )
    compression: Literal["off", "on"] = option(
        "off",
        'Whether requests may be compressed by gRPC. "off" refuses them with UNIMPLEMENTED, because a few bytes on a stream of '
        "requests can stand for `request_bytes_max`. Messages whose bodies are compressed have nothing to do with it.",
    )
    messages_max: int = option(
        1024,
        "Maximum number of messages that one pop returns. A call that asks for more gets this many.",
        minimum=1,
        maximum=16_384,
    )
    messages_default: int = option(
        32,
        "Maximum number of messages that a pop returns if the call doesn't say.",
        minimum=1,
        at_most="messages_max",
    )
    invisible_ms_default: int = option(
        MINUTE_MS,
        "Time for which a popped message is invisible if neither the call nor the group says.",
        minimum=1,
        at_most="invisible_ms_max",
    )
    invisible_ms_max: int = option(
        12 * HOUR_MS,
        "Longest invisible time that a call may ask for. A call that asks for more is refused.",
        minimum=SECOND_MS,
        maximum=30 * DAY_MS,
    )
    wait_ms_max: int = option(
        MINUTE_MS,
        "Longest time that a pop waits for its first message. A call that asks for more waits this long.",
        minimum=0,
        maximum=HOUR_MS,
    )
    attempts_max: int = option(
        16,
        "Number of times that a group gets a message. After the last attempt, the message becomes a dead letter.",
        minimum=1,
        maximum=65_535,
    )
    retry_backoff_ms: tuple[int, ...] = option(
        (1_000, 2_000, 4_000, 8_000, 15_000, 30_000, 60_000, 120_000, 240_000, 300_000),
        "Times from a failed attempt to the next one, by attempt; the last value applies to all later attempts. If "
        "empty, a message is visible again at once.",
        minimum=0,
        maximum=30 * DAY_MS,
    )
    retry_jitter_percent: int = option(
        25,
        "Each wait of `retry_backoff`, and of an exponential back-off of a group, is shorter by a random part of up to this "
        "percentage, so that messages that failed together do not all return at once. A list of waits that is set for a group "
        "is exact.",
        minimum=0,
        maximum=100,
    )
    in_flight_max: int = option(
        200_000,
        "Maximum number of messages that the consumers of a group have in flight. At the limit, its pops get nothing until it "
        "acknowledges some. Messages that wait for their back-off do not count.",
        minimum=1,
        maximum=100_000_000,
    )
    delayed_max: int = option(
        200_000,
        "Maximum number of messages of a group that wait for a delay or their back-off after they were returned. At the limit, "
        "its pops get nothing until some of them are visible again.",
        minimum=1,
        maximum=100_000_000,
    )
    waiters_max: int = option(
        10_000,
        "Maximum number of pops and pulls that wait on this node at a time. Further ones are refused.",
        minimum=1,
        maximum=1_000_000,
    )
    groups_max: int = option(
        10_000,
        "Maximum number of groups; a group counts once for each of its filters. A call that needs one more is refused.",
        minimum=1,
        maximum=1_000_000,
    )
    groups_auto_create: bool = option(
        True,
        "Whether a pop creates the group that it names. If not, groups must be created with the API or the command line.",
    )
    lite_idle_ms: int = option(
        DAY_MS,
        "Time for which the group of a lite topic is kept after the last RocketMQ client that subscribed to it has "
        "stopped or is no longer heard of. If the last client unsubscribes, the group ends at once.",
        minimum=0,
        maximum=30 * DAY_MS,
    )
    transaction_check_ms: int = option(
        30 * SECOND_MS,
        "Interval at which the node asks the producer of a half message whether to commit it.",
        minimum=100,
        maximum=DAY_MS,
    )
    transaction_checks_max: int = option(
        15,
        "Number of times that the node asks for the outcome of a half message. After that, the message is rolled back.",
        minimum=1,
        maximum=1_000,
    )
    transactions_max: int = option(
        100_000,
        "Maximum number of pending half messages. Further half messages are refused.",
        minimum=1,
        maximum=10_000_000,
    )
    deduplication_ms: int = option(
        10 * MINUTE_MS,
        "Time for which the node remembers the deduplication id of a message. A message with the id of an earlier one "
        "of its topic is not stored again.",
        minimum=SECOND_MS,
        maximum=30 * DAY_MS,
    )
    deduplication_topic_ids_max: int = option(
        100_000,
        "Maximum number of deduplication ids that are remembered of one topic. The oldest is forgotten for a new one.",
        minimum=1,
        at_most="deduplication_ids_max",
    )
    deduplication_ids_max: int = option(
        500_000,
        "Maximum number of deduplication ids that are remembered of all topics together, each in some 300 bytes of memory. The "
        "oldest is forgotten for a new one.",
        minimum=1,
        maximum=100_000_000,
    )
    message_bytes_max: int = option(
        4 * MIB,
        "Maximum size of the body of one sent message in bytes. Its properties may have as many.",
        minimum=KIB,
        maximum=32 * MIB,
        at_most="request_bytes_max",
    )
