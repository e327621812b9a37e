"""What the log says of delayed messages and schedules, record by record, and whether that is what the node has promised.

It takes the durable records in order. So it knows which messages are pending, which schedules there are, and which occurrences
each has sent, without a call of the node's code that decides about them. Occurrences are computed anew, from what the client
has asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.store.bodies import SCHEDULE_MOVED_HEAD, SCHEDULE_PUT_HEAD, TIMER_ENTRY
from penstock.store.properties import decode_properties
from penstock.store.queues.latedispatches import Routing
from penstock.store.record import Flag, Kind, Record
from penstock.timer.schedule import Missed, ScheduleState
from tests.simulation.sent import Sent, Violation

if TYPE_CHECKING:
    from tests.simulation.process import Process

OCCURRENCE: Final = b"s"
"""First byte of the messages of schedules."""

NEVER_MS: Final = 2**62

SLACK_MS: Final = 20
"""How much the time of a record may differ from the time at which the node has decided about it."""

LATE_MS_MAX: Final = 4_000
"""Ms within which an occurrence must be stored when nothing fails: a full disk is noticed within a second, and the timer tries
again after another one."""

_MINUTE_MS: Final = 60_000


@dataclass(slots=True, kw_only=True)
class Plan:
    """A schedule as a client has asked for it.

    Parameters:
        number: names it in the bodies of its messages.
        name, topic, start_ms, end_ms, count, missed, grace_ms: as of `penstock.timer.schedule.ScheduleDefinition`.
        period_ms: from one occurrence to the next.
        is_cron: whether it occurs by the clock, at whole minutes. Otherwise it counts from `start_ms`.
        size: of its messages.
        asked_ms, asked_s: the node's time and the virtual time at which the client has asked.
    """

    number: int
    name: str
    topic: str
    period_ms: int
    is_cron: bool
    start_ms: int
    end_ms: int
    count: int
    missed: Missed
    grace_ms: int
    size: int
    asked_ms: int
    asked_s: float
    runs: int = 0
    """How often the client has asked for a message besides the occurrences."""

    @property
    def cron(self) -> str:
        """Its rule, if it occurs by the clock."""
        minutes = self.period_ms // _MINUTE_MS
        return f"*/{minutes} * * * *" if minutes > 1 else "* * * * *"

    @property
    def template(self) -> bytes:
        """The body that the client gives it."""
        return self._filled("{{occurrence_ms}}", "{{number}}")

    def body(self, occurrence_ms: int, number: int) -> bytes:
        """Return the body of one of its messages."""
        return self._filled(str(occurrence_ms), str(number))

    def _filled(self, occurrence: str, number: str) -> bytes:
        return OCCURRENCE + f"{self.number}:{occurrence}:{number}:".encode() + b"." * self.size

    def first_from(self, ms: int) -> int:
        """Return the first occurrence at `ms` or later."""
        begin = 0 if self.is_cron else self.start_ms
        found = begin - (begin - max(ms, self.start_ms)) // self.period_ms * self.period_ms
        return NEVER_MS if self.end_ms and found > self.end_ms else found

    def last_before(self, ms: int) -> int:
        """Return the last time before `ms` at which it would occur if it had no start."""
        begin, ms = 0 if self.is_cron else self.start_ms, min(ms, self.end_ms + 1) if self.end_ms else ms
        return begin + (ms - 1 - begin) // self.period_ms * self.period_ms

    def __str__(self) -> str:
        return f"schedule {self.number} {self.name}, each {self.period_ms} ms, missed: {self.missed}"


@dataclass(slots=True)
class Followed:
    """A schedule of the log.

    Parameters:
        plan: what the client has asked for.
        from_ms: no occurrence before this may come any more.
        must_ms: each occurrence from here on must come, or be missed.
    """

    plan: Plan
    from_ms: int
    must_ms: int
    is_paused: bool = False
    counted: int = 0
    sent: int = 0
    runs: int = 0

    @property
    def next_ms(self) -> int:
        """The first occurrence that must come, unless it is missed."""
        return NEVER_MS if self._is_complete else self.plan.first_from(self.must_ms)

    @property
    def _is_complete(self) -> bool:
        return bool(self.plan.count) and self.counted >= self.plan.count

    def begin(self, now_ms: int) -> None:
        """Begin with the first occurrence from now on."""
        self.from_ms = max(self.from_ms, now_ms - SLACK_MS)
        self.must_ms = max(self.must_ms, now_ms + SLACK_MS)

    def occurs(self, occurrence: int, now_ms: int) -> None:
        """Check that the message of an occurrence may be stored now, and go on to the next one."""
        plan, missed_before = self.plan, now_ms - self.plan.grace_ms
        what = f"the occurrence {occurrence} of {plan}, stored at {now_ms},"
        if plan.first_from(occurrence) != occurrence:
            raise Violation(f"{what} is none")
        if occurrence > now_ms + SLACK_MS:
            raise Violation(f"{what} is early")
        if occurrence < self.from_ms:
            raise Violation(f"{what} comes again, or is before {self.from_ms}, from which it occurs")
        if self._is_complete:
            raise Violation(f"{what} comes after the last one of {plan.count}")
        is_missed = occurrence < missed_before - SLACK_MS
        may_be_missed = occurrence < missed_before + SLACK_MS
        if self.next_ms < occurrence and not (plan.missed == "latest" and may_be_missed):
            raise Violation(f"{what} comes, and not the one at {self.next_ms}")
        if is_missed and plan.missed == "skip":
            raise Violation(f"{what} was missed")
        if plan.missed == "latest" and plan.first_from(occurrence + 1) < missed_before - SLACK_MS:
            raise Violation(f"{what} was missed, and is not the latest one")
        self.from_ms = self.must_ms = occurrence + 1
        if plan.missed == "once" and may_be_missed:  # it stands for all others that were missed
            self.must_ms = max(self.must_ms, missed_before + SLACK_MS)
            if is_missed:
                self.from_ms = max(self.from_ms, missed_before - SLACK_MS)
        self.counted += 1

    def skip(self, next_ms: int, now_ms: int) -> None:
        """Check that the occurrences before `next_ms` may be passed over."""
        next_ms = next_ms or NEVER_MS
        last = self.plan.last_before(next_ms)
        if self.plan.missed != "skip" or self.must_ms <= last >= now_ms - self.plan.grace_ms + SLACK_MS:
            raise Violation(f"the occurrence {last} of {self.plan} was passed over at {now_ms}")
        self.from_ms = self.must_ms = next_ms


class Pending(NamedTuple):
    """A delayed message that has not fired."""

    message: Sent
    due_ms: int
    key: tuple[bytes, str] | None
    """Its topic and its key, if it has one."""


class Expected(NamedTuple):
    """What must hold for the records before a position."""

    until: int
    breach: Callable[[], str]
    """Returns what does not hold; empty if everything does."""


@dataclass(slots=True)
class TimerModel:
    """The delayed messages and the schedules of a log.

    Parameters:
        named: returns the message that has a body.
    """

    named: Callable[[bytes], Sent]
    is_judging: bool = True
    """Whether it is known what the log has said so far. It is not after damage."""
    plans: dict[int, Plan] = field(default_factory=dict)
    pending: dict[int, Pending] = field(default_factory=dict)
    """By position."""
    keys: dict[tuple[bytes, str], int] = field(default_factory=dict)
    """Position of the pending message of each topic and key."""
    ended: dict[int, str] = field(default_factory=dict)
    """What became of messages that are not pending any more, by position: fired, cancelled or replaced."""
    schedules: dict[str, Followed] = field(default_factory=dict)
    """By name."""
    runs: set[int] = field(default_factory=set)
    """Positions of the messages that schedules have sent besides their occurrences."""
    was_stepped: bool = False
    """Whether the node has stepped its clock, and with it what was due."""
    _ids: dict[int, Followed] = field(default_factory=dict)
    _uncancelled: set[int] = field(default_factory=set)
    """Positions of replaced messages whose cancellation is still to be recorded."""
    _expected: list[Expected] = field(default_factory=list)
    _seen: int = 0

    # --- the log ------------------------------------------------------------------------------------------------------

    def apply(self, record: Record) -> None:
        """Take the next record. Raises Violation."""
        if record.position < self._seen or not self.is_judging:
            return
        if self._expected:
            self.check(record.position)
        self._seen = record.position + record.size
        kind = record.kind
        if kind == Kind.MESSAGE:
            if record.flags & Flag.DELAYED:
                self._delayed(record)
            elif record.flags & Flag.SCHEDULED:
                self._sent(record)
        elif kind == Kind.TIMER_FIRED:
            for position in Routing.from_record(record).entries["position"].tolist():
                self._fired(position, record.store_ms)
        elif kind == Kind.TIMER_CANCELLED:
            for position, _ in TIMER_ENTRY.iter_unpack(record.body):
                self._cancelled(position)
        elif kind == Kind.CLOCK_STEPPED:
            self.was_stepped = True
        elif kind == Kind.SCHEDULE_PUT:
            self._put(record)
        elif kind == Kind.SCHEDULE_MOVED:
            self._moved(record)
        elif kind == Kind.SCHEDULE_DELETED:
            self._end(record.topic.decode())

    def _delayed(self, record: Record) -> None:
        about, message = decode_properties(record.properties), self.named(record.body)
        key = (record.topic, about.timer_key) if about.timer_key else None
        old = self.keys.get(key) if key is not None else None
        if old is not None and old != about.replaces:
            raise Violation(f"{message} has the key of the message at {old}, which is pending, and does not replace it")
        if about.replaces is not None:
            if about.replaces not in self.pending:
                raise Violation(f"{message} replaces the message at {about.replaces}, which is {self.state(about.replaces)}")
            self._uncancelled.add(about.replaces)
        self.pending[record.position] = Pending(message, about.deliver_at_ms, key)
        if about.replaces is not None:
            self._take(about.replaces, "replaced")
        if key is not None:
            self.keys[key] = record.position

    def _fired(self, position: int, now_ms: int) -> None:
        if position not in self.pending:
            raise Violation(f"the delayed message at {position} fires, but it is {self.state(position)}")
        pending = self._take(position, "fired")
        if pending.due_ms > now_ms + SLACK_MS and not self.was_stepped:
            raise Violation(f"{pending.message} is due at {pending.due_ms} and fires at {now_ms}")

    def _cancelled(self, position: int) -> None:
        if position in self._uncancelled:
            self._uncancelled.remove(position)
        elif position in self.pending:
            self._take(position, "cancelled")
        else:
            raise Violation(f"the delayed message at {position} is cancelled, but it is {self.state(position)}")

    def _take(self, position: int, ended: str) -> Pending:
        pending = self.pending.pop(position)
        self.ended[position] = ended
        if pending.key is not None and self.keys.get(pending.key) == position:
            del self.keys[pending.key]
        if ended != "fired" and all(pending.message is not other.message for other in self.pending.values()):
            pending.message.is_cancelled = True
        return pending

    def state(self, position: int) -> str:
        """Return what became of the delayed message at a position."""
        return "pending" if position in self.pending else self.ended.get(position, "unknown")

    def _put(self, record: Record) -> None:
        plan = self._plan_of(record.body[SCHEDULE_PUT_HEAD.size :])
        name = record.topic.decode()
        if plan is None or plan.name != name:
            raise Violation(f"a schedule {name} is stored that nobody has asked for")
        self._end(name)
        followed = Followed(plan, 0, 0)
        followed.begin(record.store_ms)
        self.schedules[name] = self._ids[record.position] = followed

    def _end(self, name: str) -> None:
        followed = self.schedules.pop(name, None)
        if followed is not None:
            self._ids = {number: other for number, other in self._ids.items() if other is not followed}

    def _moved(self, record: Record) -> None:
        (schedule_id,) = SCHEDULE_MOVED_HEAD.unpack_from(record.body)
        state, followed = ScheduleState.from_row(record.body[SCHEDULE_MOVED_HEAD.size :]), self._ids.get(schedule_id)
        if followed is None:
            raise Violation(f"the schedule {record.topic.decode()} is moved, but it was deleted or replaced")
        if state.error:
            raise Violation(f"{followed.plan} could not send: {state.error}")
        if state.is_paused == followed.is_paused:
            followed.skip(state.next_ms, record.store_ms)
        elif not state.is_paused:
            followed.begin(record.store_ms)
        followed.is_paused = state.is_paused

    def _sent(self, record: Record) -> None:
        about = decode_properties(record.properties)
        schedule_id, occurrence, _, counts = about.schedule
        followed = self._ids.get(schedule_id)
        if followed is None:
            raise Violation(f"{self.named(record.body)} was sent by a schedule that was deleted or replaced")
        followed.sent += 1
        if record.body != followed.plan.body(occurrence, followed.sent):
            raise Violation(f"{followed.plan} has sent {record.body!r} as its message {followed.sent} for {occurrence}")
        if counts:
            if followed.is_paused:
                raise Violation(f"{followed.plan} has sent the occurrence {occurrence}, but it is paused")
            followed.occurs(occurrence, record.store_ms)
        else:
            followed.runs += 1
            self.runs.add(record.position)
            if followed.runs > followed.plan.runs:
                raise Violation(
                    f"{followed.plan} was run {followed.runs} times, but the client asked {followed.plan.runs} times"
                )

    # --- messages of schedules ----------------------------------------------------------------------------------------

    def occurrence(self, body: bytes, number: int) -> Sent:
        """Return a new message with the body of an occurrence, or of a run, as message `number` of all. Raises Violation."""
        plan, (_, occurrence, count) = self._plan_of(body), _numbers(body)
        if plan is None or body != plan.body(occurrence, count):
            raise Violation(f"{body[:40]!r} was delivered or stored, but no schedule sends that")
        message = Sent(number, body, plan.topic, 1, 0)
        message.due_ms = occurrence
        message.not_before_s = plan.asked_s + (occurrence - plan.asked_ms) * 0.9 / 1000 - 0.05
        return message

    def _plan_of(self, body: bytes) -> Plan | None:
        number = body[len(OCCURRENCE) :].partition(b":")[0]
        return self.plans.get(int(number)) if number.isdigit() else None

    # --- what clients were told ---------------------------------------------------------------------------------------

    def expect(self, until: int, breach: Callable[[], str]) -> None:
        """Check, when all records before the position `until` are known, that `breach` returns an empty string."""
        if self.is_judging:
            self._expected.append(Expected(until, breach))

    def check(self, until: int) -> None:
        """Check what is expected of the records before `until`. Raises Violation."""
        due = [expected for expected in self._expected if expected.until <= until]
        if due:
            self._expected = [expected for expected in self._expected if expected.until > until]
        for expected in due:
            breach = expected.breach()
            if breach:
                raise Violation(breach)

    def forget_expected(self) -> None:
        """Expect nothing more of records that a crash has lost: nobody was told that they are durable."""
        self._expected.clear()

    def end_judging(self) -> None:
        """Judge nothing any more, because the log is damaged."""
        self.is_judging = False
        self._expected.clear()

    def check_counts(self, process: Process) -> None:
        """Check that the node has what the log says. All of the log must be known. Raises Violation."""
        if not self.is_judging:
            return
        held = (len(process.delayed), len(process.timer_keys), len(process.schedules))
        known = (len(self.pending) + len(self._uncancelled), len(self.keys), len(self.schedules))
        if held != known:
            raise Violation(f"pending, with a key, and schedules are {held}, but the log says {known}")

    def check_cancelled(self) -> None:
        """Check that each replaced message was cancelled, when nothing has failed for some time. Raises Violation."""
        if self.is_judging and self._uncancelled:
            raise Violation(f"the messages at {sorted(self._uncancelled)} were replaced, and are not cancelled")

    def check_due(self, now_ms: int) -> None:
        """Check that no occurrence is missing, when nothing has failed for some time. Raises Violation."""
        for followed in self.schedules.values():
            if self.is_judging and not followed.is_paused and followed.next_ms < now_ms - LATE_MS_MAX:
                raise Violation(f"the occurrence {followed.next_ms} of {followed.plan} has not come by {now_ms}")


def _numbers(body: bytes) -> list[int]:
    """Return the numbers at the beginning of a body of a schedule, and zeros if there are none."""
    parts = body[len(OCCURRENCE) :].split(b":")[:3]
    return [0, *(int(part) for part in parts[1:])] if len(parts) == 3 and all(part.isdigit() for part in parts) else [0, 0, 0]
