"""`penstock serve` as a process: its ready line, its end, and its errors at the start."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from penstock import OutgoingMessage, SyncClient
from tests.system.processes import NodeProcess, run_penstock
from tests.waiting import PROCESS_S

run_anew = partial(run_penstock, anew=True)


@pytest.fixture
def node_anew(tmp_path: Path) -> Iterator[NodeProcess]:
    process = NodeProcess(tmp_path / "data", anew=True)
    yield process
    process.close()


def _get(node: NodeProcess, path: str) -> tuple[int, bytes]:
    with urllib.request.urlopen(f"http://{node.addresses['admin']}{path}", timeout=PROCESS_S) as answer:
        return answer.status, answer.read()


def test_the_ready_line_names_the_addresses_really_listened_on(node_anew: NodeProcess) -> None:
    node_anew.start()
    assert set(node_anew.addresses) == {"mqtt", "pop", "admin", "data"}
    assert all(node_anew.port(name) > 0 for name in ("mqtt", "pop", "admin"))
    assert node_anew.addresses["data"] == str(node_anew.data_dir)
    assert _get(node_anew, "/readyz")[0] == 200
    assert b"penstock_messages_stored_total 0.0" in _get(node_anew, "/metrics")[1]


def test_sigterm_ends_a_node_in_order_and_it_starts_again_where_it_was(node_anew: NodeProcess) -> None:
    node_anew.start()
    address = node_anew.addresses["mqtt"]
    assert run_anew("pub", "a/b", "kept", "--mqtt", address).returncode == 0
    assert node_anew.stop() == 0
    node_anew.start()
    state = json.loads(_get(node_anew, "/api/v1/state")[1])
    assert state["log"]["replayed_at_start"] == 0, "an orderly end leaves nothing to replay"
    popped = run_anew("pop", "a/#", "--group", "g", "--target", node_anew.addresses["pop"], "--json")
    assert json.loads(popped.stdout)["body"] == "kept"


def test_a_supervisor_is_told_of_start_reload_and_end(node: NodeProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(f"\0penstock-{os.getpid()}")
        heard.settimeout(PROCESS_S)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@penstock-{os.getpid()}")
        monkeypatch.setenv("WATCHDOG_USEC", "100000")

        def next_but_pings() -> list[str]:
            while (said := heard.recv(1000).decode().split("\n")) == ["WATCHDOG=1"]:
                pass
            return said

        node.start()
        assert next_but_pings() == ["STATUS=recovers log and index"]
        assert next_but_pings()[:2] == ["READY=1", "STATUS=serves clients"]
        assert [heard.recv(1000) for _ in range(2)] == [b"WATCHDOG=1"] * 2
        node.signal(signal.SIGHUP)
        assert next_but_pings()[0] == "RELOADING=1"
        assert next_but_pings()[0] == "READY=1"
        assert node.stop() == 0
        assert next_but_pings()[0] == "STOPPING=1"


def test_a_node_that_is_killed_has_what_it_acknowledged_and_hands_out_only_the_rest(node: NodeProcess) -> None:
    bodies = [b"%d" % number for number in range(500)]
    node.start()
    with SyncClient(node.addresses["pop"]) as client:
        client.send_batch([OutgoingMessage(topic="plant/1", body=body) for body in bodies])
        popped = client.pop("plant/#", group="g", start="earliest", messages_max=100)
        client.ack([message.handle for message in popped], group="g")
    node.kill()
    node.start()
    acked = [message.body for message in popped]
    with SyncClient(node.addresses["pop"]) as client:
        rest = client.pop("plant/#", group="g", messages_max=1_000)
        everything = client.pop("plant/#", group="other", start="earliest", messages_max=1_000)
    assert acked + [message.body for message in rest] == bodies
    assert [message.body for message in everything] == bodies


def test_a_second_node_on_one_data_directory_is_refused(node: NodeProcess) -> None:
    node.start()
    second = run_penstock("serve", "--data-dir", str(node.data_dir), "--mqtt", "127.0.0.1:0")
    assert second.returncode == 1
    assert str(node.data_dir) in second.stderr
    assert "ready" not in second.stdout
    assert _get(node, "/healthz")[0] == 200


@pytest.mark.parametrize("listener", ["mqtt", "pop", "admin"])
def test_a_port_in_use_is_named(node: NodeProcess, tmp_path: Path, listener: str) -> None:
    node.start()
    listeners = {"mqtt": "127.0.0.1:0", "pop": "127.0.0.1:0", "admin": "127.0.0.1:0", listener: node.addresses["mqtt"]}
    flags = [word for name, address in listeners.items() for word in (f"--{name}", address)]
    second = run_penstock("serve", "--data-dir", str(tmp_path / "other"), *flags)
    assert second.returncode == 1
    assert node.addresses["mqtt"] in second.stderr
    assert second.stderr.count("Traceback") == 0


def test_an_unknown_option_names_the_nearest_known_one(tmp_path: Path) -> None:
    config = tmp_path / "penstock.toml"
    config.write_text("[mqtt]\nconnections_mux = 10\n")
    ended = run_penstock("serve", "--config", str(config), "--data-dir", str(tmp_path / "data"))
    assert ended.returncode == 2
    assert "connections_mux" in ended.stderr
    assert "connections_max" in ended.stderr
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["serve", "--mqtt", "127.0.0.1"], "127.0.0.1"),
        (["serve", "--mqtt", "127.0.0.1:70000"], "70000"),
        (["inspect", "log", "--data-dir", "/nonexistent"], "holds no CommitLog"),
        (["pub", "a", "b", "--mqtt", "127.0.0.1:1"], "pub"),
        (["nonsense"], "invalid choice"),
    ],
)
def test_wrong_calls_are_one_clear_line(arguments: list[str], expected: str) -> None:
    ended = run_anew(*arguments)
    assert ended.returncode in (1, 2)
    assert expected in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_node_opens_nothing_to_strangers_unless_it_is_told_to(node: NodeProcess) -> None:
    everywhere = [word for name in ("mqtt", "pop", "admin") for word in (f"--{name}", "0.0.0.0:0")]
    ended = run_penstock("serve", "--data-dir", str(node.data_dir), *everywhere)
    assert ended.returncode == 2
    for name in ("The MQTT listener mqtt", "The gRPC listener", "The admin listener"):
        assert f"{name} would serve everybody who reaches it" in ended.stderr
    assert not node.data_dir.exists()
    node.start(*everywhere, "--anonymous")
    assert _get(node, "/api/v1/state")[0] == 200
    assert node.log.read_text().count("listener.open_to_everybody") == 3


def test_print_config_is_a_file_that_serve_reads(node: NodeProcess, tmp_path: Path) -> None:
    config = tmp_path / "penstock.toml"
    config.write_text(run_anew("serve", "--print-config").stdout)
    node.start("--config", str(config))


def test_mosquittos_own_tools_work(node: NodeProcess) -> None:
    if not shutil.which("mosquitto_pub"):
        pytest.skip("mosquitto's tools are not installed (apt-get install mosquitto-clients)")
    node.start()
    port = str(node.port("mqtt"))
    publish = ["mosquitto_pub", "-p", port, "-q", "1", "-r"]
    subprocess.run([*publish, "-t", "home/kitchen/light", "-m", "on"], check=True, timeout=PROCESS_S)
    subprocess.run([*publish, "-t", "home/hall/light", "-m", "off"], check=True, timeout=PROCESS_S)
    seen = subprocess.run(
        ["mosquitto_sub", "-p", port, "-t", "home/+/light", "-q", "1", "-v", "-C", "2", "-W", "20"],
        check=True,
        timeout=PROCESS_S,
        capture_output=True,
        text=True,
    )
    assert sorted(seen.stdout.splitlines()) == ["home/hall/light off", "home/kitchen/light on"]
