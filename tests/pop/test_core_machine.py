"""POP and a model made of dictionaries come to the same state through crashes. Decisions hold, and no message is lost."""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.pop.core.deliveries import AckOutcome, VisibilityChange
from penstock.pop.core.groups import ResetTo
from penstock.pop.core.suspicion import ALONE, level_of, narrowed, together_max
from penstock.pop.options import PopOptions
from penstock.store.options import KIB, StoreOptions
from penstock.store.queues.lightqueue import ROW_ENTRIES
from penstock.timer.options import TimerOptions
from tests.clock import ManualClock
from tests.depth import DEPTH
from tests.pop.wiring import Parts
from tests.store.wiring import retain, work_on

ATTEMPTS_MAX = 3
BACKOFF_MS = 500
HOUR_MS = 3_600_000
RETENTION_BYTES = 32 * KIB
FILLER = b"x" * 2000

FILTERS = {"billing": "plant/#", "audit": "plant/+/temperature"}
TOPICS = {"plant/1/temperature": ("billing", "audit"), "plant/1/pressure": ("billing",)}


@dataclass
class Delivery:
    """A message in flight; the number, the size and the level of the pop or change that it is out with."""

    position: int
    deadline_ms: int
    number: int
    size: int
    level: int = 0
    returned: bool = False
    suspended: bool = False
    extended: bool = False

    def back_ms(self, failed: int) -> int:
        """Return when the message becomes visible again or a dead letter, if it is known to be at fault.

        This is at once if this was its last attempt.
        """
        is_last = failed + 1 >= ATTEMPTS_MAX
        return self.deadline_ms + (0 if self.suspended or is_last else BACKOFF_MS)


@dataclass
class Model:
    """The state that one group must have."""

    visible: dict[int, int] = field(default_factory=dict)  # failed attempts by position
    new: set[int] = field(default_factory=set)  # positions of visible messages that were never handed out
    levels: dict[int, int] = field(default_factory=dict)  # of the visible messages that have one, by position
    out: dict[str, Delivery] = field(default_factory=dict)  # by handle
    failed: dict[int, int] = field(default_factory=dict)  # failed attempts of messages in flight, by position
    acked: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)
    skipped: set[int] = field(default_factory=set)  # positions that a reset skipped
    forgotten: set[int] = field(default_factory=set)  # positions of dead letters that retention has dropped
    paused: bool = False
    void: list[str] = field(default_factory=list)

    def is_alone_out(self, now_ms: int) -> bool:
        return any(each.level == ALONE and not each.extended and each.deadline_ms > now_ms for each in self.out.values())

    def check_short_pop(self, popped: int, level: int, wanted: int, alone_is_out: bool) -> None:
        """Check that a pop found less than `wanted` because of the levels of what is left, or because nothing is left.

        A retry that may be out only with fewer messages stops those after it. New messages stop only for retries with a level.
        """
        if level:
            wanted = min(wanted, together_max(level))
        if popped >= wanted:
            return
        assert level or not self.new, "no level stops new messages"
        if self.visible.keys() - self.new:
            waits_alone = alone_is_out and ALONE in self.levels.values()
            stopping = waits_alone or any(together_max(level) <= popped for level in self.levels.values())
            assert stopping or (not level and popped and self.levels), "a retry that nothing stops"

    def expire(self, now_ms: int) -> None:
        due = [handle for handle, each in self.out.items() if each.deadline_ms <= now_ms]
        together = Counter(self.out[handle].number for handle in due)
        for handle in due:
            delivery, failed = self.out[handle], self.failed[self.out[handle].position]
            level, count = delivery.level, together[delivery.number]
            is_beside_others = delivery.size == 1 and level > ALONE
            is_counted = delivery.returned or level == ALONE or (count == 1 and not is_beside_others)
            if is_counted and delivery.back_ms(failed) > now_ms:
                continue
            del self.out[handle], self.failed[delivery.position]
            self.void.append(handle)
            failed += is_counted and not delivery.suspended
            if failed >= ATTEMPTS_MAX:
                self.dead.add(delivery.position)
                continue
            self.visible[delivery.position] = failed
            if not is_counted:
                self.levels[delivery.position] = level - 1 if is_beside_others else narrowed(level, count)
            elif level:
                self.levels[delivery.position] = ALONE


