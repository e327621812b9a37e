"""Where a command finds a node's listener, and by which certificates both of them know each other."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path

from penstock.store.options import HostPort

CA_FILE = "PENSTOCK_CA_FILE"
"""Environment variable with the path of the CA file, for commands without `--tls-ca-file`."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A listener of a node, and how a command speaks to it.

    Parameters:
        address: of the listener.
        has_tls: whether the command speaks TLS. If not, the other fields are None.
        ca_file: PEM of the roots that the node's certificate is checked by; None for the usual roots.
        certificate: PEM of the command's own certificate, with its chain.
        key: PEM of the key of that certificate.
    """

    address: HostPort
    has_tls: bool = False
    ca_file: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def context(self) -> ssl.SSLContext:
        """Return a TLS context with the files, all of which can be used.

        Raises:
            ValueError: a file can't be used.
            OSError: a file can't be read.
        """
        for file in (self.ca_file, self.certificate, self.key):
            if file is not None:
                file.read_bytes()  # an error of the TLS library does not name the file
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
        except ssl.SSLError as error:
            raise ValueError(f"{self.ca_file} has no certificates that can be used: {error.reason or error}") from error
        if self.certificate is not None:
            try:
                context.load_cert_chain(self.certificate, self.key)
            except ssl.SSLError as error:
                raise ValueError(
                    f"the certificate {self.certificate} and the key {self.key} can't be used together: {error.reason or error}"
                ) from error
        return context


def endpoint_of(
    address: HostPort, *, tls: bool | None, ca_file: Path | None, certificate: Path | None, key: Path | None
) -> Endpoint:
    """Return the endpoint that the options of a command name, or else the environment.

    Args:
        address: of the listener.
        tls: whether to speak TLS; None to do so if there is a certificate of either side.
        ca_file, certificate, key: see `Endpoint`.

    Raises:
        ValueError: the options contradict each other.
    """
    if (certificate is None) != (key is None):
        raise ValueError("--tls-certificate and --tls-key need each other: give both files, or none.")
    if tls is False:
        if ca_file is not None or certificate is not None:
            raise ValueError(
                "--no-tls has no use for --tls-ca-file, --tls-certificate and --tls-key: leave one or the other out."
            )
        return Endpoint(address)
    if ca_file is None and (named := os.environ.get(CA_FILE)):
        ca_file = Path(named)
    return Endpoint(address, bool(tls or ca_file or certificate), ca_file, certificate, key)
