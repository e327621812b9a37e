"""The core of a replica: who leads, what is committed, who is in sync. It has no I/O and no clock.

Each method tells the core what has happened at a time, and returns what the node must do. The node does that in order. The same
code runs in the simulation (`tests/cluster`), with everything lost, late and out of order that a network and a coordinator can
lose.

Safety needs no clock. These are its rules:

1. A record is *committed* when every member of the *maximal set* has said, on a connection of the leader's epoch, that it is
   durable there, and the recorded set has as many members as are required. The maximal set is the recorded set together with
   any set that was proposed and not answered.
2. Only the answer to a proposal ends it. Without an answer, the same one is sent again. A read ends nothing: it may be older.
3. A replica joins the set when it has everything that is committed, and the first record of the leader's epoch.
4. The next leader is a member of the recorded set. It takes the key with the next epoch. It may try at any time.
5. A leader begins its epoch with a record at the end of its log, and cuts nothing off.
6. A follower takes data, and acknowledges, only on the connection of the epoch that it has read from the coordinator, and only
   after its log was cut to where it agrees with the leader's.
7. It acknowledges what is durable.
8. A process begins only an epoch that it knows to have won. One that finds itself named as leader stands again: its log may
   have lost what another has.

The times in `Timing` decide when something is tried, never whether it is allowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final, NamedTuple, Protocol

from penstock.cluster.commands import (
    Ack,
    BeginEpoch,
    Command,
    Committed,
    Cut,
    Dial,
    HangUp,
    Hello,
    ReadKey,
    Refuse,
    Resign,
    StepDown,
    Swap,
    Welcome,
)
from penstock.cluster.errors import LogsDiverge
from penstock.cluster.shardkey import ReplicaId, ShardKey, name_of
from penstock.store.epochs import EpochTable


class Timing(NamedTuple):
    """Times in ms. None of them matters for safety."""

    lag_ms: int = 1_000
    """After this time without an acknowledgement of something that is to be acknowledged, a member leaves the set."""
    silence_ms: int = 800
    """After this time without a word from the leader, a member looks whether the leader's lease is gone."""
    resign_ms: int = 2_000
    """After this time without contact to enough members, a leader steps down."""
    contact_ms: int = 1_000
    """How long after it sent what was last acknowledged by all members a leader may take new work."""
    turn_ms: int = 150
    """How much later than the most advanced member the next one stands."""
    repeat_ms: int = 300
    """After this time without an answer, a request to the coordinator is repeated."""
    dial_ms: int = 50
    """After this time a leader is dialled again."""


class ReplicaRole(Enum):
    """What a replica does."""

    IDLE = "idle"
    FOLLOWING = "following"
    LEADING = "leading"


class Log(Protocol):
    """What the core sees of the replica's log."""

    @property
    def end(self) -> int:
        """Position after the last record."""
        ...

    @property
    def durable(self) -> int:
        """Everything before this position is on disk."""
        ...

    @property
    def epochs(self) -> EpochTable:
        """The epochs of the records."""
        ...


class _Peer:
    """What a leader knows of a follower that is connected."""

    __slots__ = ("acked", "behind_ms", "contact_ms", "link", "sent_ms")

    def __init__(self, link: int, now_ms: int) -> None:
        self.link = link
        self.acked: int | None = None
        self.behind_ms: int | None = now_ms
        """Since when it has not acknowledged anything although there is something; None if there is nothing."""
        self.contact_ms = now_ms
        self.sent_ms = now_ms
        """When the leader sent what the follower acknowledged last."""


class _Request(NamedTuple):
    """A request to replace the key that has no answer yet."""

    number: int
    key: ShardKey
    sent_ms: int


