"""The certificate of a listener, and what it demands of clients. The files may be replaced while the node runs."""

from __future__ import annotations

import ssl
from typing import Final, Protocol

from penstock.store.watchedfiles import WatchedFiles

VERSIONS: Final = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
VERIFY: Final = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}


class TlsTerms(Protocol):
    """The options of a listener that speaks TLS. `ListenerOptions` says what they mean."""

    @property
    def certificate(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def tls_version_min(self) -> str: ...
    @property
    def client_certificates(self) -> str: ...
    @property
    def client_ca(self) -> str: ...


class Certificates:
    """The TLS context of a listener. It is renewed when the files are replaced.

    Each connection keeps the context with which it began, so a renewal disturbs no connection. A renewal can add and remove
    certificate authorities.

    Parameters:
        options: of the listener.
        protocol: what is spoken over TLS, by its name for ALPN.

    Raises:
        OSError: a file can't be read, or has no valid content.
    """

    def __init__(self, options: TlsTerms, protocol: str = "mqtt") -> None:
        self._options = options
        self._protocol = protocol
        paths = (options.certificate, options.key, *((options.client_ca,) if options.client_certificates != "none" else ()))
        self._files = WatchedFiles(paths)
        self.context = self._load()

    def reload(self) -> None:
        """Read the files again. If that raises OSError, the old context stays in use."""
        self._files.note_read()
        self.context = self._load()

    def changed(self) -> bool:
        """Return whether a file was replaced since it was read."""
        return self._files.changed()

    def _load(self) -> ssl.SSLContext:
        options = self._options
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = VERSIONS[options.tls_version_min]
        context.options |= (
            ssl.OP_NO_RENEGOTIATION
        )  # Otherwise a client can make the server do handshakes at no cost of its own.
        context.set_alpn_protocols([self._protocol])
        path = f"{options.certificate} with {options.key}"
        try:
            # Without a password OpenSSL would ask for that of an encrypted key on the terminal.
            context.load_cert_chain(options.certificate, options.key, password="")
            if options.client_certificates != "none":
                path = options.client_ca
                context.load_verify_locations(options.client_ca)
        except ssl.SSLError as error:
            raise OSError(f"{path} can't be used for TLS: {error.reason or error}") from error
        context.verify_mode = VERIFY[options.client_certificates]
        return context
