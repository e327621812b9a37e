"""The TLS configurations of README and docs, started as they are: certificates, users, a publish over each listener.

Only ports change, to free ones, and files are made as the documents say.
"""

from __future__ import annotations

import queue
import re
import ssl
import subprocess
import sys
from pathlib import Path

import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion

from tests.gateway.certificates import Authority
from tests.system.processes import ROOT, NodeProcess

WAIT_S = 30


def blocks(page: str) -> list[str]:
    """Return the blocks of TOML in a page."""
    return re.findall(r"^```toml\n(.*?)^```$", (ROOT / page).read_text("utf-8"), re.MULTILINE | re.DOTALL)


def on_free_ports(config: str) -> str:
    """Return a configuration with the port 0 in place of others."""
    changed, count = re.subn(r'^(listen = "[\d.]+):\d+"', r'\1:0"', config, flags=re.MULTILINE)
    assert count, "the configuration names no port"
    return changed


def add_user(directory: Path, name: str, password: str) -> None:
    command = [sys.executable, "-m", "penstock", "user", "add", name, "--stdin", "--file", str(directory / "passwords")]
    subprocess.run(command, cwd=ROOT, input=f"{password}\n", text=True, check=True, capture_output=True, timeout=WAIT_S)


class TlsDevice:
    """A device of another project's client that publishes at QoS 1 over TLS."""

    def __init__(self, port: int, user: str, password: str | None, context: ssl.SSLContext, transport: str = "tcp") -> None:
        self.codes: queue.Queue[int] = queue.Queue()
        self.acks: queue.Queue[int] = queue.Queue()
        client = self.client = paho.Client(
            CallbackAPIVersion.VERSION2,
            client_id=f"{user}-1",
            protocol=paho.MQTTv5,
            transport=transport,  # type: ignore[arg-type]
        )
        client.username_pw_set(user, password)
        client.tls_set_context(context)
        if transport == "websockets":
            client.ws_set_options(path="/mqtt", headers={"Origin": "https://dashboard.example.org"})
        client.on_connect = lambda *found: self.codes.put(found[3].value)
        client.on_publish = lambda *found: self.acks.put(found[3].value)
        client.connect("localhost", port)
        client.loop_start()

    def published(self, topic: str) -> int:
        """Publish; return the reason of the PUBACK."""
        assert self.codes.get(timeout=WAIT_S) == 0
        self.client.publish(topic, b"71.5", qos=1)
        return self.acks.get(timeout=WAIT_S)

    def close(self) -> None:
        self.client.disconnect()
        self.client.loop_stop()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "tls")


def test_the_configuration_of_the_readme_serves_tls(tmp_path: Path, node: NodeProcess, authority: Authority) -> None:
    rules, config = (
        next(each for each in blocks("README.md") if begins in each) for begins in ("[[rule]]", "[[mqtt.listeners]]")
    )
    (tmp_path / "access.toml").write_text(rules)
    (tmp_path / "access.toml").chmod(0o600)
    (tmp_path / "penstock.toml").write_text(on_free_ports(config))
    for name in ("server.pem", "server.key"):
        (tmp_path / name).write_bytes((tmp_path / "tls" / name).read_bytes())
    add_user(tmp_path, "sensor-7", "s3cret")
    node.start("--config", "penstock.toml", directory=tmp_path)
    device = TlsDevice(node.port("mqtt.tls"), "sensor-7", "s3cret", authority.context())
    assert device.published("plant/sensor-7/t") == 0
    device.close()
    other = TlsDevice(node.port("mqtt.tls"), "sensor-7", "wrong", authority.context())
    assert other.codes.get(timeout=WAIT_S) == 0x86
    other.close()
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
