"""Bounds of the internals of a node that runs as a process: a variable or a file has them, as no option of a node does."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from penstock.node import config
from penstock.node.config import Config

VARIABLE = "TEST_BOUNDS"
FILE = "bounds.json"
"""Name of the file with bounds, beside the configuration of a node."""


def _encode(bounds: Mapping[str, Any]) -> str:
    return json.dumps({name.replace("__", "."): value for name, value in bounds.items()})


def variable_of(**bounds: Any) -> dict[str, str]:
    """Return the variable for bounds by name, in which `__` stands for a dot: `store__ballast_bytes=0`."""
    return {VARIABLE: _encode(bounds)}


def write_bounds(config: Path, **bounds: Any) -> None:
    """Write bounds, with names as for `variable_of`, for all nodes that load this configuration."""
    config.with_name(FILE).write_text(_encode(bounds))


def set_bounds() -> None:
    """Let this process load each configuration with the bounds of the variable and of the file beside the configuration."""
    bounds: dict[str, Any] = json.loads(os.environ.get(VARIABLE, "{}"))
    load_config = config.load_config

    def load_with_bounds(
        path: Path | None = None,
        overrides: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Config:
        loaded = load_config(path, overrides, environment)
        beside = path.with_name(FILE) if path is not None else None
        of_file = json.loads(beside.read_text()) if beside is not None and beside.exists() else {}
        for name, value in (bounds | of_file).items():
            section, _, field = name.rpartition(".")
            loaded = replace(loaded, **{section: replace(attrgetter(section)(loaded), **{field: value})})
        return loaded

    config.load_config = load_with_bounds
