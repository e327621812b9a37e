"""The TLS configurations of README and docs, started and used as they are: certificates, users, devices, services.

Only ports change, to free ones. Files are made by the commands that the documents have.
"""

from __future__ import annotations

import os
import queue
import re
import shutil
import ssl
import subprocess
import sys
from pathlib import Path

import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion

from penstock import NotAuthenticated, NotPermitted, Security, SyncClient
from penstock.gateway.protocol.reasons import ReasonCode
from tests.gateway.certificates import Authority
from tests.system.processes import ROOT, NodeProcess

WAIT_S = 90
LET_OTHERS_IN = (ROOT / "README.md").read_text("utf-8").partition("## Let others in")[2].partition("\n## ")[0]
PASSWORDS = {"sensor-7": "s3cret", "kiosk-1": "s3same"}

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="the documents use openssl: apt-get install openssl")
needs_mosquitto = pytest.mark.skipif(
    shutil.which("mosquitto_pub") is None, reason="README.md uses its clients: apt-get install mosquitto-clients"
)


def blocks(language: str) -> list[str]:
    """Return the blocks of a language in the section of README about networks."""
    return re.findall(rf"^```{language}\n(.*?)^```$", LET_OTHERS_IN, re.MULTILINE | re.DOTALL)


def shell(commands: str, directory: Path, **variables: str) -> str:
    """Run commands of a document; return what they print."""
    found = subprocess.run(
        ["sh", "-e", "-c", commands],
        cwd=directory,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


def on_free_ports(config: str) -> str:
    """Return a configuration with the port 0 in place of others."""
    changed, count = re.subn(r'^(listen = "[\d.]+):\d+"', r'\1:0"', config, flags=re.MULTILINE)
    assert count, "the configuration names no port"
    return changed


def add_user(directory: Path, name: str, password: str) -> None:
    command = [sys.executable, "-m", "penstock", "user", "add", name, "--stdin", "--file", str(directory / "passwords")]
    subprocess.run(command, cwd=ROOT, input=f"{password}\n", text=True, check=True, capture_output=True, timeout=WAIT_S)


class TlsDevice:
    """A device of another project's client that publishes at QoS 1, over TLS if there is a context."""

    def __init__(
        self, port: int, user: str, password: str | None, context: ssl.SSLContext | None, transport: str = "tcp"
    ) -> None:
        self.codes: queue.Queue[int] = queue.Queue()
        self.acks: queue.Queue[int] = queue.Queue()
        client = self.client = paho.Client(
            CallbackAPIVersion.VERSION2,
            client_id=f"{user}-1",
            protocol=paho.MQTTv5,
            transport=transport,  # type: ignore[arg-type]
        )
        client.username_pw_set(user, password)
        if context is not None:
            client.tls_set_context(context)
        if transport == "websockets":
            client.ws_set_options(path="/mqtt", headers={"Origin": "https://dashboard.example.org"})
        client.on_connect = lambda *found: self.codes.put(found[3].value)
        client.on_publish = lambda *found: self.acks.put(found[3].value)
        client.connect("localhost", port)
        client.loop_start()

    def connected(self) -> int:
        """Return the reason of the CONNACK. Paho connects again to a server that was too busy to check a password."""
        code: int = ReasonCode.SERVER_BUSY
        while code == ReasonCode.SERVER_BUSY:
            code = self.codes.get(timeout=WAIT_S)
        return code

    def published(self, topic: str) -> int:
        """Publish; return the reason of the PUBACK."""
        assert self.connected() == 0
        self.client.publish(topic, b"71.5", qos=1)
        return self.acks.get(timeout=WAIT_S)

    def close(self) -> None:
        self.client.disconnect()
        self.client.loop_stop()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "tls")


@pytest.fixture
def node_of_the_readme(tmp_path: Path, node: NodeProcess) -> NodeProcess:
    rules, config = blocks("toml")
    (tmp_path / "access.toml").write_text(rules)
    (tmp_path / "penstock.toml").write_text(on_free_ports(config))
    openssl, serve = blocks("sh")[0].split("penstock ")
    for user, password in PASSWORDS.items():
        add_user(tmp_path, user, password)
    shell(openssl, tmp_path)
    command, *options = serve.split()
    assert command == "serve"
    return node.start(*options, directory=tmp_path)


