"""The options of timers and delayed messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from penstock.store.options import DAY_MS, KIB, MIB, bound, option

YEAR_MS = 365 * DAY_MS
"""A year without a leap day."""

DELAYED_BYTES: Final = 4 * KIB
"""Average size of the records of delayed messages, if as many are pending as may be."""

SCHEDULE_BYTES: Final = 6 * KIB
"""Average size of a schedule, if there are as many as may be."""

KEYED_SHARE: Final = 10
"""Which part of the delayed messages may have keys: a tenth. Keys are in memory, messages are not."""

ROOM_BYTES: Final = 64 * MIB
"""Room that a small number of large messages or schedules has anyhow."""

ROOM_KEYS: Final = 1_000
"""Number of keys that may be pending anyhow."""


@dataclass(frozen=True, slots=True)
class TimerOptions:
    """The section `[timer]`, and the bounds of timers."""

    pending_max: int = option(
        1_000_000,
        "Maximum number of pending delayed messages. Their records have 4 KiB on average at most, and a tenth may have keys.",
        minimum=1,
        maximum=1_000_000_000,
    )
    schedules_max: int = option(
        10_000,
        "Maximum number of schedules, those that have ended included. They have 6 KiB on average at most.",
        minimum=0,
        maximum=1_000_000,
    )
    delay_ms_max: int = bound(10 * YEAR_MS, "Delay of a message. A longer one is a mistake in the unit of a time.")
    tick_ms: int = bound(10, "Slot of the timer wheel. A shorter one wakes the loop more often than anybody notices.")
    fire_max: int = bound(1024, "Timers that fire in one turn of the event loop, so that other work runs in between.")
    schedule_every_ms_min: int = bound(100, "Least time between occurrences: one schedule must not keep the loop busy.")
    pending_bytes_max: int = bound(0, "Bytes of pending messages, whose records outlive retention. 0: see `DELAYED_BYTES`.")
    keys_max: int = bound(0, "Pending messages that have a key, each of them in memory. 0: see `KEYED_SHARE`.")
    schedules_bytes_max: int = bound(0, "Bytes of all schedules, which are in memory. 0: see `SCHEDULE_BYTES`.")

    def __post_init__(self) -> None:
        """Derive the bounds that are 0 from the options."""
        for name, derived in (
            ("pending_bytes_max", max(self.pending_max * DELAYED_BYTES, ROOM_BYTES)),
            ("keys_max", max(self.pending_max // KEYED_SHARE, ROOM_KEYS)),
            ("schedules_bytes_max", max(self.schedules_max * SCHEDULE_BYTES, ROOM_BYTES)),
        ):
            if not getattr(self, name):
                object.__setattr__(self, name, derived)
