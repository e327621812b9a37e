"""The options of replication."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from penstock.cluster.errors import FilesInvalid
from penstock.store.options import PORT_MAX, HostPort, OptionInvalid, option
from penstock.store.pemfiles import load_certificate, load_roots


class EtcdOptions(NamedTuple):
    """Options of the connection to etcd."""

    endpoints: tuple[str, ...]
    """`HOST:PORT` of the client listeners of all members."""
    user: str = ""
    """Name of a user that may read and write the keys of the cluster; empty where etcd has no authentication."""
    password: str = ""
    root_certificates: bytes | None = None
    """PEM of the roots by which etcd's certificates are checked. None: plain text."""
    certificate: bytes | None = None
    """PEM of the replica's certificate, where etcd asks for one."""
    key: bytes | None = None
    """PEM of the certificate's key."""


NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class ReplicationOptions:
    """The section `[replication]`: replicas of this node's data on other machines."""

    cluster: str = option("", "Name of the cluster, the same on all its nodes. If empty, the node is not replicated.")
    coordinator: tuple[str, ...] = option((), "HOST:PORT of each member of etcd, version 3.4 or later.")
    listen: HostPort = option(HostPort("127.0.0.1", 7650), "Address of the listener for other replicas.")
    advertise: str = option("", "HOST:PORT at which other replicas reach that listener. If empty, it is that of `listen`.")
    etcd_user: str = option("", "User of etcd, if that has authentication.")
    etcd_password_file: str = option("", "File with the password of `etcd_user`.")
    etcd_ca_file: str = option("", "PEM file with the roots of etcd's certificates. If empty, etcd speaks plain text.")
    etcd_certificate_file: str = option("", "PEM file with the certificate that the node shows etcd.")
    etcd_key_file: str = option("", "PEM file with the key of that certificate.")
    certificate_file: str = option(
        "",
        "PEM file with the certificate that the node shows other replicas. Beyond loopback it is needed.",
    )
    key_file: str = option("", "PEM file with the key of that certificate.")
    ca_file: str = option("", "PEM file with the roots of the certificates of all replicas.")

    @property
    def is_on(self) -> bool:
        """Whether the node is replicated."""
        return bool(self.cluster)

    def check(self, section: str) -> None:
        """Raise OptionInvalid if an option that others need is missing, or a value has the wrong form."""
        if not self.is_on:
            return
        if not NAME.fullmatch(self.cluster):
            raise OptionInvalid(f"{section}.cluster", self.cluster, "1 to 64 letters, digits, dots, dashes and underscores")
        if not self.coordinator:
            raise OptionInvalid(f"{section}.coordinator", (), 'the members of etcd, such as ["10.0.0.1:2379"]')
        for address in (*self.coordinator, *([self.advertise] if self.advertise else [])):
            if HostPort.parse(address).port not in range(1, PORT_MAX + 1):
                raise OptionInvalid(f"{section}.coordinator", address, "HOST:PORT with a port that is not 0")
        for names in (("certificate_file", "key_file", "ca_file"), ("etcd_certificate_file", "etcd_key_file")):
            given = [name for name in names if getattr(self, name)]
            if given and len(given) < len(names):
                missing = next(name for name in names if name not in given)
                raise OptionInvalid(f"{section}.{missing}", "", f"a file, because {given[0]} is set")
        if self.etcd_user and not self.etcd_password_file:
            raise OptionInvalid(f"{section}.etcd_password_file", "", "a file, because etcd_user is set")

    def etcd(self) -> EtcdOptions:
        """Return where etcd is. Raises FilesInvalid."""
        password = _text(self.etcd_password_file, "etcd_password_file")
        return EtcdOptions(
            self.coordinator,
            self.etcd_user,
            password.decode(errors="surrogateescape").rstrip("\r\n") if password is not None else "",
            _text(self.etcd_ca_file, "etcd_ca_file"),
            _text(self.etcd_certificate_file, "etcd_certificate_file"),
            _text(self.etcd_key_file, "etcd_key_file"),
        )

    def tls(self) -> tuple[ssl.SSLContext, ssl.SSLContext] | None:
        """Return the TLS contexts for connections that are dialled and taken; None for plain text. Raises FilesInvalid."""
        if not self.certificate_file:
            return None
        contexts = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        for context in contexts:
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = False  # A replica is known by its cluster's authority. Its address may change.
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                load_certificate(context, self.certificate_file, self.key_file)
                load_roots(context, self.ca_file)
            except OSError as error:
                raise FilesInvalid(
                    f"the certificate of replication can't be used ({error}); check replication.certificate_file, key_file "
                    "and ca_file"
                ) from error
        return contexts


def _text(path: str, name: str) -> bytes | None:
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise FilesInvalid(f"{path} can't be read ({error.strerror}); check replication.{name}") from error
