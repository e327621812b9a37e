"""The guide Access control, followed by a newcomer: its example file as it is, users, a reload and a ban on a real node."""

from __future__ import annotations

import json
import queue
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import paho.mqtt.client as paho
import pytest
from argon2 import PasswordHasher
from paho.mqtt.enums import CallbackAPIVersion

from penstock import Security, SyncClient
from penstock.pop.errors import NotPermitted
from tests.system.processes import ROOT, NodeProcess, run_penstock

CONFIG = """
[access]
file = "access.toml"
password_file = "passwords"
audit_file = "audit.jsonl"
"""
WAIT_S = 90
BUSY = 0x89


class Device:
    """A device that logs in. `codes` gets the reason of its CONNACK, and -1 when it is disconnected."""

    def __init__(self, node: NodeProcess, user: str, password: str) -> None:
        self.codes: queue.Queue[int] = queue.Queue()
        self.granted: queue.Queue[int] = queue.Queue()
        self.bodies: queue.Queue[bytes] = queue.Queue()
        client = self.client = paho.Client(CallbackAPIVersion.VERSION2, client_id=user, protocol=paho.MQTTv5)
        client.username_pw_set(user, password)
        client.on_connect = lambda *found: self.codes.put(found[3].value)
        client.on_disconnect = lambda *found: self.codes.put(-1)
        client.on_subscribe = lambda *found: self.granted.put(found[3][0].value)
        client.on_message = lambda *found: self.bodies.put(found[2].payload)
        client.connect("127.0.0.1", node.port("mqtt"))
        client.loop_start()

    def logged_in(self) -> int:
        """Return the reason of the CONNACK. The client comes again by itself when the server is busy with other processes."""
        while (code := self.codes.get(timeout=WAIT_S)) in (BUSY, -1):
            pass
        return code

    def subscribe(self, topic_filter: str) -> int:
        self.client.subscribe(topic_filter, 1)
        return self.granted.get(timeout=WAIT_S)

    def close(self) -> None:
        self.client.loop_stop()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "docs" / "access.toml", tmp_path)
    (tmp_path / "penstock.toml").write_text(CONFIG)
    for user in ("sensor-7", "kiosk-1"):
        command = [sys.executable, "-m", "penstock", "user", "add", user, "--stdin", "--file", str(tmp_path / "passwords")]
        subprocess.run(command, cwd=ROOT, input=f"password of {user}\n", text=True, check=True, timeout=WAIT_S)
    return tmp_path


@pytest.mark.slow  # a process, password hashes and a client with threads of its own
def test_the_guide_leads_to_a_node_that_does_what_it_says(folder: Path, node: NodeProcess) -> None:
    data = str(node.data_dir)
    node.start("--config", str(folder / "penstock.toml"), directory=folder)
    stranger = Device(node, "sensor-7", "wrong")
    assert stranger.logged_in() == 0x86
    stranger.close()
    sensor, kiosk = (Device(node, user, f"password of {user}") for user in ("sensor-7", "kiosk-1"))
    assert [device.logged_in() for device in (sensor, kiosk)] == [0, 0]
    assert [kiosk.subscribe(asked) for asked in ("plant/#", "hr/#", "#")] == [1, 0x87, 0x87]
    assert sensor.subscribe("commands/sensor-7/#") == 1
    for topic in ("plant/sensor-8/t", "plant/sensor-7/t"):
        sensor.client.publish(topic, topic, qos=1).wait_for_publish(WAIT_S)
    assert kiosk.bodies.get(timeout=WAIT_S) == b"plant/sensor-7/t"

    with SyncClient(node.addresses["pop"], security=Security(token="s3cret")) as billing:
        billing.send("invoices/1", b"x")
        with pytest.raises(NotPermitted):
            billing.pop("hr/#", group="billing")

    asked = run_penstock("access", "test", "kiosk-1", "subscribe", "hr/#", "--data-dir", data)
    assert (asked.returncode, asked.stdout.startswith("denied  subscribe: no rule")) == (1, True)
    path = folder / "access.toml"
    path.write_text(path.read_text().replace('read = ["plant/#"]', 'read = ["plant/sensor-7/#"]'))
    node.signal(signal.SIGHUP)
    assert kiosk.codes.get(timeout=WAIT_S) == -1  # it may no longer have plant/#
    path.write_text("[[rule]]")
    refused = run_penstock("access", "reload", "--data-dir", data)
    assert (refused.returncode, "rule 1: give either allow or deny" in refused.stderr) == (1, True)

    assert run_penstock("access", "ban", "user", "sensor-7", "--for", "1h", "--data-dir", data).returncode == 0
    assert sensor.codes.get(timeout=WAIT_S) == -1
    assert sensor.codes.get(timeout=WAIT_S) == 0x8A  # paho tries again
    for device in (sensor, kiosk):
        device.close()

    lines = [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]
    seen = {(line["event"], line.get("user"), line.get("what") or line.get("topic")) for line in lines}
    assert {
        ("connected", "sensor-7", None),
        ("denied", "kiosk-1", "hr/#"),
        ("denied", "sensor-7", "plant/sensor-8/t"),
        ("changed", "SIGHUP", "reload"),
        ("failed", "control socket", "reload"),
        ("changed", "control socket", "ban"),
    } <= seen


@pytest.mark.slow
def test_a_file_that_is_not_valid_keeps_a_node_from_starting(folder: Path, tmp_path: Path) -> None:
    (folder / "access.toml").write_text('[[rule]]\nallow = "fly"\n')
    command = [sys.executable, "-m", "penstock", "serve", "--config", "penstock.toml", "--data-dir", str(tmp_path / "data")]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert ended.returncode == 1
    assert "rule 1: allow has 'fly'" in ended.stderr


@pytest.mark.slow  # a process, and one for each command
def test_pub_and_sub_log_in_with_a_password_that_is_no_argument(
    tmp_path: Path, node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    user, password = "ann/@ü", "p@ss:/%41 word"
    hasher = PasswordHasher(time_cost=1, memory_cost=64, parallelism=1)
    (tmp_path / "passwords").write_text(f"{user}:{hasher.hash(password)}\n")
    (tmp_path / "secret").write_text(password + "\n")
    config = tmp_path / "penstock.toml"
    config.write_text('[mqtt.access]\nanonymous = "never"\n[access]\npassword_file = "passwords"\n')
    node.start("--config", str(config), directory=tmp_path)
    to = ("--mqtt", node.addresses["mqtt"])
    by_file = ("--user", user, "--password-file", str(tmp_path / "secret"))
    assert run_penstock("pub", "a", "body", "--retain", *to, *by_file).returncode == 0
    monkeypatch.setenv("PENSTOCK_PASSWORD", password)
    seen = run_penstock("sub", "a", "--count", "1", "--json", "--user", user, *to)
    assert json.loads(seen.stdout) == {"topic": "a", "body": "body"}
    monkeypatch.setenv("PENSTOCK_PASSWORD", "wrong")
    wrong = run_penstock("pub", "a", "body", "--user", user, *to)
    assert (wrong.returncode, "the user name or the password is not right" in wrong.stderr) == (1, True)
    nobody = run_penstock("pub", "a", "body", *to)
    assert (nobody.returncode, "give --user NAME" in nobody.stderr) == (1, True)
