"""Topics, topic filters, and which filters match a topic. The source of every rule is MQTT 5.0, 4.7.

A *topic* names what a message is about and has no wildcards. A *filter* selects topics: `+` stands for one level, and `#`
at the end stands for any number of levels, including none. Levels are separated by `/` and may be empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Final, Generic, TypeVar

from penstock.store.errors import TopicInvalid
from penstock.store.record import TOPIC_BYTES_MAX

LEVELS_MAX = 128
"""Default maximum number of levels of a topic or filter. It bounds the work of one match. Devices use fewer than ten."""

EXCERPT_CHARS_MAX = 64
"""Maximum number of characters of a topic that an error quotes, because a log line must not hold 64 KiB from a stranger."""

T = TypeVar("T")


class _Absent(Enum):
    """Marks a trie node at which no filter ends. None would not do, because callers may store it as a value."""

    ABSENT = 0


ABSENT: Final = _Absent.ABSENT


# --- validity -------------------------------------------------------------------------------------------------------


def check_topic(topic: bytes, *, levels_max: int = LEVELS_MAX, bytes_max: int = TOPIC_BYTES_MAX) -> str:
    """Return the topic name that the bytes of a PUBLISH hold.

    Args:
        topic: the name as it came off the wire, without its length field.
        levels_max: the most levels allowed, at least 1.
        bytes_max: the most bytes allowed, 1 to 65,535.

    Raises:
        TopicInvalid: the name is empty, too long, too deep, not UTF-8, or has U+0000 or a wildcard in it.
    """
    if len(topic) > bytes_max:  # [MQTT-4.7.3-3]; first, so that nothing below looks at an unbounded value
        raise _invalid("topic", topic, f"has {len(topic)} bytes; shorten it to {bytes_max} at most")
    try:
        text = topic.decode()  # [MQTT-1.5.4-1]: Python's codec refuses surrogates and overlong forms as well
    except UnicodeDecodeError as error:
        raise _invalid("topic", topic, f"is not UTF-8 from byte {error.start} on; encode it as UTF-8") from error
    _check_text("topic", text, levels_max)
    for wildcard in "+#":
        if wildcard in text:  # [MQTT-4.7.0-1], [MQTT-3.3.2-2]
            raise _invalid("topic", text, f"has the wildcard '{wildcard}' in it; publish to a name without wildcards")
    return text


def check_filter(filter: str, *, levels_max: int = LEVELS_MAX, bytes_max: int = TOPIC_BYTES_MAX) -> str:
    """Return `filter` if it is a valid topic filter.

    Args:
        filter: the filter, without a `$share/{group}/` before it.
        levels_max: the most levels allowed, at least 1.
        bytes_max: the most bytes of UTF-8 allowed, 1 to 65,535.

    Raises:
        TopicInvalid: the filter is empty, too long, too deep, can't be encoded as UTF-8, has U+0000 in it, or has a
            wildcard where none may stand.
    """
    try:
        size = len(filter.encode())
    except UnicodeEncodeError as error:  # a lone surrogate [MQTT-1.5.4-1]
        raise _invalid("filter", filter, f"can't be written as UTF-8 from character {error.start} on; remove it") from error
    if size > bytes_max:  # [MQTT-4.7.3-3]
        raise _invalid("filter", filter, f"has {size} bytes; shorten it to {bytes_max} at most")
    _check_text("filter", filter, levels_max)
    if not is_wildcard(filter):
        return filter
    levels = filter.split("/")
    if filter.count("+") == levels.count("+") and filter.count("#") == (levels[-1] == "#"):
        return filter
    for level in levels:
        if "+" in level and level != "+":  # [MQTT-4.7.1-2]
            raise _invalid("filter", filter, f"has '+' inside of the level {excerpt(level)}; let '+' be the whole level")
        if "#" in level and level != "#":  # [MQTT-4.7.1-1]
            raise _invalid("filter", filter, f"has '#' inside of the level {excerpt(level)}; let '#' be the whole level")
    # [MQTT-4.7.1-1]
    raise _invalid("filter", filter, "has '#' before its last level; end the filter with it, or use '+'")


def _check_text(what: str, text: str, levels_max: int) -> None:
    """Check the rules that topics and filters share. The caller has checked the length already."""
    if not text:  # [MQTT-4.7.3-1]
        raise _invalid(what, text, "is empty; it needs at least one character")
    if "\0" in text:  # [MQTT-4.7.3-2], [MQTT-1.5.4-2]
        raise _invalid(what, text, f"has U+0000 at character {text.index(chr(0))}; remove it")
    levels = text.count("/") + 1
    if levels > levels_max:
        raise _invalid(what, text, f"has {levels} levels; use {levels_max} at most")


def _invalid(what: str, value: str | bytes, reason: str) -> TopicInvalid:
    return TopicInvalid(f"the {what} {excerpt(value)} {reason}")


def excerpt(value: str | bytes, chars_max: int = EXCERPT_CHARS_MAX) -> str:
    """Return the beginning of what a client sent, in quotes, for a message to people. What is not UTF-8 is replaced."""
    text = value if isinstance(value, str) else value[: chars_max * 4 + 4].decode(errors="replace")
    quoted = repr(text[:chars_max])
    return f"{quoted}..." if len(text) > chars_max else quoted


# --- what a filter means --------------------------------------------------------------------------------------------


def is_wildcard(filter: str) -> bool:
    """Return whether a valid filter can match topics other than its own text."""
    return "+" in filter or "#" in filter


def first_level(topic: str) -> str:
    """Return the text before the first `/`, or all of it: the empty string for `/a`, and `a` for `a`."""
    return topic.partition("/")[0]


def matches(filter: str, topic: str) -> bool:
    """Return whether a valid filter matches a valid topic: the definition that `FilterTrie` is tested against."""
    if topic.startswith("$") and filter.startswith(("+", "#")):  # [MQTT-4.7.2-1]
        return False
    wanted = filter.split("/")
    levels = topic.split("/")
    if wanted[-1] == "#":
        wanted.pop()
        levels = levels[: len(wanted)]  # '#' takes the rest, and nothing where there is none: `a/#` matches `a`
    return len(wanted) == len(levels) and all(want in ("+", level) for want, level in zip(wanted, levels, strict=True))


def overlap(filter: str, other: str) -> bool:
    """Return whether some topic is matched by both of two valid filters."""
    if filter[:1] != other[:1] and "$" in (filter[:1], other[:1]):  # [MQTT-4.7.2-1]
        return False
    ours, theirs = filter.split("/"), other.split("/")
    for one, two in zip(ours, theirs, strict=False):
        if one == "#" or two == "#":
            return True
        if one != two and one != "+" and two != "+":
            return False
    # `a/#` matches `a` as well.
    return len(ours) == len(theirs) or max(ours, theirs, key=len)[min(len(ours), len(theirs)) :] == ["#"]


def contains(filter: str, other: str) -> bool:
    """Return whether a valid filter matches every topic that another valid filter matches."""
    if filter[:1] in ("+", "#") and other.startswith("$"):  # [MQTT-4.7.2-1]
        return False
    ours, theirs = ("#" if filter == "+/#" else filter).split("/"), other.split("/")  # a topic has a level, so `+/#` is `#`
    for one, two in zip(ours, theirs, strict=False):
        if one == "#":
            return True
        if two == "#" or (one not in ("+", two)):
            return False
    return len(ours) == len(theirs) or ours[len(theirs) :] == ["#"]  # `a/#` matches `a` as well


# --- all filters at once --------------------------------------------------------------------------------------------


class _Node(Generic[T]):
    """A node of the trie. The levels on the path to it, each a word or `+`, are the beginning of a filter.

    The filters `{path}/#` and `{path}` share one node.
    """

    __slots__ = ("children", "plus", "rest", "value")

    def __init__(self) -> None:
        self.children: dict[str, _Node[T]] | None = None
        self.plus: _Node[T] | None = None
        self.value: T | _Absent = ABSENT
        """Value of the filter that ends here."""
        self.rest: T | _Absent = ABSENT
        """Value of the filter that continues from here with `#`."""

    def child(self, level: str) -> _Node[T] | None:
        if level == "+":
            return self.plus
        return self.children.get(level) if self.children is not None else None

    def grow(self, level: str) -> _Node[T]:
        """Return the child for `level`, which is created if there is none."""
        node = self.child(level)
        if node is None:
            node = _Node()
            if level == "+":
                self.plus = node
            elif self.children is None:
                self.children = {level: node}
            else:
                self.children[level] = node
        return node

    def cut(self, level: str) -> None:
        if level == "+":
            self.plus = None
        elif self.children is not None:
            del self.children[level]
            if not self.children:
                self.children = None

    def is_empty(self) -> bool:
        return self.value is ABSENT and self.rest is ABSENT and self.plus is None and self.children is None


class FilterTrie(Generic[T]):
    """A map from topic filters to one value each that finds all filters that match a topic.

    Filters without wildcards are in a flat dict, the others are in a trie. A match visits each node at most once, and only
    nodes whose path fits the topic so far, however many filters there are. Filters must be valid (`check_filter`). The trie
    must not be changed during an iteration.
    """

    __slots__ = ("_exact", "_root", "_wildcards")

    def __init__(self) -> None:
        self._exact: dict[str, T] = {}
        self._root: _Node[T] = _Node()
        self._wildcards = 0

    def __len__(self) -> int:
        return len(self._exact) + self._wildcards

    def __contains__(self, filter: object) -> bool:
        return isinstance(filter, str) and self._find(filter) is not ABSENT

    def __iter__(self) -> Iterator[tuple[str, T]]:
        """Yield every (filter, value), in no particular order."""
        yield from self._exact.items()
        pending: list[tuple[_Node[T], tuple[str, ...]]] = [(self._root, ())]
        while pending:
            node, path = pending.pop()
            if node.value is not ABSENT:
                yield "/".join(path), node.value
            if node.rest is not ABSENT:
                yield "/".join((*path, "#")), node.rest
            if node.plus is not None:
                pending.append((node.plus, (*path, "+")))
            for level, child in (node.children or {}).items():
                pending.append((child, (*path, level)))

    def insert(self, filter: str, value: T) -> None:
        """Map `filter` to `value`, replacing any earlier value."""
        if not is_wildcard(filter):
            self._exact[filter] = value
            return
        levels = filter.split("/")
        has_rest = levels[-1] == "#"
        if has_rest:
            levels.pop()
        assert "#" not in levels, filter
        node = self._root
        for level in levels:
            node = node.grow(level)
        self._wildcards += (node.rest if has_rest else node.value) is ABSENT
        if has_rest:
            node.rest = value
        else:
            node.value = value

    def get(self, filter: str) -> T | None:
        """Return the value of `filter` itself, or None."""
        value = self._find(filter)
        return None if value is ABSENT else value

    def remove(self, filter: str) -> T:
        """Remove `filter` and all nodes that no other filter needs; return its value.

        Raises:
            KeyError: the filter is not in the trie.
        """
        if not is_wildcard(filter):
            return self._exact.pop(filter)
        levels = filter.split("/")
        path = self._path(levels)
        if path is None:
            raise KeyError(filter)
        end = path[-1]
        if levels[-1] == "#":
            value, end.rest = end.rest, ABSENT
        else:
            value, end.value = end.value, ABSENT
        if value is ABSENT:
            raise KeyError(filter)
        self._wildcards -= 1
        while len(path) > 1 and path[-1].is_empty():
            path.pop()
            path[-1].cut(levels[len(path) - 1])
        return value

    def match(self, topic: str) -> list[T]:
        """Return the values of all filters that match a topic, in no particular order, each once."""
        matched: list[T] = []
        exact = self._exact.get(topic, ABSENT)
        if exact is not ABSENT:
            matched.append(exact)
        fits = [self._root]
        is_hidden = topic.startswith("$")  # no leading wildcard matches it [MQTT-4.7.2-1]; true for the first level only
        for level in topic.split("/"):
            deeper: list[_Node[T]] = []
            for node in fits:
                if node.rest is not ABSENT and not is_hidden:
                    matched.append(node.rest)
                if node.plus is not None and not is_hidden:
                    deeper.append(node.plus)
                if node.children is not None and (child := node.children.get(level)) is not None:
                    deeper.append(child)
            if not deeper:
                return matched
            fits = deeper
            is_hidden = False
        for node in fits:
            if node.value is not ABSENT:
                matched.append(node.value)
            if node.rest is not ABSENT:  # `a/#` matches `a` (4.7.1.2)
                matched.append(node.rest)
        return matched

    def _find(self, filter: str) -> T | _Absent:
        if not is_wildcard(filter):
            return self._exact.get(filter, ABSENT)
        levels = filter.split("/")
        path = self._path(levels)
        if path is None:
            return ABSENT
        return path[-1].rest if levels[-1] == "#" else path[-1].value

    def _path(self, levels: list[str]) -> list[_Node[T]] | None:
        """Return the nodes from the root to the one that holds a filter (for `x/#` the node of `x`), or None."""
        path = [self._root]
        for level in levels:
            if level == "#":
                break
            node = path[-1].child(level)
            if node is None:
                return None
            path.append(node)
        return path
