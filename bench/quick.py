"""`python -m bench quick`: what a message costs on the hot paths, beside the tree before, in less than three minutes.

    python -m bench quick                    # beside HEAD, or beside the commit before it where nothing is changed
    python -m bench quick --base v1.2

The rows are those of `bench.compare`, with a quarter of the messages. Both trees are measured in turn, because a figure of
another hour says nothing about this one. `bench/kept.json` keeps the figures of the base and what they were measured on. The
exit status is 1 when a row failed, or when a message costs more than 1.10 times the processor time that it costs in the base.
"""

from __future__ import annotations

import io
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import orjson
from rich.table import Table

from bench import compare
from bench.rows import Found, Row, machine, parser_of, run
from bench.trees import ROOT

ROWS = {
    name: compare.EVERY_ROW[name]
    for name in (
        "fanout-acked",
        "window",
        "one-to-one",
        "hundred-single",
        "many-single",
        "devices",
        "delayed",
        "send-large",
        "pop",
        "worker",
        "append",
    )
}
RUNS = 5
SHARE = 4
"""A row has one of so many of the messages that it has in `bench.compare`."""
WORSE_MAX = 10.0
"""Percent by which a message may cost more processor time than in the base."""
KEPT = Path(__file__).with_name("kept.json")


def git(*arguments: str) -> bytes:
    """Run git in this checkout, and return its output."""
    return subprocess.run(["git", *arguments], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout


def commit_before() -> str:
    """Return the commit to compare with: HEAD, or the one before it where the work tree is HEAD."""
    return "HEAD" if git("status", "--porcelain", "--untracked-files=no").strip() else "HEAD~1"


def extract(commit: str, directory: Path) -> None:
    """Write the files of a commit to a directory."""
    with tarfile.open(fileobj=io.BytesIO(git("archive", "--format=tar", commit))) as archive:
        archive.extractall(directory, filter="data")


def keep(commit: str, found: Found, about: Mapping[str, object]) -> None:
    """Write what the base's messages cost, and where that was measured, to `KEPT`."""
    figures = {figure.partition("@")[0]: median(runs) for figure, runs in found.items() if figure.endswith(f"@{compare.BASE}")}
    KEPT.write_bytes(orjson.dumps({"commit": commit, "machine": about, "figures": figures}, option=orjson.OPT_INDENT_2) + b"\n")


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison and return the exit status: 1 when a row failed or became slower."""
    parser = parser_of("quick", "Compare the hot paths of this tree with those of a commit.", ROWS, runs=RUNS)
    parser.add_argument(
        "--base",
        dest="commit",
        metavar="COMMIT",
        help="Commit to compare with (HEAD; the one before it where nothing is changed).",
    )
    compare.add_base_command(parser)
    options = parser.parse_args(arguments)
    try:
        wanted = options.commit or commit_before()
        commit = git("rev-parse", "--verify", "--end-of-options", f"{wanted}^{{commit}}").decode().strip()
    except subprocess.CalledProcessError:
        parser.error("There is no such commit. The benchmark needs a checkout with the commit to compare with.")
    slower: list[str] = []

    def table_of(title: str, found: Found, chosen: Mapping[str, Row]) -> Table:
        slower.extend(line.row for line in compare.compared(found, chosen) if not line.is_within(WORSE_MAX))
        if not options.quick:
            keep(commit, found, machine(Path(tempfile.gettempdir() if options.dir is None else options.dir)))
        return compare.table_of(f"{title}, base {commit[:12]}", found, chosen, WORSE_MAX)

    with tempfile.TemporaryDirectory(prefix="penstock-base-") as directory:
        extract(commit, Path(directory))
        parser.set_defaults(base=Path(directory), share=SHARE)
        return run(parser, ROWS, arguments, failures=compare.FAILURES, table_of=table_of) or int(bool(slower))
