"""`python -m bench spark`: the tables and their reconciliation, beside a plain outer join of the same Parquet files; and what
Spark reads, follows and publishes (`bench.sparkreads`).

The log is synthetic (`bench.sparkload`), and every report is compared with what is in it. Each job runs in a process of its
own. Its time and its processor time begin when the session is open and Spark has run a first query. A plain join unites
`deliveries` and `ends` by key and writes the columns that an outcome needs as Parquet.

`--base` names a checkout of another version, whose `penstock reconcile` reads the same log.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from bench import sparkreads
from bench.peers import processor_s
from bench.sparkload import START_MS, Expected, write_log

MIB = 1 << 20
RUNS = 2
DAYS = 31

PLAIN = (
    "SELECT coalesce(d.key, e.key) AS key, d.group_id AS group_id, d.message_position AS message_position, "
    "d.attempt AS attempt, d.at_ms AS popped_ms, d.deadline_ms AS deadline_ms, e.at_ms AS ended_ms, e.cause AS cause "
    "FROM deliveries d FULL OUTER JOIN ends e ON d.key = e.key"
)

Works = dict[str, Callable[[], Any]]
"""What each job of an engine calls."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark, and print its table."""
    parser = argparse.ArgumentParser(prog="python -m bench spark", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--deliveries", type=int, default=10_000_000, help="in the log (%(default)s)")
    parser.add_argument("--directory", type=Path, help="for the log and the tables, on a disk with room (temporary)")
    parser.add_argument("--runs", type=int, default=RUNS, help="of each job; the table has medians (%(default)s)")
    parser.add_argument("--engines", default="spark,duckdb,polars", help="separated by commas (%(default)s)")
    parser.add_argument("--only", choices=("reconcile", "reads"), help="leave out the other part")
    parser.add_argument("--base", type=Path, help="a checkout of another version, with its .venv")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.job:
        print(json.dumps(_job(*options.job.split(","), options.directory, options.runs)))
        return 0
    directory = options.directory or Path(tempfile.mkdtemp(prefix="penstock-bench-spark-"))
    try:
        rows = _measure(directory, options)
    finally:
        if options.directory is None:
            shutil.rmtree(directory)
    for row in rows:
        print("| " + " | ".join(str(each) for each in row.values()) + " |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


def _measure(directory: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    whole, day = directory / "log", directory / "day"
    expected = write_log(whole, options.deliveries, days=DAYS)
    rows = [_backfill(whole)]
    if options.only != "reads":
        rows += _reconciliation(whole, day, expected, options)
    if options.only != "reconcile":
        rows += _run_job("reads", "", whole, options.runs)
    return rows


def _reconciliation(whole: Path, day: Path, expected: Expected, options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for engine in options.engines.split(","):
        found = _run_job(engine, "reconcile,join", whole, options.runs)
        for job, figures in found.items():
            rows.append({"what": f"{job}, {engine}", **figures})
            if job == "reconcile" and engine != "polars":
                _check(whole / "out" / "summary.json", expected)
    _last_day(whole, day)
    since = time.strftime("%Y-%m-%d", time.gmtime(START_MS / 1000 + (DAYS - 1) * 86_400))
    for engine in options.engines.split(","):
        if engine != "polars":
            for what, at, job in (("a day after 30", whole, f"since {since}"), ("that day alone", day, "reconcile")):
                rows += [{"what": f"{what}, {engine}", **_run_job(engine, job, at, options.runs)[job]}]
    if options.base:
        rows.append({"what": f"reconcile, {options.base}", **_run_base(options.base, whole)})
    return rows


def _backfill(data_dir: Path) -> dict[str, Any]:
    from penstock.spark.parquet.writer import backfill

    before_s, began_s = time.process_time(), time.monotonic()
    records = sum(sum(segment.rows.values()) for segment in backfill(data_dir))
    cpu_s = time.process_time() - before_s
    size = sum(path.stat().st_size for path in (data_dir / "tables").rglob("*.parquet"))
    return {
        "what": f"tables of {records:,} rows, {records / cpu_s:,.0f} rows/s a core, {size / records:.1f} B a row",
        "s": round(time.monotonic() - began_s, 1),
        "cpu_s": round(cpu_s, 1),
        "mib": "",
    }


def _last_day(whole: Path, day: Path) -> None:
    """Make a log of the segments that have the last day, with tables."""
    from penstock.spark.parquet.writer import backfill

    (day / "commitlog").mkdir(parents=True)
    date = time.strftime("%Y-%m-%d", time.gmtime(START_MS / 1000 + (DAYS - 1) * 86_400))
    names = {path.stem: path.parent.name for path in (whole / "tables" / "open").rglob("*.parquet")}
    before = max(name for name, of in names.items() if of < f"date={date}")
    for path in (whole / "commitlog").iterdir():
        if path.stem >= before:
            os.link(path, day / "commitlog" / path.name)
    list(backfill(day))


def _run_job(engine: str, jobs: str, data_dir: Path, runs: int) -> Any:
    """Run a job in a process of its own; return its figures."""
    command = [
        sys.executable,
        "-m",
        "bench",
        "spark",
        "--directory",
        data_dir,
        "--runs",
        str(runs),
        "--job",
        f"{engine},{jobs}",
    ]
    ended = subprocess.run([str(each) for each in command], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(ended.stdout.splitlines()[-1])


def _run_base(tree: Path, data_dir: Path) -> dict[str, Any]:
    out = data_dir / "base"
    command = [tree / ".venv/bin/python", "-m", "penstock", "reconcile", "--data-dir", data_dir, "--out", out]
    began_s, cpu_s = time.monotonic(), 0.0
    process = subprocess.Popen([str(each) for each in command], cwd=tree, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        cpu_s = max(cpu_s, _tree_s(process.pid))  # Spark's workers end with it
        time.sleep(0.2)
    return {"s": round(time.monotonic() - began_s, 1), "cpu_s": round(cpu_s, 1), "mib": f"exit {process.returncode}"}


def _tree_s(pid: int) -> float:
    """Return the processor time of a process, of those below it, and of those that they have waited for."""
    total = 0.0
    with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            total += sum(_tree_s(int(child)) for child in path.read_text().split())
    return total


def _check(path: Path, expected: Expected) -> None:
    totals = json.loads(path.read_text())["totals"]
    for found, known in ((totals["outcomes"], expected.outcomes), (totals["message_outcomes"], expected.messages)):
        assert {name: count for name, count in found.items() if count} == dict(known), (found, known)
    assert (totals["extensions"], totals["orphans"]) == (expected.extensions, 0), totals


# --- a job, in its process --------------------------------------------------------------------------------------------


def _job(engine: str, *jobs_and_more: Any) -> Any:
    *jobs, data_dir, runs = jobs_and_more
    if engine == "reads":
        return sparkreads.measure(data_dir, runs)
    run = {"spark": _spark, "duckdb": _duckdb, "polars": _polars}[engine](data_dir, jobs)
    samples: dict[str, list[tuple[float, float]]] = {job: [] for job in run}
    for _ in range(runs):
        for job, work in run.items():
            before_s, began_s = processor_s(os.getpid()), time.monotonic()
            work()
            samples[job].append((time.monotonic() - began_s, processor_s(os.getpid()) - before_s))
    return {
        job: {
            "s": round(median(wall for wall, _ in taken), 1),
            "cpu_s": round(median(cpu for _, cpu in taken), 1),
            "mib": _peak_mib(os.getpid()),
        }
        for job, taken in samples.items()
        if taken
    }


def _peak_mib(pid: int) -> int:
    """Return the largest resident size of a process and of its children, added up, in MiB."""
    total = 0
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            total += int(line.split()[1]) // 1024
    children = [child for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]
    return total + sum(_peak_mib(int(child)) for child in children)


def _works(jobs: Sequence[str], reconcile: Callable[[str | None], Any], join: Callable[[], Any]) -> Works:
    works: dict[str, Callable[[], Any]] = {}
    for job in jobs:
        since = job.removeprefix("since ") if job.startswith("since ") else None
        works[job] = join if job == "join" else partial(reconcile, since)
    return works


def _spark(data_dir: Path, jobs: Sequence[str]) -> Works:
    from penstock.spark import reconcile
    from penstock.spark.reconciliation.engines import SIZE_FACTOR, TABLES_FACTOR
    from penstock.spark.reconciliation.reconcile import ReconcileOptions
    from penstock.spark.session import open_session

    spark = open_session("local[2]", "penstock bench", is_brief=True)
    spark.sql("SELECT 1").collect()

    def join() -> None:
        spark.conf.set(SIZE_FACTOR, TABLES_FACTOR)  # else Spark takes the tables for small ones, and runs out of memory
        for table in ("deliveries", "ends"):
            spark.read.parquet(str(data_dir / "tables" / table)).createOrReplaceTempView(table)
        spark.sql(PLAIN).write.mode("overwrite").parquet(str(data_dir / "joined"))

    return _works(jobs, lambda since: reconcile(spark, data_dir, data_dir / "out", ReconcileOptions(since=since)), join)


def _duckdb(data_dir: Path, jobs: Sequence[str]) -> Works:
    import duckdb

    from penstock.spark.reconciliation.engines import DUCKDB_MEMORY, DuckEngine
    from penstock.spark.reconciliation.reconcile import ReconcileOptions, reconcile

    def run(since: str | None) -> None:
        engine = DuckEngine(data_dir / "spilled")
        reconcile(engine, data_dir, data_dir / "out", ReconcileOptions(since=since))
        engine.close()

    def join() -> None:
        config: dict[str, Any] = {"memory_limit": DUCKDB_MEMORY, "temp_directory": str(data_dir / "spilled")}
        connection = duckdb.connect(config=config)
        connection.execute("SET preserve_insertion_order = false")
        for table in ("deliveries", "ends"):
            connection.execute(f"CREATE VIEW {table} AS FROM read_parquet('{data_dir}/tables/{table}/*/*.parquet')")
        connection.execute(f"COPY ({PLAIN}) TO '{data_dir}/joined.parquet' (FORMAT parquet, COMPRESSION zstd)")
        connection.close()

    return _works(jobs, run, join)


def _polars(data_dir: Path, jobs: Sequence[str]) -> Works:
    try:
        import polars
    except ModuleNotFoundError:
        print("polars is not installed, so its row is left out", file=sys.stderr)
        return {}

    def join() -> None:
        deliveries, ends = (
            polars.scan_parquet(str(data_dir / "tables" / table / "**/*.parquet"), hive_partitioning=False)
            for table in ("deliveries", "ends")
        )
        columns = ["key", "group_id", "message_position", "attempt", "at_ms", "deadline_ms"]
        joined = deliveries.select(columns).join(ends.select("key", "at_ms", "cause"), on="key", how="full", coalesce=True)
        joined.sink_parquet(str(data_dir / "joined-by-polars.parquet"))

    return {"join": join}
