"""Steers the node's clock towards the machine's time of day, without trusting a time of day that jumps.

The node's time goes on by the time since boot (`store.clock`). Once a second it is compared with the time of day:

- A difference of at most `SLEW_MS_MAX` is slewed: the clock runs a tenth faster or slower until it is gone.
- A larger one is a *jump*. The node's time goes on undisturbed, and the jump is unconfirmed. When the time of day returns, the
  jump is over, and nothing has happened.
- A jump is confirmed when it has lasted for `ClockOptions.confirm_ms`, or when an operator says so. Then a forward jump is
  stepped: a record of kind CLOCK_STEPPED says so (`store.clocksteps`). A backward jump is approached by running a tenth slower,
  because the node's time never goes back and never stands still.

While a jump is unconfirmed, retention by age waits, because it can't be undone.

A start goes on from the last known time. On the same boot of the machine the time since boot tells exactly how much time has
passed, so a restart changes nothing. On another boot only the time of day can tell. If it is before the last known time, or
more than a day (`ClockOptions.gap_ms_max`) after it, the node goes on from the last known time, and the difference is an
unconfirmed jump.

What a start must know is in the small file `clock`:

    offset  type  meaning
    0       u32   CRC-32 of everything after it
    4       36    boot id of the machine; zeros if it has none
    40      i64   by how much the node's time was ahead of the boot time, in ns
    48      i64   the node's time, in ms since 1970
    56      i64   when the time of day last agreed with the node's time, in ms since 1970 (node's time)
    64      u64   end of the log at that time
    72      i64   what a confirmed jump back has set the time of day to, as ns ahead of the boot time; -2**63 for none
    80      i64   what an unconfirmed jump has set it to, likewise
    88      i64   boot time at which that jump was noticed, in ns

The node writes it when one of these changes, and else once a minute, without a sync. After a crash of the machine, only the two
times in ms mean anything, and an older file is as good: the log's last record tells a later time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from struct import Struct
from typing import NamedTuple
from zlib import crc32

import structlog

from penstock.store.clock import MS_NS, SLEW_DIVISOR, Instant, SteerableClock
from penstock.store.errors import ClockDiffers
from penstock.store.files import SYSTEM_FILES, File, Files, Mode, read_file
from penstock.store.options import MINUTE_MS, SECOND_MS, ClockOptions

logger = structlog.get_logger("store")

FILE = "clock"

SLEW_MS_MAX = 5 * SECOND_MS
"""Largest difference in ms that is slewed without a question, which takes at most ten times as long. A larger one is a jump."""

SLEW_NS_MIN = 2 * MS_NS
"""Smallest difference that is slewed. Two clocks that are read one after the other can't tell a smaller one."""

NOTE_MS = MINUTE_MS
"""Ms of the node's time after which the file is written although nothing else has changed."""

SECOND_NS = 1000 * MS_NS

_CRC = Struct("<I")
_BODY = Struct("<36sqqqQqqq")
_NONE = -(2**63)


class Note(NamedTuple):
    """The content of the file `clock`."""

    boot: bytes
    ahead_ns: int
    now_ms: int
    agreed_ms: int
    agreed_end: int
    followed_ns: int
    jump_ns: int
    jump_since_ns: int


class Jump(NamedTuple):
    """A difference between the time of day and the node's time that is not confirmed."""

    wall_ns: int
    """By how much the time of day is ahead of the boot time."""
    since_ns: int
    """Boot time at which the jump was noticed."""


