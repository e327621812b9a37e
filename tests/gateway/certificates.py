"""Certificates for tests: an authority, a server at localhost, and clients."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from penstock.gateway.options import ListenerOptions


class Authority:
    """A certificate authority with its files in a directory of the test."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._authority = trustme.CA()
        self.directory = directory
        self.file = directory / "ca.pem"
        self._authority.cert_pem.write_to_path(self.file)
        self.certificate, self.key = directory / "server.pem", directory / "server.key"
        self.issue_server()

    def issue_server(self) -> None:
        """Replace the certificate of the server with a new one."""
        issued = self._authority.issue_cert("localhost", "127.0.0.1")
        for path, blobs in ((self.certificate, issued.cert_chain_pems), (self.key, [issued.private_key_pem])):
            beside = path.with_suffix(".new")
            beside.write_bytes(b"".join(blob.bytes() for blob in blobs))
            beside.rename(path)

    def issue_client(self, *names: str, common_name: str | None = None, unit: str | None = None) -> tuple[Path, Path]:
        """Return the paths of a client's certificate and key."""
        issued = self._authority.issue_cert(*names, common_name=common_name, organization_unit_name=unit)
        stem = (common_name or names[0]).replace("/", "_")
        certificate, key = self.directory / f"{stem}.pem", self.directory / f"{stem}.key"
        issued.cert_chain_pems[0].write_to_path(certificate)
        issued.private_key_pem.write_to_path(key)
        return certificate, key

    def issue_device(self, uri: str) -> tuple[Path, Path]:
        """Return the paths of the certificate and key of a client whose subject alternative name is a URI."""
        authority = x509.load_pem_x509_certificate(self._authority.cert_pem.bytes())
        signing_key: Any = serialization.load_pem_private_key(self._authority.private_key_pem.bytes(), None)
        device_key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.now(UTC)
        builder = x509.CertificateBuilder(
            authority.subject, x509.Name([]), device_key.public_key(), x509.random_serial_number(), now, now + timedelta(days=1)
        )
        names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)])
        issued = builder.add_extension(names, critical=True).sign(signing_key, hashes.SHA256())
        certificate, key = self.directory / "device.pem", self.directory / "device.key"
        certificate.write_bytes(issued.public_bytes(serialization.Encoding.PEM))
        key.write_bytes(
            device_key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return certificate, key

    def revoke(self, *clients: tuple[Path, Path], until: datetime | None = None) -> Path:
        """Write the list of all certificates that are revoked, which is valid until some time, by default tomorrow."""
        authority = x509.load_pem_x509_certificate(self._authority.cert_pem.bytes())
        signing_key: Any = serialization.load_pem_private_key(self._authority.private_key_pem.bytes(), None)
        now = datetime.now(UTC)
        until = until or now + timedelta(days=1)
        builder = x509.CertificateRevocationListBuilder(authority.subject, min(now, until) - timedelta(days=1), until)
        for certificate, _ in clients:
            number = x509.load_pem_x509_certificate(certificate.read_bytes()).serial_number
            revoked = x509.RevokedCertificateBuilder().serial_number(number).revocation_date(now)
            builder = builder.add_revoked_certificate(revoked.build())
        path = self.directory / "crl.pem"
        path.write_bytes(builder.sign(signing_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        return path

    def context(self, client: tuple[Path, Path] | None = None) -> ssl.SSLContext:
        """Return the TLS context of a client that trusts this authority."""
        context = ssl.create_default_context(cafile=self.file)
        if client is not None:
            context.load_cert_chain(*client)
        return context

    def listener(self, name: str, kind: Any = "tls", **options: Any) -> ListenerOptions:
        """Return the options of a listener that has the server certificate and trusts clients of this authority."""
        return ListenerOptions(
            name=name,
            kind=kind,
            certificate_file=str(self.certificate),
            key_file=str(self.key),
            client_ca_file=str(self.file),
            **options,
        )
