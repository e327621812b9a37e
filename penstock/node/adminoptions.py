"""The options of the admin listener."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.store.options import HostPort, OptionInvalid, option


@dataclass(frozen=True, slots=True)
class AdminOptions:
    """The section `[admin]`."""

    listen: HostPort = option(
        HostPort("127.0.0.1", 8080),
        "Address of the HTTP listener for health, metrics and state. Port 0 picks a free port.",
    )
    anonymous: Literal["loopback", "always", "never"] = option(
        "loopback",
        'Whose requests are served without authentication. "loopback": those of this machine, if the listener is on a loopback '
        "address and no header says that a proxy forwards the request. Others need a token, a password or a certificate of "
        'somebody with the role "viewer" or "operator". "always": everybody\'s. "never": nobody\'s; /healthz and /readyz stay '
        "open in any case. The node does not start if the listener is beyond loopback and nothing authenticates.",
    )
    metrics: Literal["viewer", "open"] = option(
        "viewer",
        'Who may read /metrics: "viewer" means those who may read the state, "open" everybody who reaches the listener.',
    )
    hosts: tuple[str, ...] = option(
        (),
        "Names by which requests may address the listener (in the header Host), besides its own address. On loopback, "
        "localhost and loopback addresses are accepted, too; beyond it any IP address, and any name if this list is empty. "
        "Other requests are refused, so that a web page can't reach the listener under a name of its own.",
    )
    certificate_file: str = option(
        "",
        "PEM file with the server certificate and its intermediate certificates. If empty, the listener uses plain HTTP.",
    )
    key_file: str = option(
        "",
        "PEM file with the unencrypted private key of the certificate.",
    )
    tls_version_min: Literal["1.2", "1.3"] = option(
        "1.2",
        "The oldest version of TLS that the listener accepts.",
    )
    client_certificates: Literal["none", "optional", "required"] = option(
        "none",
        'Whether the listener asks clients for a certificate: "none" does not ask, "optional" accepts a client without one, '
        '"required" refuses it in the TLS handshake. A name in the certificate identifies a principal of `access.file`. '
        "Without `access.file`, any certificate that the authority has signed lets its bearer read everything.",
    )
    client_ca_file: str = option(
        "",
        "PEM file with the certificate authorities that sign client certificates. It is needed unless "
        '`client_certificates` is "none".',
    )
    client_crl_file: str = option(
        "",
        "PEM file with the certificate revocation lists of the authorities in `client_ca_file`. A client whose certificate is "
        "revoked is refused in the TLS handshake. So is every client of an authority whose list has expired or is not there.",
    )

    def check(self, section: str) -> None:
        """Raise OptionInvalid if options contradict each other."""
        if bool(self.certificate_file) != bool(self.key_file):
            missing = "key_file" if self.certificate_file else "certificate_file"
            raise OptionInvalid(f"{section}.{missing}", "", "a path, because certificate_file and key_file go together")
        if self.client_certificates != "none":
            if not self.certificate_file:
                raise OptionInvalid(f"{section}.client_certificates", self.client_certificates, '"none" without TLS')
            if not self.client_ca_file:
                raise OptionInvalid(f"{section}.client_ca_file", "", "a path if clients are asked for a certificate")
        elif self.client_crl_file:
            raise OptionInvalid(f"{section}.client_crl_file", self.client_crl_file, 'empty if client_certificates is "none"')
