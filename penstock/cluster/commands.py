"""What a replica's core asks the node to do. The node does it in order, and tells the core what came of it."""

from __future__ import annotations

from typing import NamedTuple

from penstock.cluster.shardkey import ReplicaId, ShardKey


class ReadKey(NamedTuple):
    """Read the key of the shard, and call `key_read`."""


class Swap(NamedTuple):
    """Replace the key if it still has the revision `key.revision`, and call `answered`. Without an answer, call nothing."""

    request: int
    """Names the request. One that is repeated keeps its number."""
    key: ShardKey


class Dial(NamedTuple):
    """End the connection to a leader, if there is one, and dial one anew. Call `connected` or `link_ended`."""

    link: int
    """Number of the connection, which all calls about it have."""
    leader: ReplicaId
    epoch: int


class Hello(NamedTuple):
    """Send the leader the epoch that this replica follows, and the epochs and the end of its log."""

    link: int
    epoch: int


class Cut(NamedTuple):
    """Cut the log at a position, make that durable, and call `was_cut`. The log may end before."""

    link: int
    position: int


class Ack(NamedTuple):
    """Tell the leader up to which position the log is durable."""

    link: int
    epoch: int
    position: int


class HangUp(NamedTuple):
    """End the connection to the leader."""

    link: int


class BeginEpoch(NamedTuple):
    """Append the record of a new epoch at the end of the log, and call `epoch_begun`."""

    epoch: int


class Welcome(NamedTuple):
    """Tell a follower where to cut its log, and send it the log from there on."""

    peer: ReplicaId
    link: int
    epoch: int
    position: int
    committed: int


class Refuse(NamedTuple):
    """Refuse a follower, and end its connection."""

    peer: ReplicaId
    link: int
    why: str


class Committed(NamedTuple):
    """Release what waits for everything before a position."""

    position: int


class Resign(NamedTuple):
    """Tell all followers that the leader resigns, and who should stand first."""

    successor: ReplicaId


class StepDown(NamedTuple):
    """Stop leading, and acknowledge nothing more: another replica leads, or may."""

    why: str


Command = ReadKey | Swap | Dial | Hello | Cut | Ack | HangUp | BeginEpoch | Welcome | Refuse | Committed | Resign | StepDown
