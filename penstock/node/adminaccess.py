"""Who may read what over the admin listener: names of the host, tokens, passwords, certificates and roles."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
from collections.abc import Callable, Iterator
from http import HTTPStatus
from ipaddress import ip_address
from secrets import token_bytes
from typing import Any, Final
from urllib.parse import urlsplit

import orjson
from aiohttp import hdrs, web

from penstock.access.audit import Event
from penstock.access.control import AccessControl
from penstock.access.errors import AccessInvalid
from penstock.access.identity import KeysUnavailable, ProvenIdentity, TokenInvalid, is_token
from penstock.access.subject import Subject
from penstock.node.adminoptions import AdminOptions
from penstock.node.api.operation import ApiRole
from penstock.node.loginturns import LoginsCrowded, LoginTurns
from penstock.store.space.causer import is_local, is_loopback_name, plain_address, source_of

OPEN_PATHS: Final = frozenset(("/healthz", "/readyz"))
"""What load balancers and probes read, without authentication and under any name."""

METRICS: Final = "/metrics"

FORWARDED: Final = ("Forwarded", "X-Forwarded-For", "X-Real-IP", "Via")
"""Headers that say that a proxy forwards the request of somebody else."""

LOGINS_MAX: Final = 8
"""Passwords that wait to be hashed. A further one, or one of a source with more of them, is told to come again."""

VERIFIED_MAX: Final = 256
"""Passwords whose hashes are remembered as right. All are forgotten at this number."""

_SAFE_METHODS: Final = frozenset(("GET", "HEAD"))
_SAN_KINDS: Final = ("URI", "email", "DNS")


class AdminRefused(Exception):
    """Raised for a request that is not served. The message is for whoever sent it.

    Parameters:
        status: the status of the response.
        event: what the audit log calls it.
        subject: who sent the request, if that is known.
        about: fields of the line in the audit log.
    """

    def __init__(
        self, status: HTTPStatus, message: str, event: Event = "refused", subject: Subject | None = None, **about: object
    ) -> None:
        self.status = status
        self.event: Final[Event] = event
        self.subject = subject
        self.about = about
        super().__init__(message)

    def response(self) -> web.Response:
        """Return the response that says so."""
        headers = {hdrs.CACHE_CONTROL: "no-store"}
        if self.status == HTTPStatus.UNAUTHORIZED:
            headers[hdrs.WWW_AUTHENTICATE] = 'Bearer realm="penstock", Basic realm="penstock", charset="UTF-8"'
        elif self.status == HTTPStatus.SERVICE_UNAVAILABLE:
            headers[hdrs.RETRY_AFTER] = "1"
        body = orjson.dumps({"error": str(self)})
        return web.Response(body=body, status=self.status, content_type="application/json", headers=headers)


class AdminAccess:
    """Decides which requests are served.

    Parameters:
        options: of the listener.
        access: knows users, roles, tokens and bans.
        is_listener_local: returns whether only this machine reaches the listener.
    """

    def __init__(self, options: AdminOptions, access: AccessControl, is_listener_local: Callable[[], bool]) -> None:
        self._options = options
        self._access = access
        self._is_listener_local = is_listener_local
        self._hosts = {name.lower() for name in (*options.hosts, options.listen.host)}
        self._turns = LoginTurns(LOGINS_MAX)
        self._verified: set[bytes] = set()
        """Keyed hashes of a user, a password and the hash that it fitted."""
        self._key = token_bytes(32)

    async def check(self, request: web.Request, role: ApiRole) -> Subject:
        """Return who sends a request that may be served; write into the audit log if it may not. Raises AdminRefused.

        Args:
            request: the request.
            role: that its sender must have. Without credentials a caller may be anonymous, with the role viewer.
        """
        try:
            return await self._check(request, role)
        except AdminRefused as error:
            subject = error.subject or Subject(address=_address_of(request))
            about = {"method": request.method, "path": request.path, "reason": error.status.name, "why": str(error)}
            self._access.audit.note(error.event, subject, over="admin", **(about | error.about))
            raise

    async def _check(self, request: web.Request, role: ApiRole) -> Subject:
        is_safe = request.method in _SAFE_METHODS
        address = _address_of(request)
        anonymous = Subject(address=address)
        if is_safe and request.path in OPEN_PATHS:
            return anonymous
        self._check_host(request)
        self._check_bans(Subject(address=address))  # before a password costs anything
        if not is_safe:
            _check_origin(request)
        if is_safe and request.path == METRICS and self._options.metrics == "open":
            return anonymous
        may_be_anonymous = role is ApiRole.VIEWER and self._is_anonymous_allowed(request)
        if may_be_anonymous and not self._shows_credentials(request):
            return anonymous
        identity = await self._identify(request, address, role)
        if identity is None:
            return anonymous  # a certificate that the authority of the listener has signed, and nothing else is configured
        policy = self._access.policy
        subject = Subject(identity.user, identity.roles, address=address)
        if policy is not None:
            subject = policy.with_roles(subject)
        self._check_bans(subject)
        if not (may_be_anonymous or role.sufficient & subject.roles):
            wanted = " or ".join(each for each in ApiRole if each in role.sufficient)
            raise AdminRefused(
                HTTPStatus.FORBIDDEN,
                f"{identity.user} has no role {wanted}, which a principal or a role of access.file, or a signed token, gives",
                "denied",
                subject,
            )
        return subject

    # --- where from -------------------------------------------------------------------------------------------------

    def _check_host(self, request: web.Request) -> None:
        stated = request.headers.get(hdrs.HOST)
        if stated is None:
            return  # a client of HTTP/1.0: no browser
        name = _host_name(stated)
        is_known = not self._options.hosts or _numeric(name) is not None
        if self._is_listener_local():
            is_known = is_loopback_name(name)
        if not (is_known or name in self._hosts):
            raise AdminRefused(
                HTTPStatus.MISDIRECTED_REQUEST,
                f"the admin listener is not known as {name[:80]!r}; use its IP address, or add the name to admin.hosts",
            )

    def _check_bans(self, subject: Subject) -> None:
        if (ban := self._access.bans.of(subject)) is not None:
            detail = f"the {ban.kind} {ban.name} is banned"
            raise AdminRefused(HTTPStatus.FORBIDDEN, detail, subject=subject, reason="BANNED")

    def _is_anonymous_allowed(self, request: web.Request) -> bool:
        anonymous = self._options.anonymous
        return anonymous == "always" or (
            anonymous == "loopback"
            and self._is_listener_local()
            and is_local(_address_of(request))
            and not any(name in request.headers for name in FORWARDED)
        )

    def _shows_credentials(self, request: web.Request) -> bool:
        """Return whether a request shows credentials that the node can check. Others say nothing, also of who sends them."""
        access = self._access
        return hdrs.AUTHORIZATION in request.headers and (access.policy is not None or access.authenticates)

    # --- who --------------------------------------------------------------------------------------------------------

    async def _identify(self, request: web.Request, address: str, role: ApiRole) -> ProvenIdentity | None:
        """Return who sends a request; None if a certificate is all that is asked for. Raises AdminRefused."""
        access = self._access
        scheme, _, credentials = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
        credentials = credentials.strip()
        why, claimed = "the request shows no credentials", ""
        if hdrs.AUTHORIZATION in request.headers:
            why = "the header Authorization is neither Bearer nor Basic with credentials"
        if scheme.lower() == "bearer" and credentials:
            if not credentials.isascii():
                credentials = ""  # no token is so
            why = "the token is not known"
            principal = access.policy.by_token(credentials) if access.policy is not None else None
            if principal is not None:
                return ProvenIdentity(principal.name)
            if access.tokens is not None and is_token(credentials):
                try:
                    return access.tokens.verify(credentials)
                except TokenInvalid as error:
                    why = str(error)
                except KeysUnavailable as error:
                    raise AdminRefused(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}; try again") from error
        elif scheme.lower() == "basic" and credentials:
            claimed, password = _user_and_password(credentials)
            found = await self._log_in(claimed, password, source_of(address))
            if found is not None:
                return found
            why = "user name and password are not right"
        elif names := tuple(_names_of(request)):
            if access.policy is None and not access.authenticates and role is ApiRole.VIEWER:
                return None
            principal = access.policy.by_certificate(names) if access.policy is not None else None
            if principal is not None:
                return ProvenIdentity(principal.name)
            why = "no principal has a name of the certificate"
        raise AdminRefused(
            HTTPStatus.UNAUTHORIZED,
            f"the node doesn't know who asks ({why}): show a token (authorization: Bearer TOKEN), a user name and a password "
            "(authorization: Basic ...) or a certificate of somebody with the role "
            f"{' or '.join(each for each in ApiRole if each in role.sufficient)}",
            claimed=claimed,
            why=why,
        )

    async def _log_in(self, user: str, password: str, source: str) -> ProvenIdentity | None:
        """Return a user whose password this is, or None. One password is hashed at a time. Raises AdminRefused."""
        passwords = self._access.passwords
        known = passwords.hashes.get(user, "") if passwords is not None else ""
        parts = "\0".join((user, known, password)).encode(errors="surrogateescape")
        digest = hmac.digest(self._key, parts, "sha256")
        if known and digest in self._verified:
            return ProvenIdentity(user, password_hash=known)
        try:
            async with self._turns.turn(source):
                found = await asyncio.to_thread(self._access.prove, user, password, True)
        except LoginsCrowded:
            raise AdminRefused(HTTPStatus.SERVICE_UNAVAILABLE, "too many logins wait; try again") from None
        except KeysUnavailable as error:
            raise AdminRefused(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}; try again") from error
        except AccessInvalid as error:
            raise AdminRefused(HTTPStatus.SERVICE_UNAVAILABLE, "the node can't tell whether the password is right") from error
        if not isinstance(found, ProvenIdentity) or self._access.still_proves(found.user, found.proof) is False:
            return None  # also if a reload took its user or its password away meanwhile
        if found.password_hash and found.password_hash == known:
            if len(self._verified) >= VERIFIED_MAX:
                self._verified.clear()
            self._verified.add(digest)
        return found


def _check_origin(request: web.Request) -> None:
    """Refuse a change that a page of another origin asks a browser for."""
    origin = request.headers.get(hdrs.ORIGIN)
    if origin is not None and origin.lower() != f"{request.scheme}://{request.headers.get(hdrs.HOST, '')}".lower():
        raise AdminRefused(HTTPStatus.FORBIDDEN, f"pages of {origin[:80]!r} may change nothing here")


def _address_of(request: web.Request) -> str:
    """Return the IP address of the other end; one that is not local if it has gone already."""
    peer = request.transport.get_extra_info("peername") if request.transport is not None else None
    return plain_address(peer[0].partition("%")[0]) if peer else "0.0.0.0"


def _host_name(stated: str) -> str:
    """Return the name in a Host header, in lower case and without port, brackets and a final dot."""
    try:
        return (urlsplit(f"//{stated}").hostname or "").removesuffix(".")
    except ValueError:
        return ""


def _numeric(name: str) -> str | None:
    try:
        return str(ip_address(name.partition("%")[0]))
    except ValueError:
        return None


def _user_and_password(credentials: str) -> tuple[str, str]:
    try:
        decoded = base64.b64decode(credentials, validate=True).decode("utf-8", errors="surrogateescape")
    except (binascii.Error, ValueError) as error:
        raise AdminRefused(HTTPStatus.BAD_REQUEST, "the credentials after Basic are not base64") from error
    user, _, password = decoded.partition(":")
    return user, password


def _names_of(request: web.Request) -> Iterator[str]:
    """Yield the names in the certificate of a client, if it has shown one."""
    secured = request.transport.get_extra_info("ssl_object") if request.transport is not None else None
    certificate: dict[str, Any] = (secured.getpeercert() or {}) if secured is not None else {}
    for part in certificate.get("subject", ()):
        yield from (value for kind, value in part if kind == "commonName")
    yield from (value for kind, value in certificate.get("subjectAltName", ()) if kind in _SAN_KINDS)
