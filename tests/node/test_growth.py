"""Under retention nothing in the index grows for ever: each key space stays as large as what is alive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import orjson
import pytest

from penstock.gateway.delivery.retained_messages import RetainedMessages
from penstock.gateway.sessions.changes import Changes
from penstock.gateway.sessions.inflight import Slot
from penstock.gateway.sessions.stored_sessions import StoredSessions
from penstock.pop.core import transactions
from penstock.pop.core.settings import ConsumerGroupSettings
from penstock.pop.options import PopOptions
from penstock.store.index.index import KeySpace
from penstock.store.options import KIB, SECOND_MS, StoreOptions
from penstock.store.properties import Properties, encode_properties
from penstock.store.record import HEADER_BYTES, Flag, Kind
from penstock.timer.schedule import ScheduleDefinition
from tests.pop.wiring import Parts
from tests.store.wiring import retain, work_on

RETENTION_MS = 60 * SECOND_MS
STEPS_PER_RETENTION = 12
RETENTIONS = 24
DAY_MS = 86_400_000
PAGE = Path(__file__).parents[2] / "docs/internals/store.md"


class Life:
    """A node's parts without a network, and a little of everything that clients do with them.

    Parameters:
        data_dir: of the store.
    """

    def __init__(self, data_dir: Path) -> None:
        self.random = Random(17)
        self.numbers = 0
        self.parts = Parts(
            data_dir,
            pop=PopOptions(
                attempts_max=2, transaction_check_ms=DAY_MS, deduplication_topic_ids_max=30, deduplication_ids_max=30
            ),
            store=StoreOptions(segment_bytes=32 * KIB, retention_ms=RETENTION_MS),
            more=lambda store: (RetainedMessages(store.now_of, store.ledger), StoredSessions(store.queues, store.ledger)),
        )
        self.store = self.parts.store
        self.parts.create("billing", "plant/#")
        self.parts.create("ledger", "plant/+/due", fifo=True)
        self.publish("plant/for/ever", flags=Flag.RETAIN)
        self.delay(1000 * DAY_MS)
        self.store.queues.attach("plant/+/kept", "connection:1")
        self.seen: set[str] = set()
        """Key spaces that had a row at any time."""

    def publish(self, topic: str, *, flags: int = 0, body: bytes = b"x" * 60, properties: Properties | None = None) -> int:
        encoded = encode_properties(properties) if properties else b""
        return self.store.append_message(self.store.router.route(topic.encode()), body, encoded, flags)

    def delay(self, ms: int, *, flags: int = 0, key: str = "") -> None:
        about = Properties(deliver_at_ms=self.parts.clock.now_ms() + ms, timer_key=key)
        self.publish("plant/1/due", flags=Flag.DELAYED | flags, properties=about)

    def record(self, kind: Kind, client: str, row: dict[str, object] | None, body: bytes = b"") -> int:
        return self.store.append(kind, topic=client.encode(), properties=orjson.dumps(row) if row else b"", body=body)

    def step(self) -> None:
        """Let a twelfth of the retention pass, in which everything happens a few times."""
        self.numbers += 1
        self.publish_some()
        self.store.commit()
        self.serve_sessions()
        self.settle_some()
        self.count_rows()  # before the work of others removes what is there for a moment only
        self.parts.advance(RETENTION_MS // STEPS_PER_RETENTION)
        retain(self.store)

    def publish_some(self) -> None:
        draw, number = self.random, self.numbers
        for _ in range(60):
            self.publish(f"plant/{draw.randrange(10)}/{draw.choice(('due', 'kept', 'gone'))}")
            work_on(self.store)
        self.publish(f"plant/{number % 7}/state", flags=Flag.RETAIN)
        self.publish(f"plant/{draw.randrange(7)}/state", flags=Flag.RETAIN, body=b"")
        soon_ms = self.parts.clock.now_ms() + RETENTION_MS
        self.publish(f"plant/{number}/once", flags=Flag.RETAIN, properties=Properties(expires_at_ms=soon_ms))
        for _ in range(3):
            self.delay(draw.randrange(3 * RETENTION_MS))
        self.delay(draw.randrange(3 * RETENTION_MS), flags=Flag.RETAIN)
        self.delay(draw.randrange(3 * RETENTION_MS), key=f"order-{number}")
        self.schedule()
        half = self.publish("plant/1/paid", flags=1 | Flag.HALF, properties=Properties(producer="orders"))
        other = self.publish("plant/1/paid", flags=1 | Flag.HALF, properties=Properties(producer="orders"))
        self.store.commit()
        self.count_rows()
        self.parts.transactions.end(half, commit=True)
        self.parts.transactions.end(other, commit=False)
        for _ in range(3):
            sent_id = Properties(deduplication_id=f"{draw.randrange(10**9)}")
            self.publish("plant/1/gone", flags=1 | Flag.IDENTIFIED, properties=sent_id)
        queue = self.store.queues.attach(f"plant/+/{number}", "connection:2")
        self.publish(f"plant/1/{number}")
        self.store.commit()
        self.store.queues.detach(queue, "connection:2")

    def schedule(self) -> None:
        """Create a schedule that sends for ever, and delete the one before the last."""
        schedules = self.parts.schedules
        schedules.put(ScheduleDefinition(name=f"nightly-{self.numbers}", topic="plant/1/due", body=b"x", every_ms=RETENTION_MS))
        ending = schedules.get(f"nightly-{self.numbers - 2}")
        if ending is not None:
            schedules.delete(ending)

    def serve_sessions(self) -> None:
        """Begin a session with a subscription of its own and a delivery under way, and end the one before the last."""
        store, client = self.store, f"device-{self.numbers}"
        self.record(Kind.SESSION_OPENED, client, {"expiry_s": 60})
        topic_filter = f"plant/{self.numbers}/+"
        subscribed: dict[str, object] = {"filter": topic_filter, "number": 0, "options": 1, "identifier": 0, "cursor": 0}
        self.record(Kind.SESSION_SUBSCRIBED, client, subscribed | {"queue": store.queues.prepare(topic_filter)})
        body, properties = self.changes()
        store.append(Kind.SESSION_OFFSETS, topic=client.encode(), body=body, properties=properties)
        draining: dict[str, object] = {"filter": topic_filter, "stop": 1, "cuts": []}
        self.record(Kind.SESSION_UNSUBSCRIBED, client, draining)
        self.record(Kind.SESSION_CLOSED, client, {"ends_ms": self.parts.clock.now_ms() + RETENTION_MS, "will_due_ms": 0})
        store.commit()
        self.count_rows()
        if self.numbers > 2:
            self.record(Kind.SESSION_CLOSED, f"device-{self.numbers - 2}", {"ended": True})
            store.commit()

    def changes(self) -> tuple[bytes, bytes]:
        position = self.publish(f"plant/{self.numbers}/own")
        size = self.store.log.end - position
        self.store.commit()
        return Changes(1, [], [], [], [], [(1, Slot(0, 1, position, size, 0))], {}).encode()

    def settle_some(self) -> None:
        """Consume most messages, fail some, and create a group that is deleted again."""
        parts, draw = self.parts, self.random
        done = []
        while messages := parts.pop(1000, 5_000):  # what came back together is handed out in small pops
            for message in messages:
                drawn = draw.random()
                if drawn < 0.9:
                    done.append(message.handle)
                elif drawn < 0.95:
                    parts.core.deliveries.dead_letter("billing", [message.handle])
        parts.ack(*done)
        while messages := parts.pop(100, 5_000, group="ledger", topic_filter="plant/+/due"):
            parts.ack(*(message.handle for message in messages if draw.random() < 0.98), group="ledger")
        letters = parts.dead_letters.list("billing")
        parts.dead_letters.redrive("billing", {letter.position for letter in letters[:2]})
        name = f"group-{self.numbers}"
        parts.groups.create(name, f"plant/{self.numbers}/#", "earliest", ConsumerGroupSettings())
        self.store.commit()
        self.count_rows()
        parts.settle_queues()
        parts.pop(group=name, topic_filter=f"plant/{self.numbers}/#")
        parts.groups.delete(name)
        self.store.commit()

    def count_rows(self) -> Counter[str]:
        """Return the number of rows by key space."""
        names = {bytes(space): space.name for space in KeySpace}
        counts = Counter(names[key[:1]] for key, _ in self.store.index.rows(b""))
        self.seen |= counts.keys()
        return counts


@pytest.fixture
def life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Life]:
    monkeypatch.setattr(transactions, "ENDED_REMEMBERED", 30)
    made = Life(tmp_path / "data")
    yield made
    made.parts.close()


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_no_key_space_grows_however_many_retentions_pass(life: Life) -> None:
    counts: list[Counter[str]] = []
    for _ in range(RETENTIONS):
        for _ in range(STEPS_PER_RETENTION):
            life.step()
        counts.append(life.count_rows())
    assert life.store.retention.dropped_segments > RETENTIONS
    for space in KeySpace:
        early = max(each[space.name] for each in counts[3 : RETENTIONS // 2])
        late = max(each[space.name] for each in counts[RETENTIONS // 2 :])
        # One message that waits for its next attempt parks those of its topic, so at most ends of a retention few are parked.
        spread = 40 if space is KeySpace.ORDER else 8
        assert late <= early * 1.5 + spread, (space.name, [each[space.name] for each in counts])
    assert life.seen == {space.name for space in KeySpace}, "each key space was in use"
    assert len(life.parts.delayed) > 0
    sizes = sum(len(value) + HEADER_BYTES for _, value in life.store.index.rows(bytes(KeySpace.ENTRIES)))
    assert sizes < 200 * KIB


def test_the_manual_says_of_each_key_space_what_bounds_it() -> None:
    rows = [line.split("|")[1].strip() for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert {f"`{space.decode()}`" for space in KeySpace} <= set(rows)