groups = st.sampled_from(sorted(FILTERS))
waits_ms = st.sampled_from([0, 1, 400, 1_000, 59_000, 61_000, 200_000])


class PopMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.crashes = self.numbers = 0
        self.published: dict[str, set[int]] = {name: set() for name in FILTERS}
        self.models = {name: Model() for name in FILTERS}
        self.parts = Parts(
            Path(self.directory.name) / "0",
            ManualClock(),
            pop=PopOptions(attempts_max=ATTEMPTS_MAX, retry_backoff_ms=(BACKOFF_MS,)),
            timer=TimerOptions(fire_max=2),
            store=StoreOptions(segment_bytes=16 * KIB, retention_bytes=RETENTION_BYTES),
        )
        self.parts.store.router.route(b"plant/1/temperature")
        for name, topic_filter in FILTERS.items():
            self.parts.group(name, topic_filter)

    def now_ms(self) -> int:
        return self.parts.clock.now_ms()

    def next_number(self) -> int:
        self.numbers += 1
        return self.numbers

    def draw_handle(self, data: st.DataObject, name: str) -> str | None:
        """Return the handle of a delivery whose invisible time is not over."""
        open_handles = self.open_handles(name)
        return data.draw(st.sampled_from(open_handles)) if open_handles else None

    def open_handles(self, name: str) -> list[str]:
        return sorted(handle for handle, each in self.models[name].out.items() if each.deadline_ms > self.now_ms())

    # --- what happens -----------------------------------------------------------------------------------------------

    @rule(topic=st.sampled_from(sorted(TOPICS)), count=st.integers(1, 5))
    def publish(self, topic: str, count: int) -> None:
        for position in self.parts.publish(*([b"x" * 100] * count), topic=topic):
            for name in TOPICS[topic]:
                self.published[name].add(position)
                self.models[name].visible[position] = 0
                self.models[name].new.add(position)

    @rule(name=groups, messages_max=st.integers(1, 6), invisible_ms=st.sampled_from([1, 1_000, 60_000, 150_000]))
    def pop(self, name: str, messages_max: int, invisible_ms: int) -> None:
        self.popped(name, messages_max, invisible_ms)

    def popped(self, name: str, messages_max: int, invisible_ms: int) -> list[str]:
        """Pop, and return the handles."""
        model = self.models[name]
        has_new = self.parts.group(name, FILTERS[name]).visible_new > 0  # retries have half of the room then
        alone_is_out = model.is_alone_out(self.now_ms())
        messages = self.parts.pop(messages_max, invisible_ms, group=name, topic_filter=FILTERS[name])
        assert len(messages) <= (0 if model.paused else min(messages_max, len(model.visible)))
        levels = [model.levels.pop(message.position, 0) for message in messages]
        level, number = min(filter(None, levels), default=0), self.next_number()
        assert not level or len(messages) <= together_max(level)
        assert level != ALONE or not alone_is_out
        for message in messages:
            assert message.position in model.visible, "handed out while it is out, acknowledged, or dead"
            failed = model.visible.pop(message.position)
            model.new.discard(message.position)
            assert message.attempt == failed + 1
            assert message.handle not in model.out
            model.out[message.handle] = Delivery(message.position, self.now_ms() + invisible_ms, number, len(messages), level)
            model.failed[message.position] = failed
        if not model.paused:
            model.check_short_pop(
                len(messages), level, (messages_max + 1) // 2 if level and has_new else messages_max, alone_is_out
            )
        return [message.handle for message in messages]

    @rule(name=groups, data=st.data())
    def ack(self, name: str, data: st.DataObject) -> None:
        handle = self.draw_handle(data, name)
        if handle is not None:
            model = self.models[name]
            assert self.parts.ack(handle, group=name) == [AckOutcome.OK]
            delivery = model.out.pop(handle)
            del model.failed[delivery.position]
            model.acked.add(delivery.position)
            model.void.append(handle)

    @rule(name=groups, wait_ms=waits_ms, suspend=st.booleans(), data=st.data())
    def change(self, name: str, wait_ms: int, suspend: bool, data: st.DataObject) -> None:
        open_handles = self.open_handles(name)
        if open_handles:
            handles = data.draw(st.lists(st.sampled_from(open_handles), min_size=1, max_size=6, unique=True))
            self.change_all(name, handles, wait_ms, suspend=suspend)

    def change_all(self, name: str, handles: list[str], wait_ms: int, *, suspend: bool = False) -> None:
        """Change the invisible time of deliveries in one call. Those of one level are out together then."""
        model = self.models[name]
        outcomes = self.parts.core.deliveries.change_invisible(
            name, [VisibilityChange(handle, wait_ms, suspend) for handle in handles]
        )
        self.parts.store.commit()
        returns = suspend or wait_ms == 0
        levels = [0 if returns else each.level or level_of(each.size) for each in map(model.out.__getitem__, handles)]
        numbers = {level: self.numbers + 1 + at for at, level in enumerate(dict.fromkeys(levels))}
        sizes, deadline_ms = Counter(levels), self.now_ms() + wait_ms
        for level, handle, (outcome, fresh) in zip(levels, handles, outcomes, strict=True):
            assert outcome is AckOutcome.OK
            position = model.out.pop(handle).position
            model.out[fresh] = Delivery(
                position, deadline_ms, numbers[level], sizes[level], level, returns, suspend, not returns
            )
            model.void.append(handle)
        self.numbers += len(numbers)
        self.advance(0)

    @rule(name=groups, data=st.data())
    def dead_letter(self, name: str, data: st.DataObject) -> None:
        handle = self.draw_handle(data, name)
        if handle is not None:
            model = self.models[name]
            assert self.parts.core.deliveries.dead_letter(name, [handle]) == [AckOutcome.OK]
            self.parts.store.commit()
            delivery = model.out.pop(handle)
            del model.failed[delivery.position]
            model.dead.add(delivery.position)
            model.void.append(handle)

    @rule(name=groups, data=st.data())
    def redrive(self, name: str, data: st.DataObject) -> None:
        model = self.models[name]
        chosen = data.draw(st.sets(st.sampled_from(sorted(model.dead)))) if model.dead else set()
        assert self.parts.dead_letters.redrive(name, chosen) == len(chosen)
        self.parts.store.commit()
        assert self.parts.dead_letters.redrive(name, chosen) == 0
        model.dead -= chosen
        model.visible.update(dict.fromkeys(chosen, 0))

    @rule(name=groups, data=st.data())
    def purge(self, name: str, data: st.DataObject) -> None:
        model = self.models[name]
        chosen = data.draw(st.sets(st.sampled_from(sorted(model.dead)))) if model.dead else set()
        assert self.parts.dead_letters.purge(name, chosen) == len(chosen)
        self.parts.store.commit()
        model.dead -= chosen
        model.skipped |= chosen

    @rule(name=groups)
    def reset_to_latest(self, name: str) -> None:
        model = self.models[name]
        self.parts.groups.reset(name, FILTERS[name], ResetTo(end="latest"))
        self.parts.store.commit()
        model.skipped |= model.visible.keys() | {delivery.position for delivery in model.out.values()}
        model.void += model.out
        model.visible.clear()
        model.levels.clear()
        model.new.clear()
        model.out.clear()
        model.failed.clear()

    @rule(name=groups, paused=st.booleans())
    def pause(self, name: str, paused: bool) -> None:
        (self.parts.groups.pause if paused else self.parts.groups.resume)(name)
        self.parts.store.commit()
        self.models[name].paused = paused

    @precondition(lambda self: any(model.void for model in self.models.values()))
    @rule(data=st.data(), name=groups)
    def use_a_void_handle(self, data: st.DataObject, name: str) -> None:
        handle = data.draw(st.sampled_from([handle for model in self.models.values() for handle in model.void]))
        assert self.parts.ack(handle, group=name) != [AckOutcome.OK]
        assert self.parts.change(handle, 1_000, group=name)[0] is not AckOutcome.OK

    @rule(ms=st.sampled_from([0, 1, 10, 500, 999, 1_500, 60_000, 61_000, 200_000]))
    def advance(self, ms: int) -> None:
        self.parts.advance(ms)
        for model in self.models.values():
            model.expire(self.now_ms())

    @rule(fillers=st.integers(0, 40))
    def retain(self, fillers: int) -> None:
        """Publish messages that no group gets, and drop the segments that exceed the bound."""
        for _ in range(fillers):
            self.parts.publish(FILLER, topic="other/1")
            work_on(self.parts.store)
        retain(self.parts.store)
        self.forget_expired()

    def forget_expired(self) -> None:
        """Let the model forget what retention may drop: messages that were never handed out, and old dead letters."""
        is_expired = self.parts.store.is_expired
        for model in self.models.values():
            for position in [position for position in model.new if is_expired(position)]:
                self.skip(model, position)
            for position in [position for position in model.dead if is_expired(position)]:
                model.dead.remove(position)
                model.forgotten.add(position)
            assert not any(map(is_expired, model.visible)), "a message that waits for a retry"
            assert not any(is_expired(delivery.position) for delivery in model.out.values())

    def skip(self, model: Model, position: int) -> None:
        model.new.remove(position)
        del model.visible[position]
        model.skipped.add(position)

    @rule()
    def flush_index(self) -> None:
        self.parts.store.index.flush()

    @rule(keep_index=st.booleans(), unfinished=st.booleans(), outage_ms=st.sampled_from([0, 1_000, HOUR_MS]))
    def crash(self, keep_index: bool, unfinished: bool, outage_ms: int) -> None:
        fits = (
            self.parts.store.log.begin_run(4 * KIB) is not None
        )  # otherwise a new segment begins, and all before it is written
        if unfinished and fits:  # the decision was not written, so nobody was told
            for name, topic_filter in FILTERS.items():
                self.parts.core.popper.pop(self.parts.core.groups.get_or_create(name, topic_filter), 10, 1_000)
                self.parts.core.deliveries.ack(name, list(self.models[name].out))
        self.crashes += 1
        self.parts = self.parts.after_crash(str(self.crashes), keep_index=keep_index)
        self.forget_expired()
        if self.parts.recovery.rebuilt:  # a snapshot has no entries of messages: those carried forward for others are lost
            for model in self.models.values():
                for position in [position for position in model.new if position < self.parts.store.log.start]:
                    self.skip(model, position)
        self.advance(outage_ms)

    # --- what must hold ---------------------------------------------------------------------------------------------

    @invariant()
    def each_message_is_in_one_state(self) -> None:
        for name, model in self.models.items():
            out = [delivery.position for delivery in model.out.values()]
            assert len(out) == len(set(out))
            states = [*out, *model.visible, *model.acked, *model.dead, *model.skipped, *model.forgotten]
            assert sorted(states) == sorted(self.published[name])

    @invariant()
    def the_counts_are_exact(self) -> None:
        for name, model in self.models.items():
            group = self.parts.core.groups.get_or_create(name, FILTERS[name])
            assert group.in_flight == len(model.out)
            trimmable = 2 * ROW_ENTRIES if self.parts.store.log.start else 0  # the first row and the open row
            assert len(model.visible) <= group.count_visible() <= len(model.visible) + trimmable
            assert group.count_visible() <= group.visible
            # After a start the node may know a dropped dead letter again, until retention passes it once more.
            assert len(model.dead) <= group.dead_letter_count <= len(model.dead) + len(model.forgotten)

    def teardown(self) -> None:
        for name, model in self.models.items():
            self.pause(name, False)
            for _ in range(ATTEMPTS_MAX + 1):
                self.advance(HOUR_MS)
                while handles := self.popped(name, 10_000, 1_000):
                    self.change_all(name, handles, 0)
            assert not model.out
            assert not model.visible
            assert model.acked | model.dead | model.skipped | model.forgotten == self.published[name]
        assert self.parts.core.checkpoints_open == 0
        for name, model in self.models.items():
            dead = self.parts.pop(10_000, group="operators", topic_filter=f"$dlq/{name}")
            assert sorted(message.position for message in dead) == sorted(model.dead)
        self.parts.close()
        self.directory.cleanup()


TestPopMachine = PopMachine.TestCase
TestPopMachine.settings = settings(max_examples=5 * DEPTH, stateful_step_count=35)
