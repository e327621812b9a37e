"""Replication on the control socket: `penstock cluster move` lets a node that leads hand over to another replica."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import orjson
from aiohttp import web

from penstock.node.control import Routes
from penstock.node.controladdress import CLUSTER_MOVE
from penstock.node.errors import ControlRefused
from penstock.node.replication import NodeReplication


class ClusterControl:
    """Lets the node hand over.

    Parameters:
        replication: of the node; None if it is no replica.
        move: called after the answer. The node must stop in order, and begin anew.
    """

    def __init__(self, replication: NodeReplication | None, move: Callable[[], None]) -> None:
        self._replication = replication
        self._move = move

    def routes(self) -> Routes:
        """Return the routes for the control socket."""
        return {("POST", CLUSTER_MOVE): self._hand_over}

    async def _hand_over(self, request: web.Request) -> web.Response:
        if self._replication is None:
            raise ControlRefused("the node is no replica: its configuration has no replication.cluster")
        successor = self._replication.prepare_move(request.query.get("to", ""))
        asyncio.get_running_loop().call_soon(self._move)
        return web.Response(body=orjson.dumps({"to": successor}) + b"\n", content_type="application/json")
