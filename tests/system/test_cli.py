"""The commands of the command line against a running node."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli.main import main
from tests.gateway.packet_cases import connect, subscribe
from tests.system.processes import ROOT, NodeProcess, run_penstock
from tests.waiting import PROCESS_S


@pytest.fixture
def running(node: NodeProcess) -> NodeProcess:
    return node.start()


def _pop(node: NodeProcess, *options: str) -> list[dict[str, object]]:
    ended = run_penstock("pop", "a/#", "--group", "g", "--target", node.addresses["pop"], "--json", *options)
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


def test_pub_reaches_sub(running: NodeProcess) -> None:
    mqtt = running.addresses["mqtt"]
    command = [sys.executable, "-m", "penstock", "sub", "a/+", "--mqtt", mqtt, "--count", "2", "--json"]
    # The messages are retained, so the order of subscription and messages does not matter.
    for topic in ("a/1", "a/2"):
        assert run_penstock("pub", topic, f"body of {topic}", "--retain", "--mqtt", mqtt).returncode == 0
    seen = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PROCESS_S, check=True)
    assert [json.loads(line) for line in seen.stdout.splitlines()] == [
        {"topic": "a/1", "body": "body of a/1"},
        {"topic": "a/2", "body": "body of a/2"},
    ]


def test_pop_without_ack_comes_back_and_with_ack_does_not(running: NodeProcess) -> None:
    assert run_penstock("pub", "a/b", "job", "--mqtt", running.addresses["mqtt"]).returncode == 0
    (first,) = _pop(running, "--no-ack", "--invisible", "100ms")
    (second,) = _pop(running, "--wait", "5s")
    assert (first["attempt"], second["attempt"]) == (1, 2)
    assert _pop(running) == []


def test_closed_standard_streams_become_the_null_device(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    script = (
        "import os, sys; from penstock.cli.main import main\n"
        "status = main(['pub', 'a', '-'])\n"
        "names = [os.readlink(f'/proc/self/fd/{number}') for number in range(3)]\n"
        f"open({str(seen)!r}, 'w').write(f'{{status}} {{names}} {{sys.stdout.fileno()}} {{sys.stderr.fileno()}}')"
    )
    closing = ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash", sys.executable, "-c", script]
    assert subprocess.run(closing, cwd=ROOT, timeout=PROCESS_S, check=False).returncode == 0
    assert seen.read_text() == "1 ['/dev/null', '/dev/null', '/dev/null'] 1 2"


@pytest.mark.parametrize("command", [["pub", "a", "-"], ["send", "a", "-"], ["pop", "a", "--group", "g", "--ask"]])
def test_a_closed_standard_input_is_refused_before_anything_is_sent(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main(command) == 1
    assert f"penstock {command[0]}: standard input is closed: " in capsys.readouterr().err


def test_a_delayed_message_can_be_recalled_once(running: NodeProcess) -> None:
    pop = running.addresses["pop"]
    sent = run_penstock("send", "a/later", "body", "--delay", "10min", "--target", pop, "--json")
    handle = json.loads(sent.stdout)["recall_handle"]
    assert run_penstock("timer", "cancel", handle, "--target", pop).returncode == 0
    again = run_penstock("timer", "cancel", handle, "--target", pop)
    assert again.returncode == 1
    assert "recalled before" in again.stderr
    assert _pop(running) == []


def test_inspect_log_selects_on_a_live_directory(running: NodeProcess) -> None:
    mqtt = running.addresses["mqtt"]
    for topic in ("a/1", "b/1", "a/2"):
        assert run_penstock("pub", topic, topic, "--mqtt", mqtt).returncode == 0
    _pop(running, "--count", "10")
    data = ["--data-dir", str(running.data_dir)]
    rows = [json.loads(line) for line in run_penstock("inspect", "log", *data, "--json").stdout.splitlines()]
    kinds = [row["kind"] for row in rows]
    assert kinds.count("message") == 3
    assert {"queue_declared", "group_created", "pop_checkpoint", "pop_ack"} <= set(kinds)
    checkpoint = next(row for row in rows if row["kind"] == "pop_checkpoint")
    assert [entry["attempt"] for entry in checkpoint["entries"]] == [1, 1]
    messages = run_penstock("inspect", "log", *data, "--kind", "message", "--topic", "a/+", "--json").stdout.splitlines()
    assert [json.loads(line)["body"] for line in messages] == ["a/1", "a/2"]
    later = run_penstock("inspect", "log", *data, "--from", str(rows[2]["position"]), "--limit", "1", "--json").stdout
    assert json.loads(later)["position"] == rows[2]["position"]
    assert "pop_checkpoint" in run_penstock("inspect", "log", *data).stdout


def test_inspect_log_names_a_damaged_record(running: NodeProcess) -> None:
    assert run_penstock("pub", "a/1", "x" * 100, "--mqtt", running.addresses["mqtt"]).returncode == 0
    assert running.stop() == 0
    (segment,) = (running.data_dir / "commitlog").iterdir()
    base = Path(segment.parent, f"{10**6:020d}.log")
    base.write_bytes(b"")  # the damaged segment is no longer the last one, so the damage is not a torn tail
    with segment.open("r+b") as file:
        file.truncate(10**6)
        file.seek(file.read().index(b"x" * 100))
        file.write(b"y")
    ended = run_penstock("inspect", "log", "--data-dir", str(running.data_dir))
    assert ended.returncode == 1
    assert segment.name in ended.stderr


def test_repair_makes_a_damaged_log_start_again(running: NodeProcess) -> None:
    mqtt, data = running.addresses["mqtt"], ["--data-dir", str(running.data_dir)]
    for body in ("first", "x" * 100, "third"):
        assert run_penstock("pub", "a/1", body, "--mqtt", mqtt).returncode == 0
    refused = run_penstock("repair", *data)
    assert (refused.returncode, "in use" in refused.stderr) == (1, True)
    assert running.stop() == 0
    (segment,) = (running.data_dir / "commitlog").iterdir()
    with segment.open("r+b") as file:
        file.seek(file.read(10**6).index(b"x" * 100))
        file.write(b"y")
    looked = run_penstock("repair", *data, "--dry-run", "--json")
    assert looked.returncode == 1
    (damage,) = json.loads(looked.stdout)["damages"]
    assert (damage["segment"], damage["records_behind"]) == (segment.name, 1)
    assert not (running.data_dir / "damaged").exists()
    repaired = run_penstock("repair", *data)
    assert repaired.returncode == 0, repaired.stderr
    assert damage["copy"] in repaired.stdout
    assert (running.data_dir / damage["copy"]).stat().st_size == damage["length"]
    assert "There is no damage" in run_penstock("repair", *data).stdout
    rows = run_penstock("inspect", "log", *data, "--kind", "damaged", "--json").stdout.splitlines()
    assert [json.loads(row)["position"] for row in rows] == [damage["position"]]
    assert [message["body"] for message in _pop(running.start(), "--count", "10")] == ["first", "third"]


def test_inspect_queues_on_a_live_and_a_stopped_directory(running: NodeProcess) -> None:
    data = ["--data-dir", str(running.data_dir)]
    for topic in ("a/1", "a/2"):
        assert run_penstock("pub", topic, topic, "--mqtt", running.addresses["mqtt"]).returncode == 0
    live = run_penstock("inspect", "queues", *data)
    assert live.returncode == 0 or "not flushed yet" in live.stderr, live.stderr
    _pop(running, "--count", "10")
    assert running.stop() == 0
    found = run_penstock("inspect", "queues", *data, "--filter", "a/#", "--json").stdout.splitlines()
    (row,) = map(json.loads, found)
    assert (row["start"], row["first_offset"], row["next_offset"], row["entries"], row["backfilling"]) == (
        "latest",
        0,
        2,
        2,
        None,
    )
    assert {"root", "group:1"} <= set(row["owners"])
    assert len(run_penstock("inspect", "queues", *data, "--json", "--limit", "1").stdout.splitlines()) == 1
    assert "$retry/1" in run_penstock("inspect", "queues", *data).stdout
    running.start()
    assert "a/#" in run_penstock("inspect", "queues", *data).stdout


def test_inspect_sessions_on_a_live_and_a_stopped_directory(running: NodeProcess) -> None:
    data = ["--data-dir", str(running.data_dir)]
    for name in ("pump-1", "pump-2"):
        with socket.create_connection(("127.0.0.1", running.port("mqtt"))) as client:
            client.sendall(connect(0, name.encode()) + subscribe(1, (b"a/+", 1)))
            assert client.recv(4) == b"\x20\2\0\0"
            assert client.recv(5) == b"\x90\3\0\1\1"
    for topic in ("a/1", "a/2"):
        assert run_penstock("pub", topic, topic, "--mqtt", running.addresses["mqtt"]).returncode == 0
    live = run_penstock("inspect", "sessions", *data)
    assert live.returncode == 0 or "not flushed yet" in live.stderr, live.stderr
    assert running.stop() == 0
    (row,) = map(json.loads, run_penstock("inspect", "sessions", *data, "--client", "pump-2", "--json").stdout.splitlines())
    assert (row["client"], row["connected"], row["queued"], row["in_flight"], row["has_will"]) == ("pump-2", False, 2, 0, False)
    assert [(one["filter"], one["qos"], one["queued"]) for one in row["subscriptions"]] == [("a/+", 1, 2)]
    assert len(run_penstock("inspect", "sessions", *data, "--json", "--limit", "1").stdout.splitlines()) == 1
    table = run_penstock("inspect", "sessions", *data).stdout
    assert "pump-1" in table
    assert "a/+ (1)" in table
    offsets = run_penstock("inspect", "log", *data, "--kind", "session_subscribed", "--json").stdout.splitlines()
    assert [json.loads(line)["topic"] for line in offsets] == ["pump-1", "pump-2"]


def test_inspect_queues_without_an_index_is_an_error(tmp_path: Path) -> None:
    ended = run_penstock("inspect", "queues", "--data-dir", str(tmp_path))
    assert ended.returncode == 1
    assert "holds no index" in ended.stderr
