"""Names of groups, the filters that belong to them, and the ids of messages."""

from __future__ import annotations

from penstock.pop.errors import GroupInvalid, RequestInvalid

DEAD_LETTERS = "$dlq/"
"""A group's dead letters are in the light queue with this prefix and the name of the group."""

GROUP_BYTES_MAX = 255
"""Maximum length of a group's name. Each record of a group contains the name, so a longer one is probably a mistake."""


def check_group_name(name: str) -> str:
    """Return `name` if it is valid: 1 to 255 bytes of UTF-8, printable, no `/`, `#`, `+` or `$`, no space at its ends.

    Raises:
        GroupInvalid: the message says what is wrong.
    """
    if not name:
        raise GroupInvalid("the group's name is empty; give the consumers of one service a common name, such as 'billing'")
    if len(name.encode(errors="replace")) > GROUP_BYTES_MAX:
        raise GroupInvalid(f"the group's name {name[:40]!r}... has more than {GROUP_BYTES_MAX} bytes")
    if not name.isprintable() or name != name.strip() or any(c in "/#+$" for c in name):
        raise GroupInvalid(
            f"the group's name {name!r} has characters that no name may have: "
            f"use printable ones without '/', '#', '+' or '$', and no space at the beginning or the end"
        )
    return name


def check_system_filter(name: str, topic_filter: str) -> None:
    """Check that the group `name` may consume `topic_filter`, which starts with '$'.

    Raises:
        RequestInvalid: the filter is not `$dlq/GROUP`, or GROUP is the group itself.
        GroupInvalid: GROUP is not a valid name.
    """
    if not topic_filter.startswith(DEAD_LETTERS):
        raise RequestInvalid(f"the filter {topic_filter[:80]!r} can't be popped: of '$' topics only $dlq/GROUP can")
    if check_group_name(topic_filter.removeprefix(DEAD_LETTERS)) == name:
        raise RequestInvalid(
            f"the group {name!r} can't pop its own dead letters: a message that fails again would come back forever"
        )


def message_id(position: int) -> str:
    """Return the id of the message at a position: 16 hexadecimal digits. All APIs give a message the same id."""
    return f"{position:016x}"
