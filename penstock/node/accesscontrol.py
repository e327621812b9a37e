"""Access control on the control socket: `penstock access` reloads the files, tests a right, bans and disconnects."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any, get_args

import orjson
from aiohttp import web

from penstock.access.actions import ACTIONS
from penstock.access.bans import KINDS, Kind, network_name
from penstock.access.control import AccessControl
from penstock.access.errors import AccessInvalid
from penstock.access.explain import explained
from penstock.access.subject import Subject
from penstock.node.control import Routes
from penstock.node.controladdress import ACCESS_BANS, ACCESS_KICK, ACCESS_RELOAD, ACCESS_TEST
from penstock.node.errors import ControlRefused

OPERATOR = "control socket"
"""Who changes something here, in the audit log."""

Kick = Callable[[Kind, str], int]
"""Ends what the clients with a user name, a client id or an address do; returns how much."""


class AccessOverSocket:
    """Serves access control on the control socket.

    Parameters:
        access: of the node.
        reload: reads all files again that may change while the node runs. Raises AccessInvalid.
        rechecked: returns when a change is in force for all clients.
        disconnect: ends the connections of MQTT clients.
        end_calls: ends calls and streams over gRPC.
    """

    def __init__(
        self,
        access: AccessControl,
        reload: Callable[[], None],
        rechecked: Callable[[], Awaitable[None]],
        disconnect: Kick,
        end_calls: Kick,
    ) -> None:
        self._access = access
        self._reload_files = reload
        self._rechecked = rechecked
        self._disconnect = disconnect
        self._end_calls = end_calls

    def routes(self) -> Routes:
        """Return the routes for the control socket."""
        return {
            ("POST", ACCESS_RELOAD): self._reload,
            ("GET", ACCESS_TEST): self._test,
            ("GET", ACCESS_BANS): self._bans,
            ("POST", ACCESS_BANS): self._ban,
            ("DELETE", ACCESS_BANS): self._lift,
            ("POST", ACCESS_KICK): self._kick,
        }

    async def _reload(self, _request: web.Request) -> web.Response:
        try:
            self._reload_files()
        except AccessInvalid as error:
            raise ControlRefused(f"nothing has changed: {error}") from error
        await self._rechecked()
        policy, passwords = self._access.policy, self._access.passwords
        return _answer(
            rules=len(policy.rules.rules) if policy is not None else 0,
            users=len(passwords.hashes) if passwords is not None else 0,
            bans=len(list(self._access.bans)),
        )

    async def _test(self, request: web.Request) -> web.Response:
        query, policy = request.query, self._access.policy
        subject = Subject(
            query.get("user", ""), frozenset(query.getall("role", [])), query.get("client", ""), query.get("address", "")
        )
        action = query.get("action", "")
        if action not in ACTIONS:
            raise ControlRefused(f"there is no action {action!r}; use {', '.join(ACTIONS)}")
        if policy is None:
            return _answer(allowed=True, why="the node has no access file (access.file), so nothing is restricted")
        return _answer(**explained(policy, subject, action, query.get("name", "")))

    async def _bans(self, _request: web.Request) -> web.Response:
        return _answer(bans=[asdict(ban) for ban in self._access.bans])

    async def _ban(self, request: web.Request) -> web.Response:
        kind, name = _named(request)
        for_ms = request.query.get("for_ms", "0")
        if not for_ms.isdecimal():
            raise ControlRefused(f"for_ms is {for_ms!r}, but must be a whole number of milliseconds")
        try:
            ban = self._access.ban(kind, name, for_ms=int(for_ms), why=request.query.get("why", ""), by=OPERATOR)
        except AccessInvalid as error:
            raise ControlRefused(str(error)) from error
        except OSError as error:
            raise _not_saved(error) from error
        await self._rechecked()
        return _answer(**asdict(ban))

    async def _lift(self, request: web.Request) -> web.Response:
        kind, name = _named(request)
        try:
            ban = self._access.lift(kind, name, by=OPERATOR)
        except AccessInvalid as error:
            raise ControlRefused(str(error)) from error
        except OSError as error:
            raise _not_saved(error) from error
        return _answer(**asdict(ban))

    async def _kick(self, request: web.Request) -> web.Response:
        kind, name = _named(request)
        if kind == "address":
            try:
                name = network_name(name)
            except AccessInvalid as error:
                raise ControlRefused(str(error)) from error
        clients, calls = self._disconnect(kind, name), self._end_calls(kind, name)
        self._access.audit.note("changed", Subject(OPERATOR), what="kick", of=kind, name=name, clients=clients, calls=calls)
        return _answer(clients=clients, calls=calls)


def _named(request: web.Request) -> tuple[Kind, str]:
    for kind in get_args(Kind):
        if request.query.get(kind):
            return kind, request.query[kind]
    raise ControlRefused(f"give one of {', '.join(KINDS)}")


def _not_saved(error: OSError) -> ControlRefused:
    return ControlRefused(
        f"that is in force until the node ends, but the bans can't be saved ({error}); mend the disk, and run the command again"
    )


def _answer(**values: Any) -> web.Response:
    return web.Response(body=orjson.dumps(values) + b"\n", content_type="application/json")
