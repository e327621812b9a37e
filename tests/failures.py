"""What failed, and whether it fails again: `.ci/run` runs `python -m tests.failures` after a run of pytest that failed.

Each test that failed runs once more, alone. If it passes, the command prints `flaky: NAME` with the first failure, and the run
counts as green. A failure that says that a message was lost, doubled or out of order counts at once: such a defect may show
itself only now and then.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

FILE = "failures.json"
"""Name of the file with the failures of the last run, in the folder of pytest's cache."""

FAILURES_MAX = 10
"""More failures than this are no accident, and do not run again."""

RERUN_S_MAX = 600.0
"""Time after which a test that runs again counts as failed."""

_ERROR = re.compile(r"^E  +(.*)$", re.MULTILINE)
_LOSS = re.compile(
    r"\b(lost|loses|losses|gone|missing|never came|vanished|twice|doubled|duplicated?|two messages|handed out again|came again|"
    r"out of order|not at its offset|nobody sent)\b",
    re.IGNORECASE,
)


def tells_of_loss(report: str) -> bool:
    """Return whether the error in a report, not the code around it, says that messages were lost, doubled or out of order."""
    return any(_LOSS.search(line) for line in _ERROR.findall(report))


class Failures:
    """A pytest plugin that writes what failed to a file of pytest's cache."""

    def __init__(self, config: pytest.Config) -> None:
        assert config.cache is not None
        self._path = config.cache.mkdir("penstock") / FILE
        self._path.unlink(missing_ok=True)
        self._reports: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that failed, or whose fixtures did."""
        if report.failed:
            sections = "\n".join(f"--- {name}\n{text}" for name, text in report.sections)
            self._reports.setdefault(report.nodeid, f"{report.longreprtext}\n{sections}")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write the file, unless the run broke off."""
        if exitstatus == pytest.ExitCode.TESTS_FAILED:
            self._path.write_text(json.dumps(self._reports))


def judge(reports: dict[str, str], passes: Callable[[str], bool], say: Callable[[str], None]) -> bool:
    """Run what failed once more, and say what came of it.

    Parameters:
        reports: the report of each test that failed, by its name.
        passes: runs a test, and returns whether it passed.
        say: gets each line of what is to be printed.

    Returns:
        Whether all of them passed.
    """
    if len(reports) > FAILURES_MAX:
        say(f"{len(reports)} tests failed. Only {FAILURES_MAX} failures or fewer run again.")
        return False
    real = []
    for name, report in reports.items():
        if tells_of_loss(report):
            say(f"failed: {name} says that messages were lost, doubled or out of order, so it does not run again.")
            real.append(name)
        elif passes(name):
            say(f"flaky: {name}\n{report}")
        else:
            say(f"failed: {name} failed twice.")
            real.append(name)
    return not real


def _passes(name: str, options: Iterable[str]) -> bool:
    # Its own cache, so that the file of failures stays as it is.
    command = [sys.executable, "-m", "pytest", "-o", "cache_dir=.pytest_cache/again", *options, name]
    try:
        return subprocess.run(command, timeout=RERUN_S_MAX, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def main(options: list[str]) -> int:
    """Run again what failed in the last run. `options` are pytest's. Return 0 if all of it passes, else 1."""
    path = Path(".pytest_cache/d/penstock") / FILE
    if not path.exists():
        print("The last run of the tests broke off, or did not fail, so nothing runs again.")
        return 1
    return 0 if judge(json.loads(path.read_text()), lambda name: _passes(name, options), print) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
