"""The rule of exposure: no listener beyond loopback serves strangers, unless an option says so.

It holds for MQTT over TCP, TLS and WebSocket, for gRPC and for the admin listener, and is checked before anything is opened.
What can't be known at the start, such as the address behind a PROXY header, the listeners check for each connection.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import structlog

from penstock.gateway.options import PLAIN_NAME
from penstock.node.config import Config
from penstock.node.errors import ListenerExposed
from penstock.store.options import HostPort, resolved
from penstock.store.space.causer import is_local

logger = structlog.get_logger("node")


@dataclass(frozen=True, slots=True)
class Gate:
    """A listener, as far as the rule looks at it.

    Parameters:
        name: of the listener, for people.
        option: the option with its address.
        listen: the address.
        anonymous: the value of the option that allows callers without authentication.
        anonymous_option: the name of that option.
        authenticates: whether something is configured that finds out who callers are.
        ways: the options that would do so.
    """

    name: str
    option: str
    listen: HostPort
    anonymous: str
    anonymous_option: str
    authenticates: bool
    ways: str

    def admits(self, host: str) -> bool:
        """Return whether a client may be served that comes from an address, whichever listener it has connected to."""
        return self.authenticates or self.anonymous == "always" or is_local(host)


def check_exposure(config: Config) -> None:
    """Check that only this machine reaches each listener that serves callers without authentication.

    Log a warning for each one that an option opens to everybody, and for revoked certificates that gRPC would accept.

    Raises:
        ListenerExposed: a listener is reachable from elsewhere. The message names the options that would help.
    """
    wrong = []
    for gate in gates_of(config):
        if gate.authenticates and gate.anonymous != "always":
            continue
        try:
            beyond = [address for address in resolved(gate.listen) if not is_local(address)]
        except OSError as error:
            raise ListenerExposed(
                f"{gate.option} is {gate.listen}, but nobody can tell which addresses that host has: "
                f"{error.strerror or error}. Give an IP address, or a name that this machine knows."
            ) from error
        if gate.anonymous == "never":
            wrong.append(
                f'{gate.anonymous_option} is "never", but nothing authenticates the callers of {gate.name}. Set {gate.ways}, '
                f'or {gate.anonymous_option} = "loopback".'
            )
        elif beyond and gate.anonymous == "always":
            logger.warning("listener.open_to_everybody", listener=gate.name, address=str(gate.listen), by=gate.anonymous_option)
        elif beyond:
            wrong.append(_refusal(gate, beyond))
    if wrong:
        raise ListenerExposed("\n".join(wrong))
    authorities = config.pop.client_ca_file
    if authorities and any((config.admin.client_crl_file, *(each.client_crl_file for each in config.mqtt.listeners))):
        why = "gRPC checks no revocation lists: take the name in a revoked certificate out of access.file, or ban it as a user"
        logger.warning("crl.not_over_grpc", file=authorities, why=why)


def gates_of(config: Config) -> Iterator[Gate]:
    """Yield the listeners that a network reaches, with what decides about their callers."""
    access, mqtt, admin = config.access, config.mqtt, config.admin
    has_logins = bool(access.password_file or access.jwt.algorithms)
    has_logins_of_mqtt = has_logins or mqtt.access.plugins is not None
    for each in mqtt.all_listeners:
        # With "never" no client without authentication is accepted, whatever the address.
        if each.kind != "unix" and mqtt.access.anonymous != "never":
            yield Gate(
                f"the MQTT listener {each.name}" + (" (WebSocket)" if each.is_websocket else ""),
                "mqtt.listen" if each.name == PLAIN_NAME else f"listen of mqtt.listeners, {each.name},",
                each.listen,
                mqtt.access.anonymous,
                "mqtt.access.anonymous",
                has_logins_of_mqtt or each.username_from != "none",
                "access.password_file, access.jwt, mqtt.access.plugins or, on a TLS listener, username_from",
            )
    yield pop_gate(config)
    yield Gate(
        "the admin listener",
        "admin.listen",
        admin.listen,
        admin.anonymous,
        "admin.anonymous",
        bool(access.file or has_logins or admin.client_certificates == "required"),
        "access.file, access.password_file, access.jwt or admin.client_certificates",
    )


def pop_gate(config: Config) -> Gate:
    """Return the gRPC listener."""
    return Gate(
        "the gRPC listener",
        "pop.listen",
        config.pop.listen,
        config.pop.anonymous,
        "pop.anonymous",
        bool(config.access.file or (config.pop.client_ca_file and config.pop.certificate_file)),
        "access.file or pop.client_ca_file",
    )


def _refusal(gate: Gate, beyond: list[str]) -> str:
    found = "" if gate.listen.host in beyond else f" ({', '.join(beyond)})"
    return (
        f"{gate.name[0].upper()}{gate.name[1:]} would serve everybody who reaches it: {gate.option} is {gate.listen}"
        f"{found}, which is beyond loopback, and nothing authenticates its callers. "
        f"Listen on 127.0.0.1, or set {gate.ways}. To open it all the same, set "
        f'{gate.anonymous_option} = "always", or give `penstock serve` --anonymous.'
    )
