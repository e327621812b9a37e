"""The options of the admin listener."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.store.options import HostPort, OptionInvalid, bound, option


@dataclass(frozen=True, slots=True)
class AdminOptions:
    """The section `[admin]`."""

    listen: HostPort = option(
        HostPort("127.0.0.1", 8080),
        "Address of the HTTP listener for health, metrics and state. Port 0 picks a free port.",
    )
    anonymous: Literal["loopback", "always", "never"] = option(
        "loopback",
        'Whose requests need no authentication: those of this machine on a loopback address ("loopback"), everybody\'s, or '
        'nobody\'s. Others need the role "viewer" or "operator". /healthz and /readyz are always open.',
    )
    metrics: Literal["viewer", "open"] = option(
        "viewer",
        'Who may read /metrics: those who may read the state ("viewer"), or everybody.',
    )
    hosts: tuple[str, ...] = option(
        (),
        "Names by which requests may address the listener, besides its address. On loopback, localhost is accepted, too; "
        "beyond it any name if this list is empty.",
    )
    certificate_file: str = option(
        "",
        "PEM file with the server certificate and its intermediate certificates. If empty, the listener uses plain HTTP.",
    )
    key_file: str = option("", "PEM file with the unencrypted private key of the certificate.")
    tls_version_min: Literal["1.2", "1.3"] = bound("1.2", "Version of TLS: browsers and Prometheus agree on 1.3 by themselves.")
    client_certificates: Literal["none", "optional", "required"] = option(
        "none",
        "Whether clients are asked for a certificate. Its name identifies a principal of `access.file`; without that file, any "
        "certificate lets its bearer read everything.",
    )
    client_ca_file: str = option("", "PEM file with the authorities that sign client certificates.")
    client_crl_file: str = option(
        "",
        "PEM file with the revocation lists of these authorities. Without a valid list of its authority, a client is refused.",
    )

    backup_dir: str = option(
        "",
        "Directory that exists, best on another disk, below which the node stores the backups that the admin API begins. If "
        "empty, the API begins none. `penstock backup DIR` on the node's machine needs no such directory.",
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
        elif unused := next((name for name in ("client_crl_file", "client_ca_file") if getattr(self, name)), ""):
            raise OptionInvalid(f"{section}.{unused}", getattr(self, unused), 'empty if client_certificates is "none"')
