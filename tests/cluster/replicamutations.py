"""Deliberate defects of the core of a replica. The simulation must find each, or it would find no other either."""

from __future__ import annotations

from typing import NamedTuple

from penstock.cluster.commands import Ack, Command
from penstock.cluster.replica import Replica, ReplicaRole
from penstock.cluster.shardkey import ReplicaId, ShardKey
from tests.cluster.replicasim import NewReplica, Simulation, Violation


class TakesAnyEpoch(Replica):
    """A follower takes data of any connection, and acknowledges it."""

    def accepts(self, link: int, epoch: int) -> bool:
        return self.role is not ReplicaRole.LEADING

    def heard(self, now_ms: int, link: int, committed: int) -> list[Command]:
        return [*super().heard(now_ms, link, committed), *self.synced(now_ms)]


class ShrinksAtOnce(Replica):
    """A leader waits no more for a member that it has proposed to drop."""

    def _maximal(self) -> frozenset[ReplicaId]:
        assert self.key is not None
        return self.key.members & (self._proposal.key.members if self._proposal is not None else self.key.members)


class ExpandsWithoutUnion(Replica):
    """A leader does not wait for a member that it has proposed to add."""

    def _maximal(self) -> frozenset[ReplicaId]:
        assert self.key is not None
        return self.key.members


class ExpandsEarly(Replica):
    """A follower joins the set as soon as it has acknowledged anything."""

    def _enough(self) -> int:
        return 0


class ExpandsAtKnownCommit(Replica):
    """A follower joins the set when it has what a new leader knows to be committed, which is too little."""

    def _enough(self) -> int:
        return self.committed


class ReadEndsProposal(Replica):
    """A leader takes what it reads for the answer to its proposal."""

    def _read_while_leading(self, key: ShardKey) -> list[Command]:
        self.key, self._proposal = key, None
        return self._progress()


class AcksBeforeTruncation(Replica):
    """A follower that was cut once acknowledges on its next connection before it is cut again."""

    _was_cut = False

    def was_cut(self, now_ms: int, link: int) -> list[Command]:
        self._was_cut = True
        return super().was_cut(now_ms, link)

    def _keeps_cut(self) -> bool:
        return self._was_cut


class ElectsAnybody(Replica):
    """A replica that is not in the set stands."""

    def _may_stand(self, key: ShardKey) -> bool:
        return True

    def stand(self, now_ms: int) -> list[Command]:
        if self.key is not None and self.role is not ReplicaRole.LEADING:
            self.key = self.key._replace(members=self.key.members | {self.id})
        return super().stand(now_ms)


class AcksBeforeSync(Replica):
    """A follower acknowledges what it has only written."""

    def heard(self, now_ms: int, link: int, committed: int) -> list[Command]:
        commands = super().heard(now_ms, link, committed)
        return [*commands, Ack(link, self.epoch, self._log.end)] if self._is_cut else commands


class CutsToItsOwnCommit(Replica):
    """A follower cuts its log where it thinks that everything is committed (Kafka before KIP-101)."""

    def _where_to_cut(self, position: int) -> int:
        return min(position, self.committed)


class CutsNothing(Replica):
    """A follower keeps what its leader does not have."""

    def _where_to_cut(self, position: int) -> int:
        return max(position, self._log.end)


class LeadsAgain(Replica):
    """A process that finds itself named as leader goes on with the epoch."""

    def key_read(self, now_ms: int, key: ShardKey) -> list[Command]:
        is_named = key.leader == self.id and self.role is ReplicaRole.IDLE and self.key is None
        if not is_named:
            return super().key_read(now_ms, key)
        self._read_ms, self.key = None, key
        self.role, self.epoch, self._led_ms, self._begin = ReplicaRole.LEADING, key.epoch, now_ms, self._log.end
        return []


MUTATIONS: dict[str, type[Replica]] = {
    "no-epoch-check": TakesAnyEpoch,
    "shrink-at-once": ShrinksAtOnce,
    "expand-without-union": ExpandsWithoutUnion,
    "expand-early": ExpandsEarly,
    "expand-at-known-commit": ExpandsAtKnownCommit,
    "read-ends-proposal": ReadEndsProposal,
    "ack-before-truncation": AcksBeforeTruncation,
    "unclean-election": ElectsAnybody,
    "ack-before-sync": AcksBeforeSync,
    "truncate-to-own-commit": CutsToItsOwnCommit,
    "no-truncation": CutsNothing,
    "lead-again": LeadsAgain,
}

SEEDS_MAX = 3_000
"""Seeds within which each must be found."""


class Caught(NamedTuple):
    """How a mutation was found."""

    seeds: int
    violation: str
    """Empty if it was not found."""


def violation_of(seed: int, new_replica: NewReplica = Replica) -> str:
    """Return what a seed violates; an empty string if nothing."""
    try:
        Simulation(seed, new_replica).run()
    except Violation as violation:
        return str(violation)
    return ""


def catch(name: str, seeds_max: int = SEEDS_MAX) -> Caught:
    """Run seeds until one violates something."""
    for seed in range(seeds_max):
        violation = violation_of(seed, MUTATIONS[name])
        if violation:
            return Caught(seed + 1, violation)
    return Caught(seeds_max, "")
