"""Brings the rows of delayed messages of the earlier format of the index to the present one."""

from __future__ import annotations

import numpy as np

from penstock.store.index.index import Index
from penstock.timer.buckets import BUCKET_KEY, COUNT_VALUE, COUNTS, MINUTE_KEY, RECALLED_COUNTS
from penstock.timer.storedtimers import StoredTimers


def upgrade_from_17(index: Index) -> None:
    """Count the messages of buckets by minutes and hours, and the recalled ones by minute, as format 18 has them.

    Format 17 has one number for each bucket, and none for recalled messages. The result is the same if a crash ends this in
    the middle and a start does it again.
    """
    timers, batch = StoredTimers(index), index.batch()
    for (width, bucket), (counts, _) in timers.counts().items():
        key = BUCKET_KEY.pack(COUNTS, width, bucket)
        if counts:
            batch.put(key, np.array(counts, dtype="<u4").tobytes())
        else:
            batch.delete(key)
    for minute, (recalled, _) in timers.recalled_counts().items():
        if recalled:
            batch.put(MINUTE_KEY.pack(RECALLED_COUNTS, minute), COUNT_VALUE.pack(recalled))
    index.write(batch)
