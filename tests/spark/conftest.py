"""One Spark session for all tests of this folder, because it takes seconds to start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


TIMEOUT_S = 600
"""Spark starts in seconds, or in minutes beside other work. A timeout during a call to Spark would end the session, and so all
other tests."""


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def java() -> None:
    """Skip where there is no Java. Tests that start a Spark of their own use it."""
    from penstock.spark.errors import JavaMissing
    from penstock.spark.java import java_version

    try:
        java_version()
    except JavaMissing as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    pytest.importorskip("pyspark", reason="Spark's part needs the extra `spark`")
    from penstock.spark.errors import JavaMissing
    from penstock.spark.session import open_session

    if "PYTEST_XDIST_WORKER" in os.environ:  # tests/conftest.py runs all of these tests in one process
        (tmp_path_factory.getbasetemp().parent / "spark").touch(exist_ok=False)
    try:
        session = open_session("local[2]", "penstock tests")
    except JavaMissing as error:
        pytest.skip(str(error))
    yield session
    session.stop()
