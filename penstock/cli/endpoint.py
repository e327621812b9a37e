"""Where a command finds a node's listener, how it speaks with the listener, and what prevents a connection."""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

from penstock.settings import SettingInvalid, Settings, has_tls, token_of
from penstock.store.options import HostPort, OptionInvalid


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A listener of a node, and how a command speaks to it.

    Parameters:
        address: of the listener.
        token: that the command sends with each call; empty for none.
        has_tls: whether the command speaks TLS. If not, the fields below are None.
        ca_file: PEM of the roots that the node's certificate is checked by; None for the usual roots.
        certificate: PEM of the command's own certificate, with its chain.
        key: PEM of the key of that certificate.
    """

    address: HostPort
    token: str = ""
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


def endpoint_of(settings: Settings, address: str) -> Endpoint:
    """Return the listener that settings name by an address.

    Raises:
        SettingInvalid: a setting can't be used.
    """
    try:
        at = HostPort.parse(settings[address])
    except OptionInvalid as error:
        raise SettingInvalid(f"{settings.named(address)} is {settings[address]!r}: it must be {error.allowed}.") from None
    token = token_of(settings) if address != "mqtt" else ""
    is_wanted = has_tls(settings)
    if is_wanted is False:
        return Endpoint(at, token)
    ca_file, certificate, key = (Path(settings[name]) if name in settings else None for name in FILES)
    if (certificate is None) != (key is None):
        raise SettingInvalid("certificate_file and key_file need each other: give both files, or none.")
    return Endpoint(at, token, bool(is_wanted or ca_file or certificate), ca_file, certificate, key)


FILES = ("ca_file", "certificate_file", "key_file")
"""Settings that name the files of TLS."""


PROBE_S = 3.0
"""Seconds after which a listener that says nothing counts as one that does not answer."""


@dataclass(frozen=True, slots=True)
class Protocol:
    """A protocol that a command speaks with a node.

    Parameters:
        does: how a listener of the protocol answers.
        missing: what there is not when nobody listens.
        option: option of the command that names the address.
        alpn: name of the protocol in the handshake of TLS; None for none.
    """

    does: str
    missing: str
    option: str
    alpn: str | None = None


MQTT = Protocol("as an MQTT broker does", "MQTT broker", "--mqtt")
GRPC = Protocol("as the gRPC listener of a node does (pop.listen)", "gRPC listener of a node", "--target", "h2")
ADMIN = Protocol("as the admin listener of a node does (admin.listen)", "admin listener of a node", "--admin")


def why_unconnected(node: Endpoint, protocol: Protocol, cause: BaseException | None) -> str:
    """Return what prevents a connection, and what to do, in one line.

    Args:
        node: the listener.
        protocol: that it should speak.
        cause: the error that ended the attempt; None if the listener ended it.
    """
    at = node.address
    if isinstance(cause, ssl.SSLCertVerificationError):
        return (
            f"The certificate of the node on {at} can't be trusted: {cause.verify_message}. Name the file of its authority "
            f"with --ca-file, and give {protocol.option} a host name that the certificate has."
        )
    if isinstance(cause, ssl.SSLError) and "ALERT" in (cause.reason or ""):
        return (
            f"The listener on {at} refused the connection with the TLS alert {cause.reason}. If it asks for a client "
            "certificate, give one that its authority has signed with --certificate-file and --key-file."
        )
    is_unreachable = isinstance(cause, OSError) and cause.errno is not None and not isinstance(cause, ssl.SSLError)
    if isinstance(cause, TimeoutError) or (is_unreachable and not isinstance(cause, ConnectionResetError | BrokenPipeError)):
        return f"No {protocol.missing} answers on {at} ({cause}). Is `penstock serve` running there?"
    if node.has_tls:
        how, remedy = " over TLS", "If it speaks plain text, add --no-tls."
    else:
        how, remedy = "", "If it speaks TLS, add --tls, and --ca-file FILE for an authority of your own."
    return (
        f"The listener on {at} does not answer {protocol.does}{how}. {remedy} Otherwise the log of the node says why it "
        "closed the connection."
    )


def probe(node: Endpoint, protocol: Protocol) -> BaseException | None:
    """Connect with a listener, over TLS if the endpoint has it, and return the error; None if the listener took the connection.

    For libraries that do not say why they have no connection.
    """
    try:
        plain = socket.create_connection((node.address.host, node.address.port), PROBE_S)
    except OSError as error:
        return error
    try:
        with plain:
            if not node.has_tls:
                return None
            context = node.context()
            if protocol.alpn is not None:
                context.set_alpn_protocols([protocol.alpn])
            with context.wrap_socket(plain, server_hostname=node.address.host) as secured:
                secured.settimeout(PROBE_S)
                secured.recv(1)  # TLS 1.3 refuses the certificate of a client only after the handshake
    except TimeoutError:
        return None
    except (OSError, ValueError) as error:
        return error
    return None
