"""QueryRoute and QueryAssignment: they send a client to this node, at the address by which the client came."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any

from penstock.pop.core.groups import Groups
from penstock.pop.rocketmq.agents import Agent
from penstock.pop.rocketmq.answering import status
from penstock.pop.rocketmq.clients import ConnectedClient
from penstock.pop.rocketmq.names import filter_of, group_of
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
    pb.MessageType.PRIORITY,
)

TYPES_OF_JAVA = {pb.MessageType.LITE: (5, 1, 0), pb.MessageType.PRIORITY: (5, 2, 0)}
"""First versions of the Java client that know a type. Older ones refuse to start if a route names the type."""


class Routes:
    """Serves QueryRoute and QueryAssignment.

    Parameters:
        groups: The queue of a FIFO group is assigned otherwise.
        advertised: Address that all clients shall use, or None for the address by which a client came.
    """

    def __init__(self, groups: Groups, advertised: HostPort | None) -> None:
        self._groups = groups
        self._advertised = advertised

    async def QueryRoute(self, request: Any, client: ConnectedClient) -> Any:
        queue = queue_of(request.topic, endpoints_for(request.endpoints, self._advertised), client.agent)
        return service_pb.QueryRouteResponse(status=status(), message_queues=[queue])

    async def QueryAssignment(self, request: Any, client: ConnectedClient) -> Any:
        topic_filter = filter_of(request.topic)
        group = self._groups.get(group_of(request.group), topic_filter)
        is_fifo = group is not None and group.settings.fifo
        endpoints = endpoints_for(request.endpoints, self._advertised)
        queue = queue_of(request.topic, endpoints, client.agent, 0 if is_fifo else SHARED_QUEUE)
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


def message_types_for(agent: Agent | None) -> list[Any]:
    """Return the message types to announce to a client."""
    agent = agent or Agent()
    return [kind for kind in MESSAGE_TYPES if not agent.is_before("JAVA", *TYPES_OF_JAVA.get(kind, ()))]


def queue_of(topic: Any, endpoints: Any, agent: Agent | None = None, queue_id: int = 0) -> Any:
    """Return the single queue of the topic that a `Resource` names.

    Filters with wildcards, and topics of the node itself, are read-only.

    Raises:
        Refused: As `filter_of`.
    """
    topic_filter = filter_of(topic)
    read_only = topics.is_wildcard(topic_filter) or topic_filter.startswith("$")
    return pb.MessageQueue(
        topic=topic,
        id=queue_id,
        permission=pb.Permission.READ if read_only else pb.Permission.READ_WRITE,
        broker=pb.Broker(name=BROKER, id=0, endpoints=endpoints),
        accept_message_types=message_types_for(agent),
    )
