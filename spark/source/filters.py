"""The filters of a query that the headers of records answer, so that other records are not decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
from pyspark.sql.datasource import (
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)

from penstock.spark.records import Array, Records
from penstock.spark.source.rows import KIND_NAMES

INT64_MAX = 2**63 - 1

_BOUNDS = {"position": "position", "at_ms": "ms", "time": "ms"}
"""Columns whose bounds a filter may set, and what they bound."""


@dataclass(slots=True)
class RecordFilter:
    """Which records a query wants. Bounds are inclusive. None for `kinds` means all kinds."""

    position_min: int = 0
    position_max: int = INT64_MAX
    ms_min: int = -INT64_MAX
    ms_max: int = INT64_MAX
    kinds: frozenset[int] | None = None

    def mask(self, records: Records) -> Array:
        """Return which records pass."""
        ms = records.header["store_ms"]
        mask = (ms >= self.ms_min) & (ms <= self.ms_max)
        mask &= (records.position >= self.position_min) & (records.position <= self.position_max)
        if self.kinds is not None:
            mask &= np.isin(records.header["kind"], list(self.kinds))
        return np.asarray(mask)

    def narrow(self, what: str, low: int, high: int) -> None:
        """Also require that "position" or "ms" is from `low` to `high`."""
        setattr(self, f"{what}_min", max(getattr(self, f"{what}_min"), low))
        setattr(self, f"{what}_max", min(getattr(self, f"{what}_max"), high))

    def keep(self, kinds: Iterable[int]) -> None:
        """Also require one of these kinds."""
        self.kinds = frozenset(kinds) if self.kinds is None else self.kinds & frozenset(kinds)

    def accept(self, wanted: Filter) -> bool:
        """Add a filter of Spark. Return False, with nothing changed, if this can't express all of it."""
        attribute: tuple[str, ...] = getattr(wanted, "attribute", ())
        if attribute == ("kind",):
            return self._accept_kinds(wanted)
        name = attribute[0] if len(attribute) == 1 else ""
        if name not in _BOUNDS:
            return False
        if isinstance(wanted, IsNotNull):
            return True
        low_high = _range(wanted, is_time=name == "time")
        if low_high is not None:
            self.narrow(_BOUNDS[name], *low_high)
        return low_high is not None

    def _accept_kinds(self, wanted: Filter) -> bool:
        match wanted:
            case IsNotNull():
                pass
            case EqualTo(value=str(name)):
                self.keep(number for number, known in enumerate(KIND_NAMES) if known == name)
            case In(value=names):
                self.keep(number for number, known in enumerate(KIND_NAMES) if known in names)
            case _:
                return False
        return True


def _range(wanted: Filter, *, is_time: bool) -> tuple[int, int] | None:
    """Return the lowest and the highest number that pass, times in ms; None if a filter is not about a range."""
    value: Any = getattr(wanted, "value", None)
    if is_time:
        if not isinstance(value, datetime):
            return None
        microseconds = round((value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp() * 1_000_000)
        below, above = (microseconds - 1) // 1000, -(-(microseconds + 1) // 1000)
        at_most, at_least = microseconds // 1000, -(-microseconds // 1000)
    elif type(value) is int:
        below, above, at_most, at_least = value - 1, value + 1, value, value
    else:
        return None
    match wanted:
        case EqualTo():
            return at_least, at_most
        case GreaterThan():
            return above, INT64_MAX
        case GreaterThanOrEqual():
            return at_least, INT64_MAX
        case LessThan():
            return -INT64_MAX, below
        case LessThanOrEqual():
            return -INT64_MAX, at_most
    return None


class FilterIntake:
    """Takes the filters of a query, in the place of a reader's method `pushFilters`.

    A session passes filters only if `spark.sql.python.filterPushdown.enabled` is true. In other sessions Spark refuses a reader
    that overrides the method, so a reader that did would only work where somebody has changed the setting. Spark looks at
    `__func__` to find out, and calls the attribute where the session passes filters.
    """

    __func__ = staticmethod(DataSourceReader.pushFilters)

    def __init__(self, accept: Callable[[Filter], bool]) -> None:
        self._accept = accept

    def __call__(self, filters: list[Filter]) -> list[Filter]:
        """Take the filters that the source answers, and return the others."""
        return [each for each in filters if not self._accept(each)]
