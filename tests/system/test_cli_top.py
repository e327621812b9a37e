"""`penstock top` against a running node."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.processes import ROOT, NodeProcess, run_penstock

ONCE = ("--count", "1", "--interval", "100ms")
NAME = "a-group-with-a-long-name-that-the-next-command-needs"


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcess]:
    made = NodeProcess(tmp_path / "data").start()
    yield made
    made.close()


def test_json_has_numbers_and_the_groups(node: NodeProcess) -> None:
    pop = ("--target", node.addresses["pop"])
    for name, count in (("small", 1), (NAME, 3)):
        assert run_penstock("group", "create", name, f"{name}/#", *pop).returncode == 0
        for _ in range(count):
            run_penstock("send", f"{name}/1", "x", *pop)
    ended = run_penstock("top", "--admin", node.addresses["admin"], "--json", *ONCE)
    assert ended.returncode == 0, ended.stderr
    view = json.loads(ended.stdout)
    assert view["ready"] is True
    assert [(group["group"], group["visible"]) for group in view["groups"]] == [(NAME, 3), ("small", 1)]
    assert (view["totals"]["groups"], view["totals"]["visible"]) == (2, 4)
    assert isinstance(view["store"]["disk_free_bytes"], int)
    one = run_penstock("top", "--admin", node.addresses["admin"], "--json", "--groups", "1", *ONCE)
    assert len(json.loads(one.stdout)["groups"]) == 1
    in_a_pipe = run_penstock("top", "--admin", node.addresses["admin"], *ONCE)
    assert f"{NAME}/#" in in_a_pipe.stdout, "no name is cut"


def on_a_terminal(node: NodeProcess, *options: str, columns: int) -> tuple[int, str]:
    """Run the command with a terminal as its output. Return its status, and what it wrote."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "penstock", "top", "--admin", node.addresses["admin"], *options]
    environment = {**os.environ, "COLUMNS": str(columns), "LINES": "40", "TERM": "xterm"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        written = b""
        try:
            while data := os.read(ours, 65_536):
                written += data
        except OSError:
            pass  # Linux says so when the other side has closed the terminal
        finally:
            os.close(ours)
        return process.wait(60), written.decode()


def test_a_terminal_gets_views_in_place_at_any_width(node: NodeProcess) -> None:
    assert run_penstock("group", "create", "g", "plant/#", "--target", node.addresses["pop"]).returncode == 0
    for columns in (200, 80, 40):
        status, written = on_a_terminal(node, "--count", "2", "--interval", "100ms", columns=columns)
        assert status == 0
        assert "Traceback" not in written
        assert "\x1b[?1049h" in written, "on a screen of its own"
        assert "plant/#" in written.rpartition("\x1b[?1049l")[2], "the last view stays on the terminal"


def test_a_terminal_keeps_the_last_view_while_the_node_is_away(node: NodeProcess) -> None:
    assert run_penstock("group", "create", "g", "plant/#", "--target", node.addresses["pop"]).returncode == 0
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "penstock", "top", "--admin", node.addresses["admin"], "--interval", "100ms"]
    environment = {**os.environ, "COLUMNS": "100", "LINES": "40", "TERM": "xterm"}
    written = b""

    def read_until(text: bytes) -> None:
        nonlocal written
        written = b""
        while text not in written:
            written += os.read(ours, 65_536)

    mode = termios.tcgetattr(ours)
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        try:
            read_until(b"plant/#")
            node.kill()
            read_until(b"Trying again.")
            read_until(b"plant/#")
            node.start("--admin", node.addresses["admin"])
            read_until(b"Penstock ")
            os.write(ours, b"q")
            read_until(b"\x1b[?1049l")
            assert process.wait(60) == 0
            assert termios.tcgetattr(ours) == mode
        finally:
            process.kill()
            os.close(ours)
        assert b"Traceback" not in written


def test_where_no_node_answers_it_says_so(node: NodeProcess) -> None:
    ended = run_penstock("top", "--admin", node.addresses["mqtt"], *ONCE)
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1)
    assert "does not answer as the admin listener of a node does" in ended.stderr
    assert node.stop() == 0
    ended = run_penstock("top", "--admin", node.addresses["admin"], *ONCE)
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1)
    assert "No admin listener of a node answers" in ended.stderr


def test_it_needs_the_role_viewer_where_the_node_asks_for_it(tmp_path: Path) -> None:
    (tmp_path / "access.toml").write_text('[[role]]\nname = "viewer"\nusers = ["ann"]\n')
    users = ("--file", str(tmp_path / "passwords"), "--stdin")
    for name in ("ann", "bob"):
        assert run_penstock("user", "add", name, *users, text="open sesame\n").returncode == 0
    (tmp_path / "penstock.toml").write_text(
        f'[admin]\nanonymous = "never"\n[access]\nfile = "{tmp_path}/access.toml"\npassword_file = "{tmp_path}/passwords"\n'
    )
    (tmp_path / "password").write_text("open sesame\n")
    node = NodeProcess(tmp_path / "data").start("--config", str(tmp_path / "penstock.toml"))
    try:
        top = ("top", "--admin", node.addresses["admin"], *ONCE)
        nobody, bob, ann = (
            run_penstock(*top, *login)
            for login in (
                (),
                ("--user", "bob", "--password-file", str(tmp_path / "password")),
                ("--user", "ann", "--password-file", str(tmp_path / "password")),
            )
        )
    finally:
        node.close()
    assert (nobody.returncode, "Give --token-file FILE or --user NAME." in nobody.stderr) == (1, True)
    assert (bob.returncode, "bob has no role viewer or operator or admin" in bob.stderr) == (1, True)
    assert ann.returncode == 0, ann.stderr
