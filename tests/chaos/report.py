"""The table of a campaign: what was injected, and what came of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from tests.chaos.catalogue import FAULTS

COLUMNS = ("fault", "injected", "acknowledged", "refused", "repaired", "destroyed, and reported", "came again", "found")


@dataclass(slots=True)
class Row:
    """The sums of one fault."""

    injected: int = 0
    acked: int = 0
    refused: int = 0
    repaired: int = 0
    excused: int = 0
    problems: int = 0
    repeats: int = 0
    unmarked: int = 0


FIGURES = tuple(field.name for field in fields(Row))


class Report:
    """Adds up verdicts."""

    def __init__(self, command: str, seed: str) -> None:
        self.command = command
        self.seed = seed
        self.rows: dict[str, Row] = {}
        self.rounds = 0
        self.reconciled = 0
        self.sent = 0
        self.acked = 0
        self.failed: list[dict[str, Any]] = []
        self.skipped: dict[str, str] = {}

    def add(self, verdict: dict) -> None:
        """Add the verdict of a round, as `Verdict.as_dict` returned it."""
        self.rounds += 1
        self.reconciled += verdict["is_reconciled"]
        self.sent += verdict["sent"]
        self.acked += verdict["acked"]
        for outcome in verdict["outcomes"]:
            row = self.rows.setdefault(outcome["fault"], Row())
            for name in FIGURES:
                setattr(row, name, getattr(row, name) + outcome[name])
        if verdict["problems"]:
            self.failed.append(verdict)

    @property
    def injected(self) -> int:
        return sum(row.injected for row in self.rows.values())

    def text(self) -> str:
        """Return the report as Markdown."""
        lines = [
            f"{self.injected:,} faults in {self.rounds:,} rounds, {self.sent:,} messages sent, {self.acked:,} acknowledged. "
            f"Spark's report was compared in {self.reconciled:,} rounds. "
            f"Seed {self.seed}: `{self.command}`.",
            "",
            *_table(COLUMNS, (_cells(name, row) for name, row in sorted(self.rows.items()))),
        ]
        if self.skipped:
            lines += ["", "Skipped:", "", *(f"- {name}: {why}" for name, why in sorted(self.skipped.items()))]
        for verdict in self.failed:
            problems = verdict["problems"]
            lines += ["", f"Round {verdict['seed']} failed:", "", *(f"- {problem}" for problem in problems)]
        return "\n".join(lines) + "\n"


def _cells(name: str, row: Row) -> tuple[str, ...]:
    figures = (row.injected, row.acked, row.refused, row.repaired, row.excused, row.repeats, row.problems)
    return (f"`{name}`: {FAULTS[name].summary}", *(f"{figure:,}" for figure in figures))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]
