"""`python -m bench.crowd COUNT serve ...`: a node whose registry of clients has COUNT clients more than are connected.

The system bounds the descriptors of a process, on many machines below a hundred thousand. What lists and searches clients reads
the registry, and a few hundred connections that are not open stand behind all entries of the crowd.
"""

from __future__ import annotations

import sys

from penstock.cli import main as command_line
from penstock.cli import serve
from penstock.gateway.delivery.client_subscriptions import ClientSubscriptions
from penstock.gateway.gateway import Gateway
from penstock.gateway.sessions.session import Session
from penstock.gateway.transport.peer import Peer
from penstock.node.node import Node
from penstock.node.supervisor import Supervisor

CONNECTIONS = 500
"""Connections that stand behind the crowd."""


def crowd(gateway: Gateway, count: int) -> None:
    """Enter clients `device-000000`, `device-000001`, ..., with 500 users `user-0`, ... and 500 addresses `10.0.0.0`, ..."""
    listener = next(iter(gateway.listeners))
    connections = []
    for number in range(CONNECTIONS):
        connection = gateway.connect(Peer(listener, f"10.0.{number // 250}.{number % 250}", 1883))
        connection.session = Session(f"user-{number}", 10, user=f"user-{number}")
        connection.level = 4
        connection.begin(ClientSubscriptions(connection.session, connection.outbox, gateway.deliveries))
        connections.append(connection)
    for number in range(count):
        gateway.clients.enter(f"device-{number:06}", connections[number % CONNECTIONS])


def main() -> int:
    """Run the node, and return its exit status."""
    count, announce = int(sys.argv[1]), serve._announce

    def announce_crowd(node: Node, supervisor: Supervisor) -> None:
        crowd(node.gateway, count)
        announce(node, supervisor)

    serve._announce = announce_crowd
    return command_line.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
