"""Settings of every test."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import signal
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import TYPE_CHECKING

import pytest
import uvloop
from hypothesis import HealthCheck, Phase, settings

from penstock.node import tablesoptions
from penstock.store.index import rocksdb
from tests.budget import Budget
from tests.depth import DEPTH
from tests.failures import Failures

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling

# gRPC would start its threads anew in each child between fork and exec, where they may crash. Our children exec at once.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")

# A shell without job control starts what runs in the background with SIGINT ignored, and then so is it in the processes of the
# tests that are to end by it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Each Spark of the tests lives for seconds. There the second compiler and the threads of the parallel collector take twice the
# processor time that they save.
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")

# A slow machine is no failure: pytest-timeout bounds a test as a whole.
settings.register_profile(
    "gate",
    deadline=None,
    max_examples=25,
    derandomize=True,
    database=None,
    # Shrinking would run a test that failed hundreds of times, and take longer than the time-out.
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=(HealthCheck.too_slow,),
)
settings.register_profile(
    "search", deadline=None, max_examples=50 * DEPTH, database=None, suppress_health_check=(HealthCheck.too_slow,)
)
settings.load_profile("gate")
"""`make test` tries the same examples each time. `make nightly` searches, with `--hypothesis-profile=search` and a seed."""


SLOW = (
    "tests/backup/test_backup.py",
    "tests/backup/test_verify.py",
    "tests/clients/",
    "tests/contrib/",
    "tests/simulation/test_simulation.py",
    "tests/cluster/test_replicasim.py",
    "tests/parquet/test_sealed.py",
    "tests/parquet/test_writer.py",
    "tests/spark/",
    "tests/system/",
    "tests/gateway/test_access",
    "tests/gateway/test_clients",
    "tests/gateway/test_connection",
    "tests/gateway/test_fuzz_transports.py",
    "tests/gateway/test_publish_fast_path.py",
    "tests/gateway/test_session_restart.py",
    "tests/gateway/test_sessions_machine.py",
    "tests/gateway/test_shared_restart.py",
    "tests/gateway/test_shipped_plugins.py",
    "tests/gateway/test_transport_clients.py",
    "tests/node/test_fleet.py",
    "tests/node/test_ledger_machine.py",
    "tests/pop/rocketmq/test_service.py",
    "tests/pop/test_core_machine.py",
    "tests/pop/test_front.py",
    "tests/pop/test_kept_index.py",
    "tests/pop/test_retention.py",
    "tests/store/test_damaged_index.py",
    "tests/store/test_faults.py",
    "tests/store/test_flipped.py",
    "tests/store/test_kill.py",
    "tests/store/test_repair.py",
    "tests/store/test_retention.py",
    "tests/store/test_store_machine.py",
    "tests/worker/test_failures.py",
)
"""Beginnings of the paths of tests that `make test-fast` leaves out: they start processes, search, or are many."""


@pytest.fixture(scope="session", autouse=True)
def _small_cache() -> Iterator[None]:
    """Keep the block cache of each index small: RocksDB allocates the table of the largest one at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rocksdb, "BLOCK_CACHE_BYTES", rocksdb.BLOCK_CACHE_BYTES_MIN)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_tables() -> Iterator[None]:
    """Let nodes write Parquet tables, each time in a process of its own, only where a test sets `tables.enabled` to "on"."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tablesoptions, "are_on", lambda options: options.enabled == "on")
        yield


def pytest_configure(config: pytest.Config) -> None:
    """Measure what the tests cost, and keep what fails. xdist's workers report to the process that started them."""
    config.pluginmanager.register(Budget(), "penstock-budget")
    if not hasattr(config, "workerinput") and hasattr(config, "cache"):  # not with -p no:cacheprovider
        config.pluginmanager.register(Failures(config), "penstock-failures")


NODES = frozenset(("broker", "client", "node", "start_broker", "stub"))
"""Fixtures that start a node, which takes longer than most tests."""

WITH_NODES = ("tests/gateway/test_delivery.py", "tests/gateway/test_publish.py", "tests/pop/test_poll.py")
"""Tests with nodes that `make test-fast` runs all the same: the main ways of a message."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Spare the garbage collector the hundreds of thousands of objects of the tests themselves, which live to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, object, object]:
    """Let one of several processes compile a file of tests, while the others wait for its bytecode."""
    if not isinstance(collector, pytest.Module):
        return (yield)
    with collector.path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of `SLOW`, and those that start nodes."""
    for item in items:
        starts_node = not NODES.isdisjoint(getattr(item, "fixturenames", ())) and not item.nodeid.startswith(WITH_NODES)
        if starts_node or item.nodeid.startswith(SLOW):
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling:
    """Deal the tests out as tests/scheduling.py says."""
    from tests.scheduling import Scheduling

    return Scheduling(config, log)


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run asynchronous tests on the event loop that the node runs on."""
    return {"uvloop": uvloop.new_event_loop}
