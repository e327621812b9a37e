"""The state of POP: groups, checkpoints and dead letters, as the records of the log have made them.

The parts of `PopCore` decide and append records. Only applying a record changes the state: when the record is appended, and
when recovery reads it again. Therefore recovery always comes to the same state. (`forget` and `forget_redriven` have no
records; they follow retention.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import structlog

from penstock.pop.core.checkpoint import Checkpoint, CheckpointTable
from penstock.pop.core.damages import DamagedRanges
from penstock.pop.core.deadletters import DEAD_LETTERS, DeadLetter, DeadLetterTable
from penstock.pop.core.deadlines import Deadlines
from penstock.pop.core.deliverychanges import DeliveryChanges
from penstock.pop.core.group import ConsumerGroup, GroupTable
from penstock.pop.core.groupchanges import GroupChanges
from penstock.pop.options import PopOptions
from penstock.store.clocksteps import step_of
from penstock.store.index.index import Batch, Index
from penstock.store.log.commitlog import CommitLog
from penstock.store.part import Apply
from penstock.store.queues.lightqueue import ENTRY, ENTRY_BYTES, LightQueue
from penstock.store.queues.queues import Queues
from penstock.store.record import Kind, Record
from penstock.store.space.ledger import Ledger

logger = structlog.get_logger("pop")

ENTRIES_PER_READ = 256
"""Entries of a retry queue that `live` reads in one step."""


class PopState:
    """Groups, checkpoints and dead letters. It is a part of the store.

    Parameters:
        log: has the messages.
        queues: the light queues that groups read, and that get retries and dead letters.
        deadlines: gets each checkpoint that opens, and forgets each that closes.
        arrived: called with a group when messages that are visible to it were committed.
        options: what applies to a group where nothing was set for it.
        ledger: is charged for each group.
    """

    def __init__(
        self,
        log: CommitLog,
        queues: Queues,
        deadlines: Deadlines,
        arrived: Callable[[ConsumerGroup], None],
        options: PopOptions,
        ledger: Ledger,
    ) -> None:
        self._log = log
        self._queues = queues
        queues.on_gap = self._groups_go_back
        self._damages = DamagedRanges()
        self._groups = GroupTable(queues, self._damages, arrived, options)
        self._checkpoints = CheckpointTable(deadlines, self._groups.by_id, self._damages)
        self.dead_letters = DeadLetterTable()
        self._group_changes = GroupChanges(
            self._groups, self._checkpoints, self.dead_letters, self._damages, queues, options, ledger
        )
        self._delivery_changes = DeliveryChanges(self._groups, self._checkpoints, self.dead_letters, self._damages, queues)
        self.groups = self._groups.by_name
        """Groups by name and filter."""
        self.groups_by_id = self._groups.by_id
        self.checkpoints = self._checkpoints.open
        """Checkpoints with open deliveries, by position."""
        self.by_keeper = self._checkpoints.by_keeper
        """Positions of the open checkpoints whose deliveries stay with devices, by keeper."""
        self.closed = self._checkpoints.closed
        """The last checkpoints that were closed, without their entries."""

    def let_wait(self, checkpoint: Checkpoint) -> None:
        """Note that the open deliveries of a checkpoint wait for their back-off, as `CheckpointTable.let_wait`."""
        self._checkpoints.let_wait(checkpoint)

    @property
    def next_id(self) -> int:
        """Id of the next group that is created."""
        return self._groups.next_id

    @property
    def mended(self) -> int:
        """Number of known damaged ranges of the log. Checkpoint records that state a cursor state this number with it."""
        return len(self._damages)

    def forget(self, letter: DeadLetter) -> None:
        """Forget a dead letter whose message retention has dropped.

        No record says so. After the next start the dead letter may be known again, until retention passes it once more.
        """
        if self.dead_letters.get(letter.key) is None:
            return  # it was redriven meanwhile
        self.dead_letters.remove(letter.key)
        group = self.groups_by_id.get(letter.group_id)
        if group is not None:
            group.dead_letter_count -= 1
            self._groups.changed.add(group.id)

    def forget_redriven(self, group: ConsumerGroup, position: int) -> None:
        """Forget that a group has got a message back from its dead letters, because retention has dropped the message."""
        if not group.is_deleted:
            group.redriven.remove(position)
            self._groups.changed.add(group.id)

    # --- the part of the store --------------------------------------------------------------------------------------

    def applies(self) -> Mapping[Kind, Apply]:
        return {
            **self._group_changes.applies(),
            **self._delivery_changes.applies(),
            Kind.DAMAGED: self._apply_damaged,
            Kind.CLOCK_STEPPED: self._apply_stepped,
        }

    def _apply_stepped(self, record: Record) -> None:
        self._checkpoints.move_deadlines(step_of(record))

    def _apply_damaged(self, record: Record) -> None:
        if not self._damages:
            for group in self.groups_by_id.values():
                group.expected = group.cursor
            self._groups.changed.update(self.groups_by_id)
        self._damages.add(record.position, record.position + record.size)

    def _groups_go_back(self, queue: LightQueue, offset: int, position: int) -> None:
        """Let the groups of a queue that have got further than `offset` go back there: later messages have lower offsets now.

        They get messages again, but miss none. No record says so. After the next start they may go back once more. If the
        damage was known when the log was replayed, their cursors take it into account already (`pop.core.damages`).
        """
        if self._damages.covers(position):
            return
        for group in self.groups_by_id.values():
            if group.queue is queue and group.cursor > offset:
                logger.warning(
                    "group.set_back",
                    group=group.name,
                    filter=group.filter,
                    offset=offset,
                    was=group.cursor,
                    why="the log has been damaged there since the group read it; it gets what follows a second time",
                )
                group.cursor = group.scanned = group.expected = offset
                group.ahead = (0, b"")
                group.set_back += 1
                self._groups.changed.add(group.id)

    def live(self, before: int) -> Iterator[tuple[int, int]]:
        """Yield the messages that groups still need: in flight, parked, waiting for a retry, or dead letters.

        Dead letters are kept for one more retention period. If a message was older than that when it failed, the dead letter
        lives as long as a message that was published then.
        """
        # This is noted before the first pause: a message in flight may be in the retry queue when its turn comes.
        in_flight = [(checkpoint, checkpoint.open) for checkpoint in self.checkpoints.values()]
        retries = [(group.retry, group.retry_cursor) for group in self.groups_by_id.values()]
        orders = [group.order for group in self.groups_by_id.values() if group.order is not None]
        parked = [found for order in orders for found in order.parked_messages()]
        names = {group.name for group in self.groups_by_id.values()}
        yield from (found for found in parked if found[0] < before)
        for checkpoint, open_bits in in_flight:
            for index, entry in enumerate(checkpoint.entries()):
                if open_bits >> index & 1 and entry.position < before:
                    yield entry.position, entry.size
        for queue, cursor in retries:
            yield from _entries_between(queue, cursor, 0, before)
        for name in names:
            dead_letters = self._queues.find(DEAD_LETTERS + name)
            if dead_letters is not None:
                yield from _entries_between(dead_letters, 0, self._log.start, before)
        stays_from_ms = self._log.stored_ms(before)
        for letter in self.dead_letters.before(self._log.start) if stays_from_ms else ():
            if letter.failed_ms >= stays_from_ms:
                yield letter.position, letter.size

    def load(self, index: Index) -> None:
        self.dead_letters.load(index)
        self._groups.load(index)
        self._checkpoints.load(index)

    def save(self, batch: Batch) -> None:
        self._groups.save(batch)
        self.dead_letters.save(batch)
        self._checkpoints.save(batch)


def _entries_between(queue: LightQueue, offset: int, first: int, before: int) -> Iterator[tuple[int, int]]:
    """Yield position and size of a queue's entries from `offset` on whose position is at least `first` and below `before`."""
    while True:
        found, entries = queue.read_from(offset, ENTRIES_PER_READ)
        if not entries:
            return
        for position, size, _ in ENTRY.iter_unpack(entries):
            if first <= position < before:
                yield position, size
        offset = found + len(entries) // ENTRY_BYTES
