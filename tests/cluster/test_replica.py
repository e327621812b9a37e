"""When a replica stands, joins, leaves and resigns. What keeps data safe is tested by the simulation."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from penstock.cluster import commands as c
from penstock.cluster.errors import LogsDiverge
from penstock.cluster.replica import Replica, ReplicaRole, Timing
from penstock.cluster.shardkey import ShardKey
from penstock.store.epochs import EpochTable

A, B, C, D = 1, 2, 3, 4
TIMING = Timing()


class Log:
    """A log that the test sets."""

    def __init__(self, end: int = 100, epochs: Iterable[tuple[int, int]] = ((1, 0),)) -> None:
        self.end = self.durable = end
        self.epochs = EpochTable(epochs)


def key(leader: int | None, epoch: int, members: Iterable[int] = (A, B, C), required: int = 2, revision: int = 0) -> ShardKey:
    return ShardKey(revision or epoch + 1, epoch, leader, frozenset(members), required)


def swaps(commands: list[c.Command]) -> list[ShardKey]:
    return [command.key for command in commands if isinstance(command, c.Swap)]


def following(me: int = B, log: Log | None = None, *, members: Iterable[int] = (A, B, C), required: int = 2) -> Replica:
    """Return a replica that follows A in epoch 1, was cut, and has heard from it at 0 ms."""
    replica = Replica(me, log or Log(), TIMING)
    assert replica.start(0) == [c.ReadKey()]
    assert replica.key_read(0, key(A, 1, members, required)) == [c.Dial(1, A, 1)]
    assert replica.connected(0, 1) == [c.Hello(1, 1)]
    assert replica.welcomed(0, 1, 1, 100) == [c.Cut(1, 100)]
    assert replica.was_cut(0, 1) == [c.Ack(1, 1, 100)]
    replica.alive(0, {A: 100, B: 100, C: 100})
    return replica


def leading(me: int = B, *, members: Iterable[int] = (A, B, C), required: int = 2) -> tuple[Replica, Log]:
    """Return a replica that has won epoch 2 at 0 ms, and its log, which ends at 110."""
    log = Log()
    replica = Replica(me, log, TIMING)
    replica.start(0)
    replica.key_read(0, key(None, 1, members, required))
    request = replica.stand(0) or [c.Swap(1, key(me, 2, members, required))]
    won = key(me, 2, members, required, revision=3)
    assert isinstance(request[0], c.Swap)
    assert replica.answered(0, 1, True, won) == [c.BeginEpoch(2)]
    log.end, log.epochs = 110, log.epochs.with_epoch(2, 100)
    replica.epoch_begun(0)
    log.durable = 110
    replica.synced(0)
    return replica, log


def join(replica: Replica, peer: int, now_ms: int = 0, position: int = 110) -> list[c.Command]:
    replica.hello(now_ms, peer, 7, 2, EpochTable([(1, 0)]), 100)
    return replica.peer_acked(now_ms, peer, 7, 2, position, now_ms)


# --- candidates ---------------------------------------------------------------------------------------------------------


def test_a_member_stands_at_once_when_the_leaders_host_refuses_connections() -> None:
    replica = following(C)
    assert swaps(replica.link_ended(10, 1)) == [], "a connection may break"
    dialled = replica.tick(10 + TIMING.dial_ms)
    assert dialled == [c.Dial(2, A, 1)]
    (wanted,) = swaps(replica.link_ended(70, 2, is_refused=True))
    assert wanted == key(C, 2, (B, C))._replace(revision=2)


def test_a_member_stands_when_the_leader_is_silent_and_its_lease_is_gone() -> None:
    replica = following()
    assert swaps(replica.tick(5_000)) == [], "one broken connection deposes nobody"
    assert len(swaps(replica.alive(5_000, {B: 100, C: 100}))) == 0, "C has as much, and the greater id"
    assert len(swaps(replica.tick(5_000 + TIMING.turn_ms))) == 1


def test_the_member_with_more_of_the_log_stands_first() -> None:
    log = Log()
    replica = following(C, log)
    replica.alive(0, {A: 100, B: 101, C: 100})
    replica.link_ended(10, 1, is_refused=True)
    assert replica.role is ReplicaRole.FOLLOWING
    assert swaps(replica.tick(10 + TIMING.turn_ms - 1)) == []
    assert len(swaps(replica.tick(10 + TIMING.turn_ms))) == 1


def test_a_member_to_which_the_leader_resigns_stands_at_once() -> None:
    assert len(swaps(following(B).resigned(10, 1, B))) == 1
    assert swaps(following(B).resigned(10, 1, C)) == []


def test_a_member_to_which_the_leader_does_not_resign_waits_for_a_turn_more() -> None:
    replica = following(B)
    replica.alive(0, {A: 100, B: 100, C: 99})
    assert swaps(replica.resigned(10, 1, C)) == []
    assert swaps(replica.tick(10 + TIMING.turn_ms - 1)) == []
    assert len(swaps(replica.tick(10 + TIMING.turn_ms))) == 1


def test_a_replica_that_is_not_in_the_set_never_stands() -> None:
    replica = following(D)
    replica.link_ended(10, 1, is_refused=True)
    assert replica.stand(20) == []
    assert swaps(replica.tick(60_000)) == []


def test_the_old_leader_stays_in_a_set_that_would_be_too_small_without_it() -> None:
    replica = following(members=(A, B))
    (wanted,) = swaps(replica.stand(10))
    assert wanted.members == {A, B}


def test_a_candidate_without_an_answer_reads_and_does_not_lead_the_epoch_that_it_may_have_won() -> None:
    replica = following()
    replica.stand(10)
    assert replica.tick(10 + TIMING.repeat_ms - 1) == []
    assert c.ReadKey() in replica.tick(10 + TIMING.repeat_ms)
    (wanted,) = swaps(replica.key_read(400, key(B, 2, (B, C), revision=3)))
    assert wanted.epoch == 3
    assert replica.answered(500, 2, True, wanted._replace(revision=4)) == [c.HangUp(1), c.BeginEpoch(3)]


def test_a_replica_that_starts_and_is_named_as_leader_stands_again() -> None:
    replica = Replica(A, Log(), TIMING)
    replica.start(0)
    (wanted,) = swaps(replica.key_read(0, key(A, 4)))
    assert (wanted.epoch, wanted.leader) == (5, A)
    assert wanted.members == {A, B, C}


# --- followers ----------------------------------------------------------------------------------------------------------


def test_a_follower_takes_data_of_its_epoch_and_connection_only_and_after_it_was_cut() -> None:
    replica = Replica(B, Log(), TIMING)
    replica.start(0)
    replica.key_read(0, key(A, 1))
    assert not replica.accepts(1, 1)
    assert replica.synced(0) == [], "it acknowledges nothing before it was cut"
    replica.connected(0, 1)
    replica.welcomed(0, 1, 1, 100)
    replica.was_cut(0, 1)
    assert replica.accepts(1, 1)
    assert not replica.accepts(1, 2)
    assert not replica.accepts(0, 1)


def test_a_follower_that_would_have_to_cut_what_is_committed_refuses() -> None:
    replica = following()
    assert replica.heard(0, 1, 90) == [c.Committed(90)]
    replica.link_ended(0, 1)
    replica.tick(TIMING.dial_ms)
    with pytest.raises(LogsDiverge, match="nothing was cut"):
        replica.welcomed(60, 2, 1, 89)


def test_a_follower_takes_no_more_for_committed_than_it_has() -> None:
    replica = following()
    assert replica.heard(0, 1, 500) == [c.Committed(100)]
    assert replica.heard(0, 1, 500) == []


# --- leaders ------------------------------------------------------------------------------------------------------------


def test_a_record_is_committed_when_all_members_have_it() -> None:
    replica, _ = leading()
    assert join(replica, A) == []
    assert join(replica, C) == [c.Committed(110)]


def test_a_follower_of_another_epoch_is_refused() -> None:
    replica, _ = leading()
    for epoch in (1, 3):
        (refused,) = replica.hello(0, A, 7, epoch, EpochTable(), 0)
        assert isinstance(refused, c.Refuse)


def test_a_follower_is_told_where_its_log_differs() -> None:
    replica, _ = leading()
    assert replica.hello(0, C, 7, 2, EpochTable([(1, 0)]), 130) == [c.Welcome(C, 7, 2, 100, 0)]


def test_a_member_that_lags_leaves_and_joins_again_when_it_has_caught_up() -> None:
    replica, log = leading()
    join(replica, A)
    join(replica, C)
    log.end = log.durable = 120
    replica.synced(1_000)
    replica.peer_acked(1_000, A, 7, 2, 120, 1_000)
    assert swaps(replica.tick(1_000 + TIMING.lag_ms - 1)) == []
    (wanted,) = swaps(replica.tick(1_000 + TIMING.lag_ms))
    assert wanted.members == {A, B}
    assert replica.committed == 110, "only the answer ends the wait for C"
    assert replica.answered(2_100, 2, True, wanted._replace(revision=4)) == [c.Committed(120)]
    assert swaps(replica.peer_acked(2_200, C, 7, 2, 119, 2_200)) == []
    (wanted,) = swaps(replica.peer_acked(2_300, C, 7, 2, 120, 2_300))
    assert wanted.members == {A, B, C}


def test_the_set_never_gets_smaller_than_what_is_required() -> None:
    replica, _ = leading(members=(A, B))
    join(replica, A)
    replica.peer_gone(100, A, 7)
    assert swaps(replica.tick(60_000)) == []
    (wanted,) = swaps(join(replica, C, 60_000))
    assert wanted.members == {A, B, C}
    (wanted,) = swaps(replica.answered(60_100, 2, True, wanted._replace(revision=4)))
    assert wanted.members == {B, C}, "a member is replaced by one that has caught up"


def test_a_proposal_without_an_answer_is_repeated_and_a_read_does_not_end_it() -> None:
    replica, _ = leading(members=(A, B))
    join(replica, A)
    (first,) = [command for command in join(replica, C) if isinstance(command, c.Swap)]
    assert replica.key_read(10, key(B, 2, (A, B), revision=3)) == []
    assert replica.tick(TIMING.repeat_ms - 1) == []
    assert replica.tick(TIMING.repeat_ms) == [first]


def test_a_leader_that_has_lost_its_members_steps_down_if_one_is_alive_elsewhere() -> None:
    replica, _ = leading()
    join(replica, A)
    join(replica, C)
    for peer in (A, C):
        replica.peer_gone(100, peer, 7)
    assert replica.role is ReplicaRole.LEADING
    assert replica.alive(10_000, {B: 110})[:1] != [c.StepDown("")], "alone, it waits: nobody else could do better"
    assert replica.role is ReplicaRole.LEADING
    assert not [each for each in replica.alive(10_000, {A: 110, B: 110}) if isinstance(each, c.StepDown)], (
        "it has just come back"
    )
    stepped_down = replica.tick(10_000 + TIMING.resign_ms)
    assert isinstance(stepped_down[0], c.StepDown)
    assert not replica.accepts(1, 2)


def test_a_leader_that_reads_of_another_one_steps_down_and_follows_it() -> None:
    replica, _ = leading()
    stepped_down, dial = replica.key_read(10, key(C, 3, revision=9))
    assert isinstance(stepped_down, c.StepDown)
    assert dial == c.Dial(replica._link, C, 3)


def test_a_leader_takes_work_only_for_some_time_after_what_all_members_have_acknowledged() -> None:
    replica, _ = leading()
    join(replica, A, 300)
    join(replica, C, 200)
    assert replica.may_work_until_ms() == 200 + TIMING.contact_ms
    replica.peer_acked(900, C, 7, 2, 110, 850)
    assert replica.may_work_until_ms() == 300 + TIMING.contact_ms


def test_a_leader_resigns_in_favour_of_a_member_once() -> None:
    replica, _ = leading()
    assert replica.hand_over(0, C) == [c.Resign(C)]
    assert replica.hand_over(0, C) == []
    assert replica.role is ReplicaRole.LEADING, "until the coordinator says that another one leads"


def test_a_candidate_that_sees_its_election_before_the_answer_leads_by_the_answer() -> None:
    replica = Replica(A, Log(), TIMING)
    replica.start(0)
    (wanted,) = swaps(replica.key_read(0, key(None, 0, revision=1)))
    won = wanted._replace(revision=2)
    assert swaps(replica.key_read(11, won)) == [], "a watch was faster than the answer"
    assert replica.role is ReplicaRole.IDLE
    assert c.BeginEpoch(1) in replica.answered(12, 1, True, won), "it leads now"


def test_a_candidate_whose_answer_is_lost_stands_for_the_next_epoch() -> None:
    replica = Replica(A, Log(), TIMING)
    replica.start(0)
    (wanted,) = swaps(replica.key_read(0, key(None, 0, revision=1)))
    won = wanted._replace(revision=2)
    replica.key_read(11, won)
    later = [each for at in range(20, 2_000, 10) for each in (replica.key_read(at, won) + replica.tick(at))]
    assert swaps(later)[0].epoch == 2, "it does not know whether this process has won epoch 1"
    assert replica.role is ReplicaRole.IDLE
