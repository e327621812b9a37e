"""How far the tables have the log, for the node, which does not load pyarrow."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from penstock.spark.parquet.files import DIRECTORY

STATE_FILE = "state.npz"
"""The file of `parquet.state`."""

NOTHING = -1
"""Stands for the position of tables that have nothing."""


def written_until(data_dir: Path) -> int:
    """Return the position after the last segment that is in the tables; `NOTHING` where no state tells it.

    A state that is damaged is told by the writer, which reads all of it.
    """
    try:
        with np.load(data_dir / DIRECTORY / STATE_FILE, allow_pickle=False) as state:
            _, position, *_ = state["numbers"].tolist()
            return int(position)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return NOTHING
