"""Whichever call fails: no acknowledged message is lost, no message appears that was not appended, and the order holds."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.store.errors import DiskFull
from penstock.store.log import commitlog
from penstock.store.options import KIB
from penstock.store.space.space import Level
from tests.bounds import variable_of
from tests.depth import DEPTH
from tests.store.faults import CALLS, Faults
from tests.store.wiring import bodies, close, durable_queue, open_store, publish
from tests.waiting import PROCESS_S

SEGMENT_BYTES = 2 * KIB
ROOT = Path(__file__).parents[2]

errors = st.sampled_from([errno.EIO, errno.ENOSPC, errno.EDQUOT])
plans = st.dictionaries(
    st.tuples(st.sampled_from(CALLS), st.integers(0, 12)), st.one_of(errors, st.sampled_from(["short", "torn"])), max_size=3
)
batches = st.lists(st.lists(st.integers(0, 700), min_size=1, max_size=6), min_size=1, max_size=15)


class Life:
    """A store that runs like a node's until a failure ends it. `acknowledged` holds the messages confirmed as durable."""

    def __init__(self, data_dir: Path) -> None:
        self.store = open_store(data_dir, segment_bytes=SEGMENT_BYTES)
        self.appended: list[str] = []
        self.refused: list[str] = []
        self.acknowledged = 0

    def run(self, batches: list[list[int]]) -> OSError | None:
        """Publish batches, each with a commit and a group commit; return the error that ended the store."""
        number = 0
        for batch in batches:
            try:
                for size in batch:
                    body = f"{number}:" + "x" * size
                    number += 1
                    try:
                        publish(self.store, "plant/1", body)
                        self.appended.append(body)
                    except DiskFull:
                        self.refused.append(body)
                        self.store.measure_disk()
                self.store.commit()
                self.store.log.sync()
            except OSError as error:
                return error
            self.acknowledged = len(self.appended)
        return None

    def die(self) -> None:
        """End as a killed process does: nothing more is written."""
        with suppress(OSError):
            self.store.retention.close()
            self.store.index.close()
        self.store.log._failure = self.store.log._failure or OSError(errno.EIO, "the process is gone")
        self.store.log.close()


def found_in(data_dir: Path) -> list[str]:
    store = open_store(data_dir, segment_bytes=SEGMENT_BYTES)
    queue = store.queues.find("plant/#")
    found = bodies(store, queue) if queue is not None else []
    publish(store, "plant/1", "after")
    store.commit()
    assert bodies(store, durable_queue(store, "plant/#")) == [*found, "after"]
    close(store)
    return found