class Timekeeping:
    """Steers the clock of a store.

    Parameters:
        clock: what is steered.
        data_dir: of the node. The file `clock` is in it, or will be.
        options: when a jump is confirmed.
        log_end: returns the end of the log.
        record_step: appends the record of a step, given the begin of the window in ms, the end of the log at that time, and
            the step in ms. Returns False, and does nothing, when the disk has no room for it.
        files: has the data directory.
    """

    def __init__(
        self,
        clock: SteerableClock,
        data_dir: Path,
        options: ClockOptions,
        log_end: Callable[[], int],
        record_step: Callable[[int, int, int], bool],
        *,
        files: Files = SYSTEM_FILES,
    ) -> None:
        self._clock = clock
        self._path = data_dir / FILE
        self._options = options
        self._files = files
        self._file: File | None = None
        """Stays open from the first write on, so that no write needs a free descriptor."""
        self._log_end = log_end
        self._record_step = record_step
        self._agreed_ms = self._agreed_end = 0
        self._followed_ns: int | None = None
        """What a confirmed jump back has set the time of day to, while the clock approaches it."""
        self._jump: Jump | None = None
        self._noted: Note | None = None
        self._is_steering = False
        self.jumps = 0
        """Jumps of the time of day since the start."""
        self.steps = 0
        """Jumps that were confirmed and stepped since the start."""

    # --- what others ask --------------------------------------------------------------------------------------------

    @property
    def is_confirmed(self) -> bool:
        """Whether the node's time can be relied on: there is no jump of the time of day that nobody has confirmed."""
        return self._jump is None

    @property
    def offset_ms(self) -> int:
        """By how much the time of day is ahead of the node's time, in ms."""
        found = self._clock.read()
        return (found.wall_ns - found.now_ns) // MS_NS

    @property
    def is_slowed(self) -> bool:
        """Whether the clock runs slower because a jump back was confirmed."""
        return self._followed_ns is not None

    @property
    def confirmed_in_ms(self) -> int:
        """In how many ms the jump is confirmed if it lasts; 0 if there is none."""
        if self._jump is None:
            return 0
        return max(self._options.confirm_ms - (self._clock.read().boot_ns - self._jump.since_ns) // MS_NS, 0)

    # --- steering ---------------------------------------------------------------------------------------------------

    def begin(self, last_ms: int) -> None:
        """Go on from the last known time. The store calls it when it has recovered, before anything is stored.

        It confirms nothing and writes nothing, because the store may have been opened only to be read.

        Args:
            last_ms: when the last record of the log was stored, in ms since 1970; 0 if the log has none.
        """
        note = self._read()
        found = self._clock.read()
        if note is not None and self._is_of_this_boot(note, found):
            self._go_on(note, last_ms)
            return
        last_ms = max(last_ms, note.now_ms if note is not None else 0)
        gap_ms = found.wall_ns // MS_NS - last_ms
        if not last_ms or 0 <= gap_ms <= self._options.gap_ms_max:
            self._clock.step(found.wall_ns - found.now_ns)
            self._agreed_ms, self._agreed_end = found.wall_ns // MS_NS, self._log_end()
            return
        self._clock.step((last_ms + 1) * MS_NS - found.now_ns)  # no record before this start has the time at which it begins
        self._agreed_ms, self._agreed_end = last_ms + 1, self._log_end()
        if note is not None and note.jump_ns != _NONE:  # the machine has booted while a jump was unconfirmed
            self._agreed_ms = min(self._agreed_ms, note.agreed_ms)
            self._agreed_end = min(self._agreed_end, note.agreed_end)
        self._compare("clock.behind_log" if gap_ms < 0 else "clock.ahead_of_log")

    def _is_of_this_boot(self, note: Note, found: Instant) -> bool:
        """Return whether the boot time has gone on since the file was written. Then it tells how much time has passed."""
        is_same = note.boot == self._clock.boot and bool(note.boot.strip(b"\0"))
        return is_same and (found.boot_ns + note.ahead_ns) // MS_NS >= note.now_ms

    def _go_on(self, note: Note, last_ms: int) -> None:
        found = self._clock.read()
        self._clock.step(max(found.boot_ns + note.ahead_ns, last_ms * MS_NS) - found.now_ns)
        self._followed_ns = None if note.followed_ns == _NONE else note.followed_ns
        if note.jump_ns == _NONE:
            self._agreed_ms, self._agreed_end = max(note.agreed_ms, last_ms), self._log_end()
        else:
            self._agreed_ms = note.agreed_ms
            self._agreed_end = min(note.agreed_end, self._log_end())  # what was not written before a kill is gone
            self._jump = Jump(note.jump_ns, note.jump_since_ns)
            logger.warning("clock.jump", **self._described(self._clock.read()), since="before this start")
        self._compare("clock.jump")

    def check(self) -> None:
        """Compare the node's time with the time of day, and steer. Housekeeping calls it once a second."""
        self._is_steering = True
        found = self._compare("clock.jump")
        if self._jump is not None and found.boot_ns - self._jump.since_ns >= self._options.confirm_ms * MS_NS:
            self._confirm(found, why="it has lasted for ten minutes")
        self._note()

    def _compare(self, event: str) -> Instant:
        """Begin or end a jump, or slew; return the times that were compared.

        Args:
            event: what a jump that begins is called in the log.
        """
        found = self._clock.read()
        wall_ns, difference_ns = found.wall_ns - found.boot_ns, found.wall_ns - found.now_ns
        agrees = abs(difference_ns) <= SLEW_MS_MAX * MS_NS
        if agrees or (self._followed_ns is not None and abs(wall_ns - self._followed_ns) <= SLEW_MS_MAX * MS_NS):
            self._end_jump(found)
            if agrees:
                self._followed_ns = None
            self._agreed_ms, self._agreed_end = found.now_ns // MS_NS, self._log_end()
            self._clock.slew(difference_ns if abs(difference_ns) >= SLEW_NS_MIN else 0)
        elif self._jump is None or abs(wall_ns - self._jump.wall_ns) > SLEW_MS_MAX * MS_NS:
            self.jumps += 1
            self._jump = Jump(wall_ns, found.boot_ns)
            self._clock.slew(0)
            logger.warning(event, **self._described(found))
        return found

    def accept(self, offset_ms: int) -> None:
        """Confirm the jump at once, as an operator has said.

        Args:
            offset_ms: by how much the time of day was ahead of the node's time when the operator looked.

        Raises:
            ClockDiffers: there is no unconfirmed jump, or the offset is another one meanwhile.
        """
        self.check()
        found = self._clock.read()
        present_ms = (found.wall_ns - found.now_ns) // MS_NS
        if self._jump is None:
            raise ClockDiffers(f"there is nothing to accept: the time of day is {_amount(present_ms)} the node's time")
        if abs(present_ms - offset_ms) > SLEW_MS_MAX:
            raise ClockDiffers(
                f"the time of day is {_amount(present_ms)} the node's time, but {_amount(offset_ms)} it was to be accepted; "
                "look again with `penstock clock`"
            )
        if not self._confirm(found, why="an operator has accepted it"):
            raise ClockDiffers("the disk is too full for the record that a step needs; free some space and try again")
        self._note()

    def _described(self, found: Instant) -> dict[str, object]:
        return {
            "ahead_s": _seconds(found.wall_ns - found.now_ns),
            "confirmed_in_s": self.confirmed_in_ms // SECOND_MS,
            "what": "the time of day does not fit the node's time, which goes on by itself; no message expires from the log by "
            "age until this is settled; set the machine's time right, or run `penstock clock accept` if it is right",
        }

    def _end_jump(self, found: Instant) -> None:
        if self._jump is not None:
            lasted_ns = found.boot_ns - self._jump.since_ns
            self._jump = None
            logger.warning("clock.jump_ended", lasted_s=_seconds(lasted_ns), ahead_s=_seconds(found.wall_ns - found.now_ns))

    def _confirm(self, found: Instant, why: str) -> bool:
        """Take the time of day for right. Return False if the disk has no room for the record of a step; then wait for it."""
        difference_ns = found.wall_ns - found.now_ns
        if difference_ns > 0:
            if not self._record_step(self._agreed_ms, self._agreed_end, difference_ns // MS_NS):
                return False
            self._clock.step(difference_ns // MS_NS * MS_NS)
            self._followed_ns = None
            self.steps += 1
            logger.warning("clock.stepped", by_s=_seconds(difference_ns), why=why)
        else:
            self._followed_ns = found.wall_ns - found.boot_ns
            self._clock.slew(difference_ns)
            takes_s = _seconds(-difference_ns * SLEW_DIVISOR)
            logger.warning("clock.slowed", behind_s=_seconds(-difference_ns), right_in_s=takes_s, why=why)
        self._jump = None
        self._agreed_ms, self._agreed_end = self._clock.now_ms(), self._log_end()
        return True

    # --- the file ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Write what the next start must know, if `check` was ever called, and close the file."""
        if self._is_steering:
            self._noted = None
            self._note()
        self.abandon()

    def abandon(self) -> None:
        """Close the file without writing anything."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read(self) -> Note | None:
        try:
            data = read_file(self._files, self._path)
        except OSError:  # it is missing, or the disk can't read it: the log and the time of day are enough
            return None
        if len(data) != _CRC.size + _BODY.size or crc32(data[_CRC.size :]) != _CRC.unpack_from(data)[0]:
            return None
        return Note(*_BODY.unpack_from(data, _CRC.size))

    def _note(self) -> None:
        """Write the file if the next start would go on in another way without that."""
        found, noted = self._clock.read(), self._noted
        now_ms = found.now_ns // MS_NS
        note = Note(
            self._clock.boot,
            found.now_ns - found.boot_ns,
            now_ms,
            self._agreed_ms,
            self._agreed_end,
            _NONE if self._followed_ns is None else self._followed_ns,
            *((_NONE, 0) if self._jump is None else self._jump),
        )
        if noted is not None and now_ms - noted.now_ms < NOTE_MS and note[5:] == noted[5:] and note.ahead_ns == noted.ahead_ns:
            return
        body = _BODY.pack(*note)
        with suppress(OSError):  # a full or failing disk; without the file a start relies on the log and the time of day
            if self._file is None:
                self._file = self._files.open(self._path, Mode.WRITE)
            self._file.pwrite(_CRC.pack(crc32(body)) + body, 0)
            self._noted = note


def _seconds(ns: int) -> float:
    return round(ns / SECOND_NS, 3)


def _amount(ms: int) -> str:
    return f"{abs(ms) / SECOND_MS:,.1f} s {'ahead of' if ms >= 0 else 'behind'}"
