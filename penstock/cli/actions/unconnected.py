"""What prevents a connection with a listener, and what to do: the text of the error of a command."""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass

from penstock.cli.actions.endpoint import Endpoint

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
GRPC = Protocol("as the gRPC listener of a node does (pop.listen)", "gRPC listener of a node", "--pop", "h2")
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
            f"with --tls-ca-file, and give {protocol.option} a host name that the certificate has."
        )
    if isinstance(cause, ssl.SSLError) and "ALERT" in (cause.reason or ""):
        return (
            f"The listener on {at} refused the connection with the TLS alert {cause.reason}. If it asks for a client "
            "certificate, give one that its authority has signed with --tls-certificate and --tls-key."
        )
    is_unreachable = isinstance(cause, OSError) and cause.errno is not None and not isinstance(cause, ssl.SSLError)
    if isinstance(cause, TimeoutError) or (is_unreachable and not isinstance(cause, ConnectionResetError | BrokenPipeError)):
        return f"No {protocol.missing} answers on {at} ({cause}). Is `penstock serve` running there?"
    if node.has_tls:
        how, remedy = " over TLS", "If it speaks plain text, add --no-tls."
    else:
        how, remedy = "", "If it speaks TLS, add --tls, and --tls-ca-file FILE for an authority of your own."
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
