"""Compares a report with the counters of the running node that writes the log.

The node says at which position of the log its counters are. The report ends at exactly that position, so a node that goes on
meanwhile changes neither side: each counter of the node must be what the log says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.spark import segments
from penstock.spark.errors import NodeUnreadable
from penstock.spark.reconciliation.engines import Row
from penstock.spark.reconciliation.summary import NodeCheck, NodeDifference
from penstock.spark.segments import LogSurvey

ReadState = Callable[[], dict[str, Any]]
"""Returns the state that a node shows at `/api/v1/state`. It raises NodeUnreadable if there is no answer."""

ATTEMPTS_MAX = 20
"""How often the state is read again because the node has begun a segment meanwhile, which it does each few seconds at most."""

DIFFERENCES_MAX = 100
"""Maximum number of differences in a summary."""

LEADING = "leading"
"""Role of a replica that hands out messages. A node that is not replicated has no role."""


@dataclass(frozen=True, slots=True)
class GroupCounters:
    """The counters of a group in a node.

    `returned_min` and `returned_max` are bounds of the messages that came back and wait. The node does not always know of
    a message whether it came back (`ConsumerGroup.count_returned`).
    """

    name: str
    topic_filter: str
    in_flight: int
    returned_min: int
    returned_max: int
    dead_letters: int


@dataclass(frozen=True, slots=True)
class NodeState:
    """The counters of a node, and the position of the log at which they are.

    Parameters:
        address: of the node's admin listener.
        position: all records before it are counted, and no other.
        written: position up to which readers of the log find records. The node writes the rest in the same turn of its loop.
        groups: by id.
    """

    address: str
    position: int
    written: int
    groups: dict[int, GroupCounters]

    @classmethod
    def of(cls, state: dict[str, Any]) -> NodeState:
        """Return what matters of a state.

        Raises:
            NodeUnreadable: the node does not lead its cluster, or its version has no such counters.
        """
        try:
            role = state["replication"]["role"] if "replication" in state else LEADING
            address, log = str(state["listen"]["admin"]), state["log"]
            if role != LEADING:
                raise NodeUnreadable(
                    f"The node on {address} is {role} in its cluster, not leading: name the leader and its directory."
                )
            groups = {row["id"]: _counters(row) for row in state["groups"]}
            return cls(address, log["appended"], log["end"], groups)
        except (KeyError, TypeError) as error:
            raise NodeUnreadable(
                f"The state of the node has no {error}, so it is of another version: use the `penstock` of the node."
            ) from error


def _counters(row: dict[str, Any]) -> GroupCounters:
    return GroupCounters(row["group"], row["filter"], row["in_flight"], row["returned_min"], row["returned_max"], row["dead"])


def read_together(read: ReadState, data_dir: str | Path) -> tuple[NodeState, LogSurvey]:
    """Read the state of a node, and find the extent that its log had at this moment.

    Raises:
        NodeUnreadable: the node does not answer, or the log is not the one that it writes.
        As `segments.survey`.
    """
    for _ in range(ATTEMPTS_MAX):
        state = NodeState.of(read())
        if state.written < state.position and NodeState.of(read()).written < state.position:
            continue  # a later turn has answered, and what was appended before is still not written
        log = segments.survey(data_dir)
        if state.position >= log.segments[-1].base:
            cut = segments.cut(log, state.position)
            if cut is None:
                raise _other_log(state, data_dir)
            return state, cut
    raise _other_log(state, data_dir)


def _other_log(state: NodeState, data_dir: str | Path) -> NodeUnreadable:
    return NodeUnreadable(
        f"The node on {state.address} has written its log up to position {state.position}, where no record of the last segment "
        f"of {data_dir} ends: the node writes another log. Name the admin listener of the node that uses this directory."
    )


def compare(state: NodeState, standing: Iterable[Row], names: Sequence[str], *, is_whole: bool, is_certain: bool) -> NodeCheck:
    """Compare the counters of a node with what its log says.

    Args:
        state: of the node.
        standing: the rows of the step `standing`.
        names: of the groups to compare; empty for all.
        is_whole: whether the log was read from position 0, so that it says of each group how it began.
        is_certain: whether the log says all. If not, a difference proves nothing.
    """
    rows = {row["group_id"]: row for row in standing}
    of_node = {group_id: each for group_id, each in state.groups.items() if not names or each.name in names}
    differences = []
    for group_id in sorted(rows.keys() | of_node.keys()):
        differences += _differences(group_id, of_node.get(group_id), rows.get(group_id), is_whole)
    return NodeCheck(
        node=state.address,
        position=state.position,
        groups=len(rows.keys() | of_node.keys()),
        differing=len({each["group_id"] for each in differences}),
        certain=is_certain,
        differences=differences[:DIFFERENCES_MAX],
    )


def _differences(group_id: int, node: GroupCounters | None, row: Row | None, is_whole: bool) -> list[NodeDifference]:
    """Return how a group differs. None is a side that does not know it."""
    counters = _existence(node, row, is_whole) or _counts(node or _NOTHING, row or _NO_ROW, is_whole)
    return [
        NodeDifference(
            group_id=group_id,
            group=(row or _NO_ROW)["group_name"] if node is None else node.name,
            filter=None if node is None else node.topic_filter,
            counter=counter,
            node_min=least,
            node_max=most,
            log=log,
        )
        for counter, (least, most, log) in counters.items()
        if not least <= log <= most
    ]


_NOTHING = GroupCounters("", "", 0, 0, 0, 0)
_NO_ROW: Row = {"group_name": "", "in_flight": 0, "returned": 0, "dead_letters": 0, "created": 0, "deleted": 0}

Bounds = tuple[int, int, int]
"""The least and the greatest that a counter of the node can be, and what the log says."""


def _existence(node: GroupCounters | None, row: Row | None, is_whole: bool) -> dict[str, Bounds]:
    """Return the counter `exists` of a group that only one side has. A deletion may be half done, and then either is right."""
    is_created = row is not None and bool(row["created"])
    if row is not None and row["deleted"]:
        return {}
    if node is None:
        return {"exists": (0, 0, 1)} if is_created else {}
    return {"exists": (1, 1, 0)} if is_whole and not is_created else {}


def _counts(node: GroupCounters, row: Row, is_whole: bool) -> dict[str, Bounds]:
    counters = {
        "in_flight": (node.in_flight, node.in_flight, row["in_flight"]),
        "returned": (node.returned_min, node.returned_max, row["returned"]),
    }
    if is_whole and node.dead_letters > row["dead_letters"]:  # the node has fewer after a redrive, or when retention drops some
        counters["dead_letters"] = (node.dead_letters, node.dead_letters, row["dead_letters"])
    return counters


# --- words ------------------------------------------------------------------------------------------------------------

_WORDS = {"in_flight": "in flight", "returned": "waiting after a return", "dead_letters": "dead letters"}


def headline(check: NodeCheck) -> str:
    """Return the result of a check in a few words."""
    groups = f"{check['groups']:,} group{'' if check['groups'] == 1 else 's'}"
    if not check["differing"]:
        return f"the node agrees on {groups}"
    if not check["certain"]:
        return f"the node and the log have different counts in {check['differing']:,} of {groups}, but records are missing"
    return f"the node differs in {check['differing']:,} of {groups}"


def difference_words(each: NodeDifference) -> str:
    """Return one difference in words, without the name of the group."""
    if each["counter"] == "exists":
        return "exists in the node and not in the log" if each["node_max"] else "exists in the log and not in the node"
    least, most = each["node_min"], each["node_max"]
    node = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    return f"{_WORDS[each['counter']]}: {node} in the node, {each['log']:,} in the log"
