"""RocketMQ's clients on the control socket: `penstock rocketmq` lists them, and gives them commands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from penstock.node.control import Routes
from penstock.node.controladdress import CLIENT_RECONNECT, CLIENT_THREADS, CLIENT_VERIFY, CLIENTS
from penstock.node.errors import ControlRefused
from penstock.pop.errors import PopError, RequestInvalid
from penstock.pop.grpc.requests import position_of
from penstock.store.errors import PositionUnknown, RecordCorrupt
from penstock.store.record import Flag, Kind, Record
from penstock.store.store import Store

if TYPE_CHECKING:
    from penstock.pop.rocketmq.service import MessagingService


class ClientControl:
    """Lists RocketMQ's clients, and gives them commands over their Telemetry streams.

    Parameters:
        rocketmq: The RocketMQ-compatible API, or None if the extra is not installed.
        store: Has the messages that a client can verify.
    """

    def __init__(self, rocketmq: MessagingService | None, store: Store) -> None:
        self._rocketmq = rocketmq
        self._store = store

    def routes(self) -> Routes:
        """Return the routes for the control socket."""
        return {
            ("GET", CLIENTS): self._list,
            ("POST", CLIENT_THREADS): self._threads,
            ("POST", CLIENT_VERIFY): self._verify,
            ("POST", CLIENT_RECONNECT): self._reconnect,
        }

    async def _list(self, _request: web.Request) -> web.Response:
        return _answer({"clients": self._service().commands.described()})

    async def _threads(self, request: web.Request) -> web.Response:
        try:
            return _answer({"threads": await self._service().commands.threads_of(_client_of(request))})
        except PopError as error:
            raise ControlRefused(str(error)) from error

    async def _verify(self, request: web.Request) -> web.Response:
        record = self._message(request.query.get("message_id", ""))
        try:
            return _answer({"succeeds": await self._service().commands.verified(_client_of(request), record)})
        except PopError as error:
            raise ControlRefused(str(error)) from error

    async def _reconnect(self, request: web.Request) -> web.Response:
        try:
            self._service().commands.reconnect(_client_of(request))
        except PopError as error:
            raise ControlRefused(str(error)) from error
        return _answer({})

    def _service(self) -> MessagingService:
        if self._rocketmq is None:
            raise ControlRefused("this node serves no RocketMQ clients: install the extra rocketmq, and start the node again")
        return self._rocketmq

    def _message(self, message_id: str) -> Record:
        """Return the message with an id. Raises ControlRefused."""
        try:
            record = self._store.log.record(position_of(message_id))
        except RequestInvalid as error:
            raise ControlRefused(str(error)) from error
        except (PositionUnknown, RecordCorrupt) as error:
            raise ControlRefused(
                f"the log has no message {message_id!r}: it has expired, or the id is wrong ({error})"
            ) from error
        if record.kind != Kind.MESSAGE or record.flags & Flag.HALF:
            raise ControlRefused(f"the record {message_id!r} is no message that consumers get: name another id")
        return record


def _client_of(request: web.Request) -> str:
    client = request.query.get("client", "")
    if not client:
        raise ControlRefused("the request names no client: `penstock rocketmq clients` shows those that use the node")
    return client


def _answer(found: dict[str, Any]) -> web.Response:
    return web.Response(body=orjson.dumps(found) + b"\n", content_type="application/json")
