"""Metrics of access control."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.access.control import AccessControl
from penstock.node.metrics.families import counter, gauge, labelled_counter


class AccessCollector(Collector):
    """Figures of the rules, the bans and the audit log.

    Parameters:
        access: of the node.
    """

    def __init__(self, access: AccessControl) -> None:
        self._access = access

    def collect(self) -> Iterator[Metric]:
        access = self._access
        policy, passwords, audit = access.policy, access.passwords, access.audit
        rules = len(policy.rules.rules) if policy is not None else 0
        yield gauge("penstock_access_rules", "Rules in force.", rules)
        users = len(passwords.hashes) if passwords is not None else 0
        yield gauge("penstock_access_users", "Users in the password file.", users)
        yield gauge("penstock_access_bans", "Bans that have not ended.", len(access.bans))
        yield labelled_counter(
            "penstock_access_reloads",
            "Reloads of access control. After a failure the old content holds.",
            ["result"],
            {("done",): access.reloads, ("failed",): access.reloads_failed},
        )
        yield labelled_counter(
            "penstock_access_events",
            "Audited events, also without an audit file.",
            ["event"],
            {(event,): count for event, count in sorted(audit.counts.items())},
        )
        yield counter(
            "penstock_audit_lines_lost",
            "Lines of the audit log that could not be written.",
            audit.lost,
        )
