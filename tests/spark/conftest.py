"""One Spark session for all tests of Spark's part: it takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


TIMEOUT_S = 600
"""Spark starts in seconds, or in minutes beside other work. A test that is ended in a call to it takes the session, and so all
the others, with it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep Spark's tests in one process, where several run tests: there is one session for all."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("spark"))
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    pytest.importorskip("pyspark", reason="Spark's part needs the extra `spark`")
    from spark.errors import JavaMissing
    from spark.session import open_session

    try:
        session = open_session("local[2]", "millrace tests")
    except JavaMissing as error:
        pytest.skip(str(error))
    yield session
    session.stop()
