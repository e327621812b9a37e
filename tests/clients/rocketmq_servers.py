"""The servers that RocketMQ's clients are tested with: a node, and Apache RocketMQ's own server where one is given.

`tests/clients/rocketmq-server start DIR` installs and starts Apache's, and prints the environment that gives it.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from typing import Any

import pytest

from penstock import SyncClient, group_settings
from penstock.pop.rocketmq.names import encode
from tests.system.processes import NodeProcess
from tests.waiting import PROCESS_S

PEER = os.environ.get("PENSTOCK_ROCKETMQ_PEER", "")
"""`HOST:PORT` of the gRPC port of Apache's server; empty if there is none."""

PEER_ADMIN = os.environ.get("PENSTOCK_ROCKETMQ_PEER_ADMIN", "")
"""Command that runs Apache's `mqadmin`."""

PEER_NAMES = "127.0.0.1:9876"
CLUSTER = "DefaultCluster"


class Server:
    """A server, with what a test wants to know of it.

    Parameters:
        node: The node, or None for Apache's server.
    """

    def __init__(self, node: NodeProcess | None) -> None:
        self.node = node
        self.address: str = node.addresses["pop"] if node is not None else PEER

    @property
    def is_peer(self) -> bool:
        """Whether this is Apache's server."""
        return self.node is None

    def prepare(self, topic: str, group: str, kind: str = "NORMAL", **settings: Any) -> None:
        """Make what clients can't make themselves: topics of a type on Apache's server, and groups with settings on both.

        Args:
            topic: The topic, not encoded.
            group: The group.
            kind: Type of the topic's messages. A node's topics have none.
            settings: Settings of the group, as `group_settings` takes them. Apache's server knows `fifo` and `attempts_max`.
        """
        if self.node is not None:
            if settings:
                with SyncClient(self.address) as native:
                    native.groups.create(group, topic, settings=group_settings(**settings))
            return
        if not PEER_ADMIN:
            pytest.skip("PENSTOCK_ROCKETMQ_PEER_ADMIN is not set: tests/clients/rocketmq-server prints it")
        self._admin("updateTopic", "-t", encode(topic), "-r", "4", "-w", "4", "-a", f"+message.type={kind}")
        fifo = "true" if settings.get("fifo") else "false"
        retries = str(settings.get("attempts_max", 16))
        self._admin("updateSubGroup", "-g", group, "-o", fifo, "-r", retries)

    def _admin(self, *words: str) -> None:
        command = [*shlex.split(PEER_ADMIN), words[0], "-n", PEER_NAMES, "-c", CLUSTER, *words[1:]]
        subprocess.run(command, check=True, timeout=PROCESS_S, capture_output=True)
