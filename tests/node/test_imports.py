"""A command imports what it needs and no more: each is a process that starts anew."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.system.processes import ROOT

HEAVY = {
    "aiohttp",
    "amqtt",
    "google",
    "grpc",
    "numpy",
    "prometheus_client",
    "pyspark",
    "rich",
    "rocksdict",
    "structlog",
    "uvloop",
}

COMMANDS = ("serve", "demo", "pub", "sub", "pop", "send", "recall", "group", "dlq", "reconcile", "inspect", "repair")


def imported_by(source: str, *arguments: str) -> set[str]:
    """Return the packages that a program has imported when it ends."""
    program = (
        f"import sys\ntry:\n {source}\nexcept SystemExit:\n pass\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    )
    command = [sys.executable, "-c", program, *arguments]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    return set(ended.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("command", COMMANDS)
def test_help_and_the_reading_of_arguments_import_nothing_heavy(command: str) -> None:
    found = imported_by("from penstock.cli.main import main; main(sys.argv[1:])", command, "--help")
    assert "argparse" in found
    assert not found & HEAVY


@pytest.mark.parametrize(
    ("module", "needs"),
    [
        ("penstock.cli.pubsub", {"amqtt"}),
        ("penstock.cli.tools", {"grpc", "google", "numpy"}),
        ("penstock.cli.groups", {"grpc", "google", "numpy", "rich"}),
        ("penstock.cli.inspect", {"numpy", "rocksdict", "rich", "structlog"}),
        ("penstock.cli.mend", {"numpy", "rocksdict", "rich", "structlog"}),
    ],
)
def test_a_command_imports_what_it_needs(module: str, needs: set[str]) -> None:
    assert imported_by(f"import {module}") & HEAVY <= needs
