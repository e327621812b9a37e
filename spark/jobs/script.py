"""Runs a job as a script: the arguments that all jobs have, a session, and errors as one sentence."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from penstock.spark import messages, segments
from penstock.spark.errors import ReadOptionInvalid, ReconcileError
from penstock.spark.reconciliation.command import LOCAL_MASTER, status_of
from penstock.spark.session import open_session
from penstock.store.errors import StoreError

SPARK_FAILED = 1
"""Exit status if Spark fails. Its message ends with the error of the worker, such as that of a damaged record."""


def run(parser: ArgumentParser, show: Callable[[DataFrame, Namespace], None], arguments: Sequence[str] | None = None) -> int:
    """Show what a job finds in the messages of a log.

    Args:
        parser: knows the options of the job.
        show: prints the tables of the job, given the messages and the options.
        arguments: the words of the command line, those of the process by default.

    Returns:
        The exit status: 0, `SPARK_FAILED`, or that of `penstock reconcile` for the same error.
    """
    parser.add_argument("data_dir", metavar="DATA_DIR", help="Data directory of a node, which may be running.")
    parser.add_argument("--master", default=LOCAL_MASTER, help="URL of a Spark master, or of Spark Connect (%(default)s).")
    options = parser.parse_args(arguments)
    try:
        segments.find(options.data_dir)
        show(messages(open_session(options.master, parser.prog, is_brief=True), options.data_dir), options)
    except (ReconcileError, StoreError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return status_of(error)
    except PySparkException as error:
        reason = [line for line in str(error).splitlines() if line.strip()]
        print(f"{parser.prog}: Spark failed: {reason[-1].strip() if reason else type(error).__name__}", file=sys.stderr)
        return SPARK_FAILED
    return 0


def moment_ms(text: str) -> int:
    """Return a time of the command line, in UTC without a zone, in ms since 1970."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no time. Give one such as 2026-11-28T12:00:00+01:00.") from None
    return round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def check_bounds(least: float, **values: float | None) -> None:
    """Check values by their names. None is always valid.

    Raises:
        ReadOptionInvalid: a value is below `least`.
    """
    for name, value in values.items():
        if value is not None and not value >= least:
            raise ReadOptionInvalid(f"{name} is {value}, but must be at least {least}.")
