"""QueryRoute and QueryAssignment: they send a client to this node, at the address by which the client came."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any

from penstock.pop.core.groups import Groups
from penstock.pop.rocketmq.answering import Callers, answered, status
from penstock.pop.rocketmq.clients import ConnectedClient
from penstock.pop.rocketmq.names import encode, filter_of, group_of
from penstock.pop.rocketmq.status import Code, Refused
from penstock.pop.rocketmq.stubs import pb, service_pb
from penstock.store import topics
from penstock.store.options import HostPort, OptionInvalid

BROKER = "penstock"

ADDRESSES_MAX = 64
"""Maximum number of addresses in the access point of a request."""

SHARED_QUEUE = -1
"""Queue id of an assignment from which all consumers of a group take messages, as RocketMQ gives it."""

MESSAGE_TYPES = (
    pb.MessageType.NORMAL,
    pb.MessageType.FIFO,
    pb.MessageType.DELAY,
    pb.MessageType.TRANSACTION,
    pb.MessageType.LITE,
)


class Routes:
    """Serves QueryRoute and QueryAssignment.

    Parameters:
        callers: Finds the client of a call.
        groups: The queue of a FIFO group is assigned otherwise.
        advertised: Address that all clients shall use, or None for the address by which a client came.
    """

    def __init__(self, callers: Callers, groups: Groups, advertised: HostPort | None) -> None:
        self.callers = callers
        self._groups = groups
        self._advertised = advertised

    @answered(service_pb.QueryRouteResponse)
    async def QueryRoute(self, request: Any, _client: ConnectedClient) -> Any:
        topic_filter = filter_of(request.topic)
        queue = queue_of(topic_filter, endpoints_for(request.endpoints, self._advertised))
        return service_pb.QueryRouteResponse(status=status(), message_queues=[queue])

    @answered(service_pb.QueryAssignmentResponse)
    async def QueryAssignment(self, request: Any, _client: ConnectedClient) -> Any:
        topic_filter = filter_of(request.topic)
        group = self._groups.get(group_of(request.group), topic_filter)
        is_fifo = group is not None and group.settings.fifo
        endpoints = endpoints_for(request.endpoints, self._advertised)
        queue = queue_of(topic_filter, endpoints, 0 if is_fifo else SHARED_QUEUE)
        return service_pb.QueryAssignmentResponse(status=status(), assignments=[pb.Assignment(message_queue=queue)])


def advertised_address(address: str) -> HostPort | None:
    """Return the address of `pop.rocketmq_advertise`, or None if the option is empty. Raises OptionInvalid."""
    try:
        return HostPort.parse(address) if address else None
    except OptionInvalid as error:
        raise OptionInvalid("pop.rocketmq_advertise", address, error.allowed) from error


def endpoints_of(address: HostPort) -> Any:
    """Return an address as the protocol writes it."""
    try:
        scheme = pb.AddressScheme.IPv6 if ip_address(address.host).version == 6 else pb.AddressScheme.IPv4
    except ValueError:
        scheme = pb.AddressScheme.DOMAIN_NAME
    return pb.Endpoints(scheme=scheme, addresses=[pb.Address(host=address.host, port=address.port)])


def endpoints_for(asked: Any, advertised: HostPort | None) -> Any:
    """Return the endpoints that a client shall use: the advertised address, or else the endpoints by which it came.

    Raises:
        Refused: ILLEGAL_ACCESS_POINT if the request names no endpoints or too many.
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
    """Return the single queue of a topic. Filters with wildcards, and topics of the node itself, are read-only."""
    read_only = topics.is_wildcard(topic_filter) or topic_filter.startswith("$")
    return pb.MessageQueue(
        topic=pb.Resource(name=encode(topic_filter)),
        id=queue_id,
        permission=pb.Permission.READ if read_only else pb.Permission.READ_WRITE,
        broker=pb.Broker(name=BROKER, id=0, endpoints=endpoints),
        accept_message_types=MESSAGE_TYPES,
    )
