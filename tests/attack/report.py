"""The table of a run: for each attack the honest clients' latency, what was lost, memory, and what the attacker got."""

from __future__ import annotations

from tests.attack.catalogue import ATTACKS
from tests.attack.honest import percentile
from tests.attack.row import Verdict

COLUMNS = (
    "attack",
    "publish to PUBACK",
    "publish to subscriber",
    "publish to POP",
    "login",
    "own timers",
    "disk",
    "lost",
    "memory before / peak / after",
    "the attacker got",
    "passed",
)
"""Columns of the table of a report. Pairs are the p99 undisturbed and under attack."""


def _ms(values: list[float], percent: float) -> str:
    return f"{1000 * percentile(values, percent):.1f}" if values else "-"


def _change(peace: list[float], war: list[float]) -> str:
    return f"{_ms(peace, 99)} → {_ms(war, 99)}"


def _got(saw: dict[str, int]) -> str:
    most = sorted(saw.items(), key=lambda one: -one[1])[:4]
    return ", ".join(f"{count:,} times {name}" for name, count in most) or "nothing"


def line(verdict: Verdict) -> str:
    """Return a verdict as one line for people."""
    state = "ok" if verdict.is_passed else "FAILED"
    return "\n    ".join(
        [
            f"{verdict.attack}: {state}; PUBACK p99 {_change(verdict.peace.acked_s, verdict.war.acked_s)} ms, delivery "
            f"{_change(verdict.peace.delivered_s, verdict.war.delivered_s)}, POP "
            f"{_change(verdict.peace.popped_s, verdict.war.popped_s)}, login "
            f"{_change(verdict.peace.logins_s, verdict.war.logins_s)}, own timers "
            f"{_change(verdict.peace.lags_s, verdict.war.lags_s)}, disk of a bystander "
            f"{_change(verdict.peace.disk_s, verdict.war.disk_s)}; {verdict.lost} of {verdict.acked:,} lost; memory "
            f"{verdict.before_mib:.0f} / {verdict.peak_mib:.0f} / {verdict.after_mib:.0f} MiB; got {_got(verdict.saw)}",
            *verdict.problems,
            *verdict.slow,
        ]
    )


def table(verdicts: list[Verdict], command: str) -> str:
    """Return the report as Markdown."""
    rows = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    for one in verdicts:
        peace, war = one.peace, one.war
        cells = (
            f"`{one.attack}`",
            _change(peace.acked_s, war.acked_s),
            _change(peace.delivered_s, war.delivered_s),
            _change(peace.popped_s, war.popped_s),
            _change(peace.logins_s, war.logins_s),
            _change(peace.lags_s, war.lags_s),
            _change(peace.disk_s, war.disk_s),
            f"{one.lost} of {one.acked:,}",
            f"{one.before_mib:.0f} / {one.peak_mib:.0f} / {one.after_mib:.0f}",
            _got(one.saw),
            _passed(one),
        )
        rows.append(f"| {' | '.join(cells)} |")
    passed = sum(one.is_passed for one in verdicts)
    found = [f"`{command}`: {passed} of {len(verdicts)} attacks passed. Times are in ms, memory in MiB.", "", *rows, ""]
    for one in verdicts:
        found += [f"- `{one.attack}`: {problem}" for problem in (*one.problems, *one.slow)]
    found += ["", "| attack | what it is | what the attacker must get |", "|---|---|---|"]
    found += [f"| `{one.name}` | {one.summary} | {one.must_get} |" for one in (ATTACKS[each.attack] for each in verdicts)]
    return "\n".join(found) + "\n"


def _passed(verdict: Verdict) -> str:
    if not verdict.is_passed:
        return "**no**"
    return "yes" if verdict.tries == 1 else f"yes, at try {verdict.tries}"
