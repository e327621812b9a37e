"""The access policy: principals, how they prove who they are, and what each of them may do."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import sha256

from penstock.store import topics

DECISIONS_REMEMBERED = 100_000
"""Decisions on topics that a policy remembers, by principal and topic. It forgets all of them when it reaches this number."""

SIGNATURE = "MQv2-HMAC-SHA1 "
"""Beginning of the authorization that a RocketMQ client signs."""

Need = tuple[str, str]
"""What a call needs: "publish" and a topic, or "consume" or "admin" and a group. An empty group means all groups."""


@dataclass(frozen=True, slots=True)
class Principal:
    """Somebody who calls, as the access file describes them. See `pop.access.file` for the fields."""

    name: str
    token_sha256: str = ""
    certificate: str = ""
    access_key: str = ""
    access_secret: str = ""
    mqtt_user: str = ""
    publish: tuple[str, ...] = ()
    consume: tuple[str, ...] = ()
    admin: tuple[str, ...] = ()


class AccessPolicy:
    """Decides who a caller is, and what a principal may do.

    Parameters:
        principals: everybody that the node knows.
    """

    def __init__(self, principals: Iterable[Principal]) -> None:
        self._principals = tuple(principals)
        self._by_token: dict[str, Principal] = {}
        self._by_certificate: dict[str, Principal] = {}
        self._by_access_key: dict[str, Principal] = {}
        for principal in self._principals:
            if principal.token_sha256:
                self._by_token[principal.token_sha256] = principal
            if principal.certificate:
                self._by_certificate[principal.certificate] = principal
            if principal.access_key:
                self._by_access_key[principal.access_key] = principal
        self._decisions: dict[tuple[str, str], bool] = {}

    def authenticate(self, token: str, certificate_names: Iterable[str]) -> Principal | None:
        """Return the principal with this token, or with one of the names in its certificate; None if the node knows neither."""
        if token:
            # The token is looked up by its hash, so the time that the lookup takes reveals nothing about the token.
            return self._by_token.get(sha256(token.encode()).hexdigest())
        return next((self._by_certificate[name] for name in certificate_names if name in self._by_certificate), None)

    def authenticate_signature(self, authorization: str, date_time: str) -> Principal | None:
        """Return the principal that signed `date_time`, the value of x-mq-date-time; None if nobody known did.

        `authorization` begins with `SIGNATURE`. The signature is an HMAC-SHA1 keyed by the access secret, in hexadecimal
        digits. Clients differ in the case of the digits, so both cases are accepted.
        """
        fields = dict(part.strip().partition("=")[::2] for part in authorization.removeprefix(SIGNATURE).split(","))
        principal = self._by_access_key.get(fields.get("Credential", ""))
        secret = "" if principal is None else principal.access_secret
        expected = hmac.digest(secret.encode(), date_time.encode(), "sha1").hex()
        given = fields.get("Signature", "").lower()
        return principal if hmac.compare_digest(expected.encode(), given.encode()) else None

    def permits(self, principal: Principal, need: Need) -> bool:
        """Return whether a principal may do what a call needs."""
        what, name = need
        if what == "publish":
            return self._may_publish(principal, name)
        patterns = principal.consume if what == "consume" else principal.admin
        return any(pattern == "*" or (name != "" and fnmatchcase(name, pattern)) for pattern in patterns)

    def may_share(self, user: str, group: str) -> bool:
        """Return whether an MQTT user may consume a group; `user` is empty for a client whose name nobody vouches for."""
        consumers = [principal for principal in self._principals if self.permits(principal, ("consume", group))]
        return not consumers or any(one.mqtt_user and fnmatchcase(user, one.mqtt_user) for one in consumers)

    def _may_publish(self, principal: Principal, topic: str) -> bool:
        key = (principal.name, topic)
        decision = self._decisions.get(key)
        if decision is None:
            if len(self._decisions) >= DECISIONS_REMEMBERED:
                self._decisions.clear()
            decision = self._decisions[key] = any(topics.matches(allowed, topic) for allowed in principal.publish)
        return decision
