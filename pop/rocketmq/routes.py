"""Where clients are sent: to this node, by the address that they came by."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any

from penstock.pop.rocketmq.names import encode
from penstock.pop.rocketmq.status import Code, Refused
from penstock.pop.rocketmq.stubs import pb
from penstock.store import topics
from penstock.store.options import HostPort

BROKER = "penstock"

ADDRESSES_MAX = 64
"""Of an access point that a client names."""

SHARED_QUEUE = -1
"""The queue of an assignment of which all consumers of a group take their messages; so the clients know it from RocketMQ."""

MESSAGE_TYPES = (
    pb.MessageType.NORMAL,
    pb.MessageType.FIFO,
    pb.MessageType.DELAY,
    pb.MessageType.TRANSACTION,
    pb.MessageType.LITE,
)


def endpoints_of(address: HostPort) -> Any:
    """Return an address as the protocol has it."""
    try:
        scheme = pb.AddressScheme.IPv6 if ip_address(address.host).version == 6 else pb.AddressScheme.IPv4
    except ValueError:
        scheme = pb.AddressScheme.DOMAIN_NAME
    return pb.Endpoints(scheme=scheme, addresses=[pb.Address(host=address.host, port=address.port)])


def endpoints_for(asked: Any, advertised: HostPort | None) -> Any:
    """Return the endpoints that a client is to use: those that the operator advertises, else those that it came by.

    Raises:
        Refused: ILLEGAL_ACCESS_POINT: it names none, or too many.
    """
    if advertised is not None:
        return endpoints_of(advertised)
    if not 0 < len(asked.addresses) <= ADDRESSES_MAX or not asked.scheme:
        raise Refused(
            Code.ILLEGAL_ACCESS_POINT,
            f"the request must name the access point that the client uses, with 1 to {ADDRESSES_MAX} addresses",
        )
    return asked


def queue_of(topic_filter: str, endpoints: Any, queue_id: int = 0) -> Any:
    """Return the one queue of a topic. What has wildcards, or belongs to the node, can only be read."""
    read_only = topics.is_wildcard(topic_filter) or topic_filter.startswith("$")
    return pb.MessageQueue(
        topic=pb.Resource(name=encode(topic_filter)),
        id=queue_id,
        permission=pb.Permission.READ if read_only else pb.Permission.READ_WRITE,
        broker=pb.Broker(name=BROKER, id=0, endpoints=endpoints),
        accept_message_types=MESSAGE_TYPES,
    )
