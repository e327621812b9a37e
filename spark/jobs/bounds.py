"""The bounds of the parameters of jobs."""

from __future__ import annotations

from penstock.spark.errors import ReadOptionInvalid


def check_bounds(least: float, **values: float | None) -> None:
    """Check values by their names. None is always valid.

    Raises:
        ReadOptionInvalid: a value is below `least`.
    """
    for name, value in values.items():
        if value is not None and not value >= least:
            raise ReadOptionInvalid(f"{name} is {value}, but must be at least {least}.")