class Replica:
    """One replica of a shard.

    Parameters:
        replica: its id.
        log: its log.
        timing: when it tries something.
    """

    def __init__(self, replica: ReplicaId, log: Log, timing: Timing = Timing()) -> None:  # noqa: B008 - it does not change
        self.id: Final = replica
        self._log = log
        self._timing = timing
        self.role = ReplicaRole.IDLE
        self.epoch = 0
        """The epoch that it leads or follows; of an idle one, the last."""
        self.key: ShardKey | None = None
        """The latest value of the key that it knows of."""
        self.committed = 0
        """Everything before this position is committed, as far as it knows."""
        self._alive: Mapping[ReplicaId, int] | None = None
        self._requests = 0
        self._read_ms: int | None = None
        # as a candidate
        self._candidacy: _Request | None = None
        self._cause_ms: int | None = None
        """Since when there is a reason to stand."""
        # as a follower
        self.leader: ReplicaId | None = None
        self._link = 0
        self._is_linked = False
        self._is_cut = False
        """Whether the log was cut to where it agrees with the leader's."""
        self._heard_ms = 0
        self._dialled_ms = 0
        self._is_leader_gone = False
        """Whether the leader has resigned, or its host refuses connections since the last one ended."""
        self._yields = False
        """Whether it has resigned in favour of another one, so that this one waits for a turn more."""
        # as a leader
        self._peers: dict[ReplicaId, _Peer] = {}
        self._begin: int | None = None
        """Position after the first record of its epoch."""
        self._proposal: _Request | None = None
        self._led_ms = 0
        self._lonely_ms = 0
        """When it last had contact to enough members, or no other member was alive."""
        self._is_resigning = False

    def lag_ms(self, now_ms: int, replica: ReplicaId) -> int:
        """Return for how long a follower has not acknowledged all that it got; 0 if it has."""
        peer = self._peers.get(replica)
        return now_ms - peer.behind_ms if peer is not None and peer.behind_ms is not None else 0

    # --- the coordinator --------------------------------------------------------------------------------------------

    def start(self, now_ms: int) -> list[Command]:
        """Begin: read the key."""
        self._heard_ms = self._read_ms = now_ms
        return [ReadKey()]

    def alive(self, now_ms: int, positions: Mapping[ReplicaId, int]) -> list[Command]:
        """Take which replicas have a lease, and how far the log of each is durable."""
        self._alive = positions
        return self.tick(now_ms)

    def key_read(self, now_ms: int, key: ShardKey) -> list[Command]:
        """Take a value of the key that was read, or that a watch tells. It may be older than others."""
        self._read_ms = None
        if self.key is not None and key.revision < self.key.revision:
            return []
        if self._is_mine(key):
            return self._read_while_leading(key)
        if self.role is ReplicaRole.LEADING:
            return [*self._step_down(f"{self._who(key)} leads epoch {key.epoch}"), *self.key_read(now_ms, key)]
        self.key = key
        candidacy = self._candidacy
        if (
            candidacy is not None
            and key.revision > candidacy.key.revision
            # A watch may tell of an election before the answer to the winner's own request comes. Only the answer tells whether
            # this process has won: an earlier one with its id may have asked for the same epoch (rule 8).
            and (key.leader, key.epoch) != (self.id, candidacy.key.epoch)
        ):
            self._candidacy = None
        if key.leader is None or key.leader == self.id or key.epoch < self.epoch:
            return self.tick(now_ms)
        if (key.leader, key.epoch) == (self.leader, self.epoch):
            return []
        return self._follow(now_ms, key.leader, key.epoch)

    def _read_while_leading(self, _key: ShardKey) -> list[Command]:
        return []  # rule 2

    def answered(self, now_ms: int, request: int, is_swapped: bool, key: ShardKey) -> list[Command]:
        """Take the answer to a `Swap`: whether the key was replaced, and its value after that."""
        if self._candidacy is not None and request == self._candidacy.number:
            self._candidacy = None
            if is_swapped and self.role is not ReplicaRole.LEADING:
                return self._lead(now_ms, key)
        elif self._proposal is not None and request == self._proposal.number and self._is_mine(key):
            self.key, self._proposal = key, None
            return [*self._progress(), *self.tick(now_ms)]
        return self.key_read(now_ms, key)

    def _is_mine(self, key: ShardKey) -> bool:
        return self.role is ReplicaRole.LEADING and (key.leader, key.epoch) == (self.id, self.epoch)

    def _swap(self, now_ms: int, key: ShardKey) -> tuple[_Request, list[Command]]:
        self._requests += 1
        request = _Request(self._requests, key, now_ms)
        return request, [Swap(request.number, key)]

    # --- candidates -------------------------------------------------------------------------------------------------

    def stand(self, now_ms: int) -> list[Command]:
        """Try to become the leader, if rule 4 allows it. This is safe at any time."""
        key = self.key
        if key is None or self.role is ReplicaRole.LEADING or self._candidacy is not None or not self._may_stand(key):
            return []
        members = key.members
        if key.leader is not None and key.leader != self.id and len(members) > key.required:
            members -= {key.leader}
        wanted = key._replace(epoch=key.epoch + 1, leader=self.id, members=members)
        self._candidacy, commands = self._swap(now_ms, wanted)
        return commands

    def _may_stand(self, key: ShardKey) -> bool:
        return self.id in key.members

    def _is_turn(self, now_ms: int) -> bool:
        """Return whether it is this member's turn to stand: the more of the log a member has, the sooner."""
        key = self.key
        if key is None or not self._may_stand(key) or not self._has_cause(key, now_ms):
            self._cause_ms = None
            return False
        if self._cause_ms is None:
            self._cause_ms = now_ms
        if key.leader == self.id:
            return True  # everybody else waits for this one
        mine = (self._log.durable, self.id)
        others = (self._alive or {}).items()
        better = [each for each, position in others if each in key.members - {key.leader} and (position, each) > mine]
        turns = len(better) + self._yields
        return now_ms - self._cause_ms >= turns * self._timing.turn_ms

    def _has_cause(self, key: ShardKey, now_ms: int) -> bool:
        if key.leader is None or key.leader == self.id or self._is_leader_gone:
            return True
        is_silent = now_ms - self._heard_ms >= self._timing.silence_ms
        return is_silent and self._alive is not None and key.leader not in self._alive

    # --- followers --------------------------------------------------------------------------------------------------

    def _follow(self, now_ms: int, leader: ReplicaId, epoch: int) -> list[Command]:
        self.role, self.leader, self.epoch = ReplicaRole.FOLLOWING, leader, epoch
        self._heard_ms = now_ms
        self._is_leader_gone = self._yields = False
        return self._dial(now_ms)

    def _dial(self, now_ms: int) -> list[Command]:
        assert self.leader is not None
        self._link += 1
        self._is_linked, self._is_cut = True, self._keeps_cut()
        self._dialled_ms = now_ms
        return [Dial(self._link, self.leader, self.epoch)]

    def _keeps_cut(self) -> bool:
        return False  # rule 6

    def connected(self, now_ms: int, link: int) -> list[Command]:
        """Take that the leader has taken the connection."""
        if link != self._link or self.role is not ReplicaRole.FOLLOWING:
            return []
        self._heard_ms = now_ms
        return [Hello(link, self.epoch)]

    def link_ended(self, now_ms: int, link: int, *, is_refused: bool = False) -> list[Command]:
        """Take that the connection to the leader has ended or could not be made; `is_refused` if its host answered with no."""
        if link != self._link or self.role is not ReplicaRole.FOLLOWING:
            return []
        self._is_linked = self._is_cut = False
        self._is_leader_gone = self._is_leader_gone or is_refused
        return self.tick(now_ms)

    def resigned(self, now_ms: int, link: int, successor: ReplicaId) -> list[Command]:
        """Take that the leader resigns, and who should stand first."""
        if link != self._link or self.role is not ReplicaRole.FOLLOWING:
            return []
        self._is_leader_gone, self._yields = True, successor != self.id
        return self.stand(now_ms) if successor == self.id else self.tick(now_ms)

    def welcomed(self, now_ms: int, link: int, epoch: int, position: int) -> list[Command]:
        """Take where the leader says that the log must be cut.

        Raises:
            LogsDiverge: it would cut off what is committed. That can't happen without a defect or an unclean election.
        """
        if link != self._link or self.role is not ReplicaRole.FOLLOWING or epoch != self.epoch:
            return []
        if position < self.committed:
            raise LogsDiverge(
                f"the leader of epoch {epoch} has another log from position {position} on, but everything before "
                f"{self.committed} was committed; nothing was cut. Keep the data of all replicas, and compare them"
            )
        self._heard_ms, self._is_leader_gone = now_ms, False
        return [Cut(link, self._where_to_cut(position))]

    def _where_to_cut(self, position: int) -> int:
        return position  # never to the own idea of what is committed

    def was_cut(self, now_ms: int, link: int) -> list[Command]:
        """Take that the log was cut, durably."""
        if link != self._link or self.role is not ReplicaRole.FOLLOWING:
            return []
        self._is_cut = True
        return self.synced(now_ms)

    def accepts(self, link: int, epoch: int) -> bool:
        """Return whether data that comes on a connection may be written."""
        return link == self._link and epoch == self.epoch and self.role is ReplicaRole.FOLLOWING and self._is_cut

    def heard(self, now_ms: int, link: int, committed: int) -> list[Command]:
        """Take a word of the leader: up to where everything is committed. Data that came with it must have been written."""
        if link != self._link or self.role is not ReplicaRole.FOLLOWING or not self._is_cut:
            return []
        self._heard_ms = now_ms
        return self._commit(min(committed, self._log.end))

    def _commit(self, position: int) -> list[Command]:
        if position <= self.committed:
            return []
        self.committed = position
        return [Committed(position)]

    def synced(self, now_ms: int) -> list[Command]:
        """Take that more of the log is durable."""
        if self.role is ReplicaRole.LEADING:
            for peer in self._peers.values():
                if peer.behind_ms is None and (peer.acked or 0) < self._log.durable:
                    peer.behind_ms = now_ms
            return self._progress()
        if self.role is ReplicaRole.FOLLOWING and self._is_linked and self._is_cut:
            return [Ack(self._link, self.epoch, self._log.durable)]
        return []

    # --- leaders ----------------------------------------------------------------------------------------------------

    def _lead(self, now_ms: int, key: ShardKey) -> list[Command]:
        hang_up: list[Command] = [HangUp(self._link)] if self._is_linked else []
        self._forget_following()
        self.role, self.epoch, self.key = ReplicaRole.LEADING, key.epoch, key
        self._peers, self._begin, self._proposal = {}, None, None
        self._led_ms = self._lonely_ms = now_ms
        self._is_resigning = False
        return [*hang_up, BeginEpoch(key.epoch)]

    def _forget_following(self) -> None:
        self.leader, self._cause_ms = None, None
        self._link += 1
        self._is_linked = self._is_cut = self._is_leader_gone = False

    def epoch_begun(self, now_ms: int) -> list[Command]:
        """Take that the first record of the epoch is at the end of the log."""
        self._begin = self._log.end
        return self.synced(now_ms)

    def hello(self, now_ms: int, peer: ReplicaId, link: int, epoch: int, table: EpochTable, end: int) -> list[Command]:
        """Take what a follower says of its log."""
        if self.role is not ReplicaRole.LEADING or self._begin is None or epoch != self.epoch:
            why = f"{name_of(self.id)} leads no epoch {epoch}"
            return [Refuse(peer, link, why)]
        self._peers[peer] = _Peer(link, now_ms)
        position = self._log.epochs.agreed_end(self._log.end, table, end)
        return [Welcome(peer, link, epoch, position, self.committed)]

    def peer_acked(self, now_ms: int, peer: ReplicaId, link: int, epoch: int, position: int, sent_ms: int) -> list[Command]:
        """Take up to where the log of a follower is durable.

        Args:
            now_ms: the time.
            peer, link, epoch: of the follower.
            position: up to which its log is durable.
            sent_ms: when the leader sent what is acknowledged, or the heartbeat that is answered.
        """
        found = self._peers.get(peer)
        if self.role is not ReplicaRole.LEADING or epoch != self.epoch or found is None or found.link != link:
            return []
        is_new = found.acked is None or position > found.acked
        found.acked = max(found.acked or 0, position)
        found.contact_ms, found.sent_ms = now_ms, max(found.sent_ms, sent_ms)
        if found.acked >= self._log.durable:
            found.behind_ms = None
        elif is_new:
            found.behind_ms = now_ms
        return [*self._progress(), *self._propose(now_ms)]

    def peer_gone(self, now_ms: int, peer: ReplicaId, link: int) -> list[Command]:
        """Take that the connection of a follower has ended."""
        if peer in self._peers and self._peers[peer].link == link:
            del self._peers[peer]
        return self.tick(now_ms)

    def _maximal(self) -> frozenset[ReplicaId]:
        """Return all replicas that may be in the recorded set."""
        assert self.key is not None
        return self.key.members | (self._proposal.key.members if self._proposal is not None else frozenset())

    def _acked(self, replica: ReplicaId) -> int:
        if replica == self.id:
            return self._log.durable if self._begin is not None else 0
        peer = self._peers.get(replica)
        return (peer.acked or 0) if peer is not None else 0

    def _progress(self) -> list[Command]:
        key = self.key
        if key is None or self.role is not ReplicaRole.LEADING or len(key.members) < key.required:
            return []
        return self._commit(min(map(self._acked, self._maximal())))

    def _enough(self) -> int:
        """Return what a replica must have so that it may join the set."""
        assert self._begin is not None
        return max(self.committed, self._begin)

    def _has_enough(self, replica: ReplicaId) -> bool:
        peer = self._peers.get(replica)
        return peer is not None and peer.acked is not None and peer.acked >= self._enough()

    def _propose(self, now_ms: int) -> list[Command]:
        """Propose another set, if one is wanted; or repeat what has no answer."""
        key = self.key
        if key is None or self.role is not ReplicaRole.LEADING or self._begin is None:
            return []
        if self._proposal is not None:
            if now_ms - self._proposal.sent_ms < self._timing.repeat_ms:
                return []
            self._proposal = self._proposal._replace(sent_ms=now_ms)
            return [Swap(self._proposal.number, self._proposal.key)]
        members = self._wanted(key, now_ms)
        if members == key.members:
            return []
        self._proposal, commands = self._swap(now_ms, key._replace(members=members))
        return commands

    def _wanted(self, key: ShardKey, now_ms: int) -> frozenset[ReplicaId]:
        """Return the set as it should be. One replica joins or leaves at a time."""
        joining = [each for each in sorted(self._peers) if each not in key.members and self._has_enough(each)]
        if joining:
            return key.members | {joining[0]}
        leaving = [each for each in sorted(key.members - {self.id}) if self._is_lagging(each, now_ms)]
        if leaving and len(key.members) > key.required:
            return key.members - {leaving[0]}
        return key.members

    def _is_lagging(self, replica: ReplicaId, now_ms: int) -> bool:
        peer = self._peers.get(replica)
        since_ms = self._led_ms if peer is None else peer.behind_ms
        return since_ms is not None and now_ms - since_ms >= self._timing.lag_ms

    def hand_over(self, now_ms: int, successor: ReplicaId) -> list[Command]:
        """Resign in favour of a member. Everything that was taken should be committed; the node takes nothing more."""
        if self.role is not ReplicaRole.LEADING or self._is_resigning:
            return []
        self._is_resigning = True
        return [Resign(successor)]

    def _step_down(self, why: str) -> list[Command]:
        self.role, self._begin, self._proposal, self._peers = ReplicaRole.IDLE, None, None, {}
        self._forget_following()
        return [StepDown(why)]

    def _who(self, key: ShardKey) -> str:
        return "nobody" if key.leader is None else f"replica {name_of(key.leader)}"

    def may_work_until_ms(self) -> int:
        """Return until when a leader may take new work: some time after it sent what all members have acknowledged last.

        This bounds deliveries of a leader that is no longer one. Acknowledgements don't need it.
        """
        if self.key is None or self.role is not ReplicaRole.LEADING:
            return 0
        found = [self._peers[each].sent_ms if each in self._peers else self._led_ms for each in self.key.members - {self.id}]
        return min(found, default=1 << 62) + self._timing.contact_ms

    def _has_lost_contact(self, key: ShardKey, now_ms: int) -> bool:
        """Return whether a leader has had no contact to enough members for long, though another one was alive all the time.

        The time begins anew when the others are dead: one that starts again needs a moment until it has dialled.
        """
        others = key.members - {self.id}
        silence_ms = self._timing.silence_ms
        contacts = sum(now_ms - self._peers[each].contact_ms < silence_ms for each in others if each in self._peers)
        if contacts + 1 >= key.required or not any(each in (self._alive or {}) for each in others):
            self._lonely_ms = now_ms
        return now_ms - self._lonely_ms >= self._timing.resign_ms

    # --- time -------------------------------------------------------------------------------------------------------

    def tick(self, now_ms: int) -> list[Command]:
        """Do what is due. The node calls it at least every `Timing.dial_ms`."""
        timing = self._timing
        if self.role is ReplicaRole.LEADING:
            assert self.key is not None
            if self._has_lost_contact(self.key, now_ms):
                return [*self._step_down(f"no contact to enough members for {timing.resign_ms} ms"), *self._read(now_ms)]
            return self._propose(now_ms)
        commands: list[Command] = []
        if self._candidacy is not None:
            if now_ms - self._candidacy.sent_ms >= timing.repeat_ms:
                self._candidacy = None  # a read tells what came of it, and rule 8 what follows from that
                commands += self._read(now_ms)
        elif self._is_turn(now_ms):
            commands += self.stand(now_ms)
        if self.role is ReplicaRole.FOLLOWING and not self._is_linked and now_ms - self._dialled_ms >= timing.dial_ms:
            commands += self._dial(now_ms)
        if self.role is ReplicaRole.IDLE or now_ms - self._heard_ms >= timing.silence_ms:
            commands += self._read(now_ms)
        return commands

    def _read(self, now_ms: int) -> list[Command]:
        if self._read_ms is not None and now_ms - self._read_ms < self._timing.repeat_ms:
            return []
        self._read_ms = now_ms
        return [ReadKey()]
