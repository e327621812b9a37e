"""The options of timers and delayed messages."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.store.options import GIB, KIB, MIB, SECOND_MS, option

YEAR_MS = 31_557_600 * SECOND_MS
"""A Julian year of 365.25 days."""


@dataclass(frozen=True, slots=True)
class TimerOptions:
    """The options of the section `[timer]`."""

    tick_ms: int = option(
        10,
        "Length of a slot of the timer wheel. A timer fires at its due time or up to about this much later.",
        minimum=1,
        maximum=SECOND_MS,
    )
    pending_max: int = option(
        1_000_000,
        "Maximum number of pending delayed messages. Further ones are refused.",
        minimum=1,
        maximum=1_000_000_000,
    )
    pending_bytes_max: int = option(
        4 * GIB,
        "Maximum number of bytes of pending delayed messages. Their records outlive retention. Further ones are refused.",
        minimum=KIB,
        maximum=1024 * GIB,
    )
    delay_ms_max: int = option(
        10 * YEAR_MS,
        "Longest time by which a message can be delayed. Longer delays are refused.",
        minimum=SECOND_MS,
        maximum=100 * YEAR_MS,
    )
    keys_max: int = option(
        100_000,
        "Maximum number of pending delayed messages that have a key. Further ones are refused.",
        minimum=0,
        maximum=10_000_000,
    )
    schedules_max: int = option(
        10_000,
        "Maximum number of schedules, those that have ended included. Further ones are refused.",
        minimum=0,
        maximum=1_000_000,
    )
    schedules_bytes_max: int = option(
        64 * MIB,
        "Maximum number of bytes of all schedules, which are in memory. Further ones are refused.",
        minimum=KIB,
        maximum=16 * GIB,
    )
    schedule_every_ms_min: int = option(
        100,
        "Least time between the occurrences of a schedule that repeats at equal intervals.",
        minimum=1,
        maximum=3_600 * SECOND_MS,
    )
    fire_max: int = option(
        1024,
        "Maximum number of timers that fire in one turn of the event loop. When more are due, other work runs in between.",
        minimum=1,
        maximum=1_000_000,
    )
