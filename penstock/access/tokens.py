"""JSON Web Tokens: who somebody is and which roles they have, as an authority has signed it (RFC 7519).

The algorithms are those that the operator names, never those that a token asks for. Expiry goes by the node's clock.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import jwt
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from penstock.access.errors import AccessInvalid
from penstock.access.identity import KeysUnavailable, ProvenIdentity, TokenInvalid, name_of
from penstock.access.options import TokenOptions

TOKEN_BYTES_MAX: Final = 16 * 1024
"""A longer token is refused before it is decoded."""

SECRET_BYTES_MIN: Final = 32
"""The shortest secret for HMAC (RFC 7518, 3.2)."""

ROLES_MAX: Final = 1000
"""Roles that a token may state."""

_ANY: Final = ""
"""The key id of a key that has none."""


class _Key(NamedTuple):
    """A key that verifies tokens."""

    key: Any
    name: str
    """See `ProvenIdentity.key_name`."""


class Tokens:
    """Verifies tokens.

    Parameters:
        options: see `TokenOptions`. A file or a URL is given.
        now_ms: returns the time in ms since 1970.

    Raises:
        AccessInvalid: a key can't be read, or doesn't fit the algorithms.
    """

    def __init__(self, options: TokenOptions, now_ms: Callable[[], int]) -> None:
        self._options = options
        self._now_ms = now_ms
        self._keys: dict[str, _Key] = {}
        self._fetched: dict[str, _Key] = {}
        """Keys from the URL, by id. The first fetch brings them."""
        if options.file:
            self._keys = self._read_keys(Path(options.file))

    def use_key_set(self, data: bytes) -> bool:
        """Use the keys that were fetched from the URL, in place of earlier ones; return whether one of these is gone.

        Raises AccessInvalid.
        """
        found = self._key_set(data, self._options.url)
        if not found:
            raise AccessInvalid(f"the key set has no key for {', '.join(self._options.algorithms)}")
        earlier, self._fetched = self._fetched, found
        return not all(self.has_key(key.name) for key in earlier.values())

    def has_key(self, name: str) -> bool | None:
        """Return whether a key is known, by its `ProvenIdentity.key_name`; None if no keys have been fetched yet."""
        if any(key.name == name for key in (*self._keys.values(), *self._fetched.values())):
            return True
        return None if self._options.url and not self._fetched else False

    def take_fetched(self, other: Tokens) -> None:
        """Go on with the keys that another object has fetched."""
        self._fetched = other._fetched

    def verify(self, token: str) -> ProvenIdentity:
        """Return whom a token names.

        Raises:
            TokenInvalid: nobody.
            KeysUnavailable: nobody can tell, because no keys have been fetched yet.
        """
        options = self._options
        if options.url and not self._fetched:
            raise KeysUnavailable(f"no keys have come from {options.url} yet")
        if len(token) > TOKEN_BYTES_MAX:
            raise TokenInvalid(f"the token has {len(token)} characters; {TOKEN_BYTES_MAX} are the limit")
        try:
            key = self._key_of(str(jwt.get_unverified_header(token).get("kid", _ANY)))
            claims = jwt.decode(
                token,
                key.key,
                algorithms=list(options.algorithms),
                audience=options.audience or None,
                issuer=options.issuer or None,
                options={
                    "require": ["exp", options.user_claim],
                    "verify_aud": bool(options.audience),
                    # By the node's clock, below.
                    "verify_exp": False,
                    "verify_nbf": False,
                    "verify_iat": False,
                },
            )
        except jwt.PyJWTError as error:
            raise TokenInvalid(str(error)) from error
        return self._identity(claims, key.name)

    def _identity(self, claims: Mapping[str, Any], key_name: str) -> ProvenIdentity:
        options, now_ms = self._options, self._now_ms()
        leeway_ms = options.leeway_s * 1000
        expires_ms = _instant_ms(claims, "exp") + leeway_ms
        if expires_ms <= now_ms:
            raise TokenInvalid("the token has expired")
        if "nbf" in claims and _instant_ms(claims, "nbf") - leeway_ms > now_ms:
            raise TokenInvalid("the token is not valid yet")
        user, roles = claims[options.user_claim], claims.get(options.roles_claim, [])
        if not isinstance(user, str) or not user:
            raise TokenInvalid(f"the claim {options.user_claim} is no text")
        if isinstance(roles, str):
            roles = roles.split()  # as in the claim `scope` of OAuth 2.0
        if not isinstance(roles, list) or len(roles) > ROLES_MAX or not all(isinstance(role, str) for role in roles):
            raise TokenInvalid(f"the claim {options.roles_claim} is no list of at most {ROLES_MAX} texts")
        return ProvenIdentity(user, frozenset(roles), expires_ms, key_name=key_name)

    # --- keys -------------------------------------------------------------------------------------------------------

    def _key_of(self, key_id: str) -> _Key:
        keys = self._keys | self._fetched
        found = keys.get(key_id) or keys.get(_ANY)
        if found is None and not key_id and len(keys) == 1:
            return next(iter(keys.values()))
        if found is None:
            raise TokenInvalid(f"the key {key_id[:80]!r} is not known")
        return found

    def _read_keys(self, path: Path) -> dict[str, _Key]:
        """Return the keys in a file, by id. Raises AccessInvalid."""
        data = _read(path)
        # A secret may begin with any byte. A key in PEM begins with a dash.
        if self._options.is_symmetric or not data.lstrip().startswith(b"{"):
            return {_ANY: _named(self._key(data, path))}
        found = self._key_set(data, str(path))
        if not found:
            raise AccessInvalid(f"the key set {path} has no key for {', '.join(self._options.algorithms)}")
        return found

    def _key(self, data: bytes, path: Path) -> Any:
        algorithms = self._options.algorithms
        if self._options.is_symmetric:
            secret = data.strip()
            if len(secret) < SECRET_BYTES_MIN:
                raise AccessInvalid(
                    f"the secret in {path} has {len(secret)} bytes; use at least {SECRET_BYTES_MIN} random ones"
                )
            return secret
        for algorithm in algorithms:
            try:
                return jwt.get_algorithm_by_name(algorithm).prepare_key(data)
            except (jwt.PyJWTError, ValueError, TypeError):
                continue  # it may be a key for another one of the algorithms
        raise AccessInvalid(f"{path} is no key set, and no public key in PEM for {', '.join(algorithms)}")

    def _key_set(self, data: bytes, origin: str) -> dict[str, _Key]:
        """Return the keys of a JSON Web Key Set (RFC 7517) by their ids: those that the algorithms can use."""
        try:
            listed = json.loads(data)["keys"]
            rows = [dict(row) for row in listed]
        except (ValueError, KeyError, TypeError) as error:
            raise AccessInvalid(f"{origin} is no JSON Web Key Set: {error!r}") from error
        found: dict[str, _Key] = {}
        for row in rows:
            if row.get("kty") == "oct" or row.get("use", "sig") != "sig":
                continue  # a secret has no place in a set that others can read
            for algorithm in self._options.algorithms:
                if row.get("alg", algorithm) != algorithm:
                    continue
                try:
                    found[str(row.get("kid", _ANY))] = _named(jwt.PyJWK(row, algorithm).key)
                except jwt.PyJWTError:
                    continue  # it is a key for another one of the algorithms
                break
        return found


def _named(key: Any) -> _Key:
    """Return a key with its name. A private key, which verifies tokens too, has the name of its public one."""
    if isinstance(key, bytes):
        return _Key(key, name_of(key))
    public = key.public_key() if hasattr(key, "public_key") else key
    return _Key(key, name_of(public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)))


def _instant_ms(claims: Mapping[str, Any], name: str) -> int:
    value = claims[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e15:
        raise TokenInvalid(f"the claim {name} is no time")
    return int(value * 1000)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise AccessInvalid(f"the key file {path} can't be read: {error.strerror}") from error
