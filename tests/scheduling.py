"""How xdist deals the tests out to several processes."""

from __future__ import annotations

import re

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

ONE_AFTER_ANOTHER = ("tests/spark/", "tests/system/test_demo.py")
"""Tests that one process runs where several run tests: each starts a Spark, which takes seconds and all processors."""

TOGETHER = (
    "tests/backup/test_verify.py",
    "tests/contrib/test_outbox.py",
    "tests/node/test_fleet.py",
    "tests/pop/test_kept_index.py",
    "tests/store/test_damaged_index.py",
    "tests/store/test_flipped.py",
    "tests/store/test_missing.py",
    "tests/store/test_unreadable.py",
    "tests/system/test_command_tls.py",
    "tests/system/test_mqtt_clients.py",
    "tests/system/test_wheel.py",
    "tests/test_docs.py",
    "tests/test_layout.py",
)
"""Files whose tests one process runs, because they share what takes long to make: a wheel, a server, a data directory."""

PER_CLIENT = "tests/system/test_rocketmq_clients.py"
"""A file whose tests share a process with the client of a language: one process runs all tests of a client."""

CLIENT = re.compile(r"java-[0-9.]+|python|go|rust")


class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Deals out tests one by one, but for those that share something. Runs no test twice."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(ONE_AFTER_ANOTHER):
            return "spark"
        if nodeid.startswith(TOGETHER):
            return nodeid.partition("::")[0]
        if nodeid.startswith(PER_CLIENT):
            client = CLIENT.search(nodeid.partition("[")[2])
            return f"{PER_CLIENT}::{client[0] if client else 'node'}"
        return nodeid

    def mark_test_complete(self, node: WorkerController, item_index: int, duration: float = 0) -> None:
        """Note the end of a test. Without this, xdist counts all tests that have ended again after each test."""
        super().mark_test_complete(node, item_index, duration)
        units = self.assigned_work[node]
        scope = self._split_scope(self.registered_collections[node][item_index])
        if all(units[scope].values()):
            del units[scope]

    def remove_node(self, node: WorkerController) -> str | None:
        """Take a process that ended out, and deal its tests out to others, but for the test that it ran. Return that test.

        xdist runs that test again, in process after process, up to `--max-worker-restart`. A test that hangs until
        pytest-timeout ends its process then takes the time-out each time.
        """
        units = self.assigned_work.pop(node)
        left = ((unit, test) for unit in units.values() for test, is_complete in unit.items() if not is_complete)
        unit, crashed = next(left, (None, None))
        if unit is None:
            return None
        unit[crashed] = True
        self.workqueue.update((scope, tests) for scope, tests in units.items() if not all(tests.values()))
        for other in self.assigned_work:
            self._reschedule(other)
        return crashed
