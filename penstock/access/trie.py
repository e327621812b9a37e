"""Rules by topic: a trie that finds the first rule of a list for a topic or a filter, however many rules there are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from penstock.access.subject import is_pattern

NO_RULE: Final = 1 << 62
"""The number of the rule that is not there: greater than that of any rule."""


class _Branch:
    """A node of the trie. The levels on the path to it are the beginning of the filter of a rule."""

    __slots__ = ("children", "least", "patterns", "plus", "rest", "value")

    def __init__(self) -> None:
        self.children: dict[str, _Branch] | None = None
        self.plus: _Branch | None = None
        self.patterns: dict[str, _Branch] | None = None
        """By level with `%u` or `%c`."""
        self.value = NO_RULE
        """The first rule whose filter ends here."""
        self.rest = NO_RULE
        """The first rule whose filter continues from here with `#`."""
        self.least = NO_RULE
        """The first of all rules here and below."""

    def grow(self, level: str) -> _Branch:
        """Return the branch for a level, which is created if there is none."""
        if level == "+":
            if self.plus is None:
                self.plus = _Branch()
            return self.plus
        if is_pattern(level):
            self.patterns = self.patterns if self.patterns is not None else {}
            return self.patterns.setdefault(level, _Branch())
        self.children = self.children if self.children is not None else {}
        return self.children.setdefault(level, _Branch())


class RuleTrie:
    """The filters of rules of one effect (allow or deny) for one action, with the number of the first rule for each."""

    __slots__ = ("_root",)

    def __init__(self) -> None:
        self._root = _Branch()

    def add(self, topic_filter: str, number: int) -> None:
        """Add a filter of the rule with this number. Its levels may have `%u` and `%c` in them."""
        levels = ("#" if topic_filter == "+/#" else topic_filter).split("/")  # a topic has a level, so `+/#` is `#`
        has_rest = levels[-1] == "#"
        if has_rest:
            levels.pop()
        branch = self._root
        branch.least = min(branch.least, number)
        for level in levels:
            branch = branch.grow(level)
            branch.least = min(branch.least, number)
        if has_rest:
            branch.rest = min(branch.rest, number)
        else:
            branch.value = min(branch.value, number)

    def first(
        self, levels: Sequence[str], texts: Mapping[str, str | None], below: int = NO_RULE, *, is_open: bool = False
    ) -> int:
        """Return the least number of a rule that covers a topic or filter, or `below` if no rule before that one does.

        Args:
            levels: of the topic or filter, without the `#` at its end.
            texts: what levels with `%u` and `%c` stand for; see `Texts`.
            below: only rules with lesser numbers count.
            is_open: the filter has a `#` after `levels`.
        """
        fits = [self._root]
        is_hidden = bool(levels) and levels[0].startswith("$")  # no leading wildcard covers it [MQTT-4.7.2-1]
        for level in levels:
            deeper: list[_Branch] = []
            for branch in fits:
                plus, children = branch.plus, branch.children
                if not is_hidden:
                    if branch.rest < below:
                        below = branch.rest
                    if plus is not None and plus.least < below:
                        deeper.append(plus)
                if children is not None and (child := children.get(level)) is not None and child.least < below:
                    deeper.append(child)
                if branch.patterns is not None:
                    for pattern, child in branch.patterns.items():
                        if child.least < below and texts[pattern] == level and not (is_hidden and pattern[0] != "$"):
                            deeper.append(child)
            if not deeper:
                return below
            fits = deeper
            is_hidden = False
        for branch in fits:
            if branch.rest < below:
                below = branch.rest
            if branch.value < below and not is_open:  # `a/#` covers `a`, and `a` does not cover `a/#`
                below = branch.value
        return below

    def touching(
        self, levels: Sequence[str], texts: Mapping[str, str | None], below: int = NO_RULE, *, is_open: bool = False
    ) -> Iterator[tuple[int, str]]:
        """Yield the rules with lesser numbers than `below` that match some of the topics of a filter, in no particular order.

        Each is a number and the filter of the topics that both match. The arguments are those of `first`.
        """
        pending: list[tuple[_Branch, tuple[str, ...]]] = [(self._root, ())]
        while pending:
            branch, path = pending.pop()
            if branch.least >= below:
                continue
            at = len(path)
            is_within = at < len(levels)
            is_hidden = at == 0 and is_within and levels[0].startswith("$")
            if branch.rest < below and not is_hidden:
                yield branch.rest, "/".join((*path, *levels[at:], *(("#",) if is_open else ())))
            if not is_within and at and branch.value < below:
                yield branch.value, "/".join(path)
            if not is_within and not is_open:
                continue
            level = levels[at] if is_within else "+"
            if branch.plus is not None and not is_hidden:
                pending.append((branch.plus, (*path, level)))
            if level != "+":
                if branch.children is not None and level in branch.children:
                    pending.append((branch.children[level], (*path, level)))
            else:
                for word, child in (branch.children or {}).items():
                    if at or not word.startswith("$"):
                        pending.append((child, (*path, word)))
            for pattern, child in (branch.patterns or {}).items():
                text = texts[pattern]
                opens_hidden = at == 0 and text is not None and text.startswith("$") and not pattern.startswith("$")
                if text is not None and level in ("+", text) and not opens_hidden:
                    pending.append((child, (*path, text)))
