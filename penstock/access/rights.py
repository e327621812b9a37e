"""What the rules let one subject do."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Final, NamedTuple

from penstock.access.actions import CONSUME, FILTER_ACTIONS, SUBSCRIBE, TOPIC_ACTIONS
from penstock.access.rule import Rule
from penstock.access.ruleset import RuleSet
from penstock.access.subject import Subject, Texts
from penstock.access.trie import NO_RULE, RuleTrie
from penstock.store.topics import is_wildcard

SHARE: Final = "$share/"
"""The beginning of the filter of a shared subscription (MQTT 5.0, 4.8.2)."""

STEPS_MAX: Final = 300
"""Maximum number of denying rules that a decision on one filter looks at. A filter that touches more is denied."""

GROUPS_REMEMBERED: Final = 1000
"""Decisions on groups that the rights of one subject remember. All are forgotten when this number is reached."""


class Decision(NamedTuple):
    """What was decided, and why."""

    is_allowed: bool
    rule: Rule | None
    """The rule that decided; None if no rule applies."""
    part: str = ""
    """The part of a filter that `rule` denies."""


class _TooManySteps(Exception):
    """Raised when a decision on a filter would take too long."""


class _Steps:
    """Counts the steps of a decision."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = STEPS_MAX

    def take(self) -> None:
        """Count a step. Raises _TooManySteps."""
        self._left -= 1
        if self._left < 0:
            raise _TooManySteps


class Rights:
    """What one subject may do.

    Parameters:
        rules: of the access file.
        subject: who acts.
        stated: the subject without the roles that the access file gives it, for which other rules make other rights.
        allows_unmatched: what no rule applies to is allowed.
    """

    __slots__ = ("_allowing", "_allows_unmatched", "_denying", "_groups", "_of_groups", "_rules", "_texts", "stated", "subject")

    def __init__(self, rules: RuleSet, subject: Subject, stated: Subject, *, allows_unmatched: bool) -> None:
        self.subject = subject
        self.stated = stated
        self._rules = rules.rules
        self._allows_unmatched = allows_unmatched
        self._texts = Texts(subject)
        found = rules.of(subject)
        self._allowing = {action: _tries(each.allowing.get(action) for each in found) for action in TOPIC_ACTIONS}
        self._denying = {action: _tries(each.denying.get(action) for each in found) for action in TOPIC_ACTIONS}
        self._of_groups = sorted((entry for each in found for entry in each.of_groups), key=lambda entry: entry[0])
        self._groups: dict[tuple[str, str], Decision] = {}

    def may(self, action: str, name: str) -> bool:
        """Return whether the subject may perform an action.

        Args:
            action: one of `ACTIONS`.
            name: a topic without wildcards, a filter for `FILTER_ACTIONS`, or the name of a group; an empty one means all
                groups. `$share/GROUP/FILTER` is a subscription that consumes a group.
        """
        return self.decide(action, name).is_allowed

    def decide(self, action: str, name: str) -> Decision:
        """Return what the rules say of an action. The arguments are those of `may`."""
        if action not in TOPIC_ACTIONS:
            return self._decide_group(action, name)
        if action == SUBSCRIBE and name.startswith(SHARE):
            group, _, name = name.removeprefix(SHARE).partition("/")
            decision = self._decide_group(CONSUME, group)
            if not decision.is_allowed:
                return decision
        if action in FILTER_ACTIONS and is_wildcard(name):
            return self.covers(action, name)
        levels, texts, first = name.split("/"), self._texts, NO_RULE
        for trie in self._allowing[action]:
            first = trie.first(levels, texts, first)
        allowing = first
        for trie in self._denying[action]:
            first = trie.first(levels, texts, first)
        if first == NO_RULE:
            return Decision(self._allows_unmatched, None)
        return Decision(first == allowing, self._rules[first])

    def covers(self, action: str, topic_filter: str) -> Decision:
        """Return whether the subject may perform an action on every topic that a filter matches.

        One allowing rule must contain the filter. A denying rule before it that matches some of the topics denies the filter,
        unless a still earlier rule allows just that part.
        """
        try:
            return self._covers(action, topic_filter, NO_RULE, _Steps())
        except _TooManySteps:
            return Decision(False, None, topic_filter)

    def _covers(self, action: str, topic_filter: str, below: int, steps: _Steps) -> Decision:
        """Decide on a filter by the rules with lesser numbers than `below`."""
        levels = topic_filter.split("/")
        is_open = levels[-1] == "#"
        if is_open:
            levels.pop()
        allowing = below
        for trie in self._allowing[action]:
            allowing = trie.first(levels, self._texts, allowing, is_open=is_open)
        if allowing == below and not (below == NO_RULE and self._allows_unmatched):
            return Decision(False, None)
        for trie in self._denying[action]:
            for number, part in trie.touching(levels, self._texts, allowing, is_open=is_open):
                steps.take()
                if not self._covers(action, part, number, steps).is_allowed:
                    return Decision(False, self._rules[number], part)
        return Decision(True, self._rules[allowing] if allowing < NO_RULE else None)

    def _decide_group(self, action: str, name: str) -> Decision:
        found = self._groups.get((action, name))
        if found is None:
            if len(self._groups) >= GROUPS_REMEMBERED:
                self._groups.clear()
            found = self._groups[action, name] = self._decide_new_group(action, name)
        return found

    def _decide_new_group(self, action: str, name: str) -> Decision:
        for _, rule in self._of_groups:
            if action not in rule.actions:
                continue
            if name:
                applies = any(fnmatchcase(name, pattern) for pattern in rule.groups)
            else:  # all groups: a rule that denies any of them applies
                applies = "*" in rule.groups or not rule.is_allowing
            if applies:
                return Decision(rule.is_allowing, rule)
        return Decision(self._allows_unmatched, None)


def _tries(found: Iterable[RuleTrie | None]) -> tuple[RuleTrie, ...]:
    return tuple(trie for trie in found if trie is not None)
