"""JSON Web Tokens: what is accepted, and every way in which one is forged, expired or meant for others."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from penstock.access.errors import AccessInvalid
from penstock.access.identity import TokenInvalid, is_token
from penstock.access.options import TokenOptions
from penstock.access.tokens import TOKEN_BYTES_MAX, Tokens
from penstock.store.options import OptionInvalid

NOW_S = 1_800_000_000
SECRET = b"0123456789abcdef0123456789abcdef"
PRIVATE = ec.generate_private_key(ec.SECP256R1())
OTHER = ec.generate_private_key(ec.SECP256R1())
RSA = rsa.generate_private_key(65537, 2048)


def pem(key: Any) -> bytes:
    return bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))


def tokens(tmp_path: Path, data: bytes = pem(PRIVATE), now_s: float = NOW_S, **options: Any) -> Tokens:
    path = tmp_path / "key"
    path.write_bytes(data)
    given = {"algorithms": ("ES256",), "keys": str(path)} | options
    return Tokens(TokenOptions(**given), lambda: int(now_s * 1000))


def token(key: Any = PRIVATE, algorithm: str = "ES256", headers: dict[str, Any] | None = None, **claims: Any) -> str:
    return jwt.encode({"sub": "ann", "exp": NOW_S + 60} | claims, key, algorithm, headers)


def test_a_token_names_a_user_with_roles_until_it_expires(tmp_path: Path) -> None:
    shown = token(roles=["staff", "night"])
    assert is_token(shown)
    found = tokens(tmp_path).verify(shown)
    assert (found.user, sorted(found.roles), found.expires_ms) == ("ann", ["night", "staff"], (NOW_S + 90) * 1000)


def test_claims_can_have_other_names(tmp_path: Path) -> None:
    found = tokens(tmp_path, user_claim="name", roles_claim="scope").verify(token(name="bob", scope="a b"))
    assert (found.user, sorted(found.roles)) == ("bob", ["a", "b"])


@pytest.mark.parametrize(
    ("claims", "options", "why"),
    [
        ({"exp": NOW_S - 31}, {}, "expired"),
        ({"exp": NOW_S - 1}, {"leeway_s": 0}, "expired"),
        ({"nbf": NOW_S + 31}, {}, "not valid yet"),
        ({"exp": "soon"}, {}, "no time"),
        ({"exp": True}, {}, "no time"),
        ({"exp": 1e300}, {}, "no time"),
        ({"sub": ""}, {}, "no text"),
        ({"roles": [1]}, {}, "no list"),
        ({"roles": ["r"] * 1001}, {}, "no list"),
        ({}, {"user_claim": "name"}, "name"),
        ({"aud": "others"}, {"audience": "us"}, "[Aa]udience"),
        ({}, {"audience": "us"}, "aud"),
        ({"iss": "others"}, {"issuer": "us"}, "[Ii]ssuer"),
        ({}, {"issuer": "us"}, "iss"),
    ],
)
def test_a_token_that_does_not_hold_is_refused(
    tmp_path: Path, claims: dict[str, Any], options: dict[str, Any], why: str
) -> None:
    with pytest.raises(TokenInvalid, match=why):
        tokens(tmp_path, **options).verify(token(**claims))


def test_a_token_without_an_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenInvalid, match="exp"):
        tokens(tmp_path).verify(jwt.encode({"sub": "ann"}, PRIVATE, "ES256"))


def test_the_clocks_may_differ_a_little(tmp_path: Path) -> None:
    assert tokens(tmp_path).verify(token(exp=NOW_S - 29, nbf=NOW_S + 29)).user == "ann"


def test_forged_tokens_are_refused(tmp_path: Path) -> None:
    head, body, signature = token().split(".")
    other_body = base64.urlsafe_b64encode(json.dumps({"sub": "root", "exp": NOW_S + 60}).encode()).rstrip(b"=").decode()
    none_head = base64.urlsafe_b64encode(b'{"alg":"none","typ":"JWT"}').rstrip(b"=").decode()
    for forged in (
        f"{head}.{other_body}.{signature}",
        f"{none_head}.{body}.",
        f"{head}.{body}.",
        token(OTHER),
        token(RSA, "RS256"),
        jwt.encode({"sub": "ann", "exp": NOW_S + 60}, SECRET, "HS256"),
        "eyJ..",
        "eyJ" + "x" * TOKEN_BYTES_MAX + "..",
    ):
        with pytest.raises(TokenInvalid):
            tokens(tmp_path).verify(forged)


def test_a_secret_signs_tokens_too(tmp_path: Path) -> None:
    found = tokens(tmp_path, SECRET + b"\n", algorithms=("HS256",))
    assert found.verify(token(SECRET, "HS256")).user == "ann"
    with pytest.raises(TokenInvalid):
        found.verify(token(b"x" * 32, "HS256"))


def key_set(*rows: dict[str, Any]) -> bytes:
    return json.dumps({"keys": rows}).encode()


def row_of(key: Any, **more: Any) -> dict[str, Any]:
    algorithm = jwt.get_algorithm_by_name("EdDSA" if isinstance(key, ed25519.Ed25519PrivateKey) else "ES256")
    return {**algorithm.to_jwk(key.public_key(), as_dict=True), **more}


def test_a_key_set_gives_the_key_that_a_token_names(tmp_path: Path) -> None:
    data = key_set(row_of(PRIVATE, kid="1"), row_of(OTHER, kid="2"), {"kty": "oct", "kid": "3", "k": "c2VjcmV0"})
    found = tokens(tmp_path, data)
    assert found.verify(token(OTHER, headers={"kid": "2"})).user == "ann"
    for headers in ({"kid": "1"}, {"kid": "3"}, {"kid": "9"}, {}):
        with pytest.raises(TokenInvalid):
            found.verify(token(OTHER, headers=headers))
    with pytest.raises(TokenInvalid):
        found.verify(jwt.encode({"sub": "ann", "exp": NOW_S + 60}, b"secret" * 8, "HS256", {"kid": "3"}))


def test_a_key_set_with_keys_of_several_kinds_serves_each(tmp_path: Path) -> None:
    edwards = ed25519.Ed25519PrivateKey.generate()
    data = key_set(row_of(PRIVATE, kid="1"), row_of(edwards, kid="2"))
    found = tokens(tmp_path, data, algorithms=("ES256", "EdDSA"))
    assert found.verify(token(headers={"kid": "1"})).user == "ann"
    assert found.verify(token(edwards, "EdDSA", {"kid": "2"})).user == "ann"


def test_a_key_has_the_same_name_wherever_it_is_read(tmp_path: Path) -> None:
    from_file = tokens(tmp_path).verify(token())
    fetched = tokens(tmp_path, keys="https://login.example.org/keys")
    assert fetched.has_key(from_file.key_name) is None, "no keys have come"
    assert not fetched.use_key_set(key_set(row_of(PRIVATE, kid="1"), row_of(OTHER, kid="2")))
    assert fetched.verify(token(headers={"kid": "1"})).proof == from_file.proof
    assert fetched.use_key_set(key_set(row_of(PRIVATE, kid="3"))), "the other one is gone"
    assert fetched.has_key(from_file.key_name), "under another id"
    assert fetched.use_key_set(key_set(row_of(OTHER, kid="2")))
    assert fetched.has_key(from_file.key_name) is False


@pytest.mark.parametrize(
    ("data", "options", "why"),
    [
        (b"short", {"algorithms": ("HS256",)}, "32"),
        (b"nonsense", {}, "no public key"),
        (pem(RSA), {}, "no public key"),
        (b"{nonsense", {}, "no JSON Web Key Set"),
        (b" \n{}", {}, "no JSON Web Key Set"),
        (key_set(), {}, "no key for ES256"),
        (key_set({"kty": "oct", "k": "c2VjcmV0"}), {}, "no key for"),
        (b"", {"keys": "/none/key"}, "can't be read"),
    ],
)
def test_a_key_that_can_t_be_used_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, options: dict[str, Any], why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AccessInvalid, match=why):
        tokens(tmp_path, data, **options)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"algorithms": ("none",), "keys": "k"}, "algorithms"),
        ({"algorithms": ("HS256", "RS256"), "keys": "k"}, "algorithms"),
        ({"algorithms": ("RS256",)}, "keys"),
        ({"algorithms": ("HS256",), "keys": "https://login.example.org/keys"}, "keys"),
        ({"algorithms": ("RS256",), "keys": "http://login.example.org/keys"}, "keys"),
        ({"algorithms": ("RS256",), "keys": "http://127.0.0.1.example.org/keys"}, "keys"),
        ({"keys": "https://login.example.org/keys"}, "algorithms"),
    ],
)
def test_options_that_would_accept_too_much_are_refused(options: dict[str, Any], name: str) -> None:
    with pytest.raises(OptionInvalid, match=name):
        TokenOptions(**options).check("access.jwt")
