"""Errors of certificates and keys name the file and what is wrong with it."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from penstock.store.pemfiles import expiry_s, load_certificate, load_roots

DAMAGED = "-----BEGIN CERTIFICATE-----\nbm8=\n-----END CERTIFICATE-----\n"


@dataclass
class Files:
    certificate: Path
    key: Path
    other_key: Path
    encrypted: Path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    home = tmp_path_factory.mktemp("pem")
    made = Files(home / "server.pem", home / "server.key", home / "other.key", home / "encrypted.key")
    authority = trustme.CA()
    issued = authority.issue_cert("localhost")
    made.certificate.write_bytes(issued.cert_chain_pems[0].bytes())
    made.key.write_bytes(issued.private_key_pem.bytes())
    made.other_key.write_bytes(authority.issue_cert("localhost").private_key_pem.bytes())
    key = serialization.load_pem_private_key(made.key.read_bytes(), None)
    form, password = serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    made.encrypted.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, password))
    return made


def refusal(certificate: Path, key: Path) -> str:
    with pytest.raises(OSError, match="can't be used for TLS") as refused:
        load_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), certificate, key)
    return str(refused.value)


def test_each_wrong_file_is_named_with_what_is_wrong(files: Files, tmp_path: Path) -> None:
    text, damaged = tmp_path / "text.pem", tmp_path / "damaged.pem"
    text.write_text("nothing")
    damaged.write_text(DAMAGED)
    assert refusal(text, files.key).startswith(f"{text} can't be used for TLS: it has no certificate in PEM")
    assert refusal(files.key, files.key).startswith(f"{files.key} can't be used for TLS: it has no certificate in PEM")
    assert refusal(damaged, files.key) == f"{damaged} can't be used for TLS: its certificate is damaged"
    assert refusal(files.certificate, text).startswith(f"{text} can't be used for TLS: it has no private key in PEM")
    encrypted = refusal(files.certificate, files.encrypted)
    assert encrypted.startswith(f"{files.encrypted} can't be used for TLS: the key is encrypted")
    other = refusal(files.certificate, files.other_key)
    assert other == f"{files.other_key} can't be used for TLS: the key is not that of the certificate in {files.certificate}"


def test_a_damaged_key_is_named(files: Files, tmp_path: Path) -> None:
    key = tmp_path / "damaged.key"
    key.write_text("-----BEGIN PRIVATE KEY-----\nbm8=\n-----END PRIVATE KEY-----\n")
    assert refusal(files.certificate, key).startswith(f"{key} can't be used for TLS: OpenSSL refuses the key")


@pytest.mark.parametrize(
    ("text", "why"), [("nothing", "it has no certificate in PEM"), (DAMAGED, "its certificate is damaged")]
)
def test_roots_that_are_none_are_named(tmp_path: Path, text: str, why: str) -> None:
    roots = tmp_path / "ca.pem"
    roots.write_text(text)
    with pytest.raises(OSError, match=rf"ca\.pem can't be used for TLS: {why}"):
        load_roots(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), roots)


def test_a_missing_file_is_named(files: Files, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no\.key"):
        load_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), files.certificate, tmp_path / "no.key")


def test_a_chain_expires_with_its_first_certificate(tmp_path: Path) -> None:
    later, sooner = (datetime.now(UTC).replace(microsecond=0) + timedelta(days=days) for days in (20, 10))
    chain = [trustme.CA().issue_cert("localhost", not_after=each).cert_chain_pems[0].bytes() for each in (later, sooner)]
    path = tmp_path / "chain.pem"
    path.write_bytes(b"".join(chain))
    assert expiry_s(path) == sooner.timestamp()
    path.write_text(DAMAGED)
    with pytest.raises(OSError, match="nobody can tell when its certificate expires"):
        expiry_s(path)
