"""The state of the writer between two segments: a file beside the tables, which a writer that was killed goes on from."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from penstock.spark.errors import TablesInvalid
from penstock.spark.parquet.chains import STAGE_DTYPE, UNKNOWN
from penstock.spark.parquet.files import SUFFIX, TableFiles, replacing
from penstock.spark.records import Array

FILE = "state.npz"

VERSION = 2
"""Version of the tables and of this file. It changes with the columns, so that a folder never holds files of two kinds."""


def _no_ranges() -> Array:
    return np.empty((0, 2), np.int64)


@dataclass(frozen=True, slots=True)
class WriterState:
    """What the tables hold, and what the next segment needs of those before it."""

    position: int = UNKNOWN
    """Position after the last segment that is in the tables; `UNKNOWN` before the first one."""
    anchor: int = UNKNOWN
    """As `rows.SegmentRows.anchor`, after that segment."""
    covered: Array = field(default_factory=_no_ranges)
    """Ranges of the log that are in the tables, as pairs of first position and position after the last."""
    expiring: Array = field(default_factory=_no_ranges)
    """The segments that have messages which expire, likewise."""
    copied: Array = field(default_factory=lambda: np.empty(0, np.int64))
    """Positions of the messages that are in the tables as copies, ascending."""
    open: Array = field(default_factory=lambda: np.empty(0, STAGE_DTYPE))
    """The stages that are open, by key."""
    queued: Array = field(default_factory=lambda: np.empty(0, STAGE_DTYPE))
    """The messages that wait for their next delivery, by group and message."""
    group_names: dict[int, str] = field(default_factory=dict)
    """Name of each group of `open` and `queued`."""


def is_within(ranges: Array, positions: Array) -> Array:
    """Return which positions are in one of the ranges, which ascend."""
    at = np.searchsorted(ranges[:, 0], positions, side="right") - 1
    stops = np.append(ranges[:, 1], np.iinfo(np.int64).min)  # index -1 is for positions before all ranges
    return np.asarray(positions < stops[at])


def extended(ranges: Array, base: int, stop: int) -> Array:
    """Return the ranges with one more, which is after all of them. It joins the last one if there is no gap."""
    if len(ranges) and ranges[-1, 1] == base:
        joined = ranges.copy()
        joined[-1, 1] = stop
        return joined
    return np.concatenate([ranges, [[base, stop]]])


def load_state(directory: Path) -> WriterState:
    """Return the state of the tables in a directory, or that of no tables.

    Raises:
        TablesInvalid: there are tables without a state, or the state is damaged or of another version.
    """
    path = directory / FILE
    again = f"Delete {directory}, and run `penstock tables backfill` to make the tables of what the log still has."
    if not path.exists():
        if any(directory.rglob(f"*{SUFFIX}")) and not _is_first(directory):
            raise TablesInvalid(f"{directory} holds tables, but its file {FILE} is missing. {again}")
        return WriterState()
    try:
        with np.load(path, allow_pickle=False) as saved:
            version, position, anchor = saved["numbers"].tolist()
            if version != VERSION:
                raise TablesInvalid(f"{directory} has version {version} of the tables, but this is version {VERSION}. {again}")
            return WriterState(
                position,
                anchor,
                saved["covered"],
                saved["expiring"],
                saved["copied"],
                saved["open"].astype(STAGE_DTYPE),
                saved["queued"].astype(STAGE_DTYPE),
                dict(zip(saved["group_ids"].tolist(), saved["group_names"].tolist(), strict=True)),
            )
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise TablesInvalid(f"{path} is damaged ({error}). {again}") from error


def _is_first(directory: Path) -> bool:
    """Return whether the files are of one segment, which a writer that was killed had not completed."""
    return len({path.name for path in directory.rglob(f"*{SUFFIX}")}) == 1


def save_state(files: TableFiles, directory: Path, state: WriterState) -> None:
    """Replace the state. This completes the segment before `state.position`."""
    with replacing(files, directory / FILE) as file:
        np.savez(
            file,
            numbers=np.array([VERSION, state.position, state.anchor]),
            covered=state.covered,
            expiring=state.expiring,
            copied=state.copied,
            open=state.open,
            queued=state.queued,
            group_ids=np.array(list(state.group_names), np.int64),
            group_names=np.array(list(state.group_names.values()), np.str_),
        )
