"""Simulates the replicas of a shard: the real core, with a network, disks and a coordinator that lose, delay and repeat.

A run is its seed. Connections are FIFO and break; replicas are paused, and crash with the loss of any part of what they had not
synced; a request to the coordinator is applied later, and its answer comes later still, out of order, or never. Any member may
stand at any time, whatever the clock says.

The oracle knows two things: each position that anybody takes for committed has one record, for ever; and a value that was
acknowledged is in the log of every later leader.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

from penstock.cluster import commands as c
from penstock.cluster.errors import LogsDiverge
from penstock.cluster.replica import Replica, ReplicaRole, Timing
from penstock.cluster.shardkey import ShardKey
from penstock.store.epochs import EpochTable

STEPS = 1_500
SIZES = ((3, 2), (3, 2), (2, 1), (3, 1), (5, 3))
"""Replicas, and how many are required; a seed takes one of them."""

TIMING = Timing(silence_ms=50, resign_ms=150, contact_ms=60, turn_ms=5, repeat_ms=150, dial_ms=2)
"""A step takes 1.5 ms on average, and the coordinator tens of steps."""
LAGS_MS = (0, 2, 30)
"""After how long a member leaves the set; a run takes one of them."""

Entry = tuple[int, int]
"""Epoch and value of a record. The first record of an epoch has the value 0."""

NewReplica = Callable[..., Replica]


class Violation(Exception):
    """Raised when something acknowledged is lost, or two replicas disagree."""


class SimulatedLog:
    """The log of a replica. Positions are numbers of records."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.durable = 0
        self._table: EpochTable | None = EpochTable()

    @property
    def end(self) -> int:
        return len(self.entries)

    @property
    def epochs(self) -> EpochTable:
        if self._table is None:
            begins: dict[int, int] = {}
            for position, (epoch, _) in enumerate(self.entries):
                begins.setdefault(epoch, position)
            self._table = EpochTable(begins.items())
        return self._table

    def write(self, position: int, entries: list[Entry]) -> None:
        self.entries[position : position + len(entries)] = entries
        self._table = None

    def cut(self, position: int) -> None:
        del self.entries[position:]
        self.durable = min(self.durable, position)
        self._table = None


class SimulatedReplica:
    """A process, its disk, and what it has sent."""

    def __init__(self, number: int) -> None:
        self.id = number
        self.log = SimulatedLog()
        self.core: Replica
        self.is_up = True
        self.is_paused = False
        self.generation = 0
        self.sent: dict[int, tuple[int, int]] = {}
        """By follower: the connection, and the position up to which it was sent the log."""
        self.waiting: deque[tuple[int, int]] = deque()
        """Position and value of what waits for its acknowledgement."""
        self.heard_sent_ms = 0


class Request(NamedTuple):
    """A request to the coordinator; with `key` None a read."""

    replica: int
    generation: int
    number: int
    key: ShardKey | None


class Answer(NamedTuple):
    """The coordinator's answer."""

    request: Request
    is_swapped: bool
    key: ShardKey


