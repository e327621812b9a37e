"""The access policy: the content of an access file, ready to answer who somebody is and what they may do."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Final

from penstock.access.actions import TERMS
from penstock.access.rights import Rights
from penstock.access.rule import Rule, Who, fits_any
from penstock.access.ruleset import RuleSet
from penstock.access.subject import Subject

SIGNATURE: Final = "MQv2-HMAC-SHA1 "
"""Beginning of the authorization that a RocketMQ client signs."""


@dataclass(frozen=True, slots=True)
class Grants:
    """What an entry of the access file allows besides the rules: filters of topics, and patterns of groups."""

    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    consume: tuple[str, ...] = ()
    admin: tuple[str, ...] = ()

    def rules(self, source: str, who: Who) -> Iterable[Rule]:
        """Yield the same as rules."""
        for term in ("read", "write"):
            if getattr(self, term):
                yield Rule(f"{source}, {term}", True, TERMS[term], who, topics=getattr(self, term))
        for term in ("consume", "admin"):
            if getattr(self, term):
                yield Rule(f"{source}, {term}", True, TERMS[term], who, groups=getattr(self, term))


@dataclass(frozen=True, slots=True)
class Principal:
    """A user that the access file describes: how a service proves over gRPC that it is this user, and what the user may do.

    See `penstock.access.file` for the fields.
    """

    name: str
    token_sha256: str = ""
    certificate: str = ""
    access_key: str = ""
    access_secret: str = ""
    roles: tuple[str, ...] = ()
    grants: Grants = Grants()


@dataclass(frozen=True, slots=True)
class Role:
    """What the bearers of a role may do, and which users have it besides those whose token or certificate says so."""

    name: str
    users: tuple[str, ...] = ()
    grants: Grants = Grants()


class AccessPolicy:
    """Decides who a caller is, and what a subject may do.

    Parameters:
        rules: the first one that applies decides.
        principals, roles: what they allow counts after the rules.
        allows_unmatched: what nothing of this applies to is allowed.
    """

    def __init__(
        self,
        rules: Iterable[Rule] = (),
        principals: Iterable[Principal] = (),
        roles: Iterable[Role] = (),
        *,
        allows_unmatched: bool = False,
    ) -> None:
        self.principals: Final = {principal.name: principal for principal in principals}
        """The principals by name."""
        self._by_token = {one.token_sha256: one for one in self.principals.values() if one.token_sha256}
        self._by_certificate = {one.certificate: one for one in self.principals.values() if one.certificate}
        self._by_access_key = {one.access_key: one for one in self.principals.values() if one.access_key}
        self._roles = tuple(roles)
        self.allows_unmatched: Final = allows_unmatched
        """Whether what nothing applies to is allowed."""
        granted = [
            *(rule for one in self.principals.values() for rule in one.grants.rules(f"principal {one.name!r}", Who(one.name))),
            *(rule for one in self._roles for rule in one.grants.rules(f"role {one.name!r}", Who(roles=(one.name,)))),
        ]
        self.rules: Final = RuleSet([*rules, *granted])
        """All rules, with what principals and roles allow after the others."""

    # --- who --------------------------------------------------------------------------------------------------------

    def by_token(self, token: str) -> Principal | None:
        """Return the principal with this token."""
        # The token is looked up by its hash, so the time that the lookup takes reveals nothing about the token.
        return self._by_token.get(sha256(token.encode()).hexdigest())

    def by_certificate(self, names: Iterable[str]) -> Principal | None:
        """Return the principal with one of the names of a certificate."""
        return next((self._by_certificate[name] for name in names if name in self._by_certificate), None)

    def by_signature(self, authorization: str, date_time: str) -> Principal | None:
        """Return the principal that signed `date_time`, the value of x-mq-date-time; None if nobody known did.

        `authorization` begins with `SIGNATURE`. The signature is an HMAC-SHA1 keyed by the access secret, in hexadecimal
        digits. Clients differ in the case of the digits, so both cases are accepted. Some put a region and a service after the
        access key (`KEY/REGION/SERVICE`), which the signature does not cover.
        """
        fields = dict(part.strip().partition("=")[::2] for part in authorization.removeprefix(SIGNATURE).split(","))
        credential = fields.get("Credential", "")
        principal = self._by_access_key.get(credential) or self._by_access_key.get(credential.partition("/")[0])
        secret = "" if principal is None else principal.access_secret
        expected = hmac.digest(secret.encode(), date_time.encode(), "sha1").hex()
        given = fields.get("Signature", "").lower()
        return principal if hmac.compare_digest(expected.encode(), given.encode()) else None

    # --- what -------------------------------------------------------------------------------------------------------

    def rights_of(self, subject: Subject) -> Rights:
        """Return what a subject may do, with the roles that this policy gives its user."""
        return Rights(self.rules, self.with_roles(subject), subject, allows_unmatched=self.allows_unmatched)

    def with_roles(self, subject: Subject) -> Subject:
        """Return a subject with the roles that this policy gives its user besides its own."""
        principal = self.principals.get(subject.user)
        given = {role.name for role in self._roles if fits_any(subject.user, role.users)}
        return replace(subject, roles=subject.roles | given | set(principal.roles if principal is not None else ()))