@settings(max_examples=15 * DEPTH)
@given(plan=plans, batches=batches, short_at_most=st.sampled_from([0, 0, 1, 100]), full_at=st.none() | st.integers(0, 9000))
def test_acknowledged_messages_survive_any_failure_in_order_and_once(
    plan: dict[tuple[str, int], int | str], batches: list[list[int]], short_at_most: int, full_at: int | None
) -> None:
    data_dir = Path(mkdtemp(prefix="penstock-faults-"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commitlog, "ALLOCATE_BYTES", 512)
        life = Life(data_dir)
        try:
            with Faults(plan, full_at=full_at, short_at_most=short_at_most).installed() as faults:
                error = life.run(batches)
                life.die()
            assert faults.failed or error is None
            found = found_in(data_dir)
            assert found == life.appended[: len(found)]
            assert len(found) >= life.acknowledged
            if error is None:
                assert found == life.appended
        finally:
            shutil.rmtree(data_dir)


def test_the_store_completes_short_writes(tmp_path: Path) -> None:
    life = Life(tmp_path)
    with Faults(short_at_most=7).installed():
        assert life.run([[100, 200], [300]]) is None
    close(life.store)
    assert found_in(tmp_path) == life.appended


@pytest.mark.parametrize("call", ["pwrite", "fdatasync"])
def test_a_failed_write_or_sync_is_final_even_if_a_retry_would_succeed(tmp_path: Path, call: str) -> None:
    life = Life(tmp_path)
    with Faults({(call, 1): errno.EIO}).installed() as faults:
        error = life.run([[10], [10], [10]])
        assert error is not None
        assert error.errno == errno.EIO
        with pytest.raises(OSError, match="Input/output error"):
            life.store.log.write()
        with pytest.raises(OSError, match="Input/output error"):
            life.store.log.sync()
        calls = dict(faults.counts)
        with suppress(OSError):
            life.store.commit()
        assert faults.counts == calls, "nothing is retried"
    life.die()
    assert life.acknowledged == 1
    assert found_in(tmp_path)[:1] == life.appended[:1]


@pytest.mark.parametrize("call", ["posix_fallocate", "open"])
def test_a_temporarily_full_disk_loses_only_the_refused_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(commitlog, "ALLOCATE_BYTES", 512)
    life = Life(tmp_path)
    with Faults({(call, 0): errno.ENOSPC, (call, 1): errno.ENOSPC}).installed():
        assert life.run([[500]] * 20) is None
    assert life.refused
    assert life.store.space.level is Level.OPEN
    close(life.store)
    assert found_in(tmp_path) == life.appended
    assert sorted(life.appended + life.refused) == sorted(f"{number}:" + "x" * 500 for number in range(20))


def test_an_allocation_error_other_than_a_full_disk_ends_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commitlog, "ALLOCATE_BYTES", 512)
    life = Life(tmp_path)
    with Faults({("posix_fallocate", 2): errno.EIO}).installed():
        error = life.run([[500]] * 20)
    assert error is not None
    assert error.errno == errno.EIO
    life.die()
    assert found_in(tmp_path)[: life.acknowledged] == life.appended[: life.acknowledged]


def test_an_interrupted_call_is_retried(tmp_path: Path) -> None:
    """Python retries calls on EINTR (PEP 475), so the log never sees it. If the log saw EINTR, it would end without loss."""
    life = Life(tmp_path)
    with Faults({("pwrite", 1): errno.EINTR}).installed():
        assert isinstance(life.run([[10], [10]]), InterruptedError)
    life.die()
    assert found_in(tmp_path)[:1] == life.appended[:1]


FAILING_NODE = """
import errno, sys
from penstock.cli.main import main
from tests.bounds import set_bounds
from tests.store.faults import Faults

set_bounds()

listeners = [word for name in ("mqtt", "pop", "admin") for word in (f"--{name}", "127.0.0.1:0")]
with Faults({("fdatasync", 1): errno.EIO} if sys.argv[2] == "thread" else {}).installed():
    main(["serve", "--data-dir", sys.argv[1], *listeners])
"""


@pytest.mark.parametrize(
    ("sync_in", "says"),
    [
        pytest.param("thread", "Input/output error", marks=pytest.mark.nightly),
        ("process", "the process that syncs the log has ended"),
    ],
)
def test_a_failed_sync_ends_a_node_with_status_70_and_one_line_and_the_node_can_start_again(
    tmp_path: Path, sync_in: str, says: str
) -> None:
    command = [sys.executable, "-c", FAILING_NODE, str(tmp_path / "data"), sync_in]
    environment = {**os.environ, **variable_of(store__sync_in=sync_in)}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as node:
        try:
            assert node.stdout is not None
            mqtt = node.stdout.readline().split("mqtt=")[1].split()[0]
            if sync_in == "process":
                (child,) = (Path(f"/proc/{node.pid}/task/{node.pid}/children")).read_text().split()
                os.kill(int(child), signal.SIGKILL)
            publish = [sys.executable, "-m", "penstock", "pub", "plant/1", "lost", "--mqtt", mqtt]
            assert subprocess.run(publish, cwd=ROOT, capture_output=True, timeout=PROCESS_S, check=False).returncode != 0
            _, log = node.communicate(timeout=PROCESS_S)
        finally:
            node.kill()
    assert node.returncode == 70
    assert "store.failed" in log
    assert says in log
    assert len(found_in(tmp_path / "data")) <= 1
