from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.store.clock import SystemClock
from penstock.store.options import KIB
from penstock.store.queues.lightqueue import ENTRY, LightQueue
from penstock.store.record import decode
from penstock.store.store import Store
from tests.store.wiring import close, crash, durable_queue, fill, numbered_bodies
from tests.store.writer_child import EVERYTHING, SOME, options, topic

ROUNDS = int(os.environ.get("PENSTOCK_KILL_ROUNDS", "8"))
"""The number of kills. For a long run: PENSTOCK_KILL_ROUNDS=500 pytest tests/store/test_kill.py -m nightly"""

PRINTED_MAX = 3000
"""The writer is killed after a random number of answers up to this one, some milliseconds to a second after its start."""

PRINTED = 400
"""The number of answers after which `make test` kills the writer."""

ROOT = Path(__file__).parents[2]


def killed_writer(data_dir: Path, first: int, seed: int, retention_bytes: int = 0, enough: int = 0) -> list[int]:
    """Let a process write, kill it, and return the numbers that it reported as durable.

    Parameters:
        enough: number of answers after which it is killed, or 0 for a random one.
    """
    enough = enough or random.Random(seed).randint(1, PRINTED_MAX)
    command = [sys.executable, "-m", "tests.store.writer_child", str(data_dir), *map(str, (first, seed, retention_bytes))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as writer:
        assert writer.stdout is not None
        answers = b""
        try:
            while answers.count(b"\n") < enough:
                answer = os.read(writer.stdout.fileno(), 65_536)
                assert answer, "the writer ended before it was killed"
                answers += answer
        finally:
            writer.kill()  # this sends SIGKILL
        answers += writer.stdout.read()
    assert writer.returncode == -signal.SIGKILL
    return [int(line) for line in answers.split(b"\n")[:-1]]


def numbers(store: Store, queue: LightQueue) -> list[int]:
    """Return the numbers of a queue's messages, and check that each message has the topic of its number."""
    found = []
    for position, size, _ in ENTRY.iter_unpack(queue.read(0, queue.committed_offset)):
        message = decode(store.read(position, size), position=position)
        number = int(message.body.partition(b":")[0])
        assert message.topic == topic(number)
        found.append(number)
    return found


def recovered(data_dir: Path, answers: list[int], seed: int) -> tuple[Store, int]:
    """Start on what a killed writer has left, and check it. Return the store and the number of messages."""
    store = Store(data_dir, options(0), SystemClock())
    store.recover()
    fill(store)
    everything, some = durable_queue(store, EVERYTHING, "earliest"), durable_queue(store, SOME, "earliest")
    found = numbers(store, everything)
    written = len(found)
    assert found == list(range(written)), "a number is missing, duplicated, or out of order"
    assert written > answers[-1], f"{answers[-1]} was reported as durable, but the last message is {written - 1}"
    assert numbers(store, some) == [number for number in found if number % 3 == 1]
    assert everything.owners >= {f"seed:{each}" for each in range(seed + 1)}
    return store, written


def test_durable_messages_survive_a_kill_9(tmp_path: Path) -> None:
    answers = killed_writer(tmp_path, 0, 0, enough=PRINTED)
    assert answers == list(range(len(answers)))
    store, _ = recovered(tmp_path, answers, 0)
    close(store)


@pytest.mark.nightly
@pytest.mark.timeout(600 + 30 * ROUNDS)
def test_durable_messages_survive_kill_9_in_order_and_once(tmp_path: Path) -> None:
    data_dir, written = tmp_path / "0", 0
    data_dir.mkdir()
    for seed in range(ROUNDS):
        answers = killed_writer(data_dir, written, seed)
        assert answers == list(range(written, written + len(answers)))
        store, written = recovered(data_dir, answers, seed)
        if seed % 2:
            close(store)
        else:
            crash(store, tmp_path / str(seed + 1))
            data_dir = tmp_path / str(seed + 1)


@pytest.mark.nightly
@pytest.mark.timeout(600 + 30 * ROUNDS)
def test_messages_that_retention_keeps_stay_in_order_at_their_offsets_after_any_kill(tmp_path: Path) -> None:
    """The queue has had every message since the first, so a message's number is its offset, and stays its offset."""
    data_dir, retention_bytes, written = tmp_path / "0", 512 * KIB, 0
    data_dir.mkdir()
    for seed in range(ROUNDS):
        printed = killed_writer(data_dir, written, seed, retention_bytes)[-1]
        if seed % 2:
            shutil.rmtree(data_dir / "index")

        store = Store(data_dir, options(retention_bytes), SystemClock())
        store.recover()
        fill(store)
        everything = durable_queue(store, EVERYTHING, "earliest")
        found = {offset: int(body.partition(":")[0]) for offset, body in numbered_bodies(store, everything).items()}
        assert list(found) == list(found.values()), "a message is not at its offset"
        assert list(found) == list(range(min(found), everything.next_offset)), (
            "a number is missing, duplicated, or out of order"
        )
        written = everything.next_offset
        assert written > printed, f"{printed} was reported as durable, but the last message is {written - 1}"
        close(store)
    assert min(found) > 0
    assert sum(path.stat().st_size for path in (data_dir / "commitlog").iterdir()) < 16 * retention_bytes
