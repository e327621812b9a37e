"""The options of the Parquet tables."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import structlog

from penstock.install import install_hint
from penstock.node.errors import ConfigError
from penstock.store.options import CENTURY_MS, DAY_MS, GIB, MINUTE_MS, option

logger = structlog.get_logger("tables")


@dataclass(frozen=True, slots=True)
class TablesOptions:
    """The section `[tables]`."""

    enabled: Literal["auto", "on", "off"] = option(
        "auto",
        'Whether the node has each sealed segment written as Parquet tables. "auto": where pyarrow is installed (the extra '
        '`tables`). With "on" the node does not start without it.',
    )
    seal_ms: int = option(
        15 * MINUTE_MS,
        "Time after which the open segment is sealed for the tables, counted from its first record. It is the longest "
        "time for which the tables of a quiet node are behind. 0 means that segments are sealed when they are full, or old "
        "enough for store.retention.",
        minimum=0,
        maximum=30 * DAY_MS,
    )
    retention_ms: int = option(
        0,
        "Time for which the tables keep rows at least. The files of a segment are deleted together, so some rows are "
        "kept longer. 0 means that nothing is deleted.",
        minimum=0,
        maximum=CENTURY_MS,
    )
    lag_bytes_max: int = option(
        4 * GIB,
        "Bytes of sealed segments that the tables lack, up to which retention of the log waits for them. Beyond it retention "
        "deletes segments that the tables never get, and `damages` has a row for each gap.",
        minimum=0,
    )


def are_on(options: TablesOptions) -> bool:
    """Return whether a node writes tables. Log why not. Raises ConfigError if it must and can't."""
    if options.enabled == "off":
        logger.info("tables.off", why='tables.enabled is "off"')
        return False
    if find_spec("pyarrow") is not None:
        return True
    hint = install_hint("tables")
    if options.enabled == "on":
        raise ConfigError(f'tables.enabled is "on", but pyarrow is not installed: {hint}')
    logger.info("tables.off", why=f"pyarrow is not installed: {hint}")
    return False
