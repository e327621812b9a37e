"""One simulated run: a node on a faulty machine, its clients, and what happens to them, all from one seed."""

from __future__ import annotations

import errno
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from penstock.node.config import Config
from penstock.pop.core.handle import SECRET
from penstock.pop.core.settings import ConsumerGroupSettings
from penstock.pop.options import PopOptions
from penstock.store import timekeeping
from penstock.store.errors import DiskFull, IndexDamaged, LogCorrupt
from penstock.store.files import STEP_BYTES, replace_file
from penstock.store.index import index
from penstock.store.log import syncmark
from penstock.store.log.segment import LOG_DIRECTORY, segment_base
from penstock.store.options import DAY_MS, KIB, StoreOptions
from penstock.store.record import Kind
from penstock.store.recovery.indexplan import Fate as IndexFate
from penstock.store.recovery.repair import Damage
from penstock.store.snapshots import snapshotreader
from penstock.timer.options import TimerOptions
from tests.simulation.backups import Backups
from tests.simulation.disk import PAGE_BYTES, SECTOR_BYTES, Disk, Inode, ProcessDead, SimulatedFiles
from tests.simulation.mqttclient import SHARE, MqttClient
from tests.simulation.oracle import Consumer, Oracle
from tests.simulation.orderedmap import Databases
from tests.simulation.popclient import Group, Producer
from tests.simulation.process import DAMAGED, DATA_DIR, FAILED, KILLED, Machine, Process, mqtt_options
from tests.simulation.repairing import repair_data_dir
from tests.simulation.sent import Fate, Sent, Violation
from tests.simulation.timerclient import TimerClient
from tests.simulation.verifying import index_differences
from tests.simulation.virtualtime import Time

TOPICS = ("a/x", "a/y", "b/x", "b/y/z", "c")
FILTERS = ("a/#", "+/x", "b/#", "#", "a/x", "c")

CLOCK_STEPS_S = (-30 * 86_400, -3_600, -60, -3, 3, 60, 3_600, 30 * 86_400)
"""By how many seconds the machine's time of day is set wrong."""

LONG_EVERY = 50
"""Of so many seeds one is long: `LONG` instead of `SHORT`."""

TIMED = 0.12
"""Share of the runs with a client that cancels and replaces delayed messages and has schedules. Such a run takes more time."""

TIMED_TOPICS = TOPICS[::2]

STEADY_S = 6.0
"""Virtual seconds without faults after which each occurrence that was due has come."""

VERIFIED = 0.1
"""Share of the runs at whose end the index is verified. With a backup it is half of them, and the backup is verified too."""

SETTLED_S = 90.0
"""Virtual seconds within which something that is missing must come when nothing fails any more. A message group that is
consumed in order may have a long way to go, one message after another."""

FAULTS = (
    "stop",
    "kill",
    "kill_soon",
    "power",
    "power_soon",
    "power_busy",
    "eio",
    "eio_reboot",
    "full",
    "full_segment",
    "kill_start",
    "backup",
    "clock",
    "sector",
    "rot",
    "index",
)


class BeyondRepair(Exception):
    """Raised when only a backup helps, which ends a run."""


class Length(NamedTuple):
    """How long a run is."""

    steps: tuple[int, ...]
    """How many things happen before the faults end."""
    faults: tuple[int, ...]
    """How many of them are faults."""
    pauses_s: tuple[float, ...]
    """Virtual seconds that pass between two of them."""
    delay_ms_max: int
    """The longest delay and the longest invisible time, in ms: the end of a run waits for them."""


SHORT = Length((6, 10, 16), (1, 1, 2, 3), (0.0, 0.0, 0.001, 0.01, 0.05, 0.3, 0.3, 1.0), 2_000)
LONG = Length((60,), (6, 10, 14), (0.0, 0.0, 0.001, 0.01, 0.05, 0.3, 1.0, 3.0), 8_000)


