"""All rules, compiled: by whom they apply to, then by action and effect, then by topic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from penstock.access.actions import GROUP_ACTIONS, TOPIC_ACTIONS
from penstock.access.rule import Rule, Who, is_exact
from penstock.access.subject import Subject
from penstock.access.trie import RuleTrie


class RulesOfOne:
    """The rules that apply to one `Who`: a trie for each action and effect, and the rules about groups."""

    __slots__ = ("allowing", "denying", "of_groups", "who")

    def __init__(self, who: Who) -> None:
        self.who = who
        self.allowing: dict[str, RuleTrie] = {}
        """By action on topics."""
        self.denying: dict[str, RuleTrie] = {}
        """By action on topics."""
        self.of_groups: list[tuple[int, Rule]] = []
        """The rules about groups, each with its number."""

    def add(self, number: int, rule: Rule) -> None:
        """Add a rule."""
        tries = self.allowing if rule.is_allowing else self.denying
        for action in rule.actions:
            if action in TOPIC_ACTIONS:
                for topic_filter in rule.topics:
                    tries.setdefault(action, RuleTrie()).add(topic_filter, number)
        if rule.groups and any(action in GROUP_ACTIONS for action in rule.actions):
            self.of_groups.append((number, rule))


class RuleSet:
    """The rules of an access file.

    Parameters:
        rules: the first rule that applies decides.
    """

    def __init__(self, rules: Iterable[Rule]) -> None:
        self.rules: Final[Sequence[Rule]] = tuple(rules)
        """All rules, by their number."""
        by_who: dict[Who, RulesOfOne] = {}
        for number, rule in enumerate(self.rules):
            by_who.setdefault(rule.who, RulesOfOne(rule.who)).add(number, rule)
        # Most rules name a user, a role or a client id. They are found by it, so 10,000 of them cost the others nothing.
        self._by_user: dict[str, list[RulesOfOne]] = {}
        self._by_role: dict[str, list[RulesOfOne]] = {}
        self._by_client: dict[str, list[RulesOfOne]] = {}
        self._others: list[RulesOfOne] = []
        for who, found in by_who.items():
            for index, names in self._places(who):
                for name in dict.fromkeys(names):
                    index.setdefault(name, []).append(found)
                break
            else:
                self._others.append(found)

    def _places(self, who: Who) -> Iterator[tuple[dict[str, list[RulesOfOne]], tuple[str, ...]]]:
        if who.name:
            yield self._by_user, (who.name,)
        if who.users and all(map(is_exact, who.users)):
            yield self._by_user, who.users
        if who.roles:
            yield self._by_role, who.roles
        if who.clients and all(map(is_exact, who.clients)):
            yield self._by_client, who.clients

    def of(self, subject: Subject) -> list[RulesOfOne]:
        """Return the rules that apply to a subject."""
        found = [*self._by_user.get(subject.user, ()), *self._by_client.get(subject.client_id, ()), *self._others]
        for role in subject.roles:
            found += self._by_role.get(role, ())
        return [rules for rules in dict.fromkeys(found) if rules.who.applies_to(subject)]
