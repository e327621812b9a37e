"""Hints on how to install an extra name a source that works, and reach the terminal as they are."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.install import install_hint
from tests.system.processes import ROOT
from tests.waiting import PROCESS_S

HIDE_PYARROW = """
import sys
sys.modules["pyarrow"] = None
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


def test_the_tables_without_their_extra_show_the_hint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert main(["tables", "backfill", "--data-dir", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"penstock tables: pyarrow is not installed: {install_hint('tables')}\n"


@pytest.mark.parametrize("command", ["reconcile", pytest.param("demo", marks=pytest.mark.nightly)])
def test_a_command_without_its_extra_shows_the_hint_in_full(command: str, tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HIDE_PYARROW, command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PROCESS_S,
        check=False,
    )
    assert ended.returncode == 2
    shown = " ".join((ended.stdout + ended.stderr).split())  # A terminal may wrap the line.
    assert shown.startswith(f"penstock {command}: pyarrow")
    assert shown.endswith(f"is not installed: {install_hint('tables')}")
    assert "Traceback" not in shown


def test_each_hinted_extra_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert {"spark", "tables", "rocketmq", "fuzz", "plugins", "otel", "pydantic", "sqlalchemy"} <= project[
        "optional-dependencies"
    ].keys()