@needs_openssl
def test_the_readme_leads_to_a_node_with_tls_users_and_rules(tmp_path: Path, node_of_the_readme: NodeProcess) -> None:
    node, context = node_of_the_readme, ssl.create_default_context(cafile=tmp_path / "server.pem")
    device = TlsDevice(node.port("mqtt.tls"), "sensor-7", PASSWORDS["sensor-7"], context)
    assert device.published("plant/sensor-7/press/temperature") == 0
    device.client.publish("plant/sensor-8/press/temperature", b"forged", qos=1)
    assert device.acks.get(timeout=WAIT_S) == 0x87
    device.close()
    for listener, password, reason in (("mqtt.tls", "wrong", 0x86), ("mqtt.tls", None, 0x86), ("mqtt", None, 0x86)):
        other = TlsDevice(node.port(listener), "sensor-7", password, context if listener == "mqtt.tls" else None)
        assert other.connected() == reason, listener
        other.close()
    with SyncClient(node.addresses["pop"], security=Security(token="s3cret")) as billing:
        (message,) = billing.pop("plant/+/+/temperature", group="billing", wait=5.0)
        assert message.body == b"71.5"
        message.ack()
        with pytest.raises(NotPermitted):
            billing.send("plant/sensor-7/press/temperature", b"forged")
        with pytest.raises(NotPermitted):
            billing.pop("#", group="billing")
    with SyncClient(node.addresses["pop"]) as stranger, pytest.raises(NotAuthenticated):
        stranger.pop("plant/+/+/temperature", group="billing")
    assert node.stop() == 0


@needs_openssl
@needs_mosquitto
def test_the_commands_of_the_readme_lead_from_a_device_to_a_service(tmp_path: Path, node_of_the_readme: NodeProcess) -> None:
    node = node_of_the_readme
    (service,) = blocks("python")
    assert "127.0.0.1:8081" in service
    command = [sys.executable, "-u", "-c", service.replace("127.0.0.1:8081", node.addresses["pop"])]
    devices = blocks("sh")[1]
    assert devices.count("-p 8883") == 2
    kiosk, sensor = devices.replace("-p 8883", f"-p {node.port('mqtt.tls')}").replace(" &", "").strip().splitlines()
    passwords = {"KIOSK_PASSWORD": PASSWORDS["kiosk-1"], "SENSOR_PASSWORD": PASSWORDS["sensor-7"]}
    shell(f"{sensor} --retain", tmp_path, **passwords)  # What is retained waits for a kiosk that comes later.
    assert shell(f"{kiosk} -C 1 -W {WAIT_S}", tmp_path, **passwords) == "plant/sensor-7/press/temperature 71.5\n"
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as billing:
        assert billing.stdout is not None
        assert billing.stdout.readline() == "plant/sensor-7/press/temperature b'71.5'\n"
        billing.terminate()
    assert node.stop() == 0


def test_the_example_configuration_serves_each_of_its_listeners(
    tmp_path: Path, node: NodeProcess, authority: Authority
) -> None:
    (tmp_path / "penstock.toml").write_text(on_free_ports((ROOT / "docs" / "penstock.toml").read_text("utf-8")))
    (tmp_path / "access.toml").write_bytes((ROOT / "docs" / "access.toml").read_bytes())
    (tmp_path / "access.toml").chmod(0o600)
    (tmp_path / "tls" / "devices-ca.pem").write_bytes(authority.file.read_bytes())
    add_user(tmp_path, "sensor-7", "s3cret")
    add_user(tmp_path, "sensor-8", "s3cret")
    node.start("--config", "penstock.toml", directory=tmp_path)
    certificate = authority.issue_client("sensor-9", common_name="sensor-9")
    for listener, user, password, context, transport in (
        ("devices", "sensor-9", None, authority.context(certificate), "tcp"),
        ("tls", "sensor-7", "s3cret", authority.context(), "tcp"),
        ("web", "sensor-8", "s3cret", authority.context(), "websockets"),
    ):
        device = TlsDevice(node.port(f"mqtt.{listener}"), user, password, context, transport)
        assert device.published(f"plant/{user}/t") == 0, listener
        device.client.publish("plant/somebody-else/t", b"", qos=1)
        assert device.acks.get(timeout=WAIT_S) == 0x87, "the rules of the example hold"
        device.close()
    assert node.stop() == 0


@needs_openssl
def test_the_commands_of_the_example_make_its_certificates(tmp_path: Path, node: NodeProcess) -> None:
    example = (ROOT / "docs" / "penstock.toml").read_text("utf-8")
    header = example[: example.index("\ndata_dir")]
    lines = [line.removeprefix("#").strip() for line in header.splitlines() if line.startswith("#     ")]
    begins = ("mkdir", "openssl", "-addext", "-keyout", "-out")
    shell("\n".join(line for line in lines if line.startswith(begins)), tmp_path)
    (tmp_path / "penstock.toml").write_text(on_free_ports(example))
    (tmp_path / "access.toml").write_bytes((ROOT / "docs" / "access.toml").read_bytes())
    add_user(tmp_path, "kiosk-1", "s3cret")
    node.start("--config", "penstock.toml", directory=tmp_path)
    context = ssl.create_default_context(cafile=tmp_path / "tls" / "server.pem")
    context.load_cert_chain(tmp_path / "sensor-7.pem", tmp_path / "sensor-7.key")
    device = TlsDevice(node.port("mqtt.devices"), "sensor-7", None, context)
    assert device.published("plant/sensor-7/temperature") == 0
    device.close()
    assert node.stop() == 0