class World:
    """One run.

    Parameters:
        seed: decides everything.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._length = SHORT if seed % LONG_EVERY else LONG
        self.random = random = Random(seed)
        self.trace: list[str] = []
        self._hash = blake2b(digest_size=8)
        self.time = Time()
        self.disk = Disk(random)
        self.machine = Machine(self.time, self.disk, Databases(), random)
        self._files = SimulatedFiles(self.disk, lambda name: None)
        """For what happens outside of processes."""
        self.oracle = Oracle(lambda: self.time.now_s)
        self._wrong_since_s = 0.0
        """When the time of day was set wrong or right last."""
        self._has_bad_sectors = False
        self._has_lost_snapshots = False
        """Whether the snapshots were damaged. If a power cut leaves the index ahead of the log, nothing replaces it then."""
        self._is_unnoted = False
        """Whether the node failed and could not say so in the sync mark, because the disk failed again or a kill came first."""
        self._is_unrepaired = False
        """Whether a sector was lost after the last repair, so that a queue may lack what it should have."""
        self._relies_on_index = False
        """Whether a repair has kept the index, which knows what damaged records said. One that is built anew would not."""
        self._is_confirmed = False
        """Whether the time of day was wrong for so long that the node may have taken it for right."""
        self.backups = Backups(self.machine, self.oracle, self.note)
        self.starts = 0
        self.faults = 0
        retains = random.random() < 0.4
        segment_bytes = random.choice((4 * KIB, 8 * KIB, 32 * KIB))
        self.config = Config(
            data_dir=DATA_DIR,
            store=StoreOptions(
                segment_bytes=segment_bytes,
                reserve_bytes=random.choice((0, 8 * PAGE_BYTES)),
                retention_bytes=segment_bytes * random.choice((2, 4)) if retains else 0,
                retention_ms=DAY_MS if not retains and random.random() < 0.3 else 0,
                index_flush_ms=random.choice((500, 3_000, 30_000)),
            ),
            pop=PopOptions(attempts_max=random.choice((3, 16)), transaction_check_ms=5_000, transaction_checks_max=3),
            timer=TimerOptions(tick_ms=random.choice((100, 500)), fire_max=random.choice((3, 30))),
            mqtt=mqtt_options(
                session_queued_max=0, inflight_max=random.choice((3, 20)), share_ack_timeout_ms=self._length.delay_ms_max
            ),
        )
        self.publishers = [
            MqttClient(self.oracle, random, f"p{number}", clean=False) for number in range(random.choice((1, 2)))
        ]
        self.subscribers = [self._subscriber(number) for number in range(random.choice((0, 1, 2)))]
        self._share_qos = 0
        """QoS of the shared subscription; 0 if there is none."""
        self.members = self._members()
        self.groups = [self._group(number) for number in range(random.choice((0, 1, 2, 3)))]
        self.producer = Producer(self.oracle, random)
        self.timers = self._timers()
        self._faults = [*FAULTS]
        if self.timers is not None:
            self._faults.append("power_replacing")
        if self._share_qos == 2:
            self._faults += ["power_sharing"] * 2
        self.process: Process | None = None
        self._ends_at_fuse = ""
        self._steady_s = 0.0
        """When the faults have been over for long enough, at the end."""

    def _subscriber(self, number: int) -> MqttClient:
        random = self.random
        first = random.choice(FILTERS)
        subscriptions = [(first, random.choice((1, 2)))]
        if first not in ("#", "+/x") and random.random() < 0.4:
            subscriptions.append(("c" if first != "c" else "b/#", random.choice((1, 2))))
        return MqttClient(self.oracle, random, f"s{number}", clean=False, subscriptions=tuple(subscriptions))

    def _members(self) -> list[MqttClient]:
        """Return the members of a shared subscription, if there is one."""
        random = self.random
        if random.random() < 0.6:
            return []
        topic_filter, consumer = random.choice(FILTERS), Consumer("the shared subscription")
        self._share_qos = random.choice((1, 2, 2))
        subscriptions = ((f"$share/{SHARE}/{topic_filter}", self._share_qos),)
        return [
            MqttClient(self.oracle, random, f"m{number}", clean=False, subscriptions=subscriptions, consumer=consumer)
            for number in range(random.choice((1, 2)))
        ]

    def _group(self, number: int) -> Group:
        random = self.random
        settings = ConsumerGroupSettings(
            fifo=random.random() < 0.4,
            attempts_max=random.choice((None, 2, 4)),
            backoff=random.choice((None, (), (200, 2_000))),
        )
        earliest = random.random() < 0.5
        return Group(self.oracle, random, f"g{number}", random.choice(FILTERS), settings, earliest=earliest)

    def _timers(self) -> TimerClient | None:
        """Return the client with schedules, if there is one. It decides by numbers of its own, so others do what they did."""
        random = Random(f"timers {self.seed}")
        if random.random() >= TIMED:
            return None
        return TimerClient(self.oracle, random, TIMED_TOPICS, self._length.delay_ms_max, lambda: self.time.now_s)

    @property
    def clients(self) -> list[MqttClient]:
        """All MQTT clients."""
        return [*self.publishers, *self.subscribers, *self.members]

    def note(self, text: str) -> None:
        """Add a line to the trace."""
        line = f"{self.time.now_s:9.4f} {text}"
        self._hash.update(line.encode())
        self.trace.append(line)

    @property
    def hash(self) -> str:
        """Hash of everything that has happened, with all that the log said."""
        return self._hash.hexdigest() + self.oracle.hash

    # --- the run ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run to the end. Raises Violation."""
        with suppress(BeyondRepair):
            self._run()

    def _run(self) -> None:
        random = self.random
        self.start_until_it_runs()
        if random.random() < 0.8:
            self._meet()
        steps = random.choice(self._length.steps)
        faults = set(random.sample(range(steps), random.choice(self._length.faults)))
        for number in range(steps):
            self.step(is_fault=number in faults)
        self.settle()

    def _meet(self) -> None:
        """Let all clients connect, subscribe, and create their groups."""
        process = self.process
        assert process is not None
        for client in self.clients:
            client.connect(process)
        for group in self.groups:
            group.create(process)
        self.pass_time(0.1)
        for client in self.clients:
            client.receive(0)
            client.subscribe_next()
        self.pass_time(1.0)

    def step(self, *, is_fault: bool) -> None:
        """Do one thing, and let time pass."""
        random = self.random
        if is_fault:
            self._fault(random.choice(self._faults))
        else:
            for _ in range(random.choice((1, 3))):
                self._act()
        self.pass_time(random.choice(self._length.pauses_s))

    def pass_time(self, seconds: float) -> None:
        """Let the node run, and the clients handle what has come."""
        process = self.process
        if process is None:
            self.time.now_s += seconds
            self.start_until_it_runs()
            return
        is_alive = process.run_until(self.time.now_s + seconds)
        if not is_alive:
            self._ended()
            return
        if process.loop.errors:
            raise Violation(f"a callback has raised, and the node goes on: {process.loop.errors[0]}")
        self._look()
        if self.random.random() < 0.1:
            self.disk.write_back_some()

    def _look(self) -> None:
        process = self.process
        assert process is not None
        store = process.store
        self._scan(process)
        self._check_clock(process)
        for group in self.groups:
            group.consumer.was_set_back |= group.is_set_back(process)
        now_ms = store.now_ms()
        for client in self.clients:
            if self.random.random() < 0.8:
                client.receive(now_ms)
                if self.random.random() < 0.8:
                    client.answer()
        self.note(f"log {store.log.written} durable {store.durable_position} steps {process.steps}")

    def _scan(self, process: Process) -> None:
        with self.disk.all_readable():
            self.oracle.scan(process.store, process.store.durable_position)

    # --- what clients do ----------------------------------------------------------------------------------------------

    def _act(self) -> None:
        process, random = self.process, self.random
        if process is None:
            return
        for client in self.clients:
            if client.transport is None and random.random() < 0.7:
                client.connect(process)
            elif client.is_accepted and random.random() < 0.3:
                client.subscribe_next()
        if self.timers is not None:
            self.note(self.timers.act(process))
        what = random.random()
        if what < 0.35:
            self._publish(random.choice(self.publishers))
        elif what < 0.55:
            self._send(process)
        elif what < 0.60:
            self.producer.decide(process)
        elif what < 0.63:
            random.choice(self.clients).disconnect()
        elif self.groups:
            self._consume(process, random.choice(self.groups))

    def _publish(self, client: MqttClient) -> None:
        random, oracle = self.random, self.oracle
        if not client.is_accepted or len(client.unacked) > 6:
            return
        for _ in range(random.choice((1, 1, 5))):
            message = oracle.new(random.choice(TOPICS), random.choice((0, 1, 1, 2, 2)), random.choice((10, 60, 300)))
            message.is_retained = random.random() < 0.2
            if not client.publish(message):
                del oracle.sent[message.number]
                return
        self.note(f"{client.name} publishes up to {len(oracle.sent)}")

    def _publish_to_all(self, process: Process) -> None:
        """Let all publishers send while all clients are there."""
        for client in self.clients:
            if client.transport is None:
                client.connect(process)
        self.pass_time(0.1)
        for client in self.publishers:
            self._publish(client)
        if self.timers is not None and self.process is not None:
            self.note(self.timers.send(self.process))

    def _send(self, process: Process) -> None:
        random, oracle = self.random, self.oracle
        messages: list[Sent] = []
        for _ in range(random.choice((1, 1, 4))):
            message = oracle.new(random.choice(TOPICS), 1, random.choice((10, 60, 300)))
            kind = random.random()
            if kind < 0.2:
                delay_ms = random.choice((1, 500, self._length.delay_ms_max))
                message.due_ms = process.store.now_ms() + delay_ms
                message.not_before_s = self.time.now_s + delay_ms * 0.9 / 1000 - 0.05  # the node's clock may run a tenth faster
            elif kind < 0.35:
                message.fate = Fate.OPEN
            elif kind < 0.6:
                message.key = random.choice("kl")
            messages.append(message)
        self.note(f"sends {len(messages)} up to {messages[-1].number}")
        self.producer.send(process, messages)

    def _consume(self, process: Process, group: Group) -> None:
        random = self.random
        if not group.is_created:
            if not group.calls:
                group.create(process)
            return
        what = random.random()
        if what < 0.5:
            acks = bool(group.held) and random.random() < 0.3
            group.pop(
                process,
                random.choice((1, 3, 30)),
                random.choice((300, self._length.delay_ms_max)),
                wait_ms=random.choice((0, 0, 2_000)),
                acks=acks,
            )
        elif what < 0.8:
            group.ack(process, random.choice((1, 3, 30)))
        elif what < 0.9:
            group.change(process, random.choice((0, 0, 200, self._length.delay_ms_max)))
        elif what < 0.94:
            group.dead_letter(process)
        elif what < 0.97:
            group.forget()

    # --- what happens to the machine ----------------------------------------------------------------------------------

    def _fault(self, what: str) -> None:
        process, random = self.process, self.random
        if process is None:
            return
        self.faults += 1
        self.note(f"fault: {what}")
        if what == "stop":
            self._stop(process)
        elif what == "kill":
            process.status = KILLED
            self._ended()
        elif what in ("kill_soon", "power_soon"):
            process.fuse = random.choice((0, 1, 2, 5, 20, 50))
            self._ends_at_fuse = what
        elif what == "power":
            process.status = KILLED
            self._ends_at_fuse = "power_soon"
            self._ended()
        elif what == "power_replacing":
            self._cut_power_while_replacing(process)
        elif what == "power_sharing":
            self._cut_power_while_sharing(process)
        elif what == "power_busy":
            self._publish_to_all(process)
            process.fuse = random.choice((3, 6, 10, 15, 20, 30))
            self._ends_at_fuse = "power_soon"
        elif what == "full_segment":
            self._fill_segment(process)
        elif what in ("eio", "eio_reboot"):
            self.disk.failing_write_backs = 1
            self._ends_at_fuse = what
            if random.random() < 0.5:
                self._begin_segment(process)
        elif what == "full":
            self.disk.capacity_pages = self.disk.used_pages() + random.choice((0, 1, 4, 12))
            if random.random() < 0.5:
                process.fuse = random.choice((20, 50, 100, 200))
                self._ends_at_fuse = "power_soon"
        elif what == "sector":
            self._lose_sector()
        elif what == "rot":
            self._rot(process)
        elif what == "index":
            process.db_flush_error = "Corruption: block checksum mismatch"
        elif what == "clock":
            self._set_clock(random.choice(CLOCK_STEPS_S))
        elif what == "backup":
            self._back_up(process)
        elif what == "kill_start":
            self._kill(process)
            self.start_until_it_runs(fuse=random.choice((0, 3, 8, 15, 25, 40, 60)))

    def _cut_power_while_replacing(self, process: Process) -> None:
        """Cut the power when delayed messages were just replaced, so that the log may end between the records of one step."""
        assert self.timers is not None
        process.trigger.kind = Kind.TIMER_CANCELLED
        self._ends_at_fuse = "power_tears"
        self.note(self.timers.replace(process))

    def _cut_power_while_sharing(self, process: Process) -> None:
        """Cut the power when a member of a shared subscription has just got what was acknowledged while it was away."""
        for member in self.members:
            member.disconnect()
        for publisher in self.publishers:
            if publisher.transport is None:
                publisher.connect(process)
        for _ in range(self.random.choice((2, 6))):  # the more messages, the longer are the records of their deliveries
            self.pass_time(0.2)
            for publisher in self.publishers:
                self._publish(publisher)
        self.pass_time(1.0)
        if process is self.process:
            process.trigger.kind = Kind.POP_INVISIBLE_CHANGED  # by which a delivery at QoS 2 stays with its member
            self._ends_at_fuse = "power_tears"
            for member in self.members:
                member.connect(process)

    def _begin_segment(self, process: Process) -> None:
        """Publish until the log begins a segment, which may be before the node has heard of a sync that failed."""
        self._publish_to_all(process)
        log, base = process.store.log, process.store.log.open_segment.base
        client, size = self.publishers[0], process.store.options.segment_bytes // 4
        for _ in range(6):
            self.pass_time(0.0005)
            if process is not self.process or log.open_segment.base != base or not client.is_accepted:
                break
            client.publish(self.oracle.new(TOPICS[0], 0, size))

    def _fill_segment(self, process: Process) -> None:
        """Let the log come to the end of its segment on a disk without room for the next one.

        A session that ends frees space, so the node stores that in the segment that was to be full. Then the power fails.
        """
        random, store = self.random, process.store
        guests = [MqttClient(self.oracle, random, "guest", clean=clean) for clean in (False, True)]
        guests[0].connect(process)
        self.pass_time(0.1)
        self.disk.capacity_pages = self.disk.used_pages() + 1  # so that the file of the next segment can be created
        for _ in range(20):
            if process is not self.process or store.space.level:
                break
            self._publish_to_all(process)
        if process is self.process:
            guests[1].connect(process)
            self.pass_time(random.choice((0.1, 1.0)))
        if process is self.process:
            process.fuse = random.choice((0, 0, 5, 20))
            self._ends_at_fuse = "power_soon"

    def _lose_sector(self) -> None:
        """Make a sector of a file of the node unreadable. Of the index nothing, because RocksDB is not simulated."""
        paths = [DATA_DIR / name for name in (SECRET, syncmark.FILE, timekeeping.FILE)]
        paths += self._paths(LOG_DIRECTORY) * 6 + self._paths(snapshotreader.DIRECTORY) * 3
        self._lose_sector_of(self.random.choice([path for path in paths if self.disk.is_file(path)]))

    def _rot(self, process: Process) -> None:
        """Let the log and maybe all snapshots get unreadable sectors, and maybe damage the index. The operator repairs that."""
        random = self.random
        self._stop(process, start=False) if random.random() < 0.5 else self._kill(process)
        self.disk.failing_write_backs, self.disk.capacity_pages = 0, None  # what follows is not done by a process
        for path in random.sample(self._paths(LOG_DIRECTORY), 1) * random.choice((0, 1, 1, 3)):
            self._lose_sector_of(path)
        if random.random() < 0.7:  # so that nothing but the index tells what was before the log begins
            for path in self._paths(snapshotreader.DIRECTORY):
                replace_file(self._files, path, b"not a snapshot any more, since its blocks are gone")
                self._has_lost_snapshots = True
            self.note("all snapshots are damaged")
        if random.random() < 0.3:
            replace_file(self._files, DATA_DIR / index.DAMAGED, b"a block is damaged\n")
            self.note("the index is damaged")
        if not self._repair():
            raise BeyondRepair
        self.start_until_it_runs()

    def _paths(self, folder: str) -> list[Path]:
        return [DATA_DIR / folder / name for name in self._files.names(DATA_DIR / folder)]

    def _lose_sector_of(self, path: Path) -> None:
        sector = self.disk.lose_sector(path)
        if sector is None:
            return
        self.note(f"sector {sector} of {path} can't be read")
        self._has_bad_sectors = self._is_unrepaired = True
        if path.parent.name == LOG_DIRECTORY:
            offset = sector * SECTOR_BYTES // STEP_BYTES * STEP_BYTES  # the store reads no less around it
            self.oracle.exempt(segment_base(path) + offset, segment_base(path) + offset + STEP_BYTES)

    def _repair(self) -> bool:
        """Repair the data directory; return False if only a backup helps."""
        oracle, random = self.oracle, self.random

        had_whole_state = not oracle.was_repaired
        damaged_until = 0

        def on_damage(damages: list[Damage]) -> None:
            nonlocal damaged_until
            damaged_until = max([damaged_until, *(damage.position + damage.length for damage in damages)])
            for damage in damages if self._has_bad_sectors else ():  # a failed sync alone has damaged nothing acknowledged
                oracle.exempt(damage.position, damage.position + damage.length)

        oracle.begin_repair()
        while True:
            try:
                planned = repair_data_dir(self.machine, on_damage, random.choice((None, None, 5, 15, 30, 60)))
            except ProcessDead:
                self.note("the repair was killed")
                self.machine.databases.crash(random)
                if random.random() < 0.5:
                    self._cut_power()
            except (OSError, DiskFull) as error:
                self.note(f"the repair failed: {error}")
                self.disk.capacity_pages = None
            except LogCorrupt as error:
                self.note(f"the log can't be repaired: {error}")
                return False
            else:
                self._is_unrepaired = False
                self.note(f"repaired: {planned}")
                if (
                    had_whole_state
                    and planned.fate in (IndexFate.KEPT, IndexFate.ADJUSTED)
                    and damaged_until <= planned.covered
                ):
                    oracle.was_repaired = False  # the index has everything that damaged records said
                    self._relies_on_index = True
                return True

    def _set_clock(self, ahead_s: int) -> None:
        """Set the time of day wrong, or right again."""
        self.time.wall_ahead_ms = 0 if self.time.wall_ahead_ms else ahead_s * 1000
        self.note(f"the time of day is {self.time.wall_ahead_ms} ms ahead")
        self._wrong_since_s = self.time.now_s

    def _check_clock(self, process: Process) -> None:
        """Note when the node may take a wrong time of day for right, and check that nothing expires before."""
        time, store = self.time, process.store
        if time.wall_ahead_ms and time.now_s - self._wrong_since_s >= self.config.clock.confirm_ms / 1000 - 5:
            self._is_confirmed = True
            self.oracle.is_time_known = False
        is_checked = self.config.store.retention_ms and not (self._is_confirmed or self.oracle.was_repaired)
        if is_checked and store.retention.expires_before:
            raise Violation(f"messages before {store.retention.expires_before} have expired, which are not a day old")

    def _back_up(self, process: Process) -> None:
        """Make a backup, while the node goes on and may end."""
        random = self.random

        def go_on() -> None:
            if random.random() < 0.3:
                self._act()
                self.pass_time(random.choice((0.0, 0.01, 0.3)))

        if random.random() < 0.3:
            process.fuse = random.choice((5, 20, 50, 100))
            self._ends_at_fuse = random.choice(("kill_soon", "power_soon"))
        self.backups.make(process, go_on, random.choice((None, None, 3, 10, 20, 40)))
        if process is self.process and process.status is not None:
            self._ended()

    def _stop(self, process: Process, *, start: bool = True) -> None:
        def done(_: Any, error: Exception | None) -> None:
            if isinstance(error, OSError):
                process.status, process.why = FAILED, str(error)
            elif isinstance(error, IndexDamaged):
                process.status, process.why = DAMAGED, str(error)
            elif error is not None:
                raise Violation(f"the stop of the node has raised {error!r}")

        process.call(process.stop(), done)
        process.run_until(self.time.now_s + 30.0)
        if process.status is None:
            raise Violation("the node did not stop in 30 s")
        self._ended(start=start)

    def _kill(self, process: Process) -> None:
        process.status = KILLED
        self._ended(start=False)

    def _cut_power(self, kept: float | None = None) -> None:
        self.disk.cut_power(kept)
        self._booted()

    def _shut_down(self) -> None:
        self.disk.shut_down()
        self._booted()

    def _booted(self) -> None:
        self.time.booted_s = self.time.now_s
        if self.time.wall_ahead_ms:  # only the time of day tells a node how long the machine was off
            self.oracle.is_time_known = False

    def _ended(self, *, start: bool = True) -> None:
        """The process has ended: its clients notice, and it is started again."""
        process, random = self.process, self.random
        assert process is not None
        self.note(f"ended with status {process.status} {process.why}, at step {process.steps}")
        how, self._ends_at_fuse = self._ends_at_fuse, ""
        for client in self.clients:
            client.cut_off(hears=random.random() < 0.5)
        for group in self.groups:
            group.cut_off()
        if self.timers is not None:
            self.timers.cut_off()
        self.process = None
        if process.status != 0:
            self.machine.databases.crash(random)
        if how in ("power_soon", "power_tears") and process.status in (KILLED, FAILED):
            self._cut_power(0.5 if how == "power_tears" else None)
        elif process.status == FAILED:
            if how == "eio_reboot" and random.random() < 0.3:
                self._cut_power()
            elif random.random() < 0.3:
                self.disk.drop_clean_pages()
        elif process.status == 0 and random.random() < 0.3:
            self._shut_down()
        elif random.random() < 0.15:
            self._cut_power()
        if process.status == FAILED:  # the kernel may have shown a mark that is not on disk
            self._is_unnoted = not self._says_that_it_failed()
        if random.random() < 0.7:
            self.disk.capacity_pages = None
        self.time.now_s += random.choice((0.0, 0.1, 5.0, 60.0))
        if start:
            self.start_until_it_runs()

    def _says_that_it_failed(self) -> bool:
        """Return whether the next start learns from the sync mark that pages may be missing."""
        mark = syncmark.SyncMark(DATA_DIR, files=SimulatedFiles(self.disk, lambda name: None)).read()
        return mark is not None and mark.ending is syncmark.Ending.FAILED

    def start_until_it_runs(self, fuse: int | None = None) -> None:
        """Start the node; again where it was killed or the disk was full."""
        for _ in range(6):
            self.starts += 1
            try:
                process = Process(self.machine, self.config, fuse)
            except ProcessDead:
                self.note("killed while it started")
                self.machine.databases.crash(self.random)
                if self.random.random() < 0.5:
                    self._cut_power()
                fuse = None
                continue
            except LogCorrupt as error:
                if not (self._has_bad_sectors or self._has_lost_snapshots or self._is_unnoted):
                    raise Violation(f"the node refuses to start: {error}") from error
                self.note(f"refuses to start: {error}")
                self.machine.databases.crash(self.random)
                if not self._repair():
                    raise BeyondRepair from error
                continue
            except (OSError, DiskFull) as error:
                self.note(f"does not start: {error}")
                if isinstance(error, OSError) and error.errno == errno.EIO and self._has_bad_sectors and not self._repair():
                    raise BeyondRepair from error
                self.machine.databases.crash(self.random)
                self.disk.capacity_pages = None
                continue
            process.fuse = None
            self.process = process
            self._steady_s = self.time.now_s + STEADY_S
            self._is_unnoted = False
            self.oracle.was_repaired |= self._relies_on_index and process.recovery.rebuilt
            with self.disk.all_readable():
                self.oracle.check_recovered(process.store)
            self.oracle.timers.check_counts(process)
            self.note(f"started: {process.recovery}")
            process.before_unlink = partial(self._scan, process)
            process.start()
            self.pass_time(0.0)
            return
        raise Violation("the node does not start")

    # --- the end ------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """End the faults, let clients take everything, and check that all of it came."""
        self.disk.capacity_pages = None
        self.disk.failing_write_backs = 0
        self._ends_at_fuse = ""
        process = self.process
        if process is not None:
            process.fuse = process.trigger.kind = None
            process.db_flush_error = ""
        else:
            self.start_until_it_runs()
        self.note("settles")
        least_s = self.time.now_s + self.random.choice((0.0, 0.0, 0.0, self._length.delay_ms_max / 1000 + 4))
        self._steady_s = self.time.now_s + STEADY_S
        until_s, seconds, came = self.time.now_s + SETTLED_S, 0.1, self._number_that_came()
        while self.time.now_s < until_s and not self.oracle.was_repaired:
            self._drain()
            if self.timers is not None and (self.time.now_s >= self._steady_s or not self.timers.stays):
                self._finish(self.timers)
            self.pass_time(seconds)
            if self.time.now_s >= least_s and self._is_idle() and not self._is_any_missing():
                break
            if self._number_that_came() > came:
                until_s, came = self.time.now_s + SETTLED_S, self._number_that_came()
            seconds = min(seconds * 1.5, 2.0)
        self._check_end()

    def _finish(self, timers: TimerClient) -> None:
        """Let the schedules end. Before that, everything that was due must have come."""
        process = self.process
        assert process is not None
        if self.time.now_s >= self._steady_s and self.oracle.is_time_known:
            self.oracle.timers.check_due(process.store.now_ms())
        timers.finish(process)

    def _is_any_missing(self) -> bool:
        process = self.process
        assert process is not None
        self._collect_dead_letters(process)
        return any(self.oracle.missing(consumer) for consumer in self._consumers())

    def _number_that_came(self) -> int:
        """Return how many messages have come to consumers, each counted once for each consumer."""
        return sum(len(consumer.delivered) for consumer in self._consumers())

    def _consumers(self) -> list[Consumer]:
        return [*(each.consumer for each in [*self.subscribers, *self.members]), *(each.consumer for each in self.groups)]

    def _is_idle(self) -> bool:
        process = self.process
        assert process is not None
        is_idle = not process.calls and not any(group.held for group in self.groups)
        is_idle = is_idle and process.store.durable_position == process.store.log.end
        is_idle = is_idle and (self.timers is None or self.timers.is_finished)
        return is_idle and all(client.is_idle for client in self.clients)

    def _drain(self) -> None:
        process = self.process
        assert process is not None
        now_ms = process.store.now_ms()
        for client in self.clients:
            if client.transport is None:
                client.connect(process)
            client.receive(now_ms)
            client.answer()
            client.subscribe_next()
        for group in self.groups:
            if not group.is_created:
                if not group.calls:
                    group.create(process)
            elif not group.calls:
                group.pop(process, 30, 30_000, acks=True)  # it is acknowledged with the next call
        self.producer.decide(process)

    def _check_end(self) -> None:
        process = self.process
        assert process is not None
        for client in self.clients:
            if not client.is_idle and not self.oracle.was_repaired:
                raise Violation(
                    f"{client.name} waits in vain for an answer about {[str(each) for each, _ in client.unacked.values()]}"
                )
        self._collect_dead_letters(process)
        store = process.store
        process.run_until(self.time.now_s + 0.1)
        self._scan(process)
        if store.durable_position == store.log.end:
            self.oracle.timers.check_counts(process)
            self.oracle.timers.check_cancelled()
        for consumer in self._consumers():
            self.oracle.check_all_delivered(consumer)
        if self.oracle.retained and not (self._has_bad_sectors or self.oracle.was_repaired):
            self._check_retained(process)
        is_verified = self.random.random() < (0.5 if self.backups.are_begun else VERIFIED)
        if is_verified or self.random.random() < 0.5:
            self._stop(process, start=not is_verified and self.random.random() < 0.5)
        if is_verified and not self._is_unrepaired:
            try:
                self._verify()
            except LogCorrupt as error:
                if not self._has_lost_snapshots:
                    raise
                self.note(f"no other index can be built: {error}")
        self.note(f"end of the log {store.log.end}")

    def _verify(self) -> None:
        # A backfill may have left out what can't be read, and the copy that is compared can be read whole.
        if not self._has_unreadable_log():
            differences = index_differences(self.machine, self.config, DATA_DIR)
            if differences:
                raise Violation(f"in the index, {differences[0]}")
        self.backups.check(self.config)

    def _has_unreadable_log(self) -> bool:
        """Return whether a sector of the log can't be read, and nobody has repaired the log or written to the sector since."""
        files = self.disk.directory(DATA_DIR / LOG_DIRECTORY).names.values()
        return any(isinstance(file, Inode) and bool(file.bad_sectors) for file in files)

    def _collect_dead_letters(self, process: Process) -> None:
        for name, consumer in [(SHARE, each.consumer) for each in self.members] + [
            (each.name, each.consumer) for each in self.groups
        ]:
            queue = process.store.queues.find(f"$dlq/{name}")
            if queue is None:
                continue
            _, entries = queue.read_from(0, 1_000_000)
            for at in range(0, len(entries), 16):
                position = int.from_bytes(entries[at : at + 8], "little")
                for message in self.oracle.sent.values():
                    if position in message.positions:
                        consumer.dead.add(message.number)

    def _check_retained(self, process: Process) -> None:
        reader = MqttClient(self.oracle, self.random, "reader", clean=True, subscriptions=(("#", 0),))
        reader.consumer = Consumer("reader")
        reader.connect(process)
        for _ in range(6):
            process.run_until(self.time.now_s + 0.2)
            reader.receive(process.store.now_ms())
            reader.subscribe_next()
        wanted = {topic: self.oracle.sent[number].body for topic, (_, number) in self.oracle.retained.items()}
        if reader.retained != wanted:
            raise Violation(f"the retained messages are {reader.retained}, but the log says {wanted}")
        reader.disconnect()
        process.run_until(self.time.now_s + 0.2)
