"""Loads PEM files into TLS contexts. The errors name the file and say what is wrong with it, which those of OpenSSL do not."""

from __future__ import annotations

import ssl
from pathlib import Path

from cryptography import x509

CERTIFICATE = b"-----BEGIN CERTIFICATE-----"
KEY = b"PRIVATE KEY-----"
ENCRYPTED = b"ENCRYPTED"
"""Word of an encrypted key: in the line that begins it (PKCS #8), or in the header after that line (the older form)."""


def load_certificate(context: ssl.SSLContext, certificate: str | Path, key: str | Path) -> None:
    """Load a certificate and its private key.

    Args:
        context: gets both.
        certificate: file with the certificate, and those of authorities between it and the root.
        key: file with the private key, not encrypted.

    Raises:
        OSError: a file can't be read, or has no valid content. The text names the file.
    """
    content, secret = Path(certificate).read_bytes(), Path(key).read_bytes()
    try:
        # Without a password OpenSSL would ask for that of an encrypted key on the terminal.
        context.load_cert_chain(certificate, key, password="")
    except ssl.SSLError as error:
        raise OSError(_problem(certificate, content, key, secret, error)) from error


def expiry_s(certificate: str | Path) -> float:
    """Return when the first of the certificates in a file expires, in seconds since 1970.

    Raises:
        OSError: the file can't be read, or a certificate in it can't be understood.
    """
    try:
        chain = x509.load_pem_x509_certificates(Path(certificate).read_bytes())
    except ValueError as error:
        raise OSError(_unusable(certificate, f"nobody can tell when its certificate expires ({error})")) from error
    return min(each.not_valid_after_utc for each in chain).timestamp()


def load_roots(context: ssl.SSLContext, roots: str | Path) -> None:
    """Load the certificates of authorities that sign those of the other side.

    Raises:
        OSError: the file can't be read, or has no valid content. The text names the file.
    """
    content = Path(roots).read_bytes()
    try:
        context.load_verify_locations(roots)
    except ssl.SSLError as error:
        raise OSError(_unusable(roots, _certificate_problem(content) or "its certificate is damaged")) from error


def _problem(certificate: str | Path, content: bytes, key: str | Path, secret: bytes, error: ssl.SSLError) -> str:
    if problem := _certificate_problem(content):
        return _unusable(certificate, problem)
    if KEY not in secret:
        return _unusable(key, "it has no private key in PEM (a block that begins with -----BEGIN PRIVATE KEY-----)")
    if ENCRYPTED in secret:
        return _unusable(key, "the key is encrypted. A node can't ask for its password: decrypt it with `openssl pkey`")
    if error.reason == "KEY_VALUES_MISMATCH":
        return _unusable(key, f"the key is not that of the certificate in {certificate}")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(certificate)
    except ssl.SSLError:
        return _unusable(certificate, "its certificate is damaged")
    return _unusable(key, f"OpenSSL refuses the key ({error.reason or 'it is damaged'})")


def _certificate_problem(content: bytes) -> str:
    if CERTIFICATE in content:
        return ""
    return f"it has no certificate in PEM (a block that begins with {CERTIFICATE.decode()})"


def _unusable(path: str | Path, problem: str) -> str:
    return f"{path} can't be used for TLS: {problem}"
