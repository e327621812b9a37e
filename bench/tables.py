"""`python -m bench tables`: write the measured figures of README.md and docs/performance.md anew, from files in bench/figures.

    python -m bench mqtt --json bench/figures/mqtt.json
    python -m bench tables

A page has a table between two comments. The first one names the file, and the figures if the table has not all of them:

    <!-- figures: mqtt window,fanout -->
    <!-- end of figures -->
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from statistics import median
from typing import Any

import orjson

from bench.rows import text_of
from bench.trees import ROOT

FIGURES = ROOT / "bench" / "figures"
PAGES = (ROOT / "README.md", ROOT / "docs" / "performance.md")

_BLOCK = re.compile(r"(<!-- figures: (\w+)(?: ([\w,-]+))? -->\n).*?(<!-- end of figures -->)", re.DOTALL)


class TableFailed(Exception):
    """Raised when a page asks for what was not measured. The message says for what."""


def table_of(measured: dict[str, Any], only: list[str]) -> str:
    """Return a table in Markdown: a line for each figure, with the median of its runs for each broker that was measured.

    Args:
        measured: what a benchmark wrote with `--json`.
        only: names of the figures; all if empty.

    Raises:
        TableFailed: a figure was not measured.
    """
    figures, lines = measured["figures"], {line["figure"]: line for line in measured["lines"]}
    chosen = only or [name for name in lines if name in figures]
    if missing := [name for name in chosen if name not in lines or name not in figures]:
        raise TableFailed(f"There is no figure {', '.join(missing)}. The figures are {', '.join(lines)}.")
    named = (figure.partition("@") for figure in figures)
    brokers = list(dict.fromkeys(broker for name, _, broker in named if broker and name in chosen))
    rows = [["", *brokers, "median", "lowest to highest"], ["---", *["--:"] * (len(brokers) + 2)]]
    for name in chosen:
        runs, unit = figures[name], lines[name]["unit"]
        columns = [figures.get(f"{name}@{broker}") for broker in brokers]
        rows.append(
            [
                lines[name]["title"],
                *(text_of(median(column)) if column else "" for column in columns),
                f"{text_of(median(runs))} {unit}".rstrip(),
                f"{text_of(min(runs))} to {text_of(max(runs))}" if len(runs) > 1 else "",
            ]
        )
    about = measured["machine"]
    where = f"{about['cpus']} processors, {about['filesystem']}, Python {about['python']}"
    said = (
        f"Measured on {about['date']} on commit {about['commit']}: {where}; medians of {max(map(len, figures.values()))} runs."
    )
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), "", said, ""])


def with_tables(page: str, folder: Path) -> str:
    """Return a page with all its tables made anew from the files in `folder`.

    Raises:
        TableFailed: the page has no table, or a figure was not measured.
    """

    def made(block: re.Match[str]) -> str:
        begin, name, only, end = block.groups()
        path = folder / f"{name}.json"
        if not path.exists():
            raise TableFailed(f"{path} does not exist. `python -m bench {name} --json {path}` measures it.")
        return begin + table_of(orjson.loads(path.read_bytes()), only.split(",") if only else []) + end

    text, tables = _BLOCK.subn(made, page)
    if not tables:
        raise TableFailed("The page has no table. `python -m bench tables --help` says how one begins.")
    return text


def main(arguments: list[str] | None = None) -> int:
    """Write the pages and return the exit status: 1 when a figure is missing."""
    formatter = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser("python -m bench tables", description=__doc__, formatter_class=formatter).parse_args(arguments)
    try:
        made = {page: with_tables(page.read_text("utf-8"), FIGURES) for page in PAGES}
    except TableFailed as error:
        print(error, file=sys.stderr)
        return 1
    for page, text in made.items():
        page.write_text(text, "utf-8")
    return 0
