"""Bounds of the internals of a node that runs as a process: a variable has them, as no option of a node does."""

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


def variable_of(**bounds: Any) -> dict[str, str]:
    """Return the variable for bounds by name, in which `__` stands for a dot: `store__ballast_bytes=0`."""
    return {VARIABLE: json.dumps({name.replace("__", "."): value for name, value in bounds.items()})}


def set_bounds() -> None:
    """Let this process load each configuration with the bounds of the variable, if there is one."""
    bounds: dict[str, Any] = json.loads(os.environ.get(VARIABLE, "{}"))
    load_config = config.load_config

    def load_with_bounds(
        path: Path | None = None,
        overrides: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Config:
        loaded = load_config(path, overrides, environment)
        for name, value in bounds.items():
            section, _, field = name.rpartition(".")
            loaded = replace(loaded, **{section: replace(attrgetter(section)(loaded), **{field: value})})
        return loaded

    if bounds:
        config.load_config = load_with_bounds
