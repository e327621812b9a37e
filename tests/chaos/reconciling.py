"""Spark's report on the log of a round, compared with what the consumers saw: `python -m tests.chaos.reconciling`.

The process opens one Spark session. For each line on standard input, the name of a data directory, it answers with a line of
JSON. A session takes longer to start than a round to play, so a campaign has one per worker, for a share of its rounds.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.chaos.launching import ROOT, python_path
from tests.chaos.ledger import Consumed, Key, Ledger, key_of

GRACE_MS = 10_000
"""A delivery that is unsettled so long after its deadline is lost. A round may be shorter than the default of the command."""

ANSWER_S_MAX = 900
"""A session starts in some seconds, or in minutes beside other work."""

ACKED = {"acked", "acked_late"}

Delivery = tuple[int, int]
"""Position of a message, and attempt."""


def missing_for_spark() -> str:
    """Return why this machine can't run Spark, or an empty string."""
    if find_spec("pyspark") is None:
        return "pyspark is not installed"
    return "" if shutil.which("java") else "there is no Java"


class Reconciler:
    """A Spark session in a process of its own, which begins with the first report."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    async def report(self, data_dir: Path) -> dict[str, Any]:
        """Return the summary, all deliveries, and the names of all messages of the log of a stopped node."""
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.chaos.reconciling"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=ROOT,
                env={**os.environ, **python_path()},
                limit=1 << 28,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{data_dir}\n".encode())
        async with asyncio.timeout(ANSWER_S_MAX):
            line = await self._process.stdout.readline()
        if not line:
            raise OSError("the process of Spark has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            await self._process.wait()


def compare(ledger: Ledger, report: dict[str, Any]) -> None:
    """Report to the ledger where Spark's report contradicts what clients were told and what they saw."""
    totals = report["summary"]["totals"]
    bad = {name: totals["outcomes"][name] for name in ("lost", "acked_late", "conflicting")}
    bad["lost_messages"] = totals["message_outcomes"]["lost"]
    if ledger.is_state_intact and not ledger.may_repeat:
        bad["orphans"] = totals["orphans"]
    for name, count in bad.items():
        if count:
            ledger.report("spark", f"Spark counts {count} deliveries as {name}")
    ledger.check_messages("Spark's table of records", {Key(*name) for name in report["messages"]})
    outcomes: dict[str, dict[Delivery, set[str]]] = {}
    for group, position, attempt, outcome in report["deliveries"]:
        outcomes.setdefault(group, {}).setdefault((position, attempt), set()).add(outcome)
    for consumed in ledger.consumed.values():
        if consumed.is_judged and not ledger.may_repeat:
            _compare_group(ledger, consumed, outcomes.get(consumed.name, {}))


def _compare_group(ledger: Ledger, group: Consumed, outcomes: dict[Delivery, set[str]]) -> None:
    """Compare the deliveries of a group. Retention may have dropped those that Spark doesn't have.

    An attempt may have several deliveries: a consumer that extends or suspends one gets another, of the same attempt.
    """
    for message_id, attempts in group.taken.items():
        for attempt in attempts:
            found = outcomes.get((int(message_id, 16), attempt), set())
            what = f"{message_id}, attempt {attempt}, of group {group.name}"
            if not found and not ledger.log_start:
                ledger.report("spark", f"Spark has no delivery of {what}")
            if found and group.acked.get(message_id) == attempt and not found & ACKED:
                ledger.report("spark", f"{what} was acknowledged; Spark says {', '.join(found)}")
            if found & ACKED and attempt not in group.asked.get(message_id, ()):
                ledger.report("spark", f"nobody acknowledged {what}; Spark says {', '.join(found)}")


def main() -> None:
    from pyspark.sql import functions as F

    from penstock.spark.reconciliation.engines import SparkEngine
    from penstock.spark.reconciliation.reconcile import ReconcileOptions, reconcile
    from penstock.spark.session import open_session

    class Everything(SparkEngine):
        """Keeps the outcome of each delivery, also of those that were acknowledged in time."""

        deliveries: list[tuple[Any, ...]]

        def materialise(self, name: str, sql: str, directory: Path | None) -> None:
            super().materialise(name, sql, directory)
            if name == "outcomes":
                columns = "group_name, message_position, attempt"
                others = self.rows(f"SELECT {columns}, outcome FROM outcomes WHERE stage <> 'waiting'")
                acked = self.rows(f"SELECT {columns}, 'acked' AS outcome FROM acks")
                self.deliveries = [tuple(row.values()) for row in others + acked]

    spark = open_session("local[1]", "penstock chaos")
    for line in sys.stdin:
        data_dir = line.strip()
        engine = Everything(spark)
        with tempfile.TemporaryDirectory() as out:
            summary = reconcile(engine, data_dir, out, ReconcileOptions(grace_ms=GRACE_MS))
        engine.close()
        records = spark.read.format("penstock").schema("kind string, body binary").option("table", "records").load(data_dir)
        bodies = records.where(F.col("kind").isin("MESSAGE", "COPIED")).select("kind", "body").collect()
        answer = {
            "summary": summary,
            "deliveries": engine.deliveries,
            "messages": [key for kind, body in bodies if (key := _key(kind, bytes(body))) is not None],
        }
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _key(kind: str, body: bytes) -> Key | None:
    """Return the name of the publication that a record is, or is a copy of."""
    from penstock.store import record

    return key_of(record.decode(body, verify=False).body if kind == "COPIED" else body)


if __name__ == "__main__":
    main()
