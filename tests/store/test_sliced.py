"""Background jobs run in short slices, pause between them, and wait when the disk is full."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from penstock.store import sliced
from penstock.store.clock import SystemClock
from penstock.store.errors import DiskFull
from penstock.store.sliced import SLICE_S, SlicedJob
from tests.clock import ManualClock
from tests.waiting import until


def job_of(work: Callable[[float], bool], pause_s: float = 0.001) -> SlicedJob:
    return SlicedJob(asyncio.get_running_loop(), SystemClock(), work, pause_s=pause_s)


class Countdown:
    """Work of a given number of slices."""

    def __init__(self, slices: int) -> None:
        self.left = slices
        self.done = asyncio.Event()

    def __call__(self, until_s: float) -> bool:
        """Do one slice of the work."""
        self.left -= 1
        if not self.left:
            self.done.set()
        return self.left > 0


@pytest.mark.parametrize("pause_s", [0.0, 0.001])
async def test_a_job_runs_until_no_work_is_left(pause_s: float) -> None:
    work = Countdown(3)
    job = job_of(work, pause_s)
    job.wake()
    assert work.left == 3
    await work.done.wait()
    assert not job.is_scheduled


async def test_a_job_that_falls_behind_has_no_pause() -> None:
    work, behind = Countdown(10**9), True
    job = SlicedJob(asyncio.get_running_loop(), SystemClock(), work, pause_s=3_600, is_urgent=lambda: behind)
    job.wake()
    await until(lambda: work.left < 10**9 - 10)
    behind = False
    await asyncio.sleep(0.001)
    left = work.left
    await asyncio.sleep(0.02)
    assert work.left == left
    job.stop()


async def test_a_slice_is_told_when_it_must_return() -> None:
    clock = ManualClock()
    clock.advance(5_000)
    told: list[float] = []

    def work(until_s: float) -> bool:
        told.append(until_s)
        return False

    SlicedJob(asyncio.get_running_loop(), clock, work).run()
    assert told == [5.0 + SLICE_S]


async def test_run_does_a_slice_at_once_unless_one_is_scheduled() -> None:
    work = Countdown(3)
    job = job_of(work, pause_s=60.0)
    job.run()
    assert work.left == 2
    job.run()
    job.wake()
    assert work.left == 2
    job.stop()


async def test_a_stopped_job_never_runs_again() -> None:
    work = Countdown(3)
    job = job_of(work, pause_s=60.0)
    job.run()
    job.stop()
    job.run()
    job.wake()
    assert not job.is_scheduled
    assert work.left == 2


async def test_a_job_can_be_stopped_by_its_own_work() -> None:
    def work(until_s: float) -> bool:
        job.stop()
        return True

    job = job_of(work)
    job.run()
    assert not job.is_scheduled


async def test_a_full_disk_makes_a_job_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sliced, "FULL_RETRY_S", 0.001)
    work, full = Countdown(2), [True, True, False, False]

    def store(until_s: float) -> bool:
        if full.pop(0):
            raise DiskFull("no room")
        return work(until_s)

    job = job_of(store, pause_s=0.0)
    job.run()
    assert job.is_scheduled
    await work.done.wait()
    assert full == []


async def test_a_wake_during_the_last_slice_starts_another_slice() -> None:
    runs: list[float] = []
    done = asyncio.Event()

    def work(until_s: float) -> bool:
        runs.append(until_s)
        if len(runs) == 1:
            job.wake(0.001)
        else:
            done.set()
        return False

    job = job_of(work)
    job.run()
    await done.wait()
    assert len(runs) == 2


async def test_after_an_error_the_job_pauses_until_it_is_woken() -> None:
    def work(until_s: float) -> bool:
        raise ValueError("broken")

    job = job_of(work)
    with pytest.raises(ValueError, match="broken"):
        job.run()
    assert not job.is_scheduled
