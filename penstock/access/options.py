"""The options of access control."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from penstock.store.options import OptionInvalid, bound, option

SYMMETRIC: Final = ("HS256", "HS384", "HS512")
ASYMMETRIC: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")


def _is_safe(url: str) -> bool:
    """Return whether nobody on the network can change what comes from a URL."""
    parts = urlsplit(url)
    return parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in ("127.0.0.1", "::1", "localhost"))


@dataclass(frozen=True, slots=True)
class TokenOptions:
    """The section `[access.jwt]`: JSON Web Tokens as proof of user name and roles. Devices send one as their password."""

    algorithms: tuple[str, ...] = option(
        (),
        "Algorithms by which a token may be signed, such as ES256 or HS256. If empty, no token is accepted.",
    )
    keys: str = option(
        "",
        "File with the public key in PEM or with a JSON Web Key Set, or URL of such a set, https or on loopback, which is "
        "fetched every five minutes. For HS256, HS384 and HS512, file with the secret.",
    )
    issuer: str = option("", "What the claim `iss` must be. If empty, it may be anything.")
    audience: str = option("", "What the claim `aud` must be or contain. If empty, it may be anything.")
    user_claim: str = option("sub", "Claim with the user name.")
    roles_claim: str = option("roles", "Claim with the roles: a list, or names with spaces between them.")
    jwks_refresh_s: int = bound(300, "Time between two fetches of a key set. A withdrawn key is accepted for so long.")
    leeway_s: int = bound(30, "Time by which the clocks of node and authority may differ. A token holds for so much longer.")

    @property
    def is_symmetric(self) -> bool:
        """Whether one secret signs and verifies."""
        return any(name in SYMMETRIC for name in self.algorithms)

    @property
    def url(self) -> str:
        """URL of the key set; empty if the keys are in a file."""
        return self.keys if "://" in self.keys else ""

    @property
    def file(self) -> str:
        """Path of the file with the keys; empty if they are fetched."""
        return "" if self.url else self.keys

    def check(self, section: str) -> None:
        """Raise OptionInvalid if options contradict each other."""
        for name in self.algorithms:
            if name not in SYMMETRIC + ASYMMETRIC:
                raise OptionInvalid(f"{section}.algorithms", name, f"among {', '.join(SYMMETRIC + ASYMMETRIC)}")
        if self.is_symmetric and any(name in ASYMMETRIC for name in self.algorithms):
            # A public key would be accepted as a secret, which everybody knows.
            raise OptionInvalid(
                f"{section}.algorithms", list(self.algorithms), "all with a secret (HS...) or all with key pairs"
            )
        if self.algorithms and not self.keys:
            raise OptionInvalid(f"{section}.keys", "", "a path or a URL if there are algorithms")
        if self.url and not _is_safe(self.url):
            # Whoever can change the answer on its way could sign tokens.
            raise OptionInvalid(f"{section}.keys", self.url, "a path, an https URL, or an http one of this machine")
        if self.url and not self.algorithms:
            raise OptionInvalid(f"{section}.algorithms", [], "given if keys is a URL")
        if self.is_symmetric and self.url:
            raise OptionInvalid(f"{section}.keys", self.url, "a path if the algorithms need a secret")


@dataclass(frozen=True, slots=True)
class AccessControlOptions:
    """The section `[access]`: who may do what, over MQTT and gRPC."""

    file: str = option(
        "",
        "TOML file with the rules: who may publish, subscribe, send, pop, consume and administrate what. The guide Access "
        "control explains it.",
    )
    password_file: str = option(
        "",
        "File with the users that may log in over MQTT. `penstock user` writes it.",
    )
    audit_file: str = option(
        "",
        "File to which the node appends who connected, was refused, or changed what. On SIGHUP it is opened anew.",
    )
    audit_lines_per_s: int = bound(
        100,
        "Lines per second of one event in the audit file, so that an attacker can't fill the disk. Each kind of the event has "
        "a tenth of that for itself, and the file states how many lines were left out.",
    )
    jwt: TokenOptions = TokenOptions()
