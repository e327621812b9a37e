"""The certificate of a listener, and what it demands of clients. The files may be replaced while the node runs."""

from __future__ import annotations

import re
import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Protocol

import structlog
from cryptography import x509

from penstock.store.pemfiles import load_certificate, load_roots
from penstock.store.watchedfiles import WatchedFiles

logger = structlog.get_logger("gateway")

VERSIONS: Final = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
VERIFY: Final = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}

_LIST: Final = re.compile(rb"-----BEGIN X509 CRL-----.*?-----END X509 CRL-----", re.DOTALL)


class TlsTerms(Protocol):
    """The options of a listener that speaks TLS. `ListenerOptions` says what they mean."""

    @property
    def certificate_file(self) -> str: ...
    @property
    def key_file(self) -> str: ...
    @property
    def tls_version_min(self) -> str: ...
    @property
    def client_certificates(self) -> str: ...
    @property
    def client_ca_file(self) -> str: ...
    @property
    def client_crl_file(self) -> str: ...


def certificates_of(options: TlsTerms, listener: str, protocol: str = "mqtt") -> WatchedFiles[ssl.SSLContext]:
    """Return the TLS context of a listener. It is renewed when the files are replaced.

    Each connection keeps the context with which it began, so a renewal disturbs no connection. A renewal can add and remove
    certificate authorities, and revoke certificates.

    Args:
        options: of the listener.
        listener: its name.
        protocol: what is spoken over TLS, by its name for ALPN.

    Raises:
        OSError: a file can't be read, or has no valid content.
    """
    of_clients = (options.client_ca_file, options.client_crl_file) if options.client_certificates != "none" else ()
    paths = (options.certificate_file, options.key_file, *of_clients)
    return WatchedFiles(listener, paths, lambda: _context_of(options, protocol))


def _context_of(options: TlsTerms, protocol: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = VERSIONS[options.tls_version_min]
    context.options |= ssl.OP_NO_RENEGOTIATION  # Otherwise a client can make the server do handshakes at no cost of its own.
    context.set_alpn_protocols([protocol])
    load_certificate(context, options.certificate_file, options.key_file)
    if options.client_certificates != "none":
        load_roots(context, options.client_ca_file)
        if options.client_crl_file:
            _check_lists(options.client_crl_file)
            try:
                context.load_verify_locations(options.client_crl_file)
            except ssl.SSLError as error:
                raise OSError(f"{options.client_crl_file} can't be used for TLS: one of its lists is damaged") from error
            context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    context.verify_mode = VERIFY[options.client_certificates]
    return context


def _check_lists(path: str) -> None:
    """Check that a file has certificate revocation lists and nothing else, and log the lists that have expired.

    OpenSSL would trust a certificate in the file as an authority. It refuses the clients of a list that has expired.

    Raises:
        OSError: the file can't be read, or has other content.
    """
    content = Path(path).read_bytes()
    blocks = _LIST.findall(content)
    if not blocks or content.count(b"-----BEGIN ") > len(blocks):
        what = "something else than certificate revocation lists" if blocks else "no certificate revocation list"
        raise OSError(
            f"{path} can't be used for TLS: it has {what}. Give the lists of the authorities in client_ca_file, as PEM."
        )
    for block in blocks:
        try:
            revoked = x509.load_pem_x509_crl(block)
        except ValueError as error:
            raise OSError(f"{path} can't be used for TLS: a certificate revocation list is damaged: {error}") from error
        until = revoked.next_update_utc
        if until is not None and until <= datetime.now(UTC):
            why = "all clients of this authority are refused until the file has a newer list"
            logger.error("tls.crl_expired", file=path, authority=revoked.issuer.rfc4514_string(), until=str(until), why=why)
