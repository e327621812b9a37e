"""The certificates of the gRPC listener. Their files may be replaced while the node runs."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, TypeAlias

import grpc

from penstock.install import install_hint
from penstock.pop.options import PopOptions
from penstock.store.options import OptionInvalid
from penstock.store.pemfiles import load_certificate, load_roots
from penstock.store.watchedfiles import WatchedFiles

VALID: Final = timedelta(days=3650)

ServerCertificates: TypeAlias = WatchedFiles[grpc.ServerCertificateConfiguration]


def server_certificates(options: PopOptions) -> ServerCertificates:
    """Return the node's certificate and the root certificates of its clients.

    Without `certificate_file` the node signs a certificate itself, once.

    Raises:
        OSError: a file can't be read, or has no valid content.
    """
    paths = (options.certificate_file, options.key_file, options.client_ca_file)
    return WatchedFiles("pop", paths, lambda: _load(options))


def credentials(certificates: ServerCertificates, *, has_roots: bool) -> grpc.ServerCredentials:
    """Return credentials for one port, which go by what is in force.

    gRPC asks for them at each handshake, so connections that are open go on with those that they began with.

    Args:
        certificates: of the listener.
        has_roots: whether clients must show certificates.
    """
    served = certificates.content

    def changed() -> Any:  # None if nothing has changed, of which the stubs do not know
        nonlocal served
        if served is certificates.content:
            return None
        served = certificates.content
        return served

    return grpc.dynamic_ssl_server_credentials(served, changed, has_roots)


def _load(options: PopOptions) -> grpc.ServerCertificateConfiguration:
    if options.certificate_file:
        key, certificate = Path(options.key_file).read_bytes(), Path(options.certificate_file).read_bytes()
    else:
        key, certificate = _self_signed()
    roots = Path(options.client_ca_file).read_bytes() if options.client_ca_file else None
    _check(options)
    return grpc.ssl_server_certificate_configuration([(key, certificate)], roots)


def _check(options: PopOptions) -> None:
    """Raise OSError for files that can't be used: gRPC would notice at the next handshake, and name no reason."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if options.certificate_file:
        load_certificate(context, options.certificate_file, options.key_file)
    if options.client_ca_file:
        load_roots(context, options.client_ca_file)


def _self_signed() -> tuple[bytes, bytes]:
    """Return a new private key and a certificate that the node signs itself, both as PEM.

    It is for clients that use TLS but check no certificate.

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
