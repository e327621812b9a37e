"""The bodies of records that are arrays or lists of numbers. `store.record` defines what is around a body.

A body that is an array has a struct, for one entry at a time, and a numpy dtype, for many.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from penstock.store.record import Kind

CHECKPOINT_ENTRY = struct.Struct("<QQIHBB")
CHECKPOINT_ENTRY_DTYPE = np.dtype(
    [
        ("position", "<u8"),
        ("offset", "<u8"),
        ("size", "<u4"),
        ("attempt", "<u2"),
        ("source", "u1"),
        ("backoff", "u1"),
    ]
)
"""Body of POP_CHECKPOINT. There is one entry for each message that the checkpoint hands out.

An entry has the position and size of the message, its offset in the queue that it came from (`source` is 0 for the queue of the
group's filter and 1 for the retry queue), and the number of this delivery attempt, from 1. `backoff` is 0, or the message comes
back up to 2**backoff ms after the deadline: see `backoff_code`.

The properties (JSON) are empty unless they add something to the entries: `attempt_id` of the call; and for a group that
doesn't take every message, `cursor` (offset up to which the group has examined its queue), `keys` of the entries and `parked`
(see `pop.core.order`). A record without entries only has such properties.
"""


def backoff_code(wait_ms: int) -> int:
    """Return the field `backoff` of an entry whose message comes back up to `wait_ms` after its deadline.

    The wait is rounded up to a power of two, since readers of the log only need to know when a delivery is overdue.
    """
    return max(wait_ms - 1, 1).bit_length() if wait_ms > 0 else 0


REFERENCE = struct.Struct("<QI")
REFERENCE_DTYPE = np.dtype([("checkpoint", "<u8"), ("index", "<u4")])
"""Body of POP_ACK, POP_REVIVED, POP_DEAD_LETTER, GROUP_OFFSET_RESET and GROUP_DELETED: the deliveries that the record
settles."""

CHANGE_ENTRY = struct.Struct("<QIQQIHBB")
CHANGE_ENTRY_DTYPE = np.dtype([*REFERENCE_DTYPE.descr, *CHECKPOINT_ENTRY_DTYPE.descr])
"""Body of POP_INVISIBLE_CHANGED: the delivery that ends, and the delivery that replaces it under this record's position."""

TIMER_ENTRY = struct.Struct("<QI")
TIMER_ENTRY_DTYPE = np.dtype([("position", "<u8"), ("size", "<u4")])
"""Body of the kinds that name messages: TIMER_FIRED, TIMER_CANCELLED, TRANSACTION_*, DEAD_LETTER_REDRIVEN and
DEAD_LETTER_PURGED. Position and size of each.

`store.queues.latedispatches` defines the properties of TIMER_FIRED and TRANSACTION_COMMITTED, which say where the messages go.
"""

SESSION_COUNTS = struct.Struct("<HIIIII")
SESSION_CURSOR = struct.Struct("<IQQ")
SESSION_PACKET_ID = struct.Struct("<H")
SESSION_SLOT = struct.Struct("<HBQIQ")
"""The records of sessions; the client id is their topic, except in SESSIONS_ACKED, which has none.

The properties (JSON) by kind:

- SESSION_OPENED and SESSION_RESUMED: `expiry_s` (how long the session lasts without its client), `window` (how many deliveries
  at QoS 1 and 2 may wait for their acknowledgement at once on this connection), `user` (the user that owns the session, if
  something vouches for the user name) and, if the client has a will, `will` with
  `topic`, `qos`, `retain` and `delay_s`. SESSION_RESUMED: `afresh`, if the client is told that it has no session, so that it
  forgets which of its messages of QoS 2 are under way. The body of the record holds the properties of the will, as MQTT 5.0
  encodes them, and the body of the will.
- SESSION_CLOSED: `ends_ms` and `will_due_ms` (0 if there is no will any more), or `ended`. If the disk had no room for
  SESSION_OFFSETS, also `cursors` (number, offset and position, of subscriptions at QoS 0) and `maybe_sent`, as below.
- SESSION_SUBSCRIBED: `filter`, `number` (of the subscription in its session), `queue` (id), `options` (MQTT 5.0, 3.8.3.1),
  `identifier`, `cursor` (offset in the queue) and, if the subscription gets retained messages, `retained` (it gets those that
  were stored before this position).
- SESSION_UNSUBSCRIBED: `filter` and, if other subscriptions rely on this one, `stop` (the offset up to which it still sends)
  and `cuts` (pairs of number and offset; see `gateway.delivery.draining`); `withdrawn`, if the client may no longer have it.
  Or `number`, of a subscription that has ended.
- SESSION_OFFSETS: if retained messages are being sent, `retained`, which maps the number of a subscription to the last topic
  that was sent, or to null when all were sent. If the client was connected when the node was killed, `maybe_sent`, which maps
  the number of a subscription to the offset up to which messages may have been sent.

The body of SESSION_OFFSETS is what has changed since the previous record of the session. It begins with SESSION_COUNTS: the
packet id that was assigned last, and the lengths of five lists. The lists follow:

1. cursors, as SESSION_CURSOR: number of the subscription, offset in its queue, and position of the message there (0 at the end
   of the queue): a queue that is built anew from a damaged log has fewer entries, and there the position tells the offset
2. packet ids of deliveries that are complete, as SESSION_PACKET_ID
3. packet ids of deliveries whose PUBREC was received, as SESSION_PACKET_ID
4. packet ids of messages received at QoS 2 whose PUBREL was received, as SESSION_PACKET_ID
5. new deliveries in the order of sending, as SESSION_SLOT: packet id, QoS (0 if the PUBREC was received), position and size of
   the message, delivery of a group or 0
"""

SESSIONS_ACKED_HEAD = struct.Struct("<QQI")
SESSIONS_ACKED_WIDTHS = (0, 1, 2, 4, 8)
SESSIONS_ACKED_NONE = 0xFFFF_FFFF
"""The body of SESSIONS_ACKED: progress of many sessions, each since its last SESSION_OFFSETS record (or SESSION_OPENED, if that
came later). Nothing changes in a session itself. The node reads these records after a kill, when it closes the sessions of the
clients that were connected.

The body begins with SESSIONS_ACKED_HEAD: two positions and the number of entries. Earlier SESSIONS_ACKED records from the first
position on and before the second one are obsolete: all their sessions have later records. The entries follow in four columns:

1. the position of the session's last SESSION_OFFSETS or SESSION_OPENED record, which stands for the session
2. a packet id: of the deliveries that were under way as of that record, those before this one, in the order of sending, are
   complete. 0 means that all are.
3. the number of a subscription, or SESSIONS_ACKED_NONE
4. an offset in the queue of that subscription: all deliveries before it that were sent since that record are complete

A column begins with a byte of two indexes into SESSIONS_ACKED_WIDTHS: its high half is that of the smallest number of the
column, which follows in that width, and its low half is that of the others: by how much each number exceeds the smallest one.
With width 0 all numbers are the same.
"""

SCHEDULE_PUT_HEAD = struct.Struct("<q")
SCHEDULE_MOVED_HEAD = struct.Struct("<Q")
"""The records of schedules; the name of the schedule is their topic.

- SCHEDULE_PUT: its properties are the definition (`timer.schedule.ScheduleDefinition`) as JSON. Its body has the time of the
  first occurrence in ms since 1970, in SCHEDULE_PUT_HEAD, and then the body of the messages. The position of the record is the
  id of the schedule.
- SCHEDULE_MOVED: the body has the id of the schedule, in SCHEDULE_MOVED_HEAD, and its new state
  (`timer.schedule.ScheduleState`).
- SCHEDULE_DELETED has neither.
"""

BODY_DTYPE: dict[Kind, np.dtype[Any]] = {
    Kind.POP_CHECKPOINT: CHECKPOINT_ENTRY_DTYPE,
    Kind.POP_ACK: REFERENCE_DTYPE,
    Kind.POP_REVIVED: REFERENCE_DTYPE,
    Kind.POP_DEAD_LETTER: REFERENCE_DTYPE,
    Kind.POP_INVISIBLE_CHANGED: CHANGE_ENTRY_DTYPE,
    Kind.TIMER_FIRED: TIMER_ENTRY_DTYPE,
    Kind.TIMER_CANCELLED: TIMER_ENTRY_DTYPE,
    Kind.GROUP_OFFSET_RESET: REFERENCE_DTYPE,
    Kind.GROUP_DELETED: REFERENCE_DTYPE,
    Kind.TRANSACTION_COMMITTED: TIMER_ENTRY_DTYPE,
    Kind.TRANSACTION_ROLLED_BACK: TIMER_ENTRY_DTYPE,
    Kind.TRANSACTION_CHECKED: TIMER_ENTRY_DTYPE,
    Kind.DEAD_LETTER_REDRIVEN: TIMER_ENTRY_DTYPE,
    Kind.DEAD_LETTER_PURGED: TIMER_ENTRY_DTYPE,
}

for _struct, _dtype in (
    (CHECKPOINT_ENTRY, CHECKPOINT_ENTRY_DTYPE),
    (REFERENCE, REFERENCE_DTYPE),
    (CHANGE_ENTRY, CHANGE_ENTRY_DTYPE),
    (TIMER_ENTRY, TIMER_ENTRY_DTYPE),
):
    assert _struct.size == _dtype.itemsize, (_struct.format, _dtype)
