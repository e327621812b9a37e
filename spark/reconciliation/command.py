"""The command `penstock reconcile`."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self

import orjson

from penstock.install import install_hint
from penstock.spark import segments
from penstock.spark.errors import EngineMissing, JavaMissing, LogMissing, NodeUnreadable, ReadOptionInvalid, ReconcileError
from penstock.spark.java import java_version
from penstock.spark.reconciliation import terminal
from penstock.spark.reconciliation.engines import DuckEngine, Engine, SparkEngine
from penstock.spark.reconciliation.nodecheck import ReadState
from penstock.spark.reconciliation.reconcile import ReconcileOptions, check_options, check_out, reconcile
from penstock.spark.reconciliation.summary import Summary
from penstock.store.errors import StoreError

EngineName = Literal["auto", "spark", "duckdb"]

LOCAL_MASTER = "local[*]"

FOUND, INCOMPLETE = 1, 6
"""Exit statuses of a reconciliation that has found something, and of one in which some outcomes are unknown."""

STATUSES: dict[type[Exception], int] = {LogMissing: 3, StoreError: 4, JavaMissing: 5, EngineMissing: 5, NodeUnreadable: 7}
"""Exit statuses for reasons why there is no reconciliation: no log, a damaged log, nothing that could run it, no answer of the
node to compare with. For others it is 2: wrong usage, such as a directory in use or an invalid option."""


def status_of(error: ReconcileError | StoreError) -> int:
    """Return the exit status for an error."""
    return next((status for kind, status in STATUSES.items() if isinstance(error, kind)), 2)


def status_of_summary(summary: Summary) -> int:
    """Return the exit status for a reconciliation."""
    if not summary["ok"]:
        return FOUND
    return 0 if summary["complete"] else INCOMPLETE


class StageDisplay(Protocol):
    """Shows within its context what a command does at the moment."""

    def begin(self, what: str, /) -> None:
        """End the present stage, and begin another."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


class _Silent:
    """Shows nothing."""

    def begin(self, what: str, /) -> None:
        pass


def choose(engine: EngineName, master: str) -> Literal["spark", "duckdb"]:
    """Return what runs the SQL: Spark where it and Java are installed, else DuckDB.

    Raises:
        EngineMissing: the engine is not installed, or DuckDB is wanted and a master of Spark is given.
        JavaMissing: Spark is wanted, and there is no Java that it can use.
    """
    if engine == "duckdb" and master != LOCAL_MASTER:
        raise ReadOptionInvalid(f"The master {master} is for Spark, and the engine is duckdb. Leave one of them out.")
    if engine == "spark" or master != LOCAL_MASTER:
        if find_spec("pyspark") is None:
            raise EngineMissing(f"Spark is not installed: {install_hint('spark')}, or use --engine duckdb.")
        if not master.startswith("sc://"):
            java_version()
        return "spark"
    if engine == "auto" and find_spec("pyspark") is not None:
        try:
            java_version()
        except JavaMissing:
            pass
        else:
            return "spark"
    if find_spec("duckdb") is None:
        raise EngineMissing(f"DuckDB is not installed: {install_hint('tables')}.")
    return "duckdb"


@contextmanager
def opened(engine: Literal["spark", "duckdb"], master: str, scratch: Path) -> Iterator[Engine]:
    """Open an engine, and close it in the end. A session of Spark that was open before stays open."""
    if engine == "duckdb":
        duck = DuckEngine(scratch)
        try:
            yield duck
        finally:
            duck.close()
        return
    from pyspark.sql import SparkSession

    from penstock.spark.session import open_session

    was_open = SparkSession.getActiveSession() is not None
    spark = open_session(master, "penstock reconcile", is_brief=True)
    ready = SparkEngine(spark)
    try:
        yield ready
    finally:
        if was_open:
            ready.close()
        else:
            spark.stop()


def run(
    data_dir: str | Path,
    out: str | Path | None = None,
    *,
    engine: EngineName = "auto",
    master: str = LOCAL_MASTER,
    json: bool = False,
    options: ReconcileOptions | None = None,
    stages: StageDisplay | None = None,
    read_state: ReadState | None = None,
) -> int:
    """Reconcile a log, write the report to `out` if it is given, and print it. This is the command `penstock reconcile`.

    With `json`, the command prints only the summary. Errors go to stderr. `stages` shows what it does at the moment.
    With `read_state`, the report is compared with a running node.

    Returns:
        The exit status: 0 if all is well, `FOUND`, `INCOMPLETE`, or one of `STATUSES`.
    """
    scratch = Path(tempfile.mkdtemp(prefix="penstock-reconcile-"))
    try:
        options = options or ReconcileOptions()
        check_options(options, has_node=read_state is not None)
        if out is not None:
            check_out(Path(out))
        segments.find(data_dir)
        chosen = choose(engine, master)
        if out is None and not (master.startswith("local") or chosen == "duckdb"):
            raise ReadOptionInvalid(f"The executors of {master} need a directory that they can see. Name one with --out.")
        with stages or nullcontext(_Silent()) as shown:
            shown.begin("start Spark" if chosen == "spark" else "start DuckDB")
            with opened(chosen, master, scratch / "spilled") as ready:
                summary = reconcile(ready, data_dir, out or scratch / "report", options, shown.begin, read_state)
                shown.begin("stop Spark" if chosen == "spark" else "stop DuckDB")
    except (ReconcileError, StoreError) as error:
        print(f"penstock reconcile: {error}", file=sys.stderr)
        return status_of(error)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if json:
        sys.stdout.write(orjson.dumps(summary, option=orjson.OPT_INDENT_2).decode() + "\n")
    else:
        terminal.show(summary)
    return status_of_summary(summary)
