"""How a client authenticates itself, and how it authenticates the node."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import grpc

from penstock.settings import SettingInvalid, file_bytes, find_settings, has_tls, token_of, token_problem

_HOST_PORT: Final = re.compile(r"(?:\[[^\s\[\]/]+\]|[^\s:\[\]/]+):(\d{1,5})")

_SCHEMES: Final = ("dns:", "unix:", "unix-abstract:", "ipv4:", "ipv6:", "vsock:")
"""How the names of gRPC begin that are no `HOST:PORT`."""

_PORT_MAX: Final = 65_535


def check_target(target: str) -> None:
    """Check that a client can call a target. gRPC itself would only wait for the node until the timeout is over.

    Raises:
        TypeError: The target is no text.
        ValueError: It is neither `HOST:PORT` nor one of gRPC's own names.
    """
    wanted = "give HOST:PORT of the node's gRPC listener (pop.listen), such as '127.0.0.1:8081' or '[::1]:8081'"
    if not isinstance(target, str):
        raise TypeError(f"target is {target!r}: {wanted}")
    if target.startswith(_SCHEMES):
        return
    found = _HOST_PORT.fullmatch(target)
    if found is None or not 0 < int(found[1]) <= _PORT_MAX:
        raise ValueError(f"target is {target!r}: {wanted}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """Credentials of a client, and the roots by which it checks the node's certificate.

    A client without it takes the settings of the environment, or those of the context that names its node
    (`penstock.settings`). Without such settings it speaks plain text and sends no token.

    Parameters:
        token: Token of a principal in the node's access file (`access.file`). The client sends it with each call. Over
            plain text, everybody on the network path can read it. A token is printable ASCII.
        tls: Speak TLS. Without `root_certificates` the client checks the node's certificate by the roots that gRPC ships.
        root_certificates: PEM of the roots by which the client checks the node's certificate. Implies `tls`.
        certificate: PEM of the client's own certificate, for mutual TLS (`pop.client_ca_file`).
        key: PEM of the key of that certificate.

    Raises:
        TypeError, ValueError: The token is no text, or gRPC can't send it.
    """

    token: str = ""
    tls: bool = False
    root_certificates: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.token, str):
            raise TypeError(f"token is {type(self.token).__name__}: give text")
        if problem := token_problem(self.token):
            raise ValueError(f"token has {problem}: give one line of printable ASCII")

    @property
    def credentials(self) -> grpc.ChannelCredentials | None:
        """The credentials of a gRPC channel, or None for plain text."""
        if not (self.tls or self.root_certificates):
            return None
        return grpc.ssl_channel_credentials(self.root_certificates, self.key, self.certificate)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The gRPC metadata of each call: the token, if there is one."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()


PLAIN = Security()
"""Plain text without a token."""


def node_of(target: str | None, security: Security | None) -> tuple[str, Security]:
    """Return the target and the security of a client. The settings of the environment have what is None.

    Raises:
        SettingInvalid: A setting can't be used.
    """
    if target is not None and security is not None:
        return target, security
    settings = find_settings("target", {"target": target})
    if target is None:
        try:
            check_target(settings["target"])
        except ValueError as error:
            raise SettingInvalid(str(error).replace("target", settings.named("target"), 1)) from None
    if security is not None:
        return settings["target"], security
    token, is_wanted = token_of(settings), has_tls(settings)
    if is_wanted is False:
        return settings["target"], Security(token=token)
    roots, certificate, key = (file_bytes(settings, name) for name in ("ca_file", "certificate_file", "key_file"))
    tls = bool(is_wanted or roots or certificate)
    return settings["target"], Security(token=token, tls=tls, root_certificates=roots, certificate=certificate, key=key)
