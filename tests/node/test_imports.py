"""Importing a command or a client loads only what that part needs: each command is a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.system.processes import ROOT
from tests.waiting import PROCESS_S

HEAVY = {
    "aiohttp",
    "amqtt",
    "argon2",
    "fastcrc",
    "google",
    "grpc",
    "numpy",
    "paho",
    "prometheus_client",
    "pyspark",
    "rich",
    "rocksdict",
    "structlog",
    "uvloop",
}

COMMANDS = (
    "serve",
    "demo",
    "pub",
    "sub",
    "pop",
    "send",
    "timer",
    "schedule",
    "rocketmq",
    "worker",
    "group",
    "dlq",
    "reconcile",
    "tables",
    "story",
    "inspect",
    "repair",
    "clock",
    "backup",
    "restore",
    "verify",
    "top",
    "completion",
)


def imported_by(source: str, *arguments: str) -> set[str]:
    """Return the packages that a program has imported by its end."""
    program = (
        f"import sys\ntry:\n {source}\nexcept SystemExit:\n pass\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    )
    command = [sys.executable, "-c", program, *arguments]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PROCESS_S, check=True)
    return set(ended.stdout.splitlines()[-1].split())


def test_parsing_the_arguments_of_a_command_imports_nothing_heavy() -> None:
    program = (
        "import sys\nfrom penstock.cli.main import main\nfor command in sys.argv[2:]:\n try:\n  main([command, '--help'])\n"
        " except SystemExit:\n  pass\n heavy = {*sys.argv[1].split()} & {name.partition('.')[0] for name in sys.modules}\n"
        " assert not heavy, f'{command} imports {heavy}'"
    )
    command = [sys.executable, "-c", program, " ".join(HEAVY), *COMMANDS]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PROCESS_S, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert [name for name in COMMANDS if f"usage: penstock {name}" not in ended.stdout] == []


@pytest.mark.nightly
def test_every_module_can_be_imported_without_the_library_of_an_extra() -> None:
    """Whoever imports all of them, such as the process that forks commands for the tests, may have no extras."""
    source = (
        "import importlib, pkgutil, penstock.cli as cli; sys.modules['shtab'] = None; "
        "[importlib.import_module(f'penstock.cli.{each.name}') for each in pkgutil.iter_modules(cli.__path__)]"
    )
    assert "penstock" in imported_by(source)


@pytest.mark.parametrize(
    ("names", "needs"),
    [
        (["popclient"], {"grpc", "google"}),
        pytest.param(
            ["inspect_log", "repair_log"], {"fastcrc", "numpy", "rich", "rocksdict", "structlog"}, marks=pytest.mark.nightly
        ),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_what_a_command_imports_to_run_is_what_it_needs(names: list[str], needs: set[str]) -> None:
    modules = ", ".join(f"penstock.cli.{name}" for name in names)
    assert imported_by(f"import {modules}") & HEAVY <= needs


@pytest.mark.parametrize(
    ("source", "needs"),
    [
        ("import penstock; from penstock import NodeUnavailable", set()),
        pytest.param("from penstock import Client, OutgoingMessage", {"grpc", "google"}, marks=pytest.mark.nightly),
        ("from penstock import *", {"grpc", "google"}),
    ],
)
def test_the_clients_import_grpc_and_nothing_else_that_is_heavy(source: str, needs: set[str]) -> None:
    assert imported_by(f"exec({source!r})") & HEAVY == needs


MEASURE = "import time; before = time.process_time(); from penstock import Client; print(time.process_time() - before)"


@pytest.mark.nightly
def test_importing_the_client_takes_a_fraction_of_a_second(record_property: Callable[[str, object], None]) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", MEASURE], cwd=ROOT, capture_output=True, text=True, timeout=PROCESS_S, check=True
    )
    import_s = float(ended.stdout)
    record_property("import_processor_s", import_s)  # 0.3 s is the goal. The bound allows for a slow machine.
    assert import_s < 2
