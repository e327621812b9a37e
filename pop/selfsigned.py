"""A certificate that the node signs itself, for clients that use TLS but check no certificate."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from penstock.install import install_hint
from penstock.store.options import OptionInvalid

VALID: Final = timedelta(days=3650)


def self_signed() -> tuple[bytes, bytes]:
    """Return a new private key and its certificate, both as PEM.

    Raises:
        OptionInvalid: The package cryptography is not installed.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    except ModuleNotFoundError as error:
        raise OptionInvalid(
            "pop.tls_optional", True, f"true with pop.certificate_file, or with cryptography ({install_hint('rocketmq')})"
        ) from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "penstock")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + VALID)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return private, certificate.public_bytes(serialization.Encoding.PEM)
