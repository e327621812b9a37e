"""Publishes the will of a client that has gone. MQTT 5.0, 3.1.2.5."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson
import structlog

from penstock.access.subject import Subject
from penstock.gateway.protocol.connect import Will
from penstock.gateway.protocol.message import to_stored
from penstock.gateway.protocol.packets import NO_LOCAL, WILL
from penstock.gateway.protocol.properties import read_properties
from penstock.gateway.sessions.stored_session import StoredSession
from penstock.store.errors import DiskFull, StoreError
from penstock.store.properties import encode_properties
from penstock.store.record import Flag, Kind, decode, record_bytes
from penstock.store.space.causer import Causer
from penstock.store.store import Store

if TYPE_CHECKING:
    from penstock.gateway.auth.authorizer import Authorizer
    from penstock.gateway.delivery.retained_messages import RetainedMessages

logger = structlog.get_logger("gateway")


class Author(NamedTuple):
    """Who leaves a will, as access control goes by it."""

    subject: Subject
    proof: str = ""
    """See `ProvenIdentity.proof`."""

    def row(self) -> dict[str, object]:
        """Return what the record of a will states of its author besides client id and user name."""
        subject = self.subject
        stated = {"roles": sorted(subject.roles), "address": subject.address, "proof": self.proof}
        return {name: value for name, value in stated.items() if value}

    @classmethod
    def from_row(cls, client_id: str, user: str, row: Mapping[str, Any]) -> Author:
        """Return the author of a recorded will."""
        return cls(Subject(user, frozenset(row.get("roles", ())), client_id, row.get("address", "")), row.get("proof", ""))


class WillOutcome(Enum):
    """What came of an attempt to publish a will."""

    ENDED = auto()
    """It is published, or discarded for good."""
    NO_ROOM = auto()
    """The disk has no room for the message. Nothing has changed."""
    UNDECIDED = auto()
    """Nobody can tell yet whether it may be published. Nothing has changed."""


class Wills:
    """The wills of a node's sessions. A will is in the record with which its connection began.

    Parameters:
        store: has these records, and takes the messages.
        retained: says whether one more message may be retained.
        judge: says whether a will may be published.
    """

    def __init__(self, store: Store, retained: RetainedMessages, judge: Authorizer) -> None:
        self._store = store
        self._retained = retained
        self._judge = judge

    def publish(self, stored: StoredSession) -> WillOutcome:
        """Publish the will of a session once [MQTT-3.1.2-8]: the message's own record says that the will is published.

        A will that may not be published, or can't be for another reason than the room on the disk, is discarded, and the
        reason is logged.
        """
        assert stored.will is not None, stored.client_id
        store = self._store
        try:
            found = self.read(stored)
            if found is not None:
                will, causer, author = found
                is_allowed = self._judge.may_publish_will(author.subject, author.proof, will.topic)
                if is_allowed is None:
                    return WillOutcome.UNDECIDED
                if not is_allowed:
                    logger.warning("will.refused", client=stored.client_id, why="a ban, the rules or a reload deny it")
                    return self._discard(stored)
                topic = will.topic.encode()
                route = store.router.route(topic, causer)
                is_retained = will.retain and will.body
                causer = store.ledger.with_tenant(causer, route.name)
                by = causer.row() if is_retained else ()
                no_local = any(one.options & NO_LOCAL for one in stored.subscriptions.values())
                publisher = stored.client_id if no_local else ""
                about = to_stored(will.properties, store.now_ms, publisher=publisher, session=stored.client_id, by=by)
                flags = will.qos | Flag.SESSION | (Flag.RETAIN if will.retain else 0)
                encoded = encode_properties(about)
                if is_retained:
                    self._retained.admit(topic, record_bytes(topic, will.body, encoded), causer)
                store.append_message(route, will.body, encoded, flags)
                return WillOutcome.ENDED
        except DiskFull:
            return WillOutcome.NO_ROOM
        except StoreError as error:
            logger.warning("will.refused", client=stored.client_id, why=str(error))
        return self._discard(stored)

    def _discard(self, stored: StoredSession) -> WillOutcome:
        if not stored.connected:
            row = {"ends_ms": stored.ends_ms, "will_due_ms": 0}
            self._store.append(Kind.SESSION_CLOSED, topic=stored.client_id.encode(), properties=orjson.dumps(row))
        return WillOutcome.ENDED

    def read(self, stored: StoredSession) -> tuple[Will, Causer, Author] | None:
        """Return the will of a session that has one, and who has left it; None if its record can't be read, which the store
        logs."""
        assert stored.will is not None, stored.client_id
        position = stored.will.position
        if position >= self._store.log.written:
            self._store.commit()
        data = self._store.read_intact(position, stored.will.size)
        if data is None:
            return None
        record = decode(data, position=position, verify=False)
        connected = orjson.loads(record.properties)
        row = connected["will"]
        properties, at = read_properties(record.body, 0, WILL)
        will = Will(row["topic"], record.body[at:], row["qos"], row["retain"], row["delay_s"], properties)
        author = Author.from_row(stored.client_id, connected.get("user", ""), row.get("of", {}))
        return will, Causer.from_row(connected.get("by")), author
