"""Publishes the will of a client that has gone. MQTT 5.0, 3.1.2.5."""

from __future__ import annotations

from typing import Protocol

import orjson
import structlog

from penstock.gateway.protocol.connect import Will
from penstock.gateway.protocol.message import to_stored
from penstock.gateway.protocol.packets import NO_LOCAL, WILL
from penstock.gateway.protocol.properties import read_properties
from penstock.gateway.sessions.stored_session import StoredSession, StoredWill
from penstock.store.causer import Causer
from penstock.store.errors import DiskFull, StoreError
from penstock.store.properties import encode_properties
from penstock.store.record import Flag, Kind, decode, record_bytes
from penstock.store.store import Store

logger = structlog.get_logger("gateway")


class RetainedRoom(Protocol):
    """The retained messages of a node, as far as wills need them."""

    def admit(self, topic: bytes, size: int, causer: Causer, /) -> None:
        """Check that a message of a causer may be retained. Raises LimitExceeded."""
        ...


class Wills:
    """The wills of a node's sessions. A will is in the record with which its connection began.

    Parameters:
        store: has these records, and takes the messages.
        retained: says whether one more message may be retained.
    """

    def __init__(self, store: Store, retained: RetainedRoom) -> None:
        self._store = store
        self._retained = retained

    def publish(self, stored: StoredSession) -> bool:
        """Publish the will of a session once [MQTT-3.1.2-8]: the message's own record says that the will is published.

        Return False if the disk has no room for the message; then nothing has changed. A will that can't be published for
        another reason is discarded, and the reason is logged.
        """
        assert stored.will is not None, stored.client_id
        store = self._store
        try:
            found = self._read(stored.will)
            if found is not None:
                will, causer = found
                topic = will.topic.encode()
                route = store.router.route(topic, causer)
                is_retained = will.retain and will.body
                causer = store.ledger.with_tenant(causer, route.name)
                by = causer.row() if is_retained else ()
                no_local = any(one.options & NO_LOCAL for one in stored.subscriptions.values())
                publisher = stored.client_id if no_local else ""
                about = to_stored(will.properties, store.now_ms(), publisher=publisher, session=stored.client_id, by=by)
                flags = will.qos | Flag.SESSION | (Flag.RETAIN if will.retain else 0)
                encoded = encode_properties(about)
                if is_retained:
                    self._retained.admit(topic, record_bytes(topic, will.body, encoded), causer)
                store.append_message(route, will.body, encoded, flags)
                return True
        except DiskFull:
            return False
        except StoreError as error:
            logger.warning("will.refused", client=stored.client_id, why=str(error))
        if not stored.connected:
            row = {"ends_ms": stored.ends_ms, "will_due_ms": 0}
            store.append(Kind.SESSION_CLOSED, topic=stored.client_id.encode(), properties=orjson.dumps(row))
        return True

    def _read(self, stored: StoredWill) -> tuple[Will, Causer] | None:
        """Return a will, and the client that has left it; None if its record can't be read, which the store logs."""
        position = stored.position
        if position >= self._store.log.written:
            self._store.commit()
        data = self._store.read_intact(position, stored.size)
        if data is None:
            return None
        record = decode(data, position=position, verify=False)
        connected = orjson.loads(record.properties)
        row = connected["will"]
        properties, at = read_properties(record.body, 0, WILL)
        will = Will(row["topic"], record.body[at:], row["qos"], row["retain"], row["delay_s"], properties)
        return will, Causer.from_row(connected.get("by"))
