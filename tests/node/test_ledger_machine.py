"""The ledger of a node that is used, stopped, killed and rebuilt in any order, checked against a list of what exists.

The model knows each thing that takes room, who has created it and how much it takes. It adds that up anew for each question.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import orjson
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.node.config import Config
from penstock.node.parts import NodeParts
from penstock.pop.core.settings import DEFAULTS
from penstock.pop.errors import Overloaded
from penstock.store import topics
from penstock.store.bodies import SCHEDULE_PUT_HEAD
from penstock.store.errors import LimitExceeded, QuotaExceeded
from penstock.store.options import KIB, StoreOptions
from penstock.store.properties import Properties, encode_properties
from penstock.store.record import Flag, Kind, record_bytes
from penstock.store.space.accounts import RANKED_FROM, Resource
from penstock.store.space.causer import NODE, AccountKind, Causer, Step
from penstock.store.space.quotaoptions import QuotaLimitOptions, QuotaOptions
from penstock.timer.options import TimerOptions
from penstock.timer.schedule import ScheduleDefinition
from tests.clock import ManualClock
from tests.depth import DEPTH
from tests.store.wiring import close, copy_left, fill

USERS = ("", "acme/ann", "acme/bob", "carl")
SOURCES = ("192.0.2.1", "2001:db8::/64")
CLIENTS = ("", "one", "two")
TOPICS = ("a", "b/x", "c/x/y")

QUOTAS = QuotaOptions(
    share_from=2,
    share_from_bytes=300,
    tenant="user",
    limits=(
        QuotaLimitOptions(of="client", name="t*", retained=2),
        QuotaLimitOptions(of="user", name="carl", groups=1, delayed_bytes=400, sessions=8, retained=9, subscriptions=12),
        QuotaLimitOptions(of="tenant", name="acme", subscriptions=4),
    ),
)
MAXIMA = {
    Resource.QUEUES: 40,
    Resource.SESSIONS: 9,
    Resource.SUBSCRIPTIONS: 12,
    Resource.RETAINED: 9,
    Resource.RETAINED_BYTES: 2_000,
    Resource.GROUPS: 8,
    Resource.DELAYED: 9,
    Resource.DELAYED_BYTES: 2_000,
    Resource.TRANSACTIONS: 7,
    Resource.SHARED: 8,
    Resource.SCHEDULES: 6,
    Resource.SCHEDULES_BYTES: 3_000,
    Resource.TIMER_KEYS: 6,
}

KNOWN = [Causer.of(user, source, client) for user in USERS for source in SOURCES for client in CLIENTS]
"""Everybody who may cause something."""

causers = st.builds(Causer.of, st.sampled_from(USERS), st.sampled_from(SOURCES), st.sampled_from(CLIENTS))


def tenant_of(causer: Causer) -> str:
    return causer.user.partition("/")[0] if "/" in causer.user else ""


Name = tuple[AccountKind, str, str, str]
"""What tells accounts apart: kind, user, source and client; for a tenant, its name in place of the user."""


def name_of(step: Step | None, causer: Causer) -> Name:
    """Return what names the account of a step on the way to a causer; of the node if the step is None."""
    if step is None:
        return AccountKind.NODE, "", "", ""
    if step.kind is AccountKind.TENANT:
        return step.kind, step.name, "", ""
    if step.kind is AccountKind.USER:
        return step.kind, causer.user, "", ""
    if step.kind is AccountKind.SOURCE:
        return step.kind, causer.user, causer.source, ""
    # Nothing vouches for the client id of an anonymous client.
    return step.kind, causer.user, "" if causer.user else causer.source, causer.client


@dataclass(frozen=True, slots=True)
class Thing:
    """Something that takes room."""

    causer: Causer
    amounts: tuple[tuple[Resource, int], ...]
    is_passing: bool = False
    """Whether it ends with the process."""


class Model:
    """What exists, by a name of its own, and from which source each client of a user has come last."""

    def __init__(self) -> None:
        self.things: dict[tuple[object, ...], Thing] = {}
        self.sources: dict[tuple[str, str], str] = {}
        self.expiries: dict[str, int] = {}
        """When the last retained message of each topic expires, in ms since 1970; 0 if it doesn't."""

    def enter(self, causer: Causer) -> None:
        if causer.user and causer.client:
            self.sources[causer.user, causer.client] = causer.source

    def add(self, name: tuple[object, ...], causer: Causer, *amounts: tuple[Resource, int], is_passing: bool = False) -> None:
        assert name not in self.things, name
        self.things[name] = Thing(causer, amounts, is_passing)

    def held(self, resource: Resource, step: Step | None, causer: Causer) -> int:
        """Return how much is held by the account that a step on the way to a causer names; by all of them if it is None."""
        return self.totals()[resource, name_of(step, causer)]

    def totals(self) -> Counter[tuple[Resource, Name]]:
        """Return how much of each resource each account holds."""
        found: Counter[tuple[Resource, Name]] = Counter()
        for thing in self.things.values():
            names = self._charged(thing)
            for resource, amount in thing.amounts:
                for name in names:
                    found[resource, name] += amount
        return found

    def _charged(self, thing: Thing) -> list[Name]:
        causer = thing.causer
        if causer.user and causer.client and not thing.is_passing:
            causer = causer._replace(source=self.sources[causer.user, causer.client])
        path = causer._replace(tenant=tenant_of(causer)).chain()
        kept = (step for step in path if not (thing.is_passing and step.kind is AccountKind.CLIENT))
        return [name_of(None, causer), *(name_of(step, causer) for step in kept)]

    def room(self, resource: Resource, causer: Causer, spare: int = 0) -> int:
        """Return how much a causer may take, by the rule as the documentation states it, if that makes something else free."""
        room = MAXIMA[resource] - self.held(resource, None, NODE) + spare
        for step in causer._replace(tenant=tenant_of(causer)).chain():
            held = self.held(resource, step, causer)
            fixed = [
                getattr(limits, resource.name.lower())
                for limits in QUOTAS.limits
                if limits.of == step.kind.name.lower() and (limits.name == step.name or limits.name == step.name[:1] + "*")
            ]
            least = QUOTAS.share_from_bytes if resource.is_bytes else QUOTAS.share_from
            most = next(filter(None, fixed), None) or max(room, least)
            room = min(room, most - held)
        return room


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(mkdtemp(prefix="penstock-ledger-"))
        self.clock = ManualClock(1_000)
        self.lives = 0
        self.numbers = 0
        self.model = Model()
        self.parts: NodeParts

    @property
    def data_dir(self) -> Path:
        return self.directory / str(self.lives)

    @initialize()
    def open(self) -> None:
        self.data_dir.mkdir(exist_ok=True)
        config = replace(
            Config(),
            data_dir=self.data_dir,
            store=StoreOptions(segment_bytes=64 * KIB, queues_max=MAXIMA[Resource.QUEUES], sync_in="thread"),
            timer=TimerOptions(
                pending_max=MAXIMA[Resource.DELAYED], pending_bytes_max=MAXIMA[Resource.DELAYED_BYTES], tick_ms=1
            ),
            pop=replace(Config().pop, groups_max=MAXIMA[Resource.GROUPS], transactions_max=MAXIMA[Resource.TRANSACTIONS]),
            quotas=QUOTAS,
        )
        self.parts = NodeParts(config, self.clock)
        for resource, maximum in MAXIMA.items():
            self.parts.store.ledger.limit(resource, maximum, f"raise {resource.name.lower()}_max")
        self.parts.store.recover()
        fill(self.parts.store)
        self.model.things = {name: thing for name, thing in self.model.things.items() if not thing.is_passing}
        self.end_expired()

    def teardown(self) -> None:
        try:
            if hasattr(self, "parts"):
                close(self.parts.store)
        finally:
            shutil.rmtree(self.directory)

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    def allowed(self, causer: Causer, *wanted: tuple[Resource, int], instead_of: Thing | None = None) -> bool:
        """Return whether a causer may take all of this, one after the other, in place of a thing."""
        spare = dict(instead_of.amounts) if instead_of is not None else {}
        return all(self.model.room(resource, causer, spare.get(resource, 0)) >= amount for resource, amount in wanted)

    # --- what takes room --------------------------------------------------------------------------------------------

    def root_of(self, topic: str, causer: Causer) -> bool:
        """Note the root queue of a topic if it is new; return whether there is one."""
        level = topic.partition("/")[0]
        if ("root", level) in self.model.things:
            return True
        if not self.allowed(causer, (Resource.QUEUES, 1)):
            return False
        self.model.enter(causer)
        self.model.add(("root", level), causer, (Resource.QUEUES, 1))
        return True

    def store_message(self, topic: str, body: bytes, flags: int, about: Properties, causer: Causer) -> tuple[int, int]:
        """Store a message; return position and size of its record."""
        store = self.parts.store
        position = store.append_message(store.router.route(topic.encode(), causer), body, encode_properties(about), flags)
        return position, store.log.end - position

    @rule(topic=st.sampled_from(TOPICS) | st.integers(0, 40).map("level-{}/x".format), causer=causers)
    def publish(self, topic: str, causer: Causer) -> None:
        is_allowed = self.root_of(topic, causer)
        try:
            self.store_message(topic, b"x", 0, Properties(), causer)
        except LimitExceeded:
            assert not is_allowed
        else:
            assert is_allowed

    @rule(topic=st.sampled_from(TOPICS), size=st.integers(0, 200), causer=causers, expiry_ms=st.none() | st.integers(1, 9))
    def retain(self, topic: str, size: int, causer: Causer, expiry_ms: int | None) -> None:
        if not self.root_of(topic, causer):
            return
        self.parts.store.router.route(topic.encode(), causer)
        body = b"x" * size
        name = ("retained", topic)
        old = self.model.things.get(name)
        causer = self.parts.store.ledger.with_tenant(causer)
        expires_at_ms = self.clock.now_ms() + expiry_ms if expiry_ms else 0
        about = Properties(by=causer.row() if size else [], expires_at_ms=expires_at_ms)
        wanted = record_bytes(topic.encode(), body, encode_properties(about))
        is_same = old is not None and self.account_of(old.causer) == causer.account
        if not size:
            is_allowed = True
        elif is_same:
            assert old is not None
            more = wanted - dict(old.amounts)[Resource.RETAINED_BYTES]
            is_allowed = more <= 0 or self.allowed(causer, (Resource.RETAINED_BYTES, more))
        else:
            is_allowed = self.allowed(causer, (Resource.RETAINED, 1), (Resource.RETAINED_BYTES, wanted), instead_of=old)
        try:
            if size:
                self.parts.retained.admit(topic.encode(), wanted, causer)
        except LimitExceeded:
            assert not is_allowed
            return
        assert is_allowed
        _, stored = self.store_message(topic, body, Flag.RETAIN, about, causer)
        assert stored == wanted
        self.model.things.pop(name, None)
        if size:
            self.model.enter(causer)
            self.model.add(name, causer, (Resource.RETAINED, 1), (Resource.RETAINED_BYTES, stored))
            self.model.expiries[topic] = expires_at_ms

    @rule(ms=st.integers(0, 5), topic_filter=st.none() | st.sampled_from(["#", "b/+", "c/x/y"]))
    def look_for_expired(self, ms: int, topic_filter: str | None) -> None:
        self.clock.advance(ms)
        self.parts.store.commit()
        if topic_filter is None:
            self.end_expired()
            return
        list(self.parts.retained.matching(topic_filter, self.parts.store.log.end))
        self.forget_expired(topic_filter)

    def end_expired(self) -> None:
        while self.parts.retained.end_expired(self.clock.now_ms()):
            pass
        self.forget_expired("#")

    def forget_expired(self, topic_filter: str) -> None:
        for topic in TOPICS:
            if topics.matches(topic_filter, topic) and 0 < self.model.expiries.get(topic, 0) <= self.clock.now_ms():
                self.model.things.pop(("retained", topic), None)

    def account_of(self, causer: Causer) -> int:
        return causer._replace(tenant=tenant_of(causer)).account

    @rule(
        topic=st.sampled_from(TOPICS),
        size=st.integers(1, 150),
        retain=st.booleans(),
        has_key=st.booleans(),
        causer=causers,
        after=st.integers(1, 9),
    )
    def delay(self, topic: str, size: int, retain: bool, has_key: bool, causer: Causer, after: int) -> None:
        if not self.root_of(topic, causer):
            return
        body = b"x" * size
        causer = self.parts.store.ledger.with_tenant(causer)
        key = str(self.parts.store.log.end) if has_key else ""
        about = Properties(deliver_at_ms=self.parts.store.now_ms() + after, by=causer.row(), timer_key=key)
        wanted = record_bytes(topic.encode(), body, encode_properties(about))
        asked = [(Resource.DELAYED, 1), (Resource.DELAYED_BYTES, wanted)]
        asked += [(Resource.RETAINED, 1), (Resource.RETAINED_BYTES, wanted)] if retain else []
        asked += [(Resource.TIMER_KEYS, 1)] * has_key
        is_allowed = self.allowed(causer, *asked)
        self.parts.store.router.route(topic.encode(), causer)
        try:
            if has_key:
                self.parts.timer_keys.admit(causer, topic)
            self.parts.delayed.admit(causer, wanted, topic)
            if retain:
                self.parts.retained.admit(topic.encode(), wanted, causer, is_delayed=True)
        except LimitExceeded:
            assert not is_allowed
            return
        assert is_allowed
        flags = Flag.DELAYED | (Flag.RETAIN if retain else 0)
        position, stored = self.store_message(topic, body, flags, about, causer)
        self.model.enter(causer)
        amounts = [(Resource.DELAYED, 1), (Resource.DELAYED_BYTES, stored), *[(Resource.TIMER_KEYS, 1)] * has_key]
        self.model.add(("delayed", position, about.deliver_at_ms, topic), causer, *amounts)
        if retain:
            self.model.add(("later", position), causer, (Resource.RETAINED, 1), (Resource.RETAINED_BYTES, stored))

    @rule(ms=st.integers(1, 5))
    def fire(self, ms: int) -> None:
        self.clock.advance(ms)
        self.parts.store.commit()
        while self.parts.delayed.fire_due():
            self.parts.store.commit()
        due = [name for name in self.model.things if name[0] == "delayed" and name[2] <= self.clock.now_ms()]  # type: ignore[operator]
        for _, position, due_ms, topic in sorted(due, key=lambda name: (name[2], name[1])):
            del self.model.things["delayed", position, due_ms, topic]
            later = self.model.things.pop(("later", position), None)
            if later is not None:
                self.model.things["retained", topic] = later
                self.model.expiries[str(topic)] = 0

    @precondition(lambda self: any(name[0] == "delayed" for name in self.model.things))
    @rule(data=st.data())
    def recall(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(name for name in self.model.things if name[0] == "delayed")))
        position, due_ms = name[1], name[2]
        assert isinstance(position, int)
        assert isinstance(due_ms, int)
        self.parts.delayed.recall(position, due_ms)
        del self.model.things[name]
        self.model.things.pop(("later", position), None)

    @rule(name=st.sampled_from("xyz"), topic=st.sampled_from(TOPICS), size=st.integers(0, 600), causer=causers)
    def put_schedule(self, name: str, topic: str, size: int, causer: Causer) -> None:
        if not self.root_of(topic, causer):
            return
        body, start_ms = b"x" * size, self.parts.store.now_ms() + 10**9
        asked = ScheduleDefinition(name=name, topic=topic, body=body, every_ms=1_000, start_ms=start_ms)
        by = self.parts.store.ledger.with_tenant(causer).row()
        wanted = record_bytes(name.encode(), SCHEDULE_PUT_HEAD.pack(0) + body, replace(asked, by=by).encoded())
        old = self.model.things.get(("schedule", name))
        if old is not None and self.account_of(old.causer) == self.account_of(causer):
            more = wanted - dict(old.amounts)[Resource.SCHEDULES_BYTES]
            is_allowed = more <= 0 or self.allowed(causer, (Resource.SCHEDULES_BYTES, more))
        else:
            is_allowed = self.allowed(causer, (Resource.SCHEDULES, 1), (Resource.SCHEDULES_BYTES, wanted))
        try:
            made = self.parts.schedules.put(asked, causer)
        except LimitExceeded:
            assert not is_allowed
            return
        assert is_allowed
        assert made.size == wanted
        self.model.things.pop(("schedule", name), None)
        self.model.enter(causer)
        self.model.add(("schedule", name), causer, (Resource.SCHEDULES, 1), (Resource.SCHEDULES_BYTES, wanted))

    @rule(name=st.sampled_from("xyz"))
    def delete_schedule(self, name: str) -> None:
        schedule = self.parts.schedules.get(name)
        assert (schedule is None) == (("schedule", name) not in self.model.things)
        if schedule is not None:
            self.parts.schedules.delete(schedule)
            del self.model.things["schedule", name]

    @rule(topic=st.sampled_from(TOPICS), causer=causers)
    def begin_transaction(self, topic: str, causer: Causer) -> None:
        if not self.root_of(topic, causer):
            return
        is_allowed = self.allowed(causer, (Resource.TRANSACTIONS, 1))
        self.parts.store.router.route(topic.encode(), causer)
        try:
            by = self.parts.transactions.admit(causer, topic)
        except LimitExceeded:
            assert not is_allowed
            return
        assert is_allowed
        position, _ = self.store_message(topic, b"x", Flag.HALF, Properties(producer="p", by=by), causer)
        self.model.enter(causer)
        self.model.add(("half", position), causer, (Resource.TRANSACTIONS, 1))

    @precondition(lambda self: any(name[0] == "half" for name in self.model.things))
    @rule(data=st.data(), commit=st.booleans())
    def end_transaction(self, data: st.DataObject, commit: bool) -> None:
        name = data.draw(st.sampled_from(sorted(name for name in self.model.things if name[0] == "half")))
        assert isinstance(name[1], int)
        self.parts.transactions.end(name[1], commit=commit)
        del self.model.things[name]

    @rule(topic_filter=st.sampled_from(["+/x", "b/#", "c/x/y"]), causer=causers)
    def create_group(self, topic_filter: str, causer: Causer) -> None:
        queue = self.parts.store.queues.find(topic_filter, "earliest") or self.parts.store.queues.find(topic_filter)
        queues = 1 if queue is not None else 2
        room = self.model.room(Resource.QUEUES, causer)
        is_allowed = self.allowed(causer, (Resource.GROUPS, 1)) and room >= queues
        number = self.number()
        if not is_allowed:
            with pytest.raises((Overloaded, LimitExceeded)):
                self.parts.pop.groups.create(f"group-{number}", topic_filter, "earliest", DEFAULTS, causer)
            # A root queue that was declared first stays, as if a message had begun it.
            if topic_filter == "b/#" and "b" in self.parts.store.router.roots and ("root", "b") not in self.model.things:
                self.model.enter(causer)
                self.model.add(("root", "b"), causer, (Resource.QUEUES, 1))
            elif queue is None and room >= 1 and self.allowed(causer, (Resource.GROUPS, 1)):
                self.model.enter(causer)  # the queue of the filter was declared, and dropped again
            return
        self.parts.pop.groups.create(f"group-{number}", topic_filter, "earliest", DEFAULTS, causer)
        self.model.enter(causer)
        if queue is None:
            level = ("root", "b") if topic_filter == "b/#" else ("filter", topic_filter)
            self.model.add(level, causer, (Resource.QUEUES, 1))
        self.model.add(("retry", number), causer, (Resource.QUEUES, 1))
        self.model.add(("group", number, topic_filter), causer, (Resource.GROUPS, 1))

    @precondition(lambda self: any(name[0] == "group" for name in self.model.things))
    @rule(data=st.data())
    def delete_group(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(name for name in self.model.things if name[0] == "group")))
        _, number, topic_filter = name
        self.parts.pop.groups.delete(f"group-{number}", str(topic_filter))
        del self.model.things[name], self.model.things["retry", number]
        if not any(one[0] == "group" and one[2] == topic_filter for one in self.model.things):
            self.model.things.pop(("filter", topic_filter), None)

    # --- sessions ---------------------------------------------------------------------------------------------------

    def append(self, kind: Kind, client: str, row: dict[str, Any]) -> None:
        self.parts.store.append(kind, topic=client.encode(), properties=orjson.dumps(row))

    def sessions(self) -> Iterator[tuple[object, ...]]:
        return (name for name in self.model.things if name[0] == "session")

    @rule(causer=causers)
    def connect(self, causer: Causer) -> None:
        ledger = self.parts.store.ledger
        client = causer.client or "none"
        name = ("session", client)
        row = {"expiry_s": 60, "window": 7, "by": ledger.with_tenant(causer).row()}
        if name in self.model.things:
            self.append(Kind.SESSION_RESUMED, client, row)
            self.model.enter(causer)
            del self.model.things[name]
        else:
            is_allowed = self.allowed(causer, (Resource.SESSIONS, 1))
            try:
                ledger.admit(causer, Resource.SESSIONS)
            except LimitExceeded:
                assert not is_allowed
                return
            assert is_allowed
            self.append(Kind.SESSION_OPENED, client, row)
            self.model.enter(causer)
        self.model.add(name, causer, (Resource.SESSIONS, 1))

    @rule(client=st.sampled_from(["one", "two", "none"]), topic_filter=st.sampled_from(["a/+", "+/+", "z"]), causer=causers)
    def subscribe(self, client: str, topic_filter: str, causer: Causer) -> None:
        store, sessions = self.parts.store, self.parts.sessions
        stored = sessions.get(client)
        if stored is None or topic_filter in stored.subscriptions:
            return
        is_new = store.queues.find(topic_filter) is None
        wanted = [(Resource.SUBSCRIPTIONS, 1), *([(Resource.QUEUES, 1)] if is_new else [])]
        is_allowed = self.allowed(causer, *wanted)
        try:
            by = store.ledger.admit(causer, Resource.SUBSCRIPTIONS, topic=topic_filter)
            queue_id = store.queues.prepare(topic_filter, by)
        except LimitExceeded:
            assert not is_allowed
            return
        assert is_allowed
        row = {
            "filter": topic_filter,
            "number": stored.subscribed,
            "queue": queue_id,
            "options": 1,
            "identifier": 0,
            "cursor": 0,
        }
        self.append(Kind.SESSION_SUBSCRIBED, client, {**row, "by": by.row()})
        self.model.enter(causer)
        self.model.add(("subscription", client, topic_filter), causer, (Resource.SUBSCRIPTIONS, 1))
        if is_new:
            self.model.add(("shared filter", topic_filter), causer, (Resource.QUEUES, 1))

    def forget_subscriptions(self, client: str, topic_filter: str = "") -> None:
        for name in list(self.model.things):
            if name[0] == "subscription" and name[1] == client and name[2] in (topic_filter or name[2],):
                del self.model.things[name]
        used = {name[2] for name in self.model.things if name[0] == "subscription"}
        for name in list(self.model.things):
            if name[0] == "shared filter" and name[1] not in used:
                del self.model.things[name]

    @rule(client=st.sampled_from(["one", "two", "none"]), topic_filter=st.sampled_from(["a/+", "+/+", "z"]))
    def unsubscribe(self, client: str, topic_filter: str) -> None:
        stored = self.parts.sessions.get(client)
        if stored is not None and topic_filter in stored.subscriptions:
            self.append(Kind.SESSION_UNSUBSCRIBED, client, {"filter": topic_filter})
            self.forget_subscriptions(client, topic_filter)

    @precondition(lambda self: any(self.sessions()))
    @rule(data=st.data())
    def end_session(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.sessions(), key=str)))
        client = str(name[1])
        self.append(Kind.SESSION_CLOSED, client, {"ended": True})
        del self.model.things[name]
        self.forget_subscriptions(client)

    @rule(resource=st.sampled_from([Resource.QUEUES, Resource.SUBSCRIPTIONS, Resource.SHARED]), causer=causers)
    def hold(self, resource: Resource, causer: Causer) -> None:
        ledger = self.parts.store.ledger
        is_allowed = self.allowed(causer, (resource, 1))
        try:
            causer = ledger.admit(causer, resource)
        except LimitExceeded:
            assert not is_allowed
            return
        assert is_allowed
        ledger.hold(causer, resource)
        self.model.add(("held", self.number(), resource), causer._replace(tenant=""), (resource, 1), is_passing=True)

    @precondition(lambda self: any(name[0] == "held" for name in self.model.things))
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(name for name in self.model.things if name[0] == "held")))
        causer = self.parts.store.ledger.with_tenant(self.model.things.pop(name).causer)
        assert isinstance(name[2], Resource)
        self.parts.store.ledger.let_go(causer, name[2])

    # --- what must not change anything ------------------------------------------------------------------------------

    @rule()
    def commit(self) -> None:
        self.parts.store.commit()

    @rule(flush=st.booleans())
    def flush(self, flush: bool) -> None:
        self.parts.store.commit()
        if flush:
            self.parts.store.index.flush()

    @rule()
    def stop(self) -> None:
        close(self.parts.store)
        self.open()

    @rule(keep_index=st.booleans())
    def kill(self, keep_index: bool) -> None:
        store = self.parts.store
        store.commit()
        copy_left(self.data_dir, self.directory / str(self.lives + 1))
        store.retention.close()
        store.index.close()
        store.log.close()
        self.lives += 1
        if not keep_index:
            shutil.rmtree(self.data_dir / "index")
        self.open()

    # --- checks -----------------------------------------------------------------------------------------------------

    @invariant()
    def the_ledger_agrees(self) -> None:
        if not hasattr(self, "parts"):
            return
        ledger, totals = self.parts.store.ledger, self.model.totals()
        for resource in Resource:
            assert ledger.held(resource) == totals[resource, name_of(None, NODE)], resource
            for causer in KNOWN:
                for step in causer._replace(tenant=tenant_of(causer)).chain():
                    assert ledger._held(step.account, resource) == totals[resource, name_of(step, causer)], (resource, step)
        assert ledger.held(Resource.QUEUES) - self.passing(Resource.QUEUES) == len(self.parts.store.queues)
        assert ledger.held(Resource.GROUPS) == len(list(self.parts.pop.groups))
        assert ledger.held(Resource.SESSIONS) == len(self.parts.sessions)
        assert ledger.held(Resource.DELAYED) == len(self.parts.delayed)
        assert ledger.held(Resource.TRANSACTIONS) == len(self.parts.transactions)
        assert ledger.held(Resource.TIMER_KEYS) == len(self.parts.timer_keys)
        assert ledger.held(Resource.SCHEDULES) == len(self.parts.schedules)

    def passing(self, resource: Resource) -> int:
        return sum(name[0] == "held" and name[2] == resource for name in self.model.things)

    @rule()
    def find_the_largest(self) -> None:
        self.parts.store.commit()
        for resource in Resource:
            if not resource.is_bytes and not self.passing(resource):
                self.compare_the_largest(resource)

    def compare_the_largest(self, resource: Resource) -> None:
        found = {(holder.kind, holder.names): holder.held for holder in self.parts.store.ledger.top(resource, 100)}
        expected, totals = {}, self.model.totals()
        for causer in KNOWN:
            path = causer._replace(tenant=tenant_of(causer)).chain()
            for depth, step in enumerate(path):
                held = totals[resource, name_of(step, causer)]
                if held >= RANKED_FROM and step.kind is not AccountKind.CLIENT:
                    expected[step.kind, tuple(each.name for each in path[: depth + 1])] = held
        assert found == expected
        assert sorted(found.values(), reverse=True) == list(found.values())

    @rule(resource=st.sampled_from(list(Resource)), causer=causers, amount=st.integers(1, 4))
    def ask(self, resource: Resource, causer: Causer, amount: int) -> None:
        room = self.model.room(resource, causer)
        try:
            self.parts.store.ledger.admit(causer, resource, amount)
        except QuotaExceeded:
            assert room < amount <= MAXIMA[resource] - self.model.held(resource, None, NODE)
        except LimitExceeded:
            assert amount > MAXIMA[resource] - self.model.held(resource, None, NODE)
        else:
            assert amount <= room


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=4 * DEPTH, stateful_step_count=40)