class Simulation:
    """One run.

    Parameters:
        seed: decides everything.
        new_replica: makes the core of a replica.
    """

    def __init__(self, seed: int, new_replica: NewReplica = Replica) -> None:
        self.random = Random(seed)
        self.size, self.required = SIZES[seed % len(SIZES)]
        self.now_ms = 0
        self._new_replica = new_replica
        self._timing = TIMING._replace(lag_ms=self.random.choice(LAGS_MS))
        self.key = ShardKey(1, 0, None, frozenset(range(self.size)), self.required)
        self.requests: list[Request] = []
        self.answers: list[Answer] = []
        self.wires: dict[tuple[int, int], deque[tuple[Any, ...]]] = {
            (a, b): deque() for a in range(self.size) for b in range(self.size)
        }
        self.cut: set[tuple[int, int]] = set()
        """Pairs whose connection is broken in one direction; the coordinator has the number -1."""
        self.fault_share = self.random.choice((0.002, 0.005, 0.02))
        self.send_share = self.random.choice((1.0, 1.0, 0.1))
        """How often a leader that might send sends."""
        self.values = 0
        self.acknowledged: dict[int, int] = {}
        """By value: in which epoch it was."""
        self.committed: list[Entry] = []
        self.begun: dict[int, int] = {}
        """By epoch: its leader."""
        self.counts: Counter[str] = Counter()
        self.replicas = [SimulatedReplica(number) for number in range(self.size)]
        for replica in self.replicas:
            self._start(replica)

    def run(self, steps: int = STEPS) -> None:
        """Run to the end. Raises Violation."""
        for _ in range(steps):
            try:
                self._step()
            except (LogsDiverge, ValueError, AssertionError) as error:  # also a log whose epochs don't ascend
                raise Violation(str(error) or repr(error)) from error

    # --- what happens -----------------------------------------------------------------------------------------------

    def _step(self) -> None:
        random = self.random.random  # drawn by hand: `choice` takes a third of a run
        self.now_ms += (0, 0, 1, 5)[int(random() * 4)]
        replica = self.replicas[int(random() * self.size)]
        fault = random()
        if fault < self.fault_share:
            self._fail(replica)
            return
        if fault < self.fault_share * 5:
            self._mend(replica)
            return
        what = random()
        if what < 0.24:
            self._deliver()
        elif what < 0.33:
            for _ in range(2):
                self._coordinate()
        elif what < 0.42:
            for _ in range(2):
                self._answer()
        elif not replica.is_up or replica.is_paused:
            return
        elif what < 0.52:
            replica.log.durable = replica.log.end
            self._do(replica, replica.core.synced(self.now_ms))
        elif replica.core.role is ReplicaRole.LEADING:
            self._lead(replica, what)
        elif what < 0.72:
            self._ask(replica, None)
        elif what < 0.80:
            self._do(replica, replica.core.stand(self.now_ms))
        else:
            self._tick(replica)

    def _lead(self, replica: SimulatedReplica, what: float) -> None:
        log = replica.log
        if what < 0.68:
            self.values += 1
            replica.waiting.append((log.end, self.values))
            log.write(log.end, [(replica.core.epoch, self.values)])
        elif what < 0.84 and self.random.random() < self.send_share:
            for follower, (link, position) in list(replica.sent.items()):
                if (replica.id, follower) in self.cut:
                    continue
                stop = min(log.end, position + self.random.randint(1, 4))
                data = log.entries[position:stop]
                self.wires[replica.id, follower].append(
                    ("data", link, replica.core.epoch, position, data, replica.core.committed, self.now_ms)
                )
                replica.sent[follower] = link, stop
        elif 0.84 <= what < 0.92:
            self._tick(replica)
        elif what >= 0.92:
            self._ask(replica, None)

    def _tick(self, replica: SimulatedReplica) -> None:
        alive = {each.id: each.log.durable for each in self.replicas if each.is_up and not each.is_paused}
        if self.random.random() < 0.5:
            self._do(replica, replica.core.alive(self.now_ms, alive))
        else:
            self._do(replica, replica.core.tick(self.now_ms))

    def _fail(self, replica: SimulatedReplica) -> None:
        random = self.random
        match random.randrange(4):
            case 0 if replica.is_up:
                self.counts["crashes"] += 1
                replica.is_up = False
                replica.log.cut(random.randint(replica.log.durable, replica.log.end))
                for other in self.replicas:
                    if other is not replica:
                        self._break(replica.id, other.id)
            case 1:
                self.counts["pauses"] += 1
                replica.is_paused = True
            case 2 | 3:
                self.counts["cuts"] += 1
                other_id = random.choice([each for each in range(self.size) if each != replica.id] + [-1])
                self.cut.add((replica.id, other_id))
                if other_id >= 0:
                    if random.random() < 0.7:
                        self.cut.add((other_id, replica.id))
                    self._break(replica.id, other_id)

    def _mend(self, replica: SimulatedReplica) -> None:
        if not replica.is_up:
            replica.is_up, replica.is_paused = True, False
            self._start(replica)
        elif replica.is_paused and self.random.random() < 0.5:
            replica.is_paused = False
        elif self.cut:
            self.cut.discard(self.random.choice(sorted(self.cut)))

    def _start(self, replica: SimulatedReplica) -> None:
        replica.generation += 1
        replica.log.durable = replica.log.end
        replica.sent.clear()
        replica.waiting.clear()
        replica.core = self._new_replica(replica.id, replica.log, self._timing)
        self._do(replica, replica.core.start(self.now_ms))

    # --- the coordinator --------------------------------------------------------------------------------------------

    def _ask(self, replica: SimulatedReplica, key: ShardKey | None, number: int = 0) -> None:
        self.requests.append(Request(replica.id, replica.generation, number, key))

    def _coordinate(self) -> None:
        if not self.requests:
            return
        request = self.requests.pop(self.random.randrange(len(self.requests)))
        if (request.replica, -1) in self.cut:
            return
        is_swapped = request.key is not None and request.key.revision == self.key.revision
        if is_swapped:
            assert request.key is not None
            self.key = request.key._replace(revision=self.key.revision + 1)
        self.answers.append(Answer(request, is_swapped, self.key))

    def _answer(self) -> None:
        if not self.answers:
            return
        answer = self.answers.pop(self.random.randrange(len(self.answers)))
        request = answer.request
        replica = self.replicas[request.replica]
        if not replica.is_up or replica.generation != request.generation:
            return
        if replica.is_paused:
            self.answers.append(answer)
        elif self.random.random() < 0.1:
            self.counts["answers_lost"] += 1
        elif request.key is None:
            self._do(replica, replica.core.key_read(self.now_ms, answer.key))
        else:
            self._do(replica, replica.core.answered(self.now_ms, request.number, answer.is_swapped, answer.key))

    # --- the network ------------------------------------------------------------------------------------------------

    def _break(self, a: int, b: int) -> None:
        """Break the connections between two replicas."""
        for one, other in ((a, b), (b, a)):
            self.wires[one, other].clear()
            replica = self.replicas[one]
            replica.sent.pop(other, None)
            if replica.is_up and not replica.is_paused and replica.core.leader == other:
                link = replica.core._link
                self._do(replica, replica.core.link_ended(self.now_ms, link, is_refused=not self.replicas[other].is_up))

    def _deliver(self) -> None:
        """Deliver up to three messages."""
        live = [
            wire
            for wire, messages in self.wires.items()
            if messages and wire not in self.cut and self.replicas[wire[1]].is_up and not self.replicas[wire[1]].is_paused
        ]
        for _ in range(3 if live else 0):
            sender, receiver = live[int(self.random.random() * len(live))]
            if self.wires[sender, receiver]:
                name, *fields = self.wires[sender, receiver].popleft()
                self._receive(sender, self.replicas[receiver], name, fields)

    def _receive(self, sender: int, replica: SimulatedReplica, name: str, fields: list[Any]) -> None:
        core, now_ms = replica.core, self.now_ms
        match name:
            case "hello":
                self._do(replica, core.hello(now_ms, sender, *fields))
            case "welcome":
                self._do(replica, core.welcomed(now_ms, *fields[:3]))
            case "refused":
                self._do(replica, core.link_ended(now_ms, fields[0]))
            case "resigned":
                self._do(replica, core.resigned(now_ms, *fields))
            case "ack":
                self._do(replica, core.peer_acked(now_ms, sender, *fields))
            case "data":
                link, epoch, position, data, committed, sent_ms = fields
                if core.accepts(link, epoch) and position <= replica.log.end:
                    replica.log.write(position, data)
                    replica.heard_sent_ms = sent_ms
                    self._do(replica, core.heard(now_ms, link, committed))
                else:
                    self.counts["refused"] += 1

    # --- what the core asks for -------------------------------------------------------------------------------------

    def _do(self, replica: SimulatedReplica, commands: list[c.Command]) -> None:
        core, log, now_ms = replica.core, replica.log, self.now_ms
        for command in commands:
            match command:
                case c.ReadKey():
                    self._ask(replica, None)
                case c.Swap(number, key):
                    self._ask(replica, key, number)
                case c.Dial(link, leader, _):
                    self._dial(replica, link, leader)
                case c.Hello(link, epoch):
                    assert core.leader is not None
                    self.wires[replica.id, core.leader].append(("hello", link, epoch, log.epochs, log.end))
                case c.Cut(link, position):
                    self.counts["truncations"] += position < log.end
                    log.cut(position)
                    self._do(replica, core.was_cut(now_ms, link))
                case c.Ack(link, epoch, position):
                    if core.leader is not None and (replica.id, core.leader) not in self.cut:
                        self.wires[replica.id, core.leader].append(("ack", link, epoch, position, replica.heard_sent_ms))
                case c.BeginEpoch(epoch):
                    self._begin_epoch(replica, epoch)
                case c.Welcome(peer, link, epoch, position, committed):
                    replica.sent[peer] = link, position
                    self.wires[replica.id, peer].append(("welcome", link, epoch, position, committed))
                case c.Refuse(peer, link, _):
                    self.wires[replica.id, peer].append(("refused", link))
                case c.Committed(position):
                    self._commit(replica, position)
                case c.StepDown(_):
                    self.counts["stepped_down"] += 1
                    replica.waiting.clear()
                    replica.sent.clear()
                case c.Resign(successor):
                    for peer, (link, _) in replica.sent.items():
                        self.wires[replica.id, peer].append(("resigned", link, successor))
                case c.HangUp(_):
                    pass  # what the old leader has sent may still come

    def _dial(self, replica: SimulatedReplica, link: int, leader: int) -> None:
        self.wires[replica.id, leader].clear()
        self.wires[leader, replica.id].clear()
        other = self.replicas[leader]
        if (replica.id, leader) in self.cut or not other.is_up:
            self._do(replica, replica.core.link_ended(self.now_ms, link, is_refused=not other.is_up))
        else:
            self._do(replica, replica.core.connected(self.now_ms, link))

    def _begin_epoch(self, replica: SimulatedReplica, epoch: int) -> None:
        if epoch in self.begun:
            raise Violation(f"epoch {epoch} is begun by {replica.id}, and was begun by {self.begun[epoch]}")
        self.counts["elections"] += 1
        self.begun[epoch] = replica.id
        replica.waiting.clear()
        replica.sent.clear()
        replica.log.write(replica.log.end, [(epoch, 0)])
        self._check_leader(replica, {value for value, of in self.acknowledged.items() if of < epoch})
        self._do(replica, replica.core.epoch_begun(self.now_ms))

    def _commit(self, replica: SimulatedReplica, position: int) -> None:
        entries = replica.log.entries
        for at in range(len(self.committed), min(position, len(entries))):
            self.committed.append(entries[at])
        if entries[:position] != self.committed[:position]:
            raise Violation(f"replica {replica.id} takes another log up to {position} for committed")
        if replica.core.role is not ReplicaRole.LEADING:
            return
        while replica.waiting and replica.waiting[0][0] < position:
            _, value = replica.waiting.popleft()
            epoch = replica.core.epoch
            self.acknowledged[value] = epoch
            self.counts["acknowledged"] += 1
            self.counts["acknowledged_while_deposed"] += self.key.epoch > epoch
            newest = max(self.begun, default=0)
            if newest > epoch:
                self._check_leader(self.replicas[self.begun[newest]], {value}, newest)

    def _check_leader(self, replica: SimulatedReplica, values: set[int], epoch: int | None = None) -> None:
        if epoch is not None and (replica.core.role is not ReplicaRole.LEADING or replica.core.epoch != epoch):
            return
        lost = values - {value for _, value in replica.log.entries}
        if lost:
            raise Violation(f"{sorted(lost)[:3]} were acknowledged and are not in the log of leader {replica.id}")
