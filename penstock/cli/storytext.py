"""`penstock story`: prints what happened to a message."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.output import print_line, print_row, shown_bytes, shown_seconds, time_of
from penstock.spark.parquet.schema import Cause, DamageCause, Stage

if TYPE_CHECKING:  # the module needs pyarrow, an extra
    from penstock.spark.parquet.story import Event, GroupStory, PublishedMessage, Story

GROUPS_MAX = 20
"""Groups that are printed one by one. A shared topic may have thousands."""
LINES_MAX = 40
"""Events of a group that are printed: the first quarter and the last ones. A consumer may extend a delivery without end."""
NAMES_MAX = 10
"""Further groups that are named because the message has not ended in them."""
DAMAGES_MAX = 10
"""Ranges without records that are printed."""

_UNCOUNTED = " (the attempt does not count)"
_REPEATED = " (without effect: that stage of the delivery had already ended)"

_SENTENCES: dict[str, str] = {
    Stage.POPPED: "popped, until {deadline}",
    Stage.WAITING: "given back by its consumer{after}; it waits until {deadline}",
    Cause.ACKED: "acknowledged{after}",
    Cause.EXPIRED: "not delivered: the message had expired",
    Cause.NACKED: "nacked by its consumer{after}; it waits until {deadline}",
    Cause.SUSPENDED: "suspended by its consumer{after}{uncounted}; it waits until {deadline}",
    Cause.EXTENDED: "extended by its consumer{after}, until {deadline}",
    Cause.TIMED_OUT: "timed out{after}{uncounted}; it is queued again",
    Cause.RETURNED: "given back by the node before the deadline{after}{uncounted}; it is queued again",
    Cause.WAITED: "its wait is over; it is queued again",
    Cause.DEAD_LETTERED: "became a dead letter{after}: {reason}",
    Cause.RESET: "ended because the group was reset{after}",
    Cause.DELETED: "ended because the group was deleted{after}",
    Cause.LAST_MEMBER_LEFT: "ended because the last subscription of the group ended{after}",
    Cause.UNRECORDED: "ended{after}; the log does not say why",
}
"""What is printed for each event."""

_INDENT = " " * len(time_of(1) or "")


def print_story(data_dir: Path, position: int, *, group: str | None, as_json: bool) -> None:
    """Print what happened to a message.

    Args:
        data_dir: data directory of a node.
        position: position of the message, which is its id.
        group: name of the only group whose deliveries are printed; None for all.
        as_json: print one JSON object.

    Raises:
        ReconcileError: there is no such message, or no log, or the tables can't be read.
        StoreError: the log is damaged.
    """
    from penstock.spark.parquet.story import read_story

    with tempfile.TemporaryDirectory(prefix="penstock-story-") as scratch:
        story = read_story(data_dir, position, Path(scratch), group)
    if as_json:
        print_row({"message_id": f"{position:016x}", **asdict(story)}, as_json=True)
        return
    for line in _lines(story, group):
        print_line(line)


def _lines(story: Story, group: str | None) -> Iterator[str]:
    yield f"Message {story.position:016x} at position {story.position}"
    if story.message is None:
        yield f"{_INDENT}  Neither the tables nor the log have the message itself."
    else:
        yield f"{time_of(story.message.at_ms)}  {_published(story.message)}"
        yield from (f"{_INDENT}  {line}" for line in _conditions(story.message, is_popped=bool(story.groups)))
    for each in story.groups[:GROUPS_MAX]:
        yield ""
        yield f"Group {each.group}: {_state(each, story.end_ms)}"
        yield from _events(each.events)
    yield ""
    if len(story.groups) > GROUPS_MAX:
        yield from _further(story.groups[GROUPS_MAX:])
    elif not story.groups:
        yield f"{'No group' if group is None else f'No group named {group}'} has popped the message.{_why_not_popped(story)}"
    for damage in story.damages[:DAMAGES_MAX]:
        what = "were dropped by retention" if damage.cause == DamageCause.DROPPED else "are damaged"
        yield f"Records are missing: positions {damage.position} to {damage.until_position} {what}."
    if len(story.damages) > DAMAGES_MAX:
        yield f"So are those of {len(story.damages) - DAMAGES_MAX:,} more ranges."
    yield f"The log ends at position {story.end_position}, with a record of {time_of(story.end_ms)}."


def _published(message: PublishedMessage) -> str:
    parts = [f"published to {message.topic} at QoS {message.qos}, {shown_bytes(message.body_bytes)}"]
    parts += ["retained"] if message.retain else []
    parts += [f"tag {message.tag}"] if message.tag else []
    parts += [f"keys {', '.join(message.keys)}"] if message.keys else []
    parts += [f"message group {message.message_group}"] if message.message_group else []
    parts += [f"content type {message.content_type}"] if message.content_type else []
    return "; ".join(parts)


def _conditions(message: PublishedMessage, *, is_popped: bool) -> Iterator[str]:
    """Yield the lines about what had to happen before a delivery, and about the copy of the message."""
    if message.delayed:
        fate = _fate(message.recalled, "it was recalled or replaced", "it fired", is_popped=is_popped)
        yield f"delayed until {time_of(message.deliver_at_ms or 0)}: {fate}"
    if message.half:
        fate = _fate(message.rolled_back, "it was rolled back", "it was committed", is_popped=is_popped)
        yield f"half of a transaction: {fate}"
    if message.expires_at_ms is not None:
        yield f"expires at {time_of(message.expires_at_ms)}"
    if message.copied_at is not None:
        yield f"known from the copy that retention has made at position {message.copied_at}"


def _fate(is_discarded: bool | None, discarded: str, routed: str, *, is_popped: bool) -> str:
    if is_discarded:
        return discarded
    if is_discarded is False or is_popped:
        return routed
    return f"{discarded}, or {routed}, or neither: the segment of the message does not say it"


def _state(group: GroupStory, end_ms: int) -> str:
    """Return where the message is for a group."""
    pending = group.pending
    if pending is None:
        if group.state != "ended":
            return "unknown: records are missing, or do not say it"
        last = next(event for event in reversed(group.events) if not event.repeated)
        return last.event.replace("_", " ")
    if pending.return_ms is None:
        return f"queued for its next delivery since {time_of(pending.since_ms)}"
    what = "in flight" if group.state == "in_flight" else "waits"
    until = f"{what}, attempt {pending.attempt}, until {time_of(pending.deadline_ms or 0)}"
    is_overdue = pending.return_ms < end_ms
    return until + (f", and overdue: it was to be back by {time_of(pending.return_ms)}" if is_overdue else "")


def _events(events: list[Event]) -> Iterator[str]:
    first = LINES_MAX // 4
    hidden = len(events) - LINES_MAX
    for number, event in enumerate(events):
        if hidden > 0 and first <= number < first + hidden:
            if number == first:
                yield f"{_INDENT}  {hidden:,} more events; --json prints them"
            continue
        attempt = "" if event.attempt is None else f"attempt {event.attempt}: "
        yield f"{time_of(event.at_ms)}  {attempt}{_sentence(event)}"


def _sentence(event: Event) -> str:
    text = _SENTENCES[event.event].format(
        deadline=time_of(event.deadline_ms or 0) or "an unknown time",
        after=_after(event.after_ms),
        uncounted=_UNCOUNTED if event.counted is False else "",
        reason=event.reason or "the log does not say why",
    )
    if event.event in (Stage.POPPED, Cause.EXTENDED) and event.return_ms != event.deadline_ms:
        text += f"; if it times out, it is back by {time_of(event.return_ms or 0)}"
    return text + (_REPEATED if event.repeated else "")


def _after(ms: int | None) -> str:
    if ms is None:
        return ""
    return f" after {shown_seconds(ms / 1000)}" if ms else " at once"


def _further(groups: list[GroupStory]) -> Iterator[str]:
    """Yield what is said of the groups that are not printed one by one."""
    counts = Counter(group.state.replace("_", " ") for group in groups)
    by_state = ", ".join(f"{count:,} {state}" for state, count in counts.most_common())
    yield f"{len(groups):,} more groups: {by_state}. --group prints one of them, and --json all."
    names = [group.group for group in groups if group.state != "ended"]
    if names:
        more = ", and others" if len(names) > NAMES_MAX else ""
        yield f"The message has not ended for {', '.join(names[:NAMES_MAX])}{more}."


def _why_not_popped(story: Story) -> str:
    message = story.message
    if message is None or message.recalled or message.rolled_back:
        return ""
    if message.deliver_at_ms is not None and message.deliver_at_ms > story.end_ms:
        return " It was not due by then."
    return (
        " One that waits for its first delivery has no record: `penstock group list` has what each group still has to deliver."
    )
