"""What the tests cost: processor time and memory, by folder, beside the budget of `make test`."""

from __future__ import annotations

import json
import os
import resource
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

PROCESSOR_S_MAX = 300.0
"""Budget of `make test` in seconds of processor time, of all its processes together."""
ELAPSED_S_MAX = 240.0
"""Budget of `make test` in seconds on two cores."""
WORKER_BYTES_MAX = 1 << 30
"""Budget of a process that runs tests, in bytes of memory, without the processes that its tests start."""

PROPERTY = "processor_s"
"""Name under which a test's report has its processor time."""
SPENT: pytest.StashKey[float] = pytest.StashKey()


def processor_s() -> float:
    """Return the processor time of this process and of its children that have ended, in seconds."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class Budget:
    """A pytest plugin that measures each test, and prints a table of the folders at the end.

    The processor time of a test includes its fixtures, and child processes that ended during it. What a process does besides
    (imports, collection, children that end with it) has a row of its own.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._elapsed: dict[str, float] = defaultdict(float)
        self._began_s = time.monotonic()
        self._other_s = 0.0
        self._bytes_max = 0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Note when a test begins."""
        item.stash[SPENT] = processor_s()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        """Add the processor time to the last of a test's reports."""
        report = yield
        if call.when == "teardown":
            report.user_properties = [*report.user_properties, (PROPERTY, processor_s() - item.stash[SPENT])]
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the reports of all processes."""
        self._elapsed[report.nodeid] += report.duration
        if report.when == "teardown":
            self._seconds[report.nodeid] = sum(float(str(value)) for name, value in report.user_properties if name == PROPERTY)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Hand what a worker used as a whole to the process that prints the table."""
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[PROPERTY] = processor_s()
            output["bytes_max"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Add what a worker used as a whole."""
        output = getattr(node, "workeroutput", None) or {}
        self._other_s += output.get(PROPERTY, 0.0)
        self._bytes_max = max(self._bytes_max, output.get("bytes_max", 0))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the table, and write each test's figures where PENSTOCK_TEST_FIGURES names a file."""
        if not self._other_s:
            return
        own = resource.getrusage(resource.RUSAGE_SELF)
        tests_s = sum(self._seconds.values())
        total_s = self._other_s + own.ru_utime + own.ru_stime
        folders: dict[str, list[float]] = defaultdict(list)
        for name, seconds in self._seconds.items():
            folders["/".join(name.split("::")[0].split("/")[:-1])].append(seconds)
        terminalreporter.section("processor time by folder")
        for folder, spent in sorted(folders.items(), key=lambda each: -sum(each[1])):
            terminalreporter.write_line(f"{folder:<30} {len(spent):6,} tests {sum(spent):8.1f} s")
        terminalreporter.write_line(f"{'imports, collection, report':<30} {'':12} {total_s - tests_s:8.1f} s")
        terminalreporter.write_line(
            f"{'all':<30} {len(self._seconds):6,} tests {total_s:8.1f} s of {PROCESSOR_S_MAX:.0f} s in "
            f"{time.monotonic() - self._began_s:.0f} s of {ELAPSED_S_MAX:.0f} s; "
            f"largest process {self._bytes_max >> 20} MiB of {WORKER_BYTES_MAX >> 20} MiB"
        )
        if path := os.environ.get("PENSTOCK_TEST_FIGURES"):
            Path(path).write_text(json.dumps({name: [self._seconds[name], self._elapsed[name]] for name in self._seconds}))
