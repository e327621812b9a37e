"""Compares stored sessions with a model of dicts, while they change and the node is killed, cut, trimmed and reopened."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import orjson
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from penstock.gateway.sessions.acked import AckedColumns
from penstock.gateway.sessions.changes import Changes
from penstock.gateway.sessions.inflight import Slot
from penstock.gateway.sessions.rows import all_sessions
from penstock.gateway.sessions.stored_session import StoredSession
from penstock.gateway.sessions.stored_sessions import OWNER, StoredSessions
from penstock.gateway.sessions.unrecorded import Advance
from penstock.store.options import StoreOptions
from penstock.store.properties import Properties, encode_properties
from penstock.store.record import Flag, Kind
from penstock.store.store import Store
from tests.clock import ManualClock
from tests.depth import DEPTH
from tests.store.cutting import cut_log
from tests.store.wiring import close, crash, retain, work_on

SEGMENT_BYTES = 600
RETENTION_BYTES = 3000

clients = st.sampled_from(["pump", "pump/7", "ö"])
filters = st.sampled_from(["plant/+", "plant/#", "office"])


@dataclass
class Modelled:
    """A session, as the events so far describe it."""

    connected: bool = True
    expiry_s: int = 0
    ends_ms: int = 0
    will: tuple[int, int, int] | None = None
    last_packet_id: int = 0
    received: dict[int, int] = field(default_factory=dict)
    inflight: list[tuple[int, int | None]] = field(default_factory=list)
    """Position of the message by packet id; None if its PUBREC has come."""
    subscriptions: dict[str, list[Any]] = field(default_factory=dict)
    """By filter: number, options, identifier, cursor, retained before, retained after."""
    subscribed: int = 0
    draining: dict[int, list[Any]] = field(default_factory=dict)
    """By number: filter, cursor, stop, cuts."""
    window: int = 0
    recorded_at: int = 0
    maybe_sent: dict[int, int] = field(default_factory=dict)
    """By number of a subscription."""

    @property
    def due_ms(self) -> int:
        return min(self.ends_ms, self.will[1]) if self.will is not None else self.ends_ms

    @property
    def positions(self) -> set[int]:
        found = {position for _, position in self.inflight if position is not None}
        return found | {self.will[2]} if self.will is not None else found


Model = dict[str, Modelled]


def modelled(stored: StoredSession) -> Modelled:
    """Return a stored session in the form of the model."""
    will = stored.will
    return Modelled(
        stored.connected,
        stored.expiry_s,
        stored.ends_ms,
        (will.delay_s, will.due_ms, will.position) if will is not None else None,
        stored.last_packet_id,
        stored.received,
        [(packet_id, slot.position if slot is not None else None) for packet_id, slot in stored.inflight.items()],
        {
            name: [one.number, one.options, one.identifier, one.cursor, one.retained_before, one.retained_after]
            for name, one in stored.subscriptions.items()
        },
        stored.subscribed,
        {number: [one.filter, one.cursor, one.stop, one.cuts] for number, one in stored.draining.items()},
        stored.window,
        stored.recorded_at,
        {one.number: one.maybe_sent for one in stored.subscriptions.values() if one.maybe_sent},
    )


class SessionsMachine(RuleBasedStateMachine):
    """The machine. `events` has for each appended record where it ends and how it changes the model."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(mkdtemp(prefix="penstock-sessions-"))
        self.clock = ManualClock(1_000)
        self.lives = 0
        self.events: list[tuple[int, Callable[[Model], None]]] = []
        self.now: Model = {}
        self.acked: list[tuple[int, int, int, int]] = []
        """Of each SESSIONS_ACKED record: its position and size, and between which positions earlier ones are obsolete."""
        self.messages: list[tuple[int, int]] = []
        self.durable = 0
        self.store: Store
        self.sessions: StoredSessions

    @property
    def data_dir(self) -> Path:
        return self.directory / str(self.lives)

    @initialize()
    def open_store(self) -> None:
        self.data_dir.mkdir(exist_ok=True)
        options = StoreOptions(segment_bytes=SEGMENT_BYTES, retention_bytes=RETENTION_BYTES)
        self.store = Store(self.data_dir, options, self.clock)
        self.sessions = StoredSessions(self.store.queues, self.store.ledger)
        self.store.add_part(self.sessions)
        self.store.recover()
        self.durable = self.store.log.written

    def teardown(self) -> None:
        try:
            if hasattr(self, "store"):
                self.check()
                close(self.store)
        finally:
            shutil.rmtree(self.directory)

    # --- records ----------------------------------------------------------------------------------------------------

    def append(
        self, kind: Kind, client: str, row: dict[str, Any] | None, then: Callable[[Model, int], None], body: bytes = b""
    ) -> None:
        properties = orjson.dumps(row) if row is not None else b""
        position = self.store.append(kind, topic=client.encode(), properties=properties, body=body)
        self.note(position, then)

    def note(self, position: int, then: Callable[[Model, int], None]) -> None:
        def event(model: Model) -> None:
            then(model, position)

        self.events.append((self.store.log.end, event))
        event(self.now)

    @rule(client=clients, expiry_s=st.integers(0, 3), will=st.booleans())
    def connect(self, client: str, expiry_s: int, will: bool) -> None:
        is_there = client in self.now
        row: dict[str, Any] = {"expiry_s": expiry_s, "window": 7 + expiry_s}
        if will:
            row["will"] = {"topic": "will", "qos": 0, "retain": False, "delay_s": 2}

        def then(model: Model, position: int) -> None:
            one = model.setdefault(client, Modelled(recorded_at=position))
            one.window = 7 + expiry_s
            one.connected, one.expiry_s, one.ends_ms = True, expiry_s, 0
            one.will = (2, 0, position) if will else None

        self.append(Kind.SESSION_RESUMED if is_there else Kind.SESSION_OPENED, client, row, then, b"\0gone" if will else b"")

    @rule(client=clients, lasts_ms=st.integers(0, 9), will_ms=st.integers(0, 9))
    def leave(self, client: str, lasts_ms: int, will_ms: int) -> None:
        if client not in self.now:
            return
        ends_ms, will_due_ms = self.clock.now_ms() + lasts_ms, self.clock.now_ms() + will_ms if will_ms else 0

        def then(model: Model, _: int) -> None:
            one = model[client]
            one.connected, one.ends_ms = False, ends_ms
            one.will = (one.will[0], will_due_ms, one.will[2]) if one.will is not None and will_due_ms else None

        self.append(Kind.SESSION_CLOSED, client, {"ends_ms": ends_ms, "will_due_ms": will_due_ms}, then)

    @rule(client=clients, again=st.booleans())
    def end(self, client: str, again: bool) -> None:
        """End a session and begin the next one at once, before a save."""
        if client in self.now:
            self.append(Kind.SESSION_CLOSED, client, {"ended": True}, lambda model, _: model.__delitem__(client))
            if again:
                self.connect(client, 1, False)

    @rule(client=clients, name=filters, options=st.integers(0, 2), retained=st.none() | st.integers(0, 1000))
    def subscribe(self, client: str, name: str, options: int, retained: int | None) -> None:
        one = self.now.get(client)
        if one is None:
            return
        self.store.commit()
        if name in one.subscriptions:
            number, cursor = one.subscriptions[name][0], 0
            queue_id = self.stored(client).subscriptions[name].queue_id
        else:
            queue_id = self.store.queues.prepare(name)
            queue = self.store.queues.find(name)
            number, cursor = one.subscribed, queue.next_offset if queue is not None else 0
        row = {"filter": name, "number": number, "queue": queue_id, "options": options, "identifier": 7, "cursor": cursor}
        if retained is not None:
            row["retained"] = retained

        def then(model: Model, _: int) -> None:
            some = model[client]
            kept = some.subscriptions[name][3] if name in some.subscriptions else cursor
            some.subscriptions[name] = [number, options, 7, kept, retained, b""]
            some.subscribed = max(some.subscribed, number + 1)

        self.append(Kind.SESSION_SUBSCRIBED, client, row, then)

    @rule(client=clients, name=filters)
    def unsubscribe(self, client: str, name: str) -> None:
        def then(model: Model, _: int) -> None:
            some = model[client]
            some.maybe_sent.pop(some.subscriptions.pop(name)[0], None)

        if client in self.now and name in self.now[client].subscriptions:
            self.append(Kind.SESSION_UNSUBSCRIBED, client, {"filter": name}, then)

    @rule(client=clients, name=filters, stop=st.integers(0, 9), cuts=st.dictionaries(st.integers(0, 9), st.integers(0, 9)))
    def begin_to_leave(self, client: str, name: str, stop: int, cuts: dict[int, int]) -> None:
        """Unsubscribe from a filter that other subscriptions rely on."""

        def then(model: Model, _: int) -> None:
            fields = model[client].subscriptions.pop(name)
            model[client].draining[fields[0]] = [name, fields[3], stop, cuts]
            model[client].maybe_sent.pop(fields[0], None)

        if client in self.now and name in self.now[client].subscriptions:
            row = {"filter": name, "stop": stop, "cuts": list(cuts.items())}
            self.append(Kind.SESSION_UNSUBSCRIBED, client, row, then)

    @rule(client=clients, number=st.integers(0, 9))
    def have_left(self, client: str, number: int) -> None:
        if client in self.now and number in self.now[client].draining:
            self.append(
                Kind.SESSION_UNSUBSCRIBED,
                client,
                {"number": number},
                lambda model, _: model[client].draining.__delitem__(number),
            )

    @rule(client=clients, draw=st.data())
    def get_on(self, client: str, draw: st.DataObject) -> None:
        one = self.now.get(client)
        if one is None:
            return
        ids = [packet_id for packet_id, _ in one.inflight]
        some = st.lists(st.sampled_from(ids), unique=True) if ids else st.just([])
        done = draw.draw(some)
        received = [packet_id for packet_id in draw.draw(some) if packet_id not in done]
        free = [packet_id for packet_id in range(1, 8) if packet_id not in ids or packet_id in done]
        expires_before = self.store.retention.expires_before
        there = [message for message in self.messages[-20:] if message[0] >= expires_before]
        slots = st.tuples(st.sampled_from(free), st.sampled_from(there)) if there else st.nothing()
        new = draw.draw(st.lists(slots, max_size=4, unique_by=lambda slot: slot[0])) if free and there else []
        sent: list[tuple[int, Slot | None]] = [(packet_id, Slot(0, 2, *message, 99)) for packet_id, message in new]
        released = draw.draw(st.lists(st.sampled_from(sorted(one.received)), unique=True)) if one.received else []
        moved = {name: draw.draw(st.integers(0, 5)) for name in one.subscriptions if draw.draw(st.booleans())}
        cursors = [(one.subscriptions[name][0], one.subscriptions[name][3] + step, 0) for name, step in moved.items()]
        cursors += [(number, fields[1] + 1, 0) for number, fields in one.draining.items()]
        pending = [name for name, fields in one.subscriptions.items() if fields[4] is not None]
        retained = {one.subscriptions[name][0]: draw.draw(st.sampled_from([None, b"plant/1"])) for name in pending}
        last = draw.draw(st.integers(1, 65_535))
        maybe_sent = {one.subscriptions[name][0]: draw.draw(st.integers(1, 9)) for name in moved}
        body, properties = Changes(last, cursors, done, received, released, sent, retained, maybe_sent).encode()
        row = orjson.loads(properties) if properties else None

        def then(model: Model, position: int) -> None:
            some = model[client]
            some.recorded_at = position
            some.maybe_sent |= maybe_sent
            some.last_packet_id = last
            some.inflight = [
                (packet_id, None if packet_id in received else position)
                for packet_id, position in some.inflight
                if packet_id not in done
            ] + [(packet_id, message[0]) for packet_id, message in new]
            for packet_id in released:
                del some.received[packet_id]
            for number, fields in some.draining.items():
                fields[1] = {number: offset for number, offset, _ in cursors}.get(number, fields[1])
            for fields in some.subscriptions.values():
                fields[3] = {number: offset for number, offset, _ in cursors}.get(fields[0], fields[3])
                if fields[0] in retained:
                    topic = retained[fields[0]]
                    fields[4:] = [fields[4] if topic is not None else None, topic or b""]

        self.append(Kind.SESSION_OFFSETS, client, row, then, body)

    @rule(keys=st.lists(st.integers(0, 2**40), min_size=1, max_size=3), since=st.integers(0, 2), until=st.integers(0, 3))
    def acknowledge(self, keys: list[int], since: int, until: int) -> None:
        """Record acknowledgements, and that some of the last records of them are obsolete."""
        columns = AckedColumns()
        for key in keys:
            columns.add(key, Advance(1, {}))
        positions = [position for position, *_ in self.acked[-3:]]
        obsolete = min([*positions[since:], 2**40]) if since else 0, max([0, *positions[:until]])
        position = self.store.append(Kind.SESSIONS_ACKED, body=columns.encode(*obsolete))
        self.acked.append((position, self.store.log.end - position, *obsolete))

    @rule(client=clients, packet_id=st.integers(0, 5), size=st.integers(0, 200))
    def publish(self, client: str, packet_id: int, size: int) -> None:
        """Store a message that was received at QoS 2; with packet id 0, the will."""
        properties = encode_properties(Properties(session=client, packet_id=packet_id))
        route = self.store.router.route(b"plant/1")
        position = self.store.append_message(route, b"x" * size, properties, Flag.SESSION | 2)
        self.messages.append((position, self.store.log.end - position))

        def then(model: Model, _: int) -> None:
            if client in model and packet_id:
                model[client].received[packet_id] = position
            elif client in model:
                model[client].will = None

        self.note(position, then)

    @rule(ms=st.integers(1, 4))
    def wait(self, ms: int) -> None:
        self.clock.advance(ms)

    # --- the end of the node ----------------------------------------------------------------------------------------

    @rule()
    def commit(self) -> None:
        self.store.commit()

    @rule()
    def sync(self) -> None:
        self.store.commit()
        self.store.log.sync()
        self.durable = self.store.log.written

    @rule()
    def flush_the_index(self) -> None:
        self.store.commit()
        self.store.index.flush()

    @rule(segments=st.integers(1, 5))
    def retain(self, segments: int) -> None:
        """Fill some segments and let retention drop the oldest. Records that sessions need must stay."""
        for _ in range(segments):
            self.publish("ö", 1, 200)
            self.publish("ö", 2, 200)
            work_on(self.store)
        retain(self.store)
        self.sync()  # Copies must be durable before retention drops a segment.

    @rule()
    def restart(self) -> None:
        close(self.store)
        self.open_store()
        self.check()

    @rule(keep_index=st.booleans())
    def kill(self, keep_index: bool) -> None:
        self.come_back(self.store.log.written, keep_index)

    @precondition(lambda self: self.store.log.written > self.durable)
    @rule(part=st.floats(0, 1), keep_index=st.booleans())
    def cut_the_power(self, part: float, keep_index: bool) -> None:
        """Cut the log anywhere after its durable end, even within a record."""
        durable = max(self.durable, self.store.log.segments()[-1][0])
        cut = durable + int(part * (self.store.log.written - durable))
        ends = [position for position, _ in self.events] + [position + size for position, size, *_ in self.acked]
        end = min((position for position in ends if cut <= position <= self.store.log.written), default=cut)
        is_whole = not any(self.store.log.read(cut, end - cut))  # the zeros at the end of a record are as good as a hole
        self.come_back(end if is_whole else cut, keep_index)

    def come_back(self, cut: int, keep_index: bool) -> None:
        old = self.data_dir
        self.lives += 1
        crash(self.store, self.data_dir)
        shutil.rmtree(old)
        cut_log(self.data_dir, cut, b"", SEGMENT_BYTES)
        if not keep_index:
            shutil.rmtree(self.data_dir / "index")
        self.events = [event for event in self.events if event[0] <= cut]
        self.now = {}
        for _, event in self.events:
            event(self.now)
        self.messages = [message for message in self.messages if sum(message) <= cut]
        self.acked = [record for record in self.acked if record[0] + record[1] <= cut]
        self.open_store()
        self.check()

    # --- invariants -------------------------------------------------------------------------------------------------

    def stored(self, client: str) -> StoredSession:
        found = self.sessions.get(client)
        assert found is not None, client
        return found

    @rule()
    def look(self) -> None:
        """Before a save, reads return the changed sessions."""
        for client in ("pump", "pump/7", "ö"):
            found = self.sessions.get(client)
            assert (None if found is None else modelled(found)) == self.now.get(client)
        assert len(self.sessions) == len(self.now)
        acked: dict[int, int] = {}
        for position, size, since, until in self.acked:
            acked = {each: kept for each, kept in acked.items() if not since <= each < until} | {position: size}
        assert list(self.sessions.acked_records()) == list(acked.items())

    @rule()
    def check(self) -> None:
        self.look()
        self.store.commit()
        assert {one.client_id: modelled(one) for one in all_sessions(self.store.index)} == self.now
        away = {client: one.due_ms for client, one in self.now.items() if not one.connected}
        for until in (0, self.clock.now_ms(), 2**62):
            due = list(self.sessions.due(until))
            assert sorted(due) == sorted(client for client, due_ms in away.items() if due_ms <= until)
            assert [away[client] for client in due] == sorted(away[client] for client in due)
        assert sorted(self.sessions.connected()) == sorted(client for client, one in self.now.items() if one.connected)
        for before in (self.store.log.end // 2, self.store.log.end):
            needed = {position for one in self.now.values() for position in one.positions if position < before}
            assert {position for position, _ in self.sessions.live(before)} == needed
        for one in map(self.stored, list(self.now)):
            for position, size in one.needed():
                assert self.store.read_intact(position, size) is not None, "retention dropped what a session needs"
        for name in ("plant/+", "plant/#", "office"):
            queue = self.store.queues.find(name)
            is_wanted = any(
                name in one.subscriptions or name in (fields[0] for fields in one.draining.values())
                for one in self.now.values()
            )
            assert (queue is not None and OWNER in queue.owners) == is_wanted
            if queue is None or not is_wanted:
                assert queue is None or queue.owners == {"root"}


TestSessionsMachine = SessionsMachine.TestCase
TestSessionsMachine.settings = settings(max_examples=8 * DEPTH, stateful_step_count=30)
