"""The options of the Parquet tables."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import structlog

from penstock.install import install_hint
from penstock.node.errors import ConfigError
from penstock.store.options import CENTURY_MS, DAY_MS, GIB, MINUTE_MS, bound, option

logger = structlog.get_logger("tables")


@dataclass(frozen=True, slots=True)
class TablesOptions:
    """The section `[tables]`."""

    enabled: Literal["auto", "on", "off"] = option(
        "auto",
        'Whether the node writes sealed segments as Parquet tables. "auto": where pyarrow is installed (the extra `tables`).',
    )
    seal_ms: int = option(
        15 * MINUTE_MS,
        "Time after which the open segment is sealed for the tables, so that those of a quiet node are not behind for longer. "
        "0 waits until it is full.",
        minimum=0,
        maximum=30 * DAY_MS,
    )
    retention_ms: int = option(
        0,
        "Time for which the tables keep rows at least. 0 keeps them for ever.",
        minimum=0,
        maximum=CENTURY_MS,
    )
    lag_bytes_max: int = bound(
        4 * GIB,
        "Sealed segments that the tables lack, up to which retention of the log waits for them: their files must not fill the "
        "disk when the writer is stuck. Beyond it `damages` has a row for each gap.",
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
