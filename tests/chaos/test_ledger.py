"""The ledger of the chaos tests notices each rule that a node may break."""

from __future__ import annotations

import pytest

from tests.chaos.ledger import Consumed, Key, Ledger, Received, body_of, key_of

pytestmark = pytest.mark.nightly

LATER_MS = 2**62


def everything(topic: str) -> bool:
    return True


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


def publish(ledger: Ledger, number: int, qos: int = 1, *, acked: bool = True, **terms: object) -> Key:
    key = Key("w", number)
    ledger.sending(key, "t/1", qos, **terms)  # type: ignore[arg-type]
    if acked:
        ledger.acked(key)
    return key


def deliver(ledger: Ledger, who: Received, key: Key, qos: int = 1, *, dup: bool = False) -> None:
    ledger.delivered(who, "t/1", body_of(key, 40), qos, dup=dup)


def pop(ledger: Ledger, who: Consumed, key: Key, attempt: int = 1, *, position: int = 0, now_ms: int = LATER_MS) -> None:
    ledger.popped(who, "t/1", body_of(key, 40), f"{position or key.number:016x}", attempt, now_ms=now_ms)


def audit(ledger: Ledger, *keys: Key) -> None:
    found = [(f"{at:016x}", "t/1", body_of(key, 40)) for at, key in enumerate(keys)]
    ledger.audited(found, ledger.expected(everything, now_ms=LATER_MS))


def kinds(ledger: Ledger) -> list[str]:
    return [problem.kind for problem in ledger.problems]


@pytest.mark.parametrize("size", [0, 20, 300])
def test_a_body_names_its_publication_and_no_damaged_body_does(size: int) -> None:
    body = body_of(Key("w", 7), size)
    assert key_of(body) == Key("w", 7)
    assert key_of(body[:-1] + bytes((body[-1] ^ 1,))) is None
    assert key_of(b"") is None


def test_a_round_in_which_all_is_well_has_no_problem(ledger: Ledger) -> None:
    subscriber, group = ledger.subscriber("s", everything), ledger.group("g", everything)
    keys = [publish(ledger, number) for number in range(3)]
    for key in keys:
        deliver(ledger, subscriber, key)
        pop(ledger, group, key)
        ledger.asking(group, f"{key.number:016x}", 1)
        ledger.settled(group, f"{key.number:016x}", 1)
    audit(ledger, *keys)
    ledger.judge(now_ms=LATER_MS)
    assert ledger.problems == []
    assert ledger.repeats() == 0


def test_an_acknowledged_message_that_is_missing_is_lost_and_another_is_not(ledger: Ledger) -> None:
    publish(ledger, 0)
    publish(ledger, 1, acked=False)
    audit(ledger)
    assert kinds(ledger) == ["lost"]
    assert "w-0" in ledger.problems[0].what


def test_a_message_that_reported_damage_has_destroyed_is_not_missed(ledger: Ledger) -> None:
    ledger.excused.add(publish(ledger, 0))
    audit(ledger)
    assert ledger.problems == []


def test_only_what_was_before_the_beginning_of_the_log_may_be_missing(ledger: Ledger) -> None:
    subscriber = ledger.subscriber("s", everything)
    first, second, third = (publish(ledger, number) for number in range(3))
    ledger.log_start = 1
    ledger.audited([("0" * 15 + "1", "t/1", body_of(second, 40))], [first, second])
    assert ledger.problems == []
    deliver(ledger, subscriber, third)
    ledger.judge(now_ms=LATER_MS)
    assert kinds(ledger) == ["lost"]
    assert "1 acknowledged messages are missing in s: w-1" in ledger.problems[0].what


def test_a_subscriber_and_a_group_that_miss_a_message_are_named(ledger: Ledger) -> None:
    ledger.subscriber("s", everything)
    ledger.group("g", everything)
    audit(ledger, publish(ledger, 0))
    ledger.judge(now_ms=LATER_MS)
    assert kinds(ledger) == ["lost", "lost"]


def test_a_message_that_a_group_got_and_nobody_could_settle_is_noticed(ledger: Ledger) -> None:
    group = ledger.group("g", everything)
    pop(ledger, group, publish(ledger, 0))
    ledger.judge(now_ms=LATER_MS)
    assert kinds(ledger) == ["unsettled"]


def test_a_refused_acknowledgement_says_nothing_of_another_attempt(ledger: Ledger) -> None:
    group = ledger.group("g", everything)
    key = publish(ledger, 0)
    for attempt in (1, 2):
        pop(ledger, group, key, attempt)
        ledger.asking(group, f"{0:016x}", attempt)
    ledger.refused(group, f"{0:016x}", 1)
    assert ledger.unsettled(group, now_ms=LATER_MS) == []
    ledger.refused(group, f"{0:016x}", 2)
    assert ledger.unsettled(group, now_ms=LATER_MS) == [key]


def test_qos_2_comes_once_and_is_in_the_log_once(ledger: Ledger) -> None:
    subscriber = ledger.subscriber("s", everything)
    key = publish(ledger, 0, 2)
    ledger.sending_again(key)
    deliver(ledger, subscriber, key, 2)
    deliver(ledger, subscriber, key, 2, dup=True)
    audit(ledger, key, key)
    assert kinds(ledger) == ["twice", "twice"]


