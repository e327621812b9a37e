"""A wrong time of day: the node's time goes on, retention waits, and only what is confirmed counts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from penstock.store.clock import MS_NS
from penstock.store.errors import ClockDiffers
from penstock.store.files import Usage
from penstock.store.options import DAY_MS, HOUR_MS, KIB, MINUTE_MS, SECOND_MS, ClockOptions, StoreOptions
from penstock.store.record import Kind
from penstock.store.store import Store
from penstock.store.timekeeping import FILE, SLEW_MS_MAX, Timekeeping
from tests.clock import START_MS, Machine
from tests.store.wiring import close, crash, publish, retain, work_on

CONFIRM_MS = 10 * MINUTE_MS
GAP_MS_MAX = DAY_MS


def opened(machine: Machine, data_dir: Path, **options: Any) -> Store:
    data_dir.mkdir(exist_ok=True)
    given = StoreOptions(**{"segment_bytes": KIB, "retention_ms": HOUR_MS, "sync_in": "thread", **options})
    store = Store(data_dir, given, machine.clock(), clock_options=ClockOptions(CONFIRM_MS, GAP_MS_MAX))
    store.recover()
    return store


def ended(store: Store) -> None:
    """Stop a store as `Store.close` does on a loop."""
    store.timekeeping.close()
    close(store)


def elapse(machine: Machine, store: Store, ms: int) -> None:
    """Let time pass, with a check each second, as housekeeping does."""
    seconds, rest = divmod(ms, SECOND_MS)
    for each in (*(SECOND_MS for _ in range(seconds)), rest):
        machine.elapse(each)
        store.timekeeping.check()
        store.commit()


def confirmed(store: Store) -> bool:
    return store.timekeeping.is_confirmed


def slowed(store: Store) -> bool:
    return store.timekeeping.is_slowed


def publish_segment(store: Store) -> int:
    """Fill more than a segment, and let it have its snapshot. Return the position of the first message."""
    published = [publish(store, "plant/1", "." * 96) for _ in range(10)]
    work_on(store)
    store.commit()
    return published[0]


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def store(tmp_path: Path, machine: Machine) -> Iterator[Store]:
    store = opened(machine, tmp_path / "data")
    yield store
    close(store)


# --- a small difference ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ms", [3, 400, 5_000, -3, -400, -5_000])
def test_a_small_difference_is_slewed_and_time_never_stands_still(store: Store, machine: Machine, ms: int) -> None:
    machine.set_wall(ms)
    store.timekeeping.check()
    shown = [store.now_ms()]
    for _ in range(60):
        machine.elapse(SECOND_MS)
        store.timekeeping.check()
        shown.append(store.now_ms())
    assert all(900 <= later - earlier <= 1_100 for earlier, later in pairwise(shown))
    assert abs(store.timekeeping.offset_ms) <= 2
    assert store.timekeeping.jumps == 0


# --- a jump that does not last --------------------------------------------------------------------------------------


def test_thirty_days_forward_for_five_seconds_change_nothing(store: Store, machine: Machine) -> None:
    publish_segment(store)
    publish_segment(store)
    machine.set_wall(30 * DAY_MS)
    store.timekeeping.check()
    assert store.timekeeping.offset_ms == 30 * DAY_MS
    for _ in range(5):
        elapse(machine, store, SECOND_MS)
        retain(store)
        assert not confirmed(store)
    machine.set_wall(-30 * DAY_MS)
    elapse(machine, store, SECOND_MS)
    retain(store)
    assert confirmed(store)
    assert store.log.start == 0
    assert store.now_ms() == START_MS + 6 * SECOND_MS
    elapse(machine, store, 20 * SECOND_MS)
    assert store.now_ms() == START_MS + 26 * SECOND_MS
    assert store.timekeeping.jumps == 1
    assert store.timekeeping.steps == 0


def test_retention_by_size_goes_on_while_a_jump_is_unconfirmed(tmp_path: Path, machine: Machine) -> None:
    store = opened(machine, tmp_path / "data", retention_bytes=4 * KIB)
    machine.set_wall(30 * DAY_MS)
    elapse(machine, store, SECOND_MS)
    for _ in range(8):
        publish_segment(store)
    retain(store)
    assert not confirmed(store)
    assert store.log.start > 0
    close(store)


def test_an_hour_back_does_not_stop_the_time(store: Store, machine: Machine) -> None:
    machine.set_wall(-HOUR_MS)
    elapse(machine, store, 10 * SECOND_MS)
    assert store.now_ms() == START_MS + 10 * SECOND_MS
    publish(store, "plant/1")
    assert store.timekeeping.offset_ms == -HOUR_MS
    assert not confirmed(store)


def test_the_log_tells_about_a_jump_and_its_end(store: Store, machine: Machine) -> None:
    with capture_logs() as lines:
        machine.set_wall(HOUR_MS)
        store.timekeeping.check()
        elapse(machine, store, 2 * SECOND_MS)
        machine.set_wall(-HOUR_MS)
        elapse(machine, store, SECOND_MS)
    assert [(line["event"], line["ahead_s"]) for line in lines] == [("clock.jump", 3600.0), ("clock.jump_ended", 0.0)]
    assert lines[0]["confirmed_in_s"] == CONFIRM_MS // SECOND_MS
    assert "penstock clock accept" in lines[0]["what"]
    assert lines[1]["lasted_s"] == 3.0


def test_a_time_of_day_that_keeps_jumping_is_never_confirmed(store: Store, machine: Machine) -> None:
    for _ in range(5):
        machine.set_wall(HOUR_MS)
        elapse(machine, store, CONFIRM_MS - 2 * SECOND_MS)
    assert not confirmed(store)
    assert store.timekeeping.jumps == 5
    assert store.now_ms() == START_MS + 5 * (CONFIRM_MS - 2 * SECOND_MS)


# --- a jump that lasts ----------------------------------------------------------------------------------------------


def test_a_forward_jump_that_lasts_is_stepped(store: Store, machine: Machine) -> None:
    machine.set_wall(30 * DAY_MS)
    elapse(machine, store, CONFIRM_MS)
    assert store.now_ms() == START_MS + CONFIRM_MS
    elapse(machine, store, SECOND_MS)
    assert confirmed(store)
    assert store.timekeeping.steps == 1
    assert store.now_ms() == START_MS + CONFIRM_MS + SECOND_MS + 30 * DAY_MS
    assert [record.kind for record in store.log.scan(store.log.start)] == [Kind.CLOCK_STEPPED]


def test_messages_of_the_unconfirmed_window_survive_the_step_for_their_whole_retention(store: Store, machine: Machine) -> None:
    publish_segment(store)
    publish_segment(store)
    elapse(machine, store, 5 * SECOND_MS)
    machine.set_wall(30 * DAY_MS)
    elapse(machine, store, 5 * SECOND_MS)
    in_window = publish_segment(store)
    publish_segment(store)
    publish_segment(store)
    elapse(machine, store, CONFIRM_MS)
    publish_segment(store)
    publish_segment(store)
    retain(store)
    assert 0 < store.log.start <= in_window, "what was stored before the jump is thirty days old, and nothing else is"
    start = store.log.start
    machine.elapse(HOUR_MS - CONFIRM_MS - MINUTE_MS)
    store.timekeeping.check()
    retain(store)
    assert store.log.start == start
    machine.elapse(2 * MINUTE_MS)
    retain(store)
    assert store.log.start > in_window


def test_a_backward_jump_that_lasts_is_approached_by_running_slower(store: Store, machine: Machine) -> None:
    machine.set_wall(-HOUR_MS)
    elapse(machine, store, CONFIRM_MS + SECOND_MS)
    assert confirmed(store)
    assert slowed(store)
    before_ms = store.now_ms()
    elapse(machine, store, HOUR_MS)
    assert store.now_ms() - before_ms == HOUR_MS * 9 // 10
    machine.elapse(9 * HOUR_MS)
    store.timekeeping.check()
    elapse(machine, store, MINUTE_MS)
    assert not slowed(store)
    assert abs(store.timekeeping.offset_ms) <= 2
    assert store.timekeeping.jumps == 1


def test_a_step_waits_for_room_on_the_disk(store: Store, machine: Machine) -> None:
    machine.set_wall(DAY_MS)
    elapse(machine, store, SECOND_MS)
    store.space.probe = lambda: Usage(0, 1_000_000)
    store.space.measure()
    elapse(machine, store, CONFIRM_MS)
    assert not confirmed(store)
    with pytest.raises(ClockDiffers, match="too full"):
        store.timekeeping.accept(store.timekeeping.offset_ms)
    store.space.probe = lambda: Usage(10**12, 10**12)
    store.space.measure()
    elapse(machine, store, SECOND_MS)
    assert confirmed(store)


# --- an operator ----------------------------------------------------------------------------------------------------


def test_an_operator_confirms_a_jump_at_once(store: Store, machine: Machine) -> None:
    machine.set_wall(DAY_MS)
    elapse(machine, store, SECOND_MS)
    store.timekeeping.accept(DAY_MS)
    store.commit()
    assert store.now_ms() == START_MS + SECOND_MS + DAY_MS
    assert confirmed(store)


def test_an_operator_confirms_only_the_jump_that_was_shown(store: Store, machine: Machine) -> None:
    with pytest.raises(ClockDiffers, match="nothing to accept"):
        store.timekeeping.accept(0)
    machine.set_wall(DAY_MS)
    elapse(machine, store, SECOND_MS)
    with pytest.raises(ClockDiffers, match=r"86,400.0 s ahead of the node's time, but 3,600.0 s behind it"):
        store.timekeeping.accept(-HOUR_MS)
    assert store.now_ms() == START_MS + SECOND_MS


# --- restarts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_restart_on_the_same_boot_goes_on_with_the_same_time(tmp_path: Path, machine: Machine, is_killed: bool) -> None:
    store = opened(machine, tmp_path / "data")
    publish(store, "plant/1")
    store.commit()
    machine.set_wall(30 * DAY_MS)
    elapse(machine, store, 5 * SECOND_MS)
    left = tmp_path / "data"
    if is_killed:
        left = tmp_path / "left"
        crash(store, left)
    else:
        ended(store)
    machine.elapse(MINUTE_MS)
    store = opened(machine, left)
    assert store.now_ms() == START_MS + 5 * SECOND_MS + MINUTE_MS
    assert not confirmed(store)
    machine.set_wall(-30 * DAY_MS)
    elapse(machine, store, SECOND_MS)
    assert confirmed(store)
    assert store.now_ms() == START_MS + 6 * SECOND_MS + MINUTE_MS
    close(store)


def test_a_jump_is_confirmed_after_its_whole_time_also_across_a_restart(tmp_path: Path, machine: Machine) -> None:
    store = opened(machine, tmp_path / "data")
    machine.set_wall(DAY_MS)
    elapse(machine, store, CONFIRM_MS - MINUTE_MS)
    ended(store)
    store = opened(machine, tmp_path / "data")
    elapse(machine, store, MINUTE_MS)
    assert not confirmed(store)
    elapse(machine, store, SECOND_MS)
    assert confirmed(store)
    close(store)


def test_a_start_writes_nothing_until_the_store_runs(tmp_path: Path, machine: Machine) -> None:
    store = opened(machine, tmp_path / "data")
    machine.set_wall(DAY_MS)
    elapse(machine, store, SECOND_MS)
    ended(store)
    noted = (tmp_path / "data" / FILE).read_bytes()
    machine.elapse(CONFIRM_MS)
    store = opened(machine, tmp_path / "data")
    store.commit()
    assert store.log.end == 0
    assert not confirmed(store)
    store.timekeeping.abandon()
    assert (tmp_path / "data" / FILE).read_bytes() == noted
    store.timekeeping.check()
    store.commit()
    assert store.log.end > 0
    assert confirmed(store)
    close(store)


def test_a_restart_goes_on_approaching_a_confirmed_backward_jump(tmp_path: Path, machine: Machine) -> None:
    store = opened(machine, tmp_path / "data")
    machine.set_wall(-HOUR_MS)
    elapse(machine, store, CONFIRM_MS + SECOND_MS)
    ended(store)
    store = opened(machine, tmp_path / "data")
    assert slowed(store)
    before_ms = store.now_ms()
    elapse(machine, store, 10 * SECOND_MS)
    assert store.now_ms() - before_ms == 9 * SECOND_MS
    assert store.timekeeping.jumps == 0
    close(store)


def test_a_start_after_a_boot_takes_the_time_of_day(tmp_path: Path, machine: Machine) -> None:
    store = opened(machine, tmp_path / "data")
    publish(store, "plant/1")
    ended(store)
    machine.reboot(3 * HOUR_MS)
    store = opened(machine, tmp_path / "data")
    assert store.now_ms() == START_MS + 3 * HOUR_MS
    assert confirmed(store)
    close(store)


def test_a_start_with_the_time_of_day_before_the_log_goes_on_from_the_log(tmp_path: Path, machine: Machine) -> None:
    store = opened(machine, tmp_path / "data")
    publish(store, "plant/1")
    ended(store)
    machine.reboot()
    machine.set_wall(-2 * HOUR_MS)
    with capture_logs() as lines:
        store = opened(machine, tmp_path / "data")
    assert "clock.behind_log" in [line["event"] for line in lines]
    assert not confirmed(store)
    began_ms = store.now_ms()
    assert began_ms == START_MS + 1
    elapse(machine, store, MINUTE_MS)
    assert store.now_ms() == began_ms + MINUTE_MS
    close(store)


@pytest.mark.parametrize("lasts", [True, False])
def test_a_start_long_after_the_log_waits_for_a_confirmation(tmp_path: Path, machine: Machine, lasts: bool) -> None:
    store = opened(machine, tmp_path / "data")
    publish_segment(store)
    publish_segment(store)
    ended(store)
    machine.reboot()
    machine.set_wall(30 * DAY_MS)
    with capture_logs() as lines:
        store = opened(machine, tmp_path / "data")
    assert "clock.ahead_of_log" in [line["event"] for line in lines]
    began_ms = store.now_ms()
    elapse(machine, store, 5 * SECOND_MS)
    retain(store)
    assert store.log.start == 0
    if lasts:
        elapse(machine, store, CONFIRM_MS)
        assert store.now_ms() == START_MS + MINUTE_MS + 30 * DAY_MS + 5 * SECOND_MS + CONFIRM_MS
        retain(store)
        assert store.log.start > 0
    else:
        machine.set_wall(-30 * DAY_MS)
        elapse(machine, store, 5 * SECOND_MS)
        assert not confirmed(store), "the boot took a minute, which is more than may be slewed"
        assert store.now_ms() == began_ms + 10 * SECOND_MS
        elapse(machine, store, CONFIRM_MS)
        assert abs(store.timekeeping.offset_ms) <= 2
        retain(store)
        assert store.log.start == 0
    close(store)


def test_what_was_stored_before_a_boot_in_the_window_of_a_jump_is_in_the_window_after_it(
    tmp_path: Path, machine: Machine
) -> None:
    store = opened(machine, tmp_path / "data")
    publish(store, "plant/1")
    store.commit()
    elapse(machine, store, SECOND_MS)
    machine.set_wall(30 * DAY_MS)
    elapse(machine, store, SECOND_MS)
    stored_ms = store.now_ms()
    publish(store, "plant/1")
    ended(store)
    machine.reboot()
    store = opened(machine, tmp_path / "data")
    elapse(machine, store, CONFIRM_MS + SECOND_MS)
    assert store.timekeeping.steps == 1
    assert store.now_for(stored_ms) - stored_ms < HOUR_MS
    assert store.now_for(START_MS) - START_MS > 30 * DAY_MS
    close(store)


def test_an_idle_node_has_no_gap_after_a_boot(tmp_path: Path, machine: Machine) -> None:
    store = opened(machine, tmp_path / "data")
    publish(store, "plant/1")
    store.commit()
    machine.elapse(5 * DAY_MS)
    store.timekeeping.check()
    left = tmp_path / "left"
    crash(store, left)
    machine.reboot()
    store = opened(machine, left)
    assert confirmed(store)
    assert store.now_ms() == START_MS + 5 * DAY_MS + MINUTE_MS
    close(store)


@pytest.mark.parametrize("damage", [b"", b"\0" * 88, b"x" * 88])
def test_a_damaged_file_counts_as_none(tmp_path: Path, machine: Machine, damage: bytes) -> None:
    store = opened(machine, tmp_path / "data")
    publish(store, "plant/1")
    ended(store)
    (tmp_path / "data" / FILE).write_bytes(damage)
    machine.elapse(HOUR_MS)
    store = opened(machine, tmp_path / "data")
    assert store.now_ms() == START_MS + HOUR_MS
    close(store)


def test_steps_are_known_after_a_restart_and_after_a_replay(tmp_path: Path, machine: Machine) -> None:
    store = opened(machine, tmp_path / "data")
    machine.set_wall(DAY_MS)
    elapse(machine, store, CONFIRM_MS + SECOND_MS)
    steps = list(store.steps.known)
    left = tmp_path / "left"
    crash(store, left)
    for _ in range(2):
        store = opened(machine, left)
        assert list(store.steps.known) == steps
        ended(store)
    assert [(step.begin_ms, step.end_ms, step.step_ms) for step in steps] == [
        (START_MS, START_MS + CONFIRM_MS + SECOND_MS, DAY_MS)
    ]


# --- any sequence ---------------------------------------------------------------------------------------------------

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("elapse"), st.integers(0, 20 * MINUTE_MS)),
        st.tuples(st.just("elapse"), st.integers(0, 2 * SECOND_MS)),
        st.tuples(st.just("wall"), st.integers(-40 * DAY_MS, 40 * DAY_MS)),
        st.tuples(st.just("wall"), st.integers(-2 * SLEW_MS_MAX, 2 * SLEW_MS_MAX)),
        st.tuples(st.just("undo"), st.just(0)),
        st.tuples(st.just("accept"), st.just(0)),
        st.tuples(st.just("restart"), st.integers(0, DAY_MS)),
    ),
    max_size=25,
)


@given(events=EVENTS)
def test_time_advances_by_nine_to_eleven_tenths_of_what_elapses_except_at_a_confirmed_step(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[str, int]]
) -> None:
    machine = Machine()
    data_dir = tmp_path_factory.mktemp("clock")
    stepped: list[int] = []

    def start(last_ms: int) -> tuple[Any, Timekeeping]:
        clock = machine.clock()
        keeping = Timekeeping(clock, data_dir, ClockOptions(CONFIRM_MS, GAP_MS_MAX), lambda: 0, record)
        keeping.begin(last_ms)
        return clock, keeping

    def record(begin_ms: int, _: int, step_ms: int) -> bool:
        assert begin_ms <= clock.now_ms()
        assert step_ms > SLEW_MS_MAX
        stepped.append(step_ms)
        return True

    clock, keeping = start(START_MS)
    sets: list[int] = []
    for event, value in events:
        stepped.clear()
        before_ns, boot_ns = clock.read().now_ns, machine.boot_ns
        if event == "elapse":
            machine.elapse(value)
        elif event == "wall":
            machine.set_wall(value)
            sets.append(value)
        elif event == "undo" and sets:
            machine.set_wall(-sets.pop())
        elif event == "accept" and not keeping.is_confirmed:
            keeping.accept(keeping.offset_ms)
        elif event == "restart":
            keeping.close()
            machine.elapse(value)
            clock, keeping = start(before_ns // MS_NS)
        keeping.check()
        elapsed = machine.boot_ns - boot_ns
        advanced = clock.read().now_ns - before_ns - sum(stepped) * MS_NS
        assert 0.9 * elapsed - MS_NS <= advanced <= 1.1 * elapsed + MS_NS, (event, value)
        assert clock.read().now_ns >= before_ns
