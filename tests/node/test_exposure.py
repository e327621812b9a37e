"""The rule of exposure: which addresses a node opens without authentication, and what it says where it does not."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog

from penstock.gateway.options import ListenerOptions
from penstock.node.config import Config, load_config
from penstock.node.errors import ConfigError, ListenerExposed
from penstock.node.exposure import check_exposure
from penstock.node.node import Node
from penstock.store.options import HostPort

NAMES = {"here": ["127.0.0.1", "::1"], "plant.example.org": ["127.0.0.1", "192.0.2.7"], "mapped": ["::ffff:127.0.0.1"]}

LISTENERS = {
    "mqtt.listen": ("mqtt.access.anonymous", "The MQTT listener mqtt "),
    "pop.listen": ("pop.anonymous", "The gRPC listener "),
    "admin.listen": ("admin.anonymous", "The admin listener "),
}


@pytest.fixture(autouse=True)
def _names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the names of `NAMES` be known on this machine, and no others."""
    ask = socket.getaddrinfo

    def asked(host: str, port: int, *arguments: Any, **more: Any) -> Any:
        if host not in NAMES and not host[0].isdigit() and ":" not in host:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [found for each in NAMES.get(host, [host]) for found in ask(each, port, *arguments, **more)]

    monkeypatch.setattr("socket.getaddrinfo", asked)


def config_of(**options: Any) -> Config:
    return load_config(None, {name.replace("__", "."): value for name, value in options.items()})


@pytest.mark.parametrize("option", LISTENERS)
@pytest.mark.parametrize(
    "address",
    ["0.0.0.0:1", "0:1", "[::]:1", "192.0.2.7:1", "[::ffff:192.0.2.7]:1", "[::ffff:0.0.0.0]:1", "plant.example.org:1"],
)
def test_a_listener_beyond_loopback_without_authentication_is_refused(option: str, address: str) -> None:
    anonymous, name = LISTENERS[option]
    with pytest.raises(ListenerExposed) as refused:
        check_exposure(load_config(None, {option: address}))
    for part in (name, f"{option} is {address}", "beyond loopback", f'{anonymous} = "always"', "--anonymous"):
        assert part in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1, "the other listeners are on loopback"
    check_exposure(load_config(None, {option: address, anonymous: "always"}))


@pytest.mark.parametrize("option", LISTENERS)
@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "[::ffff:127.0.0.1]:1", "here:1", "mapped:1"])
def test_loopback_needs_no_authentication(option: str, address: str) -> None:
    check_exposure(load_config(None, {option: address}))


def test_all_listeners_that_are_wrong_are_named_at_once() -> None:
    config = load_config(None, dict.fromkeys(LISTENERS, "0.0.0.0:1"))
    with pytest.raises(ListenerExposed) as refused:
        check_exposure(config)
    assert len(str(refused.value).splitlines()) == 3


@pytest.mark.parametrize("kind", ["tcp", "ws"])
def test_each_further_listener_of_mqtt_is_looked_at(kind: Any) -> None:
    config = config_of()
    listener = ListenerOptions(name="far", kind=kind, listen=HostPort("0.0.0.0", 0))
    with pytest.raises(ListenerExposed, match=r"listener far .*mqtt\.listeners, far"):
        check_exposure(replace(config, mqtt=replace(config.mqtt, listeners=(listener,))))


def test_a_unix_socket_is_not_exposed() -> None:
    config = config_of()
    listener = ListenerOptions(name="near", kind="unix", socket="/run/s", listen=HostPort("0.0.0.0", 0))
    check_exposure(replace(config, mqtt=replace(config.mqtt, listeners=(listener,))))


@pytest.mark.parametrize(
    ("option", "given"),
    [
        ("mqtt.listen", {"access.password_file": "passwords"}),
        ("mqtt.listen", {"mqtt.access.plugins": {}}),
        ("mqtt.listen", {"mqtt.access.anonymous": "never"}),
        ("pop.listen", {"access.file": "access.toml"}),
        ("pop.listen", {"pop.client_ca_file": "ca.pem", "pop.certificate_file": "a.pem", "pop.key_file": "a.key"}),
        ("admin.listen", {"access.file": "access.toml"}),
        ("admin.listen", {"access.password_file": "passwords"}),
        ("admin.listen", {"admin.anonymous": "never", "access.file": "access.toml"}),
    ],
)
def test_what_authenticates_callers_opens_a_listener(option: str, given: dict[str, Any]) -> None:
    check_exposure(load_config(None, {option: "0.0.0.0:1", **given}))


def test_a_password_file_does_not_open_grpc_which_it_does_not_protect() -> None:
    with pytest.raises(ListenerExposed, match="gRPC"):
        check_exposure(config_of(pop__listen="0.0.0.0:1", access__password_file="passwords"))


def test_admin_for_nobody_needs_something_that_authenticates() -> None:
    with pytest.raises(ListenerExposed, match=r'admin\.anonymous is "never".*admin\.anonymous = "loopback"'):
        check_exposure(config_of(admin__anonymous="never"))


def test_a_name_that_nobody_knows_is_no_loopback_address() -> None:
    with pytest.raises(ConfigError, match=r"pop\.listen is unknown:1, but .*Name or service not known"):
        check_exposure(config_of(pop__listen="unknown:1"))


async def test_nothing_of_a_node_is_begun_before_the_rule_is_checked(tmp_path: Path) -> None:
    config = load_config(None, {"data_dir": str(tmp_path / "data"), "pop.listen": "0.0.0.0:0"})
    with pytest.raises(ListenerExposed):
        Node(config)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(("pop_ca", "is_told"), [("ca.pem", True), ("", False)])
def test_the_log_says_that_grpc_checks_no_revocation_lists(pop_ca: str, is_told: bool) -> None:
    tls = {"name": "tls", "kind": "tls", "certificate_file": "c", "key_file": "k", "client_certificates": "required"}
    listener = ListenerOptions(**tls, client_ca_file="ca.pem", client_crl_file="crl.pem")  # type: ignore[arg-type]
    config = config_of(pop__client_ca_file=pop_ca, pop__certificate_file="a.pem", pop__key_file="a.key")
    config = replace(config, mqtt=replace(config.mqtt, listeners=(listener,)))
    with structlog.testing.capture_logs() as logs:
        check_exposure(config)
    assert [line["file"] for line in logs if line["event"] == "crl.not_over_grpc"] == (["ca.pem"] if is_told else [])