def test_qos_1_is_in_the_log_as_often_as_it_was_sent(ledger: Ledger) -> None:
    key = publish(ledger, 0)
    ledger.sending_again(key)
    audit(ledger, key, key)
    assert ledger.problems == []
    audit(ledger, key, key, key)
    assert kinds(ledger) == ["twice"]


def test_deliveries_that_come_again_are_counted_and_those_without_dup_apart(ledger: Ledger) -> None:
    subscriber = ledger.subscriber("s", everything)
    key = publish(ledger, 0)
    for dup in (False, True, False):
        deliver(ledger, subscriber, key, dup=dup)
    assert (ledger.repeats(), ledger.unmarked_repeats()) == (2, 1)


def test_what_comes_again_to_a_session_has_dup(ledger: Ledger) -> None:
    subscriber = ledger.subscriber("s", everything)
    shared = ledger.subscriber("shared", everything, is_ordered=False)
    key = publish(ledger, 0)
    audit(ledger, key)
    for dup in (False, True):
        deliver(ledger, subscriber, key, dup=dup)
        deliver(ledger, shared, key)
    ledger.judge(now_ms=LATER_MS)
    assert ledger.problems == []
    deliver(ledger, subscriber, key)
    ledger.judge(now_ms=LATER_MS)
    assert kinds(ledger) == ["unmarked"]


def test_a_copy_of_the_log_may_have_what_was_withheld_later(ledger: Ledger) -> None:
    before, later = publish(ledger, 0, withheld=True), publish(ledger, 1, withheld=None)
    withheld = ledger.withheld()
    assert withheld == {before}
    ledger.publications[later].withheld = True
    found = [(f"{at:016x}", "t/1", body_of(key, 40)) for at, key in enumerate((before, later))]
    ledger.audited(found, [], withheld)
    assert kinds(ledger) == ["returned"]


def test_first_deliveries_are_in_order_and_repetitions_need_not_be(ledger: Ledger) -> None:
    subscriber = ledger.subscriber("s", everything)
    first, second, third = (publish(ledger, number) for number in range(3))
    for key in (first, third, first, second):
        deliver(ledger, subscriber, key)
    assert kinds(ledger) == ["order"]


def test_a_later_copy_may_be_the_first_that_retention_has_left(ledger: Ledger) -> None:
    subscriber = ledger.subscriber("s", everything)
    keys = [publish(ledger, number) for number in range(2)]
    for key in keys:
        ledger.sending_again(key)
    ledger.has_retention = True
    for key in reversed(keys):
        deliver(ledger, subscriber, key)
    audit(ledger, *reversed(keys))
    assert ledger.problems == []


def test_an_acknowledged_delivery_does_not_return(ledger: Ledger) -> None:
    group = ledger.group("g", everything)
    key = publish(ledger, 0)
    pop(ledger, group, key, 1)
    pop(ledger, group, key, 2)
    ledger.settled(group, f"{0:016x}", 2)
    pop(ledger, group, key, 1)  # an answer that was under way
    assert ledger.problems == []
    pop(ledger, group, key, 3)
    assert kinds(ledger) == ["returned"]


def test_in_fifo_order_a_message_waits_for_the_acknowledgement_of_the_one_before(ledger: Ledger) -> None:
    group = ledger.group("g", everything, is_fifo=True)
    first, second = publish(ledger, 0), publish(ledger, 1)
    pop(ledger, group, first)
    pop(ledger, group, second)
    assert kinds(ledger) == ["order"]
    ledger.asking(group, f"{0:016x}", 1)
    pop(ledger, group, second)
    assert kinds(ledger) == ["order"]


def test_retention_may_drop_what_a_fifo_group_never_got_and_nothing_else(ledger: Ledger) -> None:
    ledger.has_retention = True
    group = ledger.group("g", everything, is_fifo=True)
    _, second, third = (publish(ledger, number) for number in range(3))
    pop(ledger, group, second)
    assert ledger.problems == []
    pop(ledger, group, third)
    assert kinds(ledger) == ["order"]


def test_what_is_withheld_reaches_nobody_and_what_is_open_may(ledger: Ledger) -> None:
    group = ledger.group("g", everything)
    rolled_back, open_one = publish(ledger, 0, withheld=True), publish(ledger, 1, withheld=None)
    pop(ledger, group, open_one)
    assert ledger.expected(everything, now_ms=LATER_MS) == []
    pop(ledger, group, rolled_back)
    assert kinds(ledger) == ["returned"]


def test_a_delayed_message_is_not_early_and_not_expected_before_it_is_due(ledger: Ledger) -> None:
    group = ledger.group("g", everything)
    key = publish(ledger, 0, due_ms=1_000)
    assert ledger.expected(everything, now_ms=999) == []
    pop(ledger, group, key, now_ms=1_000)
    assert ledger.problems == []
    pop(ledger, group, key, now_ms=999)
    assert kinds(ledger) == ["early"]


def test_a_message_that_nobody_sent_and_one_on_another_topic_are_alien(ledger: Ledger) -> None:
    subscriber = ledger.subscriber("s", everything)
    key = publish(ledger, 0)
    ledger.delivered(subscriber, "t/2", body_of(key, 40), 1, dup=False)
    ledger.delivered(subscriber, "t/1", b"anything", 1, dup=False)
    assert kinds(ledger) == ["alien", "alien"]
