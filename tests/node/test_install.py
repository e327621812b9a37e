"""Hints on how to install an extra name a source that works, and reach the terminal as they are."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from penstock.cli.main import EXTRAS
from penstock.install import install_hint
from tests.system.processes import ROOT
from tests.waiting import PROCESS_S

HIDE = """
import sys
sys.modules |= dict.fromkeys(sys.argv.pop(1).split())
from penstock.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_hint_names_a_checkout_and_the_extra() -> None:
    assert install_hint("spark") == "run pip install '.[spark]' in a checkout of Penstock"


def test_no_other_module_says_how_to_install_penstock() -> None:
    found = [
        str(path.relative_to(ROOT))
        for folder in ("gateway", "pop", "store", "timer", "spark", "penstock", "tests", "bench", "examples")
        for path in (ROOT / folder).rglob("*.py")
        if "penstock[" in path.read_text("utf-8") and path != Path(__file__)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("hidden", "command", "what", "extra"),
    [
        ("pyarrow", "reconcile", "pyarrow", "tables"),
        pytest.param("pyarrow", "tables backfill", "pyarrow", "tables", marks=pytest.mark.nightly),
        pytest.param("pyarrow", "story 1", "pyarrow", "tables", marks=pytest.mark.nightly),
        pytest.param("pyarrow", "demo", "pyarrow", "tables", marks=pytest.mark.nightly),
        ("rocksdict", "serve", "the node's packages", "node"),
        ("shtab", "completion bash", "shtab", "completion"),
    ],
)
def test_a_command_without_its_packages_says_what_installs_them(hidden: str, command: str, what: str, extra: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HIDE, hidden, *command.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PROCESS_S,
        check=False,
    )
    assert ended.returncode == 2
    shown = " ".join((ended.stdout + ended.stderr).split())  # A terminal may wrap the line.
    assert shown == f"penstock {command.split()[0]} needs {what}: {install_hint(extra)}."
    assert "Traceback" not in shown


def test_a_command_that_calls_a_node_over_grpc_needs_none_of_the_nodes_packages() -> None:
    command = [sys.executable, "-c", HIDE, " ".join(EXTRAS), "group", "list", "--target", "127.0.0.1:1"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PROCESS_S, check=False)
    assert (ended.returncode, ended.stderr.partition(" answers")[0]) == (1, "penstock group: No gRPC listener of a node")


def test_each_hinted_extra_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    hinted = {"rocketmq", "fuzz", "plugins", "otel", "pydantic", "sqlalchemy", *EXTRAS.values()}
    assert hinted <= project["optional-dependencies"].keys()
