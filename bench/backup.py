"""`python -m bench backup`: how long backups take, and what they do to publishers meanwhile.

A node stores some gigabytes. Then publishers send 10,000 messages a second with QoS 1: alone, during a whole backup, during
incremental backups one after the other, and during a whole backup at a bounded rate. A load ends before its backup does. Data
and backups are on one disk, which is the worst case. At the end the backup is verified and restored.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from threading import Event
from typing import TypeVar

import orjson

from bench.load import Load, LoadFailed, LoadUnavailable, Result, compile_load, run_load
from bench.peers import BrokerFailed, BrokerProcess
from bench.rows import Figures, Goal, Row, RowFailed, Setting, parser_of, run
from bench.trees import THIS
from penstock.store.options import KIB, MIB

R = TypeVar("R")

GIB = 1024 * MIB
BODY_BYTES = KIB
STEADY_PER_S = 10_000
STEADY_S = 20
BOUND_MIB_PER_S = 50
LOAD_SHARE = 0.8
"""Share of the time of a backup of an idle node for which publishers send. Beside them, the backup takes longer."""


def _penstock(*arguments: object) -> dict[str, float]:
    """Run a command with `--json`, and return what it prints. Its `seconds` don't have the start of the process.

    Raises:
        RowFailed: it fails.
    """
    words = [*THIS.command, *map(str, arguments), "--json"]
    ended = subprocess.run(words, cwd=THIS.root, env=THIS.environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RowFailed(f"{' '.join(words)}: {ended.stderr or ended.stdout}")
    said: dict[str, float] = orjson.loads(ended.stdout.splitlines()[-1])
    return said


@contextmanager
def meanwhile(work: Callable[[Event], R]) -> Iterator[Future[R]]:
    """Run `work` on a thread meanwhile, and wait for its end. The event that it gets is set at the end of the block."""
    ended = Event()
    with ThreadPoolExecutor(1) as thread:
        working = thread.submit(work, ended)
        try:
            yield working
        finally:
            ended.set()
    working.result()


def _steady(node: BrokerProcess, seconds: float) -> Result:
    load = Load(pubs=10, subs=1, qos=1, subqos=1, rate=STEADY_PER_S, msgs=max(int(STEADY_PER_S * seconds), 100))
    return run_load(node.host, node.port, load)


def _backups(setting: Setting) -> Generator[Figures]:
    data_dir = setting.fresh() / "data"
    stored_bytes = setting.count(int(setting.options.gib * GIB), MIB)
    with setting.node(data_dir) as node:
        run_load(node.host, node.port, Load(qos=1, size=BODY_BYTES, msgs=stored_bytes // BODY_BYTES, timeout=3600))
        while True:
            target = setting.fresh()
            yield _one_run(node, data_dir, target, setting.count(STEADY_S, 1))
            shutil.rmtree(target)


def _one_run(node: BrokerProcess, data_dir: Path, target: Path, steady_s: float) -> Figures:
    def back_up(name: str, *options: object) -> dict[str, float]:
        return _penstock("backup", target / name, "--data-dir", data_dir, *options)

    def again_and_again(ended: Event) -> list[dict[str, float]]:
        return [back_up("first") for _ in iter(ended.is_set, True)]

    first, second = back_up("first"), back_up("first")
    alone = _steady(node, steady_s)
    with meanwhile(lambda _: back_up("whole")) as whole:
        during_whole = _steady(node, max(first["seconds"] * LOAD_SHARE, 1))
    with meanwhile(again_and_again) as later:
        during_later = _steady(node, steady_s)
    with meanwhile(lambda _: back_up("bounded", "--mib-per-s", BOUND_MIB_PER_S)):
        during_bounded = _steady(node, steady_s)
    verified = _penstock("verify", target / "whole", "--work-dir", target)
    restored = _penstock("restore", target / "whole", target / "restored")
    return {
        "backup_gib": first["bytes"] / GIB,
        "backup_first_s": first["seconds"],
        "backup_second_s": second["seconds"],
        "backup_second_mib": second["copied_bytes"] / MIB,
        "backup_whole_s": whole.result()["seconds"],
        "backup_later_s": median(each["seconds"] for each in later.result()),
        "backup_verify_s": verified["seconds"],
        "backup_restore_s": restored["seconds"],
        **_latencies("alone", alone),
        **_latencies("whole", during_whole),
        **_latencies("later", during_later),
        **_latencies("bounded", during_bounded),
    }


def _latencies(name: str, result: Result) -> Figures:
    """Return the time until PUBACK in ms."""
    return {f"backup_{name}_p99": result.ack_us_p99 / 1000, f"backup_{name}_max": result.ack_us_max / 1000}


def _goals_of_latencies(name: str, title: str) -> tuple[Goal, Goal]:
    return (
        Goal(f"backup_{name}_p99", f"time until PUBACK at {STEADY_PER_S:,} msg/s, {title}: p99", "ms"),
        Goal(f"backup_{name}_max", "... longest", "ms"),
    )


ROWS: dict[str, Row] = {
    "backup": Row(
        _backups,
        (
            Goal("backup_gib", "size of the backup", "GiB"),
            Goal("backup_first_s", "first backup of an idle node", "s"),
            Goal("backup_second_s", "second one, when nothing is new", "s"),
            Goal("backup_second_mib", "... copies", "MiB"),
            Goal("backup_whole_s", "whole backup under load", "s"),
            Goal("backup_later_s", "later one under load", "s"),
            Goal("backup_verify_s", "verification", "s"),
            Goal("backup_restore_s", "restore", "s"),
            *_goals_of_latencies("alone", "no backup"),
            *_goals_of_latencies("whole", "whole backup"),
            *_goals_of_latencies("later", "later backups, one after the other"),
            *_goals_of_latencies("bounded", f"whole backup with --mib-per-s {BOUND_MIB_PER_S}"),
        ),
    ),
}


def _compile(_: Setting) -> None:
    compile_load()


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and return the exit status."""
    parser = parser_of("backup", "Measure backups, and what they do to publishers.", ROWS, runs=3)
    parser.add_argument(
        "--gib", type=float, default=4, help="GiB that the node stores (%(default)s). Five times as much must be free."
    )
    return run(parser, ROWS, arguments, failures=(BrokerFailed, LoadFailed, LoadUnavailable), prepare=_compile)
