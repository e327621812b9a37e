"""What was open at a seal of the log, so that a reader can begin there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.spark.parquet.chains import STAGE_DTYPE, STAGES, UNKNOWN
from penstock.spark.parquet.files import DIRECTORY, STOP_KEY, segment_files
from penstock.spark.parquet.schema import OPEN, Stage
from penstock.spark.parquet.snapshot import open_state
from penstock.spark.parquet.state import WriterState, load_state
from penstock.spark.records import Array


def state_before(data_dir: Path, position: int, log_start: int) -> WriterState:
    """Return the state of a writer at the last place up to a position where it is known what was open.

    It is the end of a file of the table `open`, and the state has this position. If there is none, it is the beginning of the
    log, of which a snapshot tells if retention has trimmed the log, or nothing does. Then the state has no position.

    Args:
        data_dir: of the node.
        position: in the log.
        log_start: position at which the log begins.

    Raises:
        TablesInvalid: a file is damaged.
        LogCorrupt: the snapshot is damaged.
    """
    limit = max(position, log_start)
    written = load_state(data_dir / DIRECTORY)
    for part in reversed(segment_files(data_dir / DIRECTORY, limit)):
        path = part.path(OPEN.name)
        stop = int(pq.read_metadata(path).metadata[STOP_KEY])
        if stop < log_start:
            break
        if stop <= limit:
            return replace(_state_of(path, stop), covered=written.covered, expiring=written.expiring)
    known, _ = open_state(data_dir, log_start) if log_start else (None, "")
    if known is None:
        return WriterState()
    return WriterState(open=known.open, queued=known.queued, group_names=known.group_names)


def _state_of(path: Path, stop: int) -> WriterState:
    """Return the state at the end of a segment, from its file of the table `open`."""
    table = pq.ParquetFile(path).read()
    is_queued = pc.equal(table["stage"], Stage.QUEUED)
    names = dict(zip(table["group_id"].to_pylist(), table["group_name"].to_pylist(), strict=True))
    open_, queued = _stages(table.filter(pc.invert(is_queued))), _stages(table.filter(is_queued))
    return WriterState(
        position=stop,
        open=open_[np.argsort(open_["key"])],
        queued=queued[np.lexsort((queued["message_position"], queued["group_id"]))],
        group_names=names,
    )


def _stages(table: Any) -> Array:
    """Return rows of the table `open` as an array of `STAGE_DTYPE`."""
    stages = np.empty(len(table), STAGE_DTYPE)
    for name in STAGE_DTYPE.names or ():
        if name == "stage":
            column = pc.index_in(table["stage"], pa.array(STAGES, pa.string()))
        elif name == "source":
            column = table["retried"].cast(pa.int32())
        else:
            column = pc.fill_null(table[name], UNKNOWN)
        stages[name] = column.to_numpy()
    return stages
